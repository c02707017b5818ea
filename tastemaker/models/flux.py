"""FLUX.1 dev and schnell (Black Forest Labs 2024): a flow-matching transformer conditioned by T5 and CLIP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from ..core.model_spec import PipelineLayout, Tensors
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from .checkpoint_keys import KeyRules, TensorShapes, rename_and_concat, split_and_rename, swap_scale_shift
from .component_configs import CLIP_L, T5_XXL, TINY_VAE, VAE, ComponentConfigs
from .image_backbone import ImageBackbone
from .latent_packing import latent_image_ids, pack_latents, unpack_latents
from .pipeline_components import JOINT_ATTENTION_LAYERS, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .text_encoders import TextEncoders

Side = Annotated[int, Field(ge=16, le=8192, multiple_of=16)]
LATENT_CHANNELS = 16
CLIP_MAX_TOKENS = 77
DEFAULT_LORA_TARGETS = (
    *JOINT_ATTENTION_LAYERS,
    *(f"{stream}.{layer}" for stream in ("ff", "ff_context") for layer in ("net.0.proj", "net.2")),
)
FLUX_DEV: ComponentConfigs = {
    "transformer": {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    },
    "vae": {**VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
    "text_encoder": CLIP_L,
    "text_encoder_2": T5_XXL,
}
FLUX_SCHNELL: ComponentConfigs = {
    **FLUX_DEV,
    "transformer": {**FLUX_DEV["transformer"], "guidance_embeds": False},
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "in_channels": 4 * LATENT_CHANNELS,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    },
    "vae": {**TINY_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
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
DEV = WeightsSource("black-forest-labs/FLUX.1-dev", "", "34 GB", "FLUX.1 [dev] Non-Commercial License", gated=True)
SCHNELL = WeightsSource("black-forest-labs/FLUX.1-schnell", "", "34 GB", "Apache-2.0")
FLUX = PublishedModel(
    "flux", (DEV, SCHNELL), TINY_CONFIGS, {DEV.hub: FLUX_DEV, SCHNELL.hub: FLUX_SCHNELL}, few_steps={SCHNELL.hub: 4}
)

DOUBLE, SINGLE = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
EMBEDDER_KEYS = (("timestep", "time_in"), ("text", "vector_in"), ("guidance", "guidance_in"))
MLP_KEYS = (("linear_1", "in_layer"), ("linear_2", "out_layer"))
KEY_RULES: KeyRules = (
    *(
        (rf"time_text_embed\.{ours}_embedder\.{a}\.", f"{theirs}.{b}.")
        for ours, theirs in EMBEDDER_KEYS
        for a, b in MLP_KEYS
    ),
    (r"context_embedder\.", "txt_in."),
    (r"x_embedder\.", "img_in."),
    (rf"{DOUBLE}norm1\.linear\.", r"double_blocks.\1.img_mod.lin."),
    (rf"{DOUBLE}norm1_context\.linear\.", r"double_blocks.\1.txt_mod.lin."),
    *((rf"{DOUBLE}attn\.to_{x}\.", r"double_blocks.\1.img_attn.qkv.") for x in "qkv"),
    *((rf"{DOUBLE}attn\.add_{x}_proj\.", r"double_blocks.\1.txt_attn.qkv.") for x in "qkv"),
    (rf"{DOUBLE}attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
    (rf"{DOUBLE}attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
    (rf"{DOUBLE}attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
    (rf"{DOUBLE}attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
    (rf"{DOUBLE}attn\.to_out\.0\.", r"double_blocks.\1.img_attn.proj."),
    (rf"{DOUBLE}attn\.to_add_out\.", r"double_blocks.\1.txt_attn.proj."),
    (rf"{DOUBLE}ff\.net\.0\.proj\.", r"double_blocks.\1.img_mlp.0."),
    (rf"{DOUBLE}ff\.net\.2\.", r"double_blocks.\1.img_mlp.2."),
    (rf"{DOUBLE}ff_context\.net\.0\.proj\.", r"double_blocks.\1.txt_mlp.0."),
    (rf"{DOUBLE}ff_context\.net\.2\.", r"double_blocks.\1.txt_mlp.2."),
    (rf"{SINGLE}norm\.linear\.", r"single_blocks.\1.modulation.lin."),
    *((rf"{SINGLE}attn\.to_{x}\.", r"single_blocks.\1.linear1.") for x in "qkv"),
    (rf"{SINGLE}proj_mlp\.", r"single_blocks.\1.linear1."),
    (rf"{SINGLE}attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (rf"{SINGLE}attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    (rf"{SINGLE}proj_out\.", r"single_blocks.\1.linear2."),
    (r"proj_out\.", "final_layer.linear."),
    (r"norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
)


class FluxPromptEncoder(TextEncoders):
    """T5's prompt_embeds [B, max_text_tokens, D]; CLIP's pooled_prompt_embeds [B, P]."""

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from transformers import CLIPTextModel, T5EncoderModel

        self.clip = components.load_text_encoder("text_encoder", CLIPTextModel, "tokenizer", CLIP_MAX_TOKENS)
        self.t5 = components.load_text_encoder("text_encoder_2", T5EncoderModel, "tokenizer_2", max_text_tokens)
        self.text_encoders = self.clip, self.t5

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {
            "prompt_embeds": self.t5(prompts).last_hidden_state,
            "pooled_prompt_embeds": self.clip(prompts).pooler_output,
        }


class FluxBackbone(ImageBackbone):
    """Denoises latents [1, 16, h, w] of any size; the transformer predicts the velocity noise - clean."""

    traits = NetworkTraits(lora_targets=DEFAULT_LORA_TARGETS)

    def __init__(self, spec: FluxSpec, placement: Placement) -> None:
        from diffusers import AutoencoderKL, FluxTransformer2DModel

        components = spec.components(placement)
        self.net = components.load_transformer(FluxTransformer2DModel, spec.transformer, to_diffusers_keys)
        self.autoencoder = components.load_vae("vae", AutoencoderKL, gradient_checkpointing=spec.checkpoint_decoder)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.spec, self.guidance_embeds = spec, bool(components.config("transformer").get("guidance_embeds"))
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        self.img_ids = latent_image_ids(*self.shape[2:]).to(placement.device)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        size = x.shape[3:]
        img_ids = self.img_ids if size == self.shape[2:] else latent_image_ids(*size).to(x.device)
        return unpack_latents(self.predict_tokens(pack_latents(x[:, 0]), img_ids, t, cond), *size)[:, None]

    def predict_tokens(self, tokens: Tensor, img_ids: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Return the velocity of packed latents [B, n, 64] at positions [n, 3]."""
        dtype = next(self.net.parameters()).dtype  # without autocast, all inputs need the dtype of the weights
        prompt_embeds, pooled = (cond.tensors[name].to(dtype) for name in ("prompt_embeds", "pooled_prompt_embeds"))
        # With autocast, latents stay in float32: the network casts the timestep to the dtype of its latents.
        autocast = torch.is_autocast_enabled(tokens.device.type)
        velocity: Tensor = self.net(
            hidden_states=tokens if autocast else tokens.to(dtype),
            timestep=(t * 1000).floor() / 1000 if self.spec.truncate_timesteps else t,
            guidance=self._guidance_input(t),
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled,
            txt_ids=img_ids.new_zeros(prompt_embeds.shape[1], 3),
            img_ids=img_ids,
            return_dict=False,
        )[0]
        return velocity

    def _guidance_input(self, t: Tensor) -> Tensor | None:
        """Return the distilled guidance scale, an input of the network; schnell has none."""
        scale = self.spec.guidance_scale
        if self.spec.rollout_guidance_scale is not None and not torch.is_grad_enabled():
            scale = self.spec.rollout_guidance_scale
        return torch.full_like(t, scale) if self.guidance_embeds else None

    def with_size(self, height: int, width: int) -> Self:
        other = super().with_size(height, width)
        other.spec = replace(self.spec, height=height, width=width)
        other.img_ids = latent_image_ids(*other.shape[2:]).to(self.img_ids.device)
        return other

    def with_guidance_scale(self, scale: float | None) -> Self:
        other = copy(self)
        scale = self.spec.guidance_scale if scale is None else scale
        other.spec = replace(self.spec, guidance_scale=scale, rollout_guidance_scale=None)
        return other


def to_diffusers_keys(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Return the transformer's tensors with diffusers' keys, whichever layout the file has."""
    if not any(key.startswith("double_blocks.") for key in tensors):
        return tensors
    renamed = split_and_rename(tensors, shapes, KEY_RULES)
    swapped = {key: swap_scale_shift(x) for key, x in renamed.items() if key.startswith("norm_out.linear.")}
    return {**renamed, **swapped}


def flux_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Black Forest Labs do."""
    swapped = {key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith("norm_out.linear.")}
    return rename_and_concat({**tensors, **swapped}, KEY_RULES)


@dataclass(frozen=True)
class FluxSpec(ImageSpec):
    """FLUX.1: a flow-matching transformer of 12 billion parameters, conditioned by T5 and CLIP."""

    weights: str = DEV.hub  # hub id or folder in diffusers' layout: dev, schnell or a fine-tuned version
    transformer: str | None = None  # safetensors file with other weights, with diffusers' or the authors' keys
    height: Side = 1024
    width: Side = 1024
    guidance_scale: float = 3.5  # distilled guidance, an input of the network; schnell has none
    rollout_guidance_scale: float | None = None  # another scale where no gradient is computed: 1 in SRPO
    max_text_tokens: Annotated[int, Field(ge=1, le=512)] = 512  # T5's sequence length; 256 for schnell
    truncate_timesteps: bool = False  # round timesteps down to three digits, as SRPO does
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    latent_channels = LATENT_CHANNELS
    supports_context_parallel: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = FLUX
    backbone_class: ClassVar[Callable[..., FluxBackbone]] = FluxBackbone
    text_encoders = ("text_encoder", "text_encoder_2")
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "FluxPipeline", "transformer", "lora_transformer", flux_to_original, "flux"
    )

    @property
    def timestep_shift(self) -> float | None:
        return 1.0 if self.weights == SCHNELL.hub else None

    def load_text_encoders(self, components: PipelineComponents) -> FluxPromptEncoder:
        return FluxPromptEncoder(components, self.max_text_tokens)
