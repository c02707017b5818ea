"""LTX-2 (Lightricks 2026): a flow-matching transformer that denoises a video together with its sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.model_spec import PipelineLayout, Tensors
from ..core.types import Placement
from .checkpoint_keys import TensorShapes
from .component_configs import ComponentConfigs
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .sequential_offload import temporarily_on_device
from .text_encoders import TextEncoders, disable_autocast
from .video_backbone import (
    ConditioningTensors,
    TextTokenCount,
    TileFrames,
    TileSize,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    VideoTransformerSpec,
    latents_needed,
)
from .video_checkpoint_keys import LTX2_RULES, ltx2_to_original

COMPRESSION = VideoCompression(channels=128, spatial_ratio=32, temporal_ratio=8, patch_size=1)
AUDIO_LATENTS_PER_SECOND = 25  # 16 kHz, 160 samples per frame of the spectrogram, 4 frames per latent
AUDIO_CHANNELS = 128  # of a latent: 8 channels of 16 frequency bands
CONNECTORS = ("video_embeddings_connector.", "audio_embeddings_connector.")  # in single files; read from the folder
VAE_RATIOS = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
CONFIGS: ComponentConfigs = {
    "transformer": {"rope_type": "split"},  # the other settings are diffusers' defaults
    "vae": VAE_RATIOS,
    "connectors": {"rope_type": "split"},
    "text_encoder": {
        "text_config": {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
        }
    },
}
TINY_CONFIGS: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "cross_attention_dim": 24,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 2,
        "caption_channels": 16,
        "rope_double_precision": False,
        "rope_type": "split",
    },
    "vae": {
        **VAE_RATIOS,
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
    },
    "connectors": {
        "caption_channels": 16,
        "text_proj_in_factor": 3,
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": 8,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 8,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 8,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": 8,
        "rope_double_precision": False,
        "rope_type": "split",
    },
    "text_encoder": {
        "text_config": {
            "vocab_size": 99,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
        "mm_tokens_per_image": 4,
        "boi_token_index": 90,
        "eoi_token_index": 91,
        "image_token_index": 92,
    },
}
SOURCE = WeightsSource("Lightricks/LTX-2", size="70 GB", license="LTX-2 Community License")
LTX2 = PublishedModel("ltx2", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class Ltx2PromptEncoder(TextEncoders):
    """Gemma 3 with all its hidden states, and the connectors after it.

    prompt_embeds [B, L, D] for the video, audio_prompt_embeds [B, L, D] for the sound, attention_mask [B, L].
    """

    def __init__(self, components: PipelineComponents, max_text_tokens: int) -> None:
        from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
        from transformers import Gemma3ForConditionalGeneration

        self.gemma = components.load_text_encoder(
            "text_encoder", Gemma3ForConditionalGeneration, "tokenizer", max_text_tokens
        )
        self.padding_side = "right"
        if components.path is not None:  # small random encoders read bytes
            self.padding_side = self.gemma.tokenizer.padding_side = "left"
        self.connectors: Any = components.load_frozen("connectors", LTX2TextConnectors).to("cpu")
        self.text_encoders = (self.gemma,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [prompt.strip() for prompt in prompts]
        states = self.gemma(texts, use_attention_mask=True, output_hidden_states=True).hidden_states
        packed, mask = torch.stack(states, -1).flatten(2), self.gemma.tokenize(texts)["attention_mask"]
        with disable_autocast(packed), temporarily_on_device(self.connectors, self.gemma.device):
            dtype = next(self.connectors.parameters()).dtype
            video, audio, connected = self.connectors(packed.to(dtype), mask, padding_side=self.padding_side)
        return {"prompt_embeds": video, "audio_prompt_embeds": audio, "attention_mask": connected.bool()}


class Ltx2Backbone(VideoBackbone):
    """Predicts the velocity noise - clean of the tokens of a clip, and of its sound after them: [tokens, 128].

    The sound is sampled, because the network reads it, but it is neither decoded nor trained: it follows the ODE of the
    sampler, and log-probabilities and losses count the video only. Policy gradients therefore take the sound as given
    and ignore that it depends on the weights as well; gradients of rewards go through it. The sound of clips that
    are encoded, to train on them, is not known: it counts as zero, the mean of all sounds.
    """

    network_class, vae_class = "LTX2VideoTransformer3DModel", "AutoencoderKLLTX2Video"
    key_rules = LTX2_RULES
    spec: Ltx2Spec

    def __init__(self, spec: Ltx2Spec, placement: Placement) -> None:
        super().__init__(spec, placement)
        elements = torch.zeros(spec.shape, dtype=torch.bool, device=placement.device)
        elements[spec.video_tokens :] = True
        self.untrained_elements = elements
        self.traits = replace(self.traits, unused_parameters=unused_audio_layers(self.net))

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        (frames, _, height, width), tokens = self.spec.video_shape, self.spec.video_tokens
        mask = conditioning["attention_mask"]
        velocities: tuple[Tensor, Tensor] = self.net(
            hidden_states=x[:, :tokens],
            audio_hidden_states=x[:, tokens:],
            encoder_hidden_states=conditioning["prompt_embeds"],
            audio_encoder_hidden_states=conditioning["audio_prompt_embeds"],
            timestep=1000 * t,
            sigma=1000 * t,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.spec.fps,
            audio_num_frames=self.spec.audio_tokens,
            return_dict=False,
        )
        return torch.cat(velocities, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        tokens = super().encode(pixels).movedim(2, -1).flatten(1, 3)
        return torch.cat([tokens, tokens.new_zeros(len(tokens), self.spec.audio_tokens, AUDIO_CHANNELS)], 1)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        latents, channels, height, width = self.spec.video_shape
        video = x[:, : self.spec.video_tokens].view(len(x), latents, height, width, channels)
        return super().decode(video.movedim(-1, 2), frames)

    def to_diffusers_keys(self, tensors: Tensors, shapes: TensorShapes) -> Tensors:
        network = {key: x for key, x in tensors.items() if not key.startswith(CONNECTORS)}
        return super().to_diffusers_keys(network, shapes)

    @staticmethod
    def decode_frames(vae: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
        """Decode up to the last frame that is needed where the decoder is causal, and otherwise the whole clip."""
        if vae.config.decoder_causal:
            raw = raw[:, :, : latents_needed(frames, COMPRESSION.temporal_ratio)]
        timestep = raw.new_zeros(len(raw)) if vae.config.timestep_conditioning else None
        pixels: Tensor = vae.decode(raw, timestep, return_dict=False)[0]
        return pixels[:, :, list(frames)]


def unused_audio_layers(net: Any) -> tuple[str, ...]:
    """Return prefixes of the layers that no later layer of the video reads, so that its gradient does not get there."""
    last = f"transformer_blocks.{len(net.transformer_blocks) - 1}."
    layers = ("video_to_audio_attn.", "audio_ff.")
    return (*(last + layer for layer in layers), "audio_proj_out.", "audio_scale_shift_table")


@dataclass(frozen=True)
class Ltx2Spec(VideoTransformerSpec):
    """LTX-2, text to video with sound: a flow whose shift depends on the number of latents, and which ends at 0.1."""

    weights: str = SOURCE.hub  # hub id, or folder in diffusers' layout
    transformer: str | None = None  # file with other weights of the network, with diffusers' or the authors' keys
    height: VideoSide = 512
    width: VideoSide = 768
    frames: int = 121  # 8 n + 1
    fps: float = 24.0  # frames per second, an input of the network
    max_text_tokens: TextTokenCount = 1024  # sequence length of prompts, truncated or padded; a multiple of 128
    checkpoint_decoder: bool = True  # recompute the decoder in the backward pass
    decode_tile_size: TileSize | None = None  # pixels per side of tiles decoded one at a time; none: whole frames
    decode_tile_frames: TileFrames | None = None  # frames per tile decoded one at a time; none: whole clips
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    seed: int = 0  # of random weights
    supports_context_parallel: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = LTX2
    backbone_class = Ltx2Backbone
    tiny_side = 64  # the decoder's reflections need two latents per side
    compression = COMPRESSION
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "LTX2Pipeline", "transformer", "lora_unet", ltx2_to_original, comfyui_layer=str
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.fps <= 120:
            raise ValueError(f"'fps': expected 1 to 120 frames per second, got {self.fps}; correct 'fps' [TM2503]")
        if self.weights == SOURCE.hub and self.max_text_tokens % 128:
            raise ValueError(
                f"'max_text_tokens': LTX-2 fills the text up with 128 learned tokens at a time, got "
                f"{self.max_text_tokens}; set a multiple of 128, such as 1024 [TM2504]"
            )

    @property
    def video_tokens(self) -> int:
        frames, _, height, width = self.video_shape
        return frames * height * width

    @property
    def audio_tokens(self) -> int:
        return round(self.frames / self.fps * AUDIO_LATENTS_PER_SECOND)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.video_tokens + self.audio_tokens, COMPRESSION.channels

    @property
    def decode_tile_latents(self) -> int | None:
        return COMPRESSION.tile_latents(self.decode_tile_frames)

    def load_text_encoders(self, components: PipelineComponents) -> Ltx2PromptEncoder:
        return Ltx2PromptEncoder(components, self.max_text_tokens)
