"""Stable Diffusion 3 and 3.5, medium and large: a joint transformer of pictures and the words of three encoders."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..core.policy import Process
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import JOINT_ATTENTION_LAYERS, TINY, PipelineComponents, weight_sources
from .pipeline_layout import PipelineLayout, sd3_from_original, sd3_to_original
from .pretrained import WeightsSource
from .single_file import read_single_file
from .text_encoders import CachedTextEncoder

Side = Annotated[int, Field(ge=32, le=4096, multiple_of=16)]
LICENCE = "under Stability AI's community licence"
SOURCES = {
    source.hub: source
    for source in (
        WeightsSource("stabilityai/stable-diffusion-3.5-medium", size="16 GB", licence=LICENCE, gated=True),
        WeightsSource("stabilityai/stable-diffusion-3.5-large", size="28 GB", licence=LICENCE, gated=True),
        WeightsSource("stabilityai/stable-diffusion-3-medium-diffusers", size="15 GB", licence=LICENCE, gated=True),
    )
}
CHANNELS, FACTOR, PATCH = 16, 8, 2  # of the autoencoder; a token stands for two latents a side
CLIP_MAX_TOKENS = 77

SMALL_CLIP = {
    "vocab_size": 99,
    "hidden_size": 16,
    "intermediate_size": 32,
    "projection_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CLIP_MAX_TOKENS,
    "bos_token_id": 97,
    "eos_token_id": 98,
}
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "sample_size": 32,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    },
    "vae": {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": CHANNELS,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "text_encoder": SMALL_CLIP,
    "text_encoder_2": {**SMALL_CLIP, "hidden_act": "gelu"},
    "text_encoder_3": {"vocab_size": 99, "d_model": 48, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}


class Sd3PromptEncoder:
    """Words of both CLIPs side by side, then those of T5: [B, 77 + words, width]; and CLIP's sum of them."""

    def __init__(self, kit: PipelineComponents, spec: Sd3) -> None:
        from transformers import CLIPTextModelWithProjection, T5EncoderModel

        self.width, self.words = int(kit.config("transformer")["joint_attention_dim"]), spec.words
        self.clips = [
            kit.reader(f"text_encoder{number}", CLIPTextModelWithProjection, f"tokenizer{number}", CLIP_MAX_TOKENS)
            for number in ("", "_2")
        ]
        self.t5 = kit.reader("text_encoder_3", T5EncoderModel, "tokenizer_3", spec.words) if spec.t5 else None

    def __call__(self, texts: list[str]) -> dict[str, Tensor]:
        told = [reader(texts, layers=True) for reader in self.clips]
        short = torch.cat([out.hidden_states[-2] for out in told], -1)
        long = short.new_zeros(len(texts), self.words, self.width)  # what the network was trained to do without T5
        if self.t5 is not None:
            long = self.t5(texts).last_hidden_state
        words = torch.cat([F.pad(short, (0, self.width - short.shape[-1])), long], 1)
        return {"words": words, "pooled": torch.cat([out.text_embeds for out in told], -1)}


class Sd3Backbone:
    """Denoises [1, 16, h, w] latents of any size: the velocity at 1000 t, as the network counts time."""

    passes = 1

    def __init__(self, spec: Sd3, placement: Placement) -> None:
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        source = SOURCES.get(spec.weights, SOURCES[Sd3.weights])
        kit = PipelineComponents(spec.weights, source, SMALL, placement, spec.seed)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        check_position_table(kit, spec)
        tensors = (
            None if spec.transformer is None else to_diffusers_keys(read_single_file(spec.transformer, source), kit)
        )
        net: Any = kit.trained("transformer", SD3Transformer2DModel, tensors, JOINT_ATTENTION_LAYERS)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn."
        net.idle = (f"{last}add_q_proj.", f"{last}norm_added_q.")  # what words ask for at the end is not used
        self.net: nn.Module = net
        self.codec = kit.autoencoder("vae", AutoencoderKL, recompute=spec.recompute)
        self.texts = spec.texts(placement)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), self.texts(prompts), tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all of them must be alike
        velocity: Tensor = self.net(
            hidden_states=x[:, 0].to(dtype),
            encoder_hidden_states=cond.tensors["words"].to(dtype),
            pooled_projections=cond.tensors["pooled"].to(dtype),
            timestep=1000 * t,
            return_dict=False,
        )[0]
        return velocity[:, None]

    def sized(self, height: int, width: int) -> Sd3Backbone:
        other = copy(self)
        other.shape, other.pixels = (1, CHANNELS, height // FACTOR, width // FACTOR), (1, 3, height, width)
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        return self.codec.encode(pixels[:, 0])[:, None]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        pixels = self.codec.decode(shown.flatten(0, 1))
        return pixels.view(*shown.shape[:2], *pixels.shape[1:])


def check_position_table(kit: PipelineComponents, spec: Sd3) -> None:
    """Refuse pictures that the transformer's table of places is too small for."""
    places = int(kit.config("transformer")["pos_embed_max_size"])
    longest = max(spec.height, spec.width) // (FACTOR * PATCH)
    if longest > places:
        most = places * FACTOR * PATCH
        raise ConfigError(f"model: pictures of {spec.height}x{spec.width} are too large for it; ask for {most} at most")


def to_diffusers_keys(tensors: dict[str, Tensor], kit: PipelineComponents) -> dict[str, Tensor]:
    """The transformer's tensors by diffusers' names, whoever wrote the file."""
    if not any(key.startswith("joint_blocks.") for key in tensors):
        return tensors
    from diffusers import SD3Transformer2DModel

    return sd3_from_original(tensors, kit.shapes("transformer", SD3Transformer2DModel))


@dataclass(frozen=True)
class Sd3:
    """Stable Diffusion 3 or 3.5, medium or large; a flow whose levels are shifted by 3."""

    weights: str = "stabilityai/stable-diffusion-3.5-medium"  # a folder in diffusers' layout, or its name on the hub
    transformer: str | None = None  # one file with other weights of the network, in diffusers' or the authors' layout
    height: Side = 1024
    width: Side = 1024
    words: Annotated[int, Field(ge=1, le=512)] = 256  # tokens T5 cuts and fills prompts to; those of CLIP are 77
    t5: bool = True  # without, its words are zeros: 9.5 GB less, and prompts are read less closely
    recompute: bool = True  # the autoencoder's activations when its gradient is asked for
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableDiffusion3Pipeline", "transformer", "lora_transformer", sd3_to_original
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, *SOURCES.values())

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(
            self.weights, SOURCES.get(self.weights, SOURCES[Sd3.weights]), SMALL, placement, self.seed
        )
        settings = {"model": "sd3", "words": self.words, "t5": self.t5}
        parts = ("text_encoder", "text_encoder_2", "text_encoder_3")
        return build_cached_text_encoder(kit, lambda: Sd3PromptEncoder(kit, self), parts, settings, self.embeddings)

    def load(self, placement: Placement) -> Sd3Backbone:
        return Sd3Backbone(self, placement)

    def tiny(self) -> Sd3:
        words = min(self.words, 16)
        return replace(self, weights=TINY, transformer=None, height=32, width=32, words=words, embeddings=None)
