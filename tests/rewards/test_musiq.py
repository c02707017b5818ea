"""MUSIQ: its patches and positions, its padding and masks as published, its files and its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.musiq import MusiqNet, MusiqReward, MusiqScorer, cut_patches, hash_positions, resize_longer_side


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def random_net(outputs: int = 1) -> MusiqNet:
    torch.manual_seed(1)
    net = MusiqNet(outputs, width=32, mlp_width=48, depth=2, heads=2).eval().requires_grad_(False)
    for x in net.state_dict().values():
        x.add_(torch.randn_like(x) * 0.1)
    return net


def published_forward(net: MusiqNet, images: Tensor) -> Tensor:
    """The published computation: patches by unfold, padded to 49 and 144, with a mask of -1000; no module is shared."""
    state = net.state_dict()
    tokens = []
    for scale, side in enumerate((224, 384, 0)):
        x = resize_longer_side(images, side) if side else images
        height, width = x.shape[-2:]
        rows, columns = -(-height // 32), -(-width // 32)
        down, across = rows * 32 - height, columns * 32 - width
        x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        patches = F.unfold(x, 32, stride=32).mT  # [B, N, 3 * 32 * 32]
        place = [[int(r * 10 / rows) * 10 + int(c * 10 / columns) for c in range(columns)] for r in range(rows)]
        extra = torch.stack(
            [torch.tensor(place).flatten().float(), *torch.tensor([[scale], [1]]).expand(2, rows * columns)]
        )
        packed = torch.cat([patches, extra.T.expand(len(images), -1, -1)], -1)
        tokens.append(F.pad(packed, (0, 0, 0, (-(-side // 32)) ** 2 - rows * columns)) if side else packed)
    packed = torch.cat(tokens, 1)
    positions, scales, mask = packed[..., -3].long(), packed[..., -2].long(), packed[..., -1]

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        w = state[f"{name}.weight"]
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, stride=stride)

    def norm(x: Tensor, name: str, eps: float = 1e-4) -> Tensor:
        return F.group_norm(x, 32, state[f"{name}.weight"], state[f"{name}.bias"], eps)

    x = packed[..., :-3].reshape(-1, 3, 32, 32)
    x = norm(conv(F.pad(x, (2, 3, 2, 3)), "conv_root", 2), "gn_root", 1e-6).relu()
    x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)
    y = norm(conv(x, "block1.conv1"), "block1.gn1").relu()
    y = norm(conv(F.pad(y, (1, 1, 1, 1)), "block1.conv2"), "block1.gn2").relu()
    y = norm(conv(y, "block1.conv3"), "block1.gn3")
    x = (y + norm(conv(x, "block1.conv_proj"), "block1.gn_proj")).relu()
    x = x.permute(0, 2, 3, 1).reshape(len(images), packed.shape[1], -1)
    x = F.linear(x, state["embedding.weight"], state["embedding.bias"])
    prefix = "transformer_encoder."
    x = x + state[f"{prefix}posembed_input.position_emb"][0][positions]
    x = x + state[f"{prefix}scaleembed_input.scale_emb"][scales]
    x = torch.cat([state[f"{prefix}cls"].expand(len(x), -1, -1), x], 1)
    mask = F.pad(mask, (1, 0), value=1)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def layer_norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    for i in range(2):
        block = f"{prefix}transformer.encoderblock_{i}."
        y = layer_norm(x, f"{block}norm1")
        q, k, v = (linear(y, f"{block}attention.{name}").unflatten(-1, (2, 16)) for name in ("query", "key", "value"))
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
        logits = logits.masked_fill((mask[:, None, :, None] * mask[:, None, None, :]) == 0, -1e3)
        x = x + linear(torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v).flatten(2), f"{block}attention.out")
        x = x + linear(F.gelu(linear(layer_norm(x, f"{block}norm2"), f"{block}mlp.fc1")), f"{block}mlp.fc2")
    x = layer_norm(x[:, 0], f"{prefix}encoder_norm")
    return linear(x, "head")[:, 0]


def test_scores_are_those_of_the_published_computation() -> None:
    net, pixels = random_net(), random(2, 1, 3, 70, 100)
    expected = published_forward(net, 2 * pixels[:, 0] - 1)
    scores = MusiqScorer(net).score(pixels, [""] * 2, [{}] * 2)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 1e-4


def test_patches_and_positions() -> None:
    images = torch.arange(40 * 70, dtype=torch.float32).view(1, 1, 40, 70).expand(1, 3, 40, 70)
    patches, grid = cut_patches(images)
    assert grid == (2, 3) and patches.shape == (1, 6, 3, 32, 32)
    assert patches[0, 0, 0, 12, 13] == 0 and patches[0, 0, 0, :12].abs().sum() == 0  # 12 of 24 rows, 13 of 26 columns
    assert patches[0, 4, 1, 0, 0] == images[0, 1, 20, 19]
    assert hash_positions(2, 3).tolist() == [0, 3, 6, 50, 53, 56]
    assert resize_longer_side(random(1, 3, 30, 61), 224).shape[-2:] == (110, 224)


@pytest.mark.slow
def test_gradient_is_that_of_finite_differences() -> None:
    scorer = MusiqReward("tiny").load(Placement(dtype=torch.float64))
    pixels = random(1, 1, 3, 40, 48).double() * 0.5 + 0.25
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scorer.score(leaf, [""], [{}]).sum(), leaf)
    step = 1e-6 * gradient / gradient.abs().max()
    ends = [scorer.score(pixels + sign * step, [""], [{}]).item() for sign in (1, -1)]
    assert (gradient * step).sum().item() == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-3)


@pytest.mark.slow
def test_published_files_are_read(tmp_path: Path) -> None:
    arguments: Any = (random(1, 1, 3, 40, 40), [""], [{}])
    torch.manual_seed(0)
    for outputs, wrapped in ((1, False), (10, True)):
        net = MusiqNet(outputs)
        assert sum(p.numel() for p in net.parameters()) == pytest.approx(27.1e6, rel=0.01)
        path = tmp_path / f"musiq{outputs}.pth"
        torch.save({"params": net.state_dict()} if wrapped else net.state_dict(), path)
        score = MusiqReward(str(path)).load(Placement()).score(*arguments).item()
        assert score == pytest.approx(MusiqScorer(net).score(*arguments).item(), abs=1e-4)
        assert 1 < score < 10 or outputs == 1
    torch.save({"head.weight": torch.zeros(3, 384)}, tmp_path / "other.pth")
    for name, code in (("missing.pth", "TM2313"), ("other.pth", "TM2314")):
        with pytest.raises(ConfigError, match=code):
            MusiqReward(str(tmp_path / name)).load(Placement())
    torch.save({key: x for key, x in net.state_dict().items() if "gn_root" not in key}, path)
    with pytest.raises(ConfigError, match="TM509"):
        MusiqReward(str(path)).load(Placement())
