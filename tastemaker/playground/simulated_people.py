"""Simulated people of the playground: each prefers images by a rule that no reward of the package knows.

They stand in for a person who votes: in tests, and in the study of how well a learned taste changes a model. The rules
read pixels alone, so that a model cannot please them by misleading a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.types import Prompts
from .captions import SceneCaptions, parse_captions
from .networks import first_frame

BORDER = 3  # pixels at the border of an image, from which its background is read
FOREGROUND = 0.2  # difference from the background, of the largest color channel, from which a pixel is of an object
Choice = Literal[0, 1, "tie"]
Rule = Callable[[Tensor, SceneCaptions], Tensor]


def foreground_mask(frames: Tensor) -> Tensor:
    """Which pixels of images [N, 3, 64, 64] differ from the background, which is the median of the border: [N, 64, 64].

    The background of the playground is one color with a faint vertical gradient. A median filter removes specks.
    """
    border = torch.cat(
        [
            frames[:, :, :BORDER].flatten(2),
            frames[:, :, -BORDER:].flatten(2),
            frames[..., :BORDER].flatten(2),
            frames[..., -BORDER:].flatten(2),
        ],
        2,
    )
    background = border.median(2).values[:, :, None, None]
    mask = ((frames - background).abs().amax(1) > FOREGROUND).float()
    return F.avg_pool2d(mask[:, None], 3, 1, 1)[:, 0] > 0.5


def rate_size(frames: Tensor, captions: SceneCaptions) -> Tensor:
    """The square root of the area of an object, relative to the image: [N]."""
    area = foreground_mask(frames).float().mean((1, 2))
    return (area / captions.total()).sqrt()


def rate_warmth(frames: Tensor, captions: SceneCaptions) -> Tensor:
    """Red less blue, over the objects; 0 where the caption names a color: [N]."""
    mask = foreground_mask(frames).float()
    warmth = ((frames[:, 0] - frames[:, 2]) * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)
    return torch.where(captions.first_color > 0, 0.0, warmth)


def rate_height(frames: Tensor, captions: SceneCaptions) -> Tensor:
    """How far up in the image the objects are, on average, from 0 to 1: [N]."""
    mask = foreground_mask(frames).float()
    rows = torch.linspace(1, 0, frames.shape[2], device=frames.device)[:, None]
    return (mask * rows).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)


@dataclass(frozen=True)
class SimulatedPerson:
    """Votes by the sum of some rules, with the noise of a person who is not always sure.

    A rule's weight is chosen so that samples of one prompt differ by about 1. Differences below `indifference` are
    ties. `noise` is the scale of the logistic noise of the difference: 0 votes by the rule alone.
    """

    name: str
    rules: tuple[tuple[Rule, float], ...]
    noise: float = 0.15
    indifference: float = 0.05

    def rate(self, pixels: Tensor, prompts: Prompts) -> Tensor:
        """How much the person likes samples [N, F, 3, H, W], without noise: [N]."""
        frames, captions = first_frame(pixels).float(), parse_captions(prompts).to(pixels.device)
        scores = [weight * rule(frames, captions) for rule, weight in self.rules]
        return torch.stack(scores).sum(0)

    def choose(self, scores: Sequence[float], noise: float) -> Choice:
        """Vote between two samples by their rates; `noise` is a uniform number in (0, 1)."""
        difference = scores[0] - scores[1]
        if abs(difference) < self.indifference:
            return "tie"
        quantile = torch.tensor(noise).logit(eps=1e-6).item()
        return 0 if difference + self.noise * quantile > 0 else 1


PEOPLE: Mapping[str, SimulatedPerson] = {
    person.name: person
    for person in (
        SimulatedPerson("large", ((rate_size, 20.0),)),
        SimulatedPerson("warm", ((rate_warmth, 4.0),)),
        SimulatedPerson("high", ((rate_height, 6.0),)),
        SimulatedPerson("large_and_warm", ((rate_size, 20.0), (rate_warmth, 4.0))),
    )
}
