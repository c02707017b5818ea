"""Human Preference Score v2: CLIP ViT-H/14 fine-tuned on human choices (Wu et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor

from ..core.reward import BatchSize, PretrainedReward, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource, find_published_file
from .backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing, ResizeMode, load_image_text_model
from .backbones.frozen_models import TINY
from .backbones.preprocessing import Preprocessing
from .backbones.published_files import require_contents, require_image_encoder
from .backbones.tokenizers import CLIP_TOKENIZER, omit_tokenizer

FILES = {
    "v2.0": WeightsSource("xswu/HPSv2", "HPS_v2_compressed.pt", "2 GB", "Apache-2.0"),
    "v2.1": WeightsSource("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", "Apache-2.0"),
}


@dataclass(frozen=True)
class HpsReward(PretrainedReward):
    """The cosine of image and prompt, without a scale: HPS v2.0 or v2.1, from the published open_clip file."""

    version: Literal["v2.0", "v2.1"] = "v2.1"
    weights: str = "xswu/HPSv2"  # or a folder that holds the version's published file, or a file
    tokenizer: str | None = None  # folder, such as FLUX's, or hub id; else the one beside the weights, else CLIP's own
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

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return omit_tokenizer(super().sources, CLIP_TOKENIZER, self.tokenizer, self.weights)

    def load(self, placement: Placement) -> DualEncoderScorer:
        weights = self.weights
        if weights != TINY:
            weights = str(find_published_file(weights, FILES[self.version], "`weights` of hps"))
            require_contents(Path(weights), f"HPS {self.version}", "`weights` of hps")
        model = load_image_text_model(weights, FILES[self.version], placement, _require_hps)
        # As torchvision does for tensors: the filter's overshoot is kept, and an odd crop is rounded to even.
        interpolation: Literal["bilinear", "bicubic"] = "bilinear" if self.resize_mode == "stretch" else "bicubic"
        preprocessing = Preprocessing(
            model.image_size, self.resize_mode, interpolation, overshoot="keep", crop_rounding="round"
        )
        tokenizer = model.tokenizer(self.tokenizer, clean_text=True)
        return DualEncoderScorer(model.net, ImagePreprocessing(preprocessing), tokenizer, CosineHead())


def _require_hps(path: Path, original: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    require_image_encoder(tensors, "ViT-H", path, "`weights` of hps")
