"""The demo at a tiny size: learning, files, the time estimate, and interruptions."""

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
from cli_runner import run_cli

from tastemaker import build, load
from tastemaker.cli import EXIT_INTERRUPTED, EXIT_USAGE
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
SECOND_DETECTOR = "rewards.second={type: playground_verdict, output: verdict, weights: playground/detector1, weight: 0}"
# The fewest steps that improve the reward beyond noise, on a second detector too.
SHORT = ["steps=12", "batch.prompts=24", "guard.every=12", "guard.prompts=32", "sample.every=12", SECOND_DETECTOR]
SHORT += ["optim.lr_schedule=constant"]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def demo_command(folder: Path, tastemaker: str = "exit 1") -> list[str]:
    """`make demo` in a prepared environment where a shell command replaces tastemaker."""
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin/tastemaker"
    command.write_text(f"#!/bin/sh\n{tastemaker}\n", encoding="utf-8")
    command.chmod(0o755)
    (folder / ".ready").touch()
    return ["make", "demo", f"VENV={folder}"]


def interrupt_when(process: subprocess.Popen[str], when: Callable[[], bool]) -> str:
    """Send SIGINT to the process group as soon as `when()` holds, and return the output."""
    deadline = time.monotonic() + 300
    while not when():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=120)[0]


def start_process(command: list[str], folder: Path) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=settings, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def tastemaker(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tastemaker", *arguments]


def run_to_completion(command: list[str], folder: Path) -> str:
    process = start_process(command, folder)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    return output


def run_demo(*options: str) -> int:
    return run_cli("demo", "--num-prompts", "12", "--device", "cpu", *options, *SHORT)


def test_demo_learns_resumes_and_skips_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "_score_images", Mock(side_effect=KeyboardInterrupt))  # Ctrl-C when images are scored
        assert run_demo() == EXIT_INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1].startswith("Interrupted.")
    images = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/demo/evaluations/before/samples/*/*.png")}
    assert run_demo() == 0
    output = capsys.readouterr().err
    assert len(images) == 24 and all(path.stat().st_mtime_ns == at for path, at in images.items())
    assert re.findall(r"^(\d) of 4", output, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(r"about (\d+ min ?)?(\d+ s )?left in total \(measured\)", output)

    run = tmp_path / "runs/demo"
    scores = {when: run / f"evaluations/{when}/scores.jsonl" for when in ("before", "after")}
    assert all(len(path.read_text().splitlines()) == 24 for path in scores.values())
    record = read_run(run)
    before, after = (record.guard_measurements[at : at + 1] for at in (0, 1))
    reward, second_score = (compare_measurements(name, before, after) for name in ("reward/mean", "rewards/second"))
    assert reward.rose, reward  # beyond noise, prompt by prompt
    assert second_score.after - second_score.before > 2 * second_score.standard_error, (
        second_score
    )  # and on the second detector
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "before, step 0" in page and "after, step 12" in page
    assert "<small>before</small>" in page and "<small>after</small>" in page  # PlayEval, task by task
    headline = [line for line in output.splitlines() if "Strict PlayEval" in line]
    assert len(headline) == 1 and str(run / "report.html") in output

    with monkeypatch.context() as patched:
        for name in ("evaluate_model", "run_training", "write_report"):
            patched.setattr(demo, name, Mock(side_effect=AssertionError(name)))
        assert run_demo() == 0
    rerun_output = capsys.readouterr().err
    assert rerun_output.count("already done") == 4 and headline[0] in rerun_output
    assert run_demo("--seed", "1") == EXIT_USAGE and "seed: 0 -> 1" in capsys.readouterr().err


def test_demo_refuses_another_run_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("name=other") == EXIT_USAGE
    assert "`name`" in capsys.readouterr().err


@pytest.mark.parametrize("slowdown", [0.3, 1.0, 8.0])
def test_demo_estimate_is_right_at_the_start_of_training(slowdown: float) -> None:
    """The machine is `slowdown` times slower than the one that the ratios were measured on."""
    config, now = load(RECIPE), [0.0]
    image_seconds, step_seconds, guard_seconds = 0.05 * slowdown, 5.0 * slowdown, 11.0 * slowdown
    timer = DemoTimer(config, 504, clock=lambda: now[0])

    def sample_and_score() -> None:
        for count in range(64, 505, 64):
            now[0] += 64 * image_seconds + (3 * slowdown if count == 64 else 0)
            timer.see_evaluation(StageProgress("samples", count, 504))
            assert (timer.remaining() is None) == (count == 64 and not timer.evaluation_seconds)
        now[0] += 5 * slowdown

    timer.start(1)
    sample_and_score()
    timer.evaluation_seconds = now[0]
    timer.start(2)
    checks = len(range(config.guard.every, config.steps, config.guard.every)) + 1
    remaining = config.steps * step_seconds + checks * guard_seconds + now[0]
    for event in (TrainingStarted(0, config.steps, Path(), 1), GuardChecked(0, {}, None)):
        now[0] += guard_seconds if isinstance(event, GuardChecked) else 0
        timer.log(event)
    assert timer.remaining() == pytest.approx(remaining, rel=0.4) and "roughly" in timer.text()
    for step in (1, 2):
        now[0] += step_seconds * (3 if step == 1 else 1)  # the first step does one-time work
        timer.log(StepCompleted(step, {}, step_seconds, 64))
    assert timer.remaining() == pytest.approx(remaining - 2 * step_seconds, rel=0.1)
    assert timer.text() == f"about {format_seconds(timer.remaining() or 0)} left in total (measured)"


def test_format_seconds_rounds_estimates() -> None:
    expected = {0: "5 s", 43: "45 s", 58: "1 min", 62: "1 min", 198: "3 min 20 s", 3599: "1 h", 3900: "1 h 5 min"}
    assert {seconds: format_seconds(seconds) for seconds in expected} == expected


@needs_make
def test_make_help_names_existing_targets() -> None:
    output = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^make ([\w-]+)", output, re.MULTILINE)
    assert {"demo", "playground", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


@needs_make
def test_make_demo_runs_the_command_and_can_be_interrupted(tmp_path: Path) -> None:
    stage = f'echo "arguments: $*"; trap "echo saved; exit 130" INT; touch {tmp_path}/started; sleep 60'
    command = [*demo_command(tmp_path / "venv", stage), "--no-print-directory", "DEMO=--seed 1"]
    process = start_process([*command, "-f", str(ROOT / "Makefile")], ROOT)
    output = interrupt_when(process, (tmp_path / "started").exists)
    assert process.returncode != 0
    assert output.splitlines()[0] == "arguments: demo --seed 1" and "saved" in output.splitlines()


@pytest.mark.slow
def test_interrupted_training_resumes_at_its_last_step(tmp_path: Path) -> None:
    small = ["steps=60", "batch.prompts=2", "guard.every=0", "sample.every=0", "checkpoint.every=1000"]
    command, metrics = tastemaker("train", RECIPE, "name=demo", *small), tmp_path / "runs/demo/metrics.jsonl"

    def steps() -> list[int]:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return [json.loads(line)["step"] for line in lines]

    process = start_process(command, tmp_path)
    output = interrupt_when(process, lambda: len(steps()) >= 2)
    step = steps()[-1]
    assert process.returncode == EXIT_INTERRUPTED and "Traceback" not in output and 2 <= step < 60
    assert f"after step {step}" in output
    rerun_output = run_to_completion(command, tmp_path)
    assert f"60 steps from step {step}" in rerun_output and "all 60 steps done" in rerun_output
    assert steps() == list(range(1, 61))
    assert "from step 60" in run_to_completion(command, tmp_path)  # a finished run has nothing left to do
    assert steps() == list(range(1, 61))


@pytest.mark.slow
def test_interrupted_evaluation_resumes_with_finished_images(tmp_path: Path) -> None:
    out = tmp_path / "before"
    options = ["--model", RECIPE, "process.num_steps=4", "--num-prompts", "126", "--out", str(out)]
    command = tastemaker("evaluate", "playeval", *options)
    process = start_process(command, tmp_path)
    output = interrupt_when(process, lambda: any(out.glob(".costs/[0-9]*")))
    assert process.returncode == EXIT_INTERRUPTED and "Traceback" not in output
    assert not (out / "samples.jsonl").exists()
    mtimes = {path: path.stat().st_mtime_ns for path in out.glob("samples/000[01]*/*.png")}
    run_to_completion(command, tmp_path)
    assert json.loads((out / "report.json").read_text())["images"] == 252
    assert len(mtimes) == 40 and all(
        path.stat().st_mtime_ns == at for path, at in mtimes.items()
    )  # not generated again


@pytest.mark.long
def test_guard_warns_of_reward_hacking_only(tmp_path: Path) -> None:
    def guard_checks(recipe: str, *overrides: str) -> list[GuardChecked]:
        run = build(load(recipe, [*overrides, "sample.every=0", "engine.device=cpu"]), tmp_path / recipe)
        return [event for event in train(run) if isinstance(event, GuardChecked)]

    hacked = guard_checks("reward-gradient-playground-lenient")
    assert hacked[-1].warning and "'strict'" in hacked[-1].warning
    # About half remains; the exact share of 256 samples depends on gradient rounding.
    assert hacked[-1].metrics["rewards/strict"] < hacked[0].metrics["rewards/strict"] * 0.75
    assert hacked[-1].metrics["rewards/asked"] > hacked[0].metrics["rewards/asked"] + 0.5
    honest = guard_checks(RECIPE, SECOND_DETECTOR, "guard.every=20", "guard.prompts=32", "steps=60")
    assert not any(check.warning for check in honest)
    assert honest[-1].metrics["rewards/second"] > honest[0].metrics["rewards/second"] + 0.1
