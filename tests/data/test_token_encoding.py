"""Tokens of pictures are written as LlamaGen reads them, and a second run goes on."""

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

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pictures of two classes, and a tokenizer in LlamaGen's layout."""
    folder = tmp_path_factory.mktemp("encode")
    torch.manual_seed(0)
    for i in range(4):
        picture = folder / "pictures" / ("dog", "cat")[i % 2] / f"{i}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        save_image(torch.rand(1, 3, 20, 24), picture)
    save_file(VQ(VQConfig(32, (1, 2), 1, 16, 128, 8)).state_dict(), folder / "vq.safetensors")
    return folder


def order(place: Path, out: Path, views: str = "flip", size: int = 16) -> TokenEncodingOptions:
    return TokenEncodingOptions(place / "pictures", str(place / "vq.safetensors"), out, size, views)  # type: ignore[arg-type]


@pytest.mark.parametrize(("views", "count"), [("center", 1), ("flip", 2), ("ten-crop", 10)])
def test_codes_and_labels_are_in_llamagens_layout(views: str, count: int, place: Path, tmp_path: Path) -> None:
    asked = order(place, tmp_path, views)
    encode_tokens(asked, Placement(), QUIET)
    codes = [np.load(tmp_path / f"imagenet16_codes/{i}.npy") for i in range(4)]
    assert all(x.shape == (1, count, 64) and x.dtype == np.int64 for x in codes)
    labels = [np.load(tmp_path / f"imagenet16_labels/{i}.npy").tolist() for i in range(4)]
    assert labels == [[0], [0], [1], [1]]  # cat before dog
    if views == "ten-crop":
        crops = ten_crop(read_image(place / "pictures/cat/1.png")[0], 16, 1.1)
        shape, tensors = read_tokenizer(asked.tokenizer)
        assert np.array_equal(
            build_frozen_tokenizer(shape, tensors, "", Placement()).encode(crops).numpy(), codes[0][0]
        )


def test_it_goes_on_where_it_stopped_and_ranks_share(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_tokens(order(place, tmp_path / "whole"), Placement(), QUIET)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        encode_tokens(order(place, tmp_path / "shared"), Placement(), QUIET)
        if rank == "0":
            assert len(list((tmp_path / "shared/imagenet16_labels").iterdir())) == 2
    for i in range(4):
        files = [tmp_path / name / f"imagenet16_codes/{i}.npy" for name in ("whole", "shared")]
        assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "whole/imagenet16_labels/2.npy").unlink()
    kept = (tmp_path / "whole/imagenet16_codes/0.npy").stat().st_mtime_ns
    encode_tokens(order(place, tmp_path / "whole"), Placement(), QUIET)
    assert (tmp_path / "whole/imagenet16_labels/2.npy").is_file()
    assert (tmp_path / "whole/imagenet16_codes/0.npy").stat().st_mtime_ns == kept


def test_broken_pictures_are_named_counted_and_left_out(place: Path, tmp_path: Path) -> None:
    pictures, said = tmp_path / "pictures", StringIO()
    shutil.copytree(place / "pictures", pictures)
    (pictures / "cat/1.png").write_bytes(b"none")
    asked = replace(order(place, tmp_path / "out"), images=pictures)
    with pytest.raises(ConfigError, match=r"1\.png cannot be read .*or allow more of them with --skip 2"):
        encode_tokens(replace(asked, max_skipped=0), Placement(), QUIET)
    encode_tokens(asked, Placement(), Console(file=said, width=200))
    assert "skipped: " in said.getvalue() and "1 could not be read" in said.getvalue()
    assert sorted(file.stem for file in asked.labels.glob("*.npy")) == ["1", "2", "3"]
    data = TokenFolder(tmp_path / "out", num_classes=2, class_names=("cat", "dog")).load(0)
    assert len(data) == 3 and set(data.batch(0, 3, 0, 1).prompts) == {"cat", "dog"}


def test_what_was_begun_otherwise_is_not_gone_on_with(place: Path, tmp_path: Path) -> None:
    encode_tokens(order(place, tmp_path), Placement(), QUIET)
    assert json.loads((tmp_path / "imagenet16_codes/codes.json").read_text())["views"] == "flip"
    with pytest.raises(ConfigError, match="started with another 'views'"):
        encode_tokens(order(place, tmp_path, "center"), Placement(), QUIET)
    with pytest.raises(ConfigError, match="no multiple of 2"):
        encode_tokens(order(place, tmp_path, size=17), Placement(), QUIET)


def test_the_command_says_what_is_wrong(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app is not None
    with pytest.raises(SystemExit):
        main(["encode", str(tmp_path / "none"), "--tokenizer", str(place / "vq.safetensors")])
    assert "there is no such folder" in capsys.readouterr().err
