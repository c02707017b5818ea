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
from tastemaker.models.flux import TINY_CONFIGS, FluxSpec
from tastemaker.models.latent_packing import pack_latents
from tastemaker.objectives.srpo import SRPO, DirectAlignBatch
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.backbones import open_clip
from tastemaker.rewards.backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.frozen_models import load_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.hps import HpsReward

FIXTURES = Path(__file__).parent.parent / "fixtures" / "srpo"
PROCESS = GaussianProcess(RectifiedFlow(shift=3.0), num_steps=25)


@dataclass(frozen=True)
class RecordedStep:
    """A recorded training step: its inputs, outputs and settings."""

    kind: str
    tensors: dict[str, Tensor]
    settings: dict[str, Any]

    @classmethod
    def read(cls, kind: str) -> RecordedStep:
        path = FIXTURES / f"case_{kind}_s500.safetensors"
        with safe_open(path, "pt") as file:
            settings = {
                key: text if key in ("pos", "neg", "caption", "reward") else json.loads(text)
                for key, text in file.metadata().items()
            }
        return cls(kind, load_file(path), settings)

    @property
    def objective(self) -> SRPO:
        flags = self.settings["flags"]
        return SRPO(
            timestep_range=tuple(flags["train_timestep"]),
            discount_pos=tuple(flags["discount_pos"]),
            discount_inv=tuple(flags["discount_inv"]),
        )

    def ids(self, texts: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        names = {self.settings["pos"]: "pos", self.settings["neg"]: "neg"}
        return {"input_ids": torch.cat([self.tensors[f"in.ids.{names[text]}"] for text in texts]).to(device)}

    def rubric(self) -> Rubric:
        """The recorded reward network, with the recorded ids of its two prompts."""
        tensors = load_file(FIXTURES / f"reward_{self.kind}.safetensors")
        scale = 1.0 if self.kind == "hps" else float(tensors["logit_scale"].exp()) / 20
        tensors = open_clip.convert_keys(tensors, self.kind) if self.kind == "hps" else tensors
        config = open_clip.clip_config(tensors, self.kind, num_heads=(2, 2))
        net = load_network(CLIPModel, config, FIXTURES, Placement(), tensors)
        preprocessing, tokenize = (
            ImagePreprocessing(Preprocessing(224, "crop", overshoot="keep", crop_rounding="round")),
            self.ids,
        )
        return Rubric(
            {
                "reward": WeightedReward(
                    HpsReward().tiny(), DualEncoderScorer(net, preprocessing, tokenize, CosineHead(scale))
                )
            }
        )


def save_pipeline(folder: Path) -> str:
    """Save the recorded generator in diffusers' layout. Text encoders are random, because embeddings are recorded."""
    tensors = load_file(FIXTURES / "tiny_flux_vae.safetensors")
    with safe_open(FIXTURES / "tiny_flux_vae.safetensors", "pt") as file:
        configs = file.metadata()
    for component, prefix in (("transformer", "flux"), ("vae", "vae")):
        (folder / component).mkdir()
        (folder / component / "config.json").write_text(configs[prefix])
        component_tensors = {
            key.removeprefix(f"{prefix}."): x for key, x in tensors.items() if key.startswith(f"{prefix}.")
        }
        save_file(component_tensors, folder / component / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    clip = CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS})
    random_network(CLIPTextModel, clip).save_pretrained(folder / "text_encoder")
    random_network(T5EncoderModel, T5Config(**TINY_CONFIGS["text_encoder_2"])).save_pretrained(
        folder / "text_encoder_2"
    )
    byte_clip_tokenizer().save_pretrained(folder / "tokenizer")
    byte_t5_tokenizer().save_pretrained(folder / "tokenizer_2")
    return str(folder)


def assert_close(actual: Tensor | None, expected: Tensor, tolerance: float = 3e-5) -> None:
    """Check that values are equal up to a share of the largest expected one."""
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["hps", "clip"])
def test_training_step_equals_the_published_one(kind: str, tmp_path: Path) -> None:
    step = RecordedStep.read(kind)
    tensors, settings, objective = step.tensors, step.settings, step.objective
    rollout_guidance = float(settings["flags"]["train_guidence"])
    model = FluxSpec(
        save_pipeline(tmp_path), height=64, width=64, rollout_guidance_scale=rollout_guidance, truncate_timesteps=True
    ).load(Placement())
    embeddings = {"prompt_embeds": tensors["in.prompt_embeds"], "pooled_prompt_embeds": tensors["in.pooled"]}
    model.prompt_encoder = lambda prompts: embeddings  # type: ignore[assignment]
    policy = Policy(model, PROCESS, FullFinetuning().apply(model, ()))
    ctx = Context(policy, step.rubric(), Randomness(0, settings["step"], torch.arange(1)), SingleProcess(), NoState())
    fixed_noise: Any = FixedNoise(tensors["in.noise"][:, None])
    trajectory = policy.sample(policy.embed([settings["caption"]], [{}]), fixed_noise)
    timestep = torch.tensor([settings["s"]])
    batch = DirectAlignBatch(
        trajectory.cond, trajectory.final, trajectory.start, timestep, torch.tensor([settings["step"]])
    )

    for number, branch in enumerate(objective.branches):
        levels = objective.levels(PROCESS, timestep, branch)
        noisy = PROCESS.corrupt(batch.clean, ctx.rng, levels.source, batch.noise)
        assert_close(pack_latents(noisy.x[:, 0]), tensors[f"out.branch_input.{branch}"])
        assert_close(
            pack_latents(model.predict(noisy.x, noisy.t, trajectory.cond)[:, 0]), tensors[f"out.velocity.{branch}"]
        )
        assert_close(policy.decode(objective.recover_clean(ctx, batch, levels))[:, 0], tensors[f"out.image.{branch}"])
        loss = objective.loss(ctx, batch, (branch,))
        assert_close(loss.metrics[f"relative_reward/{branch}"], tensors["out.reward"][number : number + 1])
        loss.rows.sum().backward()
    assert loss.rows.item() == pytest.approx(settings["last_loss"], abs=1e-6)
    gradients = {f"grad.{key}": p.grad for key, p in policy.weights.trainable().items()}
    for p in policy.weights.trainable().values():
        p.grad = None
    (branches,) = objective.parts(batch)
    objective.loss(ctx, batch, branches).rows.sum().backward()
    for key, p in policy.weights.trainable().items():
        if gradients[f"grad.{key}"] is not None:
            assert_close(p.grad, gradients[f"grad.{key}"])

    recorded = [key for key in tensors if key.startswith("grad.")]
    assert len(recorded) == 17
    for key in recorded:
        assert_close(gradients[key], tensors[key])
    norm = torch.stack([x.norm() for x in gradients.values() if x is not None]).norm()
    assert_close(norm[None], tensors["out.grad_norm"])
