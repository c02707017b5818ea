"""FID, KID, Inception score and precision against their formulas, and checks of references."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from tastemaker.cli import main
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image
from tastemaker.evaluation.feature_extractors import (
    BasicConv2d,
    FeatureExtractor,
    Inception,
    load_feature_extractor,
    load_inception,
    resize_tf1,
)
from tastemaker.evaluation.image_sets import (
    ReferenceDescription,
    compare_to_reference,
    load_image_set,
    load_reference,
    make_reference,
    pack_images,
)
from tastemaker.evaluation.metrics import frechet_distance, inception_score, kernel_distance, precision_recall
from tastemaker.rewards.backbones.frozen_models import TINY

CONSOLE = Console(quiet=True)


def features(seed: int, count: int = 60, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, 6) + shift


def test_frechet_distance_matches_numpy() -> None:
    a, b = features(0), features(1, 80, 0.5)
    x, y = a.double().numpy(), b.double().numpy()
    one, other = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = np.sqrt(np.linalg.eigvals(one @ other).astype(complex)).real.sum()
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(one) + np.trace(other) - 2 * root
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_kernel_distance_matches_its_definition() -> None:
    a, b = features(0, 7), features(1, 7, 1.0)
    x, y = a.double().numpy(), b.double().numpy()

    def kernel(p: np.ndarray, q: np.ndarray) -> float:
        return float((p @ q / 5 + 1) ** 3)

    within = sum(kernel(z[i], z[j]) for z in (x, y) for i in range(7) for j in range(7) if i != j) / 42
    across = sum(kernel(p, q) for p in x for q in y) / 49
    distance, deviation = kernel_distance(a, b, subsets=3)
    assert distance == pytest.approx(within - 2 * across, rel=1e-9) and deviation == pytest.approx(0, abs=1e-9)
    near = kernel_distance(features(0, 2000), features(2, 2000), subsets=5)[0]
    assert abs(near) < 0.1 * kernel_distance(features(0, 2000), features(2, 2000, 3.0), subsets=5)[0]


def test_inception_score_is_between_one_and_the_number_of_classes() -> None:
    confident = F.one_hot(torch.arange(100) % 10, 10).float()
    assert inception_score(confident)[0] == pytest.approx(10)
    assert inception_score(torch.full((100, 10), 0.1))[0] == pytest.approx(1)
    probabilities = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
    p = probabilities.double().numpy()
    expected = np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean())
    assert inception_score(probabilities, splits=1) == (pytest.approx(expected), 0)


def test_precision_and_recall_count_covered_points() -> None:
    real = torch.arange(10.0)[:, None]  # one apart: the third neighbor is two or three away
    generated = torch.tensor([[0.5], [4.5], [5.5], [6.5], [50.0]])
    # The radii of 0 to 9 are 3, 2, 2, 2, ..., 3, so four generated points are inside; their radii are 4 to 43.5.
    assert precision_recall(real, generated) == (pytest.approx(0.8), pytest.approx(1.0))
    assert precision_recall(real, real + 100, chunk_size=3) == (0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_inception_loads_both_published_layouts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Inception(classes=True).eval()
    names = net.state_dict()
    assert sum(p.numel() for p in net.parameters()) == 21_785_568 + 1008 * 2048
    assert names["Mixed_6b.branch7x7dbl_5.conv.weight"].shape == (192, 128, 1, 7)
    assert names["Mixed_7c.branch3x3dbl_3b.bn.running_var"].shape == (384,)
    pixels = torch.rand(2, 3, 32, 32)
    published = {**names, "fc.bias": torch.zeros(1008), "AuxLogits.fc.bias": torch.zeros(1)}
    torch.save(published, tmp_path / "pt_inception.pth")
    loaded = load_inception(tmp_path / "pt_inception.pth")
    with torch.no_grad():
        for p in (p for p in net.parameters() if p.ndim == 4):  # equal memory formats give equal sums
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        assert loaded(pixels).equal(net(pixels)) and loaded(pixels).shape == (2, 2048)
        torch.jit.save(torch.jit.script(NvidiaLayout(net)), tmp_path / "nvidia.pt")
        torch.testing.assert_close(load_inception(tmp_path / "nvidia.pt")(pixels), net(pixels))
    with pytest.raises(ConfigError, match=r"Inception.*none\.pth.*TM601"):
        load_inception(tmp_path / "none.pth")


class NvidiaLayout(torch.nn.Module):
    """The weights in NVIDIA's layout, whose norms have no scale."""

    def __init__(self, net: Inception) -> None:
        super().__init__()
        for i, conv in enumerate(module for module in net.modules() if isinstance(module, BasicConv2d)):
            part = torch.nn.Module()
            part.register_buffer("weight", conv.conv.weight.detach())
            for name, x in {"beta": conv.bn.bias, "mean": conv.bn.running_mean, "var": conv.bn.running_var}.items():
                part.register_buffer(name, x.detach())  # type: ignore[union-attr]
            self.add_module(f"conv_{i}", part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_resize_matches_tensorflow_1() -> None:
    row = torch.tensor([0.0, 1.0, 4.0]).view(1, 1, 1, 3).expand(1, 1, 3, 3)
    assert torch.allclose(resize_tf1(row, 6)[0, 0, 0], torch.tensor([0.0, 0.5, 1.0, 2.5, 4.0, 4.0]))


@pytest.fixture
def reference(tmp_path: Path) -> tuple[Path, Path, FeatureExtractor]:
    """A folder of forty images, a reference of them, and the feature extractor."""
    torch.manual_seed(0)
    for i in range(40):
        save_image(torch.rand(1, 3, 32, 32), tmp_path / "real" / f"{i:03d}.png")
    extractor = load_feature_extractor("classifier", TINY, Placement())
    folder, path = tmp_path / "real", tmp_path / "ref.safetensors"
    make_reference(folder, ReferenceDescription("noise", "train"), extractor, path, CONSOLE)
    return folder, path, extractor


def test_images_are_packed_in_adm_layout(reference: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    file = pack_images(reference[0], tmp_path / "samples.npz", CONSOLE)
    with np.load(file) as arrays:
        assert (
            list(arrays) == ["arr_0"] and arrays["arr_0"].dtype == np.uint8 and arrays["arr_0"].shape == (40, 32, 32, 3)
        )
    assert load_image_set(file).equal(load_image_set(reference[0]))
    np.savez(tmp_path / "odd.npz", arr_0=np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"arr_0.*float64 \[2, 3\].*TM624"):
        load_image_set(tmp_path / "odd.npz")
    np.savez(tmp_path / "other.npz", mu=np.zeros(3))
    with pytest.raises(ConfigError, match=r"other\.npz.*samples.*TM623"):
        load_image_set(tmp_path / "other.npz")


def test_metrics_of_a_set_against_itself(reference: tuple[Path, Path, FeatureExtractor]) -> None:
    folder, path, extractor = reference
    expected = ReferenceDescription("noise", "train", count=40)
    metrics = compare_to_reference(folder, path, expected, extractor, CONSOLE, allow_few=True)
    assert metrics["fid"] == pytest.approx(0, abs=1e-6) and metrics["precision"] == metrics["recall"] == 1
    assert metrics["reference"].startswith("noise train, 40 images of 32 pixels, by classifier-")
    assert metrics["inception score"] >= 1


def test_mismatched_references_are_refused(reference: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    folder, path, extractor = reference
    for expected, message in {
        ReferenceDescription(split="test"): "--split: got test,.*TM631",
        ReferenceDescription(count=50000): "--num-images: got 50000,.*TM631",
        ReferenceDescription(name="cifar10"): "--name: got cifar10,.*TM631",
    }.items():
        with pytest.raises(ConfigError, match=message):
            compare_to_reference(folder, path, expected, extractor, CONSOLE, allow_few=True)
    other = replace(extractor, network="inception-1")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"another network.*TM632"):
        compare_to_reference(folder, path, ReferenceDescription(), other, CONSOLE, allow_few=True)
    other = replace(extractor, preprocessing="cubic")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"another preprocessing.*TM632"):
        compare_to_reference(folder, path, ReferenceDescription(), other, CONSOLE, allow_few=True)
    save_image(torch.rand(1, 3, 16, 16), tmp_path / "small" / "0.png")
    with pytest.raises(ConfigError, match=r"16 pixels.*TM633"):
        compare_to_reference(tmp_path / "small", path, ReferenceDescription(), extractor, CONSOLE, allow_few=True)
    save_image(torch.rand(1, 3, 32, 32), tmp_path / "one" / "0.png")
    with pytest.raises(ConfigError, match=r"1 samples for 8 features.*TM634"):
        compare_to_reference(tmp_path / "one", path, ReferenceDescription(), extractor, CONSOLE)
    np.savez(tmp_path / "adm.npz", mu=np.zeros(3), sigma=np.zeros((3, 3)))
    with pytest.raises(ConfigError, match=r"adm\.npz.*reference.*TM625"):
        load_reference(tmp_path / "adm.npz")


def test_pack_reference_and_compare_commands(reference: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    folder, path, out = str(reference[0]), str(tmp_path / "reference.safetensors"), tmp_path / "metrics.json"
    network_options = ["--network", "classifier", "--weights", TINY, "--device", "cpu"]
    for arguments in (
        ["pack", folder, "--out", str(tmp_path / "a.npz")],
        ["reference", folder, "--name", "noise", "--split", "train", "--out", path, *network_options],
        [
            "compare",
            str(tmp_path / "a.npz"),
            "--reference",
            path,
            "--out",
            str(out),
            "--allow-few-samples",
            *network_options,
        ],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0
    assert json.loads(out.read_text())["count"] == 40


def test_statistics_of_adm_references_are_kept(reference: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    folder, path, extractor = reference
    original, file = load_reference(path), tmp_path / "VIRTUAL_noise32.npz"
    mean, covariance = original.mean.numpy() + 1e-3, original.covariance.numpy() * 1.5
    images = load_image_set(folder)[:20].numpy()
    np.savez(file, arr_0=images, mu=mean, sigma=covariance, mu_s=np.zeros(3), sigma_s=np.zeros((3, 3)))
    description = ReferenceDescription("noise", "train", count=1_281_167)
    kept = make_reference(file, description, extractor, tmp_path / "adm.safetensors", CONSOLE)
    assert str(kept.label).startswith("noise train, 1281167 images of 32 pixels") and len(kept.features) == 20
    assert np.array_equal(kept.mean.numpy(), mean) and np.array_equal(kept.covariance.numpy(), covariance)
    metrics = compare_to_reference(
        folder,
        tmp_path / "adm.safetensors",
        ReferenceDescription("noise", "train", count=1_281_167),
        extractor,
        CONSOLE,
        allow_few=True,
    )
    assert metrics["fid"] > 0 and "1281167" in metrics["reference"]
    with pytest.raises(ConfigError, match=r"give --num-images.*TM626"):
        make_reference(file, ReferenceDescription("noise", "train"), extractor, tmp_path / "none", CONSOLE)
    with pytest.raises(ConfigError, match=r"leave --num-images out.*TM627"):
        make_reference(folder, description, extractor, tmp_path / "none", CONSOLE)
    np.savez(file, arr_0=images, mu=mean + 100, sigma=covariance)
    with pytest.raises(ConfigError, match=r"Inception.*TM630"):
        make_reference(file, description, extractor, tmp_path / "none", CONSOLE)
    np.savez(file, arr_0=images, mu=np.zeros(3), sigma=np.zeros((3, 3)))
    with pytest.raises(ConfigError, match=r"3 features.*TM629"):
        make_reference(file, description, extractor, tmp_path / "none", CONSOLE)
