"""`tastemaker sweep` runs a grid in one folder, resumes it, and groups seeds in its table."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from cli_runner import run_cli

from tastemaker.cli import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE
from tastemaker.core.errors import TrainingError
from tastemaker.core.registry import ConfigError
from tastemaker.training import sweep

QUICK = [
    "steps=2",
    "sample.every=0",
    "checkpoint.every=1",
    "batch.prompts=2",
    "objective.group_size=2",
    "guard.every=0",
]
GRID = ["optim.lr=1e-3,2e-3", "seed=0,1"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_quick_sweep(*options: str) -> int:
    return run_cli("sweep", "grpo-toy-flow", *GRID, *QUICK, "--out", "grid", *options)


def last_reward(name: str) -> float:
    rows = [json.loads(line) for line in Path("grid", name, "metrics.jsonl").read_text().splitlines()]
    return float([row for row in rows if "reward/mean" in row][-1]["reward/mean"])


def test_grid_is_trained_resumed_and_grouped_by_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_quick_sweep() == 0
    output = capsys.readouterr()
    names = [f"lr={lr}_seed={seed}" for lr in ("1e-3", "2e-3") for seed in (0, 1)]
    assert sorted(path.name for path in Path("grid").iterdir() if path.is_dir()) == names
    header, *rows = output.out.splitlines()
    assert header.split() == ["optim.lr", "runs", "reward"] and len(rows) == 2
    for row in rows:
        lr, runs, mean, _, deviation = row.split()
        rewards = [last_reward(f"lr={lr}_seed={seed}") for seed in (0, 1)]
        assert runs == "2" and rewards[0] != rewards[1]
        assert float(mean) == pytest.approx(fmean(rewards), rel=1e-3)
        assert float(deviation) == pytest.approx(stdev(rewards), rel=0.1)
    report = Path("grid/report.html").read_text()
    assert all(name in report for name in names) and "grid/report.html" in output.err
    assert len({row["metrics"]["reward"] for row in json.loads(Path("grid/sweep.json").read_text())}) == 4

    # One run was interrupted after its first step; only that one trains again, and ends with the same weights.
    interrupted = Path("grid", names[1], "checkpoints/step-000002")
    weights = (interrupted / "weights.safetensors").read_bytes()
    shutil.rmtree(interrupted)
    trained: list[str] = []
    run_training = sweep.run_training

    def observe(config: Any, **options: Any) -> bool:
        trained.append(config.name)
        return run_training(config, **options)

    monkeypatch.setattr(sweep, "run_training", observe)
    table = output.out
    assert run_quick_sweep() == 0
    output = capsys.readouterr()
    assert trained == [names[1]] and output.out == table and output.err.count("already done") == 3
    assert "from step 1" in output.err and (interrupted / "weights.safetensors").read_bytes() == weights

    # Another setting is found before anything trains.
    assert run_quick_sweep("batch.prompts=4") == EXIT_USAGE
    assert "batch.prompts" in capsys.readouterr().err and trained == [names[1]]


def test_failed_run_does_not_end_the_sweep_but_an_interruption_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def fail_first(config: Any, **options: Any) -> bool:
        names.append(config.name)
        if len(names) == 1:
            raise TrainingError("the loss is not finite; lower optim.lr")
        return True

    monkeypatch.setattr(sweep, "run_training", fail_first)
    assert run_quick_sweep() == EXIT_FAILURE
    output = capsys.readouterr()
    assert len(names) == 4 and "lower optim.lr" in output.err and "1 run failed: lr=1e-3_seed=0" in output.out

    def interrupt(config: Any, *, on_event: Any, **options: Any) -> bool:
        on_event(sweep.TrainingFinished(1, sweep.interruption_reason(1)))
        return False

    monkeypatch.setattr(sweep, "run_training", interrupt)
    assert run_quick_sweep() == EXIT_INTERRUPTED
    assert "run the same command" in capsys.readouterr().err


def test_dry_run_prints_a_command_per_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_quick_sweep("--dry-run") == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 4 and not Path("grid").exists()
    assert all(
        re.match(r"tastemaker train grpo-toy-flow steps=2 .* optim\.lr=\de-3 seed=\d", line) for line in commands
    )
    assert "output_dir=grid" in commands[0] and "name=lr=1e-3_seed=0" in commands[0]


def test_values_are_split_at_outer_commas() -> None:
    assert sweep.split_values("1e-4, 2e-4") == ["1e-4", "2e-4"]
    assert sweep.split_values("[a, b],{type: c, d: [1, 2]},'e, f'") == ["[a, b]", "{type: c, d: [1, 2]}", "'e, f'"]
    assert sweep.name_run({"optim.lr": "1e-4", "data.path": "a/b.txt"}) == "lr=1e-4_path=a-b.txt"
    assert sweep.name_run({"batch.prompts": "4", "guard.prompts": "8"}) == "batch.prompts=4_guard.prompts=8"


@pytest.mark.parametrize("overrides", [["steps=3"], ["seed=0,0"], ["seed=0,"], ["name=a,b"], ["seed=0,1", "seed=2,3"]])
def test_invalid_grid_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="sweep"):
        sweep.expand_grid(overrides)
