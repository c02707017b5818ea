"""Wan 2.1 and 2.2 (Alibaba 2025): a flow-matching transformer of clips, or two of them that share the levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.policy import Process
from ..core.registry import ConfigError
from ..core.types import Placement
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .nets.noise_level_experts import NoiseLevelExperts
from .pipeline_components import TINY, PipelineComponents
from .pipeline_layout import PipelineLayout, reject_unknown_names
from .pretrained import WeightsSource
from .releases import PublishedModel
from .text_encoders import CachedTextEncoder
from .video_backbone import (
    SMALL_T5,
    ConditioningTensors,
    FrozenVideoVae,
    TextTokenCount,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    check_video_size,
    clean_prompt,
    encode_with_t5,
)
from .video_decoding import wan_decoder

SOURCES = (
    WeightsSource("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", size="29 GB", licence="Apache-2.0"),
    WeightsSource("Wan-AI/Wan2.1-T2V-14B-Diffusers", size="80 GB", licence="Apache-2.0"),
    WeightsSource("Wan-AI/Wan2.2-TI2V-5B-Diffusers", size="34 GB", licence="Apache-2.0"),
    WeightsSource("Wan-AI/Wan2.2-T2V-A14B-Diffusers", size="126 GB", licence="Apache-2.0"),
)
TEMPORAL_COMPRESSION = 4  # frames a latent, after the first
SMALL_NET = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "rope_max_seq_len": 32,
    "text_dim": 32,
    "freq_dim": 16,
    "ffn_dim": 32,
}
SMALL: dict[str, dict[str, Any]] = {
    "transformer": SMALL_NET,
    "transformer_2": SMALL_NET,
    "vae": {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "text_encoder": SMALL_T5,
}
WAN = PublishedModel(SOURCES, SMALL)
EXPERT_PREFIXES = (("transformer", "high."), ("transformer_2", "low."))  # of 2.2, as the pipeline and as we call them


class WanPromptEncoder:
    """What UMT5 says of every word of a prompt, and noughts after them."""

    def __init__(self, kit: PipelineComponents, length: int) -> None:
        from transformers import UMT5EncoderModel

        self.t5 = kit.reader("text_encoder", UMT5EncoderModel, "tokenizer", length)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        told = encode_with_t5(self.t5, [clean_prompt(prompt) for prompt in prompts], masked=True)
        return {"words": told["words"] * told["seen"][..., None]}


def predict_velocity(net: nn.Module, x: Tensor, t: Tensor, told: ConditioningTensors) -> Tensor:
    """The velocity noise - clean."""
    seen = x.transpose(1, 2)
    out: Tensor = net(hidden_states=seen, timestep=1000 * t, encoder_hidden_states=told["words"], return_dict=False)[0]
    return out.transpose(1, 2)


def build_network(kit: PipelineComponents, boundary: float | None) -> nn.Module:
    """The transformer, or both where there is a level they meet at."""
    from diffusers import WanTransformer3DModel

    if kit.large and boundary is not None:
        raise ConfigError("random weights of a published size are those of one transformer; leave model.boundary out")
    first = kit.trained("transformer", WanTransformer3DModel)
    two = kit.path is not None and (kit.path / "transformer_2").is_dir()
    if two and boundary is None:
        raise ConfigError(
            f"{kit.path} holds two transformers, expected the level they meet at; set model.boundary (0.875 for "
            "Wan 2.2 T2V-A14B)"
        )
    return (
        first
        if boundary is None
        else NoiseLevelExperts(first, kit.trained("transformer_2", WanTransformer3DModel), boundary)
    )


@dataclass(frozen=True)
class Wan:
    """Wan 2.1 or 2.2, from text: a flow whose levels are shifted by 3 at 480p and by 5 at 720p."""

    weights: str = SOURCES[0].hub  # a hub id, or a folder in diffusers' layout
    height: VideoSide = 480
    width: VideoSide = 832
    frames: int = 81  # one more than a multiple of 4; 16 a second
    boundary: float | None = None  # 2.2's level where its second transformer takes over: 0.875 for T2V-A14B
    channels: int = 16  # of latents; 48 for 2.2's TI2V-5B
    factor: int = 8  # pixels a side that one latent stands for; 16 for 2.2's TI2V-5B
    words: TextTokenCount = 512  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass, latent by latent
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess

    def __post_init__(self) -> None:
        check_video_size(self.frames, self.height, self.width, TEMPORAL_COMPRESSION, 2 * self.factor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return VideoCompression(self.channels, self.factor, TEMPORAL_COMPRESSION).shape(
            self.frames, self.height, self.width
        )

    @property
    def layout(self) -> PipelineLayout:
        return PipelineLayout(
            "WanPipeline",
            "transformer",
            "",
            reject_unknown_names,
            shared=() if self.boundary is None else EXPERT_PREFIXES,
        )

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return WAN.sources(self.weights)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit, settings = WAN.kit(self.weights, placement, self.seed), {"model": "wan", "words": self.words}
        return build_cached_text_encoder(
            kit, lambda: WanPromptEncoder(kit, self.words), ("text_encoder",), settings, self.embeddings
        )

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLWan

        kit = WAN.kit(self.weights, placement, self.seed)
        vae = kit.frozen("vae", AutoencoderKLWan)
        self._agrees(vae.config)
        codec = FrozenVideoVae.of(vae, wan_decoder(vae, self.recompute))
        return VideoBackbone(build_network(kit, self.boundary), predict_velocity, codec, self.texts(placement), self)

    def _agrees(self, told: Any) -> None:
        """Refuse an autoencoder of another of its sizes, before its latents meet a network that cannot read them."""
        found, wanted = (told.z_dim, told.scale_factor_spatial), (self.channels, self.factor)
        if found != wanted:
            raise ConfigError(
                f"model: the autoencoder of '{self.weights:.200}' has {found[0]} channels and factor {found[1]}, found "
                f"{wanted[0]} and {wanted[1]}; set model.channels={found[0]} and model.factor={found[1]}"
            )

    def tiny(self) -> Wan:
        small = replace(self, weights=TINY, height=32, width=32, frames=5, channels=16, factor=8)
        return replace(small, words=min(self.words, 16), embeddings=None)
