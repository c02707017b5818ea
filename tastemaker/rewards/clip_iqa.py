"""CLIP-IQA: image quality without a reference, from CLIP and pairs of opposite texts (Wang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core.reward import BatchSize, CachedImageReward, PretrainedReward, RewardCard
from ..core.types import Placement, Prompts
from .backbones.dual_encoder import CLIP_L, CosineHead, DualEncoderScorer, ResizeMode, load_image_text_model

Attribute = Literal[
    "quality",
    "sharpness",
    "noisiness",
    "brightness",
    "contrast",
    "colorfulness",
    "natural",
    "real",
    "beautiful",
]
# The better one first.
OPPOSITES: dict[Attribute, tuple[str, str]] = {
    "quality": ("Good photo.", "Bad photo."),
    "sharpness": ("Sharp photo.", "Blurry photo."),
    "noisiness": ("Clean photo.", "Noisy photo."),
    "brightness": ("Bright photo.", "Dark photo."),
    "contrast": ("High contrast photo.", "Low contrast photo."),
    "colorfulness": ("Colorful photo.", "Dull photo."),
    "natural": ("Natural photo.", "Synthetic photo."),
    "real": ("Real photo.", "Abstract photo."),
    "beautiful": ("Beautiful photo.", "Ugly photo."),
}


@dataclass(frozen=True)
class ClipIqaReward(PretrainedReward):
    """The probability of "Good photo." against "Bad photo.", or the mean over several such pairs. Ignores the prompt.

    The paper's own score is by CLIP's ResNet-50 without positions; this is by a vision transformer.
    """

    attributes: tuple[Attribute, ...] = ("quality",)
    weights: str = CLIP_L.hub  # hub id or folder, with tokenizer and image processor
    tokenizer: str | None = None  # folder or hub id; else the one beside the weights
    resize_mode: ResizeMode | None = None  # else as the image processor says
    image_size: BatchSize | None = None  # larger than in pretraining, with interpolated positions, for fine detail
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="studio light and blurred backgrounds; with reward gradients, textures",
        memory="1.7 GB, half of it in 16 bits",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.attributes:
            raise ValueError("'attributes' is empty; name at least one, such as quality [TM866]")

    def load(self, placement: Placement) -> ClipIqaScorer:
        model = load_image_text_model(self.weights, CLIP_L, placement)
        preprocessing = model.preprocessing(self.resize_mode, self.image_size, "clip")
        encoder = DualEncoderScorer(model.net, preprocessing, model.tokenizer(self.tokenizer), CosineHead())
        return ClipIqaScorer(encoder, model.logit_scale, [OPPOSITES[attribute] for attribute in self.attributes])


class ClipIqaScorer(CachedImageReward):
    """Scores by the softmax of the cosines with two opposite texts, averaged over pairs."""

    def __init__(self, encoder: DualEncoderScorer, scale: float, pairs: list[tuple[str, str]]) -> None:
        self.encoder, self.scale, self.texts = encoder, scale, [text for pair in pairs for text in pair]

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self.encoder.encode_images(pixels)

    def score_features(self, features: Tensor, prompts: Prompts) -> Tensor:
        logits = self.scale * features @ self.encoder.text_features(self.texts).T  # [B, 2 * pairs]
        return logits.view(len(features), -1, 2).softmax(-1)[..., 0].mean(1)
