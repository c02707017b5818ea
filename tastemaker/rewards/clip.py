"""Similarity of image and prompt by any CLIP, AltCLIP, SigLIP or SigLIP 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveFloat

from ..core.reward import BatchSize, PretrainedReward, RewardCard
from ..core.types import Placement
from .backbones.dual_encoder import CLIP_L, CosineHead, DualEncoderScorer, ResizeMode, load_image_text_model


@dataclass(frozen=True)
class ClipReward(PretrainedReward):
    """The cosine of image and prompt, its logit, or SigLIP's probability of a match."""

    weights: str = CLIP_L.hub  # hub id or folder, with tokenizer and image processor
    tokenizer: str | None = None  # folder or hub id; else the one beside the weights
    output: Literal["cosine", "logit", "probability"] = "cosine"
    divide_by: PositiveFloat = 1.0  # logit / 100 is CLIPScore in Flow-GRPO, logit / 300 SRPO's AltCLIP
    resize_mode: ResizeMode | None = None  # else as the image processor says
    image_size: BatchSize | None = None  # larger than in pretraining, with interpolated positions: 512 in SRPO
    overshoot: Literal["clip", "keep"] = "clip"  # of the bicubic filter; SRPO keeps it
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="0.15 to 0.35",
        failure_modes="the prompt written into the image; many copies of its objects; with reward gradients, textures",
        memory="1.7 GB, half of it in 16 bits",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.output == "probability" and self.divide_by != 1:
            raise ValueError(
                f"'divide_by': expected 1 for output: probability, got {self.divide_by}; remove 'divide_by', or "
                "set output: logit [TM377]"
            )

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, CLIP_L, placement)
        preprocessing = model.preprocessing(self.resize_mode, self.image_size, self.overshoot)
        scale, bias = (1.0, 0.0) if self.output == "cosine" else (model.logit_scale, model.logit_bias)
        head = CosineHead(scale / self.divide_by, bias / self.divide_by, self.output == "probability")
        return DualEncoderScorer(model.net, preprocessing, model.tokenizer(self.tokenizer), head)
