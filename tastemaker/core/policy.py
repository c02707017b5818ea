"""The contract between generators and everything that trains or searches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from .distributions import Distribution, TokenSampler
from .randomness import Randomness
from .registry import ConfigError
from .types import Condition, Corrupted, LatentBatch, Metadata, Placement, Prompts, Segment, Trajectory
from .weights import Weights


@runtime_checkable
class Backbone(Protocol):
    """The interface of a generator network. Call the network only through `net(...)`: FSDP hooks in there."""

    net: nn.Module
    shape: tuple[int, ...]  # of one clean sample in model space
    pixels: tuple[int, int, int, int]  # frames, channels, height, width of what it makes
    passes: int  # network calls one prediction costs

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition: ...
    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The network's own output: velocity, noise, or logits [B, K, V]."""

    def encode(self, pixels: Tensor) -> Tensor: ...
    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        """Pixels of all frames or of those asked for, with gradients: [B, F, 3, H, W]."""


@runtime_checkable
class CausalBackbone(Backbone, Protocol):
    """Adds a cache, so that written tokens need not be read again."""

    def begin(self, cond: Condition) -> Any:
        """An empty cache: a tree of tensors with rows in dimension 0."""

    def extend(self, ids: Tensor | None, cache: Any, cond: Condition) -> tuple[Tensor, Any]:
        """Logits [B, V] of the next token after appending `ids` [B] (None: of the first), and the cache."""


class TokenDecoder(Protocol):
    """Writes a batch of sequences, one token of every row at a time, and keeps what it needs to go on."""

    @property
    def ids(self) -> Tensor:
        """[B, L], 0 where nothing is written yet; what was returned does not change."""

    @property
    def log_prob(self) -> Tensor:
        """[B, L] of what is written, before any tokens were left out."""

    def write(self) -> None: ...
    def amend(self, ids: Tensor) -> None:
        """Read on as if these tokens [B] had been written last; what was written stays."""

    def select(self, rows: Tensor) -> TokenDecoder:
        """Who goes on with some of the rows."""


@runtime_checkable
class SupportsTokenDecoder(Protocol):
    """A causal backbone with scribes of its own, for whom reading, guidance and choice are one step."""

    def scribe(
        self, cond: Condition, uniform: Tensor, choice: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        """Who writes by numbers [B, L] that decide each token; none where only whole calls can reach the weights."""


@runtime_checkable
class SupportsHiddenStates(Protocol):
    """A backbone whose logits are one matrix times something far smaller."""

    def states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        """That [B, K, D] and the matrix [V, D]; none where logits are few, or only whole calls reach the weights."""


@runtime_checkable
class SupportsResize(Protocol):
    """A backbone that can make pictures of another size too, by the same network."""

    def sized(self, height: int, width: int) -> Backbone: ...


@runtime_checkable
class SupportsDistilledGuidance(Protocol):
    """A backbone whose network is told how strongly the prompt counts, which need not be the same in rollouts."""

    def steered(self, scale: float | None) -> Backbone:
        """The same network, told so much wherever it is asked; as it is meant to be used if nothing is given."""


@runtime_checkable
class SupportsEncodedLatents(Protocol):
    """A backbone that lives in the latents of an autoencoder, which may have been computed beforehand."""

    def taken(self, latents: LatentBatch) -> Tensor:
        """The same in model space; those of another autoencoder are refused."""


@runtime_checkable
class SupportsTokenEmbeddings(Protocol):
    """A backbone whose tokens stand for vectors, each for the one nearest to what a picture was before."""

    def vectors(self, ids: Tensor) -> Tensor:
        """Those that tokens [B, K] stand for: [B, K, C]."""

    def latents(self, pixels: Tensor) -> Tensor:
        """Those of pictures [B, F, 3, H, W] before any token is chosen: [B, K, C]."""


@runtime_checkable
class HasCodebookSize(Protocol):
    """A backbone that knows how many codes its tokens are of."""

    @property
    def codes(self) -> int: ...


class ModelSpec(Protocol):
    """What a configuration says of a model; loading makes the backbone."""

    @property
    def suits(self) -> type[Process]:
        """The kind of process its network was made for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one clean sample in model space."""

    @property
    def frames(self) -> int:
        """Of what it makes; a still has one."""

    def load(self, placement: Placement) -> Backbone: ...
    def tiny(self) -> ModelSpec:
        """The same model at random small size, for tests."""


@runtime_checkable
class HasTimestepShift(Protocol):
    """A model's settings that tell how far the levels of a straight path are shifted for its size and length."""

    @property
    def shift(self) -> float | None:
        """As its weights were trained; of random ones there is none."""


class Rollout(ABC):
    """A batch of samples on its way: step it, look at it, drop rows of it."""

    cond: Condition
    start: Tensor
    segments: tuple[Segment, ...]
    price: int  # rows times network calls so far

    @property
    @abstractmethod
    def progress(self) -> float:
        """From 0 to exactly 1."""

    @abstractmethod
    def step(self) -> None: ...
    @abstractmethod
    def preview(self) -> Tensor:
        """The present guess at the clean samples, in model space."""

    @abstractmethod
    def select(self, rows: Tensor) -> None: ...
    def redraw(self, rng: Randomness) -> None:
        """Go on by other draws; where all are made at the start, there are none to come."""
        raise ConfigError(
            "--search: this generator draws all of a sample at once, so copies of it would stay alike; choose parm"
        )

    def finish(self) -> Trajectory:
        """Step to the end."""
        while self.progress < 1:
            self.step()
        return Trajectory(self.cond, self.start, self.preview(), self.segments)


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: without + scale * (with - without), within an interval of t."""

    scale: float = 1.0
    negative: str = ""
    interval: tuple[float, float] = (0.0, 1.0)  # of t, both ends included; a token k of n is at t = 1 - k/n
    rescale: bool | Literal["token"] = False  # keep the norm of the conditional prediction, per row or last dimension
    rollouts_only: bool = False  # not where a gradient is wanted: half the cost, and the unguided network learns
    rise: PositiveFloat | None = None  # p: from 1 at first to `scale` at last, 1 + (scale - 1) / 2 (1 - cos pi (1-t)^p)

    def __post_init__(self) -> None:
        if not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(f"'interval' is {list(self.interval)}; expected two rising numbers from 0 to 1")


class Process(ABC):
    """A generation process: how samples are corrupted, denoised and scored; one class per family of generators."""

    drives: ClassVar[type] = Backbone

    @property
    @abstractmethod
    def chance(self) -> bool:
        """Whether sampling is stochastic after the initial noise."""

    def as_sampled(self) -> Self:
        """A copy of the process that keeps the log-probabilities of sampling instead of recomputing them."""
        return self

    def in_steps(self, steps: int) -> Self:
        """A copy of the process that samples in `steps` steps."""
        raise ValueError(f"{type(self).__name__} takes as many steps as there are tokens; leave 'steps' out")

    @abstractmethod
    def calls(self, shape: tuple[int, ...]) -> int:
        """Predictions one sample of a shape costs."""

    def decisions(self, shape: tuple[int, ...]) -> int:
        """Network calls needed to score the actions of one sample."""
        return self.calls(shape)

    @abstractmethod
    def hidden(self, noisy: Corrupted) -> Tensor:
        """How many decisions are hidden in each row: [B]."""

    @abstractmethod
    def guide(self, model: Backbone, guidance: Guidance) -> Backbone: ...
    @abstractmethod
    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> Rollout: ...
    @abstractmethod
    def decide(self, model: Backbone, cond: Condition, segment: Segment) -> Distribution:
        """p(action | state) under the present weights."""

    @abstractmethod
    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        """Hide `x` at a random level with fresh noise, or at the level and with the noise given."""

    @abstractmethod
    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Distribution:
        """p(clean | corrupted) under the present weights."""

    @abstractmethod
    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        """Log-likelihood, or a bound on it, of what is hidden of `x`, of the network without guidance: [B]."""


P = TypeVar("P", bound=Process, covariant=True)


@dataclass(frozen=True)
class Policy(Generic[P]):
    """A backbone, the process that samples it, and its named sets of weights."""

    model: Backbone
    process: P
    weights: Weights

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        return self.model.embed(prompts, facts)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)

    def rollout(self, cond: Condition, rng: Randomness) -> Rollout:
        return self.process.start(self.model, cond, rng)

    @torch.no_grad()
    def sample(self, cond: Condition, rng: Randomness) -> Trajectory:
        return self.rollout(cond, rng).finish()

    def decide(self, cond: Condition, segment: Segment) -> Distribution:
        return self.process.decide(self.model, cond, segment)

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        return self.process.corrupt(x, rng, t, noise, draw)

    def restore(self, cond: Condition, noisy: Corrupted) -> Distribution:
        return self.process.restore(self.model, cond, noisy)

    def likelihood(self, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return self.process.likelihood(self.model, cond, x, noisy)
