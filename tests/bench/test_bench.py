"""A bench from its cells to its results: what is run, in which order, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tastemaker.cli import main
from tastemaker.config.check import find_problems
from tastemaker.core.registry import ConfigError
from tastemaker.evaluation.scoreboard.job_queue import JobQueue
from tastemaker.evaluation.scoreboard.markdown_tables import BEGIN_MARK, END_MARK
from tastemaker.evaluation.scoreboard.measurement import Bench
from tastemaker.evaluation.scoreboard.plan import (
    ScoreboardJob,
    ScoreboardPlan,
    list_jobs,
    load_plan,
    with_shuffled_rewards,
)
from tastemaker.evaluation.scoreboard.results import load_results
from tastemaker.evaluation.scoreboard.runner import BenchOptions, is_finished, plan_jobs
from tastemaker.rewards.shuffled import Shuffled

ROOT = Path(__file__).parent.parent.parent
TOYS = """
families: {flow: {process: models/toy-flow}}
cells:
  grpo: {recipe: grpo-toy-flow, family: flow, objective: GRPO, reward: colour, control: true, aim: {learns: true}}
  gradient: {recipe: draft-toy-flow, family: flow, objective: DRaFT, reward: colour, control: true}
  best: {recipe: grpo-toy-flow, family: flow, objective: best of n, reward: judge, seeds: 1,
         search: {type: best_of_n, n: [2]}}
  broken: {recipe: grpo-toy-flow, family: flow, objective: GRPO, reward: colour, overrides: [optim.lr=1e30]}
  both: {recipe: grpo-toy-flow, family: flow, objective: GRPO and best of n, reward: judge, control: true, seeds: 1,
         search: {type: best_of_n, n: [2], trained: true}, aim: {gain: 0.5}}
  other: {recipe: grpo-playground-flow, family: flow, objective: GRPO, reward: verdict}
"""
QUICK = ["steps=2", "guard.every=1", "--prompts", "6", "--tiny", "--device", "cpu"]
ONE = [*QUICK, "--seeds", "0", "--cells", "grpo", "--control-seeds", ""]


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    path = tmp_path / "toys.yaml"
    path.write_text(TOYS)
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a bench whose one cell was measured without a control."""
    path = tmp_path_factory.mktemp("measured") / "toys.yaml"
    path.write_text(TOYS)
    assert bench(path, *ONE) == 0
    return path


def bench(toys: Path, *options: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["bench", str(toys), "--out", str(toys.parent / "out"), *options])
    return left.value.code


def result(toys: Path, key: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((toys.parent / "out" / "cells" / f"{key}.json").read_text())
    return told


def test_every_cell_of_the_playground_can_be_run() -> None:
    found, wrong = load_plan("playground"), {}
    for cell in found.cells:
        config = found.config(cell)
        told = find_problems(with_shuffled_rewards(config), 1)
        if told or not isinstance(found.process(found.cells[cell].family), config.model.suits):
            wrong[cell] = told
    assert not wrong


def test_the_playground_asks_of_every_learning_cell_what_it_does_without_its_reward() -> None:
    cells = load_plan("playground").cells.values()
    learning = [cell for cell in cells if cell.search is None or cell.search.trained]
    assert all(cell.control for cell in learning if cell.aim and not cell.aim.warns)


def test_the_first_seed_of_every_cell_comes_first_and_what_it_is_compared_with_before_it(toys: Path) -> None:
    found = load_plan(str(toys))
    listed = plan_jobs(BenchOptions(Bench(found, toys.parent), str(toys), ("grpo", "gradient", "best"), (0, 1), (0,)))
    keys = [job.key for job in listed]
    assert keys[0].startswith("before-flow") and listed[1].base == keys[0]
    assert keys[1:] == [
        *("grpo-0", "gradient-0", "best-2-0", "grpo-shuffled-0", "gradient-shuffled-0"),
        *("grpo-1", "gradient-1"),
    ]


def test_cells_share_what_is_before_them_only_if_their_weights_are_the_same(toys: Path) -> None:
    found = load_plan(str(toys))
    bench = Bench(found, toys.parent)
    grpo, gradient, other = (bench.based(ScoreboardJob(cell, "after")).base for cell in ("grpo", "gradient", "other"))
    assert grpo == gradient != other
    assert replace(bench, prompts=6).based(ScoreboardJob("grpo", "after")).base != grpo


def test_a_control_shuffles_what_is_learned_from_and_leaves_what_is_watched() -> None:
    config = with_shuffled_rewards(load_plan("playground").config("grpo-flow"))
    kinds = {name: isinstance(reward.spec, Shuffled) for name, reward in config.rewards.items()}
    assert kinds == {"verdict": True, "taste": False}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cells: {a: {recipe: grpo-nowhere, family: f, objective: a, reward: b}}", "no recipe is called"),
        ("cells: {a: {recipe: grpo-toy-flow, family: g, objective: a, reward: b}}", "no family 'g'"),
        ("cells: {a: {recipe: grpo-toy-flow, family: f, objective: a}}", "cells.a"),
        ("cells: {a: {recipe: ddpo-toy-causal, family: f, objective: a, reward: b, overrides: [steps=x]}}", "cells.a"),
        ("cells: {a: {recipe: grpo-toy-flow, family: f, objective: a, reward: b, aim: {like: b}}}", "no cell 'b'"),
    ],
)
def test_mistakes_in_cells_are_sentences(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"families: {{f: {{process: models/toy-flow}}}}\n{text}\n")
    with pytest.raises(ConfigError, match=sentence):
        load_plan(str(path)).config("a")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cells", "grop"], "did you mean 'grpo'"),
        (["--seeds", "one"], "expected whole numbers"),
        (["--prompts", "3"], "at least 6"),
    ],
)
def test_mistakes_in_options_are_sentences(
    toys: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(toys, *options) == 2
    assert sentence in capsys.readouterr().err


def test_a_bench_measures_everything_and_a_failing_cell_stops_nobody(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = toys.parent / "page.md"
    page.write_text(f"{BEGIN_MARK}\n{END_MARK}\n")
    asked = [*QUICK, "--seeds", "0", "--cells", "grpo,gradient,best,broken"]
    assert bench(toys, *asked, "--write", str(page)) == 1
    said = capsys.readouterr().err
    assert "broken" not in page.read_text() and "failed: broken-0" in said
    trained, searched = result(toys, "grpo-0"), result(toys, "best-2-0")
    assert set(trained["difference"]) == {"strict", "lenient", "graded"}
    assert trained["training"]["steps"] == 2 and trained["training"]["samples"] == 128
    assert trained["environment"]["device"] == "cpu" and len(trained["training"]["reward"]) == 2
    assert trained["before"] == result(toys, trained_base(toys))["after"]
    assert searched["after"]["calls"] == 2 * searched["before"]["calls"] and "training" not in searched
    assert result(toys, "gradient-shuffled-0")["kind"] == "control"
    # Once more there is only the broken one to do, and the summary of the one file is the same.
    before = (toys.parent / "out" / "cells" / "grpo-0.json").stat().st_mtime_ns
    assert bench(toys, *asked) == 1
    assert (toys.parent / "out" / "cells" / "grpo-0.json").stat().st_mtime_ns == before
    assert len(load_results(toys.parent / "out" / "results.json")) == 6


def test_a_bench_goes_on_from_the_one_file_of_its_results(
    toys: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toys.parent / "out").mkdir()
    shutil.copy(measured.parent / "out" / "results.json", toys.parent / "out")
    assert bench(toys, *ONE) == 0
    assert "measurements to make: 0; made before: 2" in capsys.readouterr().err


def trained_base(toys: Path) -> str:
    return next(path.stem for path in (toys.parent / "out" / "cells").glob("before-*.json"))


def test_calls_of_training_are_those_of_sampling_and_of_every_part_learned_from(measured: Path) -> None:
    told, config = result(measured, "grpo-0")["training"], load_plan(str(measured)).config("grpo")
    steps = config.process.calls(config.model.shape)
    # All steps but the last take chances, and each of these is looked at again by the live weights and the reference.
    assert told["calls"] == 128 * (steps + 2 * (steps - 1))


def test_a_changed_recipe_is_measured_anew_and_other_questions_are_refused(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--seeds", "0", "--cells", "best"]
    assert bench(toys, *QUICK, *asked) == 0
    toys.write_text(TOYS.replace("search: {type: best_of_n, n: [2]}", "search: {type: best_of_n, n: [2], judge: run}"))
    found = Bench(
        load_plan(str(toys)), toys.parent / "out", 6, 2, ("steps=2", "guard.every=1", "engine.device=cpu"), True
    )
    assert not is_finished(found, found.based(ScoreboardJob("best", "after", 0, 2)))
    assert len(list((toys.parent / "out" / "stale").iterdir())) == 1
    assert bench(toys, *QUICK, *asked, "--count", "3") == 2
    assert "choose another --out" in capsys.readouterr().err


def test_time_that_is_up_begins_nothing_and_says_what_is_left(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(toys, *QUICK, "--minutes", "0", "--cells", "grpo") == 1
    assert "grpo-0" in capsys.readouterr().err


def test_nothing_is_taken_before_what_it_is_compared_with() -> None:
    first, second = ScoreboardJob("a", "before", base="before-x"), ScoreboardJob("a", "after", base="before-x")
    queue = JobQueue([second, first], set())
    assert queue.take() is first
    queue.finish(first, "it broke")
    assert queue.take() is None and queue.failed == {"before-x": "it broke", "a-0": "before-x failed"}


@pytest.mark.slow
@pytest.mark.ranks
def test_an_interrupted_bench_goes_on_where_it_was(toys: Path) -> None:
    out = toys.parent / "out"
    asked = ["bench", str(toys), "steps=60", "checkpoint.every=10", "guard.every=0", "--out", str(out), "--tiny"]
    asked += ["--prompts", "6", "--device", "cpu", "--cells", "grpo", "--seeds", "0"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tastemaker", *asked, "--jobs", "2"]
    started = subprocess.Popen(command, env=settings, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while started.poll() is None and len(list(out.glob("runs/grpo-*/checkpoints/step-*"))) < 2:
        time.sleep(0.02)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130 and "goes on from there" in said
    assert [path.name for path in out.glob("cells/*")] == [f"{trained_base(toys)}.json"]
    with pytest.raises(SystemExit) as left:
        main(asked)
    assert left.value.code == 0
    assert all(result(toys, key)["training"]["steps"] == 60 for key in ("grpo-0", "grpo-shuffled-0"))
    (record,) = out.glob("runs/grpo-0-*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in record.read_text().splitlines()] == list(range(1, 61))


@pytest.mark.long
def test_the_whole_playground_is_measured_at_small_size(tmp_path: Path) -> None:
    small = ["steps=1", "batch.prompts=4", "guard.every=0", "--prompts", "6", "--tiny", "--device", "cpu"]
    asked = [*small, "--seeds", "0", "--control-seeds", "", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        main(["bench", "playground", *asked])
    assert left.value.code == 0
    found = load_plan("playground")
    assert {result["cell"] for result in load_results(tmp_path)} == set(found.cells)
    assert {path.name for path in (tmp_path / "scoreboard").iterdir()} == {"overview.svg", "curves.svg", "prices.svg"}


def test_every_job_of_a_plan_has_a_name_of_its_own() -> None:
    found: ScoreboardPlan = load_plan("playground")
    listed = list_jobs(found, list(found.cells), (0, 1, 2), (0, 1, 2))
    assert len({job.key for job in listed}) == len(listed)


def test_a_search_may_follow_training(toys: Path) -> None:
    assert bench(toys, *QUICK, "--seeds", "0", "--cells", "both") == 0
    found, control = result(toys, "both-2-0"), result(toys, "both-shuffled-0")
    assert found["about"]["trained"] and found["training"]["steps"] == 2
    assert found["after"]["calls"] == 2 * control["after"]["calls"]
    assert found["after"]["judged"] == 2 and control["after"]["judged"] == 0
    assert found["after"]["flops"] > control["after"]["flops"] > 0
