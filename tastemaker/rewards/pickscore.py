"""Which of two pictures people pick, by CLIP ViT-H/14 trained on Pick-a-Pic (Kirstain et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import PositiveFloat

from ..core.reward import BatchSize, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource
from .backbones.dual_encoders import CosineHead, DualEncoderScorer
from .backbones.image_text_models import load_image_text_model
from .backbones.loading import TINY
from .backbones.tokenizers import CLIP_TOKENIZER

PICKSCORE = WeightsSource("yuvalkirstain/PickScore_v1", "model.safetensors", "3.9 GB")
CONFIG = WeightsSource("yuvalkirstain/PickScore_v1", "config.json", "5 kB")


@dataclass(frozen=True)
class PickScore:
    """exp(logit_scale) times the cosine of picture and prompt, divided by what makes it about one if you like."""

    weights: str = PICKSCORE.hub
    tokenizer: str | None = None  # folder or hub id; else what lies beside the weights, else CLIP's own
    divide: PositiveFloat = 1.0  # 26 in Flow-GRPO and DiffusionNFT, 20 in SRPO, 100 for the cosine as in DanceGRPO
    overshoot: Literal["clip", "keep"] = "clip"  # of the bicubic filter; SRPO and VADER keep it
    batch_size: BatchSize = 32
    about: ClassVar[RewardCard] = RewardCard(
        range="18 to 24",
        hacked_by="bright, smooth and centred looks; followed by gradient, high-frequency patterns",
        memory="3.9 GB, half of it in 16 bits",
        sources=(PICKSCORE, CONFIG, CLIP_TOKENIZER),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, PICKSCORE, placement)
        looks = model.looks(None, None, self.overshoot)
        return DualEncoderScorer(model.net, looks, model.words(self.tokenizer), CosineHead(model.scale / self.divide))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)
