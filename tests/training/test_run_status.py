"""status.json: what a run says about its state and its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tastemaker.config.load import load
from tastemaker.core.errors import RewardError
from tastemaker.training.run_status import STATUS_FILE, RunStatus, read_status, write_status
from tastemaker.training.trainer import run_training

SETTINGS = ["sample.every=0", "guard.every=0", "batch.prompts=4", "steps=2", "loggers=[]"]


def test_run_writes_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def run(name: str, steps: int) -> None:
        config = load("grpo-toy-flow", [*SETTINGS, f"output_dir={tmp_path}", f"name={name}", f"steps={steps}"])
        on_event = lambda event: states.append(read_status(tmp_path / name))
        run_training(config, console=Console(quiet=True), on_event=on_event)

    run("good", 2)
    status = read_status(tmp_path / "good")
    assert status is not None and (status.state, status.step, status.steps) == ("finished", 2, 2)
    assert states[0] is not None and states[0].state == "running"

    def fail(*args: object, **kwargs: object) -> None:
        raise RewardError("the detector does not answer [TM1]")

    monkeypatch.setattr("tastemaker.core.reward.Rubric.start", fail)
    with pytest.raises(RewardError):
        run("bad", 2)
    status = read_status(tmp_path / "bad")
    assert status is not None and status.state == "failed"
    assert "RewardError: the detector does not answer" in status.reason


def test_damaged_status_is_ignored(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    values = ['"dancing", "step": 1', '"failed"', '"failed", "step": 1e999', '"failed", "step": "x"']
    for text in ("", "{", "[]", "null", *(f'{{"state": {value}, "steps": 2}}' for value in values)):
        (tmp_path / STATUS_FILE).write_text(text)
        assert read_status(tmp_path) is None, text
    write_status(tmp_path, RunStatus("failed", 3, 9, "x" * 9999))
    status = read_status(tmp_path)
    assert status is not None and status.step == 3 and len(status.reason) == 2000
    (tmp_path / "file").touch()
    write_status(tmp_path / "file", RunStatus("failed", 3, 9))  # cannot be written
