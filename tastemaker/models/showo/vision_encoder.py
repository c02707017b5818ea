"""CLIP image features for Show-o variants that read features instead of image tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.registry import ConfigError
from ...core.types import Placement
from ...rewards.backbones.preprocessing import Preprocessing
from ..pipeline_components import TINY
from ..pretrained import WeightsSource, find_weights, load_state_dict
from ..text_encoders import disable_autocast

CLIP = WeightsSource("openai/clip-vit-large-patch14-336", size="1.7 GB", licence="as its page tells")
FEATURE_SIZE = 1024  # of features
SMALL = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def vision_feature_size(name: str | None) -> int:
    """Numbers a part of a picture has; none where nothing is seen."""
    return 0 if name is None else SMALL["hidden_size"] if name == TINY else FEATURE_SIZE


class ClipVisionEncoder:
    """Penultimate-layer patch features of a frozen CLIP vision model, without the class token."""

    def __init__(self, name: str, placement: Placement, seed: int = 0) -> None:
        net = _small(seed) if name == TINY else _published(name)
        self.net: Any = net.to(placement.device, placement.dtype).eval().requires_grad_(False)
        self.fit = Preprocessing(net.config.image_size)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """[B, parts, features] of [B, 3, H, W] in [0, 1]."""
        seen = self.fit(pixels.float()).to(next(self.net.parameters()).dtype)
        with disable_autocast(seen):
            layers = self.net(seen, output_hidden_states=True).hidden_states
        out: Tensor = layers[-2][:, 1:]
        return out


def _small(seed: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    kind, settings = (CLIPVisionModel, CLIPVisionConfig)  # untyped
    config: Any = settings.from_dict({**SMALL, "image_size": 28, "patch_size": 14})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config)


def _published(name: str) -> Any:
    """Of a folder with the whole of CLIP or with its eyes alone."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    path, settings, kind = find_weights(name, CLIP), CLIPVisionConfig, CLIPVisionModel
    try:
        config: Any = settings.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.vision: {path} is no folder of CLIP; name one, or {CLIP}") from error
    tensors, net = load_state_dict(path), kind(config)
    inside = "vision_model."
    lost = [key for key in net.state_dict() if f"{inside}{key.removeprefix(inside)}" not in tensors]
    if lost:
        raise ConfigError(f"model.vision: {path} lacks '{lost[0]}' and {len(lost) - 1} more tensors; fetch it again")
    net.load_state_dict({key: tensors[f"{inside}{key.removeprefix(inside)}"] for key in net.state_dict()})
    return net
