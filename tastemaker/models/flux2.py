"""FLUX.2 dev and klein (Black Forest Labs 2025): flow transformers that read a language model and source images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from ..core.model_spec import PipelineLayout, Tensors
from ..core.safe_files import read_json_object
from ..core.types import Condition, Metadata, Placement, Prompts
from ..core.weights import NetworkTraits
from .checkpoint_keys import KeyRules, TensorShapes, rename_and_concat, split_and_rename, swap_scale_shift
from .component_configs import MISTRAL_SMALL, QWEN3_4B, QWEN3_8B, TINY_QWEN3, TINY_VAE, VAE, ComponentConfigs
from .image_backbone import (
    DOWNSAMPLE_FACTOR,
    FrozenVae,
    ImageBackbone,
    VaeAdapter,
    condition_image_key,
    read_condition_image,
)
from .language_encoders import LanguageModelEncoder, Message, load_decoder, user_message
from .latent_packing import patchify, unpatchify
from .pipeline_components import JOINT_ATTENTION_LAYERS, RANDOM, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource, find_cached

Side = Annotated[int, Field(ge=16, le=4096, multiple_of=16)]
LATENT_CHANNELS = 128  # 2x2 latents of 32 channels, each of 8x8 pixels
REFERENCE_TIME_STEP = 10  # between the sample and the first source image, and between source images
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
KLEIN: dict[str, Any] = {"guidance_embeds": False, "axes_dims_rope": (32, 32, 32, 32)}
KLEIN_4B = {**KLEIN, "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
KLEIN_9B = {**KLEIN, "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
FLUX2_VAE: dict[str, Any] = {**VAE, "latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True}
FLUX2_KLEIN_4B: ComponentConfigs = {"transformer": KLEIN_4B, "vae": FLUX2_VAE, "text_encoder": QWEN3_4B}
FLUX2_KLEIN_9B: ComponentConfigs = {"transformer": KLEIN_9B, "vae": FLUX2_VAE, "text_encoder": QWEN3_8B}
FLUX2_DEV: ComponentConfigs = {
    "transformer": {**KLEIN, "guidance_embeds": True, "joint_attention_dim": 15360},  # else diffusers' defaults
    "vae": FLUX2_VAE,
    "text_encoder": {"text_config": MISTRAL_SMALL},
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 96,
        "timestep_guidance_channels": 32,
        "guidance_embeds": False,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "vae": {**TINY_VAE, "latent_channels": 32, "use_quant_conv": True, "use_post_quant_conv": True},
    "text_encoder": TINY_QWEN3,
}
NON_COMMERCIAL = "FLUX Non-Commercial License"
DEV = WeightsSource("black-forest-labs/FLUX.2-dev", size="113 GB", license=NON_COMMERCIAL, gated=True)
SMALL = tuple(
    WeightsSource(f"black-forest-labs/FLUX.2-klein-{name}", size="16 GB", license="Apache-2.0")
    for name in ("4B", "base-4B")
)
LARGE = tuple(
    WeightsSource(f"black-forest-labs/FLUX.2-klein-{name}", size="35 GB", license=NON_COMMERCIAL, gated=True)
    for name in ("9B", "base-9B")
)
FLUX2 = PublishedModel(
    "flux2",
    (*SMALL, *LARGE, DEV),
    TINY_CONFIGS,
    {
        DEV.hub: FLUX2_DEV,
        **{source.hub: FLUX2_KLEIN_4B for source in SMALL},
        **{source.hub: FLUX2_KLEIN_9B for source in LARGE},
    },
    few_steps={SMALL[0].hub: 4, LARGE[0].hub: 4},
)
DOUBLE, SINGLE = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
STREAMS = (("", "img"), ("_context", "txt"))
KEY_RULES: KeyRules = (
    *(
        (rf"time_guidance_embed\.{ours}_embedder\.{a}\.", f"{theirs}_in.{b}.")
        for ours, theirs in (("timestep", "time"), ("guidance", "guidance"))
        for a, b in (("linear_1", "in_layer"), ("linear_2", "out_layer"))
    ),
    (r"x_embedder\.", "img_in."),
    (r"context_embedder\.", "txt_in."),
    (r"(double_stream_modulation_(?:img|txt)|single_stream_modulation)\.linear\.", r"\1.lin."),
    *((rf"{DOUBLE}attn\.to_{x}\.", r"double_blocks.\1.img_attn.qkv.") for x in "qkv"),
    *((rf"{DOUBLE}attn\.add_{x}_proj\.", r"double_blocks.\1.txt_attn.qkv.") for x in "qkv"),
    *(
        (rf"{DOUBLE}attn\.norm_{ours}{x}\.weight", rf"double_blocks.\1.{theirs}_attn.norm.{name}_norm.scale")
        for ours, theirs in (("", "img"), ("added_", "txt"))
        for x, name in (("q", "query"), ("k", "key"))
    ),
    (rf"{DOUBLE}attn\.to_out\.0\.", r"double_blocks.\1.img_attn.proj."),
    (rf"{DOUBLE}attn\.to_add_out\.", r"double_blocks.\1.txt_attn.proj."),
    *((rf"{DOUBLE}ff{ours}\.linear_in\.", rf"double_blocks.\1.{theirs}_mlp.0.") for ours, theirs in STREAMS),
    *((rf"{DOUBLE}ff{ours}\.linear_out\.", rf"double_blocks.\1.{theirs}_mlp.2.") for ours, theirs in STREAMS),
    (rf"{SINGLE}attn\.to_qkv_mlp_proj\.", r"single_blocks.\1.linear1."),
    (rf"{SINGLE}attn\.to_out\.", r"single_blocks.\1.linear2."),
    (rf"{SINGLE}attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (rf"{SINGLE}attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    (r"proj_out\.", "final_layer.linear."),
    (r"norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
)


class PatchVae(VaeAdapter):
    """An autoencoder whose latents are stacked 2x2 in channels, [N, 128, h, w] of 16x16 pixels each."""

    def encode(self, pixels: Tensor) -> Any:
        posterior = self.net.encode(pixels).latent_dist
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: patchify(posterior.mode())))

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        pixels: Tensor = self.net.decode(unpatchify(latents), return_dict=False)[0]
        return (pixels,)


def load_patch_vae(components: PipelineComponents, checkpoint_decoder: bool) -> FrozenVae:
    """Load the autoencoder; its batch normalization shifts and scales the stacked latents."""
    from diffusers import AutoencoderKLFlux2

    net = components.load_frozen("vae", AutoencoderKLFlux2, gradient_checkpointing=checkpoint_decoder)
    shift, variance = (x.float().view(-1, 1, 1) for x in (net.bn.running_mean, net.bn.running_var))
    scale = (variance + net.config.batch_norm_eps).rsqrt()
    return FrozenVae(PatchVae(net), shift, scale, downsample_factor=2 * DOWNSAMPLE_FACTOR)


def position_ids(height: int, width: int, time: int, device: torch.device) -> Tensor:
    """Return time, row, column and 0 of every latent: [1, height * width, 4]."""
    rows, columns = torch.meshgrid(*(torch.arange(n, device=device) for n in (height, width)), indexing="ij")
    zero = torch.zeros_like(rows)
    return torch.stack([zero + time, rows, columns, zero], -1).view(1, -1, 4).float()


class Flux2Backbone(ImageBackbone):
    """Denoises latents [1, 128, h, w] of any size, beside those of the images in a prompt's metadata `image`, if any.

    The transformer predicts the velocity noise - clean.
    """

    traits = NetworkTraits(
        lora_targets=(
            *JOINT_ATTENTION_LAYERS,
            *(f"{stream}.{layer}" for stream in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
            "to_qkv_mlp_proj",
            "single_transformer_blocks.*.attn.to_out",
        )
    )

    def __init__(self, spec: Flux2Spec, placement: Placement) -> None:
        from diffusers import Flux2Transformer2DModel

        components = spec.components(placement)
        self.net: Any = components.load_transformer(Flux2Transformer2DModel, spec.transformer, to_diffusers_keys)
        self.autoencoder = load_patch_vae(components, spec.checkpoint_decoder)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.guidance_embeds = bool(components.config("transformer").get("guidance_embeds", True))
        self.guidance_scale, self.device = spec.guidance_scale, placement.device
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        cond = super().embed(prompts, metadata)
        sources = [source_images(each.get("image")) for each in metadata]
        if not any(sources):
            return cond
        if len({len(images) for images in sources}) > 1:
            counts = sorted({len(images) for images in sources})
            raise ValueError(
                f"the prompts of a batch must have the same number of images in their metadata `image`, got {counts} "
                f"(such as '{prompts[0]:.60}'); split the prompts by the number of images [TM2400]"
            )
        encoded: dict[int | str, Tensor] = {}  # each image of a batch is encoded once
        for image in (image for images in sources for image in images):
            if (key := condition_image_key(image)) not in encoded:
                encoded[key] = self._encode_reference(image)
        rows = [torch.stack([encoded[condition_image_key(image)] for image in images]) for images in sources]
        return replace(cond, tensors={**cond.tensors, "reference": torch.stack(rows)})

    def _encode_reference(self, image: object) -> Tensor:
        """Encode an image to latents [128, h, w] of the sample's size."""
        pixels = read_condition_image(image, *self.pixels[2:])
        if pixels is None:
            raise ValueError(
                f"metadata `image` must be a path, pixels [F, 3, H, W] or a list of these, got "
                f"{type(image).__name__}; correct the data [TM2401]"
            )
        return self.encode(pixels.to(self.device)[None])[0, 0]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dtype = next(self.net.parameters()).dtype  # without autocast, all inputs need the dtype of the weights
        latents = x[:, :1]
        reference = cond.tensors.get("reference")  # [B, images, 128, h, w]
        if reference is not None:
            latents = torch.cat([latents, reference.to(x.dtype)], 1)
        tokens = latents.transpose(1, 2).flatten(2).transpose(1, 2)  # [B, (1 + images) h w, 128]
        # With autocast, latents stay in float32: the network casts the timestep to the dtype of its latents.
        autocast = torch.is_autocast_enabled(x.device.type)
        prompt_embeds = cond.tensors["prompt_embeds"].to(dtype)
        times = range(0, REFERENCE_TIME_STEP * latents.shape[1], REFERENCE_TIME_STEP)
        text_ids = torch.zeros(1, prompt_embeds.shape[1], 4, device=x.device)
        text_ids[..., 3] = torch.arange(prompt_embeds.shape[1], device=x.device)
        velocity: Tensor = self.net(
            hidden_states=tokens if autocast else tokens.to(dtype),
            timestep=t,
            guidance=torch.full_like(t, self.guidance_scale) if self.guidance_embeds else None,
            encoder_hidden_states=prompt_embeds,
            txt_ids=text_ids,
            img_ids=torch.cat([position_ids(x.shape[3], x.shape[4], time, x.device) for time in times], 1),
            return_dict=False,
        )[0]
        return velocity[:, : x.shape[3] * x.shape[4]].transpose(1, 2).reshape(x.shape)

    def with_guidance_scale(self, scale: float | None) -> Self | None:
        if not self.guidance_embeds:
            return None
        other = copy(self)
        other.guidance_scale = self.guidance_scale if scale is None else scale
        return other


def reads_guidance(weights: str) -> bool:
    """Whether the network of a hub id or folder has distilled guidance as an input: dev and versions of it."""
    if any(weights in (source.hub, f"{RANDOM}:{source.hub}") for source in FLUX2.releases):
        return weights.endswith(DEV.hub)
    folder = Path(weights).expanduser()
    path = folder if folder.is_dir() else find_cached(WeightsSource(weights))
    try:
        config = None if path is None else read_json_object(path / "transformer" / "config.json")
    except (OSError, ValueError):
        config = None
    return config is not None and bool(config.get("guidance_embeds", True))


def source_images(image: object) -> tuple[object, ...]:
    """Return the images of a prompt's metadata `image`: none, one, or several in a list."""
    if image is None:
        return ()
    return tuple(image) if isinstance(image, list | tuple) else (image,)


def to_diffusers_keys(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Return the transformer's tensors with diffusers' keys, whichever layout the file has."""
    if "final_layer.adaLN_modulation.1.weight" not in tensors:
        return tensors
    renamed = split_and_rename(tensors, shapes, KEY_RULES)
    return {key: swap_scale_shift(x) if key.startswith("norm_out.linear.") else x for key, x in renamed.items()}


def to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Rename a transformer's tensors as Black Forest Labs do."""
    swapped = {key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith("norm_out.linear.")}
    return rename_and_concat({**tensors, **swapped}, KEY_RULES)


def system_and_user_message(prompt: str) -> list[Message]:
    """Return the conversation that dev reads."""
    turns = (("system", SYSTEM_MESSAGE), ("user", prompt.replace("[IMG]", "")))
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]


@dataclass(frozen=True)
class Flux2Spec(ImageSpec):
    """FLUX.2: klein (4 or 9 billion parameters, four steps, or base) and dev (32 billion); edits source images too.

    The images in a prompt's metadata `image` are resized to the size of the samples.
    """

    weights: str = SMALL[0].hub  # hub id or folder in diffusers' layout: klein, klein-base, dev or a fine-tuned version
    transformer: str | None = None  # safetensors file with other weights, with diffusers' or the authors' keys
    height: Side = 1024
    width: Side = 1024
    guidance_scale: float = 4.0  # distilled guidance, an input of dev's network; klein has none
    max_text_tokens: Annotated[int, Field(ge=1, le=512)] = 512  # the language model's sequence length with template
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass: a seventh of its memory
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    latent_channels, pixels_per_latent = LATENT_CHANNELS, 2 * DOWNSAMPLE_FACTOR
    backbone_class = Flux2Backbone
    reads_image: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = FLUX2

    @property
    def layout(self) -> PipelineLayout:
        pipeline = "Flux2Pipeline" if reads_guidance(self.weights) else "Flux2KleinPipeline"
        return PipelineLayout(pipeline, "transformer", "lora_transformer", to_original)

    def load_text_encoders(self, components: PipelineComponents) -> LanguageModelEncoder:
        from transformers import Mistral3ForConditionalGeneration, Qwen3Model

        is_dev = "text_config" in components.config("text_encoder")
        network_class: Any = Mistral3ForConditionalGeneration if is_dev else Qwen3Model
        encoder = load_decoder(components, network_class, self.max_text_tokens)
        quarters = [len(encoder.net.layers) * k // 4 for k in (1, 2, 3)]  # 9, 18, 27 of Qwen3; 10, 20, 30 of Mistral
        return LanguageModelEncoder(
            encoder,
            quarters,
            system_and_user_message if is_dev else user_message,
            template_options={} if is_dev else {"add_generation_prompt": True, "enable_thinking": False},
            plain=components.path is None,
        )
