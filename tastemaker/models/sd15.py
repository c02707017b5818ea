"""Stable Diffusion 1 and 2 (Rombach et al. 2022): a UNet that denoises latents, conditioned by CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..core.model_spec import PipelineLayout, Tensors
from ..core.registry import ConfigError
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from .checkpoint_keys import rename_and_concat
from .component_configs import CLIP_L, SD_VAE, ComponentConfigs
from .image_backbone import ImageBackbone, cast_to_network_dtype, check_image_shape, check_image_size, unet_timestep
from .pipeline_components import ATTENTION_LAYERS, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource, find_weights, load_state_dict, silence_libraries
from .text_encoders import TextEncoder, TextEncoders

CLIP_MAX_TOKENS = 77
LATENT_CHANNELS = 4
ORIGINAL_PREFIX = "model.diffusion_model."  # before the UNet's keys in the authors' checkpoints
RESNET_KEYS = (  # of a residual block: diffusers' names and the authors'
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
)
CONFIGS: ComponentConfigs = {
    "unet": {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 8, "cross_attention_dim": 768},
    "vae": {**SD_VAE, "scaling_factor": 0.18215},
    "text_encoder": CLIP_L,
}
TINY_CONFIGS: ComponentConfigs = {
    "unet": {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
    },
    "vae": {
        "block_out_channels": (4, 4, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "latent_channels": LATENT_CHANNELS,
    },
    "text_encoder": {
        "vocab_size": 600,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CLIP_MAX_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 2,  # as published: transformers then pools at the highest token id
    },
}
HUB_ID = "stable-diffusion-v1-5/stable-diffusion-v1-5"
SOURCE = WeightsSource(HUB_ID, size="4.3 GB", license="CreativeML OpenRAIL-M")
SD15 = PublishedModel("sd15", (SOURCE,), TINY_CONFIGS, {HUB_ID: CONFIGS})


class ClipPromptEncoder(TextEncoders):
    """CLIP's last hidden states: prompt_embeds [B, 77, D]."""

    def __init__(self, clip: TextEncoder) -> None:
        self.clip, self.text_encoders = clip, (clip,)

    @classmethod
    def load(cls, components: PipelineComponents) -> ClipPromptEncoder:
        from transformers import CLIPTextModel

        return cls(components.load_text_encoder("text_encoder", CLIPTextModel, "tokenizer", CLIP_MAX_TOKENS))

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"prompt_embeds": self.clip(prompts).last_hidden_state}


class Sd15Backbone(ImageBackbone):
    """Denoises latents [1, 4, h, w]; the UNet predicts noise, or velocity if the path's prediction type says so."""

    traits = NetworkTraits(lora_targets=ATTENTION_LAYERS)

    def __init__(self, spec: UnetImageSpec, placement: Placement) -> None:
        from diffusers import AutoencoderKL, UNet2DConditionModel

        components = spec.components(placement)
        config = components.config("unet")
        check_unet_config(config, spec)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        vae = spec.vae_components(components)
        self.autoencoder = vae.load_vae("vae", AutoencoderKL, gradient_checkpointing=spec.checkpoint_decoder)
        tensors = read_unet_checkpoint(spec.unet, spec.published.releases[0], config)
        self.net = components.load_trainable("unet", UNet2DConditionModel, tensors)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        latents, prompt_embeds = cast_to_network_dtype(self.net, x[:, 0], cond.tensors["prompt_embeds"])
        out: Tensor = self.net(latents, unet_timestep(t), prompt_embeds, return_dict=False)[0]
        return out[:, None]

    def encode(self, pixels: Tensor) -> Tensor:
        check_image_shape(pixels, self.pixels)
        return super().encode(pixels)


def check_unet_config(config: Mapping[str, Any], spec: UnetImageSpec) -> None:
    """Refuse the UNet of another model."""
    added = config.get("addition_embed_type")
    if added != spec.addition_embed_type:
        kind = {"text_time": "two text encoders", None: "one text encoder"}.get(added, added)
        other_type = "sd15" if spec.addition_embed_type else "sdxl"
        raise ConfigError(
            f"model.weights: '{spec.weights:.200}' contains a network for {kind}; set model.type to {other_type} "
            "[TM521]"
        )
    if config.get("in_channels", LATENT_CHANNELS) != LATENT_CHANNELS:
        raise ConfigError(
            f"model.weights: the network of '{spec.weights:.200}' has {config['in_channels']} input channels, "
            f"like inpainting models; expected {LATENT_CHANNELS}, so use the base model [TM522]"
        )


def read_unet_checkpoint(
    name: str | None, source: WeightsSource, config: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """Read a UNet from one file, with diffusers' or the authors' keys, alone or in a full checkpoint."""
    if name is None:
        return None
    tensors = load_state_dict(find_weights(name, source))
    if any(key.startswith("input_blocks.") for key in tensors):
        tensors = {ORIGINAL_PREFIX + key: x for key, x in tensors.items()}
    if not any(key.startswith(ORIGINAL_PREFIX) for key in tensors):
        return {key.removeprefix("unet."): x for key, x in tensors.items()}
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    try:
        with silence_libraries():
            return dict(convert_ldm_unet_checkpoint(tensors, dict(config)))  # type: ignore[no-untyped-call]
    except KeyError as error:
        raise ConfigError(
            f"model.unet: '{name:.200}' lacks {error}, which this network needs; use a file of the same model [TM523]"
        ) from error


def sd_unet_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a UNet's tensors as the authors of Stable Diffusion do: blocks are numbered through all levels."""
    layers, attends = int(config["layers_per_block"]), [name.startswith("Cross") for name in config["up_block_types"]]
    rules = [
        *((rf"time_embedding\.linear_{n + 1}\.", f"time_embed.{2 * n}.") for n in (0, 1)),
        *((rf"add_embedding\.linear_{n + 1}\.", f"label_emb.0.{2 * n}.") for n in (0, 1)),
        (r"conv_in\.", "input_blocks.0.0."),
        (r"conv_norm_out\.", "out.0."),
        (r"conv_out\.", "out.2."),
        *_resnet_rules(r"mid_block\.resnets\.0", "middle_block.0"),
        (r"mid_block\.attentions\.0\.", "middle_block.1."),
        *_resnet_rules(r"mid_block\.resnets\.1", "middle_block.2"),
    ]
    for i, has_attention in enumerate(attends):
        first, up = i * (layers + 1), f"output_blocks.{i * (layers + 1) + layers}"
        rules += [(rf"down_blocks\.{i}\.downsamplers\.0\.conv\.", f"input_blocks.{first + layers + 1}.0.op.")]
        rules += [(rf"up_blocks\.{i}\.upsamplers\.0\.conv\.", f"{up}.{2 if has_attention else 1}.conv.")]
        for j in range(layers + 1):
            for ours, theirs in (("down", f"input_blocks.{first + j + 1}"), ("up", f"output_blocks.{first + j}")):
                rules += _resnet_rules(rf"{ours}_blocks\.{i}\.resnets\.{j}", f"{theirs}.0")
                rules += [(rf"{ours}_blocks\.{i}\.attentions\.{j}\.", f"{theirs}.1.")]
    return rename_and_concat(tensors, tuple(rules))


def _resnet_rules(ours: str, theirs: str) -> list[tuple[str, str]]:
    return [(rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in RESNET_KEYS]


class UnetImageSpec(ImageSpec):
    """Settings of Stable Diffusion 1, 2 or XL."""

    latent_channels = LATENT_CHANNELS
    addition_embed_type: ClassVar[str | None] = None  # of the UNet's config
    unet: str | None
    checkpoint_decoder: bool

    def __post_init__(self) -> None:
        check_image_size(self.height, self.width)

    def vae_components(self, components: PipelineComponents) -> PipelineComponents:
        """Return the components to load the VAE from."""
        return components


@dataclass(frozen=True)
class Sd15Spec(UnetImageSpec):
    """Stable Diffusion 1.x or 2.x; 2.x at 768 pixels needs `prediction_type: v_prediction` in its path."""

    weights: str = HUB_ID  # hub id, or folder in diffusers' layout
    unet: str | None = None  # file whose UNet replaces the pipeline's, with diffusers' or the authors' keys
    height: int = 512
    width: int = 512
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    published: ClassVar[PublishedModel] = SD15
    backbone_class = Sd15Backbone
    embedding_settings = {}
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "StableDiffusionPipeline", "unet", "lora_unet", sd_unet_to_original
    )

    def load_text_encoders(self, components: PipelineComponents) -> ClipPromptEncoder:
        return ClipPromptEncoder.load(components)
