"""Each check of the doctor passes on a correct run and detects its planted fault."""

import sys
from pathlib import Path

import pytest
import torch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.diagnostics.doctor import CHECKS, WriteProbe, run_check, run_doctor

SMALL = ["sample.every=0", "batch.prompts=4", "objective.group_size=4"]


@pytest.fixture(autouse=True)
def import_faults(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("faults", None)


@pytest.mark.parametrize(
    ("check", "recipe", "fault", "fragment"),
    [
        (
            "importance ratio (fp32)",
            "grpo-toy-flow",
            "model={type: 'faults:UnseededNoise'}",
            "sampling and scoring",
        ),
        (
            "importance ratio (bf16)",
            "grpo-toy-flow",
            "model={type: 'faults:UnseededNoise'}",
            "sampling and scoring",
        ),
        ("cache", "grpo-toy-causal", "model={type: 'faults:BrokenCache'}", "KV cache"),
        ("gradients", "grpo-toy-flow", "model={type: 'faults:UnusedLayer'}", "spare.weight"),
        (
            "weights",
            "grpo-toy-flow",
            "model={type: 'faults:StaleWeights'}",
            "trained weights",
        ),
        ("reference", "grpo-toy-flow", "objective={type: 'faults:DetachedKL'}", "live weights"),
        ("rewards", "grpo-toy-flow", "rewards.color={type: 'faults:Constant'}", "same reward"),
        ("rewards", "grpo-toy-flow", "rewards.color={type: 'faults:Constant', broken: true}", "NaN"),
        ("reward inputs", "grpo-toy-flow", "rewards.color={type: 'faults:WritesPixels'}", "color writes"),
        ("pixels", "grpo-toy-flow", "model={type: 'faults:WrongRange'}", "[0, 1]"),
        ("resume", "grpo-toy-flow", "objective={type: 'faults:UncheckpointedState'}", "checkpoint"),
    ],
)
def test_doctor_detects_planted_fault(check, recipe, fault, fragment, tmp_path):
    overrides = [fault] if not fault.startswith("objective") else [fault, "objective.group_size=4"]
    base = [setting for setting in SMALL if not (fault.startswith("objective") and setting.startswith("objective"))]
    run = build(load(recipe, [*base, *overrides]), tmp_path / "run")
    result = run_check(check, CHECKS[check], run)
    assert result.verdict == "fail", result
    assert fragment in result.advice


def test_probe_detects_a_reward_that_writes_into_metadata():
    import faults

    class WritesTarget(faults.Constant):
        def score(self, pixels, prompts, metadata):
            for entry in metadata if entry_is_changed else ():
                entry["target"].numpy()[:] += 1
            return super().score(pixels, prompts, metadata)

    for entry_is_changed in (False, True):
        probe = WriteProbe(WritesTarget())
        metadata = [{"target": torch.tensor([1.0, torch.nan]), "name": "a"}]
        probe.score(torch.zeros(1, 1, 3, 2, 2), ["a"], metadata)
        assert probe.wrote == entry_is_changed and metadata[0]["target"][0] == 1


@pytest.mark.parametrize("recipe", ["grpo-toy-flow", "grpo-lora-toy-flow", "grpo-toy-causal", "grpo-toy-masked"])
def test_doctor_passes_a_correct_run(recipe, tmp_path):
    run = build(load(recipe, SMALL), tmp_path / "run")
    results = {check: run_check(check, CHECKS[check], run) for check in CHECKS}
    assert {check: result for check, result in results.items() if result.verdict not in ("pass", "skip")} == {}


def test_doctor_detects_ranks_with_the_same_samples():
    overrides = [*SMALL, "data={type: 'faults:SameRowsOnAllRanks'}"]
    last = list(run_doctor(load("grpo-toy-flow", overrides)))[-1]
    assert last.verdict == "fail" and "rank" in last.advice, last


@pytest.mark.slow
@pytest.mark.fresh_interpreters
def test_two_ranks_equal_one():
    last = list(run_doctor(load("grpo-lora-toy-flow", SMALL)))[-1]
    assert last.verdict == "pass", last


def test_doctor_numbers_are_finite():
    assert all("nan" not in result.number for result in run_doctor(load("nft-toy-flow", SMALL)))
