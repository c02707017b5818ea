"""Resource estimates of token generators, Qwen-Image and Sana: KV cache, rollouts and scoring."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.load import load
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.models import qwen_image, qwen_image_21, qwen_image_edit, sana
from tastemaker.models.janus import checkpoint
from tastemaker.models.llamagen.model import VARIANTS as WIDTHS
from tastemaker.models.nets.janus import JanusNet

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


def estimate(recipe: str, *overrides: str, world_size: int = 1) -> ResourceEstimate:
    return estimate_resources(load(recipe, list(overrides)), world_size)


def test_kv_cache_size() -> None:
    width, depth, _ = WIDTHS["tiny"]
    resources = estimate("grpo-llamagen", *LLAMAGEN, "engine.precision=fp32")
    batch_size = 2 * 8
    assert resources.kv_cache == 4 * 2 * depth * batch_size * (1 + 256) * width
    assert (
        estimate("grpo-llamagen", *LLAMAGEN, "engine.precision=fp32", "guidance.scale=1").kv_cache
        == resources.kv_cache / 2
    )


@pytest.mark.slow
def test_decoding_copies_weights_of_another_dtype() -> None:
    width, depth, _ = WIDTHS["tiny"]
    hidden = 96
    matrices = depth * (4 * width * width + 3 * width * hidden + 2 * width) + 64 * width
    mixed = estimate("grpo-llamagen", *LLAMAGEN)  # float32 weights, products in bfloat16
    same_dtype = estimate("grpo-llamagen", *LLAMAGEN, "engine.param_dtype=bf16")
    assert mixed.kv_cache - same_dtype.kv_cache == 2 * matrices


@pytest.mark.slow
def test_8bit_copies_for_decoding_are_counted() -> None:
    width, depth, hidden = 32, 2, 96
    matrices, rows = depth * (4 * width * width + 3 * width * hidden), depth * (5 * width + 2 * hidden)
    settings = [*LLAMAGEN, "engine.param_dtype=bf16"]
    plain, low = (estimate("grpo-llamagen", *settings, f"engine.rollout_precision={kind}") for kind in ("same", "fp8"))
    assert low.rollout_copies == matrices + 4 * rows and plain.rollout_copies == 0
    assert low.kv_cache == plain.kv_cache  # plain weights are multiplied as they are
    steps = 4 * 8 * 256 // 8  # of all rollout batches
    assert plain.collect_bytes_read - low.collect_bytes_read == steps * matrices
    # With float32 weights only those that keep their precision are copied to bf16.
    mixed, low_mixed = (estimate("grpo-llamagen", *LLAMAGEN, f"engine.rollout_precision={x}") for x in ("same", "fp8"))
    assert mixed.kv_cache - low_mixed.kv_cache == 2 * matrices


def test_decoding_reads_weights_and_cache_per_token() -> None:
    resources = estimate("grpo-llamagen", *LLAMAGEN)
    fewer = estimate("grpo-llamagen", *LLAMAGEN, "objective.group_size=4")
    assert resources.collect_bytes_read > fewer.collect_bytes_read > 0
    assert resources.seconds(1e30, 1.0) == pytest.approx(resources.collect_bytes_read)
    assert estimate("llamagen-pretrain", *LLAMAGEN).collect_bytes_read == 0


@pytest.mark.slow
def test_sharded_weights_keep_no_cache() -> None:
    settings = [*LLAMAGEN, "engine.strategy=fsdp", "process.recompute_log_probs=false"]
    one_rank = estimate("grpo-llamagen", *settings)
    two_ranks = estimate("grpo-llamagen", *settings, "batch.prompts=8", world_size=2)
    assert one_rank.kv_cache > 0 and two_ranks.kv_cache == 0
    assert two_ranks.collect_activations >= one_rank.collect_activations


@pytest.mark.slow
def test_large_logits_are_chunked() -> None:
    """With 16384 codes, sixteen sequences have 256 MiB of float32 logits, and as much again for their gradient."""
    settings = [
        *LLAMAGEN,
        "model.codebook_size=16384",
        "batch.micro_batch_size=16",
        "guidance.scale=1",
        "engine.precision=fp32",
    ]
    resources = estimate("grpo-llamagen", *settings)
    assert resources.update_activations < 256 * 2**20
    assert (
        estimate("grpo-llamagen", *settings, "engine.strategy=fsdp", world_size=2).update_activations > 2 * 256 * 2**20
    )


@pytest.mark.slow
def test_teacher_forcing_has_no_cache() -> None:
    resources = estimate("grpo-llamagen-tf", *LLAMAGEN, "rewards.mse.type=mse")
    assert resources.kv_cache == 0 == resources.collect_bytes_read
    autoregressive = estimate("grpo-llamagen", *LLAMAGEN, "guidance.scale=1", "objective.kl_coef=0")
    assert resources.collect_flops < autoregressive.collect_flops / 8


def test_sequence_flops_match_hand_count() -> None:
    resources = estimate("llamagen-pretrain", "model.autoencoder=null", "batch.prompts=1", "engine.precision=fp32")
    weights = 110_888_448 - 768 * (16384 + 1001)  # of LlamaGen-B, without embeddings
    attention = 12 * 4 * 256 * 256 * 768
    assert resources.update_flops == pytest.approx(3 * (2 * 256 * weights + attention), rel=0.02)
    assert resources.weights == 4 * 110_888_448


def test_masked_sampling_flops_grow_with_steps() -> None:
    short, long = (estimate("dpo-iter-showo", *SHOWO, f"process.num_steps={steps}") for steps in (9, 18))
    assert long.collect_flops == pytest.approx(2 * short.collect_flops, rel=0.1)  # prompts are read once


@pytest.mark.slow
def test_dpo_on_pairs_needs_no_rollout() -> None:
    pairs = estimate("dpo-showo", *SHOWO)
    assert pairs.collect_batch == 0 < pairs.update_flops
    scored = estimate("dpo-showo", *SHOWO, "model.likelihood_scope=sequence")  # among 58498 ids instead of 8192
    assert scored.update_activations > 2 * pairs.update_activations


def test_rollouts_only_guidance_doubles_the_rollout_batch() -> None:
    small = ["batch.prompts=4", *LLAMAGEN[:3], "batch.rollout_batch_size=4", "batch.micro_batch_size=4", "rewards={}"]
    resources = estimate("ar-grpo", *small)
    assert (resources.collect_batch, resources.update_batch) == (8, 4)


@pytest.mark.slow
def test_plan_qwen_image(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        **qwen_image.CONFIGS,
        "transformer": qwen_image.TINY_CONFIGS["transformer"],
        "vae": qwen_image.TINY_CONFIGS["vae"],
    }
    monkeypatch.setitem(qwen_image.QWEN_IMAGE.configs, QWEN, small)
    resources = estimate(
        "srpo-qwen-image", "model.height=64", "model.width=64", "model.max_text_tokens=16", "rewards={}"
    )
    assert resources.frozen > 0 and 0 < resources.collect_activations < resources.total


EDIT, SPRINT, QWEN_21 = "Qwen/Qwen-Image-Edit-2509", sana.SPRINT_SOURCE.hub, "Qwen/Qwen-Image-2.1"
SANA = sana.SOURCE.hub


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "published", "hub", "tiny"),
    [
        ("reward-gradient-qwen-image-edit", qwen_image_edit.QWEN_IMAGE_EDIT, EDIT, qwen_image_edit.TINY_CONFIGS),
        ("grpo-qwen-image-21", qwen_image_21.QWEN_IMAGE_21, QWEN_21, qwen_image_21.TINY_CONFIGS),
        ("grpo-sana-sprint", sana.SPRINT, SPRINT, sana.TINY_SPRINT),
        ("reward-gradient-sana", sana.SANA, SANA, sana.TINY_SANA),
    ],
)
def test_plan_image_models(recipe: str, published: Any, hub: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small networks of the published layout; an edited image adds its tokens to the activations."""
    monkeypatch.setitem(published.configs, hub, {**published.configs[hub], **tiny})
    resources = estimate(recipe, "model.height=64", "model.width=64", "model.max_text_tokens=16", "rewards={}")
    assert resources.frozen > 0 and 0 < resources.collect_activations < resources.total


@pytest.mark.slow
def test_janus_has_a_cache_while_sampling_only() -> None:
    sizes, tiny = checkpoint.TINY_SIZES, ["model.weights=tiny", "model.max_text_tokens=16", "rewards={}"]
    batch = ["batch.prompts=4", "batch.rollout_batch_size=8", "engine.precision=fp32"]
    resources = estimate("grpo-janus", *tiny, *batch)
    rows, positions = 2 * 8, 16 + sizes.grid_size**2
    cache = 4 * 2 * sizes.depth * rows * positions * sizes.width
    assert resources.kv_cache == 0 and resources.collect_activations >= cache
    assert resources.weights == 4 * sum(p.numel() for p in JanusNet(sizes).parameters())
    assert estimate("grpo-janus", *tiny, *batch, "guidance.scale=1").collect_bytes_read < resources.collect_bytes_read
    lora = ["tuning=null", "tuning={type: lora, rank: 2}", "engine.precision=bf16"]
    adapted = estimate("grpo-janus", *tiny, *batch, *lora)
    assert 0 < adapted.optimizer_state < resources.optimizer_state and adapted.collect_flops > 0


def test_plan_prints_decoding_bandwidth() -> None:
    result = CliRunner().invoke(app, ["plan", "grpo-llamagen", *LLAMAGEN, "--tbps", "1"])
    assert result.exit_code == 0, result.output
    assert "KV cache" in result.output and "TB read for decoding" in result.output
