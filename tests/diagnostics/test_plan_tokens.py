"""Generators of tokens, and Qwen-Image, are planned too: cache, rollouts, and the pass that scores."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.load import load
from tastemaker.diagnostics.resource_plan import ResourceEstimate, estimate_resources, network_batch_sizes
from tastemaker.models import qwen_image
from tastemaker.models.component_configs import COMPONENT_CONFIGS, QWEN_IMAGE
from tastemaker.models.llamagen.sizes import SIZES as WIDTHS

LLAMAGEN = ["model.size=tiny", "model.codes=64", "model.codec=null", "batch.prompts=4", "batch.rollout=8", "rewards={}"]
SHOWO = ["model.width=32", "model.depth=2", "model.heads=2", "model.inner=64", "model.channels=32", "rewards={}"]
QWEN = "Qwen/Qwen-Image"


def planned(recipe: str, *overrides: str, world: int = 1) -> ResourceEstimate:
    return estimate_resources(load(recipe, list(overrides)), world)


def test_a_cache_holds_keys_and_values_of_every_place_of_every_row() -> None:
    width, depth, _ = WIDTHS["tiny"]
    found = planned("grpo-llamagen", *LLAMAGEN, "engine.precision=fp32")
    guided = 2 * 8
    assert found.cache == 4 * 2 * depth * guided * (1 + 256) * width
    assert planned("grpo-llamagen", *LLAMAGEN, "engine.precision=fp32", "guidance.scale=1").cache == found.cache / 2


@pytest.mark.slow
def test_weights_of_another_precision_are_copied_for_writing() -> None:
    width, depth, _ = WIDTHS["tiny"]
    hidden = 96
    matrices = depth * (4 * width * width + 3 * width * hidden + 2 * width) + 64 * width
    mixed = planned("grpo-llamagen", *LLAMAGEN)  # float32 weights, products in bfloat16
    alike = planned("grpo-llamagen", *LLAMAGEN, "engine.trainable=bf16")
    assert mixed.cache - alike.cache == 2 * matrices


def test_writing_reads_all_weights_and_the_cache_once_a_token() -> None:
    found = planned("grpo-llamagen", *LLAMAGEN)
    fewer = planned("grpo-llamagen", *LLAMAGEN, "objective.group=4")
    assert found.moved > fewer.moved > 0
    assert found.seconds(1e30, 1.0) == pytest.approx(found.moved)
    assert planned("llamagen-pretrain", *LLAMAGEN).moved == 0


@pytest.mark.slow
def test_where_weights_lie_apart_no_cache_is_kept_but_one_is_grown() -> None:
    sharded = [*LLAMAGEN, "engine.strategy=fsdp", "process.replay=false"]
    alone = planned("grpo-llamagen", *sharded)
    apart = planned("grpo-llamagen", *sharded, "batch.prompts=8", world=2)
    assert alone.cache > 0 and apart.cache == 0
    assert apart.rollout > alone.rollout


@pytest.mark.slow
def test_many_logits_are_never_held_at_once() -> None:
    """Of 16384 codes, sixteen sequences have 256 MiB of logits in float32, and a gradient has as many."""
    large = [*LLAMAGEN, "model.codes=16384", "batch.microbatch=16", "guidance.scale=1", "engine.precision=fp32"]
    found = planned("grpo-llamagen", *large)
    assert found.training < 256 * 2**20
    assert planned("grpo-llamagen", *large, "engine.strategy=fsdp", world=2).training > 2 * 256 * 2**20


@pytest.mark.slow
def test_teacher_forcing_reads_a_group_once_and_has_no_cache() -> None:
    found = planned("grpo-llamagen-tf", *LLAMAGEN, "rewards.mse.type=mse")
    assert found.cache == 0 == found.moved
    free = planned("grpo-llamagen", *LLAMAGEN, "guidance.scale=1", "objective.kl=0")
    assert found.sampling < free.sampling / 8


def test_work_of_a_sequence_is_two_operations_a_weight_and_token() -> None:
    found = planned("llamagen-pretrain", "model.codec=null", "batch.prompts=1", "engine.precision=fp32")
    weights = 110_888_448 - 768 * (16384 + 1001)  # of B, without embeddings
    attention = 12 * 4 * 256 * 256 * 768
    assert found.learning == pytest.approx(3 * (2 * 256 * weights + attention), rel=0.02)
    assert found.weights == 4 * 110_888_448


def test_sampling_of_a_masked_generator_is_planned_by_its_steps() -> None:
    short, long = (planned("dpo-iter-showo", *SHOWO, f"process.steps={steps}") for steps in (9, 18))
    assert long.sampling == pytest.approx(2 * short.sampling) and long.sampling > 0


@pytest.mark.slow
def test_pairs_of_a_masked_generator_are_planned_without_sampling() -> None:
    pairs = planned("dpo-showo", *SHOWO)
    assert pairs.sampling == 0 < pairs.learning
    scored = planned("dpo-showo", *SHOWO, "model.scored=sequence")  # among 58498 ids instead of 8192
    assert scored.training > 2 * pairs.training


def test_both_of_a_pair_are_held_at_once() -> None:
    assert network_batch_sizes(load("dpo-showo", ["batch.microbatch=3"])).training == 6


def test_learning_without_guidance_takes_one_row_where_sampling_takes_two() -> None:
    found = network_batch_sizes(load("ar-grpo", ["batch.rollout=4", "batch.microbatch=4"]))
    assert (found.rollout, found.training) == (8, 4)


@pytest.mark.slow
def test_qwen_image_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**QWEN_IMAGE, "transformer": qwen_image.SMALL["transformer"], "vae": qwen_image.SMALL["vae"]}
    monkeypatch.setitem(COMPONENT_CONFIGS, QWEN, small)
    found = planned("srpo-qwen-image", "model.height=64", "model.width=64", "model.words=16", "rewards={}")
    assert found.frozen > 0 and 0 < found.rollout < found.total


def test_the_command_says_what_is_read_token_by_token() -> None:
    told = CliRunner().invoke(app, ["plan", "grpo-llamagen", *LLAMAGEN, "--tbps", "1"])
    assert told.exit_code == 0, told.output
    assert "cache of keys and values" in told.output and "TB read token" in told.output
