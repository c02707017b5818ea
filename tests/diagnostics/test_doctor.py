"""Each proof passes on a sound run and catches the fault it is there for."""

import sys
from pathlib import Path

import pytest

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.diagnostics.doctor import CHECKS, run_check, run_doctor

SMALL = ["sample.every=0", "batch.prompts=4", "objective.group_size=4"]


@pytest.fixture(autouse=True)
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("faults", None)


@pytest.mark.parametrize(
    ("check", "recipe", "plant", "told"),
    [
        (
            "importance ratio (fp32)",
            "grpo-toy-flow",
            "model={type: 'faults:Restless'}",
            "sampling and scoring disagree",
        ),
        (
            "importance ratio (bf16)",
            "grpo-toy-flow",
            "model={type: 'faults:Restless'}",
            "sampling and scoring disagree",
        ),
        ("cache", "grpo-toy-causal", "model={type: 'faults:Forgetful'}", "KV cache disagrees"),
        ("gradients", "grpo-toy-flow", "model={type: 'faults:Unused'}", "spare.weight"),
        ("weights", "grpo-toy-flow", "model={type: 'faults:Stale'}", "sampling does not use the trained weights"),
        ("reference", "grpo-toy-flow", "objective={type: 'faults:BlindTie'}", "does not depend on the live weights"),
        ("rewards", "grpo-toy-flow", "rewards.color={type: 'faults:Constant'}", "the same reward"),
        ("rewards", "grpo-toy-flow", "rewards.color={type: 'faults:Constant', broken: true}", "returned NaN"),
        ("pixels", "grpo-toy-flow", "model={type: 'faults:WrongRange'}", "[0, 1]"),
        ("resume", "grpo-toy-flow", "objective={type: 'faults:HiddenMemory'}", "is not in the checkpoint"),
    ],
)
def test_doctor_detects_planted_fault(check, recipe, plant, told, tmp_path):
    overrides = [plant] if not plant.startswith("objective") else [plant, "objective.group_size=4"]
    base = [setting for setting in SMALL if not (plant.startswith("objective") and setting.startswith("objective"))]
    run = build(load(recipe, [*base, *overrides]), tmp_path / "run")
    found = run_check(check, CHECKS[check], run)
    assert found.verdict == "fail", found
    assert told in found.advice


@pytest.mark.parametrize("recipe", ["grpo-toy-flow", "grpo-lora-toy-flow", "grpo-toy-causal", "grpo-toy-masked"])
def test_doctor_passes_a_correct_run(recipe, tmp_path):
    run = build(load(recipe, SMALL), tmp_path / "run")
    found = {check: run_check(check, CHECKS[check], run) for check in CHECKS}
    assert {check: each for check, each in found.items() if each.verdict not in ("pass", "skip")} == {}


def test_doctor_detects_ranks_with_the_same_samples():
    overrides = [*SMALL, "data={type: 'faults:EveryoneFirst'}"]
    last = list(run_doctor(load("grpo-toy-flow", overrides)))[-1]
    assert last.verdict == "fail" and "depends on the rank" in last.advice, last


@pytest.mark.slow
@pytest.mark.fresh_interpreters
def test_two_ranks_agree_with_one():
    last = list(run_doctor(load("grpo-lora-toy-flow", SMALL)))[-1]
    assert last.verdict == "pass", last


def test_doctor_numbers_are_finite():
    assert all("nan" not in found.number for found in run_doctor(load("nft-toy-flow", SMALL)))
