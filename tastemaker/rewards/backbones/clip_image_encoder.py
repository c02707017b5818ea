"""The picture half of CLIP, one in memory for all rewards that look through it."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights, load_state_dict
from .loading import TINY, load_network, random_network, read_config
from .preprocessing import Preprocessing

CLIP_L = WeightsSource("openai/clip-vit-large-patch14", size="1.7 GB", licence="MIT")
PARTS = ("vision_model.", "visual_projection.")  # of a CLIP's tensors
ClipFit = Literal["stretch", "crop"]  # VADER's, by bilinear filters; CLIP's own, by bicubic ones
LOOKS: dict[ClipFit, Literal["bilinear", "bicubic"]] = {"stretch": "bilinear", "crop": "bicubic"}


class ClipImageEncoder:
    """A frozen network from pictures to embeddings."""

    def __init__(self, net: Any) -> None:
        self.net, self.width = net, int(net.config.projection_dim)

    def embed(self, pixels: Tensor, fit: ClipFit) -> Tensor:
        """Pictures [N, 3, H, W] in [0, 1] to embeddings [N, D] of length one, never in less than 32 bits."""
        prepared = Preprocessing(self.net.config.image_size, fit, LOOKS[fit])(pixels)
        found: Tensor = self.net(pixel_values=prepared.to(self.net.dtype)).image_embeds
        return F.normalize(found.to(torch.promote_types(found.dtype, torch.float32)), dim=-1)


_live: WeakValueDictionary[tuple[str, Placement], ClipImageEncoder] = WeakValueDictionary()


def load_clip_image_encoder(weights: str, placement: Placement) -> ClipImageEncoder:
    """The tower of a CLIP; the same weights at the same place are one for as long as anybody holds it."""
    found = _live.get((weights, placement))
    if found is None:
        found = _live[weights, placement] = _made(weights, placement)
    return found


def _made(weights: str, placement: Placement) -> ClipImageEncoder:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    if weights == TINY:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = CLIPVisionConfig.from_dict({**small, "projection_dim": 16, "image_size": 28, "patch_size": 14})
        return ClipImageEncoder(random_network(CLIPVisionModelWithProjection, config, placement))
    path = find_weights(weights, CLIP_L)
    folder = path if path.is_dir() else path.parent
    read_config(folder)
    config = CLIPVisionConfig.from_pretrained(folder, local_files_only=True)
    tensors = {key: x for key, x in load_state_dict(path).items() if key.startswith(PARTS)}
    if "visual_projection.weight" in tensors:  # its width stands in the tensor; not every vision_config repeats it
        config.projection_dim = len(tensors["visual_projection.weight"])
    return ClipImageEncoder(load_network(CLIPVisionModelWithProjection, config, path, placement, tensors))
