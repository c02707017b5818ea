"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): MM-DiT, a joint transformer of image and text tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..core.model_spec import PipelineLayout, Tensors
from ..core.registry import ConfigError
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from .checkpoint_keys import KeyRules, TensorShapes, rename_and_concat, split_and_rename, swap_scale_shift
from .component_configs import CLIP_G, CLIP_L, T5_XXL, TINY_VAE, VAE, ComponentConfigs
from .image_backbone import DOWNSAMPLE_FACTOR, ImageBackbone, cast_to_network_dtype
from .pipeline_components import JOINT_ATTENTION_LAYERS, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .text_encoders import TextEncoder, TextEncoders

Side = Annotated[int, Field(ge=32, le=4096, multiple_of=16)]
LATENT_CHANNELS, PATCH_SIZE = 16, 2
CLIP_MAX_TOKENS = 77

SD35_MEDIUM: ComponentConfigs = {
    "transformer": {
        "sample_size": 128,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    "vae": {**VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609},
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
    "text_encoder_3": T5_XXL,
}
SD35_LARGE: ComponentConfigs = {
    **SD35_MEDIUM,
    "transformer": {
        **SD35_MEDIUM["transformer"],
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "pos_embed_max_size": 192,
        "dual_attention_layers": (),
    },
}
SD3_MEDIUM: ComponentConfigs = {
    **SD35_MEDIUM,
    "transformer": {
        **SD35_MEDIUM["transformer"],
        "pos_embed_max_size": 192,
        "dual_attention_layers": (),
        "qk_norm": None,
    },
}
TINY_CLIP = {
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
TINY_CONFIGS: ComponentConfigs = {
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
    "vae": {**TINY_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609},
    "text_encoder": TINY_CLIP,
    "text_encoder_2": {**TINY_CLIP, "hidden_act": "gelu"},
    "text_encoder_3": {"vocab_size": 99, "d_model": 48, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}
LICENSE = "Stability AI Community License"
RELEASES = (
    WeightsSource("stabilityai/stable-diffusion-3.5-medium", size="16 GB", license=LICENSE, gated=True),
    WeightsSource("stabilityai/stable-diffusion-3.5-large", size="28 GB", license=LICENSE, gated=True),
    WeightsSource("stabilityai/stable-diffusion-3-medium-diffusers", size="15 GB", license=LICENSE, gated=True),
)
SD3 = PublishedModel(
    "sd3",
    RELEASES,
    TINY_CONFIGS,
    {source.hub: config for source, config in zip(RELEASES, (SD35_MEDIUM, SD35_LARGE, SD3_MEDIUM), strict=True)},
)

BLOCK, JOINT = r"transformer_blocks\.(\d+)\.", "joint_blocks"
MLP_KEYS = (("linear_1", "mlp.0"), ("linear_2", "mlp.2"))
STREAM_KEYS = (("", "x_block"), ("_context", "context_block"))  # of the image and the text
KEY_RULES: KeyRules = (
    (r"pos_embed\.pos_embed", "pos_embed"),
    (r"pos_embed\.proj\.", "x_embedder.proj."),
    *((rf"time_text_embed\.timestep_embedder\.{a}\.", f"t_embedder.{b}.") for a, b in MLP_KEYS),
    *((rf"time_text_embed\.text_embedder\.{a}\.", f"y_embedder.{b}.") for a, b in MLP_KEYS),
    (r"context_embedder\.", "context_embedder."),
    *((rf"{BLOCK}attn\.to_{x}\.", rf"{JOINT}.\1.x_block.attn.qkv.") for x in "qkv"),
    *((rf"{BLOCK}attn\.add_{x}_proj\.", rf"{JOINT}.\1.context_block.attn.qkv.") for x in "qkv"),
    *((rf"{BLOCK}attn2\.to_{x}\.", rf"{JOINT}.\1.x_block.attn2.qkv.") for x in "qkv"),
    *((rf"{BLOCK}attn(2?)\.norm_{x}\.", rf"{JOINT}.\1.x_block.attn\2.ln_{x}.") for x in "qk"),
    *((rf"{BLOCK}attn\.norm_added_{x}\.", rf"{JOINT}.\1.context_block.attn.ln_{x}.") for x in "qk"),
    (rf"{BLOCK}attn(2?)\.to_out\.0\.", rf"{JOINT}.\1.x_block.attn\2.proj."),
    (rf"{BLOCK}attn\.to_add_out\.", rf"{JOINT}.\1.context_block.attn.proj."),
    *((rf"{BLOCK}norm1{a}\.linear\.", rf"{JOINT}.\1.{b}.adaLN_modulation.1.") for a, b in STREAM_KEYS),
    *((rf"{BLOCK}ff{a}\.net\.0\.proj\.", rf"{JOINT}.\1.{b}.mlp.fc1.") for a, b in STREAM_KEYS),
    *((rf"{BLOCK}ff{a}\.net\.2\.", rf"{JOINT}.\1.{b}.mlp.fc2.") for a, b in STREAM_KEYS),
    (r"proj_out\.", "final_layer.linear."),
    (r"norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
)


class Sd3PromptEncoder(TextEncoders):
    """Both CLIPs side by side, then T5: prompt_embeds [B, 77 + max_text_tokens, D]; pooled_prompt_embeds [B, P]."""

    def __init__(self, components: PipelineComponents, spec: Sd3Spec) -> None:
        from transformers import CLIPTextModelWithProjection, T5EncoderModel

        self.width = int(components.config("transformer")["joint_attention_dim"])
        self.max_text_tokens = spec.max_text_tokens
        self.clips = [
            components.load_text_encoder(
                f"text_encoder{suffix}", CLIPTextModelWithProjection, f"tokenizer{suffix}", CLIP_MAX_TOKENS
            )
            for suffix in ("", "_2")
        ]
        self.t5: TextEncoder | None = None
        if spec.use_t5:
            self.t5 = components.load_text_encoder(
                "text_encoder_3", T5EncoderModel, "tokenizer_3", spec.max_text_tokens
            )
        self.text_encoders = (*self.clips, *([] if self.t5 is None else [self.t5]))

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        outputs = [clip(prompts, output_hidden_states=True) for clip in self.clips]
        clip = torch.cat([out.hidden_states[-2] for out in outputs], -1)
        if self.t5 is None:  # the network was trained with zeros in place of T5's features
            t5 = clip.new_zeros(len(prompts), self.max_text_tokens, self.width)
        else:
            t5 = self.t5(prompts).last_hidden_state
        prompt_embeds = torch.cat([F.pad(clip, (0, self.width - clip.shape[-1])), t5], 1)
        return {
            "prompt_embeds": prompt_embeds,
            "pooled_prompt_embeds": torch.cat([out.text_embeds for out in outputs], -1),
        }


class Sd3Backbone(ImageBackbone):
    """Denoises latents [1, 16, h, w] of any size; the transformer predicts the velocity noise - clean at 1000 t."""

    def __init__(self, spec: Sd3Spec, placement: Placement) -> None:
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        components = spec.components(placement)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        check_position_table(components, spec)
        net: Any = components.load_transformer(SD3Transformer2DModel, spec.transformer, to_diffusers_keys)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn."
        # The queries of the text in the last block are not used.
        unused = (f"{last}add_q_proj.", f"{last}norm_added_q.")
        self.traits = NetworkTraits(lora_targets=JOINT_ATTENTION_LAYERS, unused_parameters=unused)
        self.net = net
        self.autoencoder = components.load_vae("vae", AutoencoderKL, gradient_checkpointing=spec.checkpoint_decoder)
        self.prompt_encoder = spec.cached_prompt_encoder(components)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        latents, prompt_embeds, pooled = cast_to_network_dtype(
            self.net, x[:, 0], cond.tensors["prompt_embeds"], cond.tensors["pooled_prompt_embeds"]
        )
        velocity: Tensor = self.net(
            hidden_states=latents,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled,
            timestep=1000 * t,
            return_dict=False,
        )[0]
        return velocity[:, None]


def check_position_table(components: PipelineComponents, spec: Sd3Spec) -> None:
    """Refuse images with more patches per side than the transformer's position table has."""
    limit = int(components.config("transformer")["pos_embed_max_size"]) * DOWNSAMPLE_FACTOR * PATCH_SIZE
    if max(spec.height, spec.width) > limit:
        raise ConfigError(
            f"model: images of {spec.height}x{spec.width} are too large for this model; set model.height and "
            f"model.width to at most {limit} [TM524]"
        )


def to_diffusers_keys(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Return the transformer's tensors with diffusers' keys, whichever layout the file has."""
    if not any(key.startswith("joint_blocks.") for key in tensors):
        return tensors
    blocks = [int(key.split(".")[1]) for key in shapes if key.startswith("transformer_blocks.")]
    renamed, prefixes = split_and_rename(tensors, shapes, KEY_RULES), _continuous_norms(1 + max(blocks))
    return {**renamed, **{key: swap_scale_shift(x) for key, x in renamed.items() if key.startswith(prefixes)}}


def sd3_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Stability AI does."""
    prefixes = _continuous_norms(config["num_layers"])
    swapped = {key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith(prefixes)}
    return rename_and_concat({**tensors, **swapped}, KEY_RULES)


def _continuous_norms(num_layers: int) -> tuple[str, str]:
    """The output norm and the last block's text norm have the type whose scale and shift are swapped."""
    return "norm_out.linear.", f"transformer_blocks.{num_layers - 1}.norm1_context.linear."


@dataclass(frozen=True)
class Sd3Spec(ImageSpec):
    """Stable Diffusion 3 or 3.5, medium or large: a rectified flow with timestep shift 3."""

    weights: str = "stabilityai/stable-diffusion-3.5-medium"  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network, with diffusers' or the authors' keys
    height: Side = 1024
    width: Side = 1024
    max_text_tokens: Annotated[int, Field(ge=1, le=512)] = 256  # T5's sequence length; CLIP's is 77
    use_t5: bool = True  # false: zeros for T5's features; 9.5 GB less, and prompts are followed less closely
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; text encoders are loaded only if needed
    seed: int = 0  # of random weights
    latent_channels = LATENT_CHANNELS
    published: ClassVar[PublishedModel] = SD3
    backbone_class = Sd3Backbone
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    embedding_settings = {"max_text_tokens": "max_text_tokens", "t5": "use_t5"}
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableDiffusion3Pipeline", "transformer", "lora_transformer", sd3_to_original
    )

    def load_text_encoders(self, components: PipelineComponents) -> Sd3PromptEncoder:
        return Sd3PromptEncoder(components, self)
