"""Rewards score pixels [B, F, 3, H, W] in [0, 1]; an image is a video of one frame."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast
from weakref import WeakValueDictionary

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from .cards import PUBLISHED_JUDGES, WeightsSource, parse_hub_id
from .cards import RewardCard as RewardCard
from .cuda_streams import HostCopy, ScoringTurn, copy_to_device, sample_before_scoring, scoring_turn
from .errors import RewardError as RewardError
from .interruption import abandonable_call
from .registry import ConfigError
from .reward_inputs import check_shape, check_sums, copy_metadata, sum_samples
from .reward_inputs import frames_as_samples as frames_as_samples
from .scores import PendingScores as PendingScores
from .scores import Scores as Scores
from .scores import score_checked
from .types import Metadata, Placement, Prompts
from .verifier import ImageTextTower as ImageTextTower
from .verifier import TowerFeatures as TowerFeatures
from .verifier import Verdict as Verdict
from .verifier import Verifier as Verifier

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?")  # owner/name, or a file in it
TINY = "tiny"  # as `weights`: few random weights, in no file
Modality = Literal["image", "video"]
BatchSize = Annotated[int, Field(ge=1)]  # samples per call of a scorer


class Reward(ABC):
    """A loaded scorer of pixels [B, F, 3, H, W] in [0, 1]."""

    version: str = ""  # identifies what the settings do not say, such as the model behind a remote reward

    @property
    def needs_copy(self) -> bool:
        """Whether it gets copies of pixels and metadata, because it might write into them: all but our own."""
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
        return [self.score(pixels.clone(), prompts, copy_metadata(metadata)) for prompts in prompt_sets]

    def score_groups(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], group_size: int) -> Tensor:
        """Scores [B] of whole groups, whose samples are adjacent. Called if the spec `needs_group`.

        By default `score` gets one group per call. Permuting the samples of a group permutes their scores.
        """
        groups = [slice(i, i + group_size) for i in range(0, len(pixels), group_size)]
        return torch.cat([self.score(pixels[group], prompts[group], metadata[group]) for group in groups])

    def compare(self, first: Tensor, second: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Probability [N] that the first sample of each pair is the better one; 0.5 is a tie.

        By default the scores decide. A pairwise reward, whose spec `compares_pairs`, looks at both samples at once.
        """
        better, worse = self.score(first, prompts, metadata), self.score(second, prompts, metadata)
        return ((better > worse).float() + (better >= worse).float()) / 2

    def pointwise(self) -> tuple[RewardSpec, Reward] | None:
        """Of a reward that needs groups, the reward of single samples that it compares; None if there is none."""
        return None

    def metrics(self) -> dict[str, float]:
        """Numbers about the scores since the last call, such as the share of bad answers; always of the same names."""
        return {}

    def persist_in(self, directory: Path) -> None:
        """Keep what must survive a restart, such as a spent budget, in files of a directory. By default nothing."""
        return None

    def verifier(self) -> Verifier | None:
        """The reward as a verifier of unfinished samples; None if it judges finished ones only."""
        return None

    def tower(self) -> ImageTextTower | None:
        """The frozen network of the reward, on which a preference model can be trained; None if it has none."""
        return None


class PairwiseReward(Reward):
    """A reward that compares two samples and has no scores of single ones."""

    @abstractmethod
    def compare(self, first: Tensor, second: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Probability [N] that the first sample of each pair is the better one; 0.5 is a tie."""

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        raise ValueError(
            f"{type(self).__name__} compares two samples and has no scores of single ones; use it as the `reward` of "
            "win_rate [TM1587]"
        )


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
    def samples_per_call(self) -> int:
        """Samples that the scorer gets at once: those of several batches if it scores batches concurrently."""
        return self.batch_size

    @property
    def differentiable(self) -> bool:
        """Whether scores have a gradient with respect to the pixels."""
        return False

    @property
    def modality(self) -> Modality:
        """`image`: every frame is scored by itself and the mean counts. `video`: the scorer gets whole clips."""
        return "image"

    @property
    def needs_group(self) -> bool:
        """Whether a score depends on all samples of its prompt: the scorer gets whole groups, with all their frames."""
        return False

    @property
    def compares_pairs(self) -> bool:
        """Whether the scorer only compares two samples (`Reward.compare`) and has no scores of single ones."""
        return False

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
        for setting in fields(settings):
            value, default = getattr(self, setting.name), setting.default
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
    device: torch.device | None = None  # of the reward if it has one of its own; None: that of the pixels

    @property
    def needs_gradient(self) -> bool:
        return self.spec.differentiable and self.weight != 0

    @property
    def runs_elsewhere(self) -> bool:
        """Whether it runs in a thread, beside the device of the sampler: on the host, remote or on its own device."""
        return self.spec.runs_on != "device" or self.device is not None

    def pointwise(self) -> WeightedReward | None:
        """The reward of single samples; of one that needs groups, what it compares, or None."""
        if not self.spec.needs_group:
            return self
        inner = self.reward.pointwise()
        return inner and replace(self, spec=inner[0], reward=inner[1], normalize=None, clip=None)

    def call(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata], group_size: int
    ) -> list[Tensor]:
        """What the scorer returns for each list of prompts."""
        # A reward of the user's may write into its pixels, also through numpy, where torch would not notice.
        private = pixels.clone() if self.reward.needs_copy else pixels
        entries = copy_metadata(metadata) if self.reward.needs_copy else metadata
        if self.spec.needs_group:
            return [self.reward.score_groups(private, prompts, entries, group_size) for prompts in prompt_sets]
        return self.reward.score_prompts(private, prompt_sets, entries)

    def normalized(self, score: Tensor) -> Tensor:
        """The score after normalization and clipping, before its weight."""
        if self.normalize is not None:
            score = (score - self.normalize.mean) / self.normalize.std
        return score if self.clip is None else score.clamp(*self.clip)


class Rubric:
    """A weighted sum of rewards. Each is called with its batch size.

    Rewards on the host, on other machines and on devices of their own run in threads, one for each of them: batches of
    a reward are scored one after the other, in the order in which they were started.
    """

    def __init__(self, rewards: Mapping[str, WeightedReward]) -> None:
        self.rewards = dict(rewards)
        for name, reward in self.rewards.items():
            if reward.spec.compares_pairs:
                raise ConfigError(
                    f"reward '{name}' compares two samples and has no scores of single ones; use it inside of "
                    "'{type: win_rate, reward: ...}' [TM1586]"
                )
            if reward.spec.batch_size < 1:
                raise ValueError(
                    f"reward '{name}' has batch_size {reward.spec.batch_size}; set batch_size to at least 1 [TM111]"
                )
        self._threads = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}")
            for name, reward in self.rewards.items()
            if reward.runs_elsewhere
        }
        self._for_training: Rubric | None = None
        self._pointwise: Rubric | None = None

    @property
    def needs_groups(self) -> bool:
        """Whether some reward compares the samples of a prompt, so that groups must not be split."""
        return any(reward.spec.needs_group for reward in self.rewards.values())

    def pointwise(self) -> Rubric:
        """The rubric for single samples: rewards of groups are replaced by the reward that they compare, or left out.

        Normalization and clipping, which are meant for the scores of groups, do not apply to the replacements.
        """
        if not self.needs_groups:
            return self
        if self._pointwise is None:
            rewards = {name: weighted.pointwise() for name, weighted in self.rewards.items()}
            self._pointwise = Rubric({name: weighted for name, weighted in rewards.items() if weighted})
        return self._pointwise

    @property
    def uses_threads(self) -> bool:
        """Whether some rewards run in threads: those on the host, on another machine or on a device of their own."""
        return bool(self._threads)

    def prioritize_sampling(self, device: torch.device) -> AbstractContextManager[None]:
        """Give the sampler on `device` priority over rewards in threads, if some of them run on the same GPU."""
        devices = [self.rewards[name].device for name in self._threads]
        shared = any(each and each.type == device.type and each.index in (None, device.index) for each in devices)
        return sample_before_scoring(device if shared else None)

    def persist_in(self, directory: Path) -> None:
        """Let each reward keep what must survive a restart in a folder of its name."""
        for name, reward in self.rewards.items():
            reward.reward.persist_in(directory / name)

    def for_training(self) -> Rubric:
        """The rubric without held-out rewards, which training steps need not compute."""
        if not any(reward.held_out for reward in self.rewards.values()):
            return self
        if self._for_training is None:
            self._for_training = Rubric({name: reward for name, reward in self.rewards.items() if not reward.held_out})
        return self._for_training

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata] = (), group_size: int = 1) -> Scores:
        """Each reward and the weighted sum; gradients flow through differentiable rewards with a weight.

        The `group_size` samples of a prompt are adjacent. Only rewards that compare them use it.
        """
        return self.score_each(pixels, [prompts], metadata, group_size)[0]

    def score_each(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata] = (), group_size: int = 1
    ) -> list[Scores]:
        """Scores of the same pixels for several lists of prompts; image features are computed once if possible."""
        return self.start(pixels, prompt_sets, metadata, group_size).wait()

    def start(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata] = (), group_size: int = 1
    ) -> PendingScores:
        """Compute the rewards on the device of the pixels now, and let the other ones continue in their threads.

        The caller may sample in the meantime. Results do not depend on that.
        """
        metadata = metadata or [{}] * len(prompt_sets[0])
        for prompts in prompt_sets:
            if not len(pixels) == len(prompts) == len(metadata):
                raise ValueError(
                    f"rubric: got {len(pixels)} samples, {len(prompts)} prompts and {len(metadata)} metadata "
                    "entries; pass one prompt and one metadata entry per sample [TM112]"
                )
            self._check_groups(prompts, group_size)
        check_shape(pixels)
        pixels = pixels.float()
        futures = self._submit(pixels, prompt_sets, metadata, group_size)
        with torch.autocast(pixels.device.type, enabled=False):  # a reward's precision is not the run's
            done = {}
            for name in self.rewards:
                if name not in futures:
                    with abandonable_call():
                        done[name] = self._score_one(name, pixels, prompt_sets, metadata, group_size)
        combine = partial(self._sum, len(pixels), pixels.device)  # which does not keep the pixels in memory
        return PendingScores(tuple(self.rewards), len(prompt_sets), done, futures, combine)

    def _check_groups(self, prompts: Prompts, group_size: int) -> None:
        """Refuse batches that are not whole groups of one prompt each, if some reward compares those."""
        names = [name for name, reward in self.rewards.items() if reward.spec.needs_group]
        if not names or not len(prompts):
            return
        if group_size < 2 or len(prompts) % group_size:
            raise ValueError(
                f"reward '{names[0]}' compares the samples of a prompt, but got {len(prompts)} samples in groups of "
                f"{group_size}; score whole groups of at least 2 samples, or use the reward that it compares [TM1580]"
            )
        mixed = [i for i in range(len(prompts)) if prompts[i] != prompts[i // group_size * group_size]]
        if mixed:
            raise ValueError(
                f"reward '{names[0]}' compares the samples of a prompt, but sample {mixed[0]} has another prompt than "
                "the first of its group; place the samples of a prompt beside each other [TM1581]"
            )

    def _sum(self, num_samples: int, device: torch.device, rewards: Mapping[str, Tensor]) -> Scores:
        rewards = {name: copy_to_device(reward, device) for name, reward in rewards.items()}
        total = torch.zeros(num_samples, device=device)
        for name, reward in self.normalized(rewards).items():
            total = total + self.rewards[name].weight * reward
        return Scores(total, rewards)

    def normalized(self, rewards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Normalized scores of all rewards with a weight, before the weight."""
        return {
            name: self.rewards[name].normalized(reward) for name, reward in rewards.items() if self.rewards[name].weight
        }

    def _submit(
        self, pixels: Tensor, prompt_sets: Sequence[Prompts], metadata: Sequence[Metadata], group_size: int
    ) -> dict[str, Future[list[Tensor]]]:
        """Let threads compute some rewards. The caller waits for the GPU only if it computes some itself."""
        # Threads get pixels without a graph, so rewards whose gradient is needed now run in the caller's thread.
        with_graph = torch.is_grad_enabled() and pixels.requires_grad
        names = [name for name in self._threads if not (with_graph and self.rewards[name].needs_gradient)]
        sums = sum_samples(pixels)
        if not names or len(names) < len(self.rewards):
            check_sums(sums, prompt_sets[0])
        if not names:
            return {}
        copy, score = HostCopy(pixels, sums), self._score_in_thread
        turns = {name: scoring_turn(self.rewards[name].device) for name in names}
        return {
            name: self._threads[name].submit(score, name, turns[name], copy, prompt_sets, metadata, group_size)
            for name in names
        }

    def _score_in_thread(
        self,
        name: str,
        turn: ScoringTurn,
        copy: HostCopy,
        prompt_sets: Sequence[Prompts],
        metadata: Sequence[Metadata],
        group_size: int,
    ) -> list[Tensor]:
        """Scores on the host, which the thread has waited for if a GPU computes them."""
        pixels, sums = copy.wait()
        check_sums(sums, prompt_sets[0])
        with torch.no_grad(), turn.use():
            return [scores.cpu() for scores in self._score_one(name, pixels, prompt_sets, metadata, group_size)]

    def _score_one(
        self,
        name: str,
        pixels: Tensor,
        prompt_sets: Sequence[Prompts],
        metadata: Sequence[Metadata],
        group_size: int,
    ) -> list[Tensor]:
        """Scores [B] of one reward for each list of prompts, in chunks; image rewards are averaged over frames.

        Chunks of a reward that needs groups are whole groups, and it averages over frames itself.
        """
        reward, batch = self.rewards[name], len(pixels)
        group_size = group_size if reward.spec.needs_group else 1
        pixels = pixels if reward.device is None else copy_to_device(pixels, reward.device)
        if not batch:
            return [pixels.new_zeros(0) for _ in prompt_sets]
        if reward.spec.modality == "image" and pixels.shape[1] > 1 and not reward.spec.needs_group:
            frames = pixels.shape[1]
            prompt_sets = [[prompt for prompt in prompts for _ in range(frames)] for prompts in prompt_sets]
            pixels, metadata = frames_as_samples(pixels, metadata)
        size, chunks = max(1, reward.spec.samples_per_call // group_size) * group_size, []
        with nullcontext() if reward.needs_gradient else torch.no_grad():
            for i in range(0, len(pixels), size):
                chunk = slice(i, i + size)
                prompts = [prompts[chunk] for prompts in prompt_sets]
                call = partial(reward.call, pixels[chunk], prompts, metadata[chunk], group_size)
                chunks.append(score_checked(name, call, pixels[chunk], prompts, needs_gradient=reward.needs_gradient))
        return [torch.cat(scores).view(batch, -1).mean(1) for scores in zip(*chunks, strict=True)]
