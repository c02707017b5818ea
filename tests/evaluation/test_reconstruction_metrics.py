"""Reconstruction metrics, with optional networks present or missing, and tokenizers in LlamaGen's layout."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tastemaker.autoencoders.training import train
from tastemaker.config.build import build_autoencoder, make_tiny_any
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image
from tastemaker.data.image_transforms import random_crop
from tastemaker.data.images import ClassImages
from tastemaker.evaluation.reconstruction_metrics import ReconstructionEvaluator, ssim
from tastemaker.export.llamagen import LlamagenExport, export_llamagen
from tastemaker.export.weights import export_weights
from tastemaker.models.image_tokenizer import build_frozen_tokenizer, read_tokenizer
from tastemaker.report.page import write_report
from tastemaker.training.events import StepCompleted, TrainingFinished
from tastemaker.training.run_directory import write_run_config

OVERRIDES = [
    "engine.device=cpu",
    "engine.precision=fp32",
    "batch_size=4",
    "data.device=cpu",
    "sample.every=0",
    "steps=1",
]
VALIDATION_OVERRIDES = ["validation.num_samples=4", "discriminator.start_step=9"]


def ssim_by_definition(one: np.ndarray, other: np.ndarray) -> float:
    """SSIM as a loop over windows."""
    values = []
    for y in range(one.shape[0] - 6):
        for x in range(one.shape[1] - 6):
            a, b = one[y : y + 7, x : x + 7].ravel(), other[y : y + 7, x : x + 7].ravel()
            luminance = (2 * a.mean() * b.mean() + 1e-4) / (a.mean() ** 2 + b.mean() ** 2 + 1e-4)
            covariance = np.cov(a, b)
            values.append(luminance * (2 * covariance[0, 1] + 9e-4) / (covariance[0, 0] + covariance[1, 1] + 9e-4))
    return float(np.mean(values))


def test_ssim_matches_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 2, 1, 12, 11, generator=generator, dtype=torch.float64)
    values = ssim(one, other)
    expected = [ssim_by_definition(a[0].numpy(), b[0].numpy()) for a, b in zip(one, other, strict=True)]
    assert torch.allclose(values, torch.tensor(expected, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(ssim(one, one), torch.ones(2, dtype=torch.float64))


def test_missing_networks_are_reported(tmp_path: Path) -> None:
    evaluator = ReconstructionEvaluator.from_weights(
        str(tmp_path / "vgg.safetensors"), "", tmp_path / "inception.pth", Placement()
    )
    pixels = torch.rand(3, 3, 32, 32)
    metrics, missing = evaluator.summarize(evaluator.measure(pixels, pixels))
    assert metrics["psnr"] == pytest.approx(100) and metrics["ssim"] == pytest.approx(1)
    assert "lpips" not in metrics and "rfid" not in metrics
    assert [sentence.split()[0] for sentence in missing] == ["LPIPS", "rFID"]


def test_lpips_and_rfid_are_measured_if_their_networks_exist() -> None:
    class MeanColor:
        network, preprocessing = "means", "none"

        def extract(self, pixels: torch.Tensor) -> tuple[torch.Tensor, None]:
            return pixels.mean((2, 3)), None

    evaluator = ReconstructionEvaluator.from_weights("tiny", "", None, Placement())
    evaluator.feature_extractor = MeanColor()
    pixels = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    same, missing = evaluator.summarize(evaluator.measure(pixels, pixels))
    other, _ = evaluator.summarize(evaluator.measure(pixels, pixels / 2))
    assert same["rfid"] < 1e-9 < other["rfid"] and same["lpips"] == 0 < other["lpips"]
    assert any("rFID" in sentence and " 8 " in sentence for sentence in missing)


def tokenizer(*changes: str) -> AutoencoderRunConfig:
    config = make_tiny_any(load_any_config("llamagen-vq", [*OVERRIDES, *VALIDATION_OVERRIDES, *changes]))
    assert isinstance(config, AutoencoderRunConfig)
    return config


def test_run_ends_with_reconstruction_metrics(tmp_path: Path) -> None:
    run = build_autoencoder(tokenizer(), tmp_path)
    *_, update, _, end = train(run)
    assert isinstance(update, StepCompleted) and isinstance(end, TrainingFinished)
    assert {"reconstruction/psnr", "reconstruction/ssim", "reconstruction/lpips"} <= {*update.metrics}
    assert "4 held-out" in end.reason and "psnr" in end.reason and "validation.inception_weights" in end.reason
    metrics = json.loads((tmp_path / "reconstruction.json").read_text())
    assert metrics["images"] == 4 and metrics["psnr"] == update.metrics["reconstruction/psnr"]
    (missing,) = metrics["missing"]
    assert "rFID" in missing and "validation.inception_weights" in missing


def test_report_shows_reconstruction_metrics(tmp_path: Path) -> None:
    (tmp_path / "reconstruction.json").write_text(
        json.dumps({"images": 9, "psnr": 21.5, "ssim": 0.7, "missing": ["rFID was not measured: no file"]})
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "time/step": 1.0, "samples": 2}\n')
    page = write_report([tmp_path]).read_text()
    assert "9 held-out" in page and "psnr 21.5, ssim 0.7" in page
    assert "rFID was not measured: no file" in page


def train_tokenizer(folder: Path, *changes: str) -> Path:
    config = load_any_config(
        "llamagen-vq", [*OVERRIDES, *VALIDATION_OVERRIDES, "loss.vgg_weights=tiny", "discriminator.width=8", *changes]
    )
    assert isinstance(config, AutoencoderRunConfig)
    directory = folder / "run"
    write_run_config(config, directory)
    deque(train(build_autoencoder(config, directory)), maxlen=0)
    return directory


def test_exported_tokenizer_gives_equal_indices(tmp_path: Path) -> None:
    sizes = "channels: 32, channel_multipliers: [1, 2], num_res_blocks: 1, z_channels: 32, codebook_size: 128"
    autoencoder = f"autoencoder={{type: vq, {sizes}, norm_num_groups: 32}}"
    directory, console = train_tokenizer(tmp_path, autoencoder), Console(quiet=True)
    published, native = tmp_path / "vq_ds2.pt", tmp_path / "vq.safetensors"
    export_llamagen(LlamagenExport(directory, published), console)
    export_weights(directory, native, "", 32, console)
    assert {*torch.load(published, weights_only=True)} == {"model"}
    nets = [build_frozen_tokenizer(*read_tokenizer(str(path)), str(path), Placement()) for path in (published, native)]
    pixels = torch.rand(2, 3, 16, 16)
    first, second = (net.encode(pixels) for net in nets)
    assert torch.equal(first, second) and len({*first.flatten().tolist()}) > 1
    assert torch.equal(nets[0].decode(first), nets[1].decode(first))


def test_tokenizer_outside_the_published_layout_is_refused(tmp_path: Path) -> None:
    directory = train_tokenizer(tmp_path, "autoencoder={type: vq, channels: 16, norm_num_groups: 8, codebook_size: 64}")
    with pytest.raises(ConfigError, match=r"8 groups.*TM676"):
        export_llamagen(LlamagenExport(directory, tmp_path / "vq.pt"), Console())


def test_random_crops_match_the_published_trainer() -> None:
    ramp = torch.linspace(0, 1, 400).expand(3, 300, 400)
    low, high = torch.zeros(3), torch.full((3,), 1 - 2**-24)
    for size in (64, 100):
        assert random_crop(ramp, size, low).shape == (3, size, size)
    largest = random_crop(ramp, 100, low)  # all of the shorter side, at the left
    assert largest[0, 0, 0] < 0.02 and float(largest[0, 0, -1]) == pytest.approx(0.75, abs=0.02)
    smallest = random_crop(ramp, 100, high)  # the smallest crop, at the right
    assert smallest[0, 0, -1] > 0.98 and float(smallest[0, 0, 0]) == pytest.approx(1 - 100 / 125 * 0.75, abs=0.02)


def test_random_crops_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for i in range(3):
        save_image(torch.rand(1, 3, 40, 50), tmp_path / f"{i}.png")
    spec = ClassImages(tmp_path, image_size=16, crop="random", random_flip=True)
    batch = spec.load(1).batch(2, 4, 0, 1).pixels
    shards = [spec.load(1).batch(2, 4, rank, 2).pixels for rank in range(2)]
    assert torch.equal(batch, torch.cat(shards))
    assert not torch.equal(batch, ClassImages(tmp_path, image_size=16).load(1).batch(2, 4, 0, 1).pixels)
