"""Generators of tokens, and Qwen-Image, are planned too: cache, rollouts, and the pass that scores."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.load import load
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.models import qwen_image
from tastemaker.models.llamagen.model import VARIANTS as WIDTHS

LLAMAGEN = [
    "model.variant=tiny",
    "model.codebook_size=64",
    "model.autoencoder=null",
    "batch.prompts=4",
    "batch.rollout_batch_size=8",
    "rewards={}",
]
SHOWO = [
    "model.width=32",
    "model.depth=2",
    "model.heads=2",
    "model.intermediate_size=64",
    "model.autoencoder_channels=32",
    "rewards={}",
]
QWEN = "Qwen/Qwen-Image"


def planned(recipe: str, *overrides: str, world: int = 1) -> ResourceEstimate:
    return estimate_resources(load(recipe, list(overrides)), world)


def test_kv_cache_size() -> None:
    width, depth, _ = WIDTHS["tiny"]
    found = planned("grpo-llamagen", *LLAMAGEN, "engine.precision=fp32")
    guided = 2 * 8
    assert found.kv_cache == 4 * 2 * depth * guided * (1 + 256) * width
    assert (
        planned("grpo-llamagen", *LLAMAGEN, "engine.precision=fp32", "guidance.scale=1").kv_cache == found.kv_cache / 2
    )


@pytest.mark.slow
def test_decoding_copies_weights_of_another_dtype() -> None:
    width, depth, _ = WIDTHS["tiny"]
    hidden = 96
    matrices = depth * (4 * width * width + 3 * width * hidden + 2 * width) + 64 * width
    mixed = planned("grpo-llamagen", *LLAMAGEN)  # float32 weights, products in bfloat16
    alike = planned("grpo-llamagen", *LLAMAGEN, "engine.param_dtype=bf16")
    assert mixed.kv_cache - alike.kv_cache == 2 * matrices


def test_decoding_reads_weights_and_cache_per_token() -> None:
    found = planned("grpo-llamagen", *LLAMAGEN)
    fewer = planned("grpo-llamagen", *LLAMAGEN, "objective.group_size=4")
    assert found.collect_bytes_read > fewer.collect_bytes_read > 0
    assert found.seconds(1e30, 1.0) == pytest.approx(found.collect_bytes_read)
    assert planned("llamagen-pretrain", *LLAMAGEN).collect_bytes_read == 0


@pytest.mark.slow
def test_sharded_weights_keep_no_cache() -> None:
    sharded = [*LLAMAGEN, "engine.strategy=fsdp", "process.recompute_log_probs=false"]
    alone = planned("grpo-llamagen", *sharded)
    apart = planned("grpo-llamagen", *sharded, "batch.prompts=8", world=2)
    assert alone.kv_cache > 0 and apart.kv_cache == 0
    assert apart.collect_activations >= alone.collect_activations


@pytest.mark.slow
def test_large_logits_are_chunked() -> None:
    """Of 16384 codes, sixteen sequences have 256 MiB of logits in float32, and a gradient has as many."""
    large = [
        *LLAMAGEN,
        "model.codebook_size=16384",
        "batch.micro_batch_size=16",
        "guidance.scale=1",
        "engine.precision=fp32",
    ]
    found = planned("grpo-llamagen", *large)
    assert found.update_activations < 256 * 2**20
    assert planned("grpo-llamagen", *large, "engine.strategy=fsdp", world=2).update_activations > 2 * 256 * 2**20


@pytest.mark.slow
def test_teacher_forcing_has_no_cache() -> None:
    found = planned("grpo-llamagen-tf", *LLAMAGEN, "rewards.mse.type=mse")
    assert found.kv_cache == 0 == found.collect_bytes_read
    free = planned("grpo-llamagen", *LLAMAGEN, "guidance.scale=1", "objective.kl_coef=0")
    assert found.collect_flops < free.collect_flops / 8


def test_sequence_flops_match_hand_count() -> None:
    found = planned("llamagen-pretrain", "model.autoencoder=null", "batch.prompts=1", "engine.precision=fp32")
    weights = 110_888_448 - 768 * (16384 + 1001)  # of B, without embeddings
    attention = 12 * 4 * 256 * 256 * 768
    assert found.update_flops == pytest.approx(3 * (2 * 256 * weights + attention), rel=0.02)
    assert found.weights == 4 * 110_888_448


def test_masked_sampling_flops_grow_with_steps() -> None:
    short, long = (planned("dpo-iter-showo", *SHOWO, f"process.num_steps={steps}") for steps in (9, 18))
    assert long.collect_flops == pytest.approx(2 * short.collect_flops, rel=0.1)  # prompts are read once


@pytest.mark.slow
def test_dpo_on_pairs_needs_no_rollout() -> None:
    pairs = planned("dpo-showo", *SHOWO)
    assert pairs.collect_batch == 0 < pairs.update_flops
    scored = planned("dpo-showo", *SHOWO, "model.likelihood_scope=sequence")  # among 58498 ids instead of 8192
    assert scored.update_activations > 2 * pairs.update_activations


def test_rollouts_only_guidance_doubles_the_rollout_batch() -> None:
    small = ["batch.prompts=4", *LLAMAGEN[:3], "batch.rollout_batch_size=4", "batch.micro_batch_size=4", "rewards={}"]
    found = planned("ar-grpo", *small)
    assert (found.collect_batch, found.update_batch) == (8, 4)


@pytest.mark.slow
def test_plan_qwen_image(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        **qwen_image.CONFIGS,
        "transformer": qwen_image.TINY_CONFIGS["transformer"],
        "vae": qwen_image.TINY_CONFIGS["vae"],
    }
    monkeypatch.setitem(qwen_image.QWEN_IMAGE.configs, QWEN, small)
    found = planned("srpo-qwen-image", "model.height=64", "model.width=64", "model.max_text_tokens=16", "rewards={}")
    assert found.frozen > 0 and 0 < found.collect_activations < found.total


def test_plan_prints_decoding_bandwidth() -> None:
    told = CliRunner().invoke(app, ["plan", "grpo-llamagen", *LLAMAGEN, "--tbps", "1"])
    assert told.exit_code == 0, told.output
    assert "KV cache" in told.output and "TB read for decoding" in told.output
