"""Rewards of the playground by its small networks: verdict, soft, match, judge, taste, motion and content."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.reward import (
    BatchSize,
    ImageTextTower,
    Modality,
    PretrainedReward,
    Reward,
    RewardCard,
    RewardSpec,
    TowerFeatures,
    Verdict,
    Verifier,
)
from ..core.types import Metadata, Placement, Prompts
from ..playground.captions import parse_captions
from ..playground.detector import SceneDetector, decode_detections
from ..playground.motion import MotionClassifier, representative_frame, requested_motion, resize_clips
from ..playground.network_files import load_network
from ..playground.networks import (
    ImageTextScorer,
    QualityScorer,
    YesNoJudge,
    first_frame,
    requested_captions,
    split_quality,
)
from ..playground.verdict import compute_verdict, partial_credit, soft_score
from .wrappers import RewardWrapper, require_image_reward


class PlaygroundReward(PretrainedReward):
    """A reward by one of the playground's networks."""

    weights: str
    network: ClassVar[type[nn.Module]]

    def load(self, placement: Placement) -> PlaygroundScorer:
        return PlaygroundScorer(self, load_network(self.network, self.weights, placement.device))

    def tower(self, net: Any) -> ImageTextTower | None:
        """The loaded network as a tower, if it embeds images and captions."""
        return None

    @abstractmethod
    def score_with(self, net: Any, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Scores [B], computed with the loaded network."""


@dataclass(frozen=True)
class PlaygroundScorer(Reward):
    spec: PlaygroundReward
    net: nn.Module

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.spec.score_with(self.net, pixels, prompts, metadata)

    def tower(self) -> ImageTextTower | None:
        return self.spec.tower(self.net)


@dataclass(frozen=True)
class PlaygroundVerdictReward(PlaygroundReward):
    """PlayEval's verdict, partial credit for each requirement that holds, or the mean of both, which learns fastest."""

    output: Literal["verdict", "graded", "mix"] = "mix"
    strict: bool = True  # objects that nobody asked for count as wrong; GenEval's rule ignores them and can be hacked
    weights: str = "playground/detector0"
    batch_size: BatchSize = 256
    network: ClassVar[type[nn.Module]] = SceneDetector
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", failure_modes="without `strict`, four copies of everything", memory="2.4 MB"
    )

    def score_with(self, net: SceneDetector, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        captions = requested_captions(prompts, metadata, pixels.device)
        detections = decode_detections(net(first_frame(pixels)))
        if self.output == "verdict":
            return compute_verdict(detections, captions, self.strict)
        credit = partial_credit(detections, captions, self.strict)
        if self.output == "graded":
            return credit
        return (credit + compute_verdict(detections, captions, self.strict)) / 2


@dataclass(frozen=True)
class PlaygroundSoftReward(PlaygroundReward):
    """The differentiable verdict: mean log-probability of what the caption asks for, less that of everything else."""

    strict: bool = True  # objects that nobody asked for cost
    weights: str = "playground/detector0"
    batch_size: BatchSize = 256
    network: ClassVar[type[nn.Module]] = SceneDetector
    card: ClassVar[RewardCard] = RewardCard(
        range="-10 to 0", failure_modes="hard outlines; without `strict`, four copies of everything", memory="2.4 MB"
    )
    differentiable: ClassVar[bool] = True

    def score_with(self, net: SceneDetector, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        captions = requested_captions(prompts, metadata, pixels.device)
        return soft_score(net(first_frame(pixels)), captions, self.strict)


@dataclass(frozen=True)
class PlaygroundMatchReward(PlaygroundReward):
    """The cosine of image and caption, as CLIP's; `crisp. a photo of a dog` adds that of the word, for `relative`."""

    weights: str = "playground/scorer"
    batch_size: BatchSize = 256
    network: ClassVar[type[nn.Module]] = ImageTextScorer
    card: ClassVar[RewardCard] = RewardCard(
        range="-1 to 1", failure_modes="textures, which the verdict rejects", memory="3.5 MB"
    )
    differentiable: ClassVar[bool] = True

    def score_with(
        self, net: ImageTextScorer, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]
    ) -> Tensor:
        texts, quality = split_quality(prompts)
        captions = parse_captions(texts).to(pixels.device)
        out: Tensor = net(first_frame(pixels), captions, torch.tensor(quality, device=pixels.device))
        return out

    def tower(self, net: ImageTextScorer) -> ImageTextTower:
        return PlaygroundTower(net)


@dataclass(frozen=True)
class PlaygroundTower(ImageTextTower):
    """The image-text scorer of the playground, for captions of its language."""

    net: ImageTextScorer

    def encode(self, pixels: Tensor, prompts: Prompts) -> TowerFeatures:
        frames = first_frame(pixels)
        fine, coarse = self.net.stem(frames)
        text = self.net.encode_captions(parse_captions(prompts).to(pixels.device))
        maps = (F.silu(fine).float(), F.silu(self.net.norm(coarse)).float())
        return TowerFeatures(self.net.encode_images(frames), text, maps)

    def image_layers(self) -> tuple[nn.Module, tuple[str, ...]]:
        return self.net, ("stem.enter", "stem.narrow", "stem.narrower", "stem.*.first", "stem.*.second")


@dataclass(frozen=True)
class PlaygroundJudgeReward(PretrainedReward):
    """The probability of 'yes, this shows the caption'. In a search it also judges which previews are clear enough."""

    clarity_threshold: float = 0.5  # probability from which a preview counts as clear
    promise_threshold: float = 0.5  # probability of yes from which a clear preview is continued
    weights: str = "playground/judge"
    batch_size: BatchSize = 256
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1", failure_modes="images unlike those it was trained on", memory="3.5 MB"
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> PlaygroundJudgeScorer:
        return PlaygroundJudgeScorer(self, load_network(YesNoJudge, self.weights, placement.device))


@dataclass(frozen=True)
class PlaygroundJudgeScorer(Reward, Verifier):
    spec: PlaygroundJudgeReward
    net: YesNoJudge

    def verifier(self) -> Verifier:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self._probabilities(pixels, prompts, metadata)[:, 0]

    @torch.no_grad()
    def judge(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata], progress: float) -> Verdict:
        with torch.autocast(pixels.device.type, enabled=False):  # a search runs in the model's precision
            yes, clear = self._probabilities(pixels.float(), prompts, metadata or [{}] * len(prompts)).unbind(1)
        return Verdict(clear >= self.spec.clarity_threshold, yes >= self.spec.promise_threshold, yes)

    def _probabilities(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Of yes, and of a clear image: [B, 2]."""
        logits: Tensor = self.net(first_frame(pixels), requested_captions(prompts, metadata, pixels.device))
        return logits.sigmoid()


@dataclass(frozen=True)
class PlaygroundTasteReward(PlaygroundReward):
    """Image quality: prefers crisp, intact images to noisy, blurry and broken ones, whatever they show."""

    weights: str = "playground/taste"
    batch_size: BatchSize = 256
    network: ClassVar[type[nn.Module]] = QualityScorer
    card: ClassVar[RewardCard] = RewardCard(
        range="-8 to 8", failure_modes="crisp images of something else", memory="0.5 MB"
    )
    differentiable: ClassVar[bool] = True

    def score_with(self, net: QualityScorer, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        out: Tensor = net(first_frame(pixels))
        return out


@dataclass(frozen=True)
class PlaygroundMotionReward(PlaygroundReward):
    """The probability of the caption's motion by a classifier of videos; one of its classes is no motion."""

    output: Literal["log", "probability"] = "log"  # gradients follow the logarithm better, groups the probability
    weights: str = "playground/motion0"
    batch_size: BatchSize = 128
    network: ClassVar[type[nn.Module]] = MotionClassifier
    card: ClassVar[RewardCard] = RewardCard(
        range="-10 to 0", failure_modes="blotches that move as requested", memory="0.9 MB"
    )
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def score_with(
        self, net: MotionClassifier, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]
    ) -> Tensor:
        motion = requested_motion(prompts, metadata, pixels.device)
        log_probs: Tensor = net(resize_clips(pixels)).log_softmax(1)
        score = log_probs[torch.arange(len(motion), device=motion.device), motion]
        return score if self.output == "log" else score.exp()


@dataclass(frozen=True)
class PlaygroundContentReward(RewardWrapper):
    """An image reward of the one frame in which the objects of a video are upright and at full size.

    The mean over all frames would reward rotating objects for standing upright all the time, and growing ones for being
    large at once.
    """

    reward: RewardSpec

    def __post_init__(self) -> None:
        require_image_reward(self.reward)

    @property
    def modality(self) -> Modality:
        return "video"

    def score_with(self, inner: Reward, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        frame = representative_frame(pixels, requested_motion(prompts, metadata, pixels.device))
        return inner.score(frame, prompts, metadata)
