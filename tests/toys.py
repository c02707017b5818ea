"""Tiny generators of every family, random and pretrained, with prompts, images and rewards for tests."""

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
from tastemaker.core.types import ImageBatch, LikeBatch, Loss, Placement, PreferenceBatch, PromptBatch
from tastemaker.core.weights import FrozenCopyFinetuning, FullFinetuning, Tuning
from tastemaker.models.cogvideox import CogVideoXSpec
from tastemaker.models.flux import FluxSpec
from tastemaker.models.flux2 import Flux2Spec
from tastemaker.models.hunyuanvideo import HunyuanVideoSpec
from tastemaker.models.hunyuanvideo15 import HunyuanVideo15Spec
from tastemaker.models.janus.model import JanusSpec
from tastemaker.models.latent_dit.model import LatentDitSpec
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.models.ltx import LtxSpec
from tastemaker.models.ltx2 import Ltx2Spec
from tastemaker.models.mochi import MochiSpec
from tastemaker.models.modelscope import ModelscopeSpec
from tastemaker.models.opensora.model import OpenSoraSpec
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.qwen_image_21 import QwenImage21Spec
from tastemaker.models.qwen_image_edit import QwenImageEditSpec
from tastemaker.models.sana import SanaSprintSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.models.showo.model import ShowoSpec
from tastemaker.models.svd import SvdSpec
from tastemaker.models.toy import ToyCausalSpec, ToyFlowSpec, ToyMaskedSpec
from tastemaker.models.videocrafter import VideocrafterSpec
from tastemaker.models.wan import WanSpec
from tastemaker.models.wan_i2v import WanI2VSpec
from tastemaker.models.z_image import ZImageSpec
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.processes.dynamics import DDIM, ConsistencySampling, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.masked import MaskedProcess
from tastemaker.processes.paths import KarrasPath, RectifiedFlow, TrigFlow, VariancePreserving
from tastemaker.rewards.color import ColorReward

# Each channel is high in two of these colors and low in the other two, so a prompt-independent bias gains no reward.
NAMES = ("red", "green", "blue", "white")
PROMPTS = tuple(f"a {name}" for name in NAMES)
PALETTE = torch.tensor(list(TOY_COLORS.values()))
# Averaging 64 pixels reduces the noise eightfold, so the terminal SNR must be this low for no color to leak into x_T.
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
    label_noise: float = 0.5  # share of pretraining images with a random color instead of the caption's
    lr: float = 3e-3
    updates: int = 400

    @property
    def gaussian(self) -> bool:
        return isinstance(self.process, GaussianProcess)


FAMILIES = {
    "flow": Family(ToyFlowSpec(), GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8)),
    "epsilon": Family(ToyFlowSpec(), GaussianProcess(DARK, DDIM(1.0), 8), lr=1e-2, updates=600),
    "video": Family(ToyFlowSpec(frames=3), GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8)),
    "causal": Family(ToyCausalSpec(), AutoregressiveProcess(), label_noise=0.85),
    "masked": Family(ToyMaskedSpec(), MaskedProcess(num_steps=4), label_noise=0.85),
}
# Small random versions of published generators. They satisfy the contract of all generators but are not trained.
LATENT = VariancePreserving(
    beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, timestep_spacing="leading", steps_offset=1
)
PRETRAINED = Path(__file__).parent / "fixtures" / "toys"
IMAGE = Path(__file__).parent / "fixtures" / "images" / "first.png"
ZERO_SNR = VariancePreserving(
    prediction_type="v_prediction",
    timestep_spacing="trailing",
    set_alpha_to_one=True,
    rescale_betas_zero_snr=True,
    snr_shift_scale=3.0,
)
DIT = replace(
    LatentDitSpec(conditioning="caption", image_size=16).tiny(), autoencoder="playground/vae"
)  # coarse pixels favor no color
PUBLISHED = {
    "flux": Family(FluxSpec().tiny(), GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4)),
    "sd3": Family(Sd3Spec().tiny(), GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4)),
    "qwen_image": Family(
        QwenImageSpec().tiny(), GaussianProcess(RectifiedFlow(1.8, shift_terminal=0.02), FlowSDE(0.7), 4)
    ),
    "qwen_image_edit": Family(
        QwenImageEditSpec().tiny(), GaussianProcess(RectifiedFlow(1.7, shift_terminal=0.02), FlowSDE(0.7), 4)
    ),
    "qwen_image_21": Family(
        QwenImage21Spec().tiny(), GaussianProcess(RectifiedFlow(2.0, shift_terminal=0.02), FlowSDE(0.7), 4)
    ),
    "sana_sprint": Family(SanaSprintSpec().tiny(), GaussianProcess(TrigFlow(), ConsistencySampling(), 4)),
    "opensora": Family(OpenSoraSpec().tiny(), GaussianProcess(RectifiedFlow(2.4), FlowSDE(0.7), 4)),
    "sd15": Family(Sd15Spec().tiny(), GaussianProcess(LATENT, DDIM(1.0), 4)),
    "sdxl": Family(SdxlSpec().tiny(), GaussianProcess(LATENT, DDIM(1.0), 4)),
    "modelscope": Family(ModelscopeSpec().tiny(), GaussianProcess(LATENT, DDIM(1.0), 4)),
    "videocrafter": Family(
        VideocrafterSpec().tiny(), GaussianProcess(replace(LATENT, final_signal_scale=0.7), DDIM(1.0), 4)
    ),
    "latent_dit": Family(DIT, GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 4)),
    "flux2": Family(Flux2Spec().tiny(), GaussianProcess(RectifiedFlow(3.0, flux2_tokens=4), FlowSDE(0.7), 4)),
    "z_image": Family(ZImageSpec().tiny(), GaussianProcess(RectifiedFlow(6.0), FlowSDE(0.7), 4)),
}
VIDEO_MODELS = {
    "wan": Family(WanSpec().tiny(), GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4)),
    "cogvideox": Family(CogVideoXSpec().tiny(), GaussianProcess(ZERO_SNR, DDIM(1.0), 4)),
    "ltx": Family(LtxSpec().tiny(), GaussianProcess(RectifiedFlow(2.0, shift_terminal=0.1), FlowSDE(0.7), 4)),
    "hunyuanvideo": Family(HunyuanVideoSpec().tiny(), GaussianProcess(RectifiedFlow(7.0), FlowSDE(0.7), 4)),
    "mochi": Family(
        MochiSpec().tiny(), GaussianProcess(RectifiedFlow(linear_quadratic_threshold=0.025), FlowSDE(0.7), 4)
    ),
    "svd": Family(SvdSpec(image=IMAGE, guidance_scale=None).tiny(), GaussianProcess(KarrasPath(), DDIM(1.0), 4)),
    "wan_i2v": Family(
        WanI2VSpec(image_conditioning="first_frame", image=IMAGE).tiny(),
        GaussianProcess(RectifiedFlow(3.0), FlowSDE(0.7), 4),
    ),
    "hunyuanvideo15": Family(HunyuanVideo15Spec().tiny(), GaussianProcess(RectifiedFlow(5.0), FlowSDE(0.7), 4)),
    "ltx2": Family(Ltx2Spec().tiny(), GaussianProcess(RectifiedFlow(2.0, shift_terminal=0.1), FlowSDE(0.7), 4)),
}  # small random video generators, made of diffusers' components
# Share their code with other models; expensive tests skip them.
SIMILAR = (
    "ltx", "hunyuanvideo", "mochi", "svd", "wan_i2v", "hunyuanvideo15", "ltx2",
    "flux2", "qwen_image_edit", "qwen_image_21", "sana_sprint",
)  # fmt: skip
TOKEN_MODELS = {
    "janus": Family(JanusSpec().tiny(), AutoregressiveProcess()),
    "llamagen": Family(LlamagenSpec(conditioning="caption").tiny(), AutoregressiveProcess()),
    "showo": Family(ShowoSpec().tiny(), MaskedProcess(num_steps=4)),
}  # small random token generators
GENERATORS = {**FAMILIES, **PUBLISHED, **VIDEO_MODELS, **TOKEN_MODELS}


def policy(
    name: str, tuning: Tuning = FullFinetuning(), snapshots: Sequence[str] = (), guidance: Guidance | None = None
) -> Policy[Any]:
    """Build a generator with random weights."""
    family = GENERATORS[name]
    model = family.spec.load(Placement())
    weights = tuning.apply(model, snapshots)
    guided = model if guidance is None else family.process.wrap_guidance(model, guidance)
    return Policy(guided, family.process, weights)


def pretrained_policy(name: str, tuning: Tuning = FullFinetuning(), snapshots: Sequence[str] = ()) -> Policy[Any]:
    """Build a generator pretrained on captioned images with label noise."""
    family = FAMILIES[name]
    model = family.spec.load(Placement())
    model.net.load_state_dict(_weights(name))
    return Policy(model, family.process, tuning.apply(model, snapshots))


@cache
def _weights(name: str) -> dict[str, Tensor]:
    """Weights written by `pretrain`, stored in half precision, so that all machines start from the same ones."""
    return {key: x.float() for key, x in load_file(PRETRAINED / f"{name}.safetensors").items()}


def pretrain(name: str) -> Policy[Any]:
    """Train a random generator for some hundred steps on captioned images.

    `python tests/toys.py` rewrites the files of `PRETRAINED`. Run it after a change of the toy networks.
    """
    family, learner = FAMILIES[name], policy(name)
    batches = (image_batch(64, family.spec.frames, seed, family.label_noise) for seed in range(family.updates))
    train(learner, Likelihood(), batches, family.lr, decay_steps=family.updates)
    return learner


def rubric(spec: RewardSpec = ColorReward()) -> Rubric:
    return Rubric({"color": WeightedReward(spec, spec.load(Placement()))})


def prompts(count: int) -> PromptBatch:
    """A batch that cycles through the four prompts."""
    return PromptBatch(PROMPTS * (count // 4), ({},) * count)


def solid_images(color_ids: Tensor, frames: int, generator: torch.Generator, side: int = 8) -> Tensor:
    """Single-color images with a little noise: [B, F, 3, side, side]."""
    plain = PALETTE[color_ids].view(-1, 1, 3, 1, 1).expand(-1, frames, 3, side, side)
    return (plain + 0.05 * torch.randn(plain.shape, generator=generator)).clamp(0, 1)


def _random_captions(count: int, generator: torch.Generator) -> tuple[tuple[str, ...], Tensor]:
    indices = torch.randint(0, 4, (count,), generator=generator).tolist()
    return tuple(PROMPTS[i] for i in indices), torch.tensor([list(TOY_COLORS).index(NAMES[i]) for i in indices])


def image_batch(count: int, frames: int, seed: int, label_noise: float = 0.0, side: int = 8) -> ImageBatch:
    generator = torch.Generator().manual_seed(seed)
    captions, color_ids = _random_captions(count, generator)
    mislabeled = torch.rand(count, generator=generator) < label_noise
    shown_ids = torch.where(mislabeled, torch.randint(0, len(TOY_COLORS), (count,), generator=generator), color_ids)
    return ImageBatch(captions, solid_images(shown_ids, frames, generator, side))


def pairs(count: int, frames: int, seed: int, side: int = 8) -> PreferenceBatch:
    """Preference pairs: the color in the caption against any other color."""
    generator = torch.Generator().manual_seed(10**6 + seed)
    captions, color_ids = _random_captions(count, generator)
    wrong_ids = (color_ids + torch.randint(1, len(TOY_COLORS), (count,), generator=generator)) % len(TOY_COLORS)
    return PreferenceBatch(
        captions, solid_images(color_ids, frames, generator, side), solid_images(wrong_ids, frames, generator, side)
    )


def likes(count: int, frames: int, seed: int, side: int = 8) -> LikeBatch:
    """Likes of the color in the caption, and dislikes of other colors, in a random order."""
    batch = pairs(count, frames, seed, side)
    liked = torch.rand(count, generator=torch.Generator().manual_seed(2 * 10**6 + seed)) < 0.5
    return LikeBatch(batch.prompts, batch.chosen.where(liked.view(-1, 1, 1, 1, 1), batch.rejected), liked)


def context(
    policy: Policy[Any],
    rows: int,
    state: ObjectiveState = NoState(),
    *,
    step: int = 0,
    spec: RewardSpec = ColorReward(),
) -> Context[Any]:
    return Context(policy, rubric(spec), Randomness(0, step, torch.arange(rows)), SingleProcess(), state)


def make_batch(objective: Objective[Any, Any, Any, Any], rows: int, pixels: tuple[int, int, int, int]) -> Any:
    """A batch of the type that the objective consumes, for a generator with this pixel shape."""
    if objective.consumes is PromptBatch:
        return prompts(rows)
    frames, side = pixels[0], pixels[3]
    if objective.consumes is LikeBatch:
        return likes(rows, frames, 0, side)
    return (
        pairs(rows, frames, 0, side)
        if objective.consumes is PreferenceBatch
        else image_batch(rows, frames, 0, side=side)
    )


def policy_with_experience(
    objective: Objective[Any, Any, Any, Any], name: str, tuning: Tuning = FrozenCopyFinetuning()
) -> tuple[Context[Any], Any]:
    """A policy with perturbed weights, and experience that it collected before the perturbation.

    Its snapshots are separate networks, so that the graphs of several loss parts can be held at once.
    """
    learner = policy(name, tuning, objective.snapshots())
    ctx = context(learner, 8, objective.make_state())
    experience = objective.collect(ctx, make_batch(objective, 8, learner.model.pixels))
    perturb(learner, 0.01)
    return ctx, experience


def perturb(policy: Policy[Any], scale: float) -> None:
    """Add Gaussian noise to the trainable weights, in place of a training step."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.weights.trainable().values():
            p.add_(scale * torch.randn(p.shape, generator=generator))


def total_loss(objective: Objective[Any, Any, Any, Any], ctx: Context[Any], experience: Any) -> Tensor:
    """The loss of each sample, summed over the objective's parts: [B]."""
    return torch.stack([objective.loss(ctx, experience, part).rows for part in objective.parts(experience)]).sum(0)


def gradient(policy: Policy[Any], value: Tensor) -> Tensor:
    """The gradient of `value` with respect to all trainable weights, flattened: [parameters]."""
    parameters = list(policy.weights.trainable().values())
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def backward(objective: Objective[Any, Any, Any, Any], ctx: Context[Any], experience: Any) -> list[Loss]:
    """Accumulate the gradients of all parts, as the engine does."""
    losses = []
    for part in objective.parts(experience):
        losses.append(objective.loss(ctx, experience, part))
        (losses[-1].rows.sum() / len(experience)).backward()
    return losses


def train(
    policy: Policy[Any],
    objective: Objective[Any, Any, Any, Any],
    batches: Iterable[Any],
    lr: float,
    spec: RewardSpec = ColorReward(),
    decay_steps: float = math.inf,
) -> None:
    """Train one step per batch, with a learning rate that falls linearly to zero in `decay_steps` steps."""
    trainable, state, rewards = list(policy.weights.trainable().values()), objective.make_state(), rubric(spec)
    optimizer = torch.optim.AdamW(trainable, lr, weight_decay=0.0)
    for step, batch in enumerate(batches):
        rng = Randomness(0, step, torch.arange(len(batch)))
        ctx = Context(policy, rewards, rng, SingleProcess(), state)
        backward(objective, ctx, objective.collect(ctx, batch))
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.param_groups[0]["lr"] = lr * (1 - step / decay_steps)
        optimizer.step()
        optimizer.zero_grad()
        objective.after_update(ctx)


@torch.no_grad()
def true_rewards(policy: Policy[Any], count: int = 1024, seed: int = 7) -> Tensor:
    """The true reward of new samples of all prompts: [count]."""
    cond = policy.embed(PROMPTS).repeat(count // 4)
    rollout = policy.sample(cond, Randomness(seed, 0, torch.arange(count)))
    return rubric().score(policy.decode(rollout.final), cond.prompts).total


def z_score(before: Tensor, after: Tensor) -> float:
    """The change of the mean in standard errors of the difference."""
    error = (before.var() / len(before) + after.var() / len(after)).sqrt()
    return float((after.mean() - before.mean()) / error)


if __name__ == "__main__":
    PRETRAINED.mkdir(exist_ok=True)
    for name in FAMILIES:
        state = pretrain(name).model.net.state_dict()
        save_file({key: x.half() for key, x in state.items()}, PRETRAINED / f"{name}.safetensors")
