"""An autoencoder with a discriminator: both learn, in pieces and over resumes, and what is held out is looked at."""

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
PLAYS = ["discriminator={start_step: 0, num_layers: 2}", "validation.every=0", "ema_decay=0.5", "optim.lr=1e-3"]


def config(*changes: str, recipe: str = "llamagen-vq") -> AutoencoderRunConfig:
    found = make_tiny_any(load_any_config(recipe, [*SMALL, *changes]))
    assert isinstance(found, AutoencoderRunConfig)
    return found


def prepared(folder: Path, *changes: str, recipe: str = "llamagen-vq") -> AutoencoderRun:
    return build_autoencoder(config(*changes, recipe=recipe), folder / "run")


def state(run: AutoencoderRun) -> dict[str, torch.Tensor]:
    kept = {f"{name}/{key}": x for name, group in run.weights.snapshot_tensors().items() for key, x in group.items()}
    return {**kept, **run.weights.trainable(), **run.engine.optimizer.state_dict()}


@pytest.mark.parametrize("recipe", [pytest.param("llamagen-vq", marks=pytest.mark.slow), "playground-vae"])
def test_discriminator_learns(recipe: str, tmp_path: Path) -> None:
    run = prepared(
        tmp_path,
        *PLAYS,
        "steps=30",
        "discriminator.width=16",
        "discriminator.optim={lr: 2e-3}",
        "optim.lr=1e-5",
        recipe=recipe,
    )
    told = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert told[-1]["discriminator/loss"] < 0.8 * told[0]["discriminator/loss"]
    assert told[-1]["discriminator/real_logit"] > told[-1]["discriminator/fake_logit"]
    assert {"adversarial", "adversarial weight", "discriminator/grad_norm"} <= told[0].keys()


def test_start_step_counts_over_resumes(tmp_path: Path) -> None:
    changes = [*PLAYS, "discriminator.start_step=2", "steps=4"]
    run = prepared(tmp_path, *changes)
    before = [p.clone() for p in run.discriminator.net.parameters()]  # type: ignore[union-attr]
    told = [train_step(run, step).to_event().metrics for step in (0, 1)]
    assert all("adversarial" not in metrics for metrics in told)
    assert all(a.equal(b) for a, b in zip(before, run.discriminator.net.parameters(), strict=True))  # type: ignore[union-attr]
    other = prepared(tmp_path / "other", *changes)
    other.resume(run.save(2))
    assert "discriminator/loss" in train_step(other, other.start_step).to_event().metrics


@pytest.mark.parametrize("adaptive", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_resume_with_discriminator_is_exact(adaptive: str, tmp_path: Path) -> None:
    changes = [*PLAYS, f"discriminator.adaptive_weight={adaptive}", "discriminator.start_step=1", "steps=6"]
    run = prepared(tmp_path, *changes)
    for step in range(2):
        train_step(run, step)
    other = prepared(tmp_path / "other", *changes)
    other.resume(run.save(2))
    for step in (2, 3):
        assert train_step(run, step).to_event().metrics == train_step(other, step).to_event().metrics
    mine, theirs = state(run), state(other)
    assert mine.keys() == theirs.keys() and any("discriminator_optimizer" in key for key in mine)
    assert all(x.equal(theirs[key]) for key, x in mine.items())


def test_micro_batches_accumulate_gradients(tmp_path: Path) -> None:
    whole = [*PLAYS, "steps=1", "autoencoder.dead_code_weight=0", "optim.max_grad_norm=0"]
    runs = [prepared(tmp_path / name, *whole, *more) for name, more in {"a": [], "b": ["micro_batch_size=2"]}.items()]
    for run in runs:  # norms see a piece at a time, so that they must be left out to compare
        plain(run.discriminator.net)  # type: ignore[union-attr]
    one, many = (train_step(run, 0).to_event().metrics for run in runs)
    for name, value in one.items():
        assert many[name] == pytest.approx(value, rel=2e-3), name
    for p, q in zip(runs[0].net.parameters(), runs[1].net.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=3e-4, rtol=1e-2)


def plain(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def test_adaptive_weight_is_the_gradient_ratio(tmp_path: Path) -> None:
    run = prepared(tmp_path, *PLAYS, "discriminator.adaptive_weight=true", "steps=2")
    pixels, layer = run.pixels(0, 4), run.net.last_layer()
    found = reconstruct(run, 0, pixels)[1].metrics["adversarial weight"][0] / run.discriminator.config.weight  # type: ignore[union-attr]
    made = run.net(pixels)[0].float()
    losses = (
        reconstruction_loss(run.loss, made, pixels, run.lpips).rows.mean(),
        run.discriminator.generator_loss(made).mean(),
    )  # type: ignore[union-attr]
    ours, theirs = (torch.autograd.grad(loss, layer.weight, retain_graph=True)[0].norm() for loss in losses)
    torch.testing.assert_close(found, ours / (theirs + 1e-4), rtol=1e-3, atol=0)  # of pixels twice as small
    assert isinstance(run.adaptive_weight, AdaptiveWeight) and run.adaptive_weight.layer_input is None
    with pytest.raises(ConfigError, match=r"discriminator\.adaptive_weight"):
        build_adaptive_weight(nn.Conv2d(3, 3, 1))


def test_generator_loss_leaves_no_gradient_in_discriminator(tmp_path: Path) -> None:
    run = prepared(tmp_path, *PLAYS)
    reconstruct(run, 0, run.pixels(0, 4))[1].rows.sum().backward()
    assert all(p.grad is None and p.requires_grad for p in run.discriminator.net.parameters())  # type: ignore[union-attr]
    assert all(p.grad is not None for p in run.net.last_layer().parameters())


def test_validation_metrics_are_reported(tmp_path: Path) -> None:
    changes = [
        "validation={every: 2, num_samples: 5, split: 0.25, data: null}",
        "data.pool_size=20",
        "discriminator=null",
        "steps=3",
    ]
    run = prepared(tmp_path, *changes)
    assert (len(run.data), len(run.validation_data)) == (15, 5)  # type: ignore[arg-type]
    told = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert ["validation/loss" in metrics for metrics in told] == [False, True, True]
    assert {"validation/psnr", "validation/lpips", "validation/mse"} <= told[-1].keys()


def test_validation_images_are_not_trained_on() -> None:
    source = ToyImages(num_samples=20).load(0)
    learned, held = split_dataset(source, 0.2, 3)
    assert (len(learned), len(held)) == (16, 4)
    mine = {row.numpy().tobytes() for step in range(4) for row in learned.batch(step, 8, 0, 1).pixels}
    theirs = {row.numpy().tobytes() for step in range(4) for row in held.batch(step, 2, 0, 1).pixels}
    assert (len(mine), len(theirs)) == (16, 4) and not mine & theirs
    halves = [learned.batch(1, 8, rank, 2).pixels for rank in (0, 1)]
    assert torch.cat(halves).equal(learned.batch(1, 8, 0, 1).pixels)
    assert [len(part) for part in split_dataset(source, 0.01, 3)] == [
        19,
        1,
    ]  # a small folder holds out one picture all the same
    with pytest.raises(ConfigError, match=r"validation\.split: 0\.99 of 20"):
        split_dataset(source, 0.99, 3)
    with pytest.raises(ConfigError, match=r"validation\.split: 0\.5 of 1 .*validation\.every=0"):
        split_dataset(ToyImages(num_samples=1).load(0), 0.5, 3)


def test_inconsistent_discriminator_settings_are_refused() -> None:
    found = config("validation.data={type: prompts, prompts: [a]}")
    assert [
        sentence.split(":")[0] for sentence in find_problems(load_any_config("llamagen-vq", []), world_size=2)
    ] == []
    assert [line.split(":")[0] for line in find_problems(found)] == ["validation.data"]
    assert not find_problems(
        load_any_config("llamagen-vq", ["discriminator.adaptive_weight=true", "engine.compile=true"])
    )


class Ends(AutoencoderNet):
    """Two layers, the last of which is looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def last_layer(self) -> nn.Conv2d:
        return self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.first(x)))
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of PyTorch, about itself
def test_compiled_network_has_the_same_adaptive_weight() -> None:
    torch.manual_seed(0)
    net, x, weights = Ends(), torch.rand(2, 3, 8, 8), []
    for compiled in (False, True):
        if compiled:
            net.compile(backend="aot_eager")  # all of the compiler but the translation, which takes minutes on a CPU
        found = build_adaptive_weight(net)
        for _ in range(2):
            with found.record_inputs():
                made = net(x)
            weights.append(found.weight(made.square().mean(), made.abs().mean(), made))
            assert found.layer_input is None
            made.sum().backward()
        net(x)
        assert found.layer_input is None, "only looked into while it is watched"
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_two_ranks_resume_after_a_kill(strategy: str, tmp_path: Path) -> None:
    settings = [
        *SMALL,
        *PLAYS,
        "discriminator.start_step=1",
        "discriminator.adaptive_weight=true",
        f"engine.strategy={strategy}",
    ]
    recipe = "llamagen-vq"
    finish(launch(recipe, tmp_path / "whole", *settings, "steps=4", ranks=2))
    broken = launch(recipe, tmp_path / "broken", *settings, "steps=4", ranks=2)
    for line in broken[0].stdout:  # type: ignore[union-attr]
        if int(line) == 2:
            break
    for process in broken:
        process.kill()
        process.communicate()
    finish(launch(recipe, tmp_path / "broken", *settings, "steps=4", ranks=2))
    whole, again = (final(tmp_path / name) for name in ("whole", "broken"))
    assert whole.keys() == again.keys() and any("discriminator" in key for key in whole)
    assert all(x.equal(again[key]) for key, x in whole.items())


def final(place: Path) -> dict[str, torch.Tensor]:
    files = sorted((place / "checkpoints/step-000004").rglob("*.safetensors"))
    return {f"{file.stem}/{key}": x for file in files for key, x in load_file(file).items()}
