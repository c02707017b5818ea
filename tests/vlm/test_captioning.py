"""Captions of a folder: where training looks for them, gone on with, and never over those that are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tastemaker.cli import EXIT_USAGE, main
from tastemaker.data.image_io import save_image
from tastemaker.data.images import CaptionedFolder, ImageCollection
from tastemaker.vlm.captioning import CaptionOptions, caption_folder, find_images

# PaliGemma's processor itself asks numpy for what it will no longer do.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def model(folders: dict[str, Path]) -> Path:
    return folders["paligemma"]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for i in range(4):
        pixels = torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(i))
        save_image(pixels, tmp_path / "shelf" / f"a_{i}.png")
    return tmp_path / "shelf"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def settings(model: Path) -> list[str]:
    return ["--model", str(model), "--max-tokens", "6", "--device", "cpu", "--precision", "fp32", "--batch-size", "3"]


def captions(shelf: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(shelf.glob("*.txt"))}


def test_captions_stand_where_training_looks_for_them(model: Path, shelf: Path) -> None:
    assert run("caption", str(shelf), *settings(model)) == 0
    record = [json.loads(line) for line in (shelf / "captions.jsonl").read_text().splitlines()]
    assert len(record) == 4 and {row["question"] for row in record} == {"caption en"}
    data = CaptionedFolder(shelf).load(0)
    said = {Path(row["file"]): " ".join(row["answer"].split()) for row in record}
    assert dict(zip(data.files, data.prompts, strict=True)) == said


@pytest.mark.parametrize("form", ["jsonl", "both"])
def test_a_list_is_read_as_the_texts_are(form: str, model: Path, shelf: Path) -> None:
    assert run("caption", str(shelf), *settings(model), "--format", form) == 0
    listed = CaptionedFolder(shelf).load(0)
    assert len(captions(shelf)) == (4 if form == "both" else 0)
    (shelf / "metadata.jsonl").unlink()
    assert run("caption", str(shelf), *settings(model)) == 0
    assert CaptionedFolder(shelf).load(0).prompts == listed.prompts


def test_captions_that_are_there_stay_and_others_are_added(
    model: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shelf / "a_1.txt").write_text("a cat by hand\n")
    assert run("caption", str(shelf), *settings(model)) == 0
    assert "1 of 4 images have captions" in " ".join(capsys.readouterr().err.split())
    first = captions(shelf)
    assert len(first) == 4 and first["a_1.txt"] == "a cat by hand\n"
    (shelf / "a_2.txt").unlink()  # the record knows it still
    assert run("caption", str(shelf), *settings(model)) == 0
    assert captions(shelf) == first
    assert len((shelf / "captions.jsonl").read_text().splitlines()) == 3
    assert run("caption", str(shelf), *settings(model), "--overwrite") == 0
    assert captions(shelf)["a_1.txt"] != "a cat by hand\n"


def test_what_a_list_knows_beside_the_prompt_stays(model: Path, shelf: Path) -> None:
    row = {"file_name": "a_0.png", "prompt": "by hand", "license": "mine"}
    (shelf / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    assert run("caption", str(shelf), *settings(model), "--format", "jsonl") == 0
    rows = [json.loads(line) for line in (shelf / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0] == row | {"file": "a_0.png"}


def test_another_prompt_is_asked_as_given(model: Path, shelf: Path, tmp_path: Path) -> None:
    more = ["--prompt", "What is {prompt}?", "--out", str(tmp_path / "record.jsonl")]
    assert run("caption", str(shelf), *settings(model), *more) == 0
    asked = {json.loads(line)["question"] for line in (tmp_path / "record.jsonl").read_text().splitlines()}
    assert asked == {f"What is a {i}?" for i in range(4)}


def test_a_broken_picture_costs_the_others_nothing(model: Path, shelf: Path) -> None:
    (shelf / "a_9.png").write_bytes(b"no picture")
    assert run("caption", str(shelf), *settings(model)) == EXIT_USAGE
    assert len(captions(shelf)) == 4


def test_an_interruption_leaves_the_captions_so_far_and_the_rest_is_asked_later(shelf: Path) -> None:
    class Tired:
        """Answers three pictures; asked about a fourth, it is interrupted."""

        caption_prompt, asked = "caption en", 0

        def answer(self, pixels: Tensor, questions: Sequence[str], *others: object) -> list[str]:
            if self.asked == 3:
                self.asked = 0
                raise KeyboardInterrupt
            self.asked += len(questions)
            return ["a grey square"] * len(questions)

    model, wish = Tired(), CaptionOptions(shelf, "somebody", batch_size=3)
    with pytest.raises(KeyboardInterrupt):
        caption_folder(model, wish, find_images(wish), Console(quiet=True))
    assert captions(shelf) == {f"a_{i}.txt": "a grey square\n" for i in range(3)}
    assert caption_folder(model, wish, find_images(wish), Console(quiet=True)) == 1
    assert model.asked == 1 and len(captions(shelf)) == 4


def test_mistakes_are_told_in_a_sentence(model: Path, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(*arguments: str) -> str:
        assert run("caption", *arguments) == EXIT_USAGE
        return " ".join(capsys.readouterr().err.split())

    assert "is no folder" in complaint(str(shelf / "a_0.png"), *settings(model))
    (shelf / "empty").mkdir()
    assert "no images found" in complaint(str(shelf / "empty"), *settings(model))
    (shelf / "metadata.jsonl").write_text('{"file_name": "a_0.png", "prompt": "x"}\n')
    assert "metadata.jsonl exists" in complaint(str(shelf), *settings(model))
    (shelf / "metadata.jsonl").write_text('{"prompt": "x"}\n')
    assert "no 'file_name'" in complaint(str(shelf), *settings(model), "--format", "jsonl")


@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_captions_of_folders_within_the_folder_are_learned_from_too(form: str, model: Path, shelf: Path) -> None:
    save_image(torch.rand(1, 3, 20, 20), shelf / "more" / "b.png")
    assert run("caption", str(shelf), *settings(model), "--format", form) == 0
    record = [json.loads(line) for line in (shelf / "captions.jsonl").read_text().splitlines()]
    batch = ImageCollection(shelf, image_size=8, num_workers=0).load(0).batch(0, 5, 0, 1)
    assert sorted(batch.prompts) == sorted(" ".join(row["answer"].split()) for row in record)
