"""DiT over latents and the training of autoencoders are planned at their full size, too."""

from __future__ import annotations

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
from tastemaker.diagnostics import autoencoder_plan
from tastemaker.diagnostics.resource_plan import ResourceEstimate, estimate_resources
from tastemaker.models.nets.latent_dit import LatentDiT
from tastemaker.models.vq import Vq

DIT = ["model.width=32", "model.depth=2", "model.heads=2", "batch.prompts=8", "engine.precision=fp32"]
LATENTS = "data={type: latent_folder, path: latents}"
VAE = [
    "autoencoder.down_channels=[8, 16, 16]", "autoencoder.mid_channels=[16]", "autoencoder.norm_channels=4",
    "autoencoder.num_down_layers=1", "autoencoder.num_up_layers=1",
]  # fmt: skip


def planned(*overrides: str, recipe: str = "dit-folder", world: int = 1) -> ResourceEstimate:
    return estimate_resources(load(recipe, [*DIT, *overrides]), world)


def copying(*overrides: str, world: int = 1) -> ResourceEstimate:
    config = load_any_config("vae-celebhq", [*VAE, "rows=8", *overrides])
    assert isinstance(config, AutoencoderRunConfig)
    return autoencoder_plan.estimate_autoencoder_resources(config, world)


@pytest.fixture(scope="module")
def plain() -> ResourceEstimate:
    return planned(LATENTS)


def test_a_dit_is_counted_as_it_is_made(plain: ResourceEstimate) -> None:
    spec: Any = load("dit-folder", [*DIT, LATENTS]).model
    found = plain
    with torch.device("meta"):
        count = sum(p.numel() for p in LatentDiT(spec.net()).parameters())
    assert (found.weights, found.gradients, found.moments, found.snapshots) == (
        4 * count,
        4 * count,
        8 * count,
        4 * count,
    )
    assert planned(LATENTS, "engine.memory=recompute", "model.depth=4").training < found.training


def test_the_work_of_a_dit_is_that_of_its_matrices(plain: ResourceEstimate) -> None:
    width, depth, tokens, rows = 32, 2, 16, 8
    told = 2 * (256 * width + width * width + depth * 6 * width * width + 2 * width * width)  # once a row
    block = 2 * 12 * width * width * tokens + 4 * tokens * tokens * width
    ends = 2 * (16 * 4 * width + width * 16 * 4) * tokens
    assert plain.learning == pytest.approx(3 * rows * (told + depth * block + ends), rel=1e-3)


@pytest.mark.parametrize("told", ["class", "words", "caption"])
def test_whatever_a_dit_is_told_it_can_be_planned(told: str, plain: ResourceEstimate) -> None:
    assert planned(LATENTS, f"model.told={told}").weights > plain.weights


def test_pictures_must_be_encoded_at_every_step_and_latents_need_not(plain: ResourceEstimate) -> None:
    of_pictures, of_latents = planned(), plain
    assert of_latents.sampling == 0 < of_pictures.sampling
    assert of_pictures.rollout > of_latents.rollout and of_pictures.frozen == of_latents.frozen > 0


@pytest.mark.slow
def test_an_autoencoder_that_is_not_here_is_taken_to_be_stable_diffusions() -> None:
    with pytest.warns(UserWarning, match="runs/none is not here yet"):
        found = planned(LATENTS, "model.codec=runs/none", "model.channels=4")
    assert found.frozen == pytest.approx(4 * 83_653_863, rel=1e-6)


@pytest.mark.slow
def test_aligning_a_dit_is_planned_with_the_way_through_its_autoencoder(plain: ResourceEstimate) -> None:
    found = planned("batch.prompts=4", recipe="reward-gradient-dit-folder")
    assert found.sampling > 0 and found.training > plain.training / 2


def test_an_autoencoder_is_counted_with_its_critic_and_what_judges_its_copies() -> None:
    config = load_any_config("vae-celebhq", VAE)
    assert isinstance(config, AutoencoderRunConfig)
    with torch.device("meta"):
        critic = sum(p.numel() for p in PatchGANDiscriminator(64, 3, tail=False).parameters())
    own = sum(p.numel() for p in config.autoencoder.load(Placement()).parameters())
    found = copying()
    assert (found.weights, found.moments, found.snapshots) == (4 * (own + critic), 8 * (own + critic), 4 * own)
    assert found.frozen > 4 * 14_714_688 and found.rollout > 0  # the convolutions of VGG16
    alone = copying("critic=null", "loss.lpips=0", "ema=0")
    assert (alone.weights, alone.snapshots, alone.rollout) == (4 * own, 0, 0)
    assert alone.training < found.training and alone.learning < found.learning


@pytest.mark.slow
def test_rows_at_once_decide_what_an_autoencoder_takes() -> None:
    whole, parts = copying("loss.lpips=0", "critic=null"), copying("loss.lpips=0", "critic=null", "microbatch=2")
    assert parts.training < 0.4 * whole.training and parts.learning == whole.learning
    assert copying("loss.lpips=0", "critic=null", world=2).learning == whole.learning / 2


@pytest.mark.slow
def test_a_tokenizer_can_be_planned_too() -> None:
    config = load_any_config("playground-vq", ["rows=2"])
    assert isinstance(config, AutoencoderRunConfig)
    small = Vq(channels=8, multipliers=(1, 2), latent=8, codes=64, groups=2)
    found = autoencoder_plan.estimate_autoencoder_resources(replace(config, autoencoder=small))
    assert found.training > 0 and found.learning > 0


def test_a_judge_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "paligemma-finetune"])
    assert "the recipe trains a judge" in capsys.readouterr().err


def test_the_command_takes_both_and_says_what_to_change() -> None:
    dit = CliRunner().invoke(app, ["plan", "dit-folder", *DIT, LATENTS])
    assert dit.exit_code == 0 and "8 while training" in dit.output and " min." in dit.output
    large = ["plan", "vae-celebhq", *VAE, "rows=512", "loss.lpips=0", "critic=null", "--gpu-gib", "1"]
    narrow = CliRunner().invoke(app, large)
    assert narrow.exit_code == 1 and "sees 512 pictures at once" in narrow.output
    assert "does not fit into 1 GiB" in narrow.output and "engine.memory=recompute: 0." in narrow.output
