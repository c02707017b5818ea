"""SRPO: published noise levels and strides, recovery of the clean sample, branches and network calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
import toys
from torch import Tensor, nn

from tastemaker.core.policy import Backbone, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Condition, Metadata, Placement, Prompts, select_rows
from tastemaker.core.weights import FullFinetuning
from tastemaker.objectives.srpo import SRPO, Branch, DirectAlignBatch
from tastemaker.processes.dynamics import DDIM, ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving
from tastemaker.rewards.color import ColorReward

HPS = SRPO()
PICKSCORE = SRPO(timestep_range=(5, 30), discount_pos=(0.1, 0.5), discount_inv=(0.6, 0.01))
FLUX = GaussianProcess(RectifiedFlow(shift=3.0), ODE(), 25)
TOY = SRPO(
    num_grid_steps=8,
    timestep_range=(1, 6),
    num_train_timesteps=100,
    positive_words=(" ",),
    negative_words=("grey",),
    template="{prompt} {word}",
    reward_margin=None,
)


@pytest.mark.parametrize(
    ("objective", "grid_index", "branch", "source", "target", "boost"),
    [
        (HPS, 500, "denoise", 0.878486, 0.857036, 0.175075),
        (HPS, 500, "inversion", 0.835586, 0.857036, 0.183884),
        (HPS, 50, "denoise", 0.771236, 0.760511, 0.107508),
        (HPS, 50, "inversion", 0.750000, 0.760725, 0.299710),
        (HPS, 990, "denoise", 0.964286, 0.962141, 0.248649),
        (HPS, 990, "inversion", 0.959996, 0.962141, 0.015516),
        (PICKSCORE, 500, "denoise", 0.845119, 0.815327, 0.300200),
        (PICKSCORE, 500, "inversion", 0.785536, 0.815327, 0.363764),
        (PICKSCORE, 50, "denoise", 0.696160, 0.681265, 0.120020),
        (PICKSCORE, 50, "inversion", 0.666667, 0.681562, 0.599409),
        (PICKSCORE, 990, "denoise", 0.964286, 0.961307, 0.496396),
        (PICKSCORE, 990, "inversion", 0.958327, 0.961307, 0.021221),
    ],
)
def test_levels_and_discounts_match_published(
    objective: SRPO, grid_index: int, branch: Branch, source: float, target: float, boost: float
) -> None:
    levels = objective.levels(FLUX, torch.tensor([grid_index]), branch)
    values = [float(levels.source), float(levels.target), float(levels.boost)]
    assert values == pytest.approx([source, target, boost], abs=1e-6)


@pytest.mark.parametrize(
    ("num_train_timesteps", "groundtruth_ratio", "stride"), [(1000, 0.9, 100), (100, 0.9, 10), (100, 0.6, 41)]
)
def test_strides_match_published(num_train_timesteps: int, groundtruth_ratio: float, stride: int) -> None:
    levels = SRPO(num_train_timesteps=num_train_timesteps, groundtruth_ratio=groundtruth_ratio).levels(
        FLUX, torch.tensor([num_train_timesteps // 2]), "denoise"
    )
    spacing = float(FLUX.path.timesteps(50)[5] - FLUX.path.timesteps(50)[25]) / (num_train_timesteps - 1)
    assert float(levels.source - levels.target) / spacing == pytest.approx(stride, rel=1e-3)


def test_grid_indices_are_within_margins() -> None:
    objective = replace(TOY, num_train_timesteps=20)
    indices = objective.collect(toys.context(toys.policy("flow"), 400), toys.prompts(400)).grid_index
    assert indices.unique().tolist() == list(range(5, 16))


def test_branches_meet_at_the_same_level() -> None:
    indices = torch.arange(5, 996)
    denoise, inversion = (HPS.levels(FLUX, indices, branch) for branch in ("denoise", "inversion"))
    differences = (denoise.target - inversion.target).abs()
    assert differences[indices > 100].max() == 0
    assert differences.max() < 3e-4
    assert (denoise.source > denoise.target).all()
    assert (inversion.source < inversion.target).all()


@dataclass
class FixedOutput(Backbone):
    """A denoiser with a fixed output."""

    output: Tensor
    net: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))
    forward_passes: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.output.shape[1:])

    pixels = (1, 3, 8, 8)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.output

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


GRID_INDICES = torch.tensor([5, 20, 100, 499, 500, 700, 899, 950, 995])
EPSILON = VariancePreserving(prediction_type="epsilon", set_alpha_to_one=True)


def direct_align_batch(process: GaussianProcess, output: Tensor | None = None) -> tuple[Any, DirectAlignBatch, Tensor]:
    """Return samples and noise at many grid indices; the model predicts the target unless `output` is set."""
    rng = Randomness(0, 0, torch.arange(len(GRID_INDICES)))
    clean, noise = rng.normal("clean", 1, 3, 8, 8), rng.normal("noise", 1, 3, 8, 8)
    target = process.path.target(clean, noise, torch.ones(len(GRID_INDICES)))
    model = FixedOutput(target if output is None else output)
    policy = Policy(model, process, FullFinetuning().apply(model, ()))
    batch = DirectAlignBatch(
        Condition(("",) * len(GRID_INDICES)), clean, noise, GRID_INDICES, torch.zeros(len(GRID_INDICES))
    )
    return toys.context(policy, len(GRID_INDICES)), batch, clean


@pytest.mark.parametrize("process", [FLUX, GaussianProcess(EPSILON, DDIM(1.0), 25)])
@pytest.mark.parametrize("branch", ["denoise", "inversion"])
def test_perfect_model_recovers_the_sample(branch: Branch, process: GaussianProcess) -> None:
    ctx, batch, clean = direct_align_batch(process)
    recovered = HPS.recover_clean(ctx, batch, HPS.levels(process, GRID_INDICES, branch))
    torch.testing.assert_close(recovered, clean, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("branch", "sign"), [("denoise", -1), ("inversion", 1)])
def test_branches_have_opposite_gradients(branch: Branch, sign: int) -> None:
    """d clean / d velocity is -gap / (1 - level) for denoising and gap / (1 - level) for inversion."""
    velocity = torch.zeros(len(GRID_INDICES), 1, 3, 8, 8, requires_grad=True)
    ctx, batch, _ = direct_align_batch(FLUX, velocity)
    levels = HPS.levels(FLUX, GRID_INDICES, branch)
    HPS.recover_clean(ctx, batch, levels).sum().backward()
    weight = sign * (levels.source - levels.target).abs() / (1 - levels.target)
    torch.testing.assert_close(velocity.grad, weight.view(-1, 1, 1, 1, 1).expand_as(velocity), rtol=1e-3, atol=1e-5)


def test_gradient_weights_match_published() -> None:
    levels = HPS.levels(FLUX, torch.tensor([500, 899]), "denoise")
    gap = levels.source - levels.target
    torch.testing.assert_close(gap, torch.full((2,), 0.02145), rtol=2e-3, atol=0)


def test_network_calls_of_a_step() -> None:
    policy = toys.policy("flow")
    with_gradient: list[bool] = []
    policy.model.net.register_forward_hook(lambda net, inputs, output: with_gradient.append(output.requires_grad))
    ctx = toys.context(policy, 8)
    experience = TOY.collect(ctx, toys.prompts(8))
    assert with_gradient == [False] * 8
    assert not experience.clean.requires_grad
    toys.backward(TOY, ctx, experience)
    assert with_gradient == [False] * 8 + [True]
    toys.backward(replace(TOY, batch_branches=False), ctx, experience)
    assert with_gradient == [False] * 8 + [True] * 3


@pytest.mark.parametrize("relative", [True, False])
def test_batched_branches_match_sequential_branches(relative: bool) -> None:
    policy = toys.policy("flow")
    ctx = toys.context(policy, 8)
    results = []
    for batched in (True, False):
        objective = replace(TOY, batch_branches=batched, relative=relative, reward_margin=0.7)
        experience = objective.collect(ctx, toys.prompts(8))
        parts = [objective.loss(ctx, experience, part) for part in objective.parts(experience)]
        total = torch.stack([loss.rows for loss in parts]).sum(0)
        for p in policy.weights.trainable().values():
            p.grad = None
        total.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.weights.trainable().values() if p.grad is not None])
        results.append((gradient, total.detach(), {name: x for loss in parts for name, x in loss.metrics.items()}))
    (gradient, losses, metrics), (sequential_gradient, sequential_losses, sequential_metrics) = results
    torch.testing.assert_close(
        gradient, sequential_gradient, rtol=1e-5, atol=1e-5 * float(sequential_gradient.abs().max())
    )
    torch.testing.assert_close(losses, sequential_losses)
    torch.testing.assert_close(metrics, sequential_metrics)


@dataclass(frozen=True)
class RecordedReward(RewardSpec, Reward):
    """A color reward that records the prompts it gets."""

    batches: list[tuple[str, ...]] = field(default_factory=list, hash=False)
    batch_size: int = 1000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = True
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> RecordedReward:
        return self

    def tiny(self) -> RecordedReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.batches.append(tuple(prompts))
        return ColorReward().score(pixels, ["a red"] * len(prompts), metadata)


def test_control_words_alternate_and_swap_under_inversion() -> None:
    policy, reward = toys.policy("flow"), RecordedReward()
    objective = replace(HPS, num_grid_steps=8, timestep_range=(1, 6), num_train_timesteps=100, batch_branches=False)
    for step in (0, 5):
        ctx = toys.context(policy, 4, step=step, spec=reward)
        experience = objective.collect(ctx, toys.prompts(4))
        for part in objective.parts(experience):
            objective.loss(ctx, experience, part)
    positive, negative = (
        ["Detail", "Detailed"],
        ["Painting", "Painting"],
    )  # the first step and the sixth, modulo 4 and 5
    words = [prompts[0].split(". ")[0] for prompts in reward.batches]
    assert words == [
        positive[0],
        negative[0],
        negative[0],
        positive[0],
        positive[1],
        negative[1],
        negative[1],
        positive[1],
    ]
    assert reward.batches[0][1] == "Detail. a green"


def test_relative_reward_is_boosted_and_hinged() -> None:
    policy, ctx = toys.policy("flow"), toys.context(toys.policy("flow"), 8)
    plain, hinged = replace(TOY, branches=("denoise",)), replace(TOY, branches=("denoise",), reward_margin=0.2)
    experience = plain.collect(ctx, toys.prompts(8))
    levels = plain.levels(policy.process, experience.grid_index, "denoise")
    pixels = ctx.policy.decode(plain.recover_clean(ctx, experience, levels))
    positive = ctx.rubric.score(pixels, experience.cond.prompts).total
    negative = ctx.rubric.score(pixels, ["a grey"] * 8).total
    relative_reward = (1 + levels.boost) * positive - negative
    torch.testing.assert_close(plain.loss(ctx, experience, ("denoise",)).rows, -relative_reward)
    torch.testing.assert_close(hinged.loss(ctx, experience, ("denoise",)).rows, (0.2 - relative_reward).relu())


def test_shared_noise_setting() -> None:
    ctx = toys.context(toys.policy("flow"), 4)
    shared, independent = (
        replace(TOY, shared_noise=is_shared).collect(ctx, toys.prompts(4)).noise for is_shared in (True, False)
    )
    assert len(shared.flatten(1).unique(dim=0)) == 1
    assert len(independent.flatten(1).unique(dim=0)) == 4
    assert TOY.collect(ctx, toys.prompts(4)).grid_index.unique().numel() > 1


def test_invalid_settings_are_refused() -> None:
    for settings, message in (
        ({"timestep_range": (5, 60)}, "'timestep_range'"),
        ({"groundtruth_ratio": 1.0}, r"groundtruth_ratio.*1\.0"),
        ({"branches": ()}, r"\bbranches\b"),
        ({"template": "{word}"}, "{prompt}"),
    ):
        with pytest.raises(ValueError, match=message):
            SRPO(**settings)


@pytest.mark.parametrize("frames", [(0, 2), "last", "random"])
def test_only_the_chosen_frames_of_a_video_are_decoded(frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, objective = toys.policy("video"), replace(TOY, frames=frames)
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    decoded: list[Any] = []
    decode = policy.decode
    monkeypatch.setattr(Policy, "decode", lambda self, x, frames=None: decoded.append(frames) or decode(x, frames))
    loss = objective.loss(ctx, experience, ("denoise", "inversion")).rows
    if frames != "random":
        assert decoded == [[0, 2] if frames == (0, 2) else [2]]
        return
    assert experience.frame is not None
    chosen = (experience.frame * 3).long().tolist()
    assert {frame for (frame,) in decoded} == {*chosen} and len(decoded) == len({*chosen})
    # One video at a time, its own frame by index, gives the same losses.
    for row, frame in enumerate(chosen):
        alone = replace(TOY, frames=frame).loss(
            ctx, select_rows(experience, torch.tensor([row])), ("denoise", "inversion")
        )
        torch.testing.assert_close(alone.rows, loss[row : row + 1])
