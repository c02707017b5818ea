"""`tastemaker bench`: plans, order of jobs, measurements, failures and resuming."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tastemaker.cli import main
from tastemaker.config.check import find_problems
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.data.playground_preferences import PlaygroundLikes
from tastemaker.evaluation.scoreboard import measurement
from tastemaker.evaluation.scoreboard.measurement import Bench
from tastemaker.evaluation.scoreboard.page import BEGIN_MARK, END_MARK
from tastemaker.evaluation.scoreboard.plan import (
    ScoreboardJob,
    ScoreboardPlan,
    list_jobs,
    load_plan,
)
from tastemaker.evaluation.scoreboard.results import load_results
from tastemaker.evaluation.scoreboard.runner import BenchOptions, JobQueue, is_finished, plan_jobs
from tastemaker.rewards.wrappers import ShuffledReward

ROOT = Path(__file__).parent.parent.parent
TOYS = """
families: {flow: {process: models/toy-flow}}
cells:
  grpo: {recipe: grpo-toy-flow, family: flow, objective: GRPO, reward: colour, control: true, target: {improves: true}}
  gradient: {recipe: draft-toy-flow, family: flow, objective: DRaFT, reward: colour, control: true}
  best: {recipe: grpo-toy-flow, family: flow, objective: best of n, reward: judge, seeds: 1,
         search: {type: best_of_n, candidates: [2]}}
  broken: {recipe: grpo-toy-flow, family: flow, objective: GRPO, reward: colour, overrides: [optim.lr=1e30]}
  both: {recipe: grpo-toy-flow, family: flow, objective: GRPO and best of n, reward: judge, control: true, seeds: 1,
         search: {type: best_of_n, candidates: [2], trained: true}, target: {min_gain: 0.5}}
  other: {recipe: grpo-playground-flow, family: flow, objective: GRPO, reward: verdict}
"""
QUICK = ["steps=2", "guard.every=1", "--num-prompts", "6", "--tiny", "--device", "cpu"]
ONE_CELL = [*QUICK, "--seeds", "0", "--cells", "grpo", "--control-seeds", ""]


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    path = tmp_path / "toys.yaml"
    path.write_text(TOYS)
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a bench with one measured cell and no control."""
    path = tmp_path_factory.mktemp("measured") / "toys.yaml"
    path.write_text(TOYS)
    assert bench(path, *ONE_CELL) == 0
    return path


def bench(toys: Path, *options: str) -> int | str | None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", str(toys), "--out", str(toys.parent / "out"), *options])
    return exit_info.value.code


def result(toys: Path, key: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((toys.parent / "out" / "cells" / f"{key}.json").read_text())
    return data


def test_every_cell_of_every_plan_is_valid() -> None:
    invalid = {}
    for name in ("playground", str(ROOT / "bench" / "low_precision.yaml")):
        plan = load_plan(name)
        for cell in plan.cells:
            config = plan.config(cell)
            problems = find_problems(plan.config(cell, control=True), 1)
            if problems or not isinstance(plan.process(plan.cells[cell].family), config.model.process_type):
                invalid[cell] = problems
    assert not invalid


def test_trained_cells_of_the_playground_plan_have_a_control() -> None:
    cells = load_plan("playground").cells.values()
    trained_cells = [cell for cell in cells if cell.search is None or cell.search.trained]
    assert all(cell.control for cell in trained_cells if cell.target and not cell.target.guard_warns)


def test_jobs_are_ordered_by_seed_after_their_baseline(toys: Path) -> None:
    plan = load_plan(str(toys))
    jobs = plan_jobs(BenchOptions(Bench(plan, toys.parent), str(toys), ("grpo", "gradient", "best"), (0, 1), (0,)))
    keys = [job.key for job in jobs]
    assert keys[0].startswith("before-flow") and jobs[1].baseline == keys[0]
    assert keys[1:] == [
        *("grpo-0", "gradient-0", "best-2-0", "grpo-shuffled-0", "gradient-shuffled-0"),
        *("grpo-1", "gradient-1"),
    ]


def test_cells_share_a_baseline_only_if_their_weights_are_equal(toys: Path) -> None:
    plan = load_plan(str(toys))
    bench = Bench(plan, toys.parent)
    grpo, gradient, other = (
        bench.with_baseline(ScoreboardJob(cell, "after")).baseline for cell in ("grpo", "gradient", "other")
    )
    assert grpo == gradient != other
    assert replace(bench, prompts=6).with_baseline(ScoreboardJob("grpo", "after")).baseline != grpo


def test_control_shuffles_training_rewards_only() -> None:
    config = load_plan("playground").config("grpo-flow", control=True)
    kinds = {name: isinstance(reward.spec, ShuffledReward) for name, reward in config.rewards.items()}
    assert kinds == {"verdict": True, "taste": False}


def test_control_of_offline_training_has_meaningless_labels_and_its_own_fingerprint(tmp_path: Path) -> None:
    bench = Bench(load_plan("playground"), tmp_path, prompts=6)
    jobs = [bench.with_baseline(ScoreboardJob("kto-likes-flow", kind)) for kind in ("after", "control")]
    assert [cast(PlaygroundLikes, bench.config(job).data).label_noise for job in jobs] == [0.0, 0.5]
    assert not any(isinstance(reward.spec, ShuffledReward) for reward in bench.config(jobs[1]).rewards.values())
    assert bench.fingerprint(jobs[0]) != bench.fingerprint(jobs[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cells: {a: {recipe: grpo-nowhere, family: f, objective: a, reward: b}}", "unknown recipe"),
        ("cells: {a: {recipe: grpo-toy-flow, family: g, objective: a, reward: b}}", "unknown family 'g'"),
        ("cells: {a: {recipe: grpo-toy-flow, family: f, objective: a}}", "cells.a"),
        ("cells: {a: {recipe: ddpo-toy-causal, family: f, objective: a, reward: b, overrides: [steps=x]}}", "cells.a"),
        (
            "cells: {a: {recipe: grpo-toy-flow, family: f, objective: a, reward: b, target: {baseline: b}}}",
            "unknown cell 'b'",
        ),
    ],
)
def test_invalid_cells_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"families: {{f: {{process: models/toy-flow}}}}\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load_plan(str(path)).config("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cells", "grop"], "'grpo'"),
        (["--seeds", "one"], "--seeds"),
        (["--num-prompts", "3"], "at least 6"),
    ],
)
def test_invalid_options_are_refused(
    toys: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(toys, *options) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def precisions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether network calls could be in the precision of rollouts, for each evaluation of a bench."""
    found, evaluate = list[bool](), measurement.evaluate

    def recorded(*arguments: Any) -> Iterator[Any]:
        with ROLLOUTS.calls():
            found.append(ROLLOUTS.active)
        yield from evaluate(*arguments)

    monkeypatch.setattr(measurement, "evaluate", recorded)
    return found


def test_bench_measures_all_cells_and_continues_after_a_failure(
    toys: Path, precisions: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    page = toys.parent / "page.md"
    page.write_text(f"{BEGIN_MARK}\n{END_MARK}\n")
    options = [*QUICK, "--seeds", "0", "--cells", "grpo,gradient,best,broken"]
    assert bench(toys, *options, "--page", str(page)) == 1
    output = capsys.readouterr().err
    assert "broken" not in page.read_text() and "failed: broken-0" in output
    assert precisions == [False] * 6
    trained, searched = result(toys, "grpo-0"), result(toys, "best-2-0")
    assert set(trained["difference"]) == {"strict", "lenient", "graded"}
    assert trained["training"]["steps"] == 2 and trained["training"]["samples"] == 128
    assert trained["environment"]["device"] == "cpu" and len(trained["training"]["reward"]) == 2
    assert trained["before"] == result(toys, baseline_key(toys))["after"]
    assert searched["after"]["calls"] == 2 * searched["before"]["calls"] and "training" not in searched
    assert result(toys, "gradient-shuffled-0")["kind"] == "control"
    # A second run repeats the failed cell only.
    before = (toys.parent / "out" / "cells" / "grpo-0.json").stat().st_mtime_ns
    assert bench(toys, *options) == 1
    assert (toys.parent / "out" / "cells" / "grpo-0.json").stat().st_mtime_ns == before
    assert len(load_results(toys.parent / "out" / "results.json")) == 6


def test_bench_resumes_from_merged_results(toys: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toys.parent / "out").mkdir()
    shutil.copy(measured.parent / "out" / "results.json", toys.parent / "out")
    assert bench(toys, *ONE_CELL) == 0
    assert "to make: 0; made before: 2" in capsys.readouterr().err


def baseline_key(toys: Path) -> str:
    return next(path.stem for path in (toys.parent / "out" / "cells").glob("before-*.json"))


def test_network_calls_of_training_are_counted(measured: Path) -> None:
    training, config = result(measured, "grpo-0")["training"], load_plan(str(measured)).config("grpo")
    steps = config.process.network_calls_per_sample(config.model.shape)
    # All steps but the last are stochastic; the policy and the reference recompute each of these.
    assert training["calls"] == 128 * (steps + 2 * (steps - 1))


def test_changed_search_is_measured_again_and_another_benchmark_is_refused(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seeds", "0", "--cells", "best"]
    assert bench(toys, *QUICK, *options) == 0
    search = "search: {type: best_of_n, candidates: [2]"
    toys.write_text(TOYS.replace(f"{search}}}", f"{search}, verifier: run}}"))
    changed = Bench(
        load_plan(str(toys)), toys.parent / "out", 6, 2, ("steps=2", "guard.every=1", "engine.device=cpu"), True
    )
    assert not is_finished(changed, changed.with_baseline(ScoreboardJob("best", "after", 0, 2)))
    assert len(list((toys.parent / "out" / "stale").iterdir())) == 1
    assert bench(toys, *QUICK, *options, "--count", "3") == 2
    assert "--out" in capsys.readouterr().err


def test_expired_time_limit_starts_no_measurement(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(toys, *QUICK, "--minutes", "0", "--cells", "grpo") == 1
    assert "grpo-0" in capsys.readouterr().err


def test_job_waits_for_its_baseline() -> None:
    first, second = ScoreboardJob("a", "before", baseline="before-x"), ScoreboardJob("a", "after", baseline="before-x")
    queue = JobQueue([second, first], set())
    assert queue.take() is first
    queue.finish(first, "it broke")
    assert queue.take() is None and queue.failed == {"before-x": "it broke", "a-0": "before-x failed"}


@pytest.mark.slow
@pytest.mark.ranks
def test_interrupted_bench_resumes(toys: Path) -> None:
    out = toys.parent / "out"
    arguments = ["bench", str(toys), "steps=150", "checkpoint.every=10", "guard.every=0", "--out", str(out), "--tiny"]
    arguments += ["--num-prompts", "6", "--device", "cpu", "--cells", "grpo", "--seeds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tastemaker", *arguments, "--jobs", "2"]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(list(out.glob("runs/grpo-*/checkpoints/step-*"))) < 2:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, output = process.communicate(timeout=300)
    assert process.returncode == 130 and "to resume" in output
    assert [path.name for path in out.glob("cells/*")] == [f"{baseline_key(toys)}.json"]
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 0
    assert all(result(toys, key)["training"]["steps"] == 150 for key in ("grpo-0", "grpo-shuffled-0"))
    (record,) = out.glob("runs/grpo-0-*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in record.read_text().splitlines()] == list(range(1, 151))


@pytest.mark.long
def test_playground_bench_runs_tiny(tmp_path: Path) -> None:
    overrides = ["steps=1", "batch.prompts=4", "guard.every=0", "--num-prompts", "6", "--tiny", "--device", "cpu"]
    options = [*overrides, "--seeds", "0", "--control-seeds", "", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "playground", *options])
    assert exit_info.value.code == 0
    plan = load_plan("playground")
    assert {result["cell"] for result in load_results(tmp_path)} == set(plan.cells)
    assert {path.name for path in (tmp_path / "scoreboard").iterdir()} == {"overview.svg", "curves.svg", "costs.svg"}


def test_job_keys_are_unique() -> None:
    plan: ScoreboardPlan = load_plan("playground")
    jobs = list_jobs(plan, list(plan.cells), (0, 1, 2), (0, 1, 2))
    assert len({job.key for job in jobs}) == len(jobs)


def test_search_after_training(toys: Path) -> None:
    assert bench(toys, *QUICK, "--seeds", "0", "--cells", "both") == 0
    searched, control = result(toys, "both-2-0"), result(toys, "both-shuffled-0")
    assert searched["about"]["trained"] and searched["training"]["steps"] == 2
    assert searched["after"]["calls"] == 2 * control["after"]["calls"]
    assert searched["after"]["verifier_calls"] == 2 and control["after"]["verifier_calls"] == 0
    assert searched["after"]["flops"] > control["after"]["flops"] > 0
