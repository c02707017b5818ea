"""CIFAR-10 in the layout of its package: images, captions, subsets and refusals of broken files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tastemaker.core.registry import ConfigError
from tastemaker.data.cifar10 import NAMES, Cifar10, is_cifar10, load_cifar10
from tastemaker.data.dataset import batch_indices
from tastemaker.data.image_transforms import center_and_flip, center_crop, ten_crop


def write_sprite_sheet(folder: Path, count: int = 20, split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    whole = np.random.default_rng(0).integers(0, 256, (count, 1024, 3), dtype=np.uint8)
    Image.fromarray(whole).save(folder / ("data_batch_1.png" if split == "train" else "test_batch.png"))
    (folder / f"{split}_lables.json").write_text(json.dumps([i % 10 for i in range(count)]))
    return folder


def test_sprite_sheet_rows_are_images(tmp_path: Path) -> None:
    path = write_sprite_sheet(tmp_path / "cifar")
    whole = load_cifar10(path, "train")
    raw = np.array(Image.open(path / "data_batch_1.png")).reshape(-1, 32, 32, 3)
    assert np.array_equal(whole.pixels[7].permute(1, 2, 0).numpy(), raw[7])
    assert whole.label(7) == 7 and len(whole) == 20 and is_cifar10(path)
    assert torch.equal(whole.image(3), torch.from_numpy(raw[3]).permute(2, 0, 1) / 255)


def test_cifar10_batches_have_captions_and_rank_shards(tmp_path: Path) -> None:
    data = Cifar10(write_sprite_sheet(tmp_path / "cifar"), num_samples=12, random_flip=True).load(1)
    batch = data.batch(2, 8, 0, 1)
    assert batch.pixels.shape == (8, 1, 3, 32, 32) and set(batch.prompts) <= set(NAMES)
    halves = [data.batch(2, 8, rank, 2) for rank in (0, 1)]
    assert torch.cat([half.pixels for half in halves]).equal(batch.pixels)
    assert (batch.image_ids // 2).tolist() == data.indices[batch_indices(12, 1, 2, 8, 0, 1)].tolist()  # type: ignore[operator]
    straight = Cifar10(tmp_path / "cifar", num_samples=12).load(1).batch(2, 8, 0, 1).pixels
    turned = [not a.equal(b) for a, b in zip(batch.pixels, straight, strict=True)]
    assert 0 < sum(turned) < 8
    assert all(a.equal(b.flip(-1) if t else b) for a, b, t in zip(batch.pixels, straight, turned, strict=True))


def test_random_shift_moves_images_and_changes_image_ids(tmp_path: Path) -> None:
    data = Cifar10(write_sprite_sheet(tmp_path / "cifar"), random_shift=2).load(1)
    batch = data.batch(3, 18, 0, 1)
    assert torch.cat([data.batch(3, 18, rank, 2).pixels for rank in (0, 1)]).equal(batch.pixels)
    assert batch.image_ids is not None
    for pixels, number in zip(batch.pixels[:, 0], batch.image_ids.tolist(), strict=True):
        view, right = divmod(number, 5)
        view, down = divmod(view, 5)
        whole = data.images.image(view // 2)
        wide = torch.nn.functional.pad(whole[None], (2, 2, 2, 2), mode="reflect")[0]
        assert view % 2 == 0 and torch.equal(pixels, wide[:, down : down + 32, right : right + 32])
    assert len({number % 25 for number in batch.image_ids.tolist()}) > 5


def test_subsets_do_not_overlap(tmp_path: Path) -> None:
    path = write_sprite_sheet(tmp_path / "cifar")
    first, second = (Cifar10(path, num_samples=10, start_index=start).load(0).indices.tolist() for start in (0, 10))
    assert sorted(first + second) == list(range(20))


def test_missing_or_broken_files_are_refused(tmp_path: Path) -> None:
    path = write_sprite_sheet(tmp_path / "cifar")
    with pytest.raises(ConfigError, match=r"test_lables.*TM123"):
        load_cifar10(path, "test")
    with pytest.raises(ConfigError, match=r"20 of train; lower.*TM128"):
        Cifar10(path, num_samples=21).load(0)
    other = write_sprite_sheet(tmp_path / "other")
    (other / "train_lables.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"20 images.* 2 labels.*TM125"):
        load_cifar10(other, "train")
    (other / "data_batch_1.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match=r"TM126"):
        load_cifar10(other, "train")


def test_crops_match_the_published_code() -> None:
    wide = torch.rand(3, 40, 64)
    assert torch.equal(center_crop(wide, 40), torch.round(wide[:, :, 12:52] * 255) / 255)  # nothing to shrink
    assert center_crop(wide, 8).shape == (3, 8, 8)
    pair = center_and_flip(wide, 16)
    assert torch.equal(pair[0], pair[1].flip(-1))
    crops = ten_crop(wide, 20, 1.1)
    assert crops.shape == (10, 3, 20, 20)
    whole = center_crop(wide, 22)
    assert torch.equal(crops[0], whole[:, :20, :20]) and torch.equal(crops[3], whole[:, 2:, 2:])
    assert torch.equal(crops[4], whole[:, 1:21, 1:21]) and torch.equal(crops[5], whole.flip(-1)[:, :20, :20])


def test_prefetched_batches_match_their_steps(tmp_path: Path) -> None:
    path = write_sprite_sheet(tmp_path / "cifar")
    data = Cifar10(path, random_flip=True).load(3)
    for step in (0, 1, 2, 3, 9, 10, 4, 5):  # on, away, and back, as a resumed run might
        batch, expected = (rows.batch(step, 6, 0, 1) for rows in (data, Cifar10(path, random_flip=True).load(3)))
        assert batch.prompts == expected.prompts and batch.pixels.equal(expected.pixels)
        assert (
            batch.image_ids is not None and expected.image_ids is not None and batch.image_ids.equal(expected.image_ids)
        )
    assert [share.step for share in data.prefetcher.pending] == [6, 7]
