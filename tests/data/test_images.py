"""Pictures from folders at any depth, from CelebA-HQ's, from tar shards and from data sets on disk, by threads."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import ImageBatch
from tastemaker.data.dataset import split_dataset
from tastemaker.data.image_io import ImageError, read_image
from tastemaker.data.image_transforms import center_crop, decode_square, random_crop
from tastemaker.data.images import ImageCollection, ImageCollectionDataset

SHADES = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]


def saved(path: Path, number: int, size: tuple[int, int] = (20, 12)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, SHADES[number % 3]).save(path)
    return path


def encoded(number: int, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 12), SHADES[number % 3]).save(file, form)
    return file.getvalue()


def textured(side: int, other: int) -> Image.Image:
    """Smooth enough that ways to scale it differ little."""
    y, x = np.mgrid[0:other, 0:side] / 40
    planes = [np.sin(x * (k + 1)) * np.cos(y * (3 - k)) for k in range(3)]
    return Image.fromarray(((np.stack(planes, -1) + 1) * 127).astype(np.uint8))


def seen(batch: ImageBatch) -> Counter[tuple[str, int]]:
    colours = batch.pixels[:, 0].mean((2, 3)).argmax(1).tolist()
    return Counter(zip(batch.prompts, colours, strict=True))


def of_depths(path: Path) -> Path:
    for number, name in enumerate(["a.png", "cats/b.jpg", "cats/old/deep/c.webp", "dogs/d.jpeg", "dogs/.hidden.png"]):
        saved(path / name, number)
    (path / "dogs" / "notes.md").write_text("no picture")
    return path


def test_collection_reads_nested_folders_without_hidden_files(tmp_path: Path) -> None:
    data = ImageCollection(of_depths(tmp_path), 8).load(0)
    batch = data.batch(0, 4, 0, 1)
    assert len(data) == 4 and batch.pixels.shape == (4, 1, 3, 8, 8) and batch.pixels.dtype == torch.float32
    assert seen(batch) == {("", 0): 2, ("", 1): 1, ("", 2): 1}
    assert len(ImageCollection(tmp_path, 8, file_pattern="*.jp*g").load(0)) == 2
    with pytest.raises(ConfigError, match=r"TM178"):
        ImageCollection(tmp_path, 8, file_pattern="x*").load(0)


def test_collection_class_is_the_top_folder(tmp_path: Path) -> None:
    path = of_depths(tmp_path)
    data = ImageCollection(path, 8, caption_source="class_name", max_skipped=1).load(0)
    with pytest.warns(UserWarning, match=r"a.png is skipped \(.*TM175.*1 of 1"):
        prompts = {prompt for step in range(4) for prompt in data.batch(step, 1, 0, 1).prompts}
    assert prompts == {"cats", "dogs"} and data.first_prompts(3).prompts == ("cats", "dogs", "cats")
    (path / "a.png").unlink()
    assert {*ImageCollection(path, 8, caption_source="class_id").load(0).batch(0, 3, 0, 1).prompts} == {"0", "1"}


def test_symlinks_are_followed_without_cycles(tmp_path: Path) -> None:
    saved(tmp_path / "there" / "a.png", 0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "back").symlink_to(tmp_path / "there")
    assert len(ImageCollection(tmp_path / "here", 8).load(0)) == 1


def test_celeba_hq_masks_are_ignored(tmp_path: Path) -> None:
    for number in range(3):
        saved(tmp_path / "CelebA-HQ-img" / f"{number}.jpg", number)
        saved(tmp_path / "CelebAMask-HQ-mask-anno" / "0" / f"0000{number}_hair.png", number)
    assert len(ImageCollection(tmp_path, 8).load(0)) == 3


def test_collection_reads_txt_captions_or_metadata_jsonl(tmp_path: Path) -> None:
    for number, name in enumerate(["x/a.png", "x/y/b.png"]):
        saved(tmp_path / name, number).with_suffix(".txt").write_text(f" picture\n{number} \n")
    assert seen(ImageCollection(tmp_path, 8).load(0).batch(0, 2, 0, 1)) == {("picture 0", 0): 1, ("picture 1", 1): 1}
    rows = [{"file_name": "x/a.png", "text": "red"}, {"file_name": "x/y/b.png", "text": "green"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ImageCollection(tmp_path, 8).load(0)
    assert seen(data.batch(0, 2, 0, 1)) == {("red", 0): 1, ("green", 1): 1} and data.first_prompts(2).prompts == (
        "red",
        "green",
    )
    assert ImageCollection(tmp_path, 8, caption_source="empty").load(0).batch(0, 2, 0, 1).prompts == ("", "")
    (tmp_path / "metadata.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigError, match=r"b.png.*TM176"):
        ImageCollection(tmp_path, 8).load(0).batch(0, 2, 0, 1)


def tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_webdataset_samples_are_grouped_by_key(tmp_path: Path) -> None:
    sidecar = b'{"caption": "green", "label": 7}'
    first = {"d/0.png": encoded(0), "d/0.txt": b"red", "d/0.cls": b"4\n", "d/1.jpg": encoded(1, "JPEG")}
    tar(tmp_path / "train-0.tar", {**first, "d/1.json": sidecar, "readme": b"-"})
    tar(tmp_path / "train-1.tar", {"2.WEBP": encoded(2, "WEBP"), "2.txt": b"blue", "2.cls": b"5", "3.txt": b"alone"})
    tar(tmp_path / "test-0.tar", {"9.png": encoded(0)})
    data = ImageCollection(tmp_path, 8, file_pattern="train-*").load(0)
    assert seen(data.batch(0, 3, 0, 1)) == {("red", 0): 1, ("green", 1): 1, ("blue", 2): 1}
    numbered = ImageCollection(tmp_path, 8, file_pattern="train-*", caption_source="class_id").load(0)
    assert seen(numbered.batch(0, 3, 0, 1)) == {("4", 0): 1, ("7", 1): 1, ("5", 2): 1}
    assert (
        len(ImageCollection(tmp_path / "test-0.tar", 8).load(0)) == 1 and len(ImageCollection(tmp_path, 8).load(0)) == 4
    )


def test_broken_shards_are_refused_by_name(tmp_path: Path) -> None:
    whole = tar(tmp_path / "a.tar", {"0.png": encoded(0), "1.png": encoded(1)}).read_bytes()
    for name, content, why in (
        ("cut.tar", whole[:700], "cut.tar cannot be read as a .tar file"),
        ("text.tar", b"no tar at all" * 99, "text.tar cannot be read as a .tar file"),
        ("packed.tar.gz", b"", "packed.tar.gz is compressed"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            ImageCollection(tmp_path / name, 8).load(0)
    tar(tmp_path / "words.tar", {"0.txt": b"a"})
    with pytest.raises(ConfigError, match=r"TM187"):
        ImageCollection(tmp_path / "words.tar", 8).load(0)
    tar(tmp_path / "b.tar", {"0.png": encoded(0), "0.cls": b"cat"})
    with pytest.raises(
        ConfigError, match=r"0 in .*b.tar cannot be used \(its class is 'cat', expected a number.*TM183"
    ):
        ImageCollection(tmp_path / "b.tar", 8, caption_source="class_id").load(0).batch(0, 1, 0, 1)


def test_collection_reads_saved_datasets_without_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table: dict[str, Any] = {"image": [{"bytes": encoded(i), "path": None} for i in range(3)], "text": ["r", "g", "b"]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(table, features=features).save_to_disk(str(tmp_path / "set"))
    assert seen(ImageCollection(tmp_path / "set", 8).load(0).batch(0, 3, 0, 1)) == {
        ("r", 0): 1,
        ("g", 1): 1,
        ("b", 2): 1,
    }
    with pytest.raises(ConfigError, match="has no class; add one of the columns label"):
        ImageCollection(tmp_path / "set", 8, caption_source="class_name").load(0).batch(0, 1, 0, 1)


def many(path: Path, count: int = 12) -> Path:
    for number in range(count):
        textured(24 + number, 20).save(saved(path / f"{number:02d}.png", 0))
    return path


def loaded(path: Path, **settings: Any) -> ImageCollectionDataset:
    return ImageCollection(path, 8, **settings).load(3)


@pytest.mark.parametrize("crop", ["center", "random"])
def test_batches_do_not_depend_on_threads_ranks_or_resuming(tmp_path: Path, crop: Any) -> None:
    many(tmp_path)
    plain = loaded(tmp_path, num_workers=0, crop=crop, random_flip=True)
    batches = [plain.batch(step, 4, 0, 1).pixels for step in range(6)]
    threaded = loaded(tmp_path, num_workers=3, crop=crop, random_flip=True)
    assert all(torch.equal(threaded.batch(step, 4, 0, 1).pixels, batches[step]) for step in range(6))
    later = loaded(tmp_path, num_workers=3, crop=crop, random_flip=True)
    assert all(torch.equal(later.batch(step, 4, 0, 1).pixels, batches[step]) for step in (4, 5, 2))
    shares = [loaded(tmp_path, crop=crop, random_flip=True).batch(5, 4, rank, 2).pixels for rank in (0, 1)]
    assert torch.equal(torch.cat(shares), batches[5])


def test_epoch_visits_every_image_once_with_stable_ids(tmp_path: Path) -> None:
    data = loaded(many(tmp_path), random_flip=True)
    numbers = [data.batch(step, 4, 0, 1).image_ids for step in range(6)]
    first, second = (torch.cat([n for n in part if n is not None]) // 2 for part in (numbers[:3], numbers[3:]))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12)) and first.tolist() != second.tolist()
    known: dict[int, Tensor] = {}
    for step in range(12):
        batch = data.batch(step, 4, 0, 1)
        assert batch.image_ids is not None
        for number, pixels in zip(batch.image_ids.tolist(), batch.pixels, strict=True):
            assert torch.equal(known.setdefault(number, pixels), pixels)
    assert len(known) > 12
    assert loaded(tmp_path, crop="random").batch(0, 2, 0, 1).image_ids is None


def test_broken_images_are_skipped_up_to_max_skipped(tmp_path: Path) -> None:
    many(tmp_path)
    whole = (tmp_path / "03.png").read_bytes()
    (tmp_path / "03.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "07.png").write_bytes(b"no picture")
    data = loaded(tmp_path, max_skipped=2, num_workers=4)
    with pytest.warns(UserWarning, match=r"0[37].png is skipped \(.*cannot be read as an image") as warned:
        batch = data.batch(0, 12, 0, 1)
    assert len(warned) == 2 and batch.image_ids is not None and {*batch.image_ids.tolist()} == {*range(12)} - {3, 7}
    with pytest.raises(ConfigError, match=r"0[37].png cannot be used .* set data.max_skipped above 0.*TM191"):
        loaded(tmp_path, max_skipped=0, num_workers=4).batch(0, 12, 0, 1)


def test_validation_split_is_disjoint_and_center_cropped(tmp_path: Path) -> None:
    learned, held = split_dataset(loaded(many(tmp_path), crop="random", random_flip=True), 0.25, 5)
    assert len(learned) == 9 and len(held) == 3
    kept = held.batch(0, 3, 0, 1)
    plain = loaded(tmp_path)
    numbers = {*kept.image_ids.tolist()}
    cuts = torch.stack([decode_square(plain.source.encoded(n), "", 8) for n in kept.image_ids.tolist()])
    assert torch.equal(cuts.movedim(-1, 1) / 255, kept.pixels[:, 0])
    assert isinstance(learned, ImageCollectionDataset) and not numbers & {*learned.indices.tolist()}
    assert numbers | {*learned.indices.tolist()} == {*range(12)}


@pytest.mark.parametrize("shape", [(64, 40), (40, 64), (37, 23), (17, 50)])
def test_decode_square_equals_full_decode_and_crop(tmp_path: Path, shape: tuple[int, int]) -> None:
    textured(*shape).save(tmp_path / "a.png")
    pixels, chance = read_image(tmp_path / "a.png")[0], [0.3, 0.9, 0.6]
    for decoded, expected in (
        (decode_square(tmp_path / "a.png", "a", 16), center_crop(pixels, 16)),
        (decode_square(tmp_path / "a.png", "a", 16, chance), random_crop(pixels, 16, torch.tensor(chance))),
    ):
        assert torch.equal(decoded.movedim(-1, 0) / 255, expected)


def test_jpeg_draft_decode_is_close_to_full_decode(tmp_path: Path) -> None:
    textured(512, 400).save(tmp_path / "a.jpg", quality=95)
    decoded = decode_square(tmp_path / "a.jpg", "a", 64).movedim(-1, 0) / 255
    expected = center_crop(read_image(tmp_path / "a.jpg")[0], 64)
    assert (
        float((decoded - expected).abs().mean()) < 2 / 255
    )  # libjpeg drops high frequencies, the reference averages blocks


def test_decode_square_handles_image_modes_and_orientation(tmp_path: Path) -> None:
    grey = Image.fromarray(np.full((9, 9), 128, np.uint8))
    grey.save(tmp_path / "grey.jpg")
    Image.fromarray(np.full((9, 9), 128 * 257, np.uint16)).save(tmp_path / "deep.png")
    for name in ("grey.jpg", "deep.png"):
        assert (decode_square(tmp_path / name, name, 8) == 128).all()
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (decode_square(tmp_path / "clear.png", "clear", 8) == 255).all()
    turned = Image.Exif()
    turned[0x0112] = 6
    flat = textured(16, 16)
    flat.save(tmp_path / "turned.png", exif=turned)
    assert torch.equal(decode_square(tmp_path / "turned.png", "", 16), torch.from_numpy(np.array(flat)).rot90(-1))
    coloured = decode_square(tmp_path / "turned.png", "", 16, grayscale=True)
    assert (coloured == coloured[..., :1]).all()
    with pytest.raises(ImageError, match=r"TM172"):
        decode_square(b"GIF89a", "that", 8)


def test_center_crops_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(12):
        textured(20, 24 + i).save(tmp_path / f"{i:02}.png")
    plain, mirrored, random = (
        ImageCollection(tmp_path, 16, **more).load(1)  # type: ignore[arg-type]
        for more in ({}, {"random_flip": True}, {"crop": "random"})
    )
    before = [(rows, [rows.batch(step, 6, 0, 1) for step in range(4)]) for rows in (plain, mirrored)]
    random.batch(0, 12, 0, 1)
    assert (len(plain.cache), len(mirrored.cache), len(random.cache)) == (12, 12, 0)
    for rows, batches in before:
        fresh = ImageCollection(tmp_path, 16, random_flip=rows.spec.random_flip, num_workers=0).load(1)
        monkeypatch.setattr("tastemaker.data.images.MAX_CACHED_BYTES", 0)
        for step, batch in enumerate(batches):
            assert fresh.batch(step, 6, 0, 1).pixels.equal(batch.pixels)
        assert not fresh.cache
    for file in tmp_path.iterdir():
        file.unlink()
    assert plain.batch(7, 6, 0, 1).pixels.shape == (6, 1, 3, 16, 16)
