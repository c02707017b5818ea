"""The picture half of CLIP, one in memory for all rewards that look through it."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ...preprocessing import Preprocessing
from ...pretrained import Source, locate, read
from ...types import Placement
from .hub import TINY, assembled, described, random

CLIP_L = Source("openai/clip-vit-large-patch14", size="1.7 GB", licence="MIT")
PARTS = ("vision_model.", "visual_projection.")  # of a CLIP's tensors
Fit = Literal["stretch", "crop"]  # VADER's, by bilinear filters; CLIP's own, by bicubic ones
LOOKS: dict[Fit, Literal["bilinear", "bicubic"]] = {"stretch": "bilinear", "crop": "bicubic"}


class Tower:
    """A frozen network from pictures to embeddings."""

    def __init__(self, net: Any) -> None:
        self.net, self.width = net, int(net.config.projection_dim)

    def embed(self, pixels: Tensor, fit: Fit) -> Tensor:
        """Pictures [N, 3, H, W] in [0, 1] to embeddings [N, D] of length one, never in less than 32 bits."""
        prepared = Preprocessing(self.net.config.image_size, fit, LOOKS[fit])(pixels)
        found: Tensor = self.net(pixel_values=prepared.to(self.net.dtype)).image_embeds
        return F.normalize(found.to(torch.promote_types(found.dtype, torch.float32)), dim=-1)


_live: WeakValueDictionary[tuple[str, Placement], Tower] = WeakValueDictionary()


def tower(weights: str, placement: Placement) -> Tower:
    """The tower of a CLIP; the same weights at the same place are one for as long as anybody holds it."""
    found = _live.get((weights, placement))
    if found is None:
        found = _live[weights, placement] = _made(weights, placement)
    return found


def _made(weights: str, placement: Placement) -> Tower:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    if weights == TINY:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = CLIPVisionConfig.from_dict({**small, "projection_dim": 16, "image_size": 28, "patch_size": 14})
        return Tower(random(CLIPVisionModelWithProjection, config, placement))
    path = locate(weights, CLIP_L)
    folder = path if path.is_dir() else path.parent
    described(folder)
    config = CLIPVisionConfig.from_pretrained(folder, local_files_only=True)
    tensors = {key: x for key, x in read(path).items() if key.startswith(PARTS)}
    if "visual_projection.weight" in tensors:  # its width stands in the tensor; not every vision_config repeats it
        config.projection_dim = len(tensors["visual_projection.weight"])
    return Tower(assembled(CLIPVisionModelWithProjection, config, path, placement, tensors))
