"""Inference norms and channels_last change outputs only by rounding."""

from __future__ import annotations

import os
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional

from tastemaker.core.lora import LoraWeights
from tastemaker.core.weights import NetworkTraits
from tastemaker.models.modelscope import TINY_CONFIGS
from tastemaker.models.nets.unet3d import VideoUnet
from tastemaker.training.inference_norms import (
    InputDtypeNorms,
    PreserveChannelsLast,
    convert_to_channels_last,
    use_inference_norms,
)
from tastemaker.training.precision import Fp32Norms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
CHANNELS_LAST = NetworkTraits(channels_last=True)
KERNELS = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1")


def video_unet() -> tuple[Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    net: Any = VideoUnet(**TINY_CONFIGS["unet"]).eval().requires_grad_(False).bfloat16()
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"]))
    for p in weights.trainable().values():
        p.data = torch.randn_like(p, dtype=torch.float32) / 10
    inputs = torch.randn(2, 3, 4, 8, 8), torch.tensor([20.0, 500.0]), torch.randn(2, 5, 16)
    return net, tuple(x.bfloat16() if x.ndim > 1 else x for x in inputs)


@torch.no_grad()
@pytest.mark.parametrize("channels_last", [False, True])
def test_inference_norms_are_as_accurate_as_autocast(channels_last: bool) -> None:
    net, inputs = video_unet()
    exact = deepcopy(net).float()(*(x.float() for x in inputs))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Fp32Norms():
        before = net(*inputs)
        if channels_last:
            convert_to_channels_last(net, CHANNELS_LAST)
        use_inference_norms(net, torch.bfloat16, CHANNELS_LAST)
        after = net(*inputs)
    assert not torch.equal(before, after)
    assert (after - exact).norm() < 1.3 * (before - exact).norm() < 0.02 * exact.norm()
    assert all(p.dtype == torch.float32 for key, p in net.named_parameters() if "lora" in key)


def test_calls_with_gradient_are_unchanged() -> None:
    net, inputs = video_unet()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Fp32Norms():
        before = net(*inputs)
        use_inference_norms(net, torch.bfloat16, CHANNELS_LAST)
        assert torch.equal(net(*inputs), before)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)])
def test_norms_keep_the_dtype_of_their_input(norm: nn.Module) -> None:
    x = torch.randn(3, 4, 5, 8).bfloat16()
    exact = norm(x.float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), InputDtypeNorms():
        output = norm(x)
        assert output.dtype == torch.bfloat16 and norm(x.float()).dtype == torch.float32
    assert (output.float() - exact).norm() < 0.01 * exact.norm()


def test_without_autocast_norms_are_unchanged() -> None:
    x, norm = torch.randn(3, 4, 5), nn.GroupNorm(2, 4)
    with torch.no_grad(), InputDtypeNorms():
        assert torch.equal(norm(x), norm(x.float()))


def test_only_frozen_convolutions_become_channels_last() -> None:
    frozen, trainable, other = nn.Conv2d(4, 6, 3).requires_grad_(False), nn.Conv2d(4, 6, 3), nn.Conv3d(4, 6, 1)
    convert_to_channels_last(nn.Sequential(frozen, trainable), CHANNELS_LAST)
    convert_to_channels_last(nn.Sequential(other.requires_grad_(False)), NetworkTraits())
    assert frozen.weight.is_contiguous(memory_format=torch.channels_last)
    assert trainable.weight.is_contiguous() and other.weight.is_contiguous()


def test_channels_last_is_preserved() -> None:
    images = torch.randn(2, 5, 3, 4).permute(0, 3, 1, 2)  # [B, C, h, w]
    videos = torch.randn(2, 5, 3, 6, 4).permute(0, 3, 4, 1, 2)  # [B, F, C, h, w]
    plain, sequences = torch.randn(2, 4, 5, 3), torch.randn(2, 3, 4).transpose(1, 2)
    with PreserveChannelsLast():
        images_after, videos_after = images.contiguous(), videos.contiguous()
        assert plain.contiguous().is_contiguous() and sequences.contiguous().is_contiguous()
    assert images_after.data_ptr() == images.data_ptr()
    assert torch.equal(videos_after, videos) and videos_after.flatten(0, 1).is_contiguous(
        memory_format=torch.channels_last
    )
    assert images.contiguous().is_contiguous()


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 12, 5, 7), 4), ((3, 320, 6, 6), 32), ((1, 64, 3, 9, 4), 32), ((2, 40, 33, 17), 8)]
)
def test_triton_group_norm_matches_pytorch(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    from tastemaker.training.triton_group_norm import triton_group_norm

    torch.manual_seed(0)
    device = "cpu" if INTERPRETED else "cuda"
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = (2 * torch.randn(shape, device=device) + 1).to(dtype).contiguous(memory_format=order)
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    output = triton_group_norm(x, groups, weight, bias, 1e-5)
    exact = functional.group_norm(x.float(), groups, weight.float(), bias.float(), 1e-5)
    assert output.is_contiguous(memory_format=order) and output.dtype == dtype
    assert (output.float() - exact).norm() < (1e-6 if dtype == torch.float32 else 0.005) * exact.norm()
