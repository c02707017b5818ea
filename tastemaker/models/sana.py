"""Sana and Sana-Sprint (NVIDIA 2024, 2025): transformers with linear attention on latents of 32x32 pixels.

Sprint is distilled to one to four steps by continuous-time consistency: its guidance is an input of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.distributions import expand_dims_like
from ..core.model_spec import PipelineLayout, Tensors
from ..core.types import Condition, Metadata, Placement, Prompts
from ..core.weights import NetworkTraits
from ..processes.paths import trigflow_angle
from .checkpoint_keys import KeyRules, TensorShapes, rename_and_concat, split_and_rename
from .component_configs import ComponentConfigs
from .image_backbone import ImageBackbone, VaeAdapter, cast_to_network_dtype
from .pipeline_components import ATTENTION_LAYERS, ImageSpec, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .shared_prompts import PROMPT_ID, SharedPromptLayers, prompt_ids
from .text_encoders import TextEncoders

Side = Annotated[int, Field(ge=32, le=4096, multiple_of=32)]
LATENT_CHANNELS, PIXELS_PER_LATENT = 32, 32
NEGATIVE_MARK = "negative prompt\n"  # negative prompts are encoded without the instruction
INSTRUCTION = (  # "complex human instruction" of the paper, section 3.1
    "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for image "
    "generation. Evaluate the level of detail in the user prompt:\n"
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
    "relationships to create vivid and concrete scenes.\n"
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.\n"
    "Here are examples of how to transform or refine prompts:\n"
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
    "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.\n"
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
    "skyscrapers.\n"
    "Please generate only the enhanced description for the prompt below and avoid including any additional commentary "
    "or evaluations:\n"
    "User Prompt: "
)
DC_AE: dict[str, Any] = {
    "latent_channels": LATENT_CHANNELS,
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "scaling_factor": 0.41407,
}
SANA_1600M: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 70,
        "attention_head_dim": 32,
        "num_layers": 20,
        "num_cross_attention_heads": 20,
        "cross_attention_head_dim": 112,
        "cross_attention_dim": 2240,
        "caption_channels": 2304,
        "mlp_ratio": 2.5,
        "sample_size": 32,
    },
    "vae": DC_AE,
    "text_encoder": {},  # Gemma 2 2B: the defaults of transformers
}
SPRINT_SETTINGS = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
SPRINT_1600M: ComponentConfigs = {
    **SANA_1600M,
    "transformer": {**SANA_1600M["transformer"], **SPRINT_SETTINGS},
}
SPRINT_600M: ComponentConfigs = {
    **SANA_1600M,
    "transformer": {
        **SPRINT_1600M["transformer"],
        "num_attention_heads": 36,
        "num_layers": 28,
        "num_cross_attention_heads": 16,
        "cross_attention_head_dim": 72,
        "cross_attention_dim": 1152,
    },
}
TINY_SANA: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 16,
        "sample_size": 32,
    },
    "vae": {
        **DC_AE,
        "attention_head_dim": 8,
        "encoder_block_out_channels": (32,) * 6,
        "decoder_block_out_channels": (32,) * 6,
        "encoder_layers_per_block": (1,) * 6,
        "decoder_layers_per_block": (1,) * 6,
    },
    "text_encoder": {
        "vocab_size": 120,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    },
}
TINY_SPRINT: ComponentConfigs = {**TINY_SANA, "transformer": {**TINY_SANA["transformer"], **SPRINT_SETTINGS}}
LICENSE = "NVIDIA License (NSCL v2-custom); Gemma Terms of Use"
SOURCE = WeightsSource("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", size="about 9 GB", license=LICENSE)
SPRINT_SOURCE = WeightsSource("Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers", "", "about 9 GB", LICENSE)
SPRINT_600M_SOURCE = WeightsSource("Efficient-Large-Model/Sana_Sprint_0.6B_1024px_diffusers", "", "about 7 GB", LICENSE)
SANA = PublishedModel("sana", (SOURCE,), TINY_SANA, {SOURCE.hub: SANA_1600M})
SPRINT = PublishedModel(
    "sana",  # it has the text encoder of Sana
    (SPRINT_SOURCE, SPRINT_600M_SOURCE),
    TINY_SPRINT,
    {SPRINT_SOURCE.hub: SPRINT_1600M, SPRINT_600M_SOURCE.hub: SPRINT_600M},
    few_steps={SPRINT_SOURCE.hub: 2, SPRINT_600M_SOURCE.hub: 2},
)
BLOCK = r"transformer_blocks\.(\d+)\."
KEY_RULES: KeyRules = (
    (r"patch_embed\.proj\.", "x_embedder.proj."),
    *((rf"caption_projection\.linear_{i}\.", f"y_embedder.y_proj.fc{i}.") for i in (1, 2)),
    (r"caption_norm\.", "attention_y_norm."),
    *((rf"time_embed\.(?:emb\.)?timestep_embedder\.linear_{i}\.", f"t_embedder.mlp.{2 * i - 2}.") for i in (1, 2)),
    *((rf"time_embed\.guidance_embedder\.linear_{i}\.", f"cfg_embedder.mlp.{2 * i - 2}.") for i in (1, 2)),
    (r"time_embed\.linear\.", "t_block.1."),
    *((rf"{BLOCK}attn1\.to_{x}\.", r"blocks.\1.attn.qkv.") for x in "qkv"),
    *((rf"{BLOCK}attn1\.norm_{x}\.", rf"blocks.\1.attn.{x}_norm.") for x in "qk"),
    (rf"{BLOCK}attn1\.to_out\.0\.", r"blocks.\1.attn.proj."),
    (rf"{BLOCK}attn2\.to_q\.", r"blocks.\1.cross_attn.q_linear."),
    *((rf"{BLOCK}attn2\.to_{x}\.", r"blocks.\1.cross_attn.kv_linear.") for x in "kv"),
    *((rf"{BLOCK}attn2\.norm_{x}\.", rf"blocks.\1.cross_attn.{x}_norm.") for x in "qk"),
    (rf"{BLOCK}attn2\.to_out\.0\.", r"blocks.\1.cross_attn.proj."),
    (rf"{BLOCK}ff\.conv_inverted\.", r"blocks.\1.mlp.inverted_conv.conv."),
    (rf"{BLOCK}ff\.conv_depth\.", r"blocks.\1.mlp.depth_conv.conv."),
    (rf"{BLOCK}ff\.conv_point\.", r"blocks.\1.mlp.point_conv.conv."),
    (rf"{BLOCK}scale_shift_table", r"blocks.\1.scale_shift_table"),
    (r"proj_out\.", "final_layer.linear."),
    (r"scale_shift_table", "final_layer.scale_shift_table"),
)
PROMPT_LAYERS = ("caption_projection", "*.attn2.to_k", "*.attn2.to_v")  # whose input depends on the prompt only
# In the authors' files, but not in the network of diffusers: tables that are not read, and the head of a training loss.
UNREAD_KEYS = ("y_embedder.y_embedding", "pos_embed", "logvar_linear.")


def sana_to_original(tensors: Tensors, config: Any) -> Tensors:
    """Rename a transformer's tensors as Sana's authors do."""
    return rename_and_concat(tensors, KEY_RULES)


@dataclass(frozen=True)
class DeterministicLatents:
    """The latents of an autoencoder without noise, with the methods of diffusers' posterior."""

    latents: Tensor

    @property
    def latent_dist(self) -> Self:
        return self

    def mode(self) -> Tensor:
        return self.latents


class DeepCompressionVae(VaeAdapter):
    """DC-AE with gradient checkpointing of its decoder, block by block: diffusers' network has none."""

    def encode(self, pixels: Tensor) -> DeterministicLatents:
        return DeterministicLatents(self.net.encode(pixels).latent)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Decode latents [N, C, h, w]; in a backward pass, one block at a time keeps its activations."""
        if not (self.checkpoint_decoder and torch.is_grad_enabled()):
            return (self.net.decode(latents, return_dict=False)[0],)
        decoder = self.net.decoder
        repeated = latents.repeat_interleave(decoder.in_shortcut_repeats, 1) if decoder.in_shortcut else 0
        x = decoder.conv_in(latents) + repeated
        x = self.run_stages(x, [block for stage in reversed(decoder.up_blocks) for block in stage])
        x = decoder.conv_act(decoder.norm_out(x.movedim(1, -1)).movedim(-1, 1))
        return (decoder.conv_out(x),)


class SanaPromptEncoder(TextEncoders):
    """Gemma's prompt_embeds [B, max_text_tokens, D] of prompts behind the instruction; and attention_mask [B, L]."""

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from transformers import Gemma2Model

        # Small random encoders read bytes: the instruction alone would exceed any length.
        self.instruction, self.max_text_tokens = ("" if components.path is None else INSTRUCTION), max_text_tokens
        plain = components.load_text_encoder("text_encoder", Gemma2Model, "tokenizer", max_text_tokens)
        instruction_tokens = 2  # of none: those that every text has, which are not counted twice
        if components.path is not None:
            plain.tokenizer.padding_side = "right"
            instruction_tokens = len(plain.tokenizer.encode(INSTRUCTION))
        self.plain = plain
        self.text_encoder = replace(plain, max_length=instruction_tokens + max_text_tokens - 2)
        self.text_encoders = (self.text_encoder,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        negative = torch.tensor([prompt.startswith(NEGATIVE_MARK) for prompt in prompts])
        order, parts = torch.cat([negative.nonzero(), (~negative).nonzero()]).flatten().argsort(), []
        for mark in (True, False):
            texts = [prompt for prompt, marked in zip(prompts, negative.tolist(), strict=True) if marked == mark]
            if texts:
                parts.append(self._encode(texts, negative=mark))
        hidden, mask = (torch.cat(each)[order.to(each[0].device)] for each in zip(*parts, strict=True))
        return {"prompt_embeds": hidden, "attention_mask": mask}

    def _encode(self, prompts: list[str], *, negative: bool) -> tuple[Tensor, Tensor]:
        """Encode prompts; negative ones without the instruction, of which otherwise the first token stays."""
        texts = [prompt.removeprefix(NEGATIVE_MARK).lower().strip() for prompt in prompts]
        encoder = self.plain if negative else self.text_encoder
        texts = texts if negative else [self.instruction + text for text in texts]
        hidden: Tensor = encoder(texts, use_attention_mask=True).last_hidden_state
        mask = encoder.tokenize(texts)["attention_mask"].bool()
        kept = [0, *range(hidden.shape[1] - self.max_text_tokens + 1, hidden.shape[1])]
        return hidden[:, kept], mask[:, kept]


class SanaBackbone(ImageBackbone):
    """Denoises latents [1, 32, h, w] of any size; the transformer predicts the velocity noise - clean."""

    traits = NetworkTraits(lora_targets=ATTENTION_LAYERS)

    def __init__(self, spec: SanaSpec, placement: Placement) -> None:
        from diffusers import AutoencoderDC, SanaTransformer2DModel

        components = spec.components(placement)
        self.net = components.load_transformer(SanaTransformer2DModel, spec.transformer, to_diffusers_keys)
        vae = components.load_vae("vae", AutoencoderDC, gradient_checkpointing=False)
        net = DeepCompressionVae(vae.net, spec.checkpoint_decoder)
        self.autoencoder = replace(vae, net=net, downsample_factor=PIXELS_PER_LATENT)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.config = components.config("transformer")
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)
        self.shared_prompts = SharedPromptLayers(PROMPT_LAYERS) if spec.share_prompts else None

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return {}  # an instruction of hundreds of tokens would be encoded again at every call

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return self._embed(prompts, metadata, negative=False)

    def embed_negative(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return self._embed(prompts, metadata, negative=True)

    def _embed(self, prompts: Prompts, metadata: Sequence[Metadata], *, negative: bool) -> Condition:
        keys = self.prompt_encoder.keys(prompts, metadata, negative=negative)
        ids = {PROMPT_ID: prompt_ids(keys)} if self.shared_prompts else {}
        return Condition(tuple(prompts), {**self.prompt_encoder(keys), **ids}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self.call_network(x[:, 0], 1000 * float(self.config.get("timestep_scale", 1.0)) * t, cond, None)[:, None]

    def call_network(
        self, latents: Tensor, timestep: Tensor, cond: Condition, guidance: Tensor | None = None
    ) -> Tensor:
        """Return the network's output for latents [B, 32, h, w] at the timesteps of its embedding [B]."""
        latents, prompt_embeds = cast_to_network_dtype(self.net, latents, cond.tensors["prompt_embeds"])
        shared = self.shared_prompts
        with shared.calls(self.net, cond.tensors) if shared else nullcontext():
            output: Tensor = self.net(
                hidden_states=latents,
                encoder_hidden_states=prompt_embeds,
                encoder_attention_mask=cond.tensors["attention_mask"],
                timestep=timestep,
                guidance=guidance,
                return_dict=False,
            )[0]
        return output


def to_diffusers_keys(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Return the transformer's tensors with diffusers' keys, whichever layout the file has."""
    if not any(key.startswith("blocks.") for key in tensors):
        return tensors
    read = {key: x for key, x in tensors.items() if not key.startswith(UNREAD_KEYS)}
    return split_and_rename(read, shapes, KEY_RULES)


class SanaSprintBackbone(SanaBackbone):
    """Predicts the velocity of TrigFlow, cos(angle) noise - sin(angle) clean, from that of Sana's flow."""

    def __init__(self, spec: SanaSprintSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.guidance_scale = spec.guidance_scale
        self.guidance_factor = float(self.config.get("guidance_embeds_scale", 0.1))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        angle = trigflow_angle(t)
        level = angle.sin() / (angle.cos() + angle.sin())  # of the flow with the same ratio of noise to signal
        s, latents = expand_dims_like(level, x[:, 0]), x[:, 0]
        norm = (s**2 + (1 - s) ** 2).sqrt()
        guidance = torch.full_like(t, self.guidance_scale * self.guidance_factor)
        output = self.call_network(latents * norm, level, cond, guidance).float()
        velocity = ((1 - 2 * s) * latents * norm + (1 - 2 * s + 2 * s**2) * output) / norm
        return velocity[:, None]

    def with_guidance_scale(self, scale: float | None) -> Self:
        other = copy(self)
        other.guidance_scale = self.guidance_scale if scale is None else scale
        return other


@dataclass(frozen=True)
class SanaSpec(ImageSpec):
    """Sana: a flow with timestep shift 3 on latents of 32x32 pixels, conditioned by Gemma 2."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network, with diffusers' or the authors' keys
    height: Side = 1024
    width: Side = 1024
    max_text_tokens: Annotated[int, Field(ge=2, le=1024)] = 300  # of Gemma, without the instruction
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass, block by block
    share_prompts: bool = False  # rollouts compute keys and values of prompts once for adjacent samples of a prompt
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    latent_channels, pixels_per_latent = LATENT_CHANNELS, PIXELS_PER_LATENT
    backbone_class: ClassVar[Callable[..., SanaBackbone]] = SanaBackbone
    tiny_side = 64
    negative_mark: ClassVar[str] = NEGATIVE_MARK
    published: ClassVar[PublishedModel] = SANA
    layout: ClassVar[PipelineLayout] = PipelineLayout("SanaPipeline", "transformer", "", sana_to_original)

    def load_text_encoders(self, components: PipelineComponents) -> SanaPromptEncoder:
        return SanaPromptEncoder(components, self.max_text_tokens)


@dataclass(frozen=True)
class SanaSprintSpec(SanaSpec):
    """Sana-Sprint: Sana distilled to one to four steps of consistency sampling on the path trigflow."""

    weights: str = SPRINT_SOURCE.hub  # hub id, or folder in diffusers' layout
    guidance_scale: float = 4.5  # distilled guidance, an input of the network
    backbone_class = SanaSprintBackbone
    published: ClassVar[PublishedModel] = SPRINT
    layout: ClassVar[PipelineLayout] = PipelineLayout("SanaSprintPipeline", "transformer", "", sana_to_original)
