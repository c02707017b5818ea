"""explainingai's recipe: its losses, gradients that add up over pieces and ranks, grey pictures, and a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launch_ranks import finish, launch
from safetensors.torch import load_file

from tastemaker.autoencoders.training import AutoencoderRun, reconstruct, train, train_step
from tastemaker.config.build import build_autoencoder, make_tiny_any
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.training.events import SamplesGenerated, StepCompleted

# Of few pixels, for latents are settled on many pictures.
TOYS = [
    "engine.device=cpu",
    "data={type: toy_images}",
    "loss.lpips=0",
    "discriminator.num_layers=1",
    "batch_size=4",
    "optim.lr=1e-3",
]
SMALL = [
    "engine.device=cpu",
    "data.device=cpu",
    "data.pool_size=64",
    "validation.num_samples=2",
    "validation.split=0.1",
]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are settled on few pictures."""
    monkeypatch.setattr("tastemaker.autoencoders.training.LATENT_STATISTICS_IMAGES", 8)


def config(*changes: str, recipe: str = "vae-celebhq") -> AutoencoderRunConfig:
    found = make_tiny_any(load_any_config(recipe, [*SMALL, "sample.every=0", *changes]))
    assert isinstance(found, AutoencoderRunConfig)
    return found


def prepared(folder: Path, *changes: str, recipe: str = "vae-celebhq") -> AutoencoderRun:
    return build_autoencoder(config(*changes, recipe=recipe), folder / "run")


def test_defaults_equal_published_ones() -> None:
    found = load_any_config("vae-celebhq", [])
    assert isinstance(found, AutoencoderRunConfig) and found.discriminator is not None
    assert (found.loss.mse, found.loss.l1, found.loss.gradient, found.loss.lpips) == (1, 0, 0, 1)
    assert (found.discriminator.start_step, found.discriminator.weight, found.discriminator.extra_layer) == (
        7500,
        0.5,
        False,
    )
    assert found.discriminator.loss == found.discriminator.generator_loss == "least_squares"
    assert (found.optim.lr, found.optim.betas, found.batch_size, found.steps) == (1e-5, (0.5, 0.999), 4, 3 * 30000 // 4)
    net = found.autoencoder.load(build_autoencoder(config()).engine.placement())
    assert sum(p.numel() for p in net.parameters()) == 17_760_359


def test_losses_and_gradients_equal_published_trainer(tmp_path: Path) -> None:
    run = prepared(tmp_path, "discriminator.start_step=0", "autoencoder.kl_weight=0.01")
    discriminator = run.discriminator
    assert discriminator is not None and run.lpips is not None
    pixels = run.pixels(0, 4)
    _, loss = reconstruct(run, 0, pixels)
    found = torch.autograd.grad(loss.rows.mean(), [*run.net.parameters()], retain_graph=True)
    images = 2 * pixels - 1
    chance = Randomness(run.seed, 0, torch.arange(4)).normal("latents", *run.net.latent_noise_shape(pixels))  # type: ignore[operator]
    moments = run.net.moments(pixels)  # type: ignore[operator]
    mean, log_variance = moments.chunk(2, 1)
    made = run.net.decode_unclamped(mean + (0.5 * log_variance).exp() * chance)  # type: ignore[operator]
    divergence = (0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum((1, 2, 3))).mean()
    fake = discriminator.net(made)
    parts = [F.mse_loss(2 * made - 1, images), 0.01 * divergence, run.lpips(made, pixels).mean()]
    total = sum(parts) + 0.5 * F.mse_loss(fake, torch.ones_like(fake))
    torch.testing.assert_close(loss.rows.mean(), total)
    wanted = torch.autograd.grad(total, [*run.net.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
    with torch.no_grad():
        real, fake = discriminator.net(pixels), discriminator.net(made)
        disc = (F.mse_loss(fake, torch.zeros_like(fake)) + F.mse_loss(real, torch.ones_like(real))) / 2
    assert float(discriminator.update(0, [pixels], [made.detach()])[0]["discriminator/loss"]) == pytest.approx(
        float(disc), rel=1e-4
    )


def test_micro_batches_add_up_with_the_same_noise(tmp_path: Path) -> None:
    runs = [prepared(tmp_path / size, "optim.lr=1e-3", f"micro_batch_size={size}") for size in ("4", "1")]
    one, many = (train_step(run, 0).to_event().metrics for run in runs)
    assert one.keys() == many.keys()
    for name, value in one.items():
        assert many[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("recipe", ["vae-celebhq", "vae-diffusers"])
def test_one_channel_training_gives_gray_reconstructions(recipe: str, tmp_path: Path) -> None:
    key = "im_channels" if recipe == "vae-celebhq" else "in_channels"
    plays = [
        "discriminator.start_step=0",
        "discriminator.adaptive_weight=true",
        f"autoencoder.{key}=1",
        "optim.lr=1e-3",
        "sample.every=2",
    ]
    run = prepared(tmp_path, *plays, "steps=2", "validation.every=2", recipe=recipe)
    events = list(train(run))
    told = [event.metrics for event in events if isinstance(event, StepCompleted)]
    assert told[0]["adversarial weight"] > 0 and "discriminator/loss" in told[1]
    assert {"validation/loss", "copies/psnr", "copies/ssim", "copies/lpips"} <= told[1].keys()
    (shown,) = [event.pixels for event in events if isinstance(event, SamplesGenerated)]
    made = shown[..., shown.shape[-2] // 2 :, :]
    assert made[:, :, 0].equal(made[:, :, 1]) and made[:, :, 0].equal(made[:, :, 2])
    pixels = run.pixels(0, 2)
    copy = reconstruct(run, 5, pixels)[1].metrics["adversarial weight"][0]
    made_again = run.net(pixels, *[torch.zeros(2, *run.net.latent_noise_shape(pixels))])[0]  # type: ignore[operator]
    assert copy > 0 and made_again.shape == pixels.shape


def test_endless_data_has_no_validation_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation\.split: .*; set validation\.data"):
        prepared(tmp_path, "data.pool_size=0")


def final(place: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((place / f"checkpoints/step-{step:06d}").rglob("*.safetensors"))
    return {f"{file.stem}/{key}": x for file in files for key, x in load_file(file).items()}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["vae-celebhq", "vae-diffusers"])
def test_two_ranks_equal_one(recipe: str, tmp_path: Path) -> None:
    settings = [*TOYS, "steps=3", "optim.eps=1e-4", "validation.every=0", "checkpoint.every=3"]
    finish(launch(recipe, tmp_path / "one", *settings))
    finish(launch(recipe, tmp_path / "two", *settings, ranks=2))
    one, two = (final(tmp_path / name, 3) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for key, x in one.items():
        assert two[key].allclose(x, rtol=1e-3, atol=2e-5), f"{key}: {(two[key] - x).abs().max()}"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ranks", "strategy"),
    [("vae-celebhq", 1, "replicated"), ("vae-celebhq", 2, "replicated"), ("vae-diffusers", 2, "fsdp")],
)
def test_kill_with_active_discriminator_loses_nothing(recipe: str, ranks: int, strategy: str, tmp_path: Path) -> None:
    settings = [
        *TOYS,
        "steps=4",
        "discriminator.start_step=1",
        "validation.every=4",
        "checkpoint.every=2",
        "sample.every=2",
    ]
    settings += [f"engine.strategy={strategy}"]
    finish(launch(recipe, tmp_path / "whole", *settings, ranks=ranks))
    broken = launch(recipe, tmp_path / "broken", *settings, ranks=ranks)
    for line in broken[0].stdout:  # type: ignore[union-attr]
        if int(line) == 2:
            break
    for process in broken:
        process.kill()
        process.communicate()
    finish(launch(recipe, tmp_path / "broken", *settings, ranks=ranks))
    whole, again = (final(tmp_path / name, 4) for name in ("whole", "broken"))
    assert whole.keys() == again.keys() and any("discriminator" in key for key in whole)
    assert all(x.equal(again[key]) for key, x in whole.items())
