"""Recipes of explainingai's VAE: losses, gradients over micro-batches and ranks, gray images and resumes."""

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

# Images of few pixels, because latent statistics are measured on many images.
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
def measure_latents_on_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure latent statistics on few images."""
    monkeypatch.setattr("tastemaker.autoencoders.training.LATENT_STATISTICS_IMAGES", 8)


def make_config(*overrides: str, recipe: str = "vae-celebhq") -> AutoencoderRunConfig:
    config = make_tiny_any(load_any_config(recipe, [*SMALL, "sample.every=0", *overrides]))
    assert isinstance(config, AutoencoderRunConfig)
    return config


def prepare_run(folder: Path, *overrides: str, recipe: str = "vae-celebhq") -> AutoencoderRun:
    return build_autoencoder(make_config(*overrides, recipe=recipe), folder / "run")


def test_defaults_equal_published_ones() -> None:
    config = load_any_config("vae-celebhq", [])
    assert isinstance(config, AutoencoderRunConfig) and config.discriminator is not None
    assert (config.loss.mse, config.loss.l1, config.loss.gradient, config.loss.lpips) == (1, 0, 0, 1)
    assert (config.discriminator.start_step, config.discriminator.weight, config.discriminator.extra_layer) == (
        7500,
        0.5,
        False,
    )
    assert config.discriminator.loss == config.discriminator.generator_loss == "least_squares"
    assert (config.optim.lr, config.optim.betas, config.batch_size, config.steps) == (
        1e-5,
        (0.5, 0.999),
        4,
        3 * 30000 // 4,
    )
    net = config.autoencoder.load(build_autoencoder(make_config()).engine.placement())
    assert sum(p.numel() for p in net.parameters()) == 17_760_359


def test_losses_and_gradients_equal_published_trainer(tmp_path: Path) -> None:
    run = prepare_run(tmp_path, "discriminator.start_step=0", "autoencoder.kl_weight=0.01")
    discriminator = run.discriminator
    assert discriminator is not None and run.lpips is not None
    pixels = run.pixels(0, 4)
    _, loss = reconstruct(run, 0, pixels)
    gradients = torch.autograd.grad(loss.rows.mean(), [*run.net.parameters()], retain_graph=True)
    images = 2 * pixels - 1
    noise = Randomness(run.seed, 0, torch.arange(4)).normal("latents", *run.net.latent_noise_shape(pixels))  # type: ignore[operator]
    moments = run.net.moments(pixels)  # type: ignore[operator]
    mean, log_variance = moments.chunk(2, 1)
    reconstruction = run.net.decode_unclamped(mean + (0.5 * log_variance).exp() * noise)  # type: ignore[operator]
    kl = (0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum((1, 2, 3))).mean()
    fake = discriminator.net(reconstruction)
    terms = [F.mse_loss(2 * reconstruction - 1, images), 0.01 * kl, run.lpips(reconstruction, pixels).mean()]
    total = sum(terms) + 0.5 * F.mse_loss(fake, torch.ones_like(fake))
    torch.testing.assert_close(loss.rows.mean(), total)
    expected = torch.autograd.grad(total, [*run.net.parameters()])
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-3)
    with torch.no_grad():
        real, fake = discriminator.net(pixels), discriminator.net(reconstruction)
        discriminator_loss = (F.mse_loss(fake, torch.zeros_like(fake)) + F.mse_loss(real, torch.ones_like(real))) / 2
    assert float(
        discriminator.update(0, [pixels], [reconstruction.detach()])[0]["discriminator/loss"]
    ) == pytest.approx(float(discriminator_loss), rel=1e-4)


def test_micro_batches_add_up_with_the_same_noise(tmp_path: Path) -> None:
    runs = [prepare_run(tmp_path / size, "optim.lr=1e-3", f"micro_batch_size={size}") for size in ("4", "1")]
    full, accumulated = (train_step(run, 0).to_event().metrics for run in runs)
    assert full.keys() == accumulated.keys()
    for name, value in full.items():
        assert accumulated[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("recipe", ["vae-celebhq", "vae-diffusers"])
def test_one_channel_training_gives_gray_reconstructions(recipe: str, tmp_path: Path) -> None:
    key = "im_channels" if recipe == "vae-celebhq" else "in_channels"
    overrides = [
        "discriminator.start_step=0",
        "discriminator.adaptive_weight=true",
        f"autoencoder.{key}=1",
        "optim.lr=1e-3",
        "sample.every=2",
    ]
    run = prepare_run(tmp_path, *overrides, "steps=2", "validation.every=2", recipe=recipe)
    events = list(train(run))
    metrics = [event.metrics for event in events if isinstance(event, StepCompleted)]
    assert metrics[0]["adversarial weight"] > 0 and "discriminator/loss" in metrics[1]
    assert {"validation/loss", "reconstruction/psnr", "reconstruction/ssim", "reconstruction/lpips"} <= metrics[
        1
    ].keys()
    (grid,) = [event.pixels for event in events if isinstance(event, SamplesGenerated)]
    reconstructions = grid[..., grid.shape[-2] // 2 :, :]
    assert reconstructions[:, :, 0].equal(reconstructions[:, :, 1]) and reconstructions[:, :, 0].equal(
        reconstructions[:, :, 2]
    )
    pixels = run.pixels(0, 2)
    weight = reconstruct(run, 5, pixels)[1].metrics["adversarial weight"][0]
    reconstruction = run.net(pixels, torch.zeros(2, *run.net.latent_noise_shape(pixels)))[0]  # type: ignore[operator]
    assert weight > 0 and reconstruction.shape == pixels.shape


def test_endless_data_has_no_validation_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation\.split: .*validation\.data.*TM134"):
        prepare_run(tmp_path, "data.pool_size=0")


def final_tensors(directory: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((directory / f"checkpoints/step-{step:06d}").rglob("*.safetensors"))
    return {f"{file.stem}/{key}": x for file in files for key, x in load_file(file).items()}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["vae-celebhq", "vae-diffusers"])
def test_two_ranks_equal_one(recipe: str, tmp_path: Path) -> None:
    overrides = [*TOYS, "steps=3", "optim.eps=1e-4", "validation.every=0", "checkpoint.every=3"]
    finish(launch(recipe, tmp_path / "one", *overrides))
    finish(launch(recipe, tmp_path / "two", *overrides, ranks=2))
    one, two = (final_tensors(tmp_path / name, 3) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for key, x in one.items():
        assert two[key].allclose(x, rtol=1e-3, atol=2e-5), f"{key}: {(two[key] - x).abs().max()}"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ranks", "strategy"),
    [("vae-celebhq", 1, "replicated"), ("vae-celebhq", 2, "replicated"), ("vae-diffusers", 2, "fsdp")],
)
def test_resume_after_a_kill_with_discriminator_is_exact(
    recipe: str, ranks: int, strategy: str, tmp_path: Path
) -> None:
    overrides = [
        *TOYS,
        "steps=4",
        "discriminator.start_step=1",
        "validation.every=4",
        "checkpoint.every=2",
        "sample.every=2",
    ]
    overrides += [f"engine.strategy={strategy}"]
    finish(launch(recipe, tmp_path / "uninterrupted", *overrides, ranks=ranks))
    killed = launch(recipe, tmp_path / "killed", *overrides, ranks=ranks)
    for line in killed[0].stdout:  # type: ignore[union-attr]
        if int(line) == 2:
            break
    for process in killed:
        process.kill()
        process.communicate()
    finish(launch(recipe, tmp_path / "killed", *overrides, ranks=ranks))
    uninterrupted, resumed = (final_tensors(tmp_path / name, 4) for name in ("uninterrupted", "killed"))
    assert uninterrupted.keys() == resumed.keys() and any("discriminator" in key for key in uninterrupted)
    assert all(x.equal(resumed[key]) for key, x in uninterrupted.items())
