"""Copies of pictures are measured by what there is, and what is missing is said."""

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
from tastemaker.data.class_images import ClassPictures
from tastemaker.data.crops import random_crop
from tastemaker.data.image_io import save_image
from tastemaker.evaluation.reconstruction_metrics import ReconstructionEvaluator, ssim
from tastemaker.export.llamagen import LlamagenExport, export_llamagen
from tastemaker.export.weights_file import export_weights
from tastemaker.models.vq import build_frozen_tokenizer, read_tokenizer
from tastemaker.report.page import write_report
from tastemaker.training.events import StepCompleted, TrainingFinished
from tastemaker.training.resume import write_run_config

SMALL = ["engine.device=cpu", "engine.precision=fp32", "rows=4", "data.device=cpu", "sample.every=0", "steps=1"]
HELD = ["validation.rows=4", "critic.start=9"]


def windows(one: np.ndarray, other: np.ndarray) -> float:
    """SSIM by its definition, window by window."""
    found = []
    for y in range(one.shape[0] - 6):
        for x in range(one.shape[1] - 6):
            a, b = one[y : y + 7, x : x + 7].ravel(), other[y : y + 7, x : x + 7].ravel()
            light = (2 * a.mean() * b.mean() + 1e-4) / (a.mean() ** 2 + b.mean() ** 2 + 1e-4)
            shared = np.cov(a, b)
            found.append(light * (2 * shared[0, 1] + 9e-4) / (shared[0, 0] + shared[1, 1] + 9e-4))
    return float(np.mean(found))


def test_similarity_is_that_of_every_window() -> None:
    chance = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 2, 1, 12, 11, generator=chance, dtype=torch.float64)
    found = ssim(one, other)
    expected = [windows(a[0].numpy(), b[0].numpy()) for a, b in zip(one, other, strict=True)]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(ssim(one, one), torch.ones(2, dtype=torch.float64))


def test_what_is_missing_is_said_and_the_rest_measured(tmp_path: Path) -> None:
    measure = ReconstructionEvaluator.by(str(tmp_path / "vgg.safetensors"), "", tmp_path / "inception.pth", Placement())
    pixels = torch.rand(3, 3, 32, 32)
    found, missing = measure.numbers(measure.look(pixels, pixels))
    assert found["psnr"] == pytest.approx(100) and found["ssim"] == pytest.approx(1)
    assert "lpips" not in found and "rfid" not in found
    assert [sentence.split(":")[0] for sentence in missing] == ["LPIPS was not measured", "rFID was not measured"]


def test_lpips_and_distances_are_measured_where_their_networks_are() -> None:
    class Eye:
        network, preprocessing = "means", "none"

        def look(self, pixels: torch.Tensor) -> tuple[torch.Tensor, None]:
            return pixels.mean((2, 3)), None

    measure = ReconstructionEvaluator.by("tiny", "", None, Placement())
    measure.seer = Eye()
    pixels = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    same, missing = measure.numbers(measure.look(pixels, pixels))
    other, _ = measure.numbers(measure.look(pixels, pixels / 2))
    assert same["rfid"] < 1e-9 < other["rfid"] and same["lpips"] == 0 < other["lpips"]
    assert any("is of 8 pictures" in sentence for sentence in missing)


def tokenizer(*changes: str) -> AutoencoderRunConfig:
    found = make_tiny_any(load_any_config("llamagen-vq", [*SMALL, *HELD, *changes]))
    assert isinstance(found, AutoencoderRunConfig)
    return found


def test_a_run_ends_with_the_numbers_of_its_copies(tmp_path: Path) -> None:
    run = build_autoencoder(tokenizer(), tmp_path)
    *_, update, _, end = train(run)
    assert isinstance(update, StepCompleted) and isinstance(end, TrainingFinished)
    assert {"copies/psnr", "copies/ssim", "copies/lpips"} <= {*update.metrics}
    assert "4 held-out copies: psnr" in end.reason and "set validation.inception" in end.reason
    told = json.loads((tmp_path / "copies.json").read_text())
    assert told["pictures"] == 4 and told["psnr"] == update.metrics["copies/psnr"]
    assert told["missing"] == ["rFID was not measured: set validation.inception to FID's network"]


def test_the_report_tells_them(tmp_path: Path) -> None:
    (tmp_path / "copies.json").write_text(
        json.dumps({"pictures": 9, "psnr": 21.5, "ssim": 0.7, "missing": ["rFID was not measured: no file"]})
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "seconds": 1.0, "samples": 2}\n')
    page = write_report([tmp_path]).read_text()
    assert "9 held-out pictures were copied with psnr 21.5, ssim 0.7" in page
    assert "rFID was not measured: no file" in page


def trained(folder: Path, *changes: str) -> Path:
    config = load_any_config("llamagen-vq", [*SMALL, *HELD, "loss.vgg=tiny", "critic.width=8", *changes])
    assert isinstance(config, AutoencoderRunConfig)
    directory = folder / "run"
    write_run_config(config, directory)
    deque(train(build_autoencoder(config, directory)), maxlen=0)
    return directory


def test_a_tokenizer_is_written_as_published_and_read_back_with_equal_indices(tmp_path: Path) -> None:
    sizes = "autoencoder={type: vq, channels: 32, multipliers: [1, 2], blocks: 1, latent: 32, codes: 128, groups: 32}"
    directory, console = trained(tmp_path, sizes), Console(quiet=True)
    published, own = tmp_path / "vq_ds2.pt", tmp_path / "vq.safetensors"
    export_llamagen(LlamagenExport(directory, published), console)
    export_weights(directory, own, "", 32, console)
    assert {*torch.load(published, weights_only=True)} == {"model"}
    nets = [build_frozen_tokenizer(*read_tokenizer(str(path)), str(path), Placement()) for path in (published, own)]
    pixels = torch.rand(2, 3, 16, 16)
    first, second = (net.encode(pixels) for net in nets)
    assert torch.equal(first, second) and len({*first.flatten().tolist()}) > 1
    assert torch.equal(nets[0].decode(first), nets[1].decode(first))


def test_a_tokenizer_that_published_code_could_not_read_is_refused(tmp_path: Path) -> None:
    directory, console = trained(tmp_path, "autoencoder={type: vq, channels: 16, groups: 8, codes: 64}"), Console()
    with pytest.raises(ConfigError, match="in groups of 8; its tokenizers have a codebook and normalise 32"):
        export_llamagen(LlamagenExport(directory, tmp_path / "vq.pt"), console)


def test_squares_are_cut_as_the_published_trainer_cuts_them() -> None:
    ramp = torch.linspace(0, 1, 400).expand(3, 300, 400)
    low, high = torch.zeros(3), torch.full((3,), 1 - 2**-24)
    for size in (64, 100):
        assert random_crop(ramp, size, low).shape == (3, size, size)
    whole = random_crop(ramp, 100, low)  # all of the shorter side, at the left
    assert whole[0, 0, 0] < 0.02 and float(whole[0, 0, -1]) == pytest.approx(0.75, abs=0.02)
    closer = random_crop(ramp, 100, high)  # the least of it, at the right
    assert closer[0, 0, -1] > 0.98 and float(closer[0, 0, 0]) == pytest.approx(1 - 100 / 125 * 0.75, abs=0.02)


def test_random_squares_are_the_same_when_a_run_resumes_and_on_any_number_of_ranks(tmp_path: Path) -> None:
    for i in range(3):
        save_image(torch.rand(1, 3, 40, 50), tmp_path / f"{i}.png")
    spec = ClassPictures(tmp_path, size=16, crop="random", mirror=True)
    whole = spec.load(1).batch(2, 4, 0, 1).pixels
    parts = [spec.load(1).batch(2, 4, rank, 2).pixels for rank in range(2)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, ClassPictures(tmp_path, size=16).load(1).batch(2, 4, 0, 1).pixels)
