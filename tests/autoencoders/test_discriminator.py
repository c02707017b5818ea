"""Autoencoder training with a discriminator: micro-batches, resumes, adaptive weight and validation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tastemaker.autoencoders.discriminator import AdaptiveWeight, build_adaptive_weight
from tastemaker.autoencoders.reconstruction_loss import reconstruction_loss
from tastemaker.autoencoders.training import AutoencoderRun, reconstruct, train, train_step
from tastemaker.config.build import build_autoencoder, make_tiny_any
from tastemaker.config.check import find_problems
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.core.autoencoder import AutoencoderNet
from tastemaker.core.registry import ConfigError
from tastemaker.data.dataset import split_dataset
from tastemaker.data.toy import ToyImages
from tastemaker.training.events import StepCompleted

SMALL = ["engine.device=cpu", "engine.precision=fp32", "batch_size=8", "data.device=cpu", "sample.every=0"]
DISCRIMINATOR = ["discriminator={start_step: 0, num_layers: 2}", "validation.every=0", "ema_decay=0.5", "optim.lr=1e-3"]


def make_config(*overrides: str, recipe: str = "llamagen-vq") -> AutoencoderRunConfig:
    config = make_tiny_any(load_any_config(recipe, [*SMALL, *overrides]))
    assert isinstance(config, AutoencoderRunConfig)
    return config


def prepare_run(folder: Path, *overrides: str, recipe: str = "llamagen-vq") -> AutoencoderRun:
    return build_autoencoder(make_config(*overrides, recipe=recipe), folder / "run")


def training_state(run: AutoencoderRun) -> dict[str, torch.Tensor]:
    snapshots = {
        f"{name}/{key}": x for name, group in run.weights.snapshot_tensors().items() for key, x in group.items()
    }
    return {**snapshots, **run.weights.trainable(), **run.engine.optimizer.state_dict()}


@pytest.mark.parametrize("recipe", [pytest.param("llamagen-vq", marks=pytest.mark.slow), "playground-vae"])
def test_discriminator_learns(recipe: str, tmp_path: Path) -> None:
    run = prepare_run(
        tmp_path,
        *DISCRIMINATOR,
        "steps=30",
        "discriminator.width=16",
        "discriminator.optim={lr: 2e-3}",
        "optim.lr=1e-5",
        recipe=recipe,
    )
    metrics = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert metrics[-1]["discriminator/loss"] < 0.8 * metrics[0]["discriminator/loss"]
    assert metrics[-1]["discriminator/real_logit"] > metrics[-1]["discriminator/fake_logit"]
    assert {"adversarial", "adversarial weight", "discriminator/grad_norm"} <= metrics[0].keys()


def test_start_step_counts_over_resumes(tmp_path: Path) -> None:
    overrides = [*DISCRIMINATOR, "discriminator.start_step=2", "steps=4"]
    run = prepare_run(tmp_path, *overrides)
    before = [p.clone() for p in run.discriminator.net.parameters()]  # type: ignore[union-attr]
    metrics = [train_step(run, step).to_event().metrics for step in (0, 1)]
    assert all("adversarial" not in step_metrics for step_metrics in metrics)
    assert all(a.equal(b) for a, b in zip(before, run.discriminator.net.parameters(), strict=True))  # type: ignore[union-attr]
    resumed = prepare_run(tmp_path / "other", *overrides)
    resumed.resume(run.save(2))
    assert "discriminator/loss" in train_step(resumed, resumed.start_step).to_event().metrics


@pytest.mark.parametrize("adaptive", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_resume_with_discriminator_is_exact(adaptive: str, tmp_path: Path) -> None:
    overrides = [*DISCRIMINATOR, f"discriminator.adaptive_weight={adaptive}", "discriminator.start_step=1", "steps=6"]
    run = prepare_run(tmp_path, *overrides)
    for step in range(2):
        train_step(run, step)
    resumed = prepare_run(tmp_path / "other", *overrides)
    resumed.resume(run.save(2))
    for step in (2, 3):
        assert train_step(run, step).to_event().metrics == train_step(resumed, step).to_event().metrics
    expected, actual = training_state(run), training_state(resumed)
    assert expected.keys() == actual.keys() and any("discriminator_optimizer" in key for key in expected)
    assert all(x.equal(actual[key]) for key, x in expected.items())


def test_micro_batches_accumulate_gradients(tmp_path: Path) -> None:
    overrides = [*DISCRIMINATOR, "steps=1", "autoencoder.dead_code_weight=0", "optim.max_grad_norm=0"]
    runs = [
        prepare_run(tmp_path / name, *overrides, *extra)
        for name, extra in {"a": [], "b": ["micro_batch_size=2"]}.items()
    ]
    for run in runs:  # batch norms depend on the micro-batch and must be frozen to compare
        freeze_batch_norms(run.discriminator.net)  # type: ignore[union-attr]
    full, accumulated = (train_step(run, 0).to_event().metrics for run in runs)
    for name, value in full.items():
        assert accumulated[name] == pytest.approx(value, rel=2e-3), name
    for p, q in zip(runs[0].net.parameters(), runs[1].net.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=3e-4, rtol=1e-2)


def freeze_batch_norms(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def test_adaptive_weight_is_the_gradient_ratio(tmp_path: Path) -> None:
    run = prepare_run(tmp_path, *DISCRIMINATOR, "discriminator.adaptive_weight=true", "steps=2")
    pixels, layer = run.pixels(0, 4), run.net.last_layer()
    weight = reconstruct(run, 0, pixels)[1].metrics["adversarial weight"][0] / run.discriminator.config.weight  # type: ignore[union-attr]
    reconstruction = run.net(pixels)[0].float()
    losses = (
        reconstruction_loss(run.loss, reconstruction, pixels, run.lpips).rows.mean(),
        run.discriminator.generator_loss(reconstruction).mean(),
    )  # type: ignore[union-attr]
    reconstruction_norm, adversarial_norm = (
        torch.autograd.grad(loss, layer.weight, retain_graph=True)[0].norm() for loss in losses
    )
    # Pixels are in [0, 1] instead of [-1, 1].
    torch.testing.assert_close(weight, reconstruction_norm / (adversarial_norm + 1e-4), rtol=1e-3, atol=0)
    assert isinstance(run.adaptive_weight, AdaptiveWeight) and run.adaptive_weight.layer_input is None
    with pytest.raises(ConfigError, match=r"discriminator\.adaptive_weight.*TM550"):
        build_adaptive_weight(nn.Conv2d(3, 3, 1))


def test_generator_loss_leaves_no_gradient_in_discriminator(tmp_path: Path) -> None:
    run = prepare_run(tmp_path, *DISCRIMINATOR)
    reconstruct(run, 0, run.pixels(0, 4))[1].rows.sum().backward()
    assert all(p.grad is None and p.requires_grad for p in run.discriminator.net.parameters())  # type: ignore[union-attr]
    assert all(p.grad is not None for p in run.net.last_layer().parameters())


def test_validation_metrics_are_reported(tmp_path: Path) -> None:
    overrides = [
        "validation={every: 2, num_samples: 5, split: 0.25, data: null}",
        "data.pool_size=20",
        "discriminator=null",
        "steps=3",
    ]
    run = prepare_run(tmp_path, *overrides)
    assert (len(run.data), len(run.validation_data)) == (15, 5)  # type: ignore[arg-type]
    metrics = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert ["validation/loss" in step_metrics for step_metrics in metrics] == [False, True, True]
    assert {"validation/psnr", "validation/lpips", "validation/mse"} <= metrics[-1].keys()


def test_validation_images_are_not_trained_on() -> None:
    source = ToyImages(num_samples=20).load(0)
    training, validation = split_dataset(source, 0.2, 3)
    assert (len(training), len(validation)) == (16, 4)
    training_images = {image.numpy().tobytes() for step in range(4) for image in training.batch(step, 8, 0, 1).pixels}
    validation_images = {
        image.numpy().tobytes() for step in range(4) for image in validation.batch(step, 2, 0, 1).pixels
    }
    assert (len(training_images), len(validation_images)) == (16, 4) and not training_images & validation_images
    halves = [training.batch(1, 8, rank, 2).pixels for rank in (0, 1)]
    assert torch.cat(halves).equal(training.batch(1, 8, 0, 1).pixels)
    # A small folder holds out at least one image.
    assert [len(part) for part in split_dataset(source, 0.01, 3)] == [19, 1]
    with pytest.raises(ConfigError, match=r"validation\.split: .*0\.99.*20.*TM135"):
        split_dataset(source, 0.99, 3)
    with pytest.raises(ConfigError, match=r"validation\.split: .*0\.5.*validation\.every=0.*TM135"):
        split_dataset(ToyImages(num_samples=1).load(0), 0.5, 3)


def test_inconsistent_discriminator_settings_are_refused() -> None:
    config = make_config("validation.data={type: prompts, prompts: [a]}")
    assert [problem.split(":")[0] for problem in find_problems(load_any_config("llamagen-vq", []), world_size=2)] == []
    assert [problem.split(":")[0] for problem in find_problems(config)] == ["validation.data.type"]
    assert not find_problems(
        load_any_config("llamagen-vq", ["discriminator.adaptive_weight=true", "engine.compile=true"])
    )


class TwoLayerNetwork(AutoencoderNet):
    """A network of two layers, whose last layer determines the adaptive weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def last_layer(self) -> nn.Conv2d:
        return self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.first(x)))
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # raised inside PyTorch
def test_compiled_network_has_the_same_adaptive_weight() -> None:
    torch.manual_seed(0)
    net, x, weights = TwoLayerNetwork(), torch.rand(2, 3, 8, 8), []
    for compiled in (False, True):
        if compiled:
            net.compile(backend="aot_eager")  # without Inductor, which takes minutes on a CPU
        adaptive_weight = build_adaptive_weight(net)
        for _ in range(2):
            with adaptive_weight.record_inputs():
                output = net(x)
            weights.append(adaptive_weight.weight(output.square().mean(), output.abs().mean(), output))
            assert adaptive_weight.layer_input is None
            output.sum().backward()
        net(x)
        assert adaptive_weight.layer_input is None, "inputs are recorded only inside record_inputs"
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_two_ranks_resume_after_a_kill(strategy: str, tmp_path: Path) -> None:
    overrides = [
        *SMALL,
        *DISCRIMINATOR,
        "discriminator.start_step=1",
        "discriminator.adaptive_weight=true",
        f"engine.strategy={strategy}",
    ]
    recipe = "llamagen-vq"
    finish(launch(recipe, tmp_path / "uninterrupted", *overrides, "steps=4", ranks=2))
    killed = launch(recipe, tmp_path / "killed", *overrides, "steps=4", ranks=2)
    for line in killed[0].stdout:  # type: ignore[union-attr]
        if int(line) == 2:
            break
    for process in killed:
        process.kill()
        process.communicate()
    finish(launch(recipe, tmp_path / "killed", *overrides, "steps=4", ranks=2))
    uninterrupted, resumed = (final_tensors(tmp_path / name) for name in ("uninterrupted", "killed"))
    assert uninterrupted.keys() == resumed.keys() and any("discriminator" in key for key in uninterrupted)
    assert all(x.equal(resumed[key]) for key, x in uninterrupted.items())


def final_tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted((directory / "checkpoints/step-000004").rglob("*.safetensors"))
    return {f"{file.stem}/{key}": x for file in files for key, x in load_file(file).items()}
