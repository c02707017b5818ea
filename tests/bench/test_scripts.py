"""The benchmark scripts run with small networks and write a result for every section."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.core.types import Placement

ROOT = Path(__file__).parent.parent.parent
SLOW, LONG = pytest.mark.slow, pytest.mark.long


def run_script(folder: Path, name: str, *arguments: str) -> tuple[Any, str]:
    """Run a script on the CPU. Returns its results and its output."""
    out = folder / "results.json"
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), *arguments, "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert process.returncode == 0, process.stderr
    assert out.is_file(), process.stdout + process.stderr
    return json.loads(out.read_text(encoding="utf-8")), process.stdout


@pytest.mark.parametrize(
    ("script", "sections", "column"),
    [
        pytest.param("dit", "matmul", "images/s", id="matmul"),
        pytest.param("dit", "latents,pixels,vae,vae-diffusers", "images/s", marks=LONG, id="dit"),
        pytest.param("flux", "plain", "s per prompt", marks=SLOW, id="flux-plain"),
        pytest.param("flux", "grpo-sd35,plain-grpo-sd35", "x plain", marks=SLOW, id="flux-flow-grpo"),
        pytest.param("flux", "lora-fp8-base", "s per prompt", marks=SLOW, id="flux-fp8"),
        pytest.param("flux", "lora-merged", "s per prompt", marks=SLOW, id="flux-merged"),
        pytest.param(
            "flux", "lora-peft,lora-merged-fp8,grpo-flux-peft", "s per prompt", marks=LONG, id="flux-adapters"
        ),
        pytest.param("flux", "parts,full,full-fp8,lora,lora-fp8,grpo-flux", "s per prompt", marks=LONG, id="flux"),
        pytest.param(
            "llamagen", "B,grpo,kernels,agreement,L,XL,XXL,3B,XXL-64", "ms per step", marks=LONG, id="llamagen"
        ),
        pytest.param("llamagen", "kernels-fp8,B-fp8", "ms per step", marks=SLOW, id="llamagen-fp8"),
        pytest.param(
            "small_gpu", "srpo-flux,grpo-flux,grpo-sd35,grpo-z-image", "s per prompt", marks=LONG, id="small-gpu"
        ),
        pytest.param("generators", "grpo-z-image-turbo", "s per prompt", marks=SLOW, id="generators"),
        pytest.param(
            "generators", "grpo-flux2-klein,draft-flux2-klein,dancegrpo-wan-i2v", "s per prompt", marks=LONG, id="flux2"
        ),
        pytest.param("janus", "decode-1B,library-1B,update-1B", "s", marks=LONG, id="janus"),
        pytest.param("video", "modelscope,plain-modelscope", "s per video", marks=SLOW, id="modelscope"),
        pytest.param("video", "videocrafter,plain-videocrafter,wan", "s per video", marks=LONG, id="videocrafter-wan"),
    ],
)
def test_every_section_writes_results(script: str, sections: str, column: str, tmp_path: Path) -> None:
    results, output = run_script(tmp_path, script, "--tiny", "--sections", sections)
    assert {result["section"] for result in results} == set(sections.split(",")), output
    assert f"| {column} |" in output
    for result in results:
        assert result.get("images/s", 1) > 0 and result.get("seconds per prompt", 1) > 0
        assert sum(result.get("shares", {"": 1}).values()) == pytest.approx(1)
        assert result.get("recompiled", 0) == 0
        assert (result.get("8-bit layers", 0) > 0) == ("fp8" in result["section"] or script == "small_gpu")
        if result.get("dtype", "").startswith("float32"):
            assert result["equal tokens"] == 1


def test_generator_step_is_judged_by_the_plan_and_the_network_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    generators: Any = importlib.import_module("generators")
    good = {"planned GiB": 20.0, "peak GiB": 21.9, "network share": 0.86}
    assert [line.partition(":")[0] for line in generators.verdicts(good)] == ["pass", "pass"]
    bad = {"planned GiB": 20.0, "peak GiB": 17.9, "network share": 0.84}
    assert [line.partition(":")[0] for line in generators.verdicts(bad)] == ["FAIL", "FAIL"]

    chosen, planned = generators.Measured(samples=2), {"planned GiB": 20.0, "PFLOP": 1.5}
    file = tmp_path / "planned.json"
    file.write_text(json.dumps([{"section": "grpo-flux2-klein", "samples": 2, "settings": [], **planned}]))
    options = argparse.Namespace(planned=str(file), tiny=False)
    assert generators.planned_step("grpo-flux2-klein", chosen, options).items() >= planned.items()
    with pytest.raises(SystemExit, match="no plan"):  # of another group size
        generators.planned_step("grpo-flux2-klein", generators.Measured(samples=8), options)


@pytest.mark.slow
def test_settings_of_the_command_line_reach_every_section(tmp_path: Path) -> None:
    settings = ["--set", "engine.rollout_precision=fp8", "--set", "batch.prompts=1"]
    results, output = run_script(
        tmp_path, "small_gpu", "--tiny", "--sections", "srpo-flux", "--kind", "int8", *settings
    )
    assert "[srpo-flux]" in output and results[-1]["steps"] == 2 and results[-1]["kind"] == "int8"
    assert results[-1]["8-bit layers"] > 0


@pytest.mark.slow
def test_video_variants_are_measured(tmp_path: Path) -> None:
    results, output = run_script(tmp_path, "video", "--tiny", "--sections", "modelscope")
    expected = {"one frame", "all frames", "one frame, two videos at once"}
    assert {result["frames"] for result in results} == expected, output


@pytest.mark.slow
def test_showo_tokens_are_equal(tmp_path: Path) -> None:
    results, output = run_script(tmp_path, "showo", "--tiny")
    by_name = {result["name"]: result for result in results}
    assert set(by_name) == {"one by one", "together", "prompt read once", "equal in float32"}, output
    assert by_name["equal in float32"]["of images"] == by_name["equal in float32"]["of steps"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch itself
def test_showo_tokens_of_the_compiled_network_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    showo: Any = importlib.import_module("showo")
    results: list[dict[str, Any]] = []
    case = showo.ShowoCase(showo.tiny_spec(), 2, 2)
    showo.ShowoBenchmark(case, "compiled", results.append).run_compiled()
    by_name = {result["name"]: result for result in results}
    assert set(by_name) == {"prompt read once, compiled", "compiled, equal in float32", "peak"}
    equal = by_name["compiled, equal in float32"]
    assert equal["of images"] == equal["of steps"] == 1

    model = case.load(torch.float32)
    before = showo.Sampled.of(case, model)
    with torch.no_grad():
        for p in model.net.parameters():
            p.copy_(p.flip(0))
    assert before.equal_shares(case, model)["of steps"] < 0.9  # another network predicts other tokens


@pytest.mark.slow
def test_saving_is_measured_with_room_for_one_checkpoint(tmp_path: Path) -> None:
    (first, second), output = run_script(tmp_path, "checkpoint_saving", "--gib", "0.01")
    assert 0.06 < first["gib"] < 0.07, output  # one layer of bf16 weights and int8 moments
    assert first["gib"] <= first["largest_folder_gib"] < 1.1 * first["gib"]
    times = {"blocked_seconds_asynchronous", "written_after_seconds"}
    floors = {"floor_copy_seconds", "floor_write_seconds", "blocked_seconds"}
    assert times | floors < set(first) and times < set(second) and min(first.values()) > 0


@pytest.mark.slow
def test_paligemma_tokens_are_equal(tmp_path: Path) -> None:
    results, output = run_script(tmp_path, "paligemma", "--tiny")
    (equal,) = [result for result in results if "as generated" in result]
    assert equal["name"] == "equal in float32" and equal["as generated"] == equal["step by step"] == 1
    rates = {(result["rows"], result["way"]): result["tokens/s"] for result in results if "way" in result}
    assert set(rates) == {(size, way) for size in (1, 3) for way in ("generate", "eager")}, output
    assert min(rates.values()) > 0


@pytest.mark.slow
def test_geneval_phases_are_measured(tmp_path: Path) -> None:
    results, _ = run_script(tmp_path, "geneval", "--tiny")
    assert len(results) == 3
    for result in results:
        assert set(result["shares"]) == {"reading", "resizing", "network", "masks", "colors", "rules"}
        assert sum(result["shares"].values()) == pytest.approx(1) and result["rate"] > 0 and result["objects"] > 0


@pytest.mark.slow
def test_vae_cases_are_measured(tmp_path: Path) -> None:
    results, _ = run_script(tmp_path, "vae", "--tiny")
    assert len(results) == 4 and all(result["images_per_second"] > 0 for result in results)


def import_rewards_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("rewards")


@pytest.mark.slow
def test_rewards_are_measured(tmp_path: Path) -> None:
    results, output = run_script(tmp_path, "rewards", "--tiny")
    scored = [result["name"] for result in results[6:]]
    expected = "aesthetic_v25 dino_similarity musiq hpsv3 edit_reward video_align deqa qalign"
    assert scored == expected.split(), output
    assert all(result["rate"] > 0 for result in results)
    assert [result["name"] for result in results if result["unit"] == "clips/s"] == ["video_align"]
    assert all(f"| {name} | score |" in output for name in scored)


def test_failing_reward_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = import_rewards_script(monkeypatch)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setitem(rewards.SCORE_CASES, "deqa", replace(rewards.SCORE_CASES["deqa"], build=fail))
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["rewards.py", "--tiny", "--rewards", "deqa,qalign", "--out", str(out)])
    with pytest.raises(SystemExit, match="failed: deqa"):
        rewards.main()
    assert [result["name"] for result in json.loads(out.read_text())] == ["qalign"]
    assert "deqa failed: RuntimeError: no memory left" in capsys.readouterr().out


# GB of the published weights, bytes of a number, and how many numbers the reward does not read: language-model heads,
# and the adapters that VideoReward's file adds to its base model.
PUBLISHED_SIZES = {
    "aesthetic_v25": ("net", 1.7, 4, 0),
    "dino_similarity": ("embed.net", 0.346, 4, 0),
    "musiq": ("net", 0.11, 4, 0),
    "hpsv3": ("backbone.net", 16.6, 2, 151658 * 3584),
    "edit_reward": ("backbone.net", 16.6, 2, 151658 * 3584),
    "video_align": ("rater.backbone.net", 5.03, 2, 151660 * 1536 + 28 * 64 * 41216),
    "deqa": ("net", 16.4, 2, 0),
    "qalign": ("net", 16.4, 2, 0),
}


def test_measured_rewards_have_the_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = import_rewards_script(monkeypatch).SCORE_CASES
    assert set(cases) == set(PUBLISHED_SIZES)
    for name, (path, size, width, unread) in PUBLISHED_SIZES.items():
        net = attrgetter(path)(cases[name].build(Placement(torch.device("meta"), torch.bfloat16), False))
        assert sum(p.numel() for p in net.parameters()) == pytest.approx(size * 1e9 / width - unread, rel=0.02), name
        # Made in its dtype at once, and never on the CPU.
        assert {(p.device.type, p.dtype) for p in net.parameters()} == {("meta", torch.bfloat16)}, name


@pytest.mark.slow
def test_image_loader_is_measured_for_all_file_sizes(tmp_path: Path) -> None:
    report, _ = run_script(tmp_path, "image_loader", "--count", "8")
    assert set(report["files"]) == {"256", "512", "1024"} and report["target"] == 250
    assert all(sizes["collection, folder, no threads"]["per core"] > 0 for sizes in report["files"].values())


@pytest.mark.slow
def test_overlap_is_measured_and_trains_the_same_weights(tmp_path: Path) -> None:
    arguments = ["--recipe", "grpo-toy-flow", "--batches", "4", "--batch-size", "16", "--steps", "1", "--tiny"]
    results, output = run_script(tmp_path, "reward_overlap", *arguments, "--judges", "artificial,hps,vlm")
    assert [result["section"] for result in results] == ["artificial", "hps", "vlm"], output
    for result in results:
        assert result["equal weights"] and result["serial repeats"] and result["best possible rollout"] == 1.25
        assert result["weights change"]
        assert result["step overlapped"] > result["rollout overlapped"] > 0
        assert min(result[name] for name in ("sampling", "judging", "update", "serial", "overlapped")) > 0
