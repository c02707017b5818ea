"""Distances between sets of pictures are what their formulas say, and unlike things are not compared."""

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
from tastemaker.evaluation.image_sets import (
    ExpectedReference,
    ReferenceDescription,
    compare_to_reference,
    load_image_set,
    make_reference,
    pack_images,
)
from tastemaker.evaluation.inception import BasicConv2d, Inception, load_inception, resize_tf1
from tastemaker.evaluation.metrics import frechet_distance, inception_score, kernel_distance, precision_recall
from tastemaker.evaluation.reference_statistics import FeatureExtractor, load_feature_extractor, load_reference
from tastemaker.rewards.backbones.loading import TINY

QUIET = Console(quiet=True)


def features(seed: int, count: int = 60, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, 6) + shift


def test_the_frechet_distance_is_that_of_numpy() -> None:
    a, b = features(0), features(1, 80, 0.5)
    x, y = a.double().numpy(), b.double().numpy()
    one, other = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = np.sqrt(np.linalg.eigvals(one @ other).astype(complex)).real.sum()
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(one) + np.trace(other) - 2 * root
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_the_kernel_distance_is_that_of_its_sums() -> None:
    a, b = features(0, 7), features(1, 7, 1.0)
    x, y = a.double().numpy(), b.double().numpy()

    def kernel(p: np.ndarray, q: np.ndarray) -> float:
        return float((p @ q / 5 + 1) ** 3)

    within = sum(kernel(z[i], z[j]) for z in (x, y) for i in range(7) for j in range(7) if i != j) / 42
    across = sum(kernel(p, q) for p in x for q in y) / 49
    found, spread = kernel_distance(a, b, subsets=3)
    assert found == pytest.approx(within - 2 * across, rel=1e-9) and spread == pytest.approx(0, abs=1e-9)
    near = kernel_distance(features(0, 2000), features(2, 2000), subsets=5)[0]
    assert abs(near) < 0.1 * kernel_distance(features(0, 2000), features(2, 2000, 3.0), subsets=5)[0]


def test_the_inception_score_lies_between_one_and_the_number_of_classes() -> None:
    sure = F.one_hot(torch.arange(100) % 10, 10).float()
    assert inception_score(sure)[0] == pytest.approx(10)
    assert inception_score(torch.full((100, 10), 0.1))[0] == pytest.approx(1)
    chance = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
    p = chance.double().numpy()
    expected = np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean())
    assert inception_score(chance, splits=1) == (pytest.approx(expected), 0)


def test_precision_and_recall_count_who_is_covered() -> None:
    real = torch.arange(10.0)[:, None]  # one apart: the third neighbour is two or three away
    made = torch.tensor([[0.5], [4.5], [5.5], [6.5], [50.0]])
    # 0 to 9 reach out by 3, 2, 2, 2, ..., 3; of those made four are within, and reach 4 to 43.5 far.
    assert precision_recall(real, made) == (pytest.approx(0.8), pytest.approx(1.0))
    assert precision_recall(real, real + 100, chunk=3) == (0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_inception_has_the_published_tensors_and_reads_both_layouts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Inception(classes=True).eval()
    names = net.state_dict()
    assert sum(p.numel() for p in net.parameters()) == 21_785_568 + 1008 * 2048
    assert names["Mixed_6b.branch7x7dbl_5.conv.weight"].shape == (192, 128, 1, 7)
    assert names["Mixed_7c.branch3x3dbl_3b.bn.running_var"].shape == (384,)
    pixels = torch.rand(2, 3, 32, 32)
    published = {**names, "fc.bias": torch.zeros(1008), "AuxLogits.fc.bias": torch.zeros(1)}
    torch.save(published, tmp_path / "pt_inception.pth")
    found = load_inception(tmp_path / "pt_inception.pth")
    with torch.no_grad():
        for p in (p for p in net.parameters() if p.ndim == 4):  # in the same order sums are the same to the bit
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        assert found(pixels).equal(net(pixels)) and found(pixels).shape == (2, 2048)
        torch.jit.save(torch.jit.script(Scripted(net)), tmp_path / "nvidia.pt")
        torch.testing.assert_close(load_inception(tmp_path / "nvidia.pt")(pixels), net(pixels))
    with pytest.raises(ConfigError, match="there is no Inception at"):
        load_inception(tmp_path / "none.pth")


class Scripted(torch.nn.Module):
    """The weights in NVIDIA's layout, which has no scale in its norms."""

    def __init__(self, net: Inception) -> None:
        super().__init__()
        for i, conv in enumerate(module for module in net.modules() if isinstance(module, BasicConv2d)):
            part = torch.nn.Module()
            part.register_buffer("weight", conv.conv.weight.detach())
            for mine, its in {"beta": conv.bn.bias, "mean": conv.bn.running_mean, "var": conv.bn.running_var}.items():
                part.register_buffer(mine, its.detach())  # type: ignore[union-attr]
            self.add_module(f"conv_{i}", part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_pictures_are_resized_as_tensorflow_did() -> None:
    row = torch.tensor([0.0, 1.0, 4.0]).view(1, 1, 1, 3).expand(1, 1, 3, 3)
    assert torch.allclose(resize_tf1(row, 6)[0, 0, 0], torch.tensor([0.0, 0.5, 1.0, 2.5, 4.0, 4.0]))


@pytest.fixture
def seen(tmp_path: Path) -> tuple[Path, Path, FeatureExtractor]:
    """Forty pictures in a folder, a reference of them, and who looked."""
    torch.manual_seed(0)
    for i in range(40):
        save_image(torch.rand(1, 3, 32, 32), tmp_path / "real" / f"{i:03d}.png")
    by = load_feature_extractor("classifier", TINY, Placement())
    make_reference(tmp_path / "real", ReferenceDescription("noise", "train"), by, tmp_path / "ref.safetensors", QUIET)
    return tmp_path / "real", tmp_path / "ref.safetensors", by


def test_samples_are_packed_as_adm_reads_them(seen: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    file = pack_images(seen[0], tmp_path / "samples.npz", QUIET)
    with np.load(file) as found:
        assert list(found) == ["arr_0"] and found["arr_0"].dtype == np.uint8 and found["arr_0"].shape == (40, 32, 32, 3)
    assert load_image_set(file).equal(load_image_set(seen[0]))
    np.savez(tmp_path / "odd.npz", arr_0=np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"arr_0 is float64 \[2, 3\]; expected uint8"):
        load_image_set(tmp_path / "odd.npz")
    np.savez(tmp_path / "other.npz", mu=np.zeros(3))
    with pytest.raises(ConfigError, match="holds no samples"):
        load_image_set(tmp_path / "other.npz")


def test_a_set_is_no_distance_from_itself(seen: tuple[Path, Path, FeatureExtractor]) -> None:
    folder, where, by = seen
    told = compare_to_reference(folder, where, ExpectedReference("noise", "train", 40), by, QUIET, few=True)
    assert told["fid"] == pytest.approx(0, abs=1e-6) and told["precision"] == told["recall"] == 1
    assert told["reference"].startswith("noise train, 40 pictures of 32 pixels, by classifier-")
    assert told["inception score"] >= 1


def test_the_usual_mix_ups_are_errors(seen: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    folder, where, by = seen
    for claim, sentence in {
        ExpectedReference(split="test"): "--split says test, but",
        ExpectedReference(count=50000): "--count says 50000, but .* is noise train, 40 pictures",
        ExpectedReference(name="cifar10"): "--name says cifar10",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            compare_to_reference(folder, where, claim, by, QUIET, few=True)
    with pytest.raises(ConfigError, match="seen by another network"):
        compare_to_reference(folder, where, ExpectedReference(), replace(by, network="inception-1"), QUIET, few=True)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="seen by another preprocessing"):
        compare_to_reference(folder, where, ExpectedReference(), replace(by, preprocessing="cubic"), QUIET, few=True)  # type: ignore[type-var]
    save_image(torch.rand(1, 3, 16, 16), tmp_path / "small" / "0.png")
    with pytest.raises(ConfigError, match="16 pixels high, but"):
        compare_to_reference(tmp_path / "small", where, ExpectedReference(), by, QUIET, few=True)
    save_image(torch.rand(1, 3, 32, 32), tmp_path / "one" / "0.png")
    with pytest.raises(ConfigError, match="there are 1 samples for 8 features"):
        compare_to_reference(tmp_path / "one", where, ExpectedReference(), by, QUIET)
    np.savez(tmp_path / "adm.npz", mu=np.zeros(3), sigma=np.zeros((3, 3)))
    with pytest.raises(ConfigError, match="is no reference that names itself"):
        load_reference(tmp_path / "adm.npz")


def test_the_commands_write_their_numbers(seen: tuple[Path, Path, FeatureExtractor], tmp_path: Path) -> None:
    folder, where, out = str(seen[0]), str(tmp_path / "again.safetensors"), tmp_path / "told.json"
    same = ["--network", "classifier", "--weights", TINY, "--device", "cpu"]
    for arguments in (
        ["pack", folder, "--out", str(tmp_path / "a.npz")],
        ["reference", folder, "--name", "noise", "--split", "train", "--out", where, *same],
        ["compare", str(tmp_path / "a.npz"), "--reference", where, "--out", str(out), "--few", *same],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    assert json.loads(out.read_text())["count"] == 40


def test_the_statistics_of_adms_references_are_kept_with_how_many_they_are_of(
    seen: tuple[Path, Path, FeatureExtractor], tmp_path: Path
) -> None:
    folder, where, by = seen
    own, file = load_reference(where), tmp_path / "VIRTUAL_noise32.npz"
    mean, covariance = own.mean.numpy() + 1e-3, own.covariance.numpy() * 1.5
    some = load_image_set(folder)[:20].numpy()
    np.savez(file, arr_0=some, mu=mean, sigma=covariance, mu_s=np.zeros(3), sigma_s=np.zeros((3, 3)))
    named = ReferenceDescription("noise", "train", count=1_281_167)
    found = make_reference(file, named, by, tmp_path / "adm.safetensors", QUIET)
    assert str(found.label).startswith("noise train, 1281167 pictures of 32 pixels") and len(found.features) == 20
    assert np.array_equal(found.mean.numpy(), mean) and np.array_equal(found.covariance.numpy(), covariance)
    told = compare_to_reference(
        folder, tmp_path / "adm.safetensors", ExpectedReference("noise", "train", 1_281_167), by, QUIET, few=True
    )
    assert told["fid"] > 0 and "1281167" in told["reference"]
    with pytest.raises(ConfigError, match="not of how many; tell it by --count"):
        make_reference(file, ReferenceDescription("noise", "train"), by, tmp_path / "none", QUIET)
    with pytest.raises(ConfigError, match="holds no statistics; pictures are counted here"):
        make_reference(folder, named, by, tmp_path / "none", QUIET)
    np.savez(file, arr_0=some, mu=mean + 100, sigma=covariance)
    with pytest.raises(ConfigError, match="give the Inception that it was made by"):
        make_reference(file, named, by, tmp_path / "none", QUIET)
    np.savez(file, arr_0=some, mu=np.zeros(3), sigma=np.zeros((3, 3)))
    with pytest.raises(ConfigError, match="has statistics of 3 features, this network 8"):
        make_reference(file, named, by, tmp_path / "none", QUIET)
