"""Scoring, listing and serving as a person types them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.cli import EXIT_FAILURE, EXIT_USAGE, main
from tastemaker.config.catalog import component_rows
from tastemaker.config.registries import REWARDS
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image
from tastemaker.rewards.color import ColorReward
from tastemaker.rewards.folder_scorer import batch_by_size, find_images_with_prompts
from tastemaker.rewards.remote import RemoteReward

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def told(capsys: Any) -> str:
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return re.sub(r"\s+", " ", found.err + found.out)


def paint(name: str, value: float = 0.5, side: int = 8, frames: int = 1) -> None:
    save_image(torch.full((frames, 3, side, side), value), Path(name))


def lines(path: str = "made/scores.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_pictures_of_all_sizes_are_scored_in_their_order_with_prompts_from_their_names(capsys: Any) -> None:
    for i, side in enumerate([8, 16, 8, 16, 8]):
        paint(f"made/{i}-a_red-bird.png", i / 10, side)
    paint("made/5-clip.mp4", 0.2, 16, frames=3)
    assert run("score", "made", "--reward", "brightness", "--reward", "{type: jpeg, quality: 80}", "--batch", "2") == 0
    found = lines()
    assert [Path(row["file"]).name[0] for row in found] == list("012345")
    assert found[0]["prompt"] == "0 a red bird"
    assert [row["brightness"] for row in found[:5]] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4], abs=0.003)
    assert all(row["jpeg"] < 0 for row in found)
    assert "6 images scored" in (said := told(capsys)) and "brightness │ 6" in said


def test_batches_are_of_one_size_and_few_pictures_wait() -> None:
    for i in range(40):
        paint(f"made/{i:02d}.png", side=4 + i % 20)
    sizes = [
        [picture.pixels.shape[-1] for picture in batch if picture.pixels is not None]
        for batch in batch_by_size(find_images_with_prompts(Path("made"), None), 4)
        if isinstance(batch, list)
    ]
    assert sum(map(len, sizes)) == 40
    assert all(len(set(batch)) == 1 and len(batch) <= 4 for batch in sizes)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_prompts_and_metadata_come_from_a_file(suffix: str) -> None:
    paint("made/one.png")
    paint("made/deep/two.png")
    paint("made/unnamed.png")
    rows = [{"file": "one.png", "prompt": "a red", "text": "x"}, {"file": "deep/two.png", "prompt": "a blue, twice"}]
    with Path(f"said.{suffix}").open("w", newline="") as file:
        if suffix == "jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, ["file", "prompt", "text"], restval="")
            writer.writeheader()
            writer.writerows(rows)
    assert run("score", "made", "--reward", "color", "--prompts", f"said.{suffix}", "--out", "deep/out.jsonl") == 0
    assert [row["prompt"] for row in lines("deep/out.jsonl")] == ["a red", "a blue, twice"]
    assert run("score", "made/one.png", "--reward", "color", "--prompts", f"said.{suffix}", "--out", "one.jsonl") == 0
    assert len(lines("one.jsonl")) == 1


def test_columns_may_have_the_names_that_other_tools_write() -> None:
    paint("made/one.png")
    Path("made/metadata.jsonl").write_text('{"file_name": "one.png", "text": "a red"}\n')
    assert run("score", "made", "--reward", "color") == 0
    assert [row["prompt"] for row in lines()] == ["a red"]


def test_what_is_broken_is_told_and_the_rest_is_scored(capsys: Any) -> None:
    for name in ("a_red", "no_colour", "z_blue"):
        paint(f"made/{name}.png")
    Path("made/m_broken.png").write_bytes(Path("made/a_red.png").read_bytes()[:50])
    assert run("score", "made", "--reward", "color", "--reward", "brightness") == EXIT_FAILURE
    found = {Path(row["file"]).stem: row for row in lines()}
    assert {name for name, row in found.items() if "error" in row} == {"no_colour", "m_broken"}
    assert found["a_red"]["color"] == found["z_blue"]["color"] > 0.5
    assert found["no_colour"]["brightness"] == pytest.approx(0.5, abs=0.01) and "color" not in found["no_colour"]
    assert "names no color" in found["no_colour"]["error"]
    said = told(capsys)
    assert "skipped: made/m_broken.png cannot be read as an image" in said
    assert "2 of 4 images could not be scored" in said and "2 images scored" in said


def test_a_row_whose_picture_is_missing_is_told(capsys: Any) -> None:
    paint("made/one.png")
    Path("said.jsonl").write_text('{"file": "one.png", "prompt": "a"}\n{"file": "gone.png", "prompt": "b"}\n')
    assert run("score", "made", "--reward", "brightness", "--prompts", "said.jsonl") == EXIT_FAILURE
    assert "there is no image at made/gone.png" in told(capsys)
    assert len(lines()) == 2


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        ("", "said.jsonl", "the file is empty"),
        ("{}\n", "said.jsonl", "line 1: 'file' is missing"),
        ("file,prompt\na\n", "said.csv", "line 2: expected 2 columns"),
        ("x", "said.txt", "expected a .jsonl or .csv"),
        ('{"file": "other.png", "prompt": "a"}', "said.jsonl", "it has no row for made/one.png"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_a_sentence(
    content: str, name: str, sentence: str, capsys: Any
) -> None:
    paint("made/one.png")
    Path(name).write_text(content)
    assert run("score", "made/one.png", "--reward", "brightness", "--prompts", name) == EXIT_USAGE
    assert sentence in told(capsys)


def test_scores_that_cannot_be_written_say_where_to(capsys: Any) -> None:
    paint("made/one.png")
    Path("file").write_text("")
    assert run("score", "made", "--reward", "brightness", "--out", "file/scores.jsonl") == EXIT_USAGE
    assert "name another file with --out" in told(capsys)


def test_the_table_of_rewards_fits_a_hundred_columns_and_tells_what_matters(capsys: Any) -> None:
    assert run("list", "rewards") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    for name in REWARDS:
        assert re.search(rf"^ {name}\b", shown, re.MULTILINE), name
    kinds = ("gradient", "no gradient", "frames", "clip", "device", "host", "remote")
    for word in (*kinds, "memory", "range", "failure modes"):
        assert word in shown


def test_everything_is_listed_for_programs_too(capsys: Any) -> None:
    assert run("list", "rewards", "--json") == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == list(REWARDS)
    assert found["pickscore"]["aliases"] == ["pick_score"] and "pick_score" not in found
    assert found["brightness"]["differentiable"] is True and found["stillness"]["modality"] == "video"
    assert found["hps"]["sources"][0]["hub"] == "xswu/HPSv2"
    assert run("list", "models", "--json") == 0
    assert {"name", "description"} == set(json.loads(capsys.readouterr().out)[0])


@pytest.mark.parametrize("row", component_rows("rewards"), ids=lambda row: row["name"])
def test_every_reward_says_what_to_know_of_it(row: dict[str, Any]) -> None:
    for key in ("description", "range", "failure_modes", "memory"):
        assert row[key], key
    for source in row["sources"]:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["hub"])


def test_a_reward_is_served_from_the_command_line_until_it_is_interrupted() -> None:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "tastemaker", "serve-reward", "color", "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        address = re.search(r"http://127.0.0.1:\d+", line)
        assert address, line
        spec, pixels, names = RemoteReward(address[0]), torch.rand(3, 1, 3, 8, 8), ("red", "blue", "grey")
        remote = Rubric({"far": WeightedReward(spec, spec.load(Placement()))}).score(pixels, names).total
        local = WeightedReward(ColorReward(), ColorReward().load(Placement()))
        assert remote.equal(Rubric({"near": local}).score(pixels, names).total)
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert "stopped" in server.stderr.read()
    finally:
        server.kill()
        server.wait()
        if server.stderr is not None:
            server.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["color", "--host", "0.0.0.0"], "--host: other machines can reach 0.0.0.0, so a token is needed"),
        (["color", "--token", "UNSET_TOKEN"], "the environment variable UNSET_TOKEN holds no plain text"),
        (["colour"], "did you mean 'color'?"),
        (["color", "--host", "203.0.113.7", "--token", "SET_TOKEN"], "cannot serve at 203.0.113.7:8800"),
        (["{type: color"], "is not a name or a mapping"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    arguments: list[str], sentence: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_TOKEN", "hush")
    assert run("serve-reward", *arguments) == EXIT_USAGE
    assert sentence in told(capsys)
