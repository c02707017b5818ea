"""`engine.activation_memory: auto`: the fewest checkpointed blocks that fit, kept by a resumed run."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.core.objective import SingleProcess
from tastemaker.core.registry import ConfigError
from tastemaker.diagnostics import activation_budget, plan
from tastemaker.diagnostics.activation_budget import (
    GIB,
    USABLE_SHARE,
    MemoryChoice,
    choose_activation_memory,
    choose_block_count,
    estimate_on_gpu,
    fit_activation_memory,
    with_checkpointed_blocks,
)
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.models import flux
from tastemaker.training import trainer
from tastemaker.training.trainer import run_training

DEV = "black-forest-labs/FLUX.1-dev"
AUTO = "engine.activation_memory=auto"
SMALL = (
    *("model.height=64", "model.width=64", "model.max_text_tokens=16", "rewards.hps=null", "batch.prompts=8"),
    *("objective.relative=false", "process.num_steps=3"),
)
TOY = ["sample.every=0", "guard.every=0", "checkpoint.every=1", "batch.prompts=2", "engine.device=cpu", "name=run"]
NO_OUTPUT = Console(quiet=True)
NUM_BLOCKS = 10


def planned(config: RunConfig, world_size: int = 1) -> ResourceEstimate:
    """A plan of 20 GiB and 5 GiB for each of ten blocks whose activations are kept."""
    engine = config.engine
    checkpointed = (engine.checkpointed_blocks or NUM_BLOCKS) if engine.activation_memory == "checkpoint" else 0
    activations = 5.0 * GIB * (NUM_BLOCKS - checkpointed)
    return ResourceEstimate(20.0 * GIB, 0, 0, 0, 0, 0, 0, activations, 1.0, 1.0, num_checkpoints=NUM_BLOCKS)


def choose_and_count(totals: Sequence[float], limit: float) -> tuple[int, int]:
    """Return the chosen number of blocks and how many plans that took."""
    calls: list[int] = []

    def total(count: int) -> float:
        calls.append(count)
        return totals[count]

    return choose_block_count(total, len(totals) - 1, limit), len(calls)


def test_the_fewest_blocks_that_fit_are_chosen() -> None:
    rng = random.Random(0)
    for _ in range(300):
        blocks = [rng.choice((1, 1, 1, 7, 40)) for _ in range(rng.randint(1, 60))]
        totals = [100.0 + sum(blocks[count:]) for count in range(len(blocks) + 1)]
        limit = rng.randint(95, int(totals[0]) + 5)
        count, calls = choose_and_count(totals, limit)
        fitting = [n for n, total in enumerate(totals) if total <= limit]
        assert count == (fitting[0] if fitting else len(blocks))
        assert calls <= 4 + 3 * len(blocks).bit_length()


def test_equal_blocks_need_few_plans() -> None:
    totals = [20.0 + 57 - count for count in range(58)]
    for limit in range(20, 90):
        count, calls = choose_and_count(totals, limit)
        assert count == max(0, 77 - limit) and calls <= 4, limit


def test_less_memory_never_checkpoints_fewer_blocks() -> None:
    config = load("srpo-flux-hps", [AUTO])
    counts, fitting = [], []
    for gib in (200, 80, 70, 60, 40, 24, 20):
        choice = fit_activation_memory(config, gib * GIB, 1, planned)
        total = planned(replace(config, engine=choice.engine)).total
        assert choice.fits == (total <= USABLE_SHARE * gib * GIB)
        kept = choice.engine.activation_memory == "keep"
        counts.append(0 if kept else choice.engine.checkpointed_blocks or NUM_BLOCKS)
        fitting.append(choice.fits)
    assert counts == [0, 0, 2, 4, 7, 10, 10] and fitting == [True] * 6 + [False]


@pytest.fixture
def small_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small FLUX of two double and three single blocks."""
    transformer = {**flux.TINY_CONFIGS["transformer"], "num_layers": 2, "num_single_layers": 3}
    small = {**flux.FLUX_DEV, "transformer": transformer, "vae": flux.TINY_CONFIGS["vae"]}
    monkeypatch.setitem(flux.FLUX.configs, DEV, small)


@pytest.mark.slow
@pytest.mark.usefixtures("small_flux")
def test_planned_memory_and_work_depend_on_the_number_of_blocks() -> None:
    config = load("srpo-flux-hps", [*SMALL, AUTO, "model.embeddings=embeddings"])  # else encoders make the peak

    @functools.cache
    def estimate(count: int) -> ResourceEstimate:
        return estimate_resources(replace(config, engine=with_checkpointed_blocks(config.engine, count, 5)))

    def measure(config: Any, world_size: int) -> ResourceEstimate:
        kept = config.engine.activation_memory == "keep"
        return estimate(0 if kept else config.engine.checkpointed_blocks or 5)

    kept, some, every = estimate(0), estimate(3), estimate(5)
    assert kept.num_checkpoints == 5
    assert kept.update_activations > some.update_activations > every.update_activations
    assert kept.update_flops < some.update_flops < every.update_flops
    gpu_bytes = some.total / USABLE_SHARE
    choice = fit_activation_memory(config, gpu_bytes, 1, measure)
    count = choice.engine.checkpointed_blocks
    assert choice.fits and count is not None and 1 <= count <= 3
    assert estimate(count).total <= some.total < estimate(count - 1).total
    assert estimate_on_gpu(config, gpu_bytes, 1, measure).total == estimate(count).total


def fake_engine(config: RunConfig, device: str) -> Any:
    return SimpleNamespace(config=config.engine, device=torch.device(device), comm=SingleProcess())


def test_engine_resolves_auto_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("srpo-flux-hps", [AUTO])
    monkeypatch.setattr(activation_budget, "usable_gpu_bytes", lambda device: 70.0 * GIB)
    chosen = choose_activation_memory(config, fake_engine(config, "cuda"), planned)
    assert (chosen.activation_memory, chosen.checkpointed_blocks) == ("checkpoint", 2)
    assert chosen.precision == config.engine.precision
    for device in ("cpu", "mps"):
        assert choose_activation_memory(config, fake_engine(config, device), planned).activation_memory == "keep"
    monkeypatch.setattr(activation_budget, "usable_gpu_bytes", lambda device: 10.0 * GIB)
    with pytest.warns(UserWarning, match=r"recompute 10 of 10 blocks.*TM2652"):
        chosen = choose_activation_memory(config, fake_engine(config, "cuda"), planned)
    assert (chosen.activation_memory, chosen.checkpointed_blocks) == ("checkpoint", None)

    def refuse(config: RunConfig, world_size: int) -> ResourceEstimate:
        raise ConfigError("plan does not know this model [TM659]")

    assert choose_activation_memory(config, fake_engine(config, "cuda"), refuse).activation_memory == "checkpoint"


class SecondRank:
    """The second of two ranks, whose GPU is the larger one."""

    rank, world_size = 1, 2

    def gather_objects(self, items: Any) -> list[Any]:
        if items:
            return [24.0 * GIB, *items]
        return [MemoryChoice(with_checkpointed_blocks(load("srpo-flux-hps").engine, 3, 10), True, "chosen by rank 0")]


def test_other_ranks_use_the_choice_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("srpo-flux-hps", [AUTO])
    monkeypatch.setattr(activation_budget, "usable_gpu_bytes", lambda device: 80.0 * GIB)
    engine: Any = SimpleNamespace(config=config.engine, device=torch.device("cuda"), comm=SecondRank())
    chosen = choose_activation_memory(config, engine, lambda *_: pytest.fail("only rank 0 measures"))
    assert (chosen.activation_memory, chosen.checkpointed_blocks) == ("checkpoint", 3)


def test_resumed_run_keeps_the_number_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(steps: int, **options: Any) -> dict[str, Any]:
        assert run_training(load("grpo-toy-flow", [*settings, f"steps={steps}"]), console=NO_OUTPUT, **options)
        engine: dict[str, Any] = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["engine"]
        return engine

    settings = [*TOY, f"output_dir={tmp_path}", AUTO]

    def choose(config: RunConfig, engine: Any) -> Any:
        return with_checkpointed_blocks(engine.config, 2, 3)

    monkeypatch.setattr(trainer, "choose_activation_memory", choose)
    first = train(1)
    assert (first["activation_memory"], first["checkpointed_blocks"]) == ("checkpoint", 2)
    monkeypatch.setattr(trainer, "choose_activation_memory", lambda *_: pytest.fail("chosen again"))
    assert train(2) == first
    settings.append("name=branch")
    branch = load("grpo-toy-flow", [*settings, "steps=3"])
    assert run_training(branch, resume=tmp_path / "run/checkpoints/step-000002", console=NO_OUTPUT)
    assert yaml.safe_load((tmp_path / "branch/config.yaml").read_text())["engine"] == first


def test_run_on_a_cpu_keeps_activations(tmp_path: Path) -> None:
    settings = [*TOY, f"output_dir={tmp_path}", AUTO, "steps=1"]
    assert run_training(load("grpo-toy-flow", settings), console=NO_OUTPUT)
    engine = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["engine"]
    assert engine["activation_memory"] == "keep" and engine["checkpointed_blocks"] is None


def test_plan_shows_the_choice_and_suggests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "estimate_any", planned)

    def invoke(*options: str) -> Any:
        return CliRunner().invoke(app, ["plan", "srpo-flux-hps", "--no-cache", *options])

    result = invoke(AUTO, "--gpu-gib", "70")
    assert result.exit_code == 0 and "fits into 70 GiB" in result.stdout
    assert "activation memory: recompute 2 of 10 blocks: 60.0 GiB planned, 63.0 usable of 70.0" in result.stdout
    kept = invoke("engine.activation_memory=keep", "--gpu-gib", "24")
    assert "  engine.activation_memory=checkpoint: 20.0 GiB" in kept.stdout
    assert "engine.activation_memory=auto" in kept.stdout
    partly = invoke("engine.activation_memory=checkpoint", "engine.checkpointed_blocks=2", "--gpu-gib", "24")
    assert "  engine.checkpointed_blocks=null: 20.0 GiB" in partly.stdout
    too_small = invoke(AUTO, "--gpu-gib", "16")
    assert "activation memory: recompute 10 of 10 blocks" in too_small.stdout
    assert "engine.activation_memory" not in too_small.stdout.replace("activation memory:", "")


def test_rules_name_what_auto_does_not_know() -> None:
    judge = load_problem("paligemma-finetune", AUTO)
    assert "TM2650" in judge and "judges" in judge
    for value in ("keep", "offload", "auto"):
        problem = load_problem("grpo-toy-flow", f"engine.activation_memory={value}", "engine.checkpointed_blocks=3")
        assert "TM2651" in problem and value in problem
    assert not load_problem("grpo-toy-flow", "engine.activation_memory=checkpoint", "engine.checkpointed_blocks=3")


def load_problem(recipe: str, *overrides: str) -> str:
    from tastemaker.config.load import load_any_config

    problems = find_problems(load_any_config(recipe, list(overrides)), 1)
    return "\n".join(problem for problem in problems if "engine." in problem)
