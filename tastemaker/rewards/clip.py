"""How well a picture fits its prompt, by any CLIP, AltCLIP, SigLIP or SigLIP 2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import PositiveFloat

from ..core.reward import BatchSize, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource
from .backbones.dual_encoders import CosineHead, DualEncoderScorer
from .backbones.image_text_models import ImageTextFit, load_image_text_model
from .backbones.loading import TINY

CLIP_L = WeightsSource("openai/clip-vit-large-patch14", size="1.7 GB", licence="MIT")


@dataclass(frozen=True)
class ClipReward:
    """The cosine of picture and prompt, the logit made of it, or the probability that this is as SigLIP was trained."""

    weights: str = CLIP_L.hub  # hub id or folder, with its tokenizer and how its pictures are prepared
    tokenizer: str | None = None  # folder or hub id; else what lies beside the weights
    form: Literal["cosine", "logit", "probability"] = "cosine"
    divide: PositiveFloat = 1.0  # of the cosine or logit: logit / 100 is CLIPScore in Flow-GRPO, / 300 SRPO's AltCLIP
    fit: ImageTextFit | None = None  # else as its processor says
    size: BatchSize | None = None  # pixels a side beyond its own, for which its places are interpolated: 512 in SRPO
    overshoot: Literal["clip", "keep"] = "clip"  # of the bicubic filter; SRPO keeps it
    batch_size: BatchSize = 64
    about: ClassVar[RewardCard] = RewardCard(
        range="0.15 to 0.35",
        hacked_by="the prompt written into the picture; many copies of what it names; textures, followed by gradient",
        memory="1.7 GB, half of it in 16 bits",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def __post_init__(self) -> None:
        if self.form == "probability" and self.divide != 1:
            raise ValueError(f"'divide' is {self.divide}, but a probability is not divided; leave it out, or use logit")

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, CLIP_L, placement)
        looks = model.looks(self.fit, self.size, self.overshoot)
        scale, bias = (1.0, 0.0) if self.form == "cosine" else (model.scale, model.bias)
        ending = CosineHead(scale / self.divide, bias / self.divide, self.form == "probability")
        return DualEncoderScorer(model.net, looks, model.words(self.tokenizer), ending)

    def tiny(self) -> Self:
        return replace(self, weights=TINY)
