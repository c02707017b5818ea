"""Reconstructions are written beside their images with scores, and an interrupted run resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tastemaker.autoencoders.lpips import TINY
from tastemaker.cli import main
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import read_image, save_image
from tastemaker.evaluation.reconstruction import ReconstructionOptions, reconstruct_images
from tastemaker.models.block_vae import BlockVaeSpec
from tastemaker.models.nets.vq import VQ, VQConfig
from tastemaker.models.weight_files import write_weights

SPEC = BlockVaeSpec(
    down_channels=(8, 8), mid_channels=(8,), down_sample=(True,), attn_down=(False,), norm_channels=4, num_heads=2,
    num_down_layers=1, num_up_layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nested images of two sizes, one of them gray and one broken, and an autoencoder."""
    folder = tmp_path_factory.mktemp("reconstruct")
    torch.manual_seed(0)
    for name, size in {"a.png": (18, 20), "in/b.png": (18, 20), "in/deep/c.png": (32, 16)}.items():
        save_image(torch.rand(1, 3, *size), folder / "images" / name)
    save_image(torch.rand(1, 1, 18, 20).expand(1, 3, -1, -1), folder / "images" / "grey.png")
    (folder / "images" / "broken.jpg").write_bytes(b"none")
    settings = {"type": "block_vae", **vars(SPEC)}
    write_weights(
        folder / "vae.safetensors", SPEC.load(Placement()).state_dict(), {"autoencoder": settings}, torch.float32
    )
    return folder


def reconstruction_options(inputs: Path, out: Path) -> ReconstructionOptions:
    return ReconstructionOptions(inputs / "images", str(inputs / "vae.safetensors"), out, vgg_weights=TINY)


def read_scores(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]


def test_celeba_hq_masks_and_too_small_images_are_skipped(tmp_path: Path) -> None:
    spec = replace(SPEC, norm_channels=8)  # one channel per group, which has no norm for a single latent
    settings = {"type": "block_vae", **vars(spec)}
    write_weights(
        tmp_path / "vae.safetensors", spec.load(Placement()).state_dict(), {"autoencoder": settings}, torch.float32
    )
    faces = tmp_path / "faces"
    for name, side in {
        "CelebA-HQ-img/0.png": 16,
        "CelebA-HQ-img/1.png": 3,
        "CelebAMask-HQ-mask-anno/0/hair.png": 16,
    }.items():
        save_image(torch.rand(1, 3, side, side), faces / name)
    log, options = (
        StringIO(),
        ReconstructionOptions(faces, str(tmp_path / "vae.safetensors"), tmp_path / "out", vgg_weights=TINY),
    )
    rows = reconstruct_images(options, Placement(), Console(file=log, width=400))
    assert [row["file"] for row in rows] == ["CelebA-HQ-img/0.png"]
    assert "1.png cannot be reconstructed at this size" in log.getvalue() and "1 could not be read" in log.getvalue()


def test_image_pairs_and_scores_are_written(inputs: Path, tmp_path: Path) -> None:
    log = StringIO()
    rows = reconstruct_images(reconstruction_options(inputs, tmp_path), Placement(), Console(file=log, width=200))
    assert [row["file"] for row in rows] == ["a.png", "grey.png", "in/b.png", "in/deep/c.png"]
    assert read_scores(tmp_path) == rows and all(set(row) >= {"psnr", "ssim", "lpips"} for row in rows)
    pair = read_image(tmp_path / "images" / "in/deep/c.png.png")[0]
    original, reconstruction = pair[..., :16], pair[..., 16:]
    assert original.equal(read_image(inputs / "images/in/deep/c.png")[0])
    psnr = -10 * (original - reconstruction).square().mean().log10()
    assert float(psnr) == pytest.approx(rows[3]["psnr"], abs=1e-3)
    assert "broken.jpg cannot be read" in log.getvalue() and "1 could not be read" in log.getvalue()
    assert "psnr" in log.getvalue() and "4 images beside their reconstructions" in log.getvalue()


def test_interrupted_reconstruction_resumes(inputs: Path, tmp_path: Path) -> None:
    complete = reconstruct_images(reconstruction_options(inputs, tmp_path), Placement(), Console(quiet=True))
    text = (tmp_path / "scores.jsonl").read_text().splitlines()
    marked = json.dumps({**complete[0], "psnr": 99.0})  # to detect that it is not recomputed
    (tmp_path / "scores.jsonl").write_text(f"{marked}\n{text[1]}\n{text[2][:20]}")
    (tmp_path / "images" / "grey.png.png").unlink()
    resumed = reconstruct_images(reconstruction_options(inputs, tmp_path), Placement(), Console(quiet=True))
    assert resumed == [{**complete[0], "psnr": 99.0}, *complete[1:]] == read_scores(tmp_path)
    with pytest.raises(ConfigError, match=r"another 'size' \(0, now 16\).*TM161"):
        reconstruct_images(replace(reconstruction_options(inputs, tmp_path), size=16), Placement(), Console(quiet=True))


def test_fixed_size_and_missing_lpips_weights(inputs: Path, tmp_path: Path) -> None:
    log = StringIO()
    options = replace(reconstruction_options(inputs, tmp_path), size=16, vgg_weights="nobody/vgg", batch_size=2)
    rows = reconstruct_images(options, Placement(), Console(file=log, width=400))
    assert {(row["width"], row["height"]) for row in rows} == {(16, 16)} and "lpips" not in rows[0]
    assert "LPIPS was not measured" in log.getvalue()


def test_broken_files_are_allowed_up_to_a_limit(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TM172"):
        reconstruct_images(
            replace(reconstruction_options(inputs, tmp_path), max_unreadable=0), Placement(), Console(quiet=True)
        )
    with pytest.raises(ConfigError, match=r"TM641"):
        reconstruct_images(
            replace(reconstruction_options(inputs, tmp_path), images=tmp_path / "none"),
            Placement(),
            Console(quiet=True),
        )


def test_command_accepts_checkpoints_and_configurations(inputs: Path, tmp_path: Path) -> None:
    torch.save({"model": VQ(VQConfig(32, (1, 2), 1, 16, 128, 8)).state_dict()}, tmp_path / "vq.pt")
    torch.save(SPEC.load(Placement()).state_dict(), tmp_path / "vae_autoencoder_ckpt.pth")
    settings = {**vars(SPEC), "type": "block_vae", "weights": str(tmp_path / "vae_autoencoder_ckpt.pth")}
    text = json.dumps({"autoencoder": settings, "data": {"type": "toy_images"}}, default=list)
    (tmp_path / "vae.yaml").write_text(text)
    for name in ("vq.pt", "vae.yaml"):
        out = tmp_path / name.replace(".", "_")
        arguments = ["reconstruct", str(inputs / "images"), "--model", str(tmp_path / name), "--out", str(out)]
        with pytest.raises(SystemExit) as exit_info:
            main([*arguments, "--vgg-weights", TINY, "--device", "cpu"])
        assert exit_info.value.code == 0
        assert len(read_scores(out)) == 4
