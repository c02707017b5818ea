"""Z-Image and Z-Image-Turbo (Tongyi 2025): a single-stream flow transformer of 6 billion parameters, read by Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..core.model_spec import PipelineLayout, Tensors
from ..core.types import Condition, Placement
from ..core.weights import NetworkTraits
from .checkpoint_keys import KEEP_OTHER_NAMES, KeyRules, TensorShapes, rename_and_concat, split_and_rename
from .component_configs import QWEN3_4B, TINY_QWEN3, TINY_VAE, VAE, ComponentConfigs
from .image_backbone import ImageBackbone
from .language_encoders import LanguageModelEncoder, load_decoder
from .pipeline_components import ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource

Side = Annotated[int, Field(ge=16, le=4096, multiple_of=16)]
CONFIGS: ComponentConfigs = {
    "transformer": {"cap_feat_dim": 2560, "axes_dims": (32, 48, 48), "axes_lens": (1536, 512, 512)},
    "vae": {**VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
    "text_encoder": QWEN3_4B,
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 32,
        "axes_dims": (4, 6, 6),
        "axes_lens": (512, 64, 64),
    },
    "vae": {**TINY_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
    "text_encoder": TINY_QWEN3,
}
BASE = WeightsSource("Tongyi-MAI/Z-Image", size="20.5 GB", license="Apache-2.0")
TURBO = WeightsSource("Tongyi-MAI/Z-Image-Turbo", size="33 GB", license="Apache-2.0")
Z_IMAGE = PublishedModel(
    "z_image", (BASE, TURBO), TINY_CONFIGS, {BASE.hub: CONFIGS, TURBO.hub: CONFIGS}, few_steps={TURBO.hub: 8}
)
BLOCK = r"((?:layers|noise_refiner|context_refiner)\.\d+\.attention)\."
KEY_RULES: KeyRules = (
    (r"all_x_embedder\.2-1\.", "x_embedder."),
    (r"all_final_layer\.2-1\.", "final_layer."),
    *((rf"{BLOCK}to_{x}\.", r"\1.qkv.") for x in "qkv"),
    *((rf"{BLOCK}norm_{x}\.", rf"\1.{x}_norm.") for x in "qk"),
    (rf"{BLOCK}to_out\.0\.", r"\1.out."),
    KEEP_OTHER_NAMES,
)


def to_diffusers_keys(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Return the transformer's tensors with diffusers' keys, whichever layout the file has."""
    renamed = split_and_rename(tensors, shapes, KEY_RULES)
    return {key: x for key, x in renamed.items() if key != "norm_final.weight"}  # which no forward pass reads


class ZImageBackbone(ImageBackbone):
    """Denoises latents [1, 16, h, w] of any size. The network's time runs from noise (0) to clean (1), ours back."""

    # The padding of image tokens is read unless their number is a multiple of 32, as at 1024x1024.
    traits = NetworkTraits(
        lora_targets=(
            *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.w{i}" for i in (1, 2, 3)),
        ),
        unused_parameters=("x_pad_token", "cap_pad_token"),
    )

    def __init__(self, spec: ZImageSpec, placement: Placement) -> None:
        from diffusers import AutoencoderKL, ZImageTransformer2DModel

        components = spec.components(placement)
        self.net: Any = components.load_transformer(ZImageTransformer2DModel, spec.transformer, to_diffusers_keys)
        self.autoencoder = components.load_vae("vae", AutoencoderKL, gradient_checkpointing=spec.checkpoint_decoder)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all inputs need the dtype of the weights
        prompt_embeds, lengths = cond.tensors["prompt_embeds"].to(dtype), cond.tensors.get("lengths")
        counts = [prompt_embeds.shape[1]] * len(x) if lengths is None else lengths.tolist()
        clean_minus_noise: list[Tensor] = self.net(
            list(x.transpose(1, 2).to(dtype).unbind()),  # of [16, 1, h, w]
            1 - t,
            [tokens[:count] for tokens, count in zip(prompt_embeds, counts, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(clean_minus_noise).transpose(1, 2)


def to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as the authors and ComfyUI do."""
    return rename_and_concat(tensors, KEY_RULES)


@dataclass(frozen=True)
class ZImageSpec(ImageSpec):
    """Z-Image: a flow with a fixed timestep shift, 6 for the base model and 3 for Turbo, which takes 8 steps."""

    weights: str = BASE.hub  # hub id or folder in diffusers' layout: base, Turbo or a fine-tuned version
    transformer: str | None = None  # safetensors file with other weights, with diffusers' or the authors' keys
    height: Side = 1024
    width: Side = 1024
    max_text_tokens: Annotated[int, Field(ge=1, le=1024)] = 512  # maximum sequence length of prompts with template
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    latent_channels = 16
    published: ClassVar[PublishedModel] = Z_IMAGE
    backbone_class = ZImageBackbone
    # ComfyUI has the names of diffusers' layers for adapters with this prefix only.
    layout: ClassVar[PipelineLayout] = PipelineLayout("ZImagePipeline", "transformer", "lycoris", to_original)

    def load_text_encoders(self, components: PipelineComponents) -> LanguageModelEncoder:
        from transformers import Qwen3Model

        encoder = load_decoder(components, Qwen3Model, self.max_text_tokens)
        options = {"add_generation_prompt": True, "enable_thinking": True}
        plain = components.path is None
        return LanguageModelEncoder(encoder, [-2], template_options=options, plain=plain, lengths=True)
