"""A generator of normal data with exact predictions, whose samples under a tilt of the reward are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import toys
from torch import Tensor, nn

from tastemaker.core.policy import Backbone, Policy
from tastemaker.core.reward import Verdict, Verifier
from tastemaker.core.types import Condition, Metadata, PromptBatch, Prompts
from tastemaker.processes.gaussian import GaussianProcess

DATA_STD = 0.8


@dataclass
class ExactDenoiser(Backbone):
    """The optimal denoiser of one number that is normal around 0, on rectified flow; counts the samples it sees."""

    net: nn.Module = field(default_factory=nn.Identity)
    shape: tuple[int, ...] = (1, 1, 1, 1)
    pixels: tuple[int, int, int, int] = (1, 1, 1, 1)
    forward_passes: int = 1
    predictions: int = 0

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        self.predictions += len(x)
        t = t.view(-1, 1, 1, 1, 1)
        clean = (1 - t) * DATA_STD**2 / ((1 - t) ** 2 * DATA_STD**2 + t**2) * x
        return (x - clean) / t

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class FunctionVerifier(Verifier):
    """Scores samples by a function of their first number, and records progress and size of each call."""

    function: Callable[[Tensor], Tensor]
    calls: list[tuple[float, int]] = field(default_factory=list)

    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        assert len(pixels) == len(prompts) == len(metadata)
        self.calls.append((progress, len(pixels)))
        score = self.function(pixels.flatten(1)[:, 0])
        return Verdict(score == score, score == score, score)


def exact_policy(process: GaussianProcess) -> Policy[Any]:
    model = ExactDenoiser()
    return Policy(model, process, toys.policy("flow").weights)


def numbered_prompts(count: int) -> PromptBatch:
    return PromptBatch(tuple(f"prompt {i}" for i in range(count)), ({},) * count)
