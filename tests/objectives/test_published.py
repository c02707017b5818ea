"""Every objective takes a real step on small random versions of the published generators it can train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import toys
from torch import Tensor, nn

from tastemaker.config.registries import OBJECTIVES as REGISTERED
from tastemaker.core.lora import Lora
from tastemaker.core.objective import Objective
from tastemaker.core.policy import Policy
from tastemaker.core.weights import FullFinetuning, Tuning
from tastemaker.objectives.crd import CRD
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dgpo import DGPO
from tastemaker.objectives.distill import Distillation, Teacher
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.elbo_grpo import ElboGRPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.kto import KTO, OnlineKTO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.mapo import MaPO, OnlineMaPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.ram import RAM
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.gaussian import GaussianProcess

# The control words are colors that the toy reward knows.
RELATIVE = SRPO(positive_words=("white",), negative_words=("grey",), template="{prompt} {word}", reward_margin=None)
OBJECTIVES = [
    Likelihood(),
    RewardGradient(last_steps=2),
    RewardGradient(gradient_mode="single_step", step_range=(1, 3)),
    RewardGradient(gradient_mode="renoise"),
    RELATIVE,
    SRPO(relative=False, reward_margin=None),
    DDPO(),
    GRPO(group_size=2),
    GRPO(group_size=2, kl_coef=0.1, kl_estimator="exact"),
    DPO(),
    OnlineDPO(group_size=2),
    NFT(group_size=2),
    ElboGRPO(group_size=2, num_timesteps=2),
    RAM(group_size=2, num_timesteps=2),
    DGPO(group_size=2, num_timesteps=2),
    CRD(group_size=2, num_timesteps=2),
    RewardGradient(gradient_mode="leap"),
    KTO(),
    OnlineKTO(group_size=2),
    MaPO(),
    OnlineMaPO(group_size=2),
    Distillation({"guided": Teacher(guidance_scale=2.0)}),
]
TUNINGS = {"full": FullFinetuning(), "lora": Lora(rank=2)}
LORA_OBJECTIVES = (GRPO, NFT, SRPO)  # objectives that LoRA is usually trained with
FEW_OBJECTIVES = (
    RewardGradient(last_steps=2),
    GRPO(group_size=2),
)  # objectives of models whose code is shared with another model
MODELS = (*toys.PUBLISHED, *toys.VIDEO_MODELS)
# In the fast set every model is trained once and every objective at least once; in the slow set, each model with a
# quarter of the objectives more, and each objective on a quarter of the models.
ROTATION = 4
FAST = {(name, index % len(OBJECTIVES)) for index, name in enumerate(MODELS)}
ALL_SETTINGS = ("flux", "sd15", "wan")  # one network of each kind, with LoRA and all settings
FIRST = {type(objective): i for i, objective in reversed(list(enumerate(OBJECTIVES)))}


def marks(name: str, index: int, tuning: str) -> list[pytest.MarkDecorator]:
    """The slow set has all objectives, settings and adapters on some models; the long set has the rest."""
    objective = OBJECTIVES[index]
    with_lora = isinstance(objective, LORA_OBJECTIVES) and index % 2 == 0
    if (name, index) in FAST and tuning == ("lora" if with_lora else "full"):
        return []
    first = FIRST[type(objective)] == index if name not in toys.SIMILAR else objective in FEW_OBJECTIVES
    first = first and (index + list(MODELS).index(name)) % ROTATION == 0
    return [pytest.mark.slow if name in ALL_SETTINGS or (tuning == "full" and first) else pytest.mark.long]


CASES = [
    pytest.param(objective, name, tuning, id=f"{type(objective).__name__}{i}-{name}-{kind}", marks=marks(name, i, kind))
    for i, objective in enumerate(OBJECTIVES)
    for name in MODELS
    for kind, tuning in TUNINGS.items()
    if kind == "full" or isinstance(objective, LORA_OBJECTIVES)
]


def networks(value: object) -> Iterator[nn.Module]:
    """Yield the networks of a backbone."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from networks(item)
    elif type(value).__module__.startswith("tastemaker.models."):
        for item in vars(value).values():
            yield from networks(item)


def tensors(policy: Policy[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of the trainable and of the frozen tensors."""
    trainable = policy.weights.trainable()
    state = {f"{i}.{key}": x for i, net in enumerate(networks(policy.model)) for key, x in net.state_dict().items()}
    pointers = {x.data_ptr() for x in trainable.values()}
    return copies(trainable), copies({key: x for key, x in state.items() if x.data_ptr() not in pointers})


def copies(values: Any) -> dict[str, Tensor]:
    return {key: x.detach().clone() for key, x in values.items()}


def test_published_models_cover_every_objective() -> None:
    registered = {REGISTERED.find(name) for name in REGISTERED}
    supported = {objective for objective in registered if issubclass(GaussianProcess, objective.needs)}  # type: ignore[attr-defined]
    assert {type(objective) for objective in OBJECTIVES} == supported


@pytest.mark.parametrize(("objective", "name", "tuning"), CASES)
def test_step_updates_trainable_weights_only(
    objective: Objective[Any, Any, Any, Any], name: str, tuning: Tuning
) -> None:
    policy = toys.policy(name, tuning, objective.snapshots())
    if objective.snapshots() or isinstance(tuning, Lora):
        toys.perturb(policy, 0.01)  # a policy that equals its reference may have no gradient
    trainable, frozen = tensors(policy)
    ctx = toys.context(policy, 4, objective.make_state())
    experience = objective.collect(ctx, toys.make_batch(objective, 4, policy.model.pixels))
    losses = toys.backward(objective, ctx, experience)
    assert losses and all(loss.rows.isfinite().all() for loss in losses)
    step(policy)
    updated, frozen_after = tensors(policy)
    unused = policy.model.traits.unused_parameters
    assert all(x.isfinite().all() for x in updated.values())
    assert [key for key, x in updated.items() if x.equal(trainable[key]) and not key.startswith(unused)] == []
    assert frozen and [key for key, x in frozen_after.items() if not x.equal(frozen[key])] == []


def step(policy: Policy[Any]) -> None:
    """Step along the sign of the gradient, so that a tensor without gradient does not change."""
    for p in policy.weights.trainable().values():
        if p.grad is not None:
            p.data -= 1e-3 * p.grad.sign()


RATIOS = [
    pytest.param(name, TUNINGS[kind], id=f"{kind}-{name}", marks=[] if name in ("flux", "sd15") else [pytest.mark.slow])
    for kind in TUNINGS
    for name in (*toys.PUBLISHED, "wan")
]


@pytest.mark.parametrize(("name", "tuning"), RATIOS)
def test_first_ratio_is_one(name: str, tuning: Tuning) -> None:
    objective = GRPO(group_size=4, clip_range=1e-4)
    policy = toys.policy(name, tuning)
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    assert objective.parts(experience)
    for part in objective.parts(experience):
        metrics = objective.loss(ctx, experience, part).metrics
        assert (metrics["ratio"] == 1).all() and not metrics["ratio_deviation"].any()
