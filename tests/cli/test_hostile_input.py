"""Commands on damaged run directories and strange arguments: one message with a code, no traceback, no hang."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from PIL import Image

from tastemaker.core.errors import ConfigError, RewardError
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.image_sources import open_tar_shards
from tastemaker.data.text_files import read_csv_rows
from tastemaker.rewards.function import FunctionReward, register_function

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
SMALL = ["engine.device=cpu", "steps=1", "sample.every=0", "guard.every=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_cli("train", "grpo-toy-flow", *SMALL, f"output_dir={folder}", "name=run") == 0
    return folder / "run"


@pytest.mark.parametrize(
    "config", [LAUGHS, "a: !!python/object/apply:os.system [id]", "optim: {lr: [", "a: " + "[" * 300, "[1]", "\0"]
)
def test_damaged_config_of_a_run_is_one_message(run: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` refuses it, and `report` shows the rest of the run."""
    valid = (run / "config.yaml").read_text()
    try:
        (run / "config.yaml").write_text(config)
        assert run_cli("train", "grpo-toy-flow", *SMALL, f"output_dir={run.parent}", "name=run") == 2
        message = capsys.readouterr().err
        assert "config.yaml" in message and "[TM" in message
        assert run_cli("report", str(run)) == 0
    finally:
        (run / "config.yaml").write_text(valid)


def test_deep_and_torn_json_does_not_stop_a_report(run: Path) -> None:
    deep = "[" * 100_000
    for name in ("environment.json", "samples/step-000001.json", "evaluations/a/report.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(deep)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(deep + "\n" + '{"step": 2, "lo')
    assert run_cli("report", str(run)) == 0


def test_long_names_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "n" * 300
    commands = [
        ["train", "grpo-toy-flow", f"name={long}", f"output_dir={tmp_path}", *SMALL],
        ["generate", "grpo-toy-flow", "--out", str(tmp_path / long), "-p", "a"],
        ["generate", long],
        ["report", str(tmp_path / long)],
        ["score", str(tmp_path / f"{long}.png"), "--reward", "jpeg"],
    ]
    for command in commands:
        assert run_cli(*command) == 2, command
        assert "[TM" in capsys.readouterr().err, command


def test_arguments_that_are_no_text_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "grpo-toy-flow", "-p", "caf\udce9"], ["check", "grpo-toy-flow", "name=\ud800"]):
        assert run_cli(*command) == 2
        assert "TM1162" in capsys.readouterr().err


def test_undecodable_bytes_of_a_shell_are_one_message() -> None:
    command = [os.fsencode(sys.executable), b"-m", b"tastemaker", b"check", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2 and b"TM1162" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["absolute", "parent", "link", "device", "size"])
def test_archive_with_paths_outside_links_or_devices_is_refused(tmp_path: Path, kind: str) -> None:
    image = io.BytesIO()
    Image.new("RGB", (4, 4)).save(image, "PNG")
    name = {"absolute": "/etc/a.png", "parent": "a/../../b.png"}.get(kind, "a.png")
    member = tarfile.TarInfo(name)
    member.type = {"link": tarfile.SYMTYPE, "device": tarfile.CHRTYPE}.get(kind, tarfile.REGTYPE)
    member.linkname = "/etc/passwd" if kind == "link" else ""
    member.size = len(image.getvalue()) if member.isreg() else 0
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member, io.BytesIO(image.getvalue()))
    if kind == "size":  # a file that is said to be longer than the archive
        data = (tmp_path / "a.tar").read_bytes()
        member.size = 2**33
        (tmp_path / "a.tar").write_bytes(member.tobuf() + data[512:])
    with pytest.raises(ConfigError, match=r"a\.tar.*" + ("TM188" if kind == "size" else "TM1167")):
        open_tar_shards(tmp_path / "a.tar")


def test_long_csv_field_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text(f'prompt\n"{"a" * 131_073}"\n')
    with pytest.raises(ConfigError, match=r"prompts\.csv, line 2.*131072.*TM1166"):
        read_csv_rows(tmp_path / "prompts.csv")


@pytest.mark.parametrize(
    "scores", [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse()]
)
def test_scores_without_real_values_are_refused(scores: torch.Tensor) -> None:
    spec = FunctionReward(register_function(lambda images, prompts: scores))
    rubric = Rubric({"own": WeightedReward(spec, spec.load(Placement()))})
    with pytest.raises(RewardError, match=r"'own'.*TM1163"):
        rubric.score(torch.rand(2, 1, 3, 4, 4), ["a", "b"])
