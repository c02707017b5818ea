"""HunyuanVideo (Tencent 2024): a flow-matching transformer of clips that reads prompts by Llama and CLIP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.policy import Process
from ..core.types import Placement
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .pipeline_components import TINY, PipelineComponents
from .pipeline_layout import PipelineLayout, reject_unknown_names
from .pretrained import WeightsSource
from .releases import PublishedModel
from .text_encoders import CachedTextEncoder
from .video_backbone import (
    ConditioningTensors,
    FrozenVideoVae,
    TextTokenCount,
    VideoBackbone,
    VideoCompression,
    VideoSide,
    check_video_size,
)
from .video_decoding import hunyuan_decoder

SOURCE = WeightsSource("hunyuanvideo-community/HunyuanVideo", size="42 GB", licence="Tencent Hunyuan Community License")
COMPRESSION = VideoCompression(channels=16, factor=8, every=4)
TEMPLATE_PREFIX_TOKENS, TEMPLATE_SUFFIX_TOKENS = (
    95,
    -3,
)  # tokens of the template before the prompt, and the layer of Llama that is asked
CLIP_MAX_TOKENS = 77
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 16,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    },
    "vae": {"block_out_channels": (4, 4, 4, 4), "layers_per_block": 1, "norm_num_groups": 2},
    "text_encoder": {**TEXT, "vocab_size": 99, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0},
    "text_encoder_2": {**TEXT, "vocab_size": 600, "num_hidden_layers": 1, "bos_token_id": 0, "eos_token_id": 2},
}
HUNYUAN = PublishedModel((SOURCE,), SMALL)


class HunyuanPromptEncoder:
    """What Llama says of every token of a prompt and which of them are no filling, and CLIP of the whole."""

    def __init__(self, kit: PipelineComponents, length: int) -> None:
        from transformers import CLIPTextModel, LlamaModel

        # Small random encoders spell, and of the template's many letters there would be no end.
        self.template, self.before = ("{}", 0) if kit.path is None else (TEMPLATE, TEMPLATE_PREFIX_TOKENS)
        self.llama = kit.reader("text_encoder", LlamaModel, "tokenizer", length + self.before)
        self.clip = kit.reader("text_encoder_2", CLIPTextModel, "tokenizer_2", CLIP_MAX_TOKENS)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        asked = [self.template.format(prompt) for prompt in prompts]
        return {
            "words": self.llama(asked, masked=True, layers=True).hidden_states[TEMPLATE_SUFFIX_TOKENS][
                :, self.before :
            ],
            "seen": self.llama.tokens(asked)["attention_mask"].bool()[:, self.before :],
            "pooled": self.clip(prompts).pooler_output,
        }


def predict_velocity(guidance: float | None, net: nn.Module, x: Tensor, t: Tensor, told: ConditioningTensors) -> Tensor:
    """The velocity noise - clean."""
    out: Tensor = net(
        hidden_states=x.transpose(1, 2),
        timestep=1000 * t,
        encoder_hidden_states=told["words"],
        encoder_attention_mask=told["seen"].to(x.dtype),
        pooled_projections=told["pooled"],
        guidance=None if guidance is None else torch.full_like(t, 1000 * guidance),
        return_dict=False,
    )[0]
    return out.transpose(1, 2)


@dataclass(frozen=True)
class HunyuanVideo:
    """HunyuanVideo, from text: a flow whose levels are shifted by 7, with guidance told to the network."""

    weights: str = SOURCE.hub  # a hub id, or a folder in diffusers' layout
    height: VideoSide = 720
    width: VideoSide = 1280
    frames: int = 129  # one more than a multiple of 4; 24 a second
    guidance: float = 6.0  # written into the network
    words: TextTokenCount = 256  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("HunyuanVideoPipeline", "transformer", "", reject_unknown_names)

    def __post_init__(self) -> None:
        check_video_size(self.frames, self.height, self.width, COMPRESSION.every, 2 * COMPRESSION.factor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return COMPRESSION.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return HUNYUAN.sources(self.weights)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = HUNYUAN.kit(self.weights, placement, self.seed)
        settings, parts = {"model": "hunyuanvideo", "words": self.words}, ("text_encoder", "text_encoder_2")
        return build_cached_text_encoder(
            kit, lambda: HunyuanPromptEncoder(kit, self.words), parts, settings, self.embeddings
        )

    def load(self, placement: Placement) -> VideoBackbone:
        from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

        kit = HUNYUAN.kit(self.weights, placement, self.seed)
        net: Any = kit.trained("transformer", HunyuanVideoTransformer3DModel)
        vae = kit.frozen("vae", AutoencoderKLHunyuanVideo, recompute=self.recompute)
        codec = FrozenVideoVae.of(vae, hunyuan_decoder(vae))
        asked = partial(predict_velocity, self.guidance if net.config.guidance_embeds else None)
        return VideoBackbone(net, asked, codec, self.texts(placement), self)

    def tiny(self) -> HunyuanVideo:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=5, words=words, embeddings=None)
