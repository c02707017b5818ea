"""VBench-style scores of clips with networks that the package has: five of VBench's dimensions and their mean.

Subject consistency and flickering follow VBench's rules. Smoothness and dynamic degree use the flow of Lucas and Kanade
instead of AMT and RAFT, so their values are not VBench's. Imaging quality is MUSIQ as in VBench with a file of it, and
CLIP-IQA otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights
from ..rewards.backbones.frozen_models import TINY, load_network, random_network
from ..rewards.backbones.optical_flow import SHORT_SIDE, estimate_flow, flicker_score, resize_for_flow
from ..rewards.backbones.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from ..rewards.clip_iqa import ClipIqaReward, ClipIqaScorer
from ..rewards.musiq import MusiqReward, MusiqScorer
from .benchmarks import Benchmark
from .evaluate import BenchmarkScorer
from .metrics import BOOTSTRAP_DRAWS, IntervalDict, interval_of_draws

DINO = WeightsSource("facebook/dino-vitb16", size="0.34 GB", license="Apache-2.0")
DINO_SIZE = 224  # pixels of the shorter side
FASTEST = 0.05  # share of the pixels whose flow decides whether a pair of frames moves
MOVING_FLOW = 6 / 256  # of the shorter side
MIN_FRAMES = 3
MUSIQ_NAME, MUSIQ_SIDE = "musiq", 512  # how names of its files begin, and pixels of the longer side
# Lowest and highest value of VBench's normalization, and the weight in the mean.
DIMENSIONS: dict[str, tuple[float, float, float]] = {
    "subject_consistency": (0.1462, 1.0, 1.0),
    "motion_smoothness": (0.706, 0.9975, 1.0),
    "dynamic_degree": (0.0, 1.0, 0.5),
    "temporal_flickering": (0.6293, 1.0, 1.0),
    "imaging_quality": (0.0, 1.0, 1.0),
}


@dataclass(frozen=True)
class SubjectEncoder:
    """DINO ViT-B/16: the class token of frames, at 224 pixels of the shorter side, without antialiasing."""

    net: Any
    size: int = DINO_SIZE

    @torch.no_grad()
    def __call__(self, frames: Tensor) -> Tensor:
        """Unit features [F, C] of frames [F, 3, H, W]."""
        height, width = frames.shape[-2:]
        shorter = min(height, width)
        sides = (int(self.size * height / shorter), int(self.size * width / shorter))
        resized = F.interpolate(frames, sides, mode="bilinear", antialias=False)
        mean, std = (frames.new_tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
        states = self.net(((resized - mean) / std).to(self.net.dtype), interpolate_pos_encoding=True).last_hidden_state
        return F.normalize(states[:, 0].float(), dim=-1)


def load_subject_encoder(weights: str, placement: Placement) -> SubjectEncoder:
    """DINO of a folder or hub id in the layout of transformers, or a tiny random one."""
    from transformers import ViTConfig, ViTModel

    class VisionTransformer(ViTModel):  # type: ignore[no-untyped-call]
        """Without the pooling layer, which DINO does not have."""

        def __init__(self, config: Any) -> None:
            super().__init__(config, add_pooling_layer=False)

    if weights == TINY:
        size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 16}
        config = ViTConfig(num_hidden_layers=2, num_attention_heads=2, **size)
        return SubjectEncoder(random_network(VisionTransformer, config, placement), 32)
    path = find_weights(weights, DINO if weights == DINO.hub else WeightsSource(weights))
    config = ViTConfig.from_pretrained(path, local_files_only=True)
    return SubjectEncoder(load_network(VisionTransformer, config, path, placement))


@dataclass(frozen=True)
class VideoQualityScorer(BenchmarkScorer):
    """Scores each clip in the dimensions that its prompt is for; the others are None."""

    encoder: SubjectEncoder
    imaging_quality: Callable[[Tensor], Tensor]  # of frames [F, 3, H, W] from 0 to 1: [F]
    device: torch.device
    name: str = ""

    @property
    def detector(self) -> str:
        return f"networks {self.name}"

    @torch.no_grad()
    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        if pixels.shape[1] < MIN_FRAMES:
            raise ConfigError(
                f"vbench-lite compares frames; expected clips of {MIN_FRAMES} frames or more, got {pixels.shape[1]}; "
                "generate longer clips [TM2172]"
            )
        rows = []
        for clip, requested in zip(pixels, metadata, strict=True):
            frames = clip.to(self.device).float()
            measure: dict[str, Callable[[Tensor], Tensor | float]] = {
                "subject_consistency": lambda x: subject_consistency(self.encoder(x)),
                "motion_smoothness": lambda x: 1 - 2 * float(flicker_score(x[None])),
                "dynamic_degree": is_moving,
                "temporal_flickering": lambda x: 1 - float(x.diff(dim=0).abs().mean()),
                "imaging_quality": lambda x: self.imaging_quality(x).mean(),
            }
            scores = {
                name: float(measure[name](frames)) if name in requested["dimensions"] else None for name in DIMENSIONS
            }
            measured = [{"question": name, "score": x} for name, x in scores.items() if x is not None]
            rows.append({**scores, "quality": weighted_quality(scores), "answers": measured})
        return rows

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the weighted mean of the normalized dimensions, as VBench's quality score of those that it has."""
        return {"judge": self.name, "scores": {"quality": {"overall": quality_interval(rows)}}}


@dataclass(frozen=True)
class ClipIqaQuality:
    """CLIP-IQA of frames."""

    scorer: ClipIqaScorer

    def __call__(self, frames: Tensor) -> Tensor:
        return self.scorer.score_features(self.scorer.encode_images(frames[:, None]), [""] * len(frames))


@dataclass(frozen=True)
class MusiqQuality:
    """MUSIQ of frames over 100, at most 512 pixels on the longer side, as VBench's imaging quality."""

    scorer: MusiqScorer

    def __call__(self, frames: Tensor) -> Tensor:
        longer = max(frames.shape[-2:])
        if longer > MUSIQ_SIDE:
            height, width = (int(MUSIQ_SIDE / longer * side) for side in frames.shape[-2:])
            frames = F.interpolate(frames, (height, width), mode="bilinear", antialias=False)
        scores = [self.scorer.score(frame[None, None], [""], [{}]) for frame in frames]  # one at a time: they are large
        return torch.cat(scores) / 100


def subject_consistency(features: Tensor) -> float:
    """Mean similarity of frames to the previous and to the first one, given unit features [F, C]."""
    previous = (features[1:] * features[:-1]).sum(1).clamp(min=0)
    first = (features[1:] * features[:1]).sum(1).clamp(min=0)
    return float((previous + first).mean() / 2)


def is_moving(frames: Tensor) -> float:
    """1 if enough pairs of frames [F, 3, H, W] move: the fastest 5 % of pixels, at 8 frames a second."""
    small = resize_for_flow(frames)
    flow = estimate_flow(small[:-1], small[1:]).square().sum(1).sqrt().flatten(1)  # [F - 1, h * w]
    fastest = flow.topk(max(1, round(FASTEST * flow.shape[1]))).values.mean(1)
    moving = int((fastest > MOVING_FLOW * SHORT_SIDE).sum())
    return float(moving >= max(1, round(4 * len(frames) / 16)))


def weighted_quality(scores: Mapping[str, float | None]) -> float | None:
    """Return the weighted mean of the normalized dimensions that were measured."""
    known = {name: value for name, value in scores.items() if value is not None and name in DIMENSIONS}
    total = sum(DIMENSIONS[name][2] for name in known)
    if not known:
        return None
    return sum(normalize(name, value) * DIMENSIONS[name][2] for name, value in known.items()) / total


def normalize(name: str, value: float) -> float:
    low, high, _ = DIMENSIONS[name]
    return (value - low) / (high - low)


def quality_interval(rows: Sequence[Mapping[str, Any]], draws: int = BOOTSTRAP_DRAWS) -> IntervalDict:
    """Weighted mean over dimensions of their normalized means over prompts; prompts are resampled."""
    prompts = list(dict.fromkeys(row["index"] for row in rows))
    values = torch.full((len(prompts), len(DIMENSIONS)), torch.nan, dtype=torch.float64)
    for p, prompt in enumerate(prompts):
        for d, name in enumerate(DIMENSIONS):
            scores = [row[name] for row in rows if row["index"] == prompt and row[name] is not None]
            if scores:
                values[p, d] = normalize(name, sum(scores) / len(scores))
    measured = ~values.isnan().all(0)
    weights = torch.tensor([weight for _, _, weight in DIMENSIONS.values()], dtype=torch.float64)[measured]
    weights = weights / weights.sum()
    chosen = torch.randint(len(prompts), (draws, len(prompts)), generator=torch.Generator().manual_seed(0))
    means = (values[:, measured][chosen].nanmean(1) * weights).sum(1)
    # A draw without a prompt of some dimension says nothing about the mean.
    return interval_of_draws((values[:, measured].nanmean(0) * weights).sum(), means[~means.isnan()], len(prompts))


def load_video_quality_scorer(subject: str, quality: str, placement: Placement, *, tiny: bool) -> VideoQualityScorer:
    """The networks of vbench-lite. `quality` is CLIP for CLIP-IQA, or the path of a file of MUSIQ."""
    encoder = load_subject_encoder(TINY if tiny else subject, placement)
    name = TINY if tiny else f"{subject} and {quality}"
    imaging_quality: Callable[[Tensor], Tensor]
    if Path(quality).name.startswith(MUSIQ_NAME):
        musiq = MusiqReward(TINY if tiny else quality).load(placement)
        if musiq.net.outputs != 1:
            raise ConfigError(
                f"--judge: 'quality_weights' is {quality!r:.100}, which rates taste from 1 to 10; give "
                "musiq_spaq_ckpt-358bb6af.pth, which VBench's imaging quality uses [TM2061]"
            )
        imaging_quality = MusiqQuality(musiq)
    else:
        imaging_quality = ClipIqaQuality(ClipIqaReward(weights=TINY if tiny else quality).load(placement))
    return VideoQualityScorer(encoder, imaging_quality, placement.device, name)
