"""The verdict on edits of the playground: the instruction is fulfilled, and everything else is as in the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Prompts
from ..playground.detector import SceneDetector, decode_detections
from ..playground.edits import check_edits, parse_requests
from ..playground.networks import first_frame
from .playground import PlaygroundReward
from .reference_images import reference_images


@dataclass(frozen=True)
class PlaygroundEditReward(PlaygroundReward):
    """Whether an edit follows its instruction and leaves the rest unchanged, partial credit for both, or their mean."""

    output: Literal["verdict", "graded", "mix", "followed", "preserved"] = "mix"  # followed, preserved: half a verdict
    weights: str = "playground/detector0"
    batch_size: BatchSize = 256
    network: ClassVar[type[nn.Module]] = SceneDetector
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="`followed` alone: new images that ignore the source; `preserved` alone: copies of the source",
        memory="2.4 MB",
    )

    def score_with(self, net: SceneDetector, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        requests = parse_requests(prompts, metadata, pixels.device)
        sources = torch.stack([images[0] for images in reference_images("image", prompts, metadata)]).to(pixels)
        edited = first_frame(pixels)
        checks = check_edits(decode_detections(net(edited)), edited, first_frame(sources[:, None]), requests)
        followed, preserved = checks.followed().float(), checks.preserved().float()
        outputs = {
            "verdict": followed * preserved,
            "followed": followed,
            "preserved": preserved,
            "graded": checks.credit(),
            "mix": (checks.credit() + followed * preserved) / 2,
        }
        return outputs[self.output]
