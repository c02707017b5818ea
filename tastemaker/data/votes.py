"""Preference pairs and likes of a vote log: what people chose, for DPO, KTO and preference models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core.registry import ConfigError
from ..core.types import LikeBatch, PreferenceBatch
from ..preferences.votes import likes, read_votes, to_pairs
from .image_transforms import check_image_size
from .likes import LikeDataset, LikedImage, check_like_ratio
from .pairs import PairDataset
from .text_files import require_file


@dataclass(frozen=True)
class VotePairs(PairDataset):
    """Pairs of a vote log. `targets` are 1, or 0.5 for a tie."""

    targets: tuple[float, ...] = ()


@dataclass(frozen=True)
class VoteData:
    """Pairs of a vote log (`votes.jsonl`): the sample that was chosen, and each that was not.

    Liked and disliked samples are paired within a prompt.
    """

    path: Path
    voter: str = ""  # only the votes of this voter; by default all
    ties: bool = False  # keep votes without a preference, which a preference model can use and DPO cannot
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = PreferenceBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)

    def load(self, seed: int) -> VotePairs:
        votes = [vote for vote in read_votes(self.path) if self.voter in ("", vote.voter)]
        pairs = to_pairs(votes, self.path.parent, ties=self.ties)
        if not pairs:
            of = f" of the voter '{self.voter:.60}'" if self.voter else ""
            raise ConfigError(
                f"data.path: {self.path} has {len(votes)} votes{of}, and none prefers one sample to another; vote on "
                "pairs, or like and dislike samples of the same prompt [TM1310]"
            )
        locations = tuple(f"{self.path}, vote {k + 1}" for k in range(len(pairs)))
        files = tuple(
            (require_file(pair.chosen, place), require_file(pair.rejected, place))
            for pair, place in zip(pairs, locations, strict=True)
        )
        targets = tuple(0.5 if pair.tie else 1.0 for pair in pairs)
        return VotePairs(tuple(pair.prompt for pair in pairs), files, locations, self.image_size, seed, targets)


@dataclass(frozen=True)
class LikeVotes:
    """Liked and disliked samples of a vote log (`votes.jsonl`), each by itself; votes on pairs are not read."""

    path: Path
    voter: str = ""  # only the votes of this voter; by default all
    like_ratio: float | None = None  # share of likes in a batch, such as 0.8; by default that of the data
    image_size: int | None = None  # pixels per side of the center square; by default images stay as they are
    batch_type: ClassVar[type] = LikeBatch

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        check_like_ratio(self.like_ratio)

    def load(self, seed: int) -> LikeDataset:
        votes = [vote for vote in read_votes(self.path) if self.voter in ("", vote.voter)]
        images = [
            LikedImage(prompt, require_file(self.path.parent / sample.file, str(self.path)), liked)
            for prompt, samples in likes(votes).items()
            for liked, group in ((True, samples.liked), (False, samples.disliked))
            for sample, _ in group
        ]
        if not images:
            of = f" of the voter '{self.voter:.60}'" if self.voter else ""
            raise ConfigError(
                f"data.path: {self.path} has {len(votes)} votes{of}, and none is a like or a dislike; like and dislike "
                "samples, or set data.type=votes to train on pairs [TM1600]"
            )
        return LikeDataset.from_images(images, self.image_size, self.like_ratio, seed)
