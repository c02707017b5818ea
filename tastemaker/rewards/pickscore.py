"""PickScore: CLIP ViT-H/14 fine-tuned on the choices of Pick-a-Pic (Kirstain et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import PositiveFloat
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, PretrainedReward, RewardCard
from ..core.types import Placement
from ..models.pretrained import WeightsSource
from .backbones import open_clip
from .backbones.dual_encoder import CosineHead, DualEncoderScorer, load_image_text_model
from .backbones.published_files import require_contents, require_image_encoder
from .backbones.tokenizers import CLIP_TOKENIZER, omit_tokenizer

PICKSCORE = WeightsSource("yuvalkirstain/PickScore_v1", "model.safetensors", "3.9 GB")
CONFIG = WeightsSource("yuvalkirstain/PickScore_v1", "config.json", "5 kB")


@dataclass(frozen=True)
class PickScoreReward(PretrainedReward):
    """exp(logit_scale) times the cosine of image and prompt, divided by a constant."""

    weights: str = PICKSCORE.hub
    tokenizer: str | None = None  # folder, such as FLUX's, or hub id; else the one beside the weights, else CLIP's own
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

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return omit_tokenizer(super().sources, CLIP_TOKENIZER, self.tokenizer, self.weights)

    def load(self, placement: Placement) -> DualEncoderScorer:
        model = load_image_text_model(self.weights, PICKSCORE, placement, _require_pickscore)
        preprocessing = model.preprocessing(None, None, self.overshoot)
        head = CosineHead(model.logit_scale / self.divide_by)
        return DualEncoderScorer(model.net, preprocessing, model.tokenizer(self.tokenizer), head)


def _require_pickscore(path: Path, original: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse CLIPs that are not PickScore, whose folder was published in the layout of transformers only."""
    key = "`weights` of pickscore"
    require_contents(path, "PickScore", key)
    folder = path if path.is_dir() else path.parent
    others = sorted(file.name for file in folder.glob("open_clip_*"))
    if others or any(name.removeprefix("module.") == open_clip.MARKER for name in original):
        beside = f"has {others[0]}" if others else "has the keys of open_clip"
        raise ConfigError(
            f"{key} is '{path!s:.200}', which {beside} and so is a CLIP of open_clip, not PickScore; name the folder "
            f"of {PICKSCORE.hub}"
            " [TM883]"
        )
    require_image_encoder(tensors, "ViT-H", path, key)
