"""LTX-Video (Lightricks 2024): a small flow-matching transformer of clips that are compressed far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..policy import Process
from ..pretrained import Source
from ..processes.gaussian import GaussianProcess
from ..types import Placement
from .clips import SMALL_T5, ClipBackbone, ClipCodec, Folding, Side, T5Texts, Told, Words, measured
from .layouts import Layout, unknown
from .published import TINY
from .readers import Remembered
from .releases import Release
from .shown import ltx
from .texts import remembered

SOURCE = Source("Lightricks/LTX-Video", size="26 GB", licence="LTX-Video Open Weights License")
FOLDING = Folding(channels=128, factor=32, every=8)
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "num_layers": 2,
    },
    "vae": {
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    },
    "text_encoder": SMALL_T5,
}
LTX = Release((SOURCE,), SMALL)


def ask(rate: float, net: nn.Module, x: Tensor, t: Tensor, told: Told) -> Tensor:
    """The velocity noise - clean, of one token a latent."""
    frames, channels, height, width = x.shape[1:]
    out: Tensor = net(
        hidden_states=x.movedim(2, -1).reshape(len(x), -1, channels),
        encoder_hidden_states=told["words"],
        timestep=1000 * t,
        encoder_attention_mask=told["seen"],
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=(FOLDING.every / rate, FOLDING.factor, FOLDING.factor),
        return_dict=False,
    )[0]
    return out.view(len(x), frames, height, width, channels).movedim(-1, 2)


@dataclass(frozen=True)
class Ltx:
    """LTX-Video, from text: a flow whose levels are shifted by the number of latents and stretched to end at 0.1."""

    weights: str = SOURCE.hub  # a hub id, or a folder in diffusers' layout
    height: Side = 512
    width: Side = 704
    frames: int = 161  # one more than a multiple of 8
    rate: float = 25.0  # frames a second, which it is told
    words: Words = 128  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[Layout] = Layout("LTXPipeline", "transformer", "", unknown)

    def __post_init__(self) -> None:
        measured(self.frames, self.height, self.width, FOLDING.every, FOLDING.factor)
        if not 0 < self.rate <= 1000:
            raise ValueError(f"'rate' is {self.rate}; expected frames a second, above 0")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return FOLDING.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[Source, ...]:
        return LTX.sources(self.weights)

    def texts(self, placement: Placement) -> Remembered:
        kit, settings = LTX.kit(self.weights, placement, self.seed), {"model": "ltx", "words": self.words}
        made = partial(T5Texts, kit, self.words, masked=False)
        return remembered(kit, made, ("text_encoder",), settings, self.embeddings)

    def load(self, placement: Placement) -> ClipBackbone:
        from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel

        kit = LTX.kit(self.weights, placement, self.seed)
        net = kit.trained("transformer", LTXVideoTransformer3DModel)
        vae = kit.frozen("vae", AutoencoderKLLTXVideo, recompute=self.recompute)
        codec = ClipCodec.of(vae, ltx(vae), vae.latents_mean, vae.latents_std)
        return ClipBackbone(net, partial(ask, self.rate), codec, self.texts(placement), self)

    def tiny(self) -> Ltx:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=9, words=words, embeddings=None)
