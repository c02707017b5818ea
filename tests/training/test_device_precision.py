"""`engine.precision: auto`: the choice for each device, its record in the run directory, and warnings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cli_runner import run_cli
from engine_toys import subprocess_environment
from free_ports import reserve_port
from rich.console import Console

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.config.schema import EngineConfig
from tastemaker.report.page import write_report
from tastemaker.training import device_precision
from tastemaker.training.device_precision import (
    choose_for_cpu,
    choose_for_cuda,
    choose_for_mps,
    choose_precision,
    describe_emulation,
    measure_slowdown,
    resolve_for_planning,
    resolve_precision,
)
from tastemaker.training.trainer import run_training

CPU = torch.device("cpu")
SAPPHIRE_RAPIDS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
ZEN_4 = ("avx2", "avx512f", "avx512_bf16")
ICE_LAKE = ("avx2", "avx512f", "avx512_vnni")
TOY = ["sample.every=0", "guard.every=0", "checkpoint.every=1", "batch.prompts=2", "engine.device=cpu"]
NO_OUTPUT = Console(quiet=True)


@pytest.fixture
def amx_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend that this CPU has AMX-BF16 units that are twice as fast as fp32."""
    for name in device_precision.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_precision, "read_cpu", lambda: ("a fast CPU", frozenset(SAPPHIRE_RAPIDS)))
    monkeypatch.setattr(device_precision, "measure_slowdown", lambda device: 0.5)
    return monkeypatch


def emulate(patch: pytest.MonkeyPatch, factor: float = 6.25) -> None:
    """Pretend that this CPU has no bf16 units."""
    patch.setattr(device_precision, "read_cpu", lambda: ("a slow CPU", frozenset(ICE_LAKE)))
    patch.setattr(device_precision, "measure_slowdown", lambda device: factor)


@pytest.mark.parametrize(
    ("capability", "name", "bf16", "compiled", "expected"),
    [
        ((9, 0), "NVIDIA H200", True, False, "bf16"),
        ((8, 0), "NVIDIA A100", True, True, "bf16"),
        ((8, 0), "NVIDIA A100", False, False, "tf32"),
        ((8, 0), "NVIDIA A100", False, True, "fp32"),  # torch.compile refuses tf32
        ((7, 5), "Tesla T4", True, False, "fp16"),
        ((7, 0), "Tesla V100", False, True, "fp16"),
        ((7, 5), "NVIDIA GeForce GTX 1660", True, False, "fp32"),  # no tensor cores
        ((6, 1), "NVIDIA GeForce GTX 1080", True, False, "fp32"),
    ],
)
def test_gpu_precision(capability: tuple[int, int], name: str, bf16: bool, compiled: bool, expected: str) -> None:
    choice = choose_for_cuda(capability, name, bf16=bf16, compiled=compiled)
    assert choice.precision == expected
    assert name in choice.reason


@pytest.mark.parametrize(
    ("flags", "environ", "factor", "expected", "reason"),
    [
        (SAPPHIRE_RAPIDS, {}, 0.4, "bf16", "AMX-BF16.*2.5x"),
        (SAPPHIRE_RAPIDS, {}, 0.95, "fp32", "AMX-BF16 units, but"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "ALL"}, 0.4, "bf16", "AMX-BF16"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, 0.4, "bf16", "AMX-BF16"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": ""}, 0.4, "bf16", "AMX-BF16"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, 0.4, "bf16", "AMX-BF16"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, 0.4, "bf16", "AVX512-BF16"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, 0.4, "fp32", "ONEDNN_MAX_CPU_ISA=avx512_core"),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, 0.4, "fp32", "ONEDNN_MAX_CPU_ISA=AVX2"),
        (SAPPHIRE_RAPIDS, {"DNNL_MAX_CPU_ISA": "AVX2"}, 0.4, "fp32", "DNNL_MAX_CPU_ISA=AVX2"),
        (SAPPHIRE_RAPIDS, {"ATEN_CPU_CAPABILITY": "avx512"}, 0.4, "bf16", "AMX-BF16"),
        (SAPPHIRE_RAPIDS, {"ATEN_CPU_CAPABILITY": "avx2"}, 0.4, "fp32", "ATEN_CPU_CAPABILITY=avx2"),
        (SAPPHIRE_RAPIDS, {"ATEN_CPU_CAPABILITY": "default"}, 0.4, "fp32", "ATEN_CPU_CAPABILITY=default"),
        (ZEN_4, {}, 0.6, "bf16", "AVX512-BF16"),
        (ZEN_4, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, 0.6, "fp32", "AVX512_CORE_VNNI"),
        (ICE_LAKE, {}, 0.4, "fp32", "no bf16 units"),
        (ICE_LAKE, {"ATEN_CPU_CAPABILITY": "avx2"}, 0.4, "fp32", "no bf16 units"),
        (("neon", "bf16"), {}, 0.5, "bf16", "Arm"),
        ((), {}, 0.4, "fp32", "no bf16 units"),
    ],
)
def test_cpu_precision(
    flags: tuple[str, ...], environ: dict[str, str], factor: float, expected: str, reason: str
) -> None:
    choice = choose_for_cpu(flags, environ, lambda: factor)
    assert choice.precision == expected
    assert re.search(reason, choice.reason)


def test_cpu_without_units_is_not_measured() -> None:
    assert choose_for_cpu(ICE_LAKE, {}, lambda: pytest.fail("measured")).precision == "fp32"


def test_mps_precision() -> None:
    assert choose_for_mps().precision == "fp32"
    assert choose_precision(EngineConfig(), torch.device("mps")).precision == "fp32"


def test_explicit_precision_and_bf16_weights_override_auto(amx_cpu: pytest.MonkeyPatch) -> None:
    assert choose_precision(EngineConfig(precision="fp32"), CPU).precision == "fp32"
    assert choose_precision(EngineConfig(), CPU).precision == "bf16"
    emulate(amx_cpu)
    assert choose_precision(EngineConfig(), CPU).precision == "fp32"
    assert choose_precision(EngineConfig(param_dtype="bf16"), CPU).precision == "bf16"


def test_measurement_is_cached_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    state = torch.random.get_rng_state()
    try:
        measure_slowdown.cache_clear()
        factor = measure_slowdown(CPU)
        assert factor > 0
        assert torch.equal(torch.random.get_rng_state(), state)
        monkeypatch.setattr(device_precision, "_time_step", lambda *_: pytest.fail("measured again"))
        measure_slowdown.cache_clear()
        assert measure_slowdown(CPU) == factor
        file = tmp_path / "tastemaker/bf16_slowdown.json"
        assert torch.__version__ in file.read_text() and device_precision.read_cpu()[0] in file.read_text()
        file.write_text("torn {")
        monkeypatch.setattr(device_precision, "_time_step", lambda device, dtype: 3.0 if dtype.itemsize == 2 else 2.0)
        measure_slowdown.cache_clear()
        assert measure_slowdown(CPU) == 1.5
    finally:
        measure_slowdown.cache_clear()


def test_run_records_its_precision_and_keeps_it_when_resumed(tmp_path: Path, amx_cpu: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    settings = [*TOY, f"output_dir={tmp_path}", "name=run", "engine.precision=auto"]
    assert run_training(load("grpo-toy-flow", [*settings, "steps=1"]), console=NO_OUTPUT)
    assert yaml.safe_load((directory / "config.yaml").read_text())["engine"]["precision"] == "bf16"
    record = json.loads((directory / "environment.json").read_text())
    assert record["precision"] == "bf16"
    assert re.match("auto: .*AMX-BF16", record["precision_reason"])
    assert {"torch", "device", "cpu", "cpu_capability"} <= record.keys()

    emulate(amx_cpu)
    longer = load("grpo-toy-flow", [*settings, "steps=2"])
    with pytest.warns(UserWarning, match=r"bf16.* 6\.2x.*engine\.precision=auto"):
        assert run_training(longer, allow_change=["steps"], console=NO_OUTPUT)
    assert yaml.safe_load((directory / "config.yaml").read_text())["engine"]["precision"] == "bf16"
    record = json.loads((directory / "environment.json").read_text())
    assert re.match("auto: .*AMX-BF16", record["precision_reason"])

    page = write_report([directory]).read_text()
    assert '<th scope="row">precision</th><td>bf16</td>' in page
    assert record["precision_reason"] in page

    branch = load("grpo-toy-flow", [*settings, "name=branch", "steps=3"])
    with pytest.warns(UserWarning, match="emulated"):
        assert run_training(branch, resume=directory / "checkpoints/step-000002", console=NO_OUTPUT)
    assert yaml.safe_load((tmp_path / "branch/config.yaml").read_text())["engine"]["precision"] == "bf16"


class SecondRank:
    """A rank that receives the choice of rank 0."""

    rank, world_size = 1, 2

    def gather_objects(self, items: list[object]) -> list[object]:
        assert not items
        return [device_precision.PrecisionChoice("fp16", "auto: rank 0 has a T4")]


def test_other_ranks_use_the_precision_of_rank_0() -> None:
    config, choice = resolve_precision(EngineConfig(), CPU, SecondRank())  # type: ignore[arg-type]
    assert config.precision == choice.precision == "fp16"


RANK = """
import sys
from tastemaker.config.schema import EngineConfig, OptimConfig
from tastemaker.training import device_precision
from tastemaker.training.engine import Engine
flags = {"0": "amx_bf16", "1": ""}[sys.argv[1]]
device_precision.read_cpu = lambda: ("CPU", frozenset([flags]))
device_precision.measure_slowdown = lambda device: 0.5
engine = Engine(EngineConfig(device="cpu"), OptimConfig(), 1, 0)
print(engine.config.precision, engine.precision_choice.reason)
engine.close()
"""


@pytest.mark.ranks
def test_ranks_on_different_cpus_use_one_precision() -> None:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "WORLD_SIZE": "2"}
    shared = subprocess_environment() | group
    for limit in device_precision.LIMITS:
        shared.pop(limit, None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(i)],
            env=shared | {"RANK": str(i), "LOCAL_RANK": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    output = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert re.match("bf16 auto: .*AMX-BF16", output[0])
    assert output[0] == output[1]


def test_explicit_bf16_on_a_cpu_without_units_warns(amx_cpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = [*TOY, "engine.precision=bf16"]
    assert describe_emulation(EngineConfig(precision="bf16"), CPU) is None
    emulate(amx_cpu)
    with pytest.warns(UserWarning, match=r"6\.2x.*engine\.precision=auto"):
        build(load("grpo-toy-flow", settings), tmp_path)
    warning = describe_emulation(EngineConfig(precision="bf16", param_dtype="bf16"), CPU)
    assert warning and "engine.param_dtype=fp32" in warning
    emulate(amx_cpu, factor=1.0)
    assert describe_emulation(EngineConfig(precision="bf16"), CPU) is None  # not slower


def test_check_prints_the_precision_and_its_reason(
    amx_cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulate(amx_cpu)
    run_cli("check", "grpo-playground-flow", "engine.device=cpu")
    assert re.search(r"precision: fp32 \(auto: .*no bf16 units", capsys.readouterr().out)
    run_cli("check", "grpo-toy-flow", "engine.device=cpu", "engine.precision=bf16")
    output = capsys.readouterr().out
    assert re.search(r"precision: bf16 \(.*engine\.precision\)", output)
    assert re.search(r"warning: engine\.precision: bf16 .*6\.2x", output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the precision is that of the GPU")
def test_plan_assumes_a_gpu_with_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_for_planning(EngineConfig())[0].precision == "bf16"
    assert resolve_for_planning(EngineConfig(device="cpu"))[0].precision == "fp32"
    run_cli("plan", "vae-playground")
    assert re.search(r"precision: bf16 \(auto: .*\b8\.0\b", capsys.readouterr().out)
