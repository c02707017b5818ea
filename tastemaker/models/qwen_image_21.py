"""Qwen-Image 2.1 (2026): one sequence of text and image tokens, conditioned by Qwen3-VL; images have an alpha channel.

Only text-to-image is implemented: images in a prompt's metadata, which the network can read too, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.model_spec import PipelineLayout, Tensors
from ..core.types import Condition, Metadata, Placement, Prompts
from ..core.weights import NetworkTraits
from .checkpoint_keys import KEEP_OTHER_NAMES, KeyRules, rename_and_concat, split_and_rename
from .component_configs import QWEN3_VL_8B, ComponentConfigs
from .image_backbone import ImageBackbone, VaeAdapter, cast_to_network_dtype, predict_by_layout
from .language_encoders import TemplateEncoder, load_decoder
from .pipeline_components import ATTENTION_LAYERS, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource

Side = Annotated[int, Field(ge=32, le=4096, multiple_of=32)]
LATENT_CHANNELS, PIXELS_PER_LATENT = 64, 16
HALVES = ("gate_layer", "proj")  # layers of the gated MLP, in the order of ComfyUI's fused layer
TOKENS_PER_SLOT = 4  # image tokens that one place of the text encoder stands for
SYSTEM_TURN = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
TEMPLATE = SYSTEM_TURN + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CONFIGS: ComponentConfigs = {
    "transformer": {
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_layers": 32,
        "attention_head_dim": 128,
        "num_attention_heads": 32,
        "context_in_dim": 4096,
        "mlp_ratio": 3,
        "axes_dims_rope": (16, 56, 56),
    },
    "vae": {"base_dim": 96, "decoder_base_dim": 144, "z_dim": LATENT_CHANNELS, "dim_mult": [1, 2, 4, 8, 8]},
    "text_encoder": QWEN3_VL_8B,
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
    "vae": {
        "base_dim": 8,
        "decoder_base_dim": 8,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 1, 1, 2, 2],
        "num_res_blocks": 1,
    },
    "text_encoder": {
        "text_config": {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6},
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    },
}
SOURCE = WeightsSource("Qwen/Qwen-Image-2.1", size="about 32 GB", license="Qwen Research License Agreement")
QWEN_IMAGE_21 = PublishedModel("qwen_image_21", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})
KEY_RULES: KeyRules = (  # of ComfyUI, which fuses the halves of a gated layer
    *((rf"transformer_blocks\.(\d+)\.img_mlp\.{half}\.", r"transformer_blocks.\1.img_mlp.gate_up.") for half in HALVES),
    KEEP_OTHER_NAMES,
)


def qwen_image_21_to_comfyui(tensors: Tensors, config: Any) -> Tensors:
    """Rename a transformer's tensors as ComfyUI does."""
    return rename_and_concat(tensors, KEY_RULES)


class TransparentVae(VaeAdapter):
    """The VAE of one frame with an alpha channel: opaque when it encodes, over white when it decodes."""

    def encode(self, pixels: Tensor) -> Any:
        return self.net.encode(torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1))

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Decode latents [N, C, 1, h, w] stage by stage to pixels [N, 3, 1, H, W] in [-1, 1]."""
        decoder = self.net.decoder
        x = decoder.mid_block(decoder.conv_in(self.net.post_quant_conv(latents)))
        x = self.run_stages(x, [partial(stage, first_chunk=True) for stage in decoder.up_blocks])
        x = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x))).clamp(-1, 1)
        alpha = x[:, 3:] / 2 + 0.5
        return (x[:, :3] * alpha + (1 - alpha),)


class QwenImage21Backbone(ImageBackbone):
    """Denoises latents [1, 64, h, w] of any size; the transformer predicts the velocity noise - clean at t.

    Positions of image tokens depend on the number of text tokens, so that only prompts of one length share a call.
    """

    traits = NetworkTraits(lora_targets=ATTENTION_LAYERS)

    def __init__(self, spec: QwenImage21Spec, placement: Placement) -> None:
        from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel

        components = spec.components(placement)
        to_diffusers_keys = partial(split_and_rename, rules=KEY_RULES)
        self.net = components.load_transformer(QwenImage21Transformer2DModel, spec.transformer, to_diffusers_keys)
        vae = components.load_vae("vae", AutoencoderKLQwenImage21, gradient_checkpointing=False, is_video=True)
        net = TransparentVae(vae.net, spec.checkpoint_decoder)
        self.autoencoder = replace(vae, net=net, downsample_factor=PIXELS_PER_LATENT)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        if any(each.get("image") is not None for each in metadata):
            raise ValueError(
                "the prompts have an `image` in their metadata, but only text-to-image is implemented for Qwen-Image "
                "2.1; use the model qwen_image_edit, or data without images [TM2458]"
            )
        return super().embed(prompts, metadata)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        lengths = cond.tensors.get("lengths")
        longest = cond.tensors["prompt_embeds"].shape[1]
        layouts = [longest] * len(x) if lengths is None else lengths.tolist()
        return predict_by_layout(self.net, self._predict_group, x, t, cond, layouts)

    def _predict_group(self, x: Tensor, t: Tensor, cond: Condition, length: int) -> Tensor:
        """Predict samples whose prompts have one length, in one network call."""
        tokens = x[:, 0].flatten(2).transpose(1, 2)
        latents, text = cast_to_network_dtype(self.net, tokens, cond.tensors["prompt_embeds"][:, :length])
        slots = torch.arange(length + tokens.shape[1] // TOKENS_PER_SLOT, device=x.device) >= length
        velocity: Tensor = self.net(
            hidden_states=latents,
            encoder_hidden_states=text,
            timestep=t,
            img_shapes=[[(1, *x.shape[3:])]] * len(x),
            img_mask=slots.expand(len(x), -1),
            return_dict=False,
        )[0]
        return velocity[:, -tokens.shape[1] :].transpose(1, 2).reshape(x.shape)


@dataclass(frozen=True)
class QwenImage21Spec(ImageSpec):
    """Qwen-Image 2.1, text-to-image: a flow whose timestep shift depends on the image size, without guidance."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network, with diffusers' or ComfyUI's keys
    height: Side = 2048
    width: Side = 2048
    max_text_tokens: Annotated[int, Field(ge=1, le=4096)] = 1024  # maximum sequence length of prompts
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a fraction of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    latent_channels, pixels_per_latent = LATENT_CHANNELS, PIXELS_PER_LATENT
    backbone_class = QwenImage21Backbone
    tiny_side, tiny_text_tokens = 64, 32
    published: ClassVar[PublishedModel] = QWEN_IMAGE_21
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "QwenImage21Pipeline", "transformer", "lora_unet", qwen_image_21_to_comfyui, comfyui_layer=str
    )

    def load_text_encoders(self, components: PipelineComponents) -> TemplateEncoder:
        from transformers import Qwen3VLForConditionalGeneration

        encoder = load_decoder(components, Qwen3VLForConditionalGeneration, self.max_text_tokens, "processor")
        encoder.net.norm = nn.Identity()
        template, prefix = "{}", 0  # small random encoders read bytes: the template alone would exceed any length
        if components.path is not None:
            template, prefix = TEMPLATE, len(encoder.tokenizer(SYSTEM_TURN, add_special_tokens=False).input_ids)
        # An empty prompt has no token.
        return TemplateEncoder(replace(encoder, max_length=encoder.max_length + prefix), template, prefix, empty=" ")
