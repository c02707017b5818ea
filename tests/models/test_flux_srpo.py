"""One training step compared with SRPO's published code: a tiny FLUX and tiny rewards of both published layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_pipelines import CLIP_TOKENS, FixedNoise, byte_clip_tokenizer, byte_t5_tokenizer, random_network
from torch import Tensor
from transformers import CLIPModel, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tastemaker.core.objective import Context, NoState, SingleProcess
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.flux import TINY_CONFIGS, FluxSpec, pack_latents
from tastemaker.objectives.srpo import SRPO, DirectAlignBatch
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.backbones import open_clip
from tastemaker.rewards.backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.frozen_models import load_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.hps import HpsReward

FIXTURES = Path(__file__).parent.parent / "fixtures" / "srpo"
FLUX = GaussianProcess(RectifiedFlow(shift=3.0), num_steps=25)


@dataclass(frozen=True)
class Case:
    """A recorded step: tensors going in and out, and the settings it was run with."""

    kind: str
    tensors: dict[str, Tensor]
    told: dict[str, Any]

    @classmethod
    def read(cls, kind: str) -> Case:
        path = FIXTURES / f"case_{kind}_s500.safetensors"
        with safe_open(path, "pt") as file:
            told = {
                key: text if key in ("pos", "neg", "caption", "reward") else json.loads(text)
                for key, text in file.metadata().items()
            }
        return cls(kind, load_file(path), told)

    @property
    def objective(self) -> SRPO:
        flags = self.told["flags"]
        return SRPO(
            timestep_range=tuple(flags["train_timestep"]),
            discount_pos=tuple(flags["discount_pos"]),
            discount_inv=tuple(flags["discount_inv"]),
        )

    def ids(self, texts: Sequence[str], where: torch.device) -> dict[str, Tensor]:
        names = {self.told["pos"]: "pos", self.told["neg"]: "neg"}
        return {"input_ids": torch.cat([self.tensors[f"in.ids.{names[text]}"] for text in texts]).to(where)}

    def rubric(self) -> Rubric:
        """The recorded reward network, with the recorded ids of its two prompts."""
        tensors = load_file(FIXTURES / f"reward_{self.kind}.safetensors")
        scale = 1.0 if self.kind == "hps" else float(tensors["logit_scale"].exp()) / 20
        tensors = open_clip.convert_keys(tensors, self.kind) if self.kind == "hps" else tensors
        config = open_clip.clip_config(tensors, self.kind, num_heads=(2, 2))
        net = load_network(CLIPModel, config, FIXTURES, Placement(), tensors)
        looks, words = ImagePreprocessing(Preprocessing(224, "crop", overshoot="keep", crop_rounding="round")), self.ids
        return Rubric(
            {"it": WeightedReward(HpsReward().tiny(), DualEncoderScorer(net, looks, words, CosineHead(scale)))}
        )


def saved(place: Path) -> str:
    """The recorded generator in diffusers' layout, its prompts read by anything, for their embeddings are recorded."""
    tensors = load_file(FIXTURES / "tiny_flux_vae.safetensors")
    with safe_open(FIXTURES / "tiny_flux_vae.safetensors", "pt") as file:
        settings = file.metadata()
    for part, prefix in (("transformer", "flux"), ("vae", "vae")):
        (place / part).mkdir()
        (place / part / "config.json").write_text(settings[prefix])
        own = {key.removeprefix(f"{prefix}."): x for key, x in tensors.items() if key.startswith(f"{prefix}.")}
        save_file(own, place / part / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    clip = CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS})
    random_network(CLIPTextModel, clip).save_pretrained(place / "text_encoder")
    random_network(T5EncoderModel, T5Config(**TINY_CONFIGS["text_encoder_2"])).save_pretrained(place / "text_encoder_2")
    byte_clip_tokenizer().save_pretrained(place / "tokenizer")
    byte_t5_tokenizer().save_pretrained(place / "tokenizer_2")
    return str(place)


def near(actual: Tensor | None, expected: Tensor, share: float = 3e-5) -> None:
    """Alike but for a share of the largest number."""
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=share * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["hps", "clip"])
def test_training_step_equals_the_published_one(kind: str, tmp_path: Path) -> None:
    case = Case.read(kind)
    tensors, told, objective = case.tensors, case.told, case.objective
    rollout_guidance = float(told["flags"]["train_guidence"])
    model = FluxSpec(
        saved(tmp_path), height=64, width=64, rollout_guidance_scale=rollout_guidance, truncate_timesteps=True
    ).load(Placement())
    embeddings = {"words": tensors["in.prompt_embeds"], "pooled": tensors["in.pooled"]}
    model.prompt_encoder = lambda prompts: embeddings  # type: ignore[assignment]
    policy = Policy(model, FLUX, FullFinetuning().apply(model, ()))
    ctx = Context(policy, case.rubric(), Randomness(0, told["step"], torch.arange(1)), SingleProcess(), NoState())
    given: Any = FixedNoise(tensors["in.noise"][:, None])
    made = policy.sample(policy.embed([told["caption"]], [{}]), given)
    place = torch.tensor([told["s"]])
    seen = DirectAlignBatch(made.cond, made.final, made.start, place, torch.tensor([told["step"]]))

    for number, branch in enumerate(objective.branches):
        levels = objective.levels(FLUX, place, branch)
        noisy = FLUX.corrupt(seen.clean, ctx.rng, levels.source, seen.noise)
        near(pack_latents(noisy.x[:, 0]), tensors[f"out.branch_input.{branch}"])
        near(pack_latents(model.predict(noisy.x, noisy.t, made.cond)[:, 0]), tensors[f"out.velocity.{branch}"])
        near(policy.decode(objective.recover_clean(ctx, seen, levels))[:, 0], tensors[f"out.image.{branch}"])
        loss = objective.loss(ctx, seen, (branch,))
        near(loss.metrics[f"relative_reward/{branch}"], tensors["out.reward"][number : number + 1])
        loss.rows.sum().backward()
    assert loss.rows.item() == pytest.approx(told["last_loss"], abs=1e-6)
    gradients = {f"grad.{key}": p.grad for key, p in policy.weights.trainable().items()}
    for p in policy.weights.trainable().values():
        p.grad = None
    (both,) = objective.parts(seen)
    objective.loss(ctx, seen, both).rows.sum().backward()
    for key, p in policy.weights.trainable().items():
        if gradients[f"grad.{key}"] is not None:
            near(p.grad, gradients[f"grad.{key}"])

    recorded = [key for key in tensors if key.startswith("grad.")]
    assert len(recorded) == 17
    for key in recorded:
        near(gradients[key], tensors[key])
    norm = torch.stack([x.norm() for x in gradients.values() if x is not None]).norm()
    near(norm[None], tensors["out.grad_norm"])
