"""Qwen-Image (2025): a flow-matching transformer of 20 billion parameters, conditioned by Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from ..core.distributions import expand_dims_like
from ..core.model_spec import PipelineLayout
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from .checkpoint_keys import keep_names
from .component_configs import QWEN25_VL_7B, ComponentConfigs
from .image_backbone import DOWNSAMPLE_FACTOR, ImageBackbone, VaeAdapter, cast_to_network_dtype
from .language_encoders import TemplateEncoder, load_decoder
from .latent_packing import pack_latents, trim_padding, unpack_latents
from .pipeline_components import JOINT_ATTENTION_LAYERS, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource

Side = Annotated[int, Field(ge=32, le=4096, multiple_of=16)]
LATENT_CHANNELS = 16
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_PREFIX_TOKENS = 34  # template tokens before the prompt, which the transformer does not get
CONFIGS: ComponentConfigs = {
    "transformer": {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
    "vae": {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
    "text_encoder": QWEN25_VL_7B,
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "in_channels": 4 * LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
    "vae": {"base_dim": 8, "z_dim": LATENT_CHANNELS, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1},
    "text_encoder": {
        "text_config": {
            "vocab_size": 99,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
            "bos_token_id": 97,
            "eos_token_id": 98,
            "pad_token_id": 0,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
    },
}
SOURCE = WeightsSource("Qwen/Qwen-Image", size="58 GB", license="Apache-2.0")
QWEN_IMAGE = PublishedModel("qwen_image", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class SingleFrameVae(VaeAdapter):
    """A video VAE for clips of one frame, decoded stage by stage without its cache of earlier frames."""

    def __init__(self, net: Any, checkpoint_decoder: bool, stretch_contrast: bool) -> None:
        super().__init__(net, checkpoint_decoder)
        self.stretch_contrast = stretch_contrast

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Decode latents [N, C, 1, h, w] stage by stage: diffusers' decoder has no gradient checkpointing."""
        decoder = self.net.decoder
        x = decoder.conv_in(self.net.post_quant_conv(latents))
        x = self.run_stages(x, (decoder.mid_block, *decoder.up_blocks))
        pixels = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
        return (stretch_contrast(pixels) if self.stretch_contrast and torch.is_grad_enabled() else pixels,)


def stretch_contrast(x: Tensor) -> Tensor:
    """Scale each image linearly so that its values range from -1 to 1."""
    low, high = x.flatten(1).amin(1), x.flatten(1).amax(1)
    return 2 * (x - expand_dims_like(low, x)) / expand_dims_like((high - low).clamp(min=1e-6), x) - 1


class QwenImageBackbone(ImageBackbone):
    """Denoises packed latents [h/2, w/2, 64] of any size; the transformer predicts the velocity noise - clean at t."""

    def __init__(self, spec: QwenImageSpec, placement: Placement) -> None:
        from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

        components = spec.components(placement)
        net: Any = components.load_transformer(QwenImageTransformer2DModel, spec.transformer)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}."
        # Nothing reads the text tokens that leave the last block.
        layers = ("attn.add_q_proj.", "attn.norm_added_q.", "attn.to_add_out.", "txt_mlp.")
        unused = tuple(last + layer for layer in layers)
        self.traits = NetworkTraits(lora_targets=JOINT_ATTENTION_LAYERS, unused_parameters=unused)
        self.net = net
        vae = components.load_vae("vae", AutoencoderKLQwenImage, gradient_checkpointing=False, is_video=True)
        self.autoencoder = replace(vae, net=SingleFrameVae(vae.net, spec.checkpoint_decoder, spec.stretch_contrast))
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.predict_tokens(x.flatten(1, 2), t, cond, [x.shape[1:3]]).view_as(x)

    def predict_tokens(self, tokens: Tensor, t: Tensor, cond: Condition, sizes: Sequence[Sequence[int]]) -> Tensor:
        """Return the velocity of packed latents [B, n, 64]: those of images of these heights and widths in a row."""
        prompt_embeds, mask = trim_padding(cond.tensors["prompt_embeds"], cond.tensors.get("lengths"))
        latents, text = cast_to_network_dtype(self.net, tokens, prompt_embeds)
        velocity: Tensor = self.net(
            hidden_states=latents,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None if mask is None else mask.to(tokens.device),
            timestep=t,
            img_shapes=[[(1, height, width) for height, width in sizes]] * len(tokens),
            return_dict=False,
        )[0]
        return velocity

    def with_size(self, height: int, width: int) -> Self:
        other, factor = copy(self), 2 * DOWNSAMPLE_FACTOR
        other.shape, other.pixels = (height // factor, width // factor, 4 * LATENT_CHANNELS), (1, 3, height, width)
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        latents = self.autoencoder.encode(pixels[:, 0])
        return pack_latents(latents).view(len(latents), latents.shape[2] // 2, latents.shape[3] // 2, -1)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        pixels = self.autoencoder.decode(unpack_latents(x.flatten(1, 2), 2 * x.shape[1], 2 * x.shape[2]))[:, None]
        return pixels if frames is None else pixels[:, list(frames)]


@dataclass(frozen=True)
class QwenImageSpec(ImageSpec):
    """Qwen-Image: a flow whose timestep shift depends on the image size and whose last timestep is 0.02."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network
    height: Side = 1328
    width: Side = 1328
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512  # maximum sequence length of prompts
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a fraction of its memory
    stretch_contrast: bool = False  # scale each image to the full range where a gradient is computed, as SRPO does
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    supports_context_parallel: ClassVar[bool] = True
    backbone_class: ClassVar[Callable[..., QwenImageBackbone]] = QwenImageBackbone
    tiny_text_tokens = 32
    published: ClassVar[PublishedModel] = QWEN_IMAGE
    layout: ClassVar[PipelineLayout] = PipelineLayout("QwenImagePipeline", "transformer", "lora_unet", keep_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        factor = 2 * DOWNSAMPLE_FACTOR
        return self.height // factor, self.width // factor, 4 * LATENT_CHANNELS

    def load_text_encoders(self, components: PipelineComponents) -> TemplateEncoder:
        from transformers import Qwen2_5_VLForConditionalGeneration

        # Small random encoders read bytes: the template alone would exceed any length.
        template, prefix = ("{}", 0) if components.path is None else (TEMPLATE, TEMPLATE_PREFIX_TOKENS)
        encoder = load_decoder(components, Qwen2_5_VLForConditionalGeneration, self.max_text_tokens + prefix)
        return TemplateEncoder(encoder, template, prefix)
