"""Image tokens are written in LlamaGen's layout, and interrupted encoding resumes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tastemaker.cli import app, main
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_encoding import TokenEncodingOptions, encode_tokens
from tastemaker.data.image_io import read_image, save_image
from tastemaker.data.image_transforms import ten_crop
from tastemaker.data.tokens import TokenFolder
from tastemaker.models.image_tokenizer import build_frozen_tokenizer, read_tokenizer
from tastemaker.models.nets.vq import VQ, VQConfig

SILENT_CONSOLE = Console(quiet=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of two classes, and a tokenizer checkpoint in LlamaGen's layout."""
    folder = tmp_path_factory.mktemp("encode")
    torch.manual_seed(0)
    for i in range(4):
        image = folder / "images" / ("dog", "cat")[i % 2] / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        save_image(torch.rand(1, 3, 20, 24), image)
    save_file(VQ(VQConfig(32, (1, 2), 1, 16, 128, 8)).state_dict(), folder / "vq.safetensors")
    return folder


def encoding_options(inputs: Path, out: Path, views: str = "flip", size: int = 16) -> TokenEncodingOptions:
    return TokenEncodingOptions(inputs / "images", str(inputs / "vq.safetensors"), out, size, views)  # type: ignore[arg-type]


@pytest.mark.parametrize(("views", "count"), [("center", 1), ("flip", 2), ("ten-crop", 10)])
def test_codes_and_labels_have_llamagens_layout(views: str, count: int, inputs: Path, tmp_path: Path) -> None:
    options = encoding_options(inputs, tmp_path, views)
    encode_tokens(options, Placement(), SILENT_CONSOLE)
    codes = [np.load(tmp_path / f"imagenet16_codes/{i}.npy") for i in range(4)]
    assert all(x.shape == (1, count, 64) and x.dtype == np.int64 for x in codes)
    labels = [np.load(tmp_path / f"imagenet16_labels/{i}.npy").tolist() for i in range(4)]
    assert labels == [[0], [0], [1], [1]]  # cat before dog
    if views == "ten-crop":
        crops = ten_crop(read_image(inputs / "images/cat/1.png")[0], 16, 1.1)
        shape, tensors = read_tokenizer(options.tokenizer)
        assert np.array_equal(
            build_frozen_tokenizer(shape, tensors, "", Placement()).encode(crops).numpy(), codes[0][0]
        )


def test_encoding_resumes_and_ranks_share_images(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_tokens(encoding_options(inputs, tmp_path / "complete"), Placement(), SILENT_CONSOLE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        encode_tokens(encoding_options(inputs, tmp_path / "shared"), Placement(), SILENT_CONSOLE)
        if rank == "0":
            assert len(list((tmp_path / "shared/imagenet16_labels").iterdir())) == 2
    for i in range(4):
        files = [tmp_path / name / f"imagenet16_codes/{i}.npy" for name in ("complete", "shared")]
        assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "complete/imagenet16_labels/2.npy").unlink()
    mtime = (tmp_path / "complete/imagenet16_codes/0.npy").stat().st_mtime_ns
    encode_tokens(encoding_options(inputs, tmp_path / "complete"), Placement(), SILENT_CONSOLE)
    assert (tmp_path / "complete/imagenet16_labels/2.npy").is_file()
    assert (tmp_path / "complete/imagenet16_codes/0.npy").stat().st_mtime_ns == mtime


def test_broken_images_are_reported_and_skipped(inputs: Path, tmp_path: Path) -> None:
    images, log = tmp_path / "images", StringIO()
    shutil.copytree(inputs / "images", images)
    (images / "cat/1.png").write_bytes(b"none")
    options = replace(encoding_options(inputs, tmp_path / "out"), images=images)
    with pytest.raises(ConfigError, match=r"TM172"):
        encode_tokens(replace(options, max_skipped=0), Placement(), SILENT_CONSOLE)
    encode_tokens(options, Placement(), Console(file=log, width=200))
    assert "skipped: " in log.getvalue() and "1 could not be read" in log.getvalue()
    assert sorted(file.stem for file in options.labels.glob("*.npy")) == ["1", "2", "3"]
    data = TokenFolder(tmp_path / "out", num_classes=2, class_names=("cat", "dog")).load(0)
    assert len(data) == 3 and set(data.batch(0, 3, 0, 1).prompts) == {"cat", "dog"}


def test_resuming_with_other_options_is_refused(inputs: Path, tmp_path: Path) -> None:
    encode_tokens(encoding_options(inputs, tmp_path), Placement(), SILENT_CONSOLE)
    assert json.loads((tmp_path / "imagenet16_codes/codes.json").read_text())["views"] == "flip"
    with pytest.raises(ConfigError, match=r"started with another 'views'.*TM161"):
        encode_tokens(encoding_options(inputs, tmp_path, "center"), Placement(), SILENT_CONSOLE)
    with pytest.raises(ConfigError, match=r"not a multiple of 2.*TM162"):
        encode_tokens(encoding_options(inputs, tmp_path, size=17), Placement(), SILENT_CONSOLE)


def test_command_refuses_a_missing_directory(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app is not None
    with pytest.raises(SystemExit):
        main(["encode", str(tmp_path / "none"), "--tokenizer", str(inputs / "vq.safetensors")])
    assert "no such folder" in capsys.readouterr().err
