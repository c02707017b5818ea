"""Videos written by `generate` and read by `score`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli

from tastemaker.cli import EXIT_FAILURE
from tastemaker.data.image_io import read_image, save_image


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def read_jsonl(file: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.mark.parametrize(("format", "suffix"), [("", "mp4"), ("gif", "gif"), ("frames", "frames"), ("png", "png")])
def test_videos_are_written_resumed_and_scored_in_every_format(format: str, suffix: str) -> None:
    options = ("--video-format", format, "--fps", "4") if format else ()
    for _ in range(2):  # the second run finds all files
        assert run_cli("generate", "grpo-toy-video", "-p", "a red", "-p", "a blue", "--out", "made", *options) == 0
    metadata = read_jsonl("made/metadata.jsonl")
    assert [str(row["file"]) for row in metadata] == [f"00000-a-red.{suffix}", f"00001-a-blue.{suffix}"]
    assert read_image(Path("made", str(metadata[0]["file"]))).shape[0] == 4
    assert Path("made/sheet.png").is_file()
    Path("made/sheet.png").unlink()
    assert run_cli("score", "made", "--reward", "stillness", "--reward", "color") == 0
    scores = read_jsonl("made/scores.jsonl")
    assert [row["prompt"] for row in scores] == ["a red", "a blue"]
    assert all(float(str(row["stillness"])) > 0 for row in scores)


def test_directory_of_mixed_videos_is_scored_and_broken_ones_reported(capsys: pytest.CaptureFixture[str]) -> None:
    clip = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    for name in ("a.mp4", "b.gif", "c.frames"):
        save_image(clip, Path("all", name))
    for number in range(4):
        save_image(clip[number][None], Path(f"all/d/{number}.png"))
        if number != 2:
            save_image(clip[number][None], Path(f"all/e/{number}.png"))
    Path("all/f.mp4").write_bytes(b"nothing")
    assert run_cli("score", "all", "--reward", "stillness", "--frame-folders", "--out", "found.jsonl") == EXIT_FAILURE
    scores = {Path(str(row["file"])).name: row for row in read_jsonl("found.jsonl")}
    assert list(scores) == ["a.mp4", "b.gif", "c.frames", "d", "e", "f.mp4"]
    assert all(
        abs(float(str(scores[name]["stillness"])) - 2 / 3) < 0.02 for name in ("a.mp4", "b.gif", "c.frames", "d")
    )
    assert "frame 2 is missing" in str(scores["e"]["error"]) and "cannot be read" in str(scores["f.mp4"]["error"])
    capsys.readouterr()
    assert run_cli("score", "all/c.frames", "--reward", "stillness") == 0
    assert Path("all/scores.jsonl").is_file()


def test_generate_counts_videos(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("generate", "grpo-toy-video", "-p", "a red", "--out", "made") == 0
    assert "1 video in made, for" in capsys.readouterr().err
    assert run_cli("generate", "grpo-toy-video", "-p", "a red", "-p", "a blue", "--out", "made") == 0
    assert "2 videos in made (1 existed before), for" in capsys.readouterr().err
    Path("made/sheet.png").unlink()
    assert run_cli("score", "made", "--reward", "stillness") == 0
    output = capsys.readouterr().err
    assert "2 videos scored" in output and "images" not in output
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--out", "still") == 0
    assert "1 image in still, for" in capsys.readouterr().err


def test_broken_single_file_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.mp4").write_bytes(b"nothing")
    assert run_cli("score", "a.mp4", "--reward", "stillness") == EXIT_FAILURE
    output = capsys.readouterr().err
    assert "error: a.mp4 " in output and output.count("cannot be read") == 1
    assert "scored" not in output and "cannot be read" in str(read_jsonl("scores.jsonl")[0]["error"])


def test_mov_files_are_scored() -> None:
    clip = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    for name in ("a.mp4", "b.mp4"):
        save_image(clip, Path("all", name))
    Path("all/b.mp4").rename("all/b.mov")  # the container format is the same
    assert run_cli("score", "all", "--reward", "stillness") == 0
    assert [Path(str(row["file"])).name for row in read_jsonl("all/scores.jsonl")] == ["a.mp4", "b.mov"]


def test_zero_fps_is_refused() -> None:
    assert run_cli("generate", "grpo-toy-video", "-p", "a red", "--fps", "0") != 0
    assert not Path("generated").exists()
