"""Specs of Stable Diffusion 1.5 and XL, prompts, and the randomness of their samples."""

from __future__ import annotations

import torch

from tastemaker.core.randomness import Randomness
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec

PROMPTS = ("a photo of a dog", "two red cars, oil on canvas", "", "an owl")
Spec = Sd15Spec | SdxlSpec
SPECS: dict[str, Spec] = {"sd15": Sd15Spec(), "sdxl": SdxlSpec()}


def make_rng(count: int = len(PROMPTS)) -> Randomness:
    return Randomness(0, 0, torch.arange(count))
