"""An autoencoder with a critic: both learn, in pieces and over resumes, and what is held out is looked at."""

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
from tastemaker.core.registry import ConfigError
from tastemaker.data.captioned_images import ToyPictures
from tastemaker.data.split import split_dataset
from tastemaker.training.events import StepCompleted

SMALL = ["engine.device=cpu", "engine.precision=fp32", "rows=8", "data.device=cpu", "sample.every=0"]
PLAYS = ["critic={start: 0, layers: 2}", "validation.every=0", "ema=0.5", "optim.lr=1e-3"]


def config(*changes: str, recipe: str = "llamagen-vq") -> AutoencoderRunConfig:
    found = make_tiny_any(load_any_config(recipe, [*SMALL, *changes]))
    assert isinstance(found, AutoencoderRunConfig)
    return found


def prepared(folder: Path, *changes: str, recipe: str = "llamagen-vq") -> AutoencoderRun:
    return build_autoencoder(config(*changes, recipe=recipe), folder / "run")


def state(run: AutoencoderRun) -> dict[str, torch.Tensor]:
    kept = {f"{name}/{key}": x for name, group in run.weights.stored().items() for key, x in group.items()}
    return {**kept, **run.weights.trainable(), **run.engine.optimizer.state()}


@pytest.mark.parametrize("recipe", [pytest.param("llamagen-vq", marks=pytest.mark.slow), "playground-vae"])
def test_the_critic_learns_to_tell_copies_from_pictures(recipe: str, tmp_path: Path) -> None:
    run = prepared(
        tmp_path, *PLAYS, "steps=30", "critic.width=16", "critic.optim={lr: 2e-3}", "optim.lr=1e-5", recipe=recipe
    )
    told = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert told[-1]["critic/loss"] < 0.8 * told[0]["critic/loss"]
    assert told[-1]["critic/pictures"] > told[-1]["critic/copies"]
    assert {"adversarial", "adversarial weight", "critic/grad_norm"} <= told[0].keys()


def test_it_plays_no_part_before_its_start_which_is_counted_over_resumes(tmp_path: Path) -> None:
    changes = [*PLAYS, "critic.start=2", "steps=4"]
    run = prepared(tmp_path, *changes)
    before = [p.clone() for p in run.critic.net.parameters()]  # type: ignore[union-attr]
    told = [train_step(run, step).metrics for step in (0, 1)]
    assert all("adversarial" not in metrics for metrics in told)
    assert all(a.equal(b) for a, b in zip(before, run.critic.net.parameters(), strict=True))  # type: ignore[union-attr]
    other = prepared(tmp_path / "other", *changes)
    other.resume(run.save(2))
    assert "critic/loss" in train_step(other, other.start).metrics


@pytest.mark.parametrize("adaptive", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_resumed_run_with_a_critic_goes_on_to_the_bit(adaptive: str, tmp_path: Path) -> None:
    changes = [*PLAYS, f"critic.adaptive={adaptive}", "critic.start=1", "steps=6"]
    run = prepared(tmp_path, *changes)
    for step in range(2):
        train_step(run, step)
    other = prepared(tmp_path / "other", *changes)
    other.resume(run.save(2))
    for step in (2, 3):
        assert train_step(run, step).metrics == train_step(other, step).metrics
    mine, theirs = state(run), state(other)
    assert mine.keys() == theirs.keys() and any("critic_optimizer" in key for key in mine)
    assert all(x.equal(theirs[key]) for key, x in mine.items())


def test_gradients_accumulate_over_pieces(tmp_path: Path) -> None:
    whole = [*PLAYS, "steps=1", "autoencoder.idle=0", "optim.clip=0"]
    runs = [prepared(tmp_path / name, *whole, *more) for name, more in {"a": [], "b": ["microbatch=2"]}.items()]
    for run in runs:  # norms see a piece at a time, so that they must be left out to compare
        plain(run.critic.net)  # type: ignore[union-attr]
    one, many = (train_step(run, 0).metrics for run in runs)
    for name, value in one.items():
        assert many[name] == pytest.approx(value, rel=2e-3), name
    for p, q in zip(runs[0].net.parameters(), runs[1].net.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=3e-4, rtol=1e-2)


def plain(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def test_the_adaptive_weight_is_the_ratio_of_the_last_layers_gradients(tmp_path: Path) -> None:
    run = prepared(tmp_path, *PLAYS, "critic.adaptive=true", "steps=2")
    pixels, layer = run.pixels(0, 4), run.net.ending()
    found = reconstruct(run, 0, pixels)[1].metrics["adversarial weight"][0] / run.critic.config.weight  # type: ignore[union-attr]
    made = run.net(pixels)[0].float()
    losses = reconstruction_loss(run.loss, made, pixels, run.lpips).rows.mean(), run.critic.price(made).mean()  # type: ignore[union-attr]
    ours, theirs = (torch.autograd.grad(loss, layer.weight, retain_graph=True)[0].norm() for loss in losses)
    torch.testing.assert_close(found, ours / (theirs + 1e-4), rtol=1e-3, atol=0)  # of pixels twice as small
    assert isinstance(run.balance, AdaptiveWeight) and run.balance.seen is None
    with pytest.raises(ConfigError, match="does not say which layer is its last"):
        build_adaptive_weight(nn.Conv2d(3, 3, 1))


def test_deceiving_leaves_no_gradient_in_the_critic(tmp_path: Path) -> None:
    run = prepared(tmp_path, *PLAYS)
    reconstruct(run, 0, run.pixels(0, 4))[1].rows.sum().backward()
    assert all(p.grad is None and p.requires_grad for p in run.critic.net.parameters())  # type: ignore[union-attr]
    assert all(p.grad is not None for p in run.net.ending().parameters())


def test_pictures_that_are_held_out_are_looked_at(tmp_path: Path) -> None:
    changes = ["validation={every: 2, rows: 5, share: 0.25, data: null}", "data.pool=20", "critic=null", "steps=3"]
    run = prepared(tmp_path, *changes)
    assert (len(run.data), len(run.held)) == (15, 5)  # type: ignore[arg-type]
    told = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert ["validation/loss" in metrics for metrics in told] == [False, True, True]
    assert {"validation/psnr", "validation/lpips", "validation/mse"} <= told[-1].keys()


def test_what_is_held_out_is_never_learned_from() -> None:
    source = ToyPictures(count=20).load(0)
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
    with pytest.raises(ConfigError, match=r"validation.share: 0.99 of 20 rows is 20, which leaves none to learn from"):
        split_dataset(source, 0.99, 3)
    with pytest.raises(ConfigError, match=r"validation.share: 0.5 of 1 rows is 1, .* or set validation.every=0"):
        split_dataset(ToyPictures(count=1).load(0), 0.5, 3)


def test_what_does_not_fit_together_is_a_sentence() -> None:
    found = config("validation.data={type: prompts, prompts: [a]}")
    assert [sentence.split(":")[0] for sentence in find_problems(load_any_config("llamagen-vq", []), world=2)] == []
    assert [line.split(":")[0] for line in find_problems(found)] == ["validation.data"]
    assert not find_problems(load_any_config("llamagen-vq", ["critic.adaptive=true", "engine.compile=true"]))


class Ends(nn.Module):
    """Two layers, the last of which is looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def ending(self) -> nn.Conv2d:
        return self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.first(x)))
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of PyTorch, about itself
def test_a_compiled_network_has_the_same_adaptive_weight() -> None:
    torch.manual_seed(0)
    net, x, weights = Ends(), torch.rand(2, 3, 8, 8), []
    for compiled in (False, True):
        if compiled:
            net.compile(backend="aot_eager")  # all of the compiler but the translation, which takes minutes on a CPU
        found = build_adaptive_weight(net)
        for _ in range(2):
            with found.watching():
                made = net(x)
            weights.append(found.weight(made.square().mean(), made.abs().mean(), made))
            assert found.seen is None
            made.sum().backward()
        net(x)
        assert found.seen is None, "only looked into while it is watched"
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_two_ranks_train_it_and_go_on_after_a_kill(strategy: str, tmp_path: Path) -> None:
    settings = [*SMALL, *PLAYS, "critic.start=1", "critic.adaptive=true", f"engine.strategy={strategy}"]
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
    assert whole.keys() == again.keys() and any("critic" in key for key in whole)
    assert all(x.equal(again[key]) for key, x in whole.items())


def final(place: Path) -> dict[str, torch.Tensor]:
    files = sorted((place / "checkpoints/step-000004").rglob("*.safetensors"))
    return {f"{file.stem}/{key}": x for file in files for key, x in load_file(file).items()}
