"""Mochi 1 (Genmo 2024): a flow-matching transformer of clips and words, which counts time the other way."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..policy import Process
from ..pretrained import Source
from ..processes.gaussian import GaussianProcess
from ..types import Placement
from .clips import SMALL_T5, ClipBackbone, ClipCodec, Side, Told, Words, measured, words
from .layouts import Layout, unknown
from .published import TINY, Kit, sources
from .readers import Remembered
from .shown import mochi
from .texts import remembered

MOCHI = Source("genmo/mochi-1-preview", size="60 GB", licence="Apache-2.0")
CHANNELS, FACTOR, EVERY = 12, 8, 6  # of its autoencoder
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


class MochiTexts:
    """What T5 says of every token of a prompt, and which of them are no filling."""

    def __init__(self, kit: Kit, length: int) -> None:
        from transformers import T5EncoderModel

        self.t5 = kit.reader("text_encoder", T5EncoderModel, "tokenizer", length)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return words(self.t5, prompts, masked=True)


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

    weights: str = MOCHI.hub  # a hub id, or a folder in diffusers' layout
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
        measured(self.frames, self.height, self.width, EVERY, 2 * FACTOR)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1 + (self.frames - 1) // EVERY, CHANNELS, self.height // FACTOR, self.width // FACTOR

    @property
    def sources(self) -> tuple[Source, ...]:
        return sources(self.weights, MOCHI)

    def texts(self, placement: Placement) -> Remembered:
        kit = Kit(self.weights, MOCHI, SMALL, placement, self.seed)
        settings = {"model": "mochi", "words": self.words}
        return remembered(kit, lambda: MochiTexts(kit, self.words), ("text_encoder",), settings, self.embeddings)

    def load(self, placement: Placement) -> ClipBackbone:
        from diffusers import AutoencoderKLMochi, MochiTransformer3DModel

        kit = Kit(self.weights, MOCHI, SMALL, placement, self.seed)
        net: Any = kit.trained("transformer", MochiTransformer3DModel)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}.attn1."
        net.idle = (f"{last}add_q_proj.", f"{last}norm_added_q.")  # what words ask for at the end is not used
        vae = kit.frozen("vae", AutoencoderKLMochi, recompute=self.recompute)
        codec, pixels = ClipCodec.of(vae, mochi(vae)), (self.frames, 3, self.height, self.width)
        return ClipBackbone(net, ask, codec, self.texts(placement), self.shape, pixels)

    def tiny(self) -> Mochi:
        words = min(self.words, 16)
        return replace(self, weights=TINY, height=32, width=32, frames=7, words=words, embeddings=None)
