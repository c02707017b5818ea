"""`tastemaker score`, `list` and `serve-reward`."""

from __future__ import annotations

import csv
import io
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
from cli_runner import run_cli
from rich.console import Console

from tastemaker.cli import EXIT_FAILURE, EXIT_USAGE
from tastemaker.cli.components import reward_table
from tastemaker.config.catalog import component_rows
from tastemaker.config.registries import MODELS, REWARDS
from tastemaker.config.static_source import StaticClass
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image
from tastemaker.rewards.color import ColorReward
from tastemaker.rewards.folder_scorer import batch_by_size, find_images_with_prompts
from tastemaker.rewards.remote import RemoteReward

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def read_output(capsys: Any) -> str:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return re.sub(r"\s+", " ", captured.err + captured.out)


def save_gray_image(name: str, value: float = 0.5, side: int = 8, frames: int = 1) -> None:
    save_image(torch.full((frames, 3, side, side), value), Path(name))


def lines(path: str = "made/scores.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_images_of_all_sizes_are_scored_in_order(capsys: Any) -> None:
    for i, side in enumerate([8, 16, 8, 16, 8]):
        save_gray_image(f"made/{i}-a_red-bird.png", i / 10, side)
    save_gray_image("made/5-clip.mp4", 0.2, 16, frames=3)
    rewards = ("--reward", "brightness", "--reward", "{type: jpeg, quality: 80}")
    assert run_cli("score", "made", *rewards, "--batch-size", "2") == 0
    rows = lines()
    assert [Path(row["file"]).name[0] for row in rows] == list("012345")
    assert rows[0]["prompt"] == "0 a red bird"
    assert [row["brightness"] for row in rows[:5]] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4], abs=0.003)
    assert all(row["jpeg"] < 0 for row in rows)
    assert "6 images scored" in (output := read_output(capsys)) and "brightness 6" in output


def test_batches_have_one_image_size() -> None:
    for i in range(40):
        save_gray_image(f"made/{i:02d}.png", side=4 + i % 20)
    sizes = [
        [image.pixels.shape[-1] for image in batch if image.pixels is not None]
        for batch in batch_by_size(find_images_with_prompts(Path("made"), None), 4)
        if isinstance(batch, list)
    ]
    assert sum(map(len, sizes)) == 40
    assert all(len(set(batch)) == 1 and len(batch) <= 4 for batch in sizes)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_prompts_and_metadata_come_from_a_file(suffix: str) -> None:
    save_gray_image("made/one.png")
    save_gray_image("made/deep/two.png")
    save_gray_image("made/unnamed.png")
    rows = [{"file": "one.png", "prompt": "a red", "text": "x"}, {"file": "deep/two.png", "prompt": "a blue, twice"}]
    with Path(f"prompts.{suffix}").open("w", newline="") as file:
        if suffix == "jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, ["file", "prompt", "text"], restval="")
            writer.writeheader()
            writer.writerows(rows)
    options = ("--reward", "color", "--prompts", f"prompts.{suffix}")
    assert run_cli("score", "made", *options, "--out", "deep/out.jsonl") == 0
    assert [row["prompt"] for row in lines("deep/out.jsonl")] == ["a red", "a blue, twice"]
    assert run_cli("score", "made/one.png", *options, "--out", "one.jsonl") == 0
    assert len(lines("one.jsonl")) == 1


def test_column_names_of_other_tools_are_accepted() -> None:
    save_gray_image("made/one.png")
    Path("made/metadata.jsonl").write_text('{"file_name": "one.png", "text": "a red"}\n')
    assert run_cli("score", "made", "--reward", "color") == 0
    assert [row["prompt"] for row in lines()] == ["a red"]


def test_broken_images_are_reported_and_the_rest_scored(capsys: Any) -> None:
    for name in ("a_red", "no_colour", "z_blue"):
        save_gray_image(f"made/{name}.png")
    Path("made/m_broken.png").write_bytes(Path("made/a_red.png").read_bytes()[:50])
    assert run_cli("score", "made", "--reward", "color", "--reward", "brightness") == EXIT_FAILURE
    rows = {Path(row["file"]).stem: row for row in lines()}
    assert {name for name, row in rows.items() if "error" in row} == {"no_colour", "m_broken"}
    assert rows["a_red"]["color"] == rows["z_blue"]["color"] > 0.5
    assert rows["no_colour"]["brightness"] == pytest.approx(0.5, abs=0.01) and "color" not in rows["no_colour"]
    assert "TM382" in rows["no_colour"]["error"]
    output = read_output(capsys)
    assert "skipped: made/m_broken.png" in output
    assert "2 of 4 images could not be scored" in output and "2 images scored" in output


def test_missing_image_is_reported(capsys: Any) -> None:
    save_gray_image("made/one.png")
    Path("prompts.jsonl").write_text('{"file": "one.png", "prompt": "a"}\n{"file": "gone.png", "prompt": "b"}\n')
    assert run_cli("score", "made", "--reward", "brightness", "--prompts", "prompts.jsonl") == EXIT_FAILURE
    assert "made/gone.png" in read_output(capsys)
    assert len(lines()) == 2


@pytest.mark.parametrize(
    ("content", "name", "fragment"),
    [
        ("", "prompts.jsonl", "the file is empty"),
        ("{}\n", "prompts.jsonl", "line 1: 'file'"),
        ("file,prompt\na\n", "prompts.csv", "line 2: expected 2 columns"),
        ("x", "prompts.txt", "expected a .jsonl or .csv"),
        ('{"file": "other.png", "prompt": "a"}', "prompts.jsonl", "row matches made/one.png"),
    ],
)
def test_invalid_prompt_file_is_refused(content: str, name: str, fragment: str, capsys: Any) -> None:
    save_gray_image("made/one.png")
    Path(name).write_text(content)
    assert run_cli("score", "made/one.png", "--reward", "brightness", "--prompts", name) == EXIT_USAGE
    assert fragment in read_output(capsys)


def test_unwritable_scores_file_is_refused(capsys: Any) -> None:
    save_gray_image("made/one.png")
    Path("file").write_text("")
    assert run_cli("score", "made", "--reward", "brightness", "--out", "file/scores.jsonl") == EXIT_USAGE
    assert "--out" in read_output(capsys)


def test_reward_table_fits_100_columns_and_has_all_fields() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    with console.capture() as capture:
        console.print(reward_table(component_rows("rewards")))
    table = capture.get()
    assert max(map(len, table.splitlines())) <= 100
    for name in REWARDS:
        assert re.search(rf"^ {name}\b", table, re.MULTILINE), name
    kinds = ("gradient", "no gradient", "frames", "clip", "device", "host", "remote")
    for word in (*kinds, "memory", "range", "failure modes"):
        assert word in table


def test_list_prints_json(capsys: Any) -> None:
    assert run_cli("list", "rewards", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(REWARDS)
    assert rows["pickscore"]["aliases"] == ["pick_score"] and "pick_score" not in rows
    assert rows["brightness"]["differentiable"] is True and rows["stillness"]["modality"] == "video"
    assert rows["hps"]["sources"][0]["hub"] == "xswu/HPSv2"
    assert run_cli("list", "models", "--json") == 0
    models = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(models) == list(MODELS) and set(models["flux"]) == {"name", "description", "sources"}
    assert models["dit"]["sources"] == [] and [each["gated"] for each in models["flux"]["sources"]] == [True, False]


@pytest.mark.parametrize("columns", [120, 40])
def test_list_models_prints_size_and_license(columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run_cli("list", "models") == 0
    lines = capsys.readouterr().out.split("next:")[0].splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "black-forest-labs/FLUX.1-dev: 34 GB, FLUX.1 [dev] Non-Commercial License, gated" in text
    assert "Tongyi-MAI/Z-Image-Turbo: 33 GB, Apache-2.0" in text


def test_weights_of_models_are_read_from_source_as_they_are() -> None:
    """Without an import; every published model has a size and a license, or says where they are."""
    releases = {name: StaticClass(MODELS.locate(name)).defaults().releases for name in MODELS}
    assert releases == {name: MODELS.find(name, "list")().releases for name in MODELS}
    without = {name for name, each in releases.items() if not each}
    assert without == {"dit", "gpt", "maskgit", "toy_causal", "toy_flow", "toy_masked"}


@pytest.mark.parametrize("row", component_rows("rewards"), ids=lambda row: row["name"])
def test_every_reward_has_a_complete_card(row: dict[str, Any]) -> None:
    for key in ("description", "range", "failure_modes", "memory"):
        assert row[key], key
    for source in row["sources"]:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["hub"])


def test_serve_reward_serves_until_interrupted() -> None:
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
        assert server.wait(120) == 0
        assert "stopped" in server.stderr.read()
    finally:
        server.kill()
        server.wait()
        if server.stderr is not None:
            server.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["color", "--host", "0.0.0.0"], "--host: "),
        (["color", "--token-env", "UNSET_TOKEN"], "UNSET_TOKEN"),
        (["colour"], "did you mean 'color'?"),
        (["color", "--host", "203.0.113.7", "--token-env", "SET_TOKEN"], "203.0.113.7:8800"),
        (["{type: color"], "mapping"),
    ],
)
def test_invalid_serve_options_are_refused(
    arguments: list[str], fragment: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_TOKEN", "hush")
    assert run_cli("serve-reward", *arguments) == EXIT_USAGE
    assert fragment in read_output(capsys)
