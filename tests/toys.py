"""Tiny generators of every family, pretrained ones too, with prompts, pictures and rewards to go with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.core.model_spec import ModelSpec
from tastemaker.core.objective import Context, NoState, Objective, ObjectiveState, SingleProcess
from tastemaker.core.policy import Guidance, Policy, Process
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import RewardSpec, Rubric, WeightedReward
from tastemaker.core.toy_colors import TOY_COLORS
from tastemaker.core.types import ImageBatch, Loss, Placement, PreferenceBatch, PromptBatch
from tastemaker.core.weights import FrozenCopyFinetuning, FullFinetuning, Tuning
from tastemaker.models.cogvideox import CogVideoXSpec
from tastemaker.models.flux import FluxSpec
from tastemaker.models.hunyuanvideo import HunyuanVideoSpec
from tastemaker.models.latent_dit.model import LatentDitSpec
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.models.ltx import LtxSpec
from tastemaker.models.mochi import MochiSpec
from tastemaker.models.modelscope import ModelscopeSpec
from tastemaker.models.opensora.model import OpenSoraSpec
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.models.showo.model import ShowoSpec
from tastemaker.models.svd import SvdSpec
from tastemaker.models.toy import ToyCausalSpec, ToyFlowSpec, ToyMaskedSpec
from tastemaker.models.videocrafter import VideocrafterSpec
from tastemaker.models.wan import WanSpec
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.processes.dynamics import DDIM, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.masked import MaskedProcess
from tastemaker.processes.paths import KarrasPath, RectifiedFlow, VariancePreserving
from tastemaker.rewards.color import ColorReward

# Of these four colours every channel is high in two and low in two: what favours no prompt favours no colour.
NAMES = ("red", "green", "blue", "white")
PROMPTS = tuple(f"a {name}" for name in NAMES)
PALETTE = torch.tensor(list(TOY_COLORS.values()))
# The mean of 64 pixels shows a colour through eight times their noise: a path must end this dark to start from none.
DARK = VariancePreserving(
    beta_schedule="linear",
    beta_start=0.001,
    beta_end=0.2,
    num_train_timesteps=100,
    set_alpha_to_one=True,
    timestep_spacing="trailing",
)


@dataclass(frozen=True)
class Family:
    spec: ModelSpec
    process: Process
    wrong: float = 0.5  # share of the pictures it is pretrained on whose colour is any, whatever the caption
    rate: float = 3e-3
    updates: int = 400

    @property
    def gaussian(self) -> bool:
        return isinstance(self.process, GaussianProcess)


FAMILIES = {
    "flow": Family(ToyFlowSpec(), GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8)),
    "epsilon": Family(ToyFlowSpec(), GaussianProcess(DARK, DDIM(1.0), 8), rate=1e-2, updates=600),
    "video": Family(ToyFlowSpec(frames=3), GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8)),
    "causal": Family(ToyCausalSpec(), AutoregressiveProcess(), wrong=0.85),
    "masked": Family(ToyMaskedSpec(), MaskedProcess(num_steps=4), wrong=0.85),
}
# Small random versions of published generators: they owe what all generators do, but nobody has taught them anything.
LATENT = VariancePreserving(
    beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, timestep_spacing="leading", steps_offset=1
)
PRETRAINED = Path(__file__).parent / "fixtures" / "toys"
PICTURE = Path(__file__).parent / "fixtures" / "pictures" / "first.png"
UNLIT = VariancePreserving(
    prediction_type="v_prediction",
    timestep_spacing="trailing",
    set_alpha_to_one=True,
    rescale_betas_zero_snr=True,
    snr_shift_scale=3.0,
)
DIT = replace(
    LatentDitSpec(conditioning="caption", image_size=16).tiny(), autoencoder="playground/vae"
)  # coarse pixels favour no colour
PUBLISHED = {
    "flux": Family(FluxSpec().tiny(), GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4)),
    "sd3": Family(Sd3Spec().tiny(), GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4)),
    "qwen_image": Family(
        QwenImageSpec().tiny(), GaussianProcess(RectifiedFlow(1.8, shift_terminal=0.02), FlowSDE(0.7), 4)
    ),
    "opensora": Family(OpenSoraSpec().tiny(), GaussianProcess(RectifiedFlow(2.4), FlowSDE(0.7), 4)),
    "sd15": Family(Sd15Spec().tiny(), GaussianProcess(LATENT, DDIM(1.0), 4)),
    "sdxl": Family(SdxlSpec().tiny(), GaussianProcess(LATENT, DDIM(1.0), 4)),
    "modelscope": Family(ModelscopeSpec().tiny(), GaussianProcess(LATENT, DDIM(1.0), 4)),
    "videocrafter": Family(
        VideocrafterSpec().tiny(), GaussianProcess(replace(LATENT, final_signal_scale=0.7), DDIM(1.0), 4)
    ),
    "latent_dit": Family(DIT, GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 4)),
}
CLIPS = {
    "wan": Family(WanSpec().tiny(), GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4)),
    "cogvideox": Family(CogVideoXSpec().tiny(), GaussianProcess(UNLIT, DDIM(1.0), 4)),
    "ltx": Family(LtxSpec().tiny(), GaussianProcess(RectifiedFlow(2.0, shift_terminal=0.1), FlowSDE(0.7), 4)),
    "hunyuanvideo": Family(HunyuanVideoSpec().tiny(), GaussianProcess(RectifiedFlow(7.0), FlowSDE(0.7), 4)),
    "mochi": Family(
        MochiSpec().tiny(), GaussianProcess(RectifiedFlow(linear_quadratic_threshold=0.025), FlowSDE(0.7), 4)
    ),
    "svd": Family(SvdSpec(image=PICTURE, guidance_scale=None).tiny(), GaussianProcess(KarrasPath(), DDIM(1.0), 4)),
}  # likewise, of clips, by diffusers' parts
LIKE_OTHERS = ("ltx", "hunyuanvideo", "mochi", "svd")  # of them; what costs more is tried of the others alone
WRITERS = {
    "llamagen": Family(LlamagenSpec(conditioning="caption").tiny(), AutoregressiveProcess()),
    "showo": Family(ShowoSpec().tiny(), MaskedProcess(num_steps=4)),
}  # likewise, of tokens
GENERATORS = {**FAMILIES, **PUBLISHED, **CLIPS, **WRITERS}


def policy(
    name: str, tuning: Tuning = FullFinetuning(), snapshots: Sequence[str] = (), guidance: Guidance | None = None
) -> Policy[Any]:
    """A generator of random weights."""
    family = GENERATORS[name]
    model = family.spec.load(Placement())
    weights = tuning.apply(model, snapshots)
    guided = model if guidance is None else family.process.wrap_guidance(model, guidance)
    return Policy(guided, family.process, weights)


def pretrained_policy(name: str, tuning: Tuning = FullFinetuning(), snapshots: Sequence[str] = ()) -> Policy[Any]:
    """A generator that has seen captioned pictures, many of them captioned wrongly."""
    family = FAMILIES[name]
    model = family.spec.load(Placement())
    model.net.load_state_dict(_weights(name))
    return Policy(model, family.process, tuning.apply(model, snapshots))


@cache
def _weights(name: str) -> dict[str, Tensor]:
    """Of `pretrained`, stored in half precision, so that all machines start from the same ones."""
    return {key: x.float() for key, x in load_file(PRETRAINED / f"{name}.safetensors").items()}


def pretrained(name: str) -> Policy[Any]:
    """A random generator after some hundred steps on captioned pictures.

    `python tests/toys.py` writes the files of `PRETRAINED` anew; do so after a change of the toy networks.
    """
    family, learner = FAMILIES[name], policy(name)
    batches = (pictures(64, family.spec.frames, seed, family.wrong) for seed in range(family.updates))
    fit(learner, Likelihood(), batches, family.rate, cool=family.updates)
    return learner


def rubric(spec: RewardSpec = ColorReward()) -> Rubric:
    return Rubric({"color": WeightedReward(spec, spec.load(Placement()))})


def prompts(count: int) -> PromptBatch:
    """The four prompts in turn."""
    return PromptBatch(PROMPTS * (count // 4), ({},) * count)


def solid_images(colours: Tensor, frames: int, chance: torch.Generator, side: int = 8) -> Tensor:
    """Plain pictures with a little noise: [B, F, 3, side, side]."""
    plain = PALETTE[colours].view(-1, 1, 3, 1, 1).expand(-1, frames, 3, side, side)
    return (plain + 0.05 * torch.randn(plain.shape, generator=chance)).clamp(0, 1)


def _asked(count: int, chance: torch.Generator) -> tuple[tuple[str, ...], Tensor]:
    words = torch.randint(0, 4, (count,), generator=chance).tolist()
    return tuple(PROMPTS[i] for i in words), torch.tensor([list(TOY_COLORS).index(NAMES[i]) for i in words])


def pictures(count: int, frames: int, seed: int, wrong: float = 0.0, side: int = 8) -> ImageBatch:
    chance = torch.Generator().manual_seed(seed)
    captions, right = _asked(count, chance)
    strange = torch.rand(count, generator=chance) < wrong
    colours = torch.where(strange, torch.randint(0, len(TOY_COLORS), (count,), generator=chance), right)
    return ImageBatch(captions, solid_images(colours, frames, chance, side))


def pairs(count: int, frames: int, seed: int, side: int = 8) -> PreferenceBatch:
    """The colour asked for is preferred to any other."""
    chance = torch.Generator().manual_seed(10**6 + seed)
    captions, right = _asked(count, chance)
    other = (right + torch.randint(1, len(TOY_COLORS), (count,), generator=chance)) % len(TOY_COLORS)
    return PreferenceBatch(
        captions, solid_images(right, frames, chance, side), solid_images(other, frames, chance, side)
    )


def context(
    policy: Policy[Any],
    rows: int,
    memory: ObjectiveState = NoState(),
    *,
    step: int = 0,
    spec: RewardSpec = ColorReward(),
) -> Context[Any]:
    return Context(policy, rubric(spec), Randomness(0, step, torch.arange(rows)), SingleProcess(), memory)


def data(objective: Objective[Any, Any, Any, Any], rows: int, pixels: tuple[int, int, int, int]) -> Any:
    """A batch of what the objective learns of, for a generator of such pixels."""
    if objective.consumes is PromptBatch:
        return prompts(rows)
    frames, side = pixels[0], pixels[3]
    return (
        pairs(rows, frames, 0, side) if objective.consumes is PreferenceBatch else pictures(rows, frames, 0, side=side)
    )


def policy_with_experience(
    objective: Objective[Any, Any, Any, Any], name: str, tuning: Tuning = FrozenCopyFinetuning()
) -> tuple[Context[Any], Any]:
    """A policy that has moved away from its snapshots, and experience of it from before it moved.

    Its snapshots are networks of their own, so that graphs of several parts can be held at once.
    """
    learner = policy(name, tuning, objective.snapshots())
    ctx = context(learner, 8, objective.make_state())
    experience = objective.collect(ctx, data(objective, 8, learner.model.pixels))
    move(learner, 0.01)
    return ctx, experience


def move(policy: Policy[Any], by: float) -> None:
    """A step of training, made up."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.weights.trainable().values():
            p.add_(by * torch.randn(p.shape, generator=chance))


def total(objective: Objective[Any, Any, Any, Any], ctx: Context[Any], experience: Any) -> Tensor:
    """The loss of each row, all parts together: [B]."""
    return torch.stack([objective.loss(ctx, experience, part).rows for part in objective.parts(experience)]).sum(0)


def gradient(policy: Policy[Any], value: Tensor) -> Tensor:
    """Of a value, with respect to everything that trains: [parameters]."""
    parameters = list(policy.weights.trainable().values())
    found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def backward(objective: Objective[Any, Any, Any, Any], ctx: Context[Any], experience: Any) -> list[Loss]:
    """Each part's gradient on top of the others', as the engine does it."""
    losses = []
    for part in objective.parts(experience):
        losses.append(objective.loss(ctx, experience, part))
        (losses[-1].rows.sum() / len(experience)).backward()
    return losses


def fit(
    policy: Policy[Any],
    objective: Objective[Any, Any, Any, Any],
    batches: Iterable[Any],
    rate: float,
    spec: RewardSpec = ColorReward(),
    cool: float = math.inf,
) -> None:
    """Train for as many steps as there are batches, at a rate that falls to nothing in `cool` steps."""
    trainable, memory, rewards = list(policy.weights.trainable().values()), objective.make_state(), rubric(spec)
    optimizer = torch.optim.AdamW(trainable, rate, weight_decay=0.0)
    for step, batch in enumerate(batches):
        rng = Randomness(0, step, torch.arange(len(batch)))
        ctx = Context(policy, rewards, rng, SingleProcess(), memory)
        backward(objective, ctx, objective.collect(ctx, batch))
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / cool)
        optimizer.step()
        optimizer.zero_grad()
        objective.after_update(ctx)


@torch.no_grad()
def true_rewards(policy: Policy[Any], count: int = 1024, seed: int = 7) -> Tensor:
    """The true reward of fresh samples of all prompts: [count]."""
    cond = policy.embed(PROMPTS).repeat(count // 4)
    made = policy.sample(cond, Randomness(seed, 0, torch.arange(count)))
    return rubric().score(policy.decode(made.final), cond.prompts).total


def z_score(before: Tensor, after: Tensor) -> float:
    """The change of the mean, in standard errors of both together."""
    error = (before.var() / len(before) + after.var() / len(after)).sqrt()
    return float((after.mean() - before.mean()) / error)


if __name__ == "__main__":
    PRETRAINED.mkdir(exist_ok=True)
    for chosen in FAMILIES:
        found = pretrained(chosen).model.net.state_dict()
        save_file({key: x.half() for key, x in found.items()}, PRETRAINED / f"{chosen}.safetensors")
