"""Open-Sora at full size without its weights, which come in files of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ..core.types import Condition, Placement
from ..models.component_configs import COMPONENT_CONFIGS
from ..models.opensora.components import T5
from ..models.opensora.model import OpenSora, OpenSoraBackbone
from ..models.pipeline_components import RANDOM
from .fake_denoiser import FakeDenoiser


class FakeOpenSora(FakeDenoiser):
    """Told as many words as prompts are cut to, none of them filling."""

    def __init__(self, spec: OpenSora, placement: Placement) -> None:
        whole = replace(spec, weights=RANDOM, vae=RANDOM, text=f"{RANDOM}:{T5.hub}", embeddings=None)
        self.backbone, self.words, self.dtype = OpenSoraBackbone(whole, placement), spec.words, placement.dtype

    def condition(self, rows: int) -> Condition:
        told = torch.empty(
            rows, self.words, int(COMPONENT_CONFIGS[T5.hub]["text_encoder"]["d_model"]), dtype=self.dtype
        )
        return Condition(("",) * rows, {"words": told})

    def frozen(self) -> Iterator[nn.Parameter]:
        found: Iterator[nn.Parameter] = self.backbone.codec.parameters()
        return found

    def read(self, rows: int) -> None:
        """How clips that it learns from are encoded is not counted."""
