"""The demo at a tiny size: what it learns, what it leaves behind, its time estimate, and interruptions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tastemaker import build, load
from tastemaker.cli import EXIT_INTERRUPTED, EXIT_USAGE, main
from tastemaker.evaluation import evaluate
from tastemaker.evaluation.evaluate import StageProgress
from tastemaker.playground import demo
from tastemaker.playground.demo import DemoTimer, format_seconds
from tastemaker.report.run_record import read_run
from tastemaker.training.drift_statistics import compare_measurements
from tastemaker.training.events import GuardChecked, StepCompleted, TrainingStarted
from tastemaker.training.loop import train

ROOT = Path(__file__).parents[2]
RECIPE = "reward-gradient-playground"
SECOND = "rewards.second={type: playground_verdict, output: verdict, weights: playground/detector1, weight: 0}"
# The fewest steps that learn beyond noise, judged by another detector too.
SHORT = ["steps=12", "batch.prompts=24", "guard.every=12", "guard.prompts=32", "sample.every=12", SECOND]
SHORT += ["optim.lr_schedule=constant"]
make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make, and the demo is one of its targets")


def demo_target(folder: Path, tastemaker: str = "exit 1") -> list[str]:
    """`make demo` in an environment that is set up already, with a shell command in place of tastemaker."""
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin/tastemaker"
    command.write_text(f"#!/bin/sh\n{tastemaker}\n", encoding="utf-8")
    command.chmod(0o755)
    (folder / ".ready").touch()
    return ["make", "demo", f"VENV={folder}"]


def interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> str:
    """Ctrl-C in the terminal of a command, as soon as there is something to lose; what it said."""
    deadline = time.monotonic() + 120
    while not when():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=60)[0]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=settings, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def tastemaker(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tastemaker", *arguments]


def finish(command: list[str], folder: Path) -> str:
    process = start(command, folder)
    told = process.communicate(timeout=120)[0]
    assert process.returncode == 0, told
    return told


def run_demo(*options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--prompts", "12", "--device", "cpu", *options, *SHORT])
    return int(ended.value.code or 0)


def test_demo_learns_resumes_and_skips_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "_score_images", Mock(side_effect=KeyboardInterrupt))  # Ctrl-C when images are scored
        assert run_demo() == EXIT_INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1].startswith("Interrupted. Everything done so far is kept")
    images = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/demo/evaluations/before/samples/*/*.png")}
    assert run_demo() == 0
    shown = capsys.readouterr().err
    assert len(images) == 24 and all(path.stat().st_mtime_ns == at for path, at in images.items())
    assert re.findall(r"^(\d) of 4", shown, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(r"about (\d+ min ?)?(\d+ s )?left in total \(measured\)", shown)

    run = tmp_path / "runs/demo"
    scores = {when: run / f"evaluations/{when}/scores.jsonl" for when in ("before", "after")}
    assert all(len(path.read_text().splitlines()) == 24 for path in scores.values())
    record = read_run(run)
    before, after = (record.guard_measurements[at : at + 1] for at in (0, 1))
    reward, judged = (compare_measurements(name, before, after) for name in ("reward/mean", "rewards/second"))
    assert reward.rose, reward  # beyond noise, prompt by prompt
    assert judged.after - judged.before > 2 * judged.standard_error, judged  # and another detector sees it too
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "before, step 0" in page and "after, step 12" in page
    assert "<small>before</small>" in page and "<small>after</small>" in page  # PlayEval, task by task
    headline = [line for line in shown.splitlines() if "Strict PlayEval" in line]
    assert len(headline) == 1 and str(run / "report.html") in shown

    with monkeypatch.context() as patched:
        for name in ("evaluate_model", "run_training", "write_report"):
            patched.setattr(demo, name, Mock(side_effect=AssertionError(name)))
        assert run_demo() == 0
    again = capsys.readouterr().err
    assert again.count("already done") == 4 and headline[0] in again
    assert run_demo("--seed", "1") == EXIT_USAGE and "seed: 0 -> 1" in capsys.readouterr().err


def test_demo_refuses_a_name_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("name=other") == EXIT_USAGE
    assert "`name`" in capsys.readouterr().err


@pytest.mark.parametrize("slow", [0.3, 1.0, 8.0])
def test_demo_estimate_is_right_at_the_start_of_training(slow: float) -> None:
    """A machine `slow` times slower than the one that the ratios were measured on."""
    config, now, image, step, guard = load(RECIPE), [0.0], 0.05 * slow, 5.0 * slow, 11.0 * slow
    timer = DemoTimer(config, 504, clock=lambda: now[0])

    def sample_and_score() -> None:
        for count in range(64, 505, 64):
            now[0] += 64 * image + (3 * slow if count == 64 else 0)
            timer.see_evaluation(StageProgress("samples", count, 504))
            assert (timer.remaining() is None) == (count == 64 and not timer.evaluation_seconds)
        now[0] += 5 * slow

    timer.start(1)
    sample_and_score()
    timer.evaluation_seconds = now[0]
    timer.start(2)
    checks = len(range(config.guard.every, config.steps, config.guard.every)) + 1
    left = config.steps * step + checks * guard + now[0]
    for event in (TrainingStarted(0, config.steps, Path(), 1), GuardChecked(0, {}, None)):
        now[0] += guard if isinstance(event, GuardChecked) else 0
        timer.log(event)
    assert timer.remaining() == pytest.approx(left, rel=0.4) and "roughly" in timer.text()
    for done in (1, 2):
        now[0] += step * (3 if done == 1 else 1)  # the first step does one-time work
        timer.log(StepCompleted(done, {}, step, 64))
    assert timer.remaining() == pytest.approx(left - 2 * step, rel=0.1)
    assert timer.text() == f"about {format_seconds(timer.remaining() or 0)} left in total (measured)"


def test_format_seconds_rounds_to_what_an_estimate_is_worth() -> None:
    expected = {0: "5 s", 43: "45 s", 58: "1 min", 62: "1 min", 198: "3 min 20 s", 3599: "1 h", 3900: "1 h 5 min"}
    assert {seconds: format_seconds(seconds) for seconds in expected} == expected


@make
def test_the_targets_that_help_names_are_there() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^make ([\w-]+)", told, re.MULTILINE)
    assert {"demo", "playground", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


@make
def test_make_demo_runs_the_command_and_can_be_interrupted(tmp_path: Path) -> None:
    stage = f'echo "asked: $*"; trap "echo saved; exit 130" INT; touch {tmp_path}/begun; sleep 60'
    command = [*demo_target(tmp_path / "venv", stage), "--no-print-directory", "DEMO=--seed 1"]
    process = start([*command, "-f", str(ROOT / "Makefile")], ROOT)
    shown = interrupt(process, (tmp_path / "begun").exists)
    assert process.returncode != 0
    assert shown.splitlines()[0] == "asked: demo --seed 1" and "saved" in shown.splitlines()


@pytest.mark.slow
def test_an_interrupted_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = ["steps=30", "batch.prompts=2", "guard.every=0", "sample.every=0", "checkpoint.every=1000"]
    command, metrics = tastemaker("train", RECIPE, "name=demo", *small), tmp_path / "runs/demo/metrics.jsonl"

    def steps() -> list[int]:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return [json.loads(line)["step"] for line in lines]

    process = start(command, tmp_path)
    told = interrupt(process, lambda: len(steps()) >= 2)
    done = steps()[-1]
    assert process.returncode == EXIT_INTERRUPTED and "Traceback" not in told and 2 <= done < 30
    assert f"asked to stop after step {done}" in told
    again = finish(command, tmp_path)
    assert f"30 steps from step {done}" in again and "all 30 steps done" in again
    assert steps() == list(range(1, 31))
    assert "from step 30" in finish(command, tmp_path)  # and once more, it has nothing left to do
    assert steps() == list(range(1, 31))


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "before"
    chosen = ["--model", RECIPE, "process.num_steps=4", "--prompts", "126", "--out", str(out)]
    command = tastemaker("evaluate", "playeval", *chosen)
    process = start(command, tmp_path)
    told = interrupt(process, lambda: any(out.glob(".prices/[0-9]*")))
    assert process.returncode == EXIT_INTERRUPTED and "Traceback" not in told
    assert not (out / "samples.jsonl").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("samples/000[01]*/*.png")}
    finish(command, tmp_path)
    assert json.loads((out / "report.json").read_text())["pictures"] == 252
    assert len(kept) == 40 and all(path.stat().st_mtime_ns == at for path, at in kept.items())  # not made again


@pytest.mark.long
def test_four_copies_of_everything_are_noticed_and_honest_learning_is_not(tmp_path: Path) -> None:
    def looks(recipe: str, *overrides: str) -> list[GuardChecked]:
        run = build(load(recipe, [*overrides, "sample.every=0", "engine.device=cpu"]), tmp_path / recipe)
        return [event for event in train(run) if isinstance(event, GuardChecked)]

    gamed = looks("reward-gradient-playground-lenient")
    assert gamed[-1].warning and "the held-out reward 'strict' fell" in gamed[-1].warning
    # About half of it is left; how much, among 256 samples, the rounding of a gradient decides.
    assert gamed[-1].metrics["rewards/strict"] < gamed[0].metrics["rewards/strict"] * 0.75
    assert gamed[-1].metrics["rewards/asked"] > gamed[0].metrics["rewards/asked"] + 0.5
    honest = looks(RECIPE, SECOND, "guard.every=20", "guard.prompts=32", "steps=60")
    assert not any(look.warning for look in honest)
    assert honest[-1].metrics["rewards/second"] > honest[0].metrics["rewards/second"] + 0.1
