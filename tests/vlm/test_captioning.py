"""`caption` on a directory: output formats, resuming, existing captions and errors."""

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

# PaliGemma's processor calls a deprecated numpy interface.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def model(folders: dict[str, Path]) -> Path:
    return folders["paligemma"]


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    for i in range(4):
        pixels = torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(i))
        save_image(pixels, tmp_path / "images" / f"a_{i}.png")
    return tmp_path / "images"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


def model_options(model: Path) -> list[str]:
    return ["--model", str(model), "--max-tokens", "6", "--device", "cpu", "--precision", "fp32", "--batch-size", "3"]


def captions(image_folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(image_folder.glob("*.txt"))}


def test_captions_are_written_where_training_reads_them(model: Path, image_folder: Path) -> None:
    assert run("caption", str(image_folder), *model_options(model)) == 0
    record = [json.loads(line) for line in (image_folder / "captions.jsonl").read_text().splitlines()]
    assert len(record) == 4 and {row["question"] for row in record} == {"caption en"}
    data = CaptionedFolder(image_folder).load(0)
    answers = {Path(row["file"]): " ".join(row["answer"].split()) for row in record}
    assert dict(zip(data.files, data.prompts, strict=True)) == answers


@pytest.mark.parametrize("output_format", ["jsonl", "both"])
def test_metadata_jsonl_gives_the_same_prompts_as_text_files(
    output_format: str, model: Path, image_folder: Path
) -> None:
    assert run("caption", str(image_folder), *model_options(model), "--format", output_format) == 0
    listed = CaptionedFolder(image_folder).load(0)
    assert len(captions(image_folder)) == (4 if output_format == "both" else 0)
    (image_folder / "metadata.jsonl").unlink()
    assert run("caption", str(image_folder), *model_options(model)) == 0
    assert CaptionedFolder(image_folder).load(0).prompts == listed.prompts


def test_existing_captions_are_kept_unless_overwritten(
    model: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (image_folder / "a_1.txt").write_text("a cat by hand\n")
    assert run("caption", str(image_folder), *model_options(model)) == 0
    assert "1 of 4" in " ".join(capsys.readouterr().err.split())
    first = captions(image_folder)
    assert len(first) == 4 and first["a_1.txt"] == "a cat by hand\n"
    (image_folder / "a_2.txt").unlink()  # still in captions.jsonl
    assert run("caption", str(image_folder), *model_options(model)) == 0
    assert captions(image_folder) == first
    assert len((image_folder / "captions.jsonl").read_text().splitlines()) == 3
    assert run("caption", str(image_folder), *model_options(model), "--overwrite") == 0
    assert captions(image_folder)["a_1.txt"] != "a cat by hand\n"


def test_other_keys_of_metadata_jsonl_are_kept(model: Path, image_folder: Path) -> None:
    row = {"file_name": "a_0.png", "prompt": "by hand", "license": "mine"}
    (image_folder / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    assert run("caption", str(image_folder), *model_options(model), "--format", "jsonl") == 0
    rows = [json.loads(line) for line in (image_folder / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0] == row | {"file": "a_0.png"}


def test_custom_prompt_is_filled_and_recorded(model: Path, image_folder: Path, tmp_path: Path) -> None:
    options = ["--prompt", "What is {prompt}?", "--out", str(tmp_path / "record.jsonl")]
    assert run("caption", str(image_folder), *model_options(model), *options) == 0
    questions = {json.loads(line)["question"] for line in (tmp_path / "record.jsonl").read_text().splitlines()}
    assert questions == {f"What is a {i}?" for i in range(4)}


def test_unreadable_image_does_not_stop_the_others(model: Path, image_folder: Path) -> None:
    (image_folder / "a_9.png").write_bytes(b"not an image")
    assert run("caption", str(image_folder), *model_options(model)) == EXIT_USAGE
    assert len(captions(image_folder)) == 4


def test_interrupted_captioning_keeps_its_captions_and_resumes(image_folder: Path) -> None:
    class InterruptedModel:
        """Answers for three images; raises KeyboardInterrupt at the fourth."""

        caption_prompt, num_answers = "caption en", 0

        def answer(self, pixels: Tensor, questions: Sequence[str], *others: object) -> list[str]:
            if self.num_answers == 3:
                self.num_answers = 0
                raise KeyboardInterrupt
            self.num_answers += len(questions)
            return ["a grey square"] * len(questions)

    model, options = InterruptedModel(), CaptionOptions(image_folder, "somebody", batch_size=3)
    with pytest.raises(KeyboardInterrupt):
        caption_folder(model, options, find_images(options), Console(quiet=True))
    assert captions(image_folder) == {f"a_{i}.txt": "a grey square\n" for i in range(3)}
    assert caption_folder(model, options, find_images(options), Console(quiet=True)) == 1
    assert model.num_answers == 1 and len(captions(image_folder)) == 4


def test_invalid_arguments_are_refused(model: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*arguments: str) -> str:
        assert run("caption", *arguments) == EXIT_USAGE
        return " ".join(capsys.readouterr().err.split())

    assert "a_0.png" in error_of(str(image_folder / "a_0.png"), *model_options(model))
    (image_folder / "empty").mkdir()
    assert "no images" in error_of(str(image_folder / "empty"), *model_options(model))
    (image_folder / "metadata.jsonl").write_text('{"file_name": "a_0.png", "prompt": "x"}\n')
    assert "metadata.jsonl" in error_of(str(image_folder), *model_options(model))
    (image_folder / "metadata.jsonl").write_text('{"prompt": "x"}\n')
    assert "'file_name'" in error_of(str(image_folder), *model_options(model), "--format", "jsonl")


@pytest.mark.parametrize("output_format", ["txt", "jsonl"])
def test_captions_of_subdirectories_are_read_by_training(output_format: str, model: Path, image_folder: Path) -> None:
    save_image(torch.rand(1, 3, 20, 20), image_folder / "more" / "b.png")
    assert run("caption", str(image_folder), *model_options(model), "--format", output_format) == 0
    record = [json.loads(line) for line in (image_folder / "captions.jsonl").read_text().splitlines()]
    batch = ImageCollection(image_folder, image_size=8, num_workers=0).load(0).batch(0, 5, 0, 1)
    assert sorted(batch.prompts) == sorted(" ".join(row["answer"].split()) for row in record)
