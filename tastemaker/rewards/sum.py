"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import Tensor

from ..core.reward import RewardCard, RewardSpec, Rubric, WeightedReward, load_shared_reward
from ..core.types import Metadata, Placement, Prompts


@dataclass(frozen=True)
class Sum:
    """A weighted sum of rewards, where one is asked for; a run's own `rewards` are summed and shown one by one."""

    of: tuple[RewardSpec, ...]
    weights: tuple[float, ...] = ()  # one each, all 1 if none are given

    def __post_init__(self) -> None:
        if not self.of or (self.weights and len(self.weights) != len(self.of)):
            found = f"{len(self.of)} rewards and {len(self.weights)} weights"
            raise ValueError(f"a sum has {found}; expected at least one reward, and as many weights or none")

    @property
    def differentiable(self) -> bool:
        return all(spec.differentiable for spec, weight in self._parts() if weight)

    @property
    def reads(self) -> Literal["frames", "clip"]:
        return "clip" if any(spec.reads == "clip" for spec in self.of) else "frames"

    @property
    def runs_on(self) -> Literal["device", "host", "remote"]:
        found = {spec.runs_on for spec in self.of}
        return "device" if "device" in found else "host" if "host" in found else "remote"

    @property
    def batch_size(self) -> int:
        return max(spec.batch_size for spec in self.of)  # each is cut further to what it can bear

    @property
    def about(self) -> RewardCard:
        told = [spec.about for spec in self.of]
        sources = tuple(dict.fromkeys(source for about in told for source in about.sources))
        hacked, memory = ("; ".join(dict.fromkeys(texts)) for texts in _columns(told))
        return RewardCard("the sum of its rewards'", hacked, memory, sources)

    def load(self, placement: Placement) -> SumScorer:
        parts = {f"{type(spec).__name__} {i}": (spec, weight) for i, (spec, weight) in enumerate(self._parts())}
        return SumScorer(
            Rubric(
                {
                    name: WeightedReward(spec, load_shared_reward(spec, placement), weight)
                    for name, (spec, weight) in parts.items()
                }
            )
        )

    def tiny(self) -> Self:
        return replace(self, of=tuple(spec.tiny() for spec in self.of))

    def _parts(self) -> list[tuple[RewardSpec, float]]:
        return list(zip(self.of, self.weights or (1.0,) * len(self.of), strict=True))


@dataclass(frozen=True)
class SumScorer:
    rubric: Rubric

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.rubric.score(pixels, prompts, facts).total


def _columns(told: Sequence[RewardCard]) -> tuple[list[str], list[str]]:
    return [about.hacked_by for about in told], [about.memory for about in told]
