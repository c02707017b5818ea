"""Resource estimates of latent DiTs and of autoencoder training."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tastemaker.autoencoders.patchgan import PatchGANDiscriminator
from tastemaker.cli import app, main
from tastemaker.config.load import load, load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.core.types import Placement
from tastemaker.diagnostics import plan
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.models.image_tokenizer import VqSpec
from tastemaker.models.nets.latent_dit import LatentDiT

DIT = ["model.width=32", "model.depth=2", "model.heads=2", "batch.prompts=8", "engine.precision=fp32"]
LATENTS = "data={type: latent_folder, path: latents}"
VAE = [
    "autoencoder.down_channels=[8, 16, 16]", "autoencoder.mid_channels=[16]", "autoencoder.norm_channels=4",
    "autoencoder.num_down_layers=1", "autoencoder.num_up_layers=1",
]  # fmt: skip


def estimate(*overrides: str, recipe: str = "dit-folder", world_size: int = 1) -> ResourceEstimate:
    return estimate_resources(load(recipe, [*DIT, *overrides]), world_size)


def estimate_autoencoder(*overrides: str, world_size: int = 1) -> ResourceEstimate:
    config = load_any_config("vae-celebhq", [*VAE, "batch_size=8", *overrides])
    assert isinstance(config, AutoencoderRunConfig)
    return plan.estimate_autoencoder_resources(config, world_size)


@pytest.fixture(scope="module")
def plain() -> ResourceEstimate:
    return estimate(LATENTS)


def test_dit_parameter_memory(plain: ResourceEstimate) -> None:
    spec: Any = load("dit-folder", [*DIT, LATENTS]).model
    with torch.device("meta"):
        count = sum(p.numel() for p in LatentDiT(spec.network_config()).parameters())
    assert (plain.weights, plain.gradients, plain.optimizer_state, plain.snapshots) == (
        4 * count,
        4 * count,
        8 * count,
        4 * count,
    )
    assert (
        estimate(LATENTS, "engine.activation_memory=checkpoint", "model.depth=4").update_activations
        < plain.update_activations
    )


def test_dit_flops_match_hand_count(plain: ResourceEstimate) -> None:
    width, depth, tokens, rows = 32, 2, 16, 8
    conditioning = 2 * (256 * width + width * width + depth * 6 * width * width + 2 * width * width)  # once per sample
    block = 2 * 12 * width * width * tokens + 4 * tokens * tokens * width
    embed_and_output = 2 * (16 * 4 * width + width * 16 * 4) * tokens
    assert plain.update_flops == pytest.approx(3 * rows * (conditioning + depth * block + embed_and_output), rel=1e-3)


@pytest.mark.parametrize("conditioning", ["class", "words", "caption"])
def test_plan_dit_with_any_conditioning(conditioning: str, plain: ResourceEstimate) -> None:
    assert estimate(LATENTS, f"model.conditioning={conditioning}").weights > plain.weights


def test_image_data_is_encoded_and_latents_are_not(plain: ResourceEstimate) -> None:
    from_images, from_latents = estimate(), plain
    assert from_latents.collect_flops == 0 < from_images.collect_flops
    assert (
        from_images.collect_activations > from_latents.collect_activations
        and from_images.frozen == from_latents.frozen > 0
    )


@pytest.mark.slow
def test_missing_vae_is_assumed_to_be_stable_diffusions() -> None:
    with pytest.warns(UserWarning, match="runs/none"):
        resources = estimate(LATENTS, "model.autoencoder=runs/none", "model.latent_channels=4")
    assert resources.frozen == pytest.approx(4 * 83_653_863, rel=1e-6)


@pytest.mark.slow
def test_plan_reward_gradient_through_the_vae(plain: ResourceEstimate) -> None:
    resources = estimate("batch.prompts=4", recipe="reward-gradient-dit-folder")
    assert resources.flops > 0 and resources.update_activations > plain.update_activations / 2


def test_autoencoder_memory_includes_discriminator_and_lpips() -> None:
    config = load_any_config("vae-celebhq", VAE)
    assert isinstance(config, AutoencoderRunConfig)
    with torch.device("meta"):
        discriminator = sum(p.numel() for p in PatchGANDiscriminator(64, 3, extra_layer=False).parameters())
    autoencoder = sum(p.numel() for p in config.autoencoder.load(Placement()).parameters())
    resources = estimate_autoencoder()
    assert (resources.weights, resources.optimizer_state, resources.snapshots) == (
        4 * (autoencoder + discriminator),
        8 * (autoencoder + discriminator),
        4 * autoencoder,
    )
    assert resources.frozen > 4 * 14_714_688 and resources.collect_activations > 0  # the convolutions of VGG16
    plain = estimate_autoencoder("discriminator=null", "loss.lpips=0", "ema_decay=0")
    assert (plain.weights, plain.snapshots, plain.collect_activations) == (4 * autoencoder, 0, 0)
    assert plain.update_activations < resources.update_activations and plain.update_flops < resources.update_flops


@pytest.mark.slow
def test_autoencoder_memory_depends_on_micro_batch() -> None:
    full, micro_batches = (
        estimate_autoencoder("loss.lpips=0", "discriminator=null"),
        estimate_autoencoder("loss.lpips=0", "discriminator=null", "micro_batch_size=2"),
    )
    assert (
        micro_batches.update_activations < 0.4 * full.update_activations
        and micro_batches.update_flops == full.update_flops
    )
    assert (
        estimate_autoencoder("loss.lpips=0", "discriminator=null", world_size=2).update_flops == full.update_flops / 2
    )


@pytest.mark.slow
def test_plan_tokenizer() -> None:
    config = load_any_config("playground-vq", ["batch_size=2"])
    assert isinstance(config, AutoencoderRunConfig)
    small = VqSpec(channels=8, channel_multipliers=(1, 2), z_channels=8, codebook_size=64, norm_num_groups=2)
    resources = plan.estimate_autoencoder_resources(replace(config, autoencoder=small))
    assert resources.update_activations > 0 and resources.update_flops > 0


def test_plan_refuses_judges(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "paligemma-finetune"])
    assert re.search(r"plan: .*judge", capsys.readouterr().err)


def test_plan_command_for_dit_and_autoencoder() -> None:
    dit = CliRunner().invoke(app, ["plan", "dit-folder", *DIT, LATENTS])
    assert dit.exit_code == 0 and "8 in updates" in dit.output and " min for " in dit.output
    large = ["plan", "vae-celebhq", *VAE, "batch_size=512", "loss.lpips=0", "discriminator=null", "--gpu-gib", "1"]
    small_gpu = CliRunner().invoke(app, large)
    assert small_gpu.exit_code == 1 and "512 in updates" in small_gpu.output
    assert (
        "does not fit into 1 GiB" in small_gpu.output and "engine.activation_memory=checkpoint: 0." in small_gpu.output
    )
