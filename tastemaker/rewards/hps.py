"""What people prefer, by CLIP ViT-H/14 trained on their choices (HPS v2, Wu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ..preprocessing import Preprocessing
from ..pretrained import Source
from ..reward import About, Rows
from ..types import Placement
from .nets.hub import TINY
from .nets.image_text import Fit, opened
from .nets.towers import Ending, Stills, Towers
from .nets.words import CLIP_WORDS

FILES = {
    "v2.0": Source("xswu/HPSv2", "HPS_v2_compressed.pt", "2 GB", "Apache-2.0"),
    "v2.1": Source("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", "Apache-2.0"),
}


@dataclass(frozen=True)
class Hps:
    """The cosine of picture and prompt, without a scale: HPS v2.0 or v2.1, from the published open_clip file."""

    version: Literal["v2.0", "v2.1"] = "v2.1"
    weights: str = "xswu/HPSv2"
    tokenizer: str | None = None  # folder or hub id; else what lies beside the weights, else CLIP's own
    fit: Fit = "pad"  # the longer side is 224, as the authors have it; `crop` as SRPO, `stretch` as VADER
    batch_size: Rows = 32
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    @property
    def about(self) -> About:
        return About(
            range="0.2 to 0.35",
            hacked_by="oversaturated, glossy and painted looks; followed by gradient, oily textures and patches of "
            "pattern",
            memory="3.9 GB, half of it in 16 bits",
            sources=(FILES[self.version], CLIP_WORDS),
        )

    def load(self, placement: Placement) -> Towers:
        model = opened(self.weights, FILES[self.version], placement)
        # Published for tensors: what the filter overshoots stays, and an odd crop begins at the even pixel.
        by: Literal["bilinear", "bicubic"] = "bilinear" if self.fit == "stretch" else "bicubic"
        looks = Preprocessing(model.size, self.fit, by, overshoot="keep", corner="round")
        return Towers(model.net, Stills(looks), model.words(self.tokenizer, mended=True), Ending())

    def tiny(self) -> Self:
        return replace(self, weights=TINY)
