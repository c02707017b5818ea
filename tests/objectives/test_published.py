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
from tastemaker.objectives.ddpo import DDPO
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.online_dpo import OnlineDPO
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.gaussian import GaussianProcess

# Colours the toy reward knows stand for the control words.
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
]
TUNINGS = {"full": FullFinetuning(), "lora": Lora(rank=2)}
ADAPTED = (GRPO, NFT, SRPO)  # what adapters are usually trained by
SHORT = (RewardGradient(last_steps=2), GRPO(group_size=2))  # what models that are like others are tried with
MODELS = (*toys.PUBLISHED, *toys.VIDEO_MODELS)
# In the fast set every model is trained once and every objective at least once.
QUICK = {(name, place % len(OBJECTIVES)) for place, name in enumerate(MODELS)}
BROAD = ("flux", "sd15", "wan")  # one network of each kind, which adapters and all settings are tried on
FIRST = {type(objective): i for i, objective in reversed(list(enumerate(OBJECTIVES)))}


def marks(name: str, place: int, kind: str) -> list[pytest.MarkDecorator]:
    """The slow set has every objective on every model, and all settings and adapters on some of them."""
    objective = OBJECTIVES[place]
    adapted = isinstance(objective, ADAPTED) and place % 2 == 0
    if (name, place) in QUICK and kind == ("lora" if adapted else "full"):
        return []
    first = FIRST[type(objective)] == place if name not in toys.SIMILAR else objective in SHORT
    return [pytest.mark.slow if name in BROAD or (kind == "full" and first) else pytest.mark.long]


CELLS = [
    pytest.param(objective, name, tuning, id=f"{type(objective).__name__}{i}-{name}-{kind}", marks=marks(name, i, kind))
    for i, objective in enumerate(OBJECTIVES)
    for name in MODELS
    for kind, tuning in TUNINGS.items()
    if kind == "full" or isinstance(objective, ADAPTED)
]


def networks(thing: object) -> Iterator[nn.Module]:
    """All that a backbone is made of."""
    if isinstance(thing, nn.Module):
        yield thing
    elif isinstance(thing, list):
        for each in thing:
            yield from networks(each)
    elif type(thing).__module__.startswith("tastemaker.models."):
        for each in vars(thing).values():
            yield from networks(each)


def tensors(policy: Policy[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of what trains and of what does not."""
    learning = policy.weights.trainable()
    still = {f"{i}.{key}": x for i, net in enumerate(networks(policy.model)) for key, x in net.state_dict().items()}
    own = {x.data_ptr() for x in learning.values()}
    return copies(learning), copies({key: x for key, x in still.items() if x.data_ptr() not in own})


def copies(values: Any) -> dict[str, Tensor]:
    return {key: x.detach().clone() for key, x in values.items()}


def test_published_models_cover_every_objective() -> None:
    found = {REGISTERED.find(name) for name in REGISTERED}
    able = {kind for kind in found if issubclass(GaussianProcess, kind.needs)}  # type: ignore[attr-defined]
    assert {type(objective) for objective in OBJECTIVES} == able


@pytest.mark.parametrize(("objective", "name", "tuning"), CELLS)
def test_step_updates_trainable_weights_only(
    objective: Objective[Any, Any, Any, Any], name: str, tuning: Tuning
) -> None:
    policy = toys.policy(name, tuning, objective.snapshots())
    if objective.snapshots() or isinstance(tuning, Lora):
        toys.perturb(policy, 0.01)  # where a policy is its own reference, preferences have no slope
    live, still = tensors(policy)
    ctx = toys.context(policy, 4, objective.make_state())
    experience = objective.collect(ctx, toys.make_batch(objective, 4, policy.model.pixels))
    losses = toys.backward(objective, ctx, experience)
    assert losses and all(loss.rows.isfinite().all() for loss in losses)
    step(policy)
    after, kept = tensors(policy)
    vain = policy.model.traits.unused_parameters
    assert all(x.isfinite().all() for x in after.values())
    assert [key for key, x in after.items() if x.equal(live[key]) and not key.startswith(vain)] == []
    assert still and [key for key, x in kept.items() if not x.equal(still[key])] == []


def step(policy: Policy[Any]) -> None:
    """Along the signs of the gradient, so that what has none stays where it is."""
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
        watched = objective.loss(ctx, experience, part).metrics
        assert (watched["ratio"] == 1).all() and not watched["ratio_deviation"].any()
