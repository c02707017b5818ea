"""The commands of docs/forward-process.md for its newest measurements: their cells, settings and options exist."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

from docs_pages import ROOT, console_lines

from tastemaker.config.load import load
from tastemaker.evaluation.scoreboard.measurement import Bench
from tastemaker.evaluation.scoreboard.plan import ScoreboardJob, list_jobs, load_plan
from tastemaker.evaluation.scoreboard.runner import parse_seeds
from tastemaker.objectives.distill import Distillation

COMMANDS = [line for line in console_lines(ROOT / "docs" / "forward-process.md") if "build" in line]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_bench_command_plans_every_measurement_with_its_control() -> None:
    (words,) = (shlex.split(line) for line in COMMANDS if "bench playground" in line)
    plan, cells = load_plan("playground"), option(words, "--cells").split(",")
    seeds, controls = (parse_seeds(option(words, name), name) for name in ("--seeds", "--control-seeds"))
    jobs = list_jobs(plan, cells, seeds, controls)
    after = {(job.cell, job.seed) for job in jobs if job.kind == "after"}
    assert after == {(cell, seed) for cell in cells for seed in (0, 1, 2)}
    assert {job.cell for job in jobs if job.kind == "control"} == set(cells)
    assert {"kto-likes-flow", "mapo-pairs-flow", "mapo-flow", "grpo-guard-flow", "flow-dppo-flow"} < set(cells)
    assert int(words[1]) < 600 and float(option(words, "--minutes")) * 60 < int(words[1])
    for cell in cells:
        plan.config(cell)  # raises an error if a setting is not valid


def test_specialists_and_student_have_valid_settings() -> None:
    lines = [shlex.split(line) for line in COMMANDS if line.startswith("tastemaker train")]
    configs = [load(words[2], words[3:]) for words in lines]
    *specialists, student = configs
    weights = [config.data.task_weights for config in specialists]  # type: ignore[attr-defined]
    assert [sum(column) for column in zip(*weights, strict=True)] == [1] * 6
    assert isinstance(student.objective, Distillation)
    runs = {str(teacher.weights) for teacher in student.objective.teachers.values()}
    assert runs == {str(Path(config.output_dir) / config.name) for config in specialists}
    assert len({task for teacher in student.objective.teachers.values() for task in teacher.tasks}) == 6


def test_methods_of_the_search_bench_exist() -> None:
    (words,) = (shlex.split(line) for line in COMMANDS if "bench/search.py" in line)
    names = words[words.index("--methods") + 1 : words.index("--out")]
    source = (ROOT / "bench" / "search.py").read_text(encoding="utf-8")
    templates = [
        "".join("*" if isinstance(part, ast.FormattedValue) else str(part.value) for part in node.values)  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr)
    ]
    assert names[0] in source and all(any(Path(name).match(t) for t in templates) for name in names[1:])


def test_results_so_far_are_not_measured_again() -> None:
    """A setting that changes the fingerprint of a finished run costs its GPU time again."""
    bench = Bench(
        load_plan("playground"), ROOT / "build" / "none", 504, 2, ("engine.precision=bf16",), False
    )  # as measured
    results = json.loads((ROOT / "docs" / "scoreboard" / "results.json").read_text(encoding="utf-8"))["results"]
    prints = {result["key"]: result["fingerprint"] for result in results}
    for cell in ("flow-dppo-flow", "grpo-flow-4-epochs", "leap-flow", "kto-likes-flow", "mapo-flow"):
        job = ScoreboardJob(cell, "after", 0)
        assert bench.fingerprint(bench.with_baseline(job)) == prints[job.key]
