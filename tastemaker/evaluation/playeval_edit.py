"""PlayEval-Edit: held-out instructions about scenes of the playground, scored by a detector that is never a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import Metadata, PromptBatch, Prompts
from ..playground.detector import SceneDetector, decode_detections
from ..playground.edits import KINDS, SceneEdits, check_edits, parse_requests, sample_edits
from ..playground.network_files import load_network
from ..playground.networks import first_frame
from ..playground.scenes import Painter
from ..rewards.reference_images import reference_images
from .benchmarks import Benchmark
from .evaluate import BenchmarkScorer
from .playeval import HELD_OUT_DETECTOR, PlayEvalScorer, load_playeval_scorer

EDIT_SEED = 20_27  # part of the definition of PlayEval-Edit
EDIT_SCORES = ("strict", "followed", "preserved", "graded")


@dataclass(frozen=True)
class EditBenchmark(Benchmark):
    """Held-out edits, whose sources are painted when they are needed."""

    @cached_property
    def painter(self) -> Painter:
        return Painter()

    def batch(self, indices: list[int]) -> PromptBatch:
        batch = super().batch(indices)
        edits, rng = sample_benchmark_edits(torch.tensor(indices))
        sources, _ = edits.paint(self.painter, rng)
        metadata = tuple({**entry, "image": source} for entry, source in zip(batch.metadata, sources, strict=True))
        return PromptBatch(batch.prompts, metadata)


def sample_benchmark_edits(rows: Tensor) -> tuple[SceneEdits, Randomness]:
    """The edits of some prompts of the benchmark, and their randomness."""
    rng = Randomness(EDIT_SEED, 0, rows)
    return sample_edits(rng, "held_out"), rng


def playeval_edit(prompts: int = 504, samples_per_prompt: int = 2) -> Benchmark:
    """Instructions that are held out from training, with a source each; the kinds of edits are equally likely."""
    if prompts < 1 or samples_per_prompt < 1:
        raise ValueError(
            f"PlayEval-Edit: expected at least 1 prompt and 1 sample per prompt, got {prompts} prompts and "
            f"{samples_per_prompt} samples per prompt; use higher numbers [TM2361]"
        )
    edits, _ = sample_benchmark_edits(torch.arange(prompts))
    tags = tuple(KINDS[kind] for kind in edits.kind.tolist())
    metadata = tuple({"edit": request} for request in edits.requests().metadata())
    return EditBenchmark("playeval-edit", edits.texts(), metadata, tags, samples_per_prompt, EDIT_SCORES)


@dataclass(frozen=True)
class PlayEvalEditScorer(BenchmarkScorer):
    """Whether edits follow the instruction and leave the rest unchanged, by a held-out detector and the pixels."""

    net: SceneDetector
    scorer: PlayEvalScorer

    @torch.no_grad()
    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Strict is followed and preserved; graded is partial credit for both."""
        device = self.scorer.device
        edited = first_frame(pixels.to(device).float())
        sources = torch.stack([images[0] for images in reference_images("image", prompts, metadata)]).to(edited)
        requests = parse_requests(prompts, metadata, device)
        checks = check_edits(decode_detections(self.net(edited)), edited, sources, requests)
        followed, preserved = checks.followed(), checks.preserved()
        columns = {
            "strict": (followed & preserved).float(),
            "followed": followed.float(),
            "preserved": preserved.float(),
            "graded": checks.credit(),
        }
        rows = [dict(zip(columns, row, strict=True)) for row in torch.stack([*columns.values()], 1).tolist()]
        return [{**row, "reasons": reasons} for row, reasons in zip(rows, checks.reasons(), strict=True)]

    def features(self, pixels: Tensor) -> Tensor:
        return self.scorer.features(pixels)


def load_playeval_edit_scorer(
    weights: str = HELD_OUT_DETECTOR, device: torch.device | str = "cpu"
) -> PlayEvalEditScorer:
    return PlayEvalEditScorer(load_network(SceneDetector, weights, device), load_playeval_scorer(weights, device))
