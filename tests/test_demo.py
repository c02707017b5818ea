"""The demo, shortened and for real: its own commands, what they leave behind, and what is left when interrupted."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tastemaker import build, load
from tastemaker.cli import INTERRUPTED, main
from tastemaker.report.read import read
from tastemaker.train.events import Guarded
from tastemaker.train.evidence import compare
from tastemaker.train.loop import train

ROOT = Path(__file__).parent.parent
RECIPE = "reward-gradient-playground"
SECOND = "rewards.second={type: playground_verdict, form: verdict, weights: playground/detector1, weight: 0}"
# The fewest steps that learn beyond noise, judged by another detector too.
SHORT = ["steps=12", "batch.prompts=24", "guard.every=12", "guard.prompts=32", "sample.every=12", SECOND]
SHORT += ["optim.schedule=constant"]
make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make, and the demo is one of its targets")


def ready(folder: Path, tastemaker: str = "exit 1") -> list[str]:
    """`make demo` in an environment that is set up already, with a command of our own in the place of tastemaker."""
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin/tastemaker"
    command.write_text(f"#!/bin/sh\n{tastemaker}\n", encoding="utf-8")
    command.chmod(0o755)
    (folder / ".ready").touch()
    return ["make", "demo", f"VENV={folder}", "PROMPTS=24"]


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


@make
def test_a_shortened_demo_learns_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = subprocess.run(
        [*ready(tmp_path / "venv"), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = [shlex.split(line) for line in re.findall(r"bin/tastemaker (.*); exit", shown)]
    assert [command[0] for command in commands] == ["evaluate", "train", "evaluate", "report"]
    assert commands[1][1] == RECIPE
    monkeypatch.chdir(tmp_path)
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([*command, *SHORT] if command[0] == "train" else command)
        assert not ended.value.code, command

    run = tmp_path / "runs/demo"
    scores = {when: run / f"evaluations/{when}/scores.jsonl" for when in ("before", "after")}
    assert all(len(path.read_text().splitlines()) == 48 for path in scores.values())
    record = read(run)
    before, after = (record.looks[at : at + 1] for at in (0, 1))
    reward, judged = (compare(name, before, after) for name in ("reward", "reward/second"))
    assert reward.rose, reward  # beyond noise, prompt by prompt
    assert judged.after - judged.before > 2 * judged.error, judged  # and another detector sees it too
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "before, step 0" in page and "after, step 12" in page
    assert "<small>before</small>" in page and "<small>after</small>" in page  # PlayEval, task by task
    assert f"Open {ROOT}/runs/demo/report.html" in shown


@make
def test_the_targets_that_help_names_are_there() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^make ([\w-]+)", told, re.MULTILINE)
    assert {"demo", "playground", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


@make
def test_an_interrupted_demo_says_how_to_go_on(tmp_path: Path) -> None:
    stage = f"touch {tmp_path}/begun; exec sleep 60"
    process = start([*ready(tmp_path / "venv", stage), "--no-print-directory", "-f", str(ROOT / "Makefile")], ROOT)
    told = interrupt(process, (tmp_path / "begun").exists)
    assert process.returncode != 0
    assert "Interrupted. What was done is kept; make demo goes on from there." in told.splitlines()


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
    assert process.returncode == INTERRUPTED and "Traceback" not in told and 2 <= done < 30
    assert f"asked to stop after step {done}; the same command goes on from there" in told
    again = finish(command, tmp_path)
    assert f"30 steps from step {done}" in again and "all 30 steps done" in again
    assert steps() == list(range(1, 31))
    assert "from step 30" in finish(command, tmp_path)  # and once more, it has nothing left to do
    assert steps() == list(range(1, 31))


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "before"
    chosen = ["--model", RECIPE, "process.steps=4", "--prompts", "126", "--out", str(out)]
    command = tastemaker("evaluate", "playeval", *chosen)
    process = start(command, tmp_path)
    told = interrupt(process, lambda: any(out.glob(".prices/[0-9]*")))
    assert process.returncode == INTERRUPTED and "Traceback" not in told
    assert not (out / "samples.jsonl").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("samples/000[01]*/*.png")}
    finish(command, tmp_path)
    assert json.loads((out / "report.json").read_text())["pictures"] == 252
    assert len(kept) == 40 and all(path.stat().st_mtime_ns == at for path, at in kept.items())  # not made again


@pytest.mark.slow
def test_four_copies_of_everything_are_noticed_and_honest_learning_is_not(tmp_path: Path) -> None:
    def looks(recipe: str, *overrides: str) -> list[Guarded]:
        run = build(load(recipe, [*overrides, "sample.every=0", "engine.device=cpu"]), tmp_path / recipe)
        return [event for event in train(run) if isinstance(event, Guarded)]

    gamed = looks("reward-gradient-playground-lenient")
    assert gamed[-1].warning and "the held-out reward 'strict' fell" in gamed[-1].warning
    # About half of it is left; how much, among 256 samples, the rounding of a gradient decides.
    assert gamed[-1].metrics["reward/strict"] < gamed[0].metrics["reward/strict"] * 0.75
    assert gamed[-1].metrics["reward/asked"] > gamed[0].metrics["reward/asked"] + 0.5
    honest = looks(RECIPE, SECOND, "guard.every=20", "guard.prompts=32", "steps=60")
    assert not any(look.warning for look in honest)
    assert honest[-1].metrics["reward/second"] > honest[0].metrics["reward/second"] + 0.1
