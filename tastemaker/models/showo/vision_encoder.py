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

CLIP = WeightsSource("openai/clip-vit-large-patch14-336", size="1.7 GB", license="see its page")
FEATURE_SIZE = 1024
TINY_CLIP_CONFIG = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def vision_feature_size(name: str | None) -> int:
    """Feature size of a vision encoder; 0 if there is none."""
    return 0 if name is None else TINY_CLIP_CONFIG["hidden_size"] if name == TINY else FEATURE_SIZE


class ClipVisionEncoder:
    """Penultimate-layer patch features of a frozen CLIP vision model, without the class token."""

    def __init__(self, name: str, placement: Placement, seed: int = 0) -> None:
        net = _build_tiny_clip(seed) if name == TINY else _load_clip(name)
        self.net: Any = net.to(placement.device, placement.dtype).eval().requires_grad_(False)
        self.preprocess = Preprocessing(net.config.image_size)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Features [B, patches, C] of images [B, 3, H, W] in [0, 1]."""
        x = self.preprocess(pixels.float()).to(next(self.net.parameters()).dtype)
        with disable_autocast(x):
            layers = self.net(x, output_hidden_states=True).hidden_states
        features: Tensor = layers[-2][:, 1:]
        return features


def _build_tiny_clip(seed: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model_class, config_class = (CLIPVisionModel, CLIPVisionConfig)  # untyped
    config: Any = config_class.from_dict({**TINY_CLIP_CONFIG, "image_size": 28, "patch_size": 14})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)


def _load_clip(name: str) -> Any:
    """The vision model of a folder that holds it alone or all of CLIP."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    path, config_class, model_class = find_weights(name, CLIP), CLIPVisionConfig, CLIPVisionModel
    try:
        config: Any = config_class.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.vision_encoder: {path} is not a folder with CLIP; give such a folder, or {CLIP} [TM533]"
        ) from error
    tensors, net = load_state_dict(path), model_class(config)
    prefix = "vision_model."
    keys = {key: f"{prefix}{key.removeprefix(prefix)}" for key in net.state_dict()}
    missing = [key for key, stored in keys.items() if stored not in tensors]
    if missing:
        raise ConfigError(
            f"model.vision_encoder: {path} lacks '{missing[0]}' and {len(missing) - 1} more tensors; download it "
            "again [TM534]"
        )
    net.load_state_dict({key: tensors[stored] for key, stored in keys.items()})
    return net
