"""Rollout batches are scored while the next ones are sampled: order, equality to the bit, errors and placement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import toys
from reward_server import serve_on_free_port
from torch import Tensor

from tastemaker.config.build import build, build_rubric
from tastemaker.config.load import load
from tastemaker.config.schema import RewardConfig
from tastemaker.core.objective import MAX_PENDING_BATCHES, Context, rollout_and_score
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Reward, RewardCard, RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Condition, Metadata, Placement, Prompts, Trajectory
from tastemaker.core.weights import FullWeights
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.rewards.color import ColorReward
from tastemaker.rewards.target_image import MseReward
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

TIMEOUT = 120.0  # seconds after which a test fails instead of waiting


class BatchCounter:
    """How many rollout batches have been sampled and scored, shared by the sampler and a reward."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sampled, self.scored, self.max_lead = 0, list[int](), 0

    def count_sample(self) -> None:
        with self.changed:
            self.sampled += 1
            self.max_lead = max(self.max_lead, self.sampled - len(self.scored))
            self.changed.notify_all()

    def wait_for_samples(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.sampled >= count, TIMEOUT)


@dataclass(frozen=True)
class CountingPolicy(Policy[Any]):
    """A policy that counts its rollout batches."""

    counter: BatchCounter = field(default_factory=BatchCounter)

    def sample(self, cond: Condition, rng: Randomness) -> Trajectory:
        self.counter.count_sample()
        return super().sample(cond, rng)


@dataclass(frozen=True)
class HostReward(RewardSpec, Reward):
    """A reward on the host that calls a function with the number of its batch."""

    before: Callable[[int], None]
    counter: BatchCounter
    batch_size: int = 100
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="any")
    runs_on: ClassVar[Literal["host"]] = "host"

    def load(self, placement: Placement) -> HostReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.before(len(self.counter.scored))
        with self.counter.changed:
            self.counter.scored.append(len(pixels))
        return pixels.mean((1, 2, 3, 4)) + torch.arange(len(pixels))


def counting_context(
    before: Callable[[int], None], counter: BatchCounter, batch_size: int = 4, **settings: Any
) -> Context[Any]:
    toy, spec = toys.policy("flow"), HostReward(before, counter)
    policy = CountingPolicy(toy.model, replace(toy.process, num_steps=2), toy.weights, counter=counter)
    rubric = Rubric({"host": WeightedReward(spec, spec), "color": WeightedReward(ColorReward(), ColorReward())})
    return replace(toys.context(policy, 8), rubric=rubric, rollout_batch_size=batch_size, **settings)


def test_a_batch_is_scored_while_the_next_one_is_sampled() -> None:
    """The reward of a batch does not return before the sampler has begun the next one, so serial scoring fails."""
    counter = BatchCounter()

    def wait_for_next(batch: int) -> None:
        assert counter.wait_for_samples(min(batch + 2, 6))

    overlapped, _, scores = rollout_and_score(counting_context(wait_for_next, counter), toys.prompts(8), 3)
    assert counter.scored == [4] * 6 and counter.sampled == 6
    serial_counter = BatchCounter()

    def refuse_next(batch: int) -> None:
        assert serial_counter.sampled == batch + 1

    serial = counting_context(refuse_next, serial_counter, overlap_rewards=False)
    trajectory, _, expected = rollout_and_score(serial, toys.prompts(8), 3)
    assert overlapped.final.equal(trajectory.final) and overlapped.cond.prompts == trajectory.cond.prompts
    assert scores.total.equal(expected.total) and scores.rewards["host"].equal(expected.rewards["host"])


@dataclass(frozen=True)
class CountingDecoder(Policy[Any]):
    """A policy that counts what it decodes: once per rollout batch of teacher-forced samples."""

    counter: BatchCounter = field(default_factory=BatchCounter)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        self.counter.count_sample()
        return super().decode(x, frames)


@pytest.mark.parametrize("latent_weight", [0.0, 2.0])
def test_teacher_forced_samples_are_scored_while_the_next_ones_are_sampled(latent_weight: float) -> None:
    """Each reward waits until the next batch is sampled, and the experience equals that of serial scoring."""
    model = LlamagenSpec(num_classes=10, class_names=tuple("abcdefghij")).tiny().load(Placement())
    batch = replace(toys.image_batch(6, 1, 0, side=32), prompts=tuple("abcdef"))
    objective = TeacherForcedGRPO(group_size=2, latent_reward_weight=latent_weight)
    experiences = {}
    for overlap in (True, False):
        counter = BatchCounter()

        def check(batch: int, counter: BatchCounter = counter, overlap: bool = overlap) -> None:
            assert counter.wait_for_samples(min(batch + 2, 3)) if overlap else counter.sampled == batch + 1

        spec = HostReward(check, counter)
        policy = CountingDecoder(model, AutoregressiveProcess(), FullWeights(model.net), counter=counter)
        rubric = Rubric({"host": WeightedReward(spec, spec), "mse": WeightedReward(MseReward(), MseReward())})
        settings = {"rubric": rubric, "rollout_batch_size": 4, "overlap_rewards": overlap}
        experiences[overlap] = objective.collect(replace(toys.context(policy, 6), **settings), batch)
        assert counter.scored == [4] * 3 and counter.sampled == 3
    overlapped, serial = experiences[True], experiences[False]
    for name in ("samples", "log_prob", "reward", "advantage"):
        assert getattr(overlapped, name).equal(getattr(serial, name)), name
    assert serial.rewards.keys() == {"host", "mse", *(["latent"] if latent_weight else [])}
    assert all(overlapped.rewards[name].equal(reward) for name, reward in serial.rewards.items())


def test_the_sampler_waits_for_a_slow_reward() -> None:
    """Pixels of at most two batches wait for their scores, so that host memory is bounded."""
    counter = BatchCounter()

    def wait_for_next(batch: int) -> None:
        assert counter.wait_for_samples(min(batch + 2, 12))
        time.sleep(0.02)  # in which a sampler that did not wait would go on

    ctx = counting_context(wait_for_next, counter, batch_size=2)
    rollout_and_score(ctx, toys.prompts(8), 3)
    assert counter.scored == [2] * 12 and 1 < counter.max_lead <= MAX_PENDING_BATCHES + 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_reward_stops_the_rollout_with_its_own_message(overlap: bool) -> None:
    counter = BatchCounter()

    def fail(batch: int) -> None:
        if batch == 1:
            raise OSError("the disk is full")

    ctx = counting_context(fail, counter, overlap_rewards=overlap)
    with pytest.raises(RewardError, match=r"^reward 'host' failed on .*OSError: the disk is full.*TM115\]$"):
        rollout_and_score(ctx, toys.prompts(8), 3)
    assert counter.sampled <= 2 + MAX_PENDING_BATCHES  # of six


def train_weights(folder: Path, *settings: str) -> tuple[dict[str, Tensor], set[str]]:
    """The weights after three steps, and the timings of a step."""
    common = ["steps=3", "batch.prompts=8", "batch.rollout_batch_size=8", "guard.every=0", "sample.every=0"]
    common += ["rewards.jpeg={type: jpeg, weight: 0.1}", "engine.device=cpu"]
    run = build(load("grpo-toy-flow", [*common, *settings]), folder)
    steps = [event for event in train(run) if isinstance(event, StepCompleted)]
    run.engine.close()
    weights = {name: p.detach().clone() for name, p in run.policy.weights.trainable().items()}
    return weights, set(steps[-1].timings)


def test_overlapped_and_placed_rewards_train_the_same_weights(tmp_path: Path) -> None:
    expected, timings = train_weights(tmp_path / "never", "engine.overlap_rewards=never")
    assert {"time/reward", "time/reward_wait"} <= timings
    variants = {
        "auto": ["engine.overlap_rewards=auto"],
        "always": ["engine.overlap_rewards=always"],
        "device": ["rewards.color.device=cpu"],  # a stand-in for a second GPU
    }
    with serve_on_free_port(ColorReward()) as first, serve_on_free_port(ColorReward()) as second:
        variants["servers"] = [f"rewards.color.device=[{first}, {second}]"]
        for name, settings in variants.items():
            weights, timings = train_weights(tmp_path / name, *settings)
            assert "time/reward_wait" in timings
            different = [key for key, value in expected.items() if not weights[key].equal(value)]
            assert not different, (name, different)


def test_rewards_with_a_device_run_in_threads_unless_their_gradient_is_needed() -> None:
    rubric = build_rubric({"color": RewardConfig(ColorReward(), device="cpu")}, Placement())
    pixels = torch.rand(4, 1, 3, 8, 8, requires_grad=True)
    with torch.no_grad():
        pending = rubric.start(pixels, [toys.PROMPTS])
    assert pending.futures.keys() == {"color"}
    scores = rubric.start(pixels, [toys.PROMPTS])
    assert not scores.futures and pending.wait()[0].total.equal(scores.wait()[0].total.detach())
    (gradient,) = torch.autograd.grad(scores.wait()[0].total.sum(), pixels)
    assert gradient.abs().sum() > 0
    assert not build_rubric({"color": RewardConfig(ColorReward())}, Placement()).uses_threads


def test_devices_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TM2050"):
        build(load("grpo-toy-flow", ["rewards.color.device=cuda:99"]), tmp_path)
    with pytest.raises(ConfigError, match=r"rewards\.color\.device"):
        load("grpo-toy-flow", ["rewards.color.device=gpu1"])
