"""Prompts with images: every layout is read, and the images of a step share the size of one bucket."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.data.dataset import epoch_permutation
from tastemaker.data.image_io import image_size, resize_lanczos, save_image
from tastemaker.data.prompt_images import (
    BUCKET_STEP,
    MAX_SIDE,
    PromptsWithImages,
    default_buckets,
    nearest_bucket,
    schedule_bucket,
)

SIZES = {"wide": (90, 160), "tall": (160, 90), "square": (100, 100), "third": (104, 96)}
SMALL = ((64, 112), (112, 64), (96, 96))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (name, size) in enumerate(SIZES.items()):
        save_image(torch.full((1, 3, *size), number / 4), tmp_path / f"{name}.png")
    rows = [{"prompt": f"a {name}", "image": f"{name}.png", "label": name} for name in SIZES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_default_buckets_match_srpo() -> None:
    buckets = default_buckets()
    assert len(set(buckets)) == len(buckets)
    assert all(side % BUCKET_STEP == 0 and BUCKET_STEP <= side <= MAX_SIDE for size in buckets for side in size)
    assert {(1024, 1024), (576, 1024), (1024, 576), (768, 1024), (1024, 768)} <= set(buckets)
    assert {(high, wide) for wide, high in buckets} == set(buckets)


@pytest.mark.parametrize(
    ("size", "bucket"),
    [((1080, 1920), (576, 1024)), ((1920, 1080), (1024, 576)), ((512, 512), (512, 512)), ((700, 1050), (704, 1024))],
)
def test_nearest_bucket_keeps_aspect_ratio_then_area(size: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert nearest_bucket(*size, default_buckets()) == bucket


def test_bucket_of_a_different_area_is_a_last_resort() -> None:
    assert nearest_bucket(100, 100, ((1024, 1024), (128, 192))) == (128, 192)
    assert nearest_bucket(100, 100, ((1024, 1024),)) == (1024, 1024)


def test_steps_have_one_bucket_and_epochs_all_samples() -> None:
    counts, size = (5, 8, 1), 4
    steps = [schedule_bucket(counts, 7, step, size) for step in range(10)]
    first, second = steps[:5], steps[5:]
    for epoch in (first, second):
        seen = {(bucket, row) for bucket, rows in epoch for row in rows}
        assert seen == {(bucket, row) for bucket, count in enumerate(counts) for row in range(count)}
        assert all(len(rows) == size for _, rows in epoch)
    assert first != second


def test_batches_of_a_bucket_follow_its_permutation() -> None:
    counts, size = (5, 7, 9), 4  # two, two and three batches; the last one of a bucket is filled up from its start
    for epoch in range(3):
        steps = [schedule_bucket(counts, 7, 7 * epoch + step, size) for step in range(7)]
        for bucket, count in enumerate(counts):
            order = epoch_permutation(count, 7, epoch).tolist()
            expected = [(order + order)[first : first + size] for first in range(0, count, size)]
            assert sorted(rows for chosen, rows in steps if chosen == bucket) == sorted(expected)


def test_bucketed_batches_have_one_size_on_all_ranks(folder: Path) -> None:
    data = PromptsWithImages(folder / "rows.jsonl", SMALL).load(0)
    seen: set[str] = set()
    for step in range(3):
        whole = data.batch(step, 2, 0, 1)
        assert whole.images is not None and tuple(whole.images.shape[3:]) in SMALL
        seen |= set(whole.prompts)
        halves = [data.batch(step, 2, rank, 2) for rank in (0, 1)]
        assert whole.prompts == halves[0].prompts + halves[1].prompts
        assert whole.images.equal(torch.cat([half.images for half in halves if half.images is not None]))
        for prompt, picture, metadata in zip(whole.prompts, whole.images, whole.metadata, strict=True):
            name = prompt.removeprefix("a ")
            assert metadata == {"label": name}
            assert picture.mean().item() == pytest.approx(list(SIZES).index(name) / 4, abs=3e-3)
    assert seen == {f"a {name}" for name in SIZES}
    assert data.first_prompts(2).images is None and data.first_prompts(5).prompts[4] == "a wide"


def test_all_layouts_give_the_same_entries(folder: Path) -> None:
    captions = {f"a {name}": f"{name}.png" for name in SIZES}
    (folder / "dict.json").write_text(json.dumps(captions))
    (folder / "dict.pkl").write_bytes(pickle.dumps(captions))
    rows = [{"caption": caption, "file_name": file} for caption, file in captions.items()]
    (folder / "other.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = PromptsWithImages(folder / "rows.jsonl").load(0)
    for name in ("dict.json", "dict.pkl", "other.jsonl"):
        dataset = PromptsWithImages(folder / name).load(0)
        assert [(e.prompt, e.file) for e in dataset.entries] == [(e.prompt, e.file) for e in expected.entries]


class MaliciousPickle:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("sprung",)


def test_pickles_with_code_and_empty_files_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trap.pkl").write_bytes(pickle.dumps({"a": MaliciousPickle()}))
    with pytest.raises(ConfigError, match=r"which could run code.*TM215"):
        PromptsWithImages(folder / "trap.pkl").load(0)
    assert capsys.readouterr().out == ""
    for name, content in (("a.json", "[]"), ("b.json", '{"a": 1}'), ("c.json", "{"), ("d.pkl", "x")):
        (folder / name).write_text(content)
        with pytest.raises(ConfigError, match=name):
            PromptsWithImages(folder / name).load(0)
    (folder / "gone.json").write_text('{"a": "gone.png"}')
    with pytest.raises(ConfigError, match=r"the file .*gone\.png.*TM234"):
        PromptsWithImages(folder / "gone.json").load(0)
    (folder / "rows.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(ConfigError, match=r"line 1: 'image' is missing.*TM232"):
        PromptsWithImages(folder / "rows.jsonl").load(0)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TM212"):
        PromptsWithImages(Path("x.txt"))
    with pytest.raises(ValueError, match=r"expected multiples of 16.*TM213"):
        PromptsWithImages(Path("x.json"), ((100, 64),))


def test_image_size_and_lanczos_resize(folder: Path) -> None:
    assert image_size(folder / "wide.png") == SIZES["wide"]
    x = torch.rand(1, 3, 32, 48)
    assert resize_lanczos(x, 32, 48) is x
    assert resize_lanczos(x, 16, 64).shape == (1, 3, 16, 64)
    assert resize_lanczos(torch.full((1, 3, 8, 8), 0.2), 16, 4).sub(0.2).abs().max() < 1e-2
