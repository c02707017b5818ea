"""FLUX.1 dev and schnell (Black Forest Labs 2024), diffusers' parts put together anew."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import JOINT_ATTENTION_LAYERS, TINY, PipelineComponents, weight_sources
from .pipeline_layout import PipelineLayout, flux_from_original, flux_to_original
from .pretrained import WeightsSource
from .single_file import read_single_file
from .text_encoders import CachedTextEncoder

DEV = WeightsSource("black-forest-labs/FLUX.1-dev", "", "34 GB", "FLUX.1 [dev] Non-Commercial License", gated=True)
CHANNELS, FACTOR = 16, 8  # of its autoencoder
CLIP_MAX_TOKENS = 77
FEED_FORWARD_LAYERS = ("net.0.proj", "net.2")
DEFAULT_LORA_TARGETS = (
    *JOINT_ATTENTION_LAYERS,
    *(f"{of}.{layer}" for of in ("ff", "ff_context") for layer in FEED_FORWARD_LAYERS),
)
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "in_channels": 4 * CHANNELS,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    },
    "vae": {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (8, 8, 8, 8),
        "latent_channels": CHANNELS,
        "norm_num_groups": 4,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "text_encoder": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "eos_token_id": 63,
    },
    "text_encoder_2": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2},
}
Side = Annotated[int, Field(ge=16, le=8192, multiple_of=16)]


def pack_latents(x: Tensor) -> Tensor:
    """[B, C, h, w] as one token a square of four latents: [B, h/2 * w/2, 4 C]."""
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """What `pack` packed."""
    b, c = len(tokens), tokens.shape[2] // 4
    whole = tokens.reshape(b, height // 2, width // 2, c, 2, 2)
    return whole.permute(0, 3, 1, 4, 2, 5).reshape(b, c, height, width)


def latent_image_ids(height: int, width: int) -> Tensor:
    """Nought, row and column of every token: [h/2 * w/2, 3]."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()


class FluxPromptEncoder:
    """What T5 says of every word of a prompt, and CLIP of the whole."""

    def __init__(self, kit: PipelineComponents, words: int) -> None:
        from transformers import CLIPTextModel, T5EncoderModel

        self.clip = kit.reader("text_encoder", CLIPTextModel, "tokenizer", CLIP_MAX_TOKENS)
        self.t5 = kit.reader("text_encoder_2", T5EncoderModel, "tokenizer_2", words)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"words": self.t5(prompts).last_hidden_state, "pooled": self.clip(prompts).pooler_output}


class FluxBackbone:
    """Denoises [1, 16, h, w] latents, of its own size or any other; its output is the velocity noise - clean."""

    passes = 1

    def __init__(self, spec: Flux, placement: Placement, source: WeightsSource = DEV) -> None:
        from diffusers import AutoencoderKL, FluxTransformer2DModel

        kit = PipelineComponents(spec.weights, source, SMALL, placement, spec.seed)
        tensors = (
            None if spec.transformer is None else to_diffusers_keys(read_single_file(spec.transformer, source), kit)
        )
        self.net: nn.Module = kit.trained("transformer", FluxTransformer2DModel, tensors, DEFAULT_LORA_TARGETS)
        self.codec = kit.autoencoder("vae", AutoencoderKL, recompute=spec.recompute)
        self.remembered = spec.texts(placement)
        self.spec, self.told = spec, bool(kit.config("transformer").get("guidance_embeds"))
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        self.places = latent_image_ids(*self.shape[2:]).to(placement.device)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), self.remembered(prompts), tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        size = x.shape[3:]
        where = self.places if size == self.shape[2:] else latent_image_ids(*size).to(x.device)
        return unpack_latents(self.said(pack_latents(x[:, 0]), where, t, cond), *size)[:, None]

    def said(self, tokens: Tensor, places: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The velocity of every token: [B, n, 64]."""
        dtype = next(self.net.parameters()).dtype  # without autocast, all of them must be alike
        words, pooled = (cond.tensors[name].to(dtype) for name in ("words", "pooled"))
        # With it, latents stay exact: the network would round the level to what it is told of them in.
        exact = torch.is_autocast_enabled(tokens.device.type)
        out: Tensor = self.net(
            hidden_states=tokens if exact else tokens.to(dtype),
            timestep=(t * 1000).floor() / 1000 if self.spec.truncate else t,
            guidance=self._guidance(t),
            encoder_hidden_states=words,
            pooled_projections=pooled,
            txt_ids=places.new_zeros(words.shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return out

    def sized(self, height: int, width: int) -> FluxBackbone:
        other = copy(self)
        other.spec = replace(self.spec, height=height, width=width)
        other.shape, other.pixels = other.spec.shape, (1, 3, height, width)
        other.places = latent_image_ids(*other.shape[2:]).to(self.places.device)
        return other

    def steered(self, scale: float | None) -> FluxBackbone:
        other = copy(self)
        other.spec = replace(self.spec, guidance=self.spec.guidance if scale is None else scale, rollout_guidance=None)
        return other

    def _guidance(self, t: Tensor) -> Tensor | None:
        """How strongly the prompt counts, which the network was taught to read; schnell was not."""
        drawn = self.spec.guidance if self.spec.rollout_guidance is None else self.spec.rollout_guidance
        scale = self.spec.guidance if torch.is_grad_enabled() else drawn
        return torch.full_like(t, scale) if self.told else None

    def encode(self, pixels: Tensor) -> Tensor:
        return self.codec.encode(pixels[:, 0])[:, None]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        pixels = self.codec.decode(shown.flatten(0, 1))
        return pixels.view(*shown.shape[:2], *pixels.shape[1:])


def to_diffusers_keys(tensors: dict[str, Tensor], kit: PipelineComponents) -> dict[str, Tensor]:
    """The transformer's tensors by diffusers' names, whoever wrote the file."""
    if not any(key.startswith("double_blocks.") for key in tensors):
        return tensors
    from diffusers import FluxTransformer2DModel

    return flux_from_original(tensors, kit.shapes("transformer", FluxTransformer2DModel))


@dataclass(frozen=True)
class Flux:
    """FLUX.1: a flow-matching transformer of 12 billion weights that reads prompts by T5 and CLIP."""

    weights: str = DEV.hub  # hub id or folder in diffusers' layout: dev, schnell or what was made of them
    transformer: str | None = None  # one safetensors file in its place, in diffusers' or the authors' layout
    height: Side = 1024
    width: Side = 1024
    guidance: float = 3.5  # written into the network, which schnell does not read
    rollout_guidance: float | None = None  # likewise where no gradient is wanted, if different: 1 in SRPO
    words: Annotated[int, Field(ge=1, le=512)] = 512  # tokens a prompt is cut or filled up to; 256 for schnell
    truncate: bool = False  # levels to three digits, as SRPO does
    recompute: bool = True  # the decoder in the backward pass, for a seventh of its memory
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "FluxPipeline", "transformer", "lora_transformer", flux_to_original, "flux"
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, DEV)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(self.weights, DEV, SMALL, placement, self.seed)
        settings = {"model": "flux", "words": self.words}
        parts = ("text_encoder", "text_encoder_2")
        return build_cached_text_encoder(
            kit, lambda: FluxPromptEncoder(kit, self.words), parts, settings, self.embeddings
        )

    def load(self, placement: Placement) -> FluxBackbone:
        return FluxBackbone(self, placement)

    def tiny(self) -> Flux:
        return replace(self, weights=TINY, transformer=None, height=32, width=32, words=16, embeddings=None)
