"""Of which colour a thing is, as GenEval asks CLIP: the thing cut out before grey, and ten colours to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ...core.types import Placement
from ...evaluation.geneval_rules import COLORS, Box
from ...models.pretrained import WeightsSource
from .dual_encoders import TokenizeTexts
from .image_text_models import load_image_text_model
from .preprocessing import CLIP_MEAN, CLIP_STD

TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
GREY = 0x99  # of what is not the thing
CLIP_L = WeightsSource("openai/clip-vit-large-patch14", size="1.7 GB", licence="MIT")


class ClipColorClassifier:
    """CLIP as a classifier of colours, one for each class of things."""

    def __init__(self, net: Any, words: TokenizeTexts, size: int) -> None:
        self.net, self.words, self.size = net, words, size  # pixels a side of what it sees
        self._known: dict[str, Tensor] = {}

    @torch.no_grad()
    def classifier(self, name: str) -> Tensor:
        """A direction for each colour of such a thing: [10, C]."""
        if name not in self._known:
            texts = [template.format(color=color, name=name) for color in COLORS for template in TEMPLATES]
            read = self.net.get_text_features(**self.words(texts, self.net.device)).pooler_output.float()
            each = F.normalize(read, dim=-1).view(len(COLORS), len(TEMPLATES), -1)
            self._known[name] = F.normalize(each.mean(1), dim=-1)
        return self._known[name]

    @torch.no_grad()
    def tell(self, crops: Sequence[Tensor], names: Sequence[str]) -> list[str]:
        """The colours of things cut out, each [3, size, size] and of the class named beside it."""
        if not crops:
            return []
        pixels = torch.stack(list(crops)).to(self.net.device, self.net.dtype)
        seen = F.normalize(self.net.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1)
        likely = torch.einsum("nc,nkc->nk", seen, torch.stack([self.classifier(name) for name in names]))
        return [COLORS[place] for place in likely.argmax(1).tolist()]


def load_color_classifier(weights: str, placement: Placement) -> ClipColorClassifier:
    model = load_image_text_model(weights, CLIP_L, placement)
    return ClipColorClassifier(model.net, model.words(None), model.size)


def crop_object(picture: NDArray[np.uint8], mask: NDArray[np.bool_], box: Box, size: int) -> Tensor:
    """A thing of a picture [H, W, 3] as CLIP sees it: before grey, its box alone, the middle square of that."""
    alone = Image.fromarray(np.where(mask[..., None], picture, np.uint8(GREY)))
    image = alone.crop((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    if min(image.size) == 0:
        image = Image.new("RGB", (1, 1), (GREY, GREY, GREY))  # a mask of nothing has a box of nothing
    shorter = min(image.size)
    width, height = (int(size * side / shorter) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + size, top + size)))).movedim(-1, 0) / 255
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    return (pixels - mean) / std
