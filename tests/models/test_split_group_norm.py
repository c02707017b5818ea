"""Group norm computed by many programs equals PyTorch's, and so does its gradient."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional

from tastemaker.models.nets import split_group_norm
from tastemaker.models.nets.split_group_norm import SplitGroupNorm, use_split_group_norms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
KERNELS = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1")


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 12, 5, 7), 4), ((1, 32, 90, 93), 8), ((1, 6, 3, 64, 130), 2), ((1, 2, 300, 301), 1)]
)
def test_output_and_gradient_are_those_of_pytorch(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    from tastemaker.models.nets import split_group_norm_triton as kernels

    torch.manual_seed(0)
    x = (2 * torch.randn(shape, device=DEVICE) + 30).to(dtype)  # a mean that squares of float32 would not survive
    weight, bias = (torch.randn(shape[1], device=DEVICE).to(dtype) for _ in range(2))
    grad = torch.randn(shape, device=DEVICE).to(dtype)
    exact = x.double().requires_grad_()
    expected = functional.group_norm(exact, groups, weight.double(), bias.double(), 1e-5)
    expected.backward(grad.double())
    out, moments = kernels.normalize(x, groups, weight, bias, 1e-5)
    found = kernels.gradient(grad, x, moments, weight)
    tolerance = 2e-5 if dtype == torch.float32 else 0.005
    assert out.dtype == found.dtype == dtype
    assert (out.double() - expected).norm() < tolerance * expected.norm()
    assert exact.grad is not None and (found.double() - exact.grad).norm() < tolerance * exact.grad.norm()


@KERNELS
def test_module_passes_the_gradient_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU()).requires_grad_(False).to(DEVICE)
    x = torch.randn(1, 3, 70, 70, device=DEVICE)
    results = []
    for parallel in (False, True):
        if parallel:
            use_split_group_norms(net)
            monkeypatch.setattr(SplitGroupNorm, "can_split", lambda *_: True)
        leaf = x.clone().requires_grad_()
        out = net(leaf)
        out.square().mean().backward()
        results.append((out.detach(), leaf.grad))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-6)


def test_norms_are_replaced_with_their_parameters() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.GroupNorm(4, 8, 1e-3), nn.GroupNorm(2, 8, affine=False)))
    x, before = torch.randn(2, 3, 9, 9), dict(net.named_parameters())
    expected = net(x)
    use_split_group_norms(net)
    assert [type(module) for module in net[1]] == [SplitGroupNorm] * 2
    assert {name: id(p) for name, p in net.named_parameters()} == {name: id(p) for name, p in before.items()}
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


def test_cpu_and_small_inputs_use_pytorch() -> None:
    norm = SplitGroupNorm(4, 8).requires_grad_(False)
    assert not norm.can_split(torch.randn(1, 8, 70, 70))
    if torch.cuda.is_available():
        assert norm.can_split(torch.randn(1, 8, 70, 70, device="cuda"))
        assert not norm.can_split(torch.randn(1, 8, 9, 9, device="cuda"))
        assert not norm.can_split(torch.randn(1 + split_group_norm.MAX_GROUPS // 4, 8, 70, 70, device="cuda"))
