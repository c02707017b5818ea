"""PickScore: CLIP ViT-H/14 fine-tuned on the choices of Pick-a-Pic (Kirstain et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveFloat

from ..core.reward import BatchSize, PretrainedReward, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource
from .backbones.dual_encoder import CosineHead, DualEncoderScorer, load_image_text_model
from .backbones.tokenizers import CLIP_TOKENIZER

PICKSCORE = WeightsSource("yuvalkirstain/PickScore_v1", "model.safetensors", "3.9 GB")
CONFIG = WeightsSource("yuvalkirstain/PickScore_v1", "config.json", "5 kB")


@dataclass(frozen=True)
class PickScoreReward(PretrainedReward):
    """exp(logit_scale) times the cosine of image and prompt, divided by a constant."""

    weights: str = PICKSCORE.hub
    tokenizer: str | None = None  # folder or hub id; else the one beside the weights, else CLIP's own
    divide_by: PositiveFloat = 1.0  # 26 in Flow-GRPO and DiffusionNFT, 20 in SRPO, 100 for the cosine as in DanceGRPO
    overshoot: Literal["clip", "keep"] = "clip"  # of the bicubic filter; SRPO and VADER keep it
    batch_size: BatchSize = 32
    card: ClassVar[RewardCard] = RewardCard(
        range="18 to 24",
        failure_modes="bright, smooth and centered looks; with reward gradients, high-frequency patterns",
        memory="3.9 GB, half of it in 16 bits",
        sources=(PICKSCORE, CONFIG, CLIP_TOKENIZER),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, PICKSCORE, placement)
        preprocessing = model.preprocessing(None, None, self.overshoot)
        head = CosineHead(model.logit_scale / self.divide_by)
        return DualEncoderScorer(model.net, preprocessing, model.tokenizer(self.tokenizer), head)
