"""What people prefer, by CLIP ViT-H/14 trained on their choices (HPS v2, Wu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ..core.reward import BatchSize, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource
from .backbones.dual_encoders import CosineHead, DualEncoderScorer, ImagePreprocessing
from .backbones.image_text_models import ImageTextFit, load_image_text_model
from .backbones.loading import TINY
from .backbones.preprocessing import Preprocessing
from .backbones.tokenizers import CLIP_TOKENIZER

FILES = {
    "v2.0": WeightsSource("xswu/HPSv2", "HPS_v2_compressed.pt", "2 GB", "Apache-2.0"),
    "v2.1": WeightsSource("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", "Apache-2.0"),
}


@dataclass(frozen=True)
class Hps:
    """The cosine of picture and prompt, without a scale: HPS v2.0 or v2.1, from the published open_clip file."""

    version: Literal["v2.0", "v2.1"] = "v2.1"
    weights: str = "xswu/HPSv2"
    tokenizer: str | None = None  # folder or hub id; else what lies beside the weights, else CLIP's own
    fit: ImageTextFit = "pad"  # the longer side is 224, as the authors have it; `crop` as SRPO, `stretch` as VADER
    batch_size: BatchSize = 32
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    @property
    def about(self) -> RewardCard:
        return RewardCard(
            range="0.2 to 0.35",
            hacked_by="oversaturated, glossy and painted looks; followed by gradient, oily textures and patches of "
            "pattern",
            memory="3.9 GB, half of it in 16 bits",
            sources=(FILES[self.version], CLIP_TOKENIZER),
        )

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, FILES[self.version], placement)
        # Published for tensors: what the filter overshoots stays, and an odd crop begins at the even pixel.
        by: Literal["bilinear", "bicubic"] = "bilinear" if self.fit == "stretch" else "bicubic"
        looks = Preprocessing(model.size, self.fit, by, overshoot="keep", corner="round")
        return DualEncoderScorer(
            model.net, ImagePreprocessing(looks), model.words(self.tokenizer, mended=True), CosineHead()
        )

    def tiny(self) -> Self:
        return replace(self, weights=TINY)
