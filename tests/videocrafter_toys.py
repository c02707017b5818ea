"""A small VideoCrafter UNet with the weights that the recorded fixtures were computed with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tastemaker.models import lvdm_checkpoint
from tastemaker.models.nets.unet3d import VideoUnet
from tastemaker.models.pipeline_components import parameters_on_meta

FIXTURES = Path(__file__).parent / "fixtures" / "video"
UNET: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock3D",) * 2,
    "up_block_types": ("CrossAttnUpBlock3D",) * 2,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "fps_cond": True,
}


def read_fixture(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


def random_weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """The weights of the recorded fixtures: drawn in key order, rounded to fp16."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for key, shape in shapes.items():
        x = torch.randn(tuple(shape), generator=generator)
        if len(shape) > 1:
            x = x * (1 / math.sqrt(math.prod(shape[1:])))
        else:
            x = 1 + 0.1 * x if key.endswith("weight") else 0.1 * x
        tensors[key] = x.half().float()
    return tensors


def unet_tensors() -> dict[str, Tensor]:
    return random_weights(read_fixture("lvdm_unet_tiny.json")["keys"], 0)


def build_unet() -> Any:
    with parameters_on_meta():
        net = VideoUnet(**UNET)
    net.load_state_dict(
        lvdm_checkpoint.unet_to_diffusers(unet_tensors(), list(net.state_dict()), net.config), assign=True
    )
    return net.requires_grad_(True)
