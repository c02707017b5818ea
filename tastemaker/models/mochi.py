"""Mochi 1 (Genmo 2024): a flow-matching transformer of clips and words, which counts time the other way."""

from __future__ import annotations

import warnings
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
from .shown import mochi
from .texts import remembered

SOURCE = Source("genmo/mochi-1-preview", size="60 GB", licence="Apache-2.0")
FOLDING = Folding(channels=12, factor=8, every=6)
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "pooled_projection_dim": 16,
        "text_embed_dim": 32,
        "time_embed_dim": 4,
        "max_sequence_length": 16,
    },
    "vae": {
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "add_attention_block": (False,) * 5,
    },
    "text_encoder": SMALL_T5,
}
MOCHI = Release((SOURCE,), SMALL)


def ask(net: nn.Module, x: Tensor, t: Tensor, told: Told) -> Tensor:
    """The velocity noise - clean; its own goes from noise to the clean sample, as its time does."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it asks for places to be exact by autocast
        out: Tensor = net(
            hidden_states=x.transpose(1, 2),
            encoder_hidden_states=told["words"],
            timestep=1000 * (1 - t),
            encoder_attention_mask=told["seen"],
            return_dict=False,
        )[0]
    return -out.transpose(1, 2)


@dataclass(frozen=True)
class Mochi:
    """Mochi 1, from text: a flow whose first half of steps takes a fortieth of the noise away."""

    weights: str = SOURCE.hub  # a hub id, or a folder in diffusers' layout
    height: Side = 480
    width: Side = 848
    frames: int = 163  # one more than a multiple of 6; 30 a second
    words: Words = 256  # tokens a prompt is cut or filled up to
    recompute: bool = True  # the decoder in the backward pass
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[Layout] = Layout("MochiPipeline", "transformer", "", unknown)

    def __post_init__(self) -> None:
        measured(self.frames, self.height, self.width, FOLDING.every, 2 * FOLDING.factor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return FOLDING.shape(self.frames, self.height, self.width)

    @property
    def sources(self) -> tuple[Source, ...]:
        return MOCHI.sources(self.weights)

    def texts(self, placement: Placement) -> Remembered:
        kit, settings = MOCHI.kit(self.weights, placement, self.seed), {"model": "mochi", "words": self.words}
        made = partial(T5Texts, kit, self.words, masked=True)
        return remembered(kit, made, ("text_encoder",), settings, self.embeddings)

    def load(self, placement: Placement) -> ClipBackbone:
        from diffusers import AutoencoderKLMochi, MochiTransformer3DModel

        kit = MOCHI.kit(self.weights, placement, self.seed)
        net: Any = kit.trained("transformer", MochiTransformer3DModel)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn1."
        net.idle = (f"{last}add_q_proj.", f"{last}norm_added_q.")  # what words ask for at the end is not used
        vae = kit.frozen("vae", AutoencoderKLMochi, recompute=self.recompute)
        return ClipBackbone(net, ask, ClipCodec.of(vae, mochi(vae)), self.texts(placement), self)

    def tiny(self) -> Mochi:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=7, words=words, embeddings=None)
