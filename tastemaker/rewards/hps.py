"""Human Preference Score v2: CLIP ViT-H/14 fine-tuned on human choices (Wu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.reward import BatchSize, PretrainedReward, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource
from .backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing, ResizeMode, load_image_text_model
from .backbones.preprocessing import Preprocessing
from .backbones.tokenizers import CLIP_TOKENIZER

FILES = {
    "v2.0": WeightsSource("xswu/HPSv2", "HPS_v2_compressed.pt", "2 GB", "Apache-2.0"),
    "v2.1": WeightsSource("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", "Apache-2.0"),
}


@dataclass(frozen=True)
class HpsReward(PretrainedReward):
    """The cosine of image and prompt, without a scale: HPS v2.0 or v2.1, from the published open_clip file."""

    version: Literal["v2.0", "v2.1"] = "v2.1"
    weights: str = "xswu/HPSv2"
    tokenizer: str | None = None  # folder or hub id; else the one beside the weights, else CLIP's own
    resize_mode: ResizeMode = "pad"  # the longer side is 224, as published; `crop` in SRPO, `stretch` in VADER
    batch_size: BatchSize = 32
    differentiable: ClassVar[bool] = True

    @property
    def card(self) -> RewardCard:
        return RewardCard(
            range="0.2 to 0.35",
            failure_modes="oversaturated, glossy and painted looks; with reward gradients, oily textures and patches "
            "of pattern",
            memory="3.9 GB, half of it in 16 bits",
            sources=(FILES[self.version], CLIP_TOKENIZER),
        )

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, FILES[self.version], placement)
        # As torchvision does for tensors: the filter's overshoot is kept, and an odd crop is rounded to even.
        interpolation: Literal["bilinear", "bicubic"] = "bilinear" if self.resize_mode == "stretch" else "bicubic"
        preprocessing = Preprocessing(
            model.image_size, self.resize_mode, interpolation, overshoot="keep", crop_rounding="round"
        )
        tokenizer = model.tokenizer(self.tokenizer, clean_text=True)
        return DualEncoderScorer(model.net, ImagePreprocessing(preprocessing), tokenizer, CosineHead())
