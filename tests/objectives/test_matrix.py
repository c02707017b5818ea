"""Every objective on every family it can train: the reward rises, and with shuffled rewards it does not."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import toys
from torch import Tensor

import tastemaker.objectives
from tastemaker.config.registries import OBJECTIVES
from tastemaker.core.objective import Objective
from tastemaker.core.policy import Policy, Process
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import LikeBatch, Metadata, Placement, PreferenceBatch, PromptBatch, Prompts
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.crd import CRD
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dgpo import DGPO
from tastemaker.objectives.distill import Distillation
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.elbo_grpo import ElboGRPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.joint_likelihood import JointLikelihood
from tastemaker.objectives.kto import KTO, OnlineKTO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.mapo import MaPO, OnlineMaPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.ram import RAM
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.color import ColorReward

FLOWS, NOISE, TOKENS = ("flow", "video"), ("epsilon",), ("causal", "masked")
LATENTS = (*FLOWS, *NOISE)


@dataclass(frozen=True)
class Setting:
    """Training settings of one objective on some families, for a few seconds."""

    objective: Objective[Any, Any, Any, Any]
    families: tuple[str, ...]
    lr: float = 1e-3
    steps: int = 60
    batch: int = 64  # prompts or samples of data per step
    decay_lr: bool = False  # whether the learning rate falls to zero
    process: Process | None = None  # instead of the family's
    name: str = ""  # suffix of the title, if an objective has several settings

    @property
    def title(self) -> str:
        return f"{type(self.objective).__name__.lower()}{self.name and '-' + self.name}"


# The positive word leaves the color of the prompt, the negative word is grey: the toy reward reads the last color.
COLOR_SRPO = SRPO(
    num_grid_steps=8,
    timestep_range=(1, 6),
    num_train_timesteps=100,
    groundtruth_ratio=0.5,
    positive_words=(" ",),
    negative_words=("grey",),
    template="{prompt} {word}",
    discount_pos=(3.0, 3.0),
    discount_inv=(0.0, 0.0),
    reward_margin=None,
)
DENOISE = replace(COLOR_SRPO, relative=False, branches=("denoise",))
INVERSION = replace(COLOR_SRPO, relative=False, branches=("inversion",))
SINGLE = RewardGradient(gradient_mode="single_step", step_range=(4, 7))
AWM = ElboGRPO(
    group_size=16,
    likelihood="ghuber",
    num_timesteps=6,
    timestep_sampling="discrete_wo_init",
    timestep_fraction=0.9,
    timestep_sharing="batch",
    noise_sharing="independent",
    ratio="per_level",
    clip_range=1.0,
    kl_coef=0.3,  # with 1e-3 this toy breaks
    ema_kl_coef=1.0,
)
ANCHORED_MAPO = OnlineMaPO(
    group_size=8, num_timesteps=2, likelihood="adaptive", margin_scale=100.0, reference_margin=True, kl_coef=0.3
)
EPG = ElboGRPO(group_size=16, loss_type="epg", ratio="none", advantage="centered", kl_coef=1e-2)
# Token models have small learning rates: the effect of noise grows with the square root of the number of steps, that of
# rewards with their number. On the noise path an error of the prediction at the highest noise level is 150 times as
# large in the clean sample. Learning rates are small there too, and beta is large, as in Diffusion-DPO, so that a pair
# has no gradient once it is separated.
SETTINGS = [
    Setting(Likelihood(), (*FLOWS, *TOKENS), steps=25),
    Setting(Likelihood(), NOISE, steps=80, decay_lr=True),
    Setting(RewardGradient(last_steps=2), FLOWS, lr=2e-3, steps=40, batch=16, name="tail"),
    Setting(RewardGradient(last_steps=2), NOISE, lr=3e-4, steps=40, batch=16, name="tail"),
    Setting(RewardGradient(gradient_mode="random"), FLOWS, steps=40, batch=16, name="random"),
    Setting(RewardGradient(gradient_mode="random"), NOISE, lr=2e-4, steps=60, batch=16, name="random"),
    Setting(SINGLE, FLOWS, steps=40, batch=16, name="single"),
    Setting(SINGLE, NOISE, lr=3e-4, steps=40, batch=16, name="single"),
    Setting(RewardGradient(gradient_mode="renoise"), FLOWS, lr=2e-3, steps=40, batch=16, name="renoised"),
    Setting(RewardGradient(gradient_mode="renoise"), NOISE, lr=3e-4, steps=40, batch=16, name="renoised"),
    Setting(RewardGradient(gradient_mode="leap"), FLOWS, steps=40, batch=16, name="leap"),
    Setting(RewardGradient(gradient_mode="leap"), NOISE, lr=2e-4, steps=60, batch=16, name="leap"),
    Setting(COLOR_SRPO, FLOWS, batch=32),
    Setting(COLOR_SRPO, NOISE, lr=3e-4, batch=32),
    Setting(DENOISE, FLOWS, steps=30, batch=32, name="denoise"),
    Setting(DENOISE, NOISE, lr=3e-4, steps=30, batch=32, name="denoise"),
    Setting(INVERSION, ("flow",), lr=2e-3, batch=32, name="inversion"),
    Setting(DDPO(clip_range=1e-3, tracker_min_count=8), LATENTS, steps=45),
    Setting(DDPO(clip_range=0.2, tracker_min_count=8), TOKENS, lr=1e-4, steps=50),
    Setting(GRPO(group_size=16, clip_range=1e-3), LATENTS, steps=45, batch=4),
    Setting(GRPO(group_size=16, clip_range=0.2), TOKENS, lr=1e-4, steps=50, batch=4),
    Setting(GRPO(group_size=16, clip_range=1e-3, kl_coef=0.02), ("flow",), steps=40, batch=4, name="kl"),
    Setting(GRPO(group_size=16, clip_range=0.2, kl_coef=0.02), ("causal",), lr=1.5e-4, steps=30, batch=4, name="kl"),
    Setting(TeacherForcedGRPO(group_size=16, clip_range=0.2), ("causal",), lr=1e-4, steps=50, batch=4),
    Setting(
        TeacherForcedGRPO(group_size=16, clip_range=0.2, ce_coef=0.1, token_noise=0.5),
        ("causal",),
        lr=1e-4,
        steps=80,
        batch=4,
        name="va",
    ),
    Setting(
        TeacherForcedGRPO(group_size=16, clip_range=0.2, own_token_ratio=0.3, token_dropout=0.5),
        ("causal",),
        lr=1e-4,
        steps=50,
        batch=4,
        name="own",
    ),
    Setting(CCA(beta=0.1, negative_weight=1.0), ("causal",), lr=3e-4, steps=20, batch=32),
    Setting(CCA(beta=0.3, loss_type="dpo"), ("causal",), lr=3e-4, steps=20, batch=32, name="dpo"),
    Setting(DPO(beta=200.0), FLOWS, batch=32),
    Setting(DPO(beta=2500.0, num_timesteps=2), NOISE, steps=60, batch=32, decay_lr=True),
    Setting(DPO(beta=0.3), TOKENS, lr=3e-4, steps=25, batch=32),
    Setting(OnlineDPO(beta=1000.0), FLOWS, batch=16),
    Setting(OnlineDPO(beta=10_000.0, num_timesteps=2, group_size=16), NOISE, steps=100, batch=16, decay_lr=True),
    Setting(OnlineDPO(beta=0.1), TOKENS, lr=3e-4, steps=20, batch=16),
    Setting(OnlineDPO(beta=1000.0, round_steps=30), ("flow",), batch=16, name="rounds"),
    Setting(OnlineDPO(beta=0.1, round_steps=10), TOKENS, lr=3e-4, steps=20, batch=16, name="rounds"),
    Setting(
        OnlineDPO(beta=0.1, round_steps=10, reward_guidance_coef=0.1),
        TOKENS,
        lr=3e-4,
        steps=20,
        batch=16,
        name="guided",
    ),
    Setting(NFT(group_size=8, kl_coef=0.1), LATENTS, lr=3e-4, steps=45, batch=8),
    Setting(
        NFT(group_size=8, kl_coef=0.1, norm_guard_coef=1.0), ("flow",), lr=3e-4, steps=45, batch=8, name="norm-guard"
    ),
    Setting(ElboGRPO(group_size=16), LATENTS, steps=40, batch=4),
    Setting(ElboGRPO(group_size=16, num_timesteps=2, clip_range=0.2, kl_coef=1e-3), TOKENS, lr=1e-4, steps=50, batch=4),
    Setting(AWM, ("flow",), steps=40, batch=4, name="awm"),
    Setting(EPG, ("flow",), steps=40, batch=4, name="epg"),
    Setting(GRPO(group_size=16, trust="ratio_norm"), ("flow",), steps=45, batch=4, name="guard"),
    Setting(GRPO(group_size=16, trust="kl"), ("epsilon",), steps=45, batch=4, name="dppo"),
    Setting(GRPO(group_size=16, trust="drpo"), TOKENS, lr=1e-4, steps=50, batch=4, name="drpo"),
    Setting(
        GRPO(group_size=12, branches=6, clip_range=1e-3, time_weighting="noise"),
        ("flow",),
        steps=45,
        batch=4,
        process=GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8, SDEWindow(1)),
        name="tempflow",
    ),
    Setting(
        GRPO(group_size=16, clip_range=1e-3),
        ("flow",),
        steps=45,
        batch=4,
        process=GaussianProcess(RectifiedFlow(), FlowSDE(1.0, "exact"), 6),
        name="precise",
    ),
    Setting(RAM(group_size=8, reward_multiplier=10.0, num_timesteps=2), LATENTS, lr=3e-4, steps=45, batch=8),
    Setting(
        DGPO(group_size=8, beta=10.0, kl_coef=0.05, clip_range=0.0, num_timesteps=2),
        LATENTS,
        lr=3e-4,
        steps=45,
        batch=8,
    ),
    Setting(CRD(group_size=8, kl_coef=0.02, num_timesteps=2), LATENTS, lr=3e-4, steps=45, batch=8),
    Setting(KTO(beta=300.0, utility="loss_averse"), FLOWS, batch=64),
    Setting(KTO(beta=100.0), ("flow",), batch=64, name="sigmoid"),
    Setting(KTO(beta=10_000.0, num_timesteps=4, utility="loss_averse"), NOISE, batch=64, decay_lr=True),
    Setting(KTO(beta=0.3), TOKENS, lr=3e-4, steps=25, batch=64),
    Setting(KTO(beta=0.3, reference_point="mismatched"), ("causal",), lr=3e-4, steps=25, batch=64, name="mismatched"),
    Setting(OnlineKTO(beta=3000.0, utility="loss_averse", dislike_weight=0.25), FLOWS, steps=40, batch=8),
    Setting(OnlineKTO(beta=10.0, num_timesteps=2, likelihood="adaptive"), NOISE, lr=3e-4, steps=45, batch=8),
    Setting(OnlineKTO(beta=0.3, group_size=4), TOKENS, lr=3e-4, steps=20, batch=16),
    Setting(MaPO(), FLOWS, batch=32),
    Setting(MaPO(beta=0.01, num_timesteps=4), NOISE, lr=3e-3, steps=150, decay_lr=True),
    Setting(ANCHORED_MAPO, FLOWS, steps=45, batch=8),
    Setting(ANCHORED_MAPO, NOISE, lr=3e-4, steps=45, batch=8),
    Setting(OnlineMaPO(), ("flow",), batch=16, name="published"),
]
# In the fast set each objective and each family is trained once.
FAST = {
    ("likelihood", "causal"), ("rewardgradient-tail", "epsilon"), ("srpo", "video"), ("ddpo", "masked"),
    ("grpo", "flow"), ("teacherforcedgrpo", "causal"), ("cca", "causal"), ("dpo", "masked"), ("onlinedpo", "causal"),
    ("nft", "flow"), ("elbogrpo", "flow"), ("ram", "flow"), ("dgpo", "flow"), ("crd", "flow"), ("kto", "flow"),
    ("onlinekto", "causal"), ("mapo", "flow"), ("onlinemapo", "flow"),
}  # fmt: skip
# Joint training needs a model of text and images, and distillation has teachers instead of rewards: tests of their own.
TRAINED_ELSEWHERE = {JointLikelihood, Distillation}
CASES = [(setting, family) for setting in SETTINGS for family in setting.families]
FIRST = {
    (type(setting.objective), family): setting for setting, family in reversed(CASES)
}  # the first of several settings


def parametrize_cases(marks: Callable[[Setting, str], list[pytest.MarkDecorator]]) -> list[Any]:
    return [
        pytest.param(setting, family, id=f"{setting.title}-{family}", marks=marks(setting, family))
        for setting, family in CASES
    ]


def learning_marks(setting: Setting, family: str) -> list[pytest.MarkDecorator]:
    """Further settings of an objective are slow on their first family and long on the others."""
    if (setting.title, family) in FAST:
        return []
    first = next(other for other, _ in CASES if other.title == setting.title)
    is_slow = FIRST[type(setting.objective), family] is setting or (setting is first and family == first.families[0])
    return [pytest.mark.slow if is_slow else pytest.mark.long]


def control_marks(setting: Setting, family: str) -> list[pytest.MarkDecorator]:
    """The control of the first setting and family of each objective is slow, the others are long."""
    first = next((other, name) for other, name in CASES if type(other.objective) is type(setting.objective))
    return [pytest.mark.slow if first == (setting, family) else pytest.mark.long]


@dataclass(frozen=True)
class ShuffledScoreReward(RewardSpec, Reward):
    """A color reward without information: each image gets the score of another one."""

    color: ColorReward = ColorReward()
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), hash=False)
    batch_size = 100_000  # all samples at once
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = False
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> ShuffledScoreReward:
        return self

    def tiny(self) -> ShuffledScoreReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        frames = 1 + max(
            (sample.get("frame", 0) for sample in metadata), default=0
        )  # frames of one video stay together
        order = torch.randperm(len(pixels) // frames, generator=self.generator)
        return self.color.score(pixels, prompts, metadata).view(-1, frames)[order].flatten()


@dataclass(frozen=True)
class ShuffledPromptReward(RewardSpec, Reward):
    """A differentiable color reward without information: each image is scored with the prompt of another one."""

    color: ColorReward = ColorReward()
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), hash=False)
    batch_size = 100_000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = True
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> ShuffledPromptReward:
        return self

    def tiny(self) -> ShuffledPromptReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        order = torch.randperm(len(pixels), generator=self.generator).tolist()
        return self.color.score(pixels, [prompts[i] for i in order], metadata)


def batches(setting: Setting, frames: int, shuffled: bool) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    for step in range(setting.steps):
        if setting.objective.consumes is PromptBatch:
            yield toys.prompts(setting.batch)
        elif setting.objective.consumes is PreferenceBatch:
            pairs = toys.pairs(setting.batch, frames, step)
            yield flip_half(pairs, generator) if shuffled else pairs
        elif setting.objective.consumes is LikeBatch:
            likes = toys.likes(setting.batch, frames, step)
            order = torch.randperm(len(likes), generator=generator) if shuffled else torch.arange(len(likes))
            yield replace(likes, liked=likes.liked[order])
        else:
            # The color is drawn independently of the caption.
            yield toys.image_batch(setting.batch, frames, 10_000 + step, label_noise=float(shuffled))


def flip_half(pairs: PreferenceBatch, generator: torch.Generator) -> PreferenceBatch:
    keep = (torch.rand(len(pairs), generator=generator) < 0.5).view(-1, 1, 1, 1, 1)
    chosen, rejected = pairs.chosen.where(keep, pairs.rejected), pairs.rejected.where(keep, pairs.chosen)
    return PreferenceBatch(pairs.prompts, chosen, rejected)


@torch.no_grad()
def measure(policy: Policy[Any], likelihood: bool) -> Tensor:
    """Return the likelihood of images not trained on, or the reward of new samples."""
    if not likelihood:
        return toys.true_rewards(policy)
    images = toys.image_batch(512, policy.model.pixels[0], 999_999)
    cond, x, rng = policy.embed(images.prompts), policy.encode(images.pixels), Randomness(3, 0, torch.arange(512))
    noisy = [policy.corrupt(x, rng, draw=draw) for draw in range(16)]
    return torch.stack([policy.likelihood(cond, x, n) / policy.process.count_hidden(n) for n in noisy]).mean(0)


@cache
def measure_pretrained(family: str, likelihood: bool) -> Tensor:
    return measure(toys.pretrained_policy(family), likelihood)


def train(setting: Setting, family: str, shuffled: bool) -> tuple[float, str]:
    objective = setting.objective
    policy = toys.pretrained_policy(family, snapshots=objective.snapshots())
    if setting.process is None:
        before = measure_pretrained(family, isinstance(objective, Likelihood))
    else:
        policy = replace(policy, process=setting.process)
        before = measure(policy, likelihood=False)
    shuffled_reward = ShuffledPromptReward() if objective.needs_gradient else ShuffledScoreReward()
    data = batches(setting, policy.model.pixels[0], shuffled)
    decay_steps = setting.steps if setting.decay_lr else math.inf
    toys.train(policy, objective, data, setting.lr, shuffled_reward if shuffled else ColorReward(), decay_steps)
    after = measure(policy, isinstance(objective, Likelihood))
    # Likelihoods are of the same images with the same noise: only their differences are random.
    z_score = toys.z_score(*((0 * before, after - before) if isinstance(objective, Likelihood) else (before, after)))
    reward = "shuffled" if shuffled else "true"
    return (
        z_score,
        f"{setting.title:24s} {family:8s} {reward:8s} {before.mean():.3f} -> {after.mean():.3f}  z = {z_score:5.1f}",
    )


@pytest.mark.parametrize(("setting", "family"), parametrize_cases(learning_marks))
def test_reward_rises_by_more_than_three_standard_errors(setting: Setting, family: str) -> None:
    z_score, summary = train(setting, family, shuffled=False)
    print(summary)
    assert z_score > 3, summary


@pytest.mark.parametrize(("setting", "family"), parametrize_cases(control_marks))
def test_shuffled_rewards_do_not_raise_the_reward(setting: Setting, family: str) -> None:
    z_score, summary = train(setting, family, shuffled=True)
    print(summary)
    assert z_score < 3, summary


def test_matrix_covers_every_objective_and_family() -> None:
    covered = {(type(setting.objective), family) for setting, family in CASES}
    for objective in set(objective_types()) - TRAINED_ELSEWHERE:
        for name, family in toys.FAMILIES.items():
            if isinstance(family.process, objective.needs):
                assert (objective, name) in covered, f"{objective.__name__} has no setting for {name}"


def test_fast_tests_cover_every_objective_and_family() -> None:
    fast = [(type(setting.objective), family) for setting, family in CASES if not learning_marks(setting, family)]
    assert {kind for kind, _ in fast} == set(objective_types()) - TRAINED_ELSEWHERE
    assert {family for _, family in fast} == set(toys.FAMILIES)


PRETRAINING = [
    pytest.param(name, marks=pytest.mark.slow if name in ("flow", "masked") else pytest.mark.long)
    for name in toys.FAMILIES
]


@pytest.mark.parametrize("family", PRETRAINING)
def test_pretraining_reaches_the_stored_toy_weights(family: str) -> None:
    random, trained, stored = (
        toys.true_rewards(build(family)) for build in (toys.policy, toys.pretrain, toys.pretrained_policy)
    )
    assert toys.z_score(random, trained) > 3 and abs(toys.z_score(stored, trained)) < 5


def test_registered_objectives_are_in_the_objectives_package() -> None:
    assert {OBJECTIVES.find(name) for name in OBJECTIVES} == set(objective_types())


def objective_types() -> list[type[Objective[Any, Any, Any, Any]]]:
    """Return all objectives of the package, registered or not."""
    types = []
    for module in pkgutil.iter_modules(tastemaker.objectives.__path__, "tastemaker.objectives."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            is_own = issubclass(member, Objective) and member.__module__ == module.name
            if is_own and not inspect.isabstract(member):
                types.append(member)
    return types
