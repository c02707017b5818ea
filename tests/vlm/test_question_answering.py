"""`ask`: small random models of every family answer questions about one image or a directory."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from vlm_stubs import FAMILIES

from tastemaker.cli import EXIT_FAILURE, EXIT_USAGE, main
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import save_image
from tastemaker.vlm.chat_model import load_chat_model
from tastemaker.vlm.generation import GenerationSettings, GumbelSampling, generate_answers

# PaliGemma's processor calls a deprecated numpy interface.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
QUESTIONS = ["What is this?", "Describe the picture in a few words.", "How many?"]
SHORT = GenerationSettings(max_new_tokens=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_answers_match_single_answers(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    for generation in (SHORT, GenerationSettings(temperature=0.7, top_p=0.9, max_new_tokens=6, seed=3)):
        batched = generate_answers(model, IMAGES, QUESTIONS, [4, 5, 6], generation)
        single = [generate_answers(model, IMAGES[i : i + 1], [QUESTIONS[i]], [4 + i], generation)[0] for i in range(3)]
        assert batched == single
        assert len(set(batched)) > 1  # images and questions change the answers


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_starts_with_the_argmax_token(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    first = model.ask(IMAGES, [(f"<image>\n{question}",) for question in QUESTIONS]).logits.argmax(-1)
    texts = model.tokenizer.batch_decode(first[:, None], skip_special_tokens=True)
    assert generate_answers(model, IMAGES, QUESTIONS, [0, 1, 2], GenerationSettings(max_new_tokens=1)) == [
        text.strip() for text in texts
    ]


def test_samples_follow_temperature_and_top_p() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0]).expand(40_000, -1)
    generation = GenerationSettings(temperature=0.5, top_p=0.95)
    samples = GumbelSampling(generation, torch.arange(40_000), 3)(
        torch.zeros(40_000, 3, dtype=torch.int64), logits
    ).argmax(-1)
    frequencies = torch.bincount(samples, minlength=5) / 40_000
    expected = (torch.tensor([2.0, 1.0]) / 0.5).softmax(0)
    torch.testing.assert_close(frequencies[:2], expected, atol=0.01, rtol=0)
    assert not frequencies[2:].any()


def test_sampling_with_tiny_top_p_is_greedy(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava_onevision"]), Placement())
    narrow = GenerationSettings(temperature=1.0, top_p=1e-6, max_new_tokens=6)
    assert generate_answers(model, IMAGES, QUESTIONS, [0, 1, 2], narrow) == generate_answers(
        model, IMAGES, QUESTIONS, [0, 1, 2], SHORT
    )


def test_invalid_generation_settings_are_refused() -> None:
    for settings, value in (
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_p": 0.0}, "top-p 0.0"),
        ({"max_new_tokens": 0}, " 0 tokens"),
    ):
        with pytest.raises(ConfigError, match=value):
            GenerationSettings(**settings)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Five images of two sizes."""
    for i in range(5):
        pixels = torch.rand(1, 3, 20, 20 + 10 * (i % 2), generator=torch.Generator().manual_seed(i))
        save_image(pixels, tmp_path / "images" / f"a_{i}.png")
    return tmp_path / "images"


def model_options(folder: Path) -> list[str]:
    return ["--model", str(folder), "--max-tokens", "5", "--device", "cpu", "--precision", "fp32"]


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answer_about_one_image_is_printed(
    folders: dict[str, Path], image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ask", str(image_folder / "a_0.png"), "What is this?", *model_options(folders["llava_onevision"])) == 0
    answer = capsys.readouterr().out.strip()
    assert run("ask", str(image_folder), "What is this?", *model_options(folders["llava_onevision"])) == 0
    assert rows(image_folder / "answers.jsonl")[0]["answer"] == answer or answer in {
        row["answer"] for row in rows(image_folder / "answers.jsonl")
    }


def test_answers_about_a_directory_are_recorded_and_resumed(folders: dict[str, Path], image_folder: Path) -> None:
    command = [
        "ask",
        str(image_folder),
        "Is this {prompt}?",
        *model_options(folders["qwen2_5_vl"]),
        "--batch-size",
        "2",
    ]
    assert run(*command) == 0
    record = image_folder / "answers.jsonl"
    before = {row["file"]: row for row in rows(record)}
    assert len(before) == 5 and before[str(image_folder / "a_3.png")]["question"] == "Is this a 3?"
    kept = rows(record)[:2]
    kept[0]["answer"] = "as it was"
    record.write_text("".join(json.dumps(row) + "\n" for row in kept) + '{"file": "cut')
    assert run(*command) == 0
    after = {row["file"]: row for row in rows(record)}
    assert after.pop(kept[0]["file"])["answer"] == "as it was"
    assert after == {file: row for file, row in before.items() if file != kept[0]["file"]}


def test_another_question_is_added_to_the_same_file(folders: dict[str, Path], image_folder: Path) -> None:
    for question in ("What?", "Why?", "What?"):
        assert run("ask", str(image_folder), question, *model_options(folders["llava"])) == 0
    assert len(rows(image_folder / "answers.jsonl")) == 10


def test_several_questions_are_answered_in_one_run(
    folders: dict[str, Path], image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["What?", *model_options(folders["paligemma"]), "--question", "Why {prompt}?", "--question", "What?"]
    assert run("ask", str(image_folder), *options, "--batch-size", "2") == 0
    answers = {(row["file"], row["question"]): row["answer"] for row in rows(image_folder / "answers.jsonl")}
    assert len(answers) == 10 and (str(image_folder / "a_3.png"), "Why a 3?") in answers
    record = (image_folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (image_folder / "answers.jsonl").write_text("".join(record[:3]))
    assert run("ask", str(image_folder), *options, "--batch-size", "4") == 0
    assert {(row["file"], row["question"]): row["answer"] for row in rows(image_folder / "answers.jsonl")} == answers
    capsys.readouterr()
    assert run("ask", str(image_folder / "a_0.png"), *options) == 0
    printed = capsys.readouterr().out
    expected = [(question, answers[str(image_folder / "a_0.png"), question]) for question in ("What?", "Why a 0?")]
    assert printed == "".join(f"{question}\n  {answer}\n" for question, answer in expected)


@pytest.mark.parametrize("family", ["paligemma", pytest.param("showo", marks=pytest.mark.slow)])
def test_answers_are_streamed_to_the_terminal(
    family: str, folders: dict[str, Path], image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "showo.yaml").write_text(SHOWO)
    pieces: list[str] = []
    monkeypatch.setattr("typer.echo", lambda text, nl: pieces.append(text))
    model = tmp_path / "showo.yaml" if family == "showo" else folders[family]
    options = ["What is this?", *model_options(model), "--temperature", "1", "--max-tokens", "9"]
    warned = pytest.warns(UserWarning, match=r"random weights.*TM843") if family == "showo" else nullcontext()
    with warned:
        assert run("ask", str(image_folder / "a_0.png"), *options) == 0
        assert len(pieces) > 2 and pieces[-1] == "\n"
        assert run("ask", str(image_folder / "a_0.png"), *options, "--out", str(tmp_path / "one.jsonl")) == 0
    assert "".join(pieces) == rows(tmp_path / "one.jsonl")[0]["answer"].strip() + "\n"


def test_detections_are_drawn_on_the_images_of_a_directory(
    folders: dict[str, Path], image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ask", str(image_folder), "detect cat", *model_options(folders["paligemma"])]
    assert run(*command) == 0
    box = "<loc0100>" * 2 + "<loc0900>" * 2
    for first, message in (("a cat", "nothing is drawn"), (f"{box} cat", "drawn on 1 image")):
        record = [row | {"answer": "a cat"} for row in rows(image_folder / "answers.jsonl")]
        record[0]["answer"] = first
        (image_folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in record))
        assert run(*command, "--draw", str(tmp_path / "drawn")) == 0
        assert message in " ".join(capsys.readouterr().err.split())
    (drawn,) = (tmp_path / "drawn").iterdir()
    assert drawn.name == Path(record[0]["file"]).name
    assert drawn.read_bytes() != Path(record[0]["file"]).read_bytes()


def test_sampled_answers_are_independent_of_the_batch(
    folders: dict[str, Path], image_folder: Path, tmp_path: Path
) -> None:
    command = [
        "ask",
        str(image_folder),
        "What?",
        *model_options(folders["llava_onevision"]),
        "--temperature",
        "1",
        "--seed",
        "7",
    ]
    assert run(*command, "--out", str(tmp_path / "one.jsonl"), "--batch-size", "1") == 0
    assert run(*command, "--out", str(tmp_path / "many.jsonl"), "--batch-size", "8") == 0
    one, many = ({row["file"]: row["answer"] for row in rows(tmp_path / f"{name}.jsonl")} for name in ("one", "many"))
    assert one == many


def test_unreadable_image_is_reported_and_the_others_are_answered(
    folders: dict[str, Path], image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (image_folder / "a_9.png").write_bytes(b"not an image")
    assert run("ask", str(image_folder), "What?", *model_options(folders["llava_onevision"])) == EXIT_USAGE
    assert len(rows(image_folder / "answers.jsonl")) == 5
    assert "1 of 6" in " ".join(capsys.readouterr().err.split())


def test_invalid_arguments_are_refused(
    folders: dict[str, Path], image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_options(folders["llava_onevision"])

    def error_of(*arguments: str) -> str:
        assert run("ask", *arguments) in (EXIT_USAGE, EXIT_FAILURE)
        return " ".join(capsys.readouterr().err.split())

    assert "none.png" in error_of(str(tmp_path / "none.png"), "What?", *model)
    assert "question" in error_of(str(image_folder), " ", *model)
    assert "nobody/nothing" in error_of(str(image_folder), "What?", "--model", "nobody/nothing")
    (tmp_path / "empty").mkdir()
    assert "no images" in error_of(str(tmp_path / "empty"), "What?", *model)
    (image_folder / "answers.jsonl").write_text('{"score": 1}\n')
    assert "answers.jsonl" in error_of(str(image_folder), "What?", *model)


SHOWO = """
model: {type: showo, weights: null, autoencoder: null, tokenizer: letters, image_size: 32,
  downsample_factor: 8, max_text_tokens: 11, codebook_size: 64,
  text_vocab_size: 60, eos_token_id: 59, width: 32, depth: 2, heads: 2, intermediate_size: 64}
"""


@pytest.mark.parametrize("more", [["--temperature", "1", "--top-p", "0.9"], pytest.param([], marks=pytest.mark.slow)])
def test_generator_answers_questions_by_its_recipe(image_folder: Path, tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "showo.yaml").write_text(SHOWO)
    command = ["ask", str(image_folder), "What is this?", *model_options(tmp_path / "showo.yaml"), *more]
    for size, name in (("1", "one"), ("8", "many")):
        with pytest.warns(UserWarning, match=r"random weights.*TM843"):
            assert run(*command, "--batch-size", size, "--out", str(tmp_path / f"{name}.jsonl")) == 0
    one, many = ({row["file"]: row["answer"] for row in rows(tmp_path / f"{name}.jsonl")} for name in ("one", "many"))
    assert one == many and len(one) == 5


def test_generator_that_cannot_answer_is_refused(image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ask", str(image_folder), "What?", "--model", "grpo-toy-flow") == EXIT_USAGE
    assert "answer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("judge: {weights: google/some}", "tastemaker export .* --out judge"),
        ("autoencoder: {type: vae}", "Show-o"),
    ],
)
def test_runs_that_cannot_answer_name_an_alternative(
    text: str, pattern: str, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    assert run("ask", str(image_folder / "a_0.png"), "What is this?", *model_options(tmp_path / "run")) == EXIT_USAGE
    assert re.search(pattern, " ".join(capsys.readouterr().err.split()))
    assert (
        run("ask", str(image_folder / "a_0.png"), "What is this?", *model_options(Path("paligemma-finetune")))
        == EXIT_USAGE
    )
    assert "google/paligemma2" in " ".join(capsys.readouterr().err.split())
