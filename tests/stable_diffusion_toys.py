"""Both models of Stable Diffusion, what they are asked for, and the rows that chance is drawn by."""

from __future__ import annotations

import torch

from tastemaker.core.randomness import Randomness
from tastemaker.models.sd15 import Sd15
from tastemaker.models.sdxl import Sdxl

PROMPTS = ("a photo of a dog", "two red cars, oil on canvas", "", "an owl")
Spec = Sd15 | Sdxl
SPECS: dict[str, Spec] = {"sd15": Sd15(), "sdxl": Sdxl()}


def rows(count: int = len(PROMPTS)) -> Randomness:
    return Randomness(0, 0, torch.arange(count))
