"""CogVideoX 2B and 5B (Zhipu AI 2024): a transformer of clips and words that predicts the velocity in levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..policy import Process
from ..pretrained import Source
from ..processes.gaussian import GaussianProcess
from ..registry import ConfigError
from ..types import Placement
from .clips import SMALL_T5, ClipBackbone, ClipCodec, Folding, Side, Told, Words, measured, words
from .layouts import Layout, unknown
from .published import TINY, Kit
from .readers import Remembered
from .releases import Release
from .shown import cogvideox
from .texts import remembered
from .unet import level

SOURCES = (
    Source("zai-org/CogVideoX-2b", size="14 GB", licence="Apache-2.0"),
    Source("zai-org/CogVideoX-5b", size="22 GB", licence="CogVideoX licence"),
)
FOLDING = Folding(channels=16, factor=8, every=4)
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": FOLDING.channels,
        "out_channels": FOLDING.channels,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 4,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": 16,
        "use_rotary_positional_embeddings": True,
    },
    "vae": {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "block_out_channels": (4, 4, 4, 4),
        "latent_channels": FOLDING.channels,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "temporal_compression_ratio": FOLDING.every,
    },
    "text_encoder": SMALL_T5,
}
COGVIDEOX = Release(SOURCES, SMALL)


class CogTexts:
    """What T5 says of every token of a prompt, filling included."""

    def __init__(self, kit: Kit, length: int) -> None:
        from transformers import T5EncoderModel

        self.t5 = kit.reader("text_encoder", T5EncoderModel, "tokenizer", length)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"words": words(self.t5, prompts, masked=False)["words"]}


def ask(places: tuple[Tensor, Tensor] | None, net: nn.Module, x: Tensor, t: Tensor, told: Told) -> Tensor:
    """The velocity alpha noise - sigma clean."""
    out: Tensor = net(
        hidden_states=x,
        encoder_hidden_states=told["words"],
        timestep=level(t),
        image_rotary_emb=places,
        return_dict=False,
    )[0]
    return out


def rotary(config: Any, shape: tuple[int, int, int, int], placement: Placement) -> tuple[Tensor, Tensor] | None:
    """Where every token is, as 5B is told; 2B adds it to its latents."""
    if config.patch_size_t is not None:
        raise ConfigError("model.weights is CogVideoX 1.5, which takes frames by twos; expected 2B or 5B of 1.0")
    if not config.use_rotary_positional_embeddings:
        return None
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    size = (shape[2] // config.patch_size, shape[3] // config.patch_size)
    base = (config.sample_width // config.patch_size, config.sample_height // config.patch_size)
    region: Any = get_resize_crop_region_for_grid
    table: Any = get_3d_rotary_pos_embed
    cosine, sine = table(config.attention_head_dim, region(size, *base), size, shape[0], device=placement.device)
    return cosine, sine


@dataclass(frozen=True)
class CogVideoX:
    """CogVideoX from text, which predicts the velocity on levels that end in the dark."""

    weights: str = SOURCES[0].hub  # a hub id, or a folder in diffusers' layout
    height: Side = 480
    width: Side = 720
    frames: int = 49  # one more than a multiple of 8, for latents are decoded by twos; 8 a second
    words: Words = 226  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[Layout] = Layout("CogVideoXPipeline", "transformer", "", unknown)

    def __post_init__(self) -> None:
        measured(self.frames, self.height, self.width, 2 * FOLDING.every, 2 * FOLDING.factor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return FOLDING.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[Source, ...]:
        return COGVIDEOX.sources(self.weights)

    def texts(self, placement: Placement) -> Remembered:
        kit, settings = COGVIDEOX.kit(self.weights, placement, self.seed), {"model": "cogvideox", "words": self.words}
        return remembered(kit, lambda: CogTexts(kit, self.words), ("text_encoder",), settings, self.embeddings)

    def load(self, placement: Placement) -> ClipBackbone:
        from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

        kit = COGVIDEOX.kit(self.weights, placement, self.seed)
        net: Any = kit.trained("transformer", CogVideoXTransformer3DModel)
        vae = kit.frozen("vae", AutoencoderKLCogVideoX, recompute=self.recompute)
        codec = ClipCodec.of(vae, cogvideox(vae))
        asked = partial(ask, rotary(net.config, self.shape, placement))
        return ClipBackbone(net, asked, codec, self.texts(placement), self)

    def tiny(self) -> CogVideoX:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=9, words=words, embeddings=None)
