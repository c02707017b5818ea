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
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Reward, RewardCard, RewardSpec
from tastemaker.core.types import Metadata, Placement, PreferenceBatch, PromptBatch, Prompts
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO
from tastemaker.rewards.color import ColorReward

FLOWS, NOISE, TOKENS = ("flow", "video"), ("epsilon",), ("causal", "masked")
LATENTS = (*FLOWS, *NOISE)


@dataclass(frozen=True)
class Setting:
    """How one objective is trained on some families, for some seconds."""

    objective: Objective[Any, Any, Any, Any]
    families: tuple[str, ...]
    rate: float = 1e-3
    steps: int = 60
    batch: int = 64  # rows of data; times the group, samples
    cool: bool = False  # whether the rate falls to nothing
    name: str = ""  # beside the class, where a class has several settings

    @property
    def title(self) -> str:
        return f"{type(self.objective).__name__.lower()}{self.name and '-' + self.name}"


# Colours are praised by name and blamed for being grey; the toy reward reads the colour named last.
NAMED = SRPO(
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
DENOISE = replace(NAMED, relative=False, branches=("denoise",))
INVERSION = replace(NAMED, relative=False, branches=("inversion",))
SINGLE = RewardGradient(gradient_mode="single_step", step_range=(4, 7))
# Tokens learn in small steps: what chance does to a policy grows with the square root of their number, what rewards do
# with their number. On the noise path an error in what is predicted at the darkest level is 150 times as large in the
# clean sample: there, steps are small too, and preferences steep, as in Diffusion-DPO, so that a pair once told apart
# pulls no more.
SETTINGS = [
    Setting(Likelihood(), (*FLOWS, *TOKENS), steps=25),
    Setting(Likelihood(), NOISE, steps=80, cool=True),
    Setting(RewardGradient(last_steps=2), FLOWS, rate=2e-3, steps=40, batch=16, name="tail"),
    Setting(RewardGradient(last_steps=2), NOISE, rate=3e-4, steps=40, batch=16, name="tail"),
    Setting(RewardGradient(gradient_mode="random"), FLOWS, steps=40, batch=16, name="random"),
    Setting(RewardGradient(gradient_mode="random"), NOISE, rate=2e-4, steps=60, batch=16, name="random"),
    Setting(SINGLE, FLOWS, steps=40, batch=16, name="single"),
    Setting(SINGLE, NOISE, rate=3e-4, steps=40, batch=16, name="single"),
    Setting(RewardGradient(gradient_mode="renoise"), FLOWS, rate=2e-3, steps=40, batch=16, name="renoised"),
    Setting(RewardGradient(gradient_mode="renoise"), NOISE, rate=3e-4, steps=40, batch=16, name="renoised"),
    Setting(NAMED, FLOWS, batch=32),
    Setting(NAMED, NOISE, rate=3e-4, batch=32),
    Setting(DENOISE, FLOWS, steps=30, batch=32, name="denoise"),
    Setting(DENOISE, NOISE, rate=3e-4, steps=30, batch=32, name="denoise"),
    Setting(INVERSION, ("flow",), rate=2e-3, batch=32, name="inversion"),
    Setting(DDPO(clip_range=1e-3, tracker_min_count=8), LATENTS, steps=45),
    Setting(DDPO(clip_range=0.2, tracker_min_count=8), TOKENS, rate=1e-4, steps=50),
    Setting(GRPO(group_size=16, clip_range=1e-3), LATENTS, steps=45, batch=4),
    Setting(GRPO(group_size=16, clip_range=0.2), TOKENS, rate=1e-4, steps=50, batch=4),
    Setting(GRPO(group_size=16, clip_range=1e-3, kl_coef=0.02), ("flow",), steps=40, batch=4, name="kl"),
    Setting(GRPO(group_size=16, clip_range=0.2, kl_coef=0.02), ("causal",), rate=1.5e-4, steps=30, batch=4, name="kl"),
    Setting(TeacherForcedGRPO(group_size=16, clip_range=0.2), ("causal",), rate=1e-4, steps=50, batch=4),
    Setting(
        TeacherForcedGRPO(group_size=16, clip_range=0.2, ce_coef=0.1, token_noise=0.5),
        ("causal",),
        rate=1e-4,
        steps=80,
        batch=4,
        name="va",
    ),
    Setting(
        TeacherForcedGRPO(group_size=16, clip_range=0.2, own_token_ratio=0.3, token_dropout=0.5),
        ("causal",),
        rate=1e-4,
        steps=50,
        batch=4,
        name="own",
    ),
    Setting(CCA(beta=0.1, negative_weight=1.0), ("causal",), rate=3e-4, steps=20, batch=32),
    Setting(CCA(beta=0.3, loss_type="dpo"), ("causal",), rate=3e-4, steps=20, batch=32, name="dpo"),
    Setting(DPO(beta=200.0), FLOWS, batch=32),
    Setting(DPO(beta=2500.0, num_timesteps=2), NOISE, steps=60, batch=32, cool=True),
    Setting(DPO(beta=0.3), TOKENS, rate=3e-4, steps=25, batch=32),
    Setting(OnlineDPO(beta=1000.0), FLOWS, batch=16),
    Setting(OnlineDPO(beta=10_000.0, num_timesteps=2, group_size=16), NOISE, steps=100, batch=16, cool=True),
    Setting(OnlineDPO(beta=0.1), TOKENS, rate=3e-4, steps=20, batch=16),
    Setting(OnlineDPO(beta=1000.0, round_steps=30), ("flow",), batch=16, name="rounds"),
    Setting(OnlineDPO(beta=0.1, round_steps=10), TOKENS, rate=3e-4, steps=20, batch=16, name="rounds"),
    Setting(
        OnlineDPO(beta=0.1, round_steps=10, reward_guidance_coef=0.1),
        TOKENS,
        rate=3e-4,
        steps=20,
        batch=16,
        name="guided",
    ),
    Setting(NFT(group_size=8, kl_coef=0.1), LATENTS, rate=3e-4, steps=45, batch=8),
]
# In the fast set each objective learns once and each family is taught once.
FAST = {
    ("likelihood", "causal"), ("rewardgradient-tail", "epsilon"), ("srpo", "video"), ("ddpo", "masked"),
    ("grpo", "flow"), ("teacherforcedgrpo", "causal"), ("cca", "causal"), ("dpo", "masked"), ("onlinedpo", "causal"),
    ("nft", "flow"),
}  # fmt: skip
CELLS = [(setting, family) for setting in SETTINGS for family in setting.families]
FIRST = {(type(setting.objective), family): setting for setting, family in reversed(CELLS)}  # of several settings


def cells(marks: Callable[[Setting, str], list[pytest.MarkDecorator]]) -> list[Any]:
    return [
        pytest.param(setting, family, id=f"{setting.title}-{family}", marks=marks(setting, family))
        for setting, family in CELLS
    ]


def learning(setting: Setting, family: str) -> list[pytest.MarkDecorator]:
    """An objective's further settings learn on their first family in the slow set, on others in the long one."""
    if (setting.title, family) in FAST:
        return []
    own = next(each for each, _ in CELLS if each.title == setting.title)
    broad = FIRST[type(setting.objective), family] is setting or (setting is own and family == own.families[0])
    return [pytest.mark.slow if broad else pytest.mark.long]


def control(setting: Setting, family: str) -> list[pytest.MarkDecorator]:
    """One control for each objective and family is slow, those of their other settings are long."""
    return [pytest.mark.slow if FIRST[type(setting.objective), family] is setting else pytest.mark.long]


@dataclass(frozen=True)
class Shuffled(RewardSpec, Reward):
    """A colour reward that cannot be learned of: each picture gets the score of another one."""

    color: ColorReward = ColorReward()
    chance: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), hash=False)
    batch_size = 100_000  # all rows at once
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = False
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> Shuffled:
        return self

    def tiny(self) -> Shuffled:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        clips = 1 + max((fact.get("frame", 0) for fact in metadata), default=0)  # frames of one clip go together
        rows = torch.randperm(len(pixels) // clips, generator=self.chance)
        return self.color.score(pixels, prompts, metadata).view(-1, clips)[rows].flatten()


@dataclass(frozen=True)
class Misread(RewardSpec, Reward):
    """A colour reward with gradients that cannot be learned of: each picture is held against another one's prompt."""

    color: ColorReward = ColorReward()
    chance: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), hash=False)
    batch_size = 100_000
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable = True
    modality = "image"
    runs_on = "device"

    def load(self, placement: Placement) -> Misread:
        return self

    def tiny(self) -> Misread:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        rows = torch.randperm(len(pixels), generator=self.chance).tolist()
        return self.color.score(pixels, [prompts[i] for i in rows], metadata)


def batches(setting: Setting, frames: int, shuffled: bool) -> Iterator[Any]:
    chance = torch.Generator().manual_seed(0)
    for step in range(setting.steps):
        if setting.objective.consumes is PromptBatch:
            yield toys.prompts(setting.batch)
        elif setting.objective.consumes is PreferenceBatch:
            pairs = toys.pairs(setting.batch, frames, step)
            yield flipped(pairs, chance) if shuffled else pairs
        else:
            # A colour drawn whatever the caption is a caption drawn whatever the colour.
            yield toys.pictures(setting.batch, frames, 10_000 + step, wrong=float(shuffled))


def flipped(pairs: PreferenceBatch, chance: torch.Generator) -> PreferenceBatch:
    heads = (torch.rand(len(pairs), generator=chance) < 0.5).view(-1, 1, 1, 1, 1)
    chosen, rejected = pairs.chosen.where(heads, pairs.rejected), pairs.rejected.where(heads, pairs.chosen)
    return PreferenceBatch(pairs.prompts, chosen, rejected)


@torch.no_grad()
def measured(policy: Policy[Any], likelihood: bool) -> Tensor:
    """What the objective is about: the likelihood of pictures not trained on, or the reward of fresh samples."""
    if not likelihood:
        return toys.true_rewards(policy)
    seen = toys.pictures(512, policy.model.pixels[0], 999_999)
    cond, x, rng = policy.embed(seen.prompts), policy.encode(seen.pixels), Randomness(3, 0, torch.arange(512))
    noisy = [policy.corrupt(x, rng, draw=draw) for draw in range(16)]
    return torch.stack([policy.likelihood(cond, x, n) / policy.process.count_hidden(n) for n in noisy]).mean(0)


@cache
def untaught(family: str, likelihood: bool) -> Tensor:
    return measured(toys.pretrained_policy(family), likelihood)


def train(setting: Setting, family: str, shuffled: bool) -> tuple[float, str]:
    objective = setting.objective
    policy = toys.pretrained_policy(family, snapshots=objective.snapshots())
    before = untaught(family, isinstance(objective, Likelihood))
    false = Misread() if objective.needs_gradient else Shuffled()
    data = batches(setting, policy.model.pixels[0], shuffled)
    cool = setting.steps if setting.cool else math.inf
    toys.fit(policy, objective, data, setting.rate, false if shuffled else ColorReward(), cool)
    after = measured(policy, isinstance(objective, Likelihood))
    # Likelihoods are of the same pictures under the same noise, so only how they differ is chance.
    rise = toys.z_score(*((0 * before, after - before) if isinstance(objective, Likelihood) else (before, after)))
    kind = "shuffled" if shuffled else "true"
    return rise, f"{setting.title:24s} {family:8s} {kind:8s} {before.mean():.3f} -> {after.mean():.3f}  z = {rise:5.1f}"


@pytest.mark.parametrize(("setting", "family"), cells(learning))
def test_reward_rises_by_more_than_three_standard_errors(setting: Setting, family: str) -> None:
    rise, line = train(setting, family, shuffled=False)
    print(line)
    assert rise > 3, line


@pytest.mark.parametrize(("setting", "family"), cells(control))
def test_shuffled_rewards_do_not_raise_the_reward(setting: Setting, family: str) -> None:
    rise, line = train(setting, family, shuffled=True)
    print(line)
    assert rise < 3, line


def test_matrix_covers_every_objective_and_family() -> None:
    tested = {(type(setting.objective), family) for setting, family in CELLS}
    for kind in objectives():
        for name, family in toys.FAMILIES.items():
            if isinstance(family.process, kind.needs):
                assert (kind, name) in tested, f"{kind.__name__} has no setting for {name}; add one to SETTINGS"


def test_fast_tests_cover_every_objective_and_family() -> None:
    fast = [(type(setting.objective), family) for setting, family in CELLS if not learning(setting, family)]
    assert {kind for kind, _ in fast} == set(objectives())
    assert {family for _, family in fast} == set(toys.FAMILIES)


PRETRAINING = [
    pytest.param(name, marks=pytest.mark.slow if name in ("flow", "masked") else pytest.mark.long)
    for name in toys.FAMILIES
]


@pytest.mark.parametrize("family", PRETRAINING)
def test_pretraining_reaches_the_stored_toy_weights(family: str) -> None:
    random, fresh, stored = (
        toys.true_rewards(make(family)) for make in (toys.policy, toys.pretrained, toys.pretrained_policy)
    )
    assert toys.z_score(random, fresh) > 3 and abs(toys.z_score(stored, fresh)) < 5


def test_registered_objectives_are_in_the_objectives_package() -> None:
    assert {OBJECTIVES.find(name) for name in OBJECTIVES} == set(objectives())


def objectives() -> list[type[Objective[Any, Any, Any, Any]]]:
    """All the package has, registered or not."""
    found = []
    for module in pkgutil.iter_modules(tastemaker.objectives.__path__, "tastemaker.objectives."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Objective) and kind.__module__ == module.name:
                found.append(kind)
    return found
