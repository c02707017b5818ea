"""Generators (`Backbone`), generation processes (`Process`), rollouts, and the policy that puts them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from .distributions import Distribution, TokenSampler
from .randomness import Randomness
from .registry import ConfigError
from .types import Condition, Corrupted, LatentBatch, Metadata, Prompts, Segment, Trajectory
from .weights import TrainableModel, Weights


class TokenDecoder(Protocol):
    """Decodes a batch of sequences token by token, with a key/value cache."""

    @property
    def ids(self) -> Tensor:
        """Tokens so far: [B, L], 0 where none is decoded yet. A copy."""

    @property
    def log_prob(self) -> Tensor:
        """Log-probabilities of the tokens so far, before top-k and top-p: [B, L]."""

    @property
    def low_precision(self) -> bool:
        """Whether it multiplies weights in fewer bits than the training does."""

    def decode_next(self) -> None:
        """Sample the next token of every sequence."""

    def replace_last(self, ids: Tensor) -> None:
        """Continue as if these tokens [B] had been sampled last; `ids` and `log_prob` stay as they are."""

    def select(self, rows: Tensor) -> TokenDecoder:
        """A decoder that continues with some of the sequences."""


class MaskedPredictor(Protocol):
    """Predicts the tokens of one batch of prompts, step after step."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        """Logits [B, N, V] of tokens [B, N], with guidance if the rollout has any."""

    def select(self, rows: Tensor) -> MaskedPredictor:
        """A predictor that continues with some of the samples."""


class Backbone(TrainableModel, ABC):
    """A generator: the network that trains, and how prompts and pixels reach it.

    Call the network only through `net(...)`: FSDP hooks in there. Every model implements the four abstract methods.
    The others are optional abilities: their defaults return None where callers have a general way to do the same,
    and raise an error that says what to change where they have not.
    """

    shape: tuple[int, ...]  # of one clean sample in model space
    pixels: tuple[int, int, int, int]  # frames, channels, height and width of a sample
    forward_passes: int  # network calls of one prediction
    codebook_size: int | None = None  # of models that generate tokens
    guidance: Guidance | None = None  # classifier-free guidance that a wrapper adds around the model
    has_unconditional: bool = False  # whether `without_prompt` is implemented; otherwise the empty prompt is embedded
    # Elements of a latent sample that are sampled but not trained, such as the sound of a video: bool [*shape].
    # They follow the ODE of the sampler, and neither log-probabilities nor errors of predictions count them.
    untrained_elements: Tensor | None = None
    answers_questions: bool = False  # whether `score_answers` is implemented: vision-language models such as Show-o

    @abstractmethod
    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        """Encode prompts, with their metadata if the model reads any (reference image, fps …)."""

    def embed_negative(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        """Encode negative prompts, where the model treats them differently from others."""
        return self.embed(prompts, metadata)

    @abstractmethod
    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The network's output: velocity, noise or clean sample [B, ...], or logits [B, K, V]."""

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, F, 3, H, W] in [0, 1] to model space: [B, *shape]."""

    @abstractmethod
    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        """Pixels [B, F, 3, H, W] of all frames or of the frames listed, with gradients."""

    @property
    def unguided(self) -> Backbone:
        """The model without the guidance that a wrapper adds; the model itself if there is none."""
        return self

    def without_prompt(self, cond: Condition) -> Condition:
        """The unconditional version of a condition, if `has_unconditional`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not have an unconditional embedding; use the embedding of the empty "
            "prompt [TM092]"
        )

    def with_size(self, height: int, width: int) -> Backbone:
        """The model for images of another size, with the same network."""
        size = "x".join(map(str, self.pixels[2:]))
        raise ValueError(f"the model generates images of {size} only; remove sample.height and sample.width [TM093]")

    def with_guidance_scale(self, scale: float | None) -> Backbone | None:
        """The model with another distilled guidance scale, an input of its network; None if it has no such input.

        A scale of None is the configured one, in rollouts too.
        """
        return None

    def from_latents(self, latents: LatentBatch) -> Tensor:
        """Precomputed latents in model space: [B, *shape]. Latents of another autoencoder are refused."""
        raise ConfigError(
            "data.type: this model cannot train on latents; set data.type to a data set of images [TM094]"
        )

    # Autoregressive models
    def init_cache(self, cond: Condition) -> Any:
        """An empty key/value cache: a tree of tensors with samples in dimension 0."""
        raise TypeError(
            f"the autoregressive process needs a model with init_cache and decode_step, got {type(self).__name__}; "
            "define both methods, or set process.type to the process of this model [TM095]"
        )

    def decode_step(self, ids: Tensor | None, cache: Any, cond: Condition) -> tuple[Tensor, Any]:
        """Logits [B, V] of the next token after appending `ids` [B] (None: of the first), and the new cache."""
        raise TypeError(
            f"the autoregressive process needs a model with init_cache and decode_step, got {type(self).__name__}; "
            "define both methods, or set process.type to the process of this model [TM096]"
        )

    def make_decoder(
        self, cond: Condition, uniform: Tensor, sampler: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        """A fast decoder that samples with the uniform numbers [B, L]; None: call `decode_step` for every token.

        Sharded networks have none, because only full calls gather their weights.
        """
        return None

    def hidden_states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        """Hidden states [B, K, D] and output matrix [V, D], whose product are the logits; None: use `predict`."""
        return None

    def token_embeddings(self, ids: Tensor) -> Tensor:
        """Codebook vectors of tokens [B, K]: [B, K, C]."""
        raise ConfigError(
            "objective: this model does not have a codebook; set objective.latent_reward_weight=0 and "
            "objective.critical_tokens=0 [TM097]"
        )

    def encode_continuous(self, pixels: Tensor) -> Tensor:
        """Encoder output of images [B, F, 3, H, W] before quantization: [B, K, C]."""
        raise ConfigError(
            "objective.latent_reward_weight: this model does not have a codebook; set "
            "objective.latent_reward_weight=0 [TM098]"
        )

    # Masked models
    def make_predictor(self, cond: Condition, guidance: Guidance | None) -> MaskedPredictor | None:
        """A predictor that encodes the prompts once for all steps; None: use `predict`."""
        return None

    def known_tokens(self, cond: Condition) -> Tensor | None:
        """Tokens [B, N] that are known before sampling (inpainting), masked elsewhere; None if there are none."""
        return None

    def likelihood(self, x: Tensor, noisy: Corrupted, cond: Condition) -> Tensor | None:
        """A log-likelihood [B] of the model's own definition; None: that of the masked tokens."""
        return None

    # Vision-language models
    def score_answers(self, pixels: Tensor, turns: Sequence[Sequence[str]], answers: Sequence[str]) -> Any:
        """Logits [B, A, V] of answers about images, their token ids and which of them count; see AnswerLogits."""
        raise ConfigError(
            f"{type(self).__name__} cannot answer questions about images; use a model of type showo [TM099]"
        )

    def joint_log_likelihood(
        self,
        x: Tensor,
        noisy: Corrupted,
        cond: Condition,
        conversations: Sequence[Metadata],
        question_pixels: Tensor,
    ) -> Tensor:
        """Mean log-likelihood [B] of a token of each sample: masked image tokens, a text, or an answer; see JointBatch.

        One call of the network for all kinds.
        """
        raise ConfigError(
            f"objective.type: joint_likelihood trains images and text, but {type(self).__name__} has no text; "
            "set model.type=showo [TM902]"
        )


class BackboneWrapper(Backbone):
    """A backbone around another one: the same network, shapes and autoencoder."""

    def __init__(self, model: Backbone) -> None:
        self.model, self.traits, self.codebook_size = model, model.traits, model.codebook_size
        self.shape, self.pixels, self.forward_passes = model.shape, model.pixels, model.forward_passes
        self.untrained_elements = model.untrained_elements

    @abstractmethod
    def rewrap(self, model: Backbone) -> Self:
        """Wrap another model with the settings of this wrapper."""

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.model.net = net

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)

    def with_size(self, height: int, width: int) -> Self:
        return self.rewrap(self.model.with_size(height, width))

    def with_guidance_scale(self, scale: float | None) -> Self | None:
        model = self.model.with_guidance_scale(scale)
        return None if model is None else self.rewrap(model)

    def from_latents(self, latents: LatentBatch) -> Tensor:
        return self.model.from_latents(latents)


class Rollout(ABC):
    """A batch of samples while it is being generated: advance it, preview it, drop samples from it."""

    cond: Condition
    start: Tensor  # initial noise or tokens
    segments: tuple[Segment, ...]  # the actions so far
    network_calls: int  # so far, summed over the samples

    @property
    @abstractmethod
    def progress(self) -> float:
        """From 0 to exactly 1."""

    @abstractmethod
    def step(self) -> None:
        """Take one sampling step, or decode one token."""

    @abstractmethod
    def preview(self) -> Tensor:
        """The current prediction of the clean samples, in model space: [B, ...]."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep some of the samples only."""

    @property
    def stochastic_until(self) -> float:
        """Progress from which on no step draws random numbers, so that copies of a sample stay equal."""
        return 1.0

    def set_start(self, start: Tensor) -> None:
        """Begin with this initial noise [B, *shape] instead; call it before the first step."""
        raise NotImplementedError(f"{type(self).__name__} has no initial noise; use a Gaussian process [TM1628]")

    def reseed(self, rng: Randomness) -> None:
        """Use other random numbers for the remaining steps."""
        raise ConfigError(
            "--search: this generator draws all random numbers of a sample in advance, so copies of a sample "
            "stay equal; use --search parm [TM100]"
        )

    def finish(self) -> Trajectory:
        """Run all remaining steps."""
        while self.progress < 1:
            self.step()
        return Trajectory(self.cond, self.start, self.preview(), self.segments)


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: unconditional + scale * (conditional - unconditional), within an interval of t."""

    scale: float = 1.0
    negative_prompt: str = ""
    interval: tuple[float, float] = (0.0, 1.0)  # of t, both ends included; token k of n is at t = 1 - k/n
    # Keep the norm of the conditional prediction, per sample or per token; limit: per sample, only where it grew.
    rescale: bool | Literal["token", "limit"] = False
    rollouts_only: bool = False  # no guidance in training passes: half the cost, and the unguided network learns
    # p: the scale rises from 1 to `scale` as 1 + (scale - 1) / 2 (1 - cos pi (1 - t)^p).
    power_schedule: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(
                f"'interval': expected two increasing numbers from 0 to 1, got {list(self.interval)}; write for "
                "example interval: [0, 1] [TM101]"
            )


class Process(ABC):
    """A generation process: how samples are corrupted, denoised and scored; one class per family of generators."""

    @property
    @abstractmethod
    def stochastic(self) -> bool:
        """Whether sampling is stochastic after the initial noise."""

    def with_sampled_log_probs(self) -> Self:
        """A copy of the process that keeps the log-probabilities of sampling instead of recomputing them."""
        return self

    def with_action_means(self) -> Process:
        """A copy of the process whose segments have the means of Gaussian actions; itself if its actions are tokens."""
        return self

    def with_num_steps(self, num_steps: int) -> Self:
        """A copy of the process with another number of sampling steps."""
        raise ValueError(f"{type(self).__name__} takes one step per token; remove 'num_steps' [TM102]")

    def deterministic(self) -> Self:
        """A copy of the process that draws no random numbers but the initial noise."""
        raise ConfigError(
            "--search: this generator samples tokens and has no initial noise to search; use --search best_of_n "
            "[TM1620]"
        )

    def without_temperature(self) -> Self:
        """A copy of the process that always reveals the most confident tokens."""
        raise ValueError(
            "'reset_temperature': false works with masked generators only, because other processes do not anneal "
            "the temperature; remove 'reset_temperature' [TM103]"
        )

    def calls_per_prediction(self, shape: tuple[int, ...]) -> int:
        """Network calls of sampling that one prediction of a whole sample stands for."""
        return 1

    @abstractmethod
    def network_calls_per_sample(self, shape: tuple[int, ...]) -> int:
        """Predictions needed to sample one sample of a shape."""

    @abstractmethod
    def count_hidden(self, noisy: Corrupted) -> Tensor:
        """Number of elements that the log-likelihood of each sample sums over: [B]; 1 for diffusion."""

    @abstractmethod
    def wrap_guidance(self, model: Backbone, guidance: Guidance) -> Backbone:
        """The model with classifier-free guidance."""

    @abstractmethod
    def start(self, model: Backbone, cond: Condition, rng: Randomness) -> Rollout:
        """Begin a rollout."""

    @abstractmethod
    def action_distribution(self, model: Backbone, cond: Condition, segment: Segment) -> Distribution:
        """p(action | state) under the current weights."""

    @abstractmethod
    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        """Add noise to (or mask) clean samples, at a random level with new noise unless `t` or `noise` is given."""

    @abstractmethod
    def restore(self, model: Backbone, cond: Condition, noisy: Corrupted) -> Distribution:
        """p(clean | corrupted) under the current weights."""

    @abstractmethod
    def likelihood(self, model: Backbone, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        """Log-likelihood of `x` given its corruption, or a bound on it, without guidance: [B]."""


P = TypeVar("P", bound=Process, covariant=True)


@dataclass(frozen=True)
class Policy(Generic[P]):
    """A backbone, the process that samples it, and its named sets of weights."""

    model: Backbone
    process: P
    weights: Weights

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return self.model.embed(prompts, metadata)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode(pixels)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.model.decode(x, frames)

    def rollout(self, cond: Condition, rng: Randomness) -> Rollout:
        return self.process.start(self.model, cond, rng)

    @torch.no_grad()
    def sample(self, cond: Condition, rng: Randomness) -> Trajectory:
        return self.rollout(cond, rng).finish()

    def action_distribution(self, cond: Condition, segment: Segment) -> Distribution:
        return self.process.action_distribution(self.model, cond, segment)

    def corrupt(
        self, x: Tensor, rng: Randomness, t: Tensor | None = None, noise: Tensor | None = None, draw: int = 0
    ) -> Corrupted:
        return self.process.corrupt(x, rng, t, noise, draw)

    def restore(self, cond: Condition, noisy: Corrupted) -> Distribution:
        return self.process.restore(self.model, cond, noisy)

    def likelihood(self, cond: Condition, x: Tensor, noisy: Corrupted) -> Tensor:
        return self.process.likelihood(self.model, cond, x, noisy)
