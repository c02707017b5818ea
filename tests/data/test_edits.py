"""Edits from files, folders and saved data sets: sources, target and mask become metadata of the prompt."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import ImageBatch, Metadata, PromptBatch
from tastemaker.data.edits import EditFile
from tastemaker.data.image_io import read_image, save_image
from tastemaker.models.image_backbone import read_condition_image
from tastemaker.rewards.reference_images import reference_images

RED, GREEN, BLUE = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
PARTS = {"source": RED, "source_2": GREEN, "target": BLUE, "mask": (1.0, 1.0, 1.0)}


def write(path: Path, color: tuple[float, float, float], frames: int = 1) -> Path:
    pixels = torch.tensor(color).view(1, 3, 1, 1).expand(frames, 3, 8, 12).clone()
    pixels[1:] = 0.5  # only the first frame of a video has the color
    save_image(pixels, path)
    return path


def mean_color(pixels: Tensor) -> tuple[float, ...]:
    return tuple(round(x, 2) for x in pixels.mean((-1, -2)).flatten()[:3].tolist())


def subfolders(root: Path) -> Path:
    for name in ("0001", "0002"):
        (root / name).mkdir(parents=True)
        (root / name / "prompt.txt").write_text("make it\nblue\n")
        for part, color in PARTS.items():
            write(root / name / f"{part}.png", color)
        (root / name / "notes.md").write_text("not an image")
    return root


def flat(root: Path) -> Path:
    root.mkdir()
    for name in ("a", "b_c"):
        (root / f"{name}.txt").write_text("make it blue")
        for part, color in PARTS.items():
            write(root / f"{name}_{part}.png", color)
    return root


def json_lines(root: Path) -> Path:
    root.mkdir()
    for part, color in PARTS.items():
        write(root / f"{part}.png", color)
    rows: list[dict[str, Any]] = [
        {"prompt": "make it blue", "image": ["source.png", "source_2.png"], "id": 7},
        {"prompt": "make it blue", "image": "source.png", "image_2": "source_2.png", "id": 7},
    ]
    others = {"target": "target.png", "mask": "mask.png"}
    (root / "edits.jsonl").write_text("\n".join(json.dumps({**row, **others}) for row in rows))
    return root / "edits.jsonl"


def check_contract(metadata: Metadata, size: tuple[int, int] = (8, 12)) -> None:
    """What models and rewards read from the metadata of 'make it blue', which has two sources."""
    sources = reference_images("image", ["make it blue"], [metadata])[0]
    assert [mean_color(source) for source in sources] == [RED, GREEN]
    assert sources[0].shape[-2:] == size
    first = read_condition_image(metadata["image"][0], 4, 4)
    assert first is not None and mean_color(first) == RED
    for key, color in (("target", BLUE), ("mask", (1.0, 1.0, 1.0))):
        assert mean_color(reference_images(key, [""], [metadata])[0][0]) == color


def test_folders_and_json_lines_yield_the_same_metadata(tmp_path: Path) -> None:
    layouts = {
        "subfolders": subfolders(tmp_path / "s"),
        "flat": flat(tmp_path / "f"),
        "jsonl": json_lines(tmp_path / "j"),
    }
    for name, path in layouts.items():
        data = EditFile(path).load(0)
        batch = data.batch(0, 2, 0, 1)
        assert isinstance(batch, PromptBatch) and batch.prompts == ("make it blue",) * 2, name
        assert len(data) == 2 and data.first_prompts(3).prompts == ("make it blue",) * 3
        for metadata in batch.metadata:
            check_contract(metadata)
        assert [entry.get("id") for entry in batch.metadata] == [7 if name == "jsonl" else None] * 2
        targets = EditFile(path, supervised=True, height=4, width=4).load(0).batch(0, 2, 0, 1)
        assert isinstance(targets, ImageBatch) and targets.pixels.shape == (2, 1, 3, 4, 4)
        assert mean_color(targets.pixels[1]) == BLUE and targets.metadata == batch.metadata


def test_first_frame_of_a_video_target_is_the_source(tmp_path: Path) -> None:
    write(tmp_path / "clip_target.gif", RED, frames=2)
    write(tmp_path / "still.png", GREEN)
    for name in ("clip", "still"):
        (tmp_path / f"{name}.txt").write_text("it moves")
    clip, still = EditFile(tmp_path).load(0).first_prompts(2).metadata
    frames = [read_condition_image(entry["image"], 8, 12) for entry in (clip, still)]
    assert [mean_color(frame) for frame in frames if frame is not None] == [RED, GREEN]
    assert len(read_image(Path(clip["target"]))) == 2 and "target" not in still


def test_mistakes_name_the_file_and_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "a.png", RED)
    rows = {
        "no source": ({"prompt": "x"}, "TM223"),
        "no prompt": ({"image": "a.png"}, "TM2355"),
        "no file": ({"prompt": "x", "image": "b.png"}, "TM234"),
        "no path": ({"prompt": "x", "image": 3}, "TM2358"),
        "two targets": ({"prompt": "x", "image": "a.png", "target": ["a.png", "a.png"]}, "TM2357"),
    }
    for name, (row, code) in rows.items():
        (tmp_path / "edits.jsonl").write_text(json.dumps(row))
        with pytest.raises(ConfigError) as caught:
            EditFile(tmp_path / "edits.jsonl").load(0)
        assert "edits.jsonl" in str(caught.value) and f"[{code}]" in str(caught.value), name
    (tmp_path / "edits.jsonl").write_text(json.dumps({"prompt": "x", "image": "a.png"}))
    with pytest.raises(ConfigError, match="TM2353"):
        EditFile(tmp_path / "edits.jsonl", supervised=True).load(0).batch(0, 1, 0, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="TM2359"):
        EditFile(tmp_path / "empty").load(0)
    with pytest.raises(ValueError, match="TM2354"):
        EditFile(tmp_path, height=64)


@pytest.mark.slow
def test_saved_datasets_hold_images_or_paths_in_columns_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def encode(color: tuple[float, float, float]) -> dict[str, Any]:
        buffer = io.BytesIO()
        Image.new("RGB", (12, 8), tuple(round(255 * x) for x in color)).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    images = {name: [encode(color)] * 2 for name, color in PARTS.items()}
    columns = {"instruction": ["make it blue"] * 2, "turn": [1, 2]}
    columns |= {
        "source_img": images["source"],
        "source_img_2": images["source_2"],
        "target_img": images["target"],
        "mask_img": images["mask"],
    }
    features = {name: datasets.Image() for name in columns if "_img" in name}
    features |= {"instruction": datasets.Value("string"), "turn": datasets.Value("int64")}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(tmp_path / "known")
    paths = {name: str(write(tmp_path / f"{name}.png", color)) for name, color in PARTS.items()}
    listed = {"words": ["make it blue"], "pictures": [[paths["source"], paths["source_2"]]]}
    listed |= {"after": [paths["target"]], "where": [paths["mask"]]}
    datasets.Dataset.from_dict(listed).save_to_disk(tmp_path / "own")
    own = EditFile(
        tmp_path / "own",
        prompt_column="words",
        image_columns=("pictures",),
        target_column="after",
        mask_column="where",
    )
    for spec in (EditFile(tmp_path / "known"), own):
        for metadata in spec.load(0).first_prompts(2).metadata:
            check_contract(metadata)
    assert EditFile(tmp_path / "known").load(0).first_prompts(2).metadata[1]["turn"] == 2
    with pytest.raises(ConfigError, match="TM2355"):
        EditFile(tmp_path / "known", mask_column="where").load(0)
