"""Rewards score pixels [B, F, 3, H, W] in [0, 1]; an image is a video of one frame."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast
from weakref import WeakValueDictionary

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from .cards import PUBLISHED_JUDGES, WeightsSource, parse_hub_id
from .cards import RewardCard as RewardCard
from .errors import RewardError as RewardError
from .interruption import POLL_SECONDS, Interrupted, abandonable_call, current_stop
from .text_layout import truncate_text
from .types import Metadata, Placement, Prompts

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?")  # owner/name, or a file in it
TINY = "tiny"  # as `weights`: few random weights, in no file
Modality = Literal["image", "video"]
BatchSize = Annotated[int, Field(ge=1)]  # samples per call of a scorer


class Reward(ABC):
    """A loaded scorer of pixels [B, F, 3, H, W] in [0, 1]."""

    version: str = ""  # identifies what the settings do not say, such as the model behind a remote reward

    @property
    def needs_copy(self) -> bool:
        """Whether it gets a copy of the pixels, because it might write into them: all but those of this package."""
        return not is_shipped(self)

    @abstractmethod
    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """One score per sample: [B]."""

    def score_prompts(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata]
    ) -> list[Tensor]:
        """Scores [B] of the same pixels for each of several lists of prompts."""
        if len(prompt_sets) == 1 or not self.needs_copy:
            return [self.score(pixels, prompts, metadata) for prompts in prompt_sets]
        return [self.score(pixels.clone(), prompts, metadata) for prompts in prompt_sets]

    def verifier(self) -> Verifier | None:
        """The reward as a verifier of unfinished samples; None if it judges finished ones only."""
        return None

    def tower(self) -> ImageTextTower | None:
        """The frozen network of the reward, on which a preference model can be trained; None if it has none."""
        return None


@dataclass(frozen=True)
class TowerFeatures:
    """What a frozen image-text network knows about samples and their prompts."""

    image: Tensor  # [B, C] unit embeddings of the images
    text: Tensor  # [B, C] unit embeddings of the prompts
    maps: tuple[Tensor, ...]  # [B, C, h, w] each: features before pooling, which know sizes, colors and places


class ImageTextTower(ABC):
    """A frozen network that embeds images and texts."""

    @abstractmethod
    def encode(self, pixels: Tensor, prompts: Prompts) -> TowerFeatures:
        """Features of the first frame of each sample, with a gradient with respect to the pixels."""

    @abstractmethod
    def image_layers(self) -> tuple[nn.Module, tuple[str, ...]]:
        """The network, and the names of its layers that encode images; LoRA adapters can be added to these."""


def is_shipped(component: object) -> bool:
    """Whether a class is part of this package, whose tests prove that none of its rewards writes into pixels."""
    return type(component).__module__.startswith(f"{__name__.partition('.')[0]}.")


class CachedImageReward(Reward):
    """A reward whose image features can be computed once and scored against several prompts."""

    @abstractmethod
    def encode_images(self, pixels: Tensor) -> Tensor:
        """Image features: [B, ...]."""

    @abstractmethod
    def score_features(self, features: Tensor, prompts: Prompts) -> Tensor:
        """Scores of images by their features: [B]."""

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.score_features(self.encode_images(pixels), prompts)

    def score_prompts(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata]
    ) -> list[Tensor]:
        features = self.encode_images(pixels)
        return [self.score_features(features, prompts) for prompts in prompt_sets]


class RewardSpec(ABC):
    """The settings of a reward, a frozen dataclass; `load` makes the scorer. Hashable: equal specs share a scorer."""

    @property
    @abstractmethod
    def card(self) -> RewardCard:
        """What a user should know about the reward: usual range, failure modes, memory, published weights."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples per call of the scorer."""

    @property
    def differentiable(self) -> bool:
        """Whether scores have a gradient with respect to the pixels."""
        return False

    @property
    def modality(self) -> Modality:
        """`image`: every frame is scored by itself and the mean counts. `video`: the scorer gets whole clips."""
        return "image"

    @property
    def runs_on(self) -> Literal["device", "host", "remote"]:
        """Rewards on the host or on another machine run in threads, beside those on the device."""
        return "device"

    @abstractmethod
    def load(self, placement: Placement) -> Reward:
        """Load the weights and return the scorer."""

    def tiny(self) -> RewardSpec:
        """A small random version, for tests."""
        return self

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        """Published weights that these settings need: those of the card, or those that a setting names instead."""
        sources, settings = list(self.card.sources), cast(Any, self)  # every spec is a dataclass
        for field in fields(settings):
            value, default = getattr(self, field.name), field.default
            if isinstance(value, str) and value != default and default in {source.hub for source in sources}:
                sources = [source for source in sources if source.hub != default]
                if value in PUBLISHED_JUDGES:
                    sources.append(PUBLISHED_JUDGES[value])
                elif not Path(value).expanduser().exists() and HUB_ID.fullmatch(value):
                    sources.append(parse_hub_id(value))
        return tuple(dict.fromkeys(sources))


class PretrainedReward(RewardSpec):
    """A reward whose setting `weights` names its network; `tiny` is a small random one, for tests."""

    def tiny(self) -> Self:
        settings: Any = self  # every spec is a dataclass, which an abstract class cannot say
        return replace(settings, weights=TINY)  # type: ignore[no-any-return]


class WeightlessReward(RewardSpec, Reward):
    """A reward without a network, which is its own scorer."""

    def load(self, placement: Placement) -> Self:
        return self


_loaded: WeakValueDictionary[tuple[RewardSpec, Placement], Reward] = WeakValueDictionary()


def load_shared_reward(spec: RewardSpec, placement: Placement) -> Reward:
    """The scorer of a spec; equal specs share one for as long as it is in use."""
    try:
        reward = _loaded.get((spec, placement))
    except TypeError as error:
        raise ValueError(
            f"{type(spec).__name__} cannot be hashed ({error}); use tuples instead of lists for its settings, or "
            "declare the field with field(hash=False) [TM110]"
        ) from error
    if reward is None:
        reward = _loaded[spec, placement] = spec.load(placement)
    return reward


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgment of previews."""

    judgeable: Tensor  # [B] bool, whether the preview is clear enough to judge
    promising: Tensor  # [B] bool
    score: Tensor  # [B]


class Verifier(ABC):
    """Judges unfinished samples during search, or declines to judge them yet."""

    @abstractmethod
    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        """Judge previews of samples at `progress` from 0 to 1."""

    def explain(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Sequence[str]:
        """What is wrong with each sample, in words for the next attempt; empty strings if it cannot say."""
        return [""] * len(prompts)


@dataclass(frozen=True)
class Scores:
    """Scores of a batch by a rubric."""

    total: Tensor  # [B] weighted sum
    rewards: dict[str, Tensor]  # [B] of each reward, unweighted


@dataclass(frozen=True)
class RewardNormalization:
    """(score - mean) / std."""

    mean: float = 0.0
    std: PositiveFloat = 1.0


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its weight in the sum. A reward of weight zero is only logged."""

    spec: RewardSpec
    reward: Reward
    weight: float = 1.0
    normalize: RewardNormalization | None = None
    clip: tuple[float, float] | None = None  # after normalization; outside, the gradient is zero
    held_out: bool = False  # scored by the guard and on displayed samples, not at training steps

    @property
    def needs_gradient(self) -> bool:
        return self.spec.differentiable and self.weight != 0

    def normalized(self, score: Tensor) -> Tensor:
        """The score after normalization and clipping, before its weight."""
        if self.normalize is not None:
            score = (score - self.normalize.mean) / self.normalize.std
        return score if self.clip is None else score.clamp(*self.clip)


class Rubric:
    """A weighted sum of rewards. Each is called with its batch size; those on the host run in threads."""

    def __init__(self, rewards: Mapping[str, WeightedReward]) -> None:
        self.rewards = dict(rewards)
        for name, reward in self.rewards.items():
            if reward.spec.batch_size < 1:
                raise ValueError(
                    f"reward '{name}' has batch_size {reward.spec.batch_size}; set batch_size to at least 1 [TM111]"
                )
        # Worker threads get pixels without a graph, so rewards that need gradients run in the caller's thread.
        self._in_threads = [
            name
            for name, reward in self.rewards.items()
            if reward.spec.runs_on != "device" and not reward.needs_gradient
        ]
        self._pool = ThreadPoolExecutor(max(1, len(self._in_threads)), thread_name_prefix="reward")
        self._for_training: Rubric | None = None

    @property
    def uses_threads(self) -> bool:
        """Whether some rewards run in threads: those on the host or on another machine."""
        return bool(self._in_threads)

    def for_training(self) -> Rubric:
        """The rubric without held-out rewards, which training steps need not compute."""
        if not any(reward.held_out for reward in self.rewards.values()):
            return self
        if self._for_training is None:
            self._for_training = Rubric({name: reward for name, reward in self.rewards.items() if not reward.held_out})
        return self._for_training

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Scores:
        """Each reward and the weighted sum; gradients flow through differentiable rewards with a weight."""
        return self.score_each(pixels, [prompts], metadata)[0]

    def score_each(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata] = ()
    ) -> list[Scores]:
        """Scores of the same pixels for several lists of prompts; image features are computed once if possible."""
        metadata = metadata or [{}] * len(prompt_sets[0])
        for prompts in prompt_sets:
            if not len(pixels) == len(prompts) == len(metadata):
                raise ValueError(
                    f"rubric: got {len(pixels)} samples, {len(prompts)} prompts and {len(metadata)} metadata "
                    "entries; pass one prompt and one metadata entry per sample [TM112]"
                )
        pixels = check_pixels(pixels, prompt_sets[0]).float()
        futures = self._submit(pixels, prompt_sets, metadata)
        with torch.autocast(pixels.device.type, enabled=False):  # a reward's precision is not the run's
            done = {}
            for name in self.rewards:
                if name not in futures:
                    with abandonable_call():
                        done[name] = self._score_one(name, pixels, prompt_sets, metadata)
        rewards = {name: _wait_for(futures[name]) if name in futures else done[name] for name in self.rewards}
        return [
            self._sum(pixels, {name: scores[i] for name, scores in rewards.items()}) for i in range(len(prompt_sets))
        ]

    def _sum(self, pixels: Tensor, rewards: Mapping[str, Tensor]) -> Scores:
        rewards = {name: reward.to(pixels.device) for name, reward in rewards.items()}
        total = torch.zeros(len(pixels), device=pixels.device)
        for name, reward in self.normalized(rewards).items():
            total = total + self.rewards[name].weight * reward
        return Scores(total, rewards)

    def normalized(self, rewards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Normalized scores of all rewards with a weight, before the weight."""
        return {
            name: self.rewards[name].normalized(reward) for name, reward in rewards.items() if self.rewards[name].weight
        }

    def _submit(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata]
    ) -> dict[str, Future[list[Tensor]]]:
        if not self._in_threads:
            return {}
        pixels = pixels.detach().cpu()  # copied once, and before a thread on another stream could read them too early
        return {
            name: self._pool.submit(self._score_one, name, pixels, prompt_sets, metadata) for name in self._in_threads
        }

    def _score_one(
        self, name: str, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata]
    ) -> list[Tensor]:
        """Scores [B] of one reward for each list of prompts, in chunks; image rewards are averaged over frames."""
        reward, batch = self.rewards[name], len(pixels)
        if not batch:
            return [pixels.new_zeros(0) for _ in prompt_sets]
        if reward.spec.modality == "image" and pixels.shape[1] > 1:
            frames = pixels.shape[1]
            prompt_sets = [[prompt for prompt in prompts for _ in range(frames)] for prompts in prompt_sets]
            pixels, metadata = frames_as_samples(pixels, metadata)
        size, chunks = reward.spec.batch_size, []
        with nullcontext() if reward.needs_gradient else torch.no_grad():
            for i in range(0, len(pixels), size):
                chunk = slice(i, i + size)
                prompts = [prompts[chunk] for prompts in prompt_sets]
                chunks.append(_score_chunk(name, reward, pixels[chunk], prompts, metadata[chunk]))
        return [torch.cat(scores).view(batch, -1).mean(1) for scores in zip(*chunks, strict=True)]


def _wait_for(scores: Future[list[Tensor]]) -> list[Tensor]:
    """The scores of a reward in a thread. A thread that hangs after a stop request is left behind."""
    stop, start = current_stop(), time.monotonic()
    while True:
        try:
            return scores.result(POLL_SECONDS if stop.is_set() else 1.0)
        except FutureTimeoutError:
            if scores.done():
                return scores.result()
            if stop.is_expired(start):
                raise Interrupted from None


def check_pixels(pixels: Tensor, prompts: Prompts) -> Tensor:
    """The pixels, if they have the right shape and are finite."""
    if pixels.dim() != 5 or pixels.shape[2] != 3 or 0 in pixels.shape[1:]:
        raise ValueError(
            f"rubric: expected pixels of shape [B, F, 3, H, W], got {list(pixels.shape)}; add the missing dimensions "
            "(F is 1 for images) [TM113]"
        )
    # The sum of a sample is finite only if all its pixels are, and needs no mask as large as the pixels.
    finite = torch.isfinite(pixels.detach().sum((1, 2, 3, 4), dtype=torch.float32))
    rows = (~finite).nonzero().flatten().tolist()
    if rows:
        indices = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise RewardError(
            f"the pixels of sample {indices} contain NaN or infinity (prompts {_quote([prompts[i] for i in rows])}), "
            "so no reward was computed. The generator has diverged: lower optim.lr, or resume from an earlier "
            "checkpoint [TM114]"
        )
    return pixels


def _quote(prompts: Sequence[str]) -> list[str]:
    """The beginnings of the first prompts, for a message."""
    return [truncate_text(prompt, 80) for prompt in prompts[:3]]


def frames_as_samples(pixels: Tensor, metadata: Sequence[Metadata]) -> tuple[Tensor, list[Metadata]]:
    """Every frame as a sample [B * F, 1, 3, H, W], frames of a video adjacent; metadata `frame` is its index."""
    frames = pixels.flatten(0, 1)[:, None]
    return frames, [{**entry, "frame": k} for entry in metadata for k in range(pixels.shape[1])]


def _score_chunk(
    name: str, reward: WeightedReward, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata]
) -> list[Tensor]:
    """Scores of one call of a reward, checked; failures become a RewardError."""
    # A reward of the user's may write into its pixels, also through numpy, where torch would not notice.
    private = pixels.clone() if reward.reward.needs_copy else pixels
    entries = [dict(entry) for entry in metadata] if reward.reward.needs_copy else metadata
    try:
        values = reward.reward.score_prompts(private, prompt_sets, entries)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # a reward that calls sys.exit would end the run as if it were done
        kind, prompts = type(error).__name__, _quote(prompt_sets[0])
        raise RewardError(
            f"reward '{name}' failed on {prompts} ({kind}: {error}); fix the cause, or remove rewards.{name} [TM115]"
        ) from error
    return [_check_scores(name, reward, pixels, *pair) for pair in zip(prompt_sets, values, strict=True)]


def _check_scores(name: str, reward: WeightedReward, pixels: Tensor, prompts: Prompts, value: object) -> Tensor:
    """Refuse scores of the wrong shape, values that are no real, finite numbers, and missing gradients."""
    if not isinstance(value, Tensor) or value.shape != (len(pixels),):
        result = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise RewardError(
            f"reward '{name}' returned {result} for {len(pixels)} samples {_quote(prompts)}; return a tensor "
            "with one score per sample [TM116]"
        )
    if value.is_meta or value.is_complex() or value.layout != torch.strided:
        kind = "a meta tensor, which has no values" if value.is_meta else f"complex numbers ({value.dtype})"
        kind = f"a {value.layout} tensor" if value.layout != torch.strided else kind
        raise RewardError(
            f"reward '{name}' returned {kind} for {list(prompts[:3])}; return a dense tensor of real numbers [TM1163]"
        )
    finite = torch.isfinite(value.detach())
    if not bool(finite.all()):
        bad = _quote([prompts[i] for i in (~finite).nonzero().flatten().tolist()])
        raise RewardError(
            f"reward '{name}' returned NaN or infinity for {bad}; fix the reward, or remove rewards.{name} [TM117]"
        )
    if reward.needs_gradient and torch.is_grad_enabled() and pixels.requires_grad and not value.requires_grad:
        raise RewardError(
            f"reward '{name}' is declared differentiable, but its scores of {_quote(prompts)} have no gradient; "
            "compute the scores without detach or no_grad, or declare differentiable = False [TM118]"
        )
    return value.float()
