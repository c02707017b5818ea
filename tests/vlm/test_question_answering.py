"""Questions about pictures, answered by small random models of every family, one by one and folder by folder."""

from __future__ import annotations

import json
import re
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

# PaliGemma's processor itself asks numpy for what it will no longer do.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PICTURES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
QUESTIONS = ["What is this?", "Describe the picture in a few words.", "How many?"]
SHORT = GenerationSettings(max_new_tokens=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_a_batch_as_it_answers_one_by_one(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    for manner in (SHORT, GenerationSettings(temperature=0.7, top_p=0.9, max_new_tokens=6, seed=3)):
        together = generate_answers(model, PICTURES, QUESTIONS, [4, 5, 6], manner)
        alone = [generate_answers(model, PICTURES[i : i + 1], [QUESTIONS[i]], [4 + i], manner)[0] for i in range(3)]
        assert together == alone
        assert len(set(together)) > 1  # pictures and questions are seen and heard


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_begins_with_the_likeliest_token(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    first = model.ask(PICTURES, [(f"<image>\n{question}",) for question in QUESTIONS]).logits.argmax(-1)
    told = model.tokenizer.batch_decode(first[:, None], skip_special_tokens=True)
    assert generate_answers(model, PICTURES, QUESTIONS, [0, 1, 2], GenerationSettings(max_new_tokens=1)) == [
        text.strip() for text in told
    ]


def test_draws_follow_the_temperature_and_the_likeliest_tokens_alone() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0]).expand(40_000, -1)
    manner = GenerationSettings(temperature=0.5, top_p=0.95)
    drawn = GumbelSampling(manner, torch.arange(40_000), 3)(torch.zeros(40_000, 3, dtype=torch.int64), logits).argmax(
        -1
    )
    shares = torch.bincount(drawn, minlength=5) / 40_000
    expected = (torch.tensor([2.0, 1.0]) / 0.5).softmax(0)
    torch.testing.assert_close(shares[:2], expected, atol=0.01, rtol=0)
    assert not shares[2:].any()


def test_the_narrowest_draw_is_the_likeliest_answer(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava_onevision"]), Placement())
    narrow = GenerationSettings(temperature=1.0, top_p=1e-6, max_new_tokens=6)
    assert generate_answers(model, PICTURES, QUESTIONS, [0, 1, 2], narrow) == generate_answers(
        model, PICTURES, QUESTIONS, [0, 1, 2], SHORT
    )


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match="expected at least 0, above 0 up to 1, and at least one token"):
            GenerationSettings(**settings)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Five pictures of two sizes."""
    for i in range(5):
        pixels = torch.rand(1, 3, 20, 20 + 10 * (i % 2), generator=torch.Generator().manual_seed(i))
        save_image(pixels, tmp_path / "shelf" / f"a_{i}.png")
    return tmp_path / "shelf"


def settings(folder: Path) -> list[str]:
    return ["--model", str(folder), "--max-tokens", "5", "--device", "cpu", "--precision", "fp32"]


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_picture_is_answered_on_the_screen(
    folders: dict[str, Path], shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ask", str(shelf / "a_0.png"), "What is this?", *settings(folders["llava_onevision"])) == 0
    told = capsys.readouterr().out.strip()
    assert run("ask", str(shelf), "What is this?", *settings(folders["llava_onevision"])) == 0
    assert rows(shelf / "answers.jsonl")[0]["answer"] == told or told in {
        row["answer"] for row in rows(shelf / "answers.jsonl")
    }


def test_a_folder_is_answered_line_by_line_and_gone_on_with(folders: dict[str, Path], shelf: Path) -> None:
    asked = ["ask", str(shelf), "Is this {prompt}?", *settings(folders["qwen2_5_vl"]), "--batch-size", "2"]
    assert run(*asked) == 0
    record = shelf / "answers.jsonl"
    before = {row["file"]: row for row in rows(record)}
    assert len(before) == 5 and before[str(shelf / "a_3.png")]["question"] == "Is this a 3?"
    kept = rows(record)[:2]
    kept[0]["answer"] = "as it was"
    record.write_text("".join(json.dumps(row) + "\n" for row in kept) + '{"file": "cut')
    assert run(*asked) == 0
    after = {row["file"]: row for row in rows(record)}
    assert after.pop(kept[0]["file"])["answer"] == "as it was"
    assert after == {file: row for file, row in before.items() if file != kept[0]["file"]}


def test_another_question_is_added_to_the_same_file(folders: dict[str, Path], shelf: Path) -> None:
    for question in ("What?", "Why?", "What?"):
        assert run("ask", str(shelf), question, *settings(folders["llava"])) == 0
    assert len(rows(shelf / "answers.jsonl")) == 10


def test_several_questions_are_asked_in_one_go(
    folders: dict[str, Path], shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["What?", *settings(folders["paligemma"]), "--question", "Why {prompt}?", "--question", "What?"]
    assert run("ask", str(shelf), *asked, "--batch-size", "2") == 0
    found = {(row["file"], row["question"]): row["answer"] for row in rows(shelf / "answers.jsonl")}
    assert len(found) == 10 and (str(shelf / "a_3.png"), "Why a 3?") in found
    record = (shelf / "answers.jsonl").read_text().splitlines(keepends=True)
    (shelf / "answers.jsonl").write_text("".join(record[:3]))
    assert run("ask", str(shelf), *asked, "--batch-size", "4") == 0
    assert {(row["file"], row["question"]): row["answer"] for row in rows(shelf / "answers.jsonl")} == found
    capsys.readouterr()
    assert run("ask", str(shelf / "a_0.png"), *asked) == 0
    told = capsys.readouterr().out
    expected = [(question, found[str(shelf / "a_0.png"), question]) for question in ("What?", "Why a 0?")]
    assert told == "".join(f"{question}\n  {answer}\n" for question, answer in expected)


@pytest.mark.parametrize("family", ["paligemma", pytest.param("showo", marks=pytest.mark.slow)])
def test_words_appear_as_they_are_written(
    family: str, folders: dict[str, Path], shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "showo.yaml").write_text(SHOWO)
    pieces: list[str] = []
    monkeypatch.setattr("typer.echo", lambda text, nl: pieces.append(text))
    model = tmp_path / "showo.yaml" if family == "showo" else folders[family]
    asked = ["What is this?", *settings(model), "--temperature", "1", "--max-tokens", "9"]
    assert run("ask", str(shelf / "a_0.png"), *asked) == 0
    assert len(pieces) > 2 and pieces[-1] == "\n"
    assert run("ask", str(shelf / "a_0.png"), *asked, "--out", str(tmp_path / "one.jsonl")) == 0
    assert "".join(pieces) == rows(tmp_path / "one.jsonl")[0]["answer"].strip() + "\n"


def test_places_are_drawn_on_the_pictures_of_a_folder(
    folders: dict[str, Path], shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["ask", str(shelf), "detect cat", *settings(folders["paligemma"])]
    assert run(*asked) == 0
    box = "<loc0100>" * 2 + "<loc0900>" * 2
    for first, said in (("a cat", "nothing is drawn"), (f"{box} cat", "1 objects drawn on 1 images")):
        record = [row | {"answer": "a cat"} for row in rows(shelf / "answers.jsonl")]
        record[0]["answer"] = first
        (shelf / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in record))
        assert run(*asked, "--draw", str(tmp_path / "drawn")) == 0
        assert said in " ".join(capsys.readouterr().err.split())
    (drawn,) = (tmp_path / "drawn").iterdir()
    assert drawn.name == Path(record[0]["file"]).name
    assert drawn.read_bytes() != Path(record[0]["file"]).read_bytes()


def test_draws_do_not_depend_on_who_is_beside(folders: dict[str, Path], shelf: Path, tmp_path: Path) -> None:
    asked = ["ask", str(shelf), "What?", *settings(folders["llava_onevision"]), "--temperature", "1", "--seed", "7"]
    assert run(*asked, "--out", str(tmp_path / "one.jsonl"), "--batch-size", "1") == 0
    assert run(*asked, "--out", str(tmp_path / "many.jsonl"), "--batch-size", "8") == 0
    one, many = ({row["file"]: row["answer"] for row in rows(tmp_path / f"{name}.jsonl")} for name in ("one", "many"))
    assert one == many


def test_a_broken_picture_is_named_and_the_others_are_answered(
    folders: dict[str, Path], shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shelf / "a_9.png").write_bytes(b"no picture")
    assert run("ask", str(shelf), "What?", *settings(folders["llava_onevision"])) == EXIT_USAGE
    assert len(rows(shelf / "answers.jsonl")) == 5
    assert "1 of 6 images could not be read" in " ".join(capsys.readouterr().err.split())


def test_mistakes_are_told_in_a_sentence(
    folders: dict[str, Path], shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = settings(folders["llava_onevision"])

    def complaint(*arguments: str) -> str:
        assert run("ask", *arguments) in (EXIT_USAGE, EXIT_FAILURE)
        return " ".join(capsys.readouterr().err.split())

    assert "there is no image at" in complaint(str(tmp_path / "none.png"), "What?", *model)
    assert "the question is empty" in complaint(str(shelf), " ", *model)
    assert "were not found; expected a local path" in complaint(str(shelf), "What?", "--model", "nobody/nothing")
    (tmp_path / "empty").mkdir()
    assert "no images found" in complaint(str(tmp_path / "empty"), "What?", *model)
    (shelf / "answers.jsonl").write_text('{"score": 1}\n')
    assert "holds something else than answers" in complaint(str(shelf), "What?", *model)


SHOWO = """
model: {type: showo, weights: null, autoencoder: null, tokenizer: letters, image_size: 32,
  downsample_factor: 8, max_text_tokens: 11, codebook_size: 64,
  text_vocab_size: 60, eos_token_id: 59, width: 32, depth: 2, heads: 2, intermediate_size: 64}
"""


@pytest.mark.parametrize("more", [["--temperature", "1", "--top-p", "0.9"], pytest.param([], marks=pytest.mark.slow)])
def test_a_generator_that_reads_is_asked_by_its_recipe(shelf: Path, tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "showo.yaml").write_text(SHOWO)
    asked = ["ask", str(shelf), "What is this?", *settings(tmp_path / "showo.yaml"), *more]
    assert run(*asked, "--batch-size", "1", "--out", str(tmp_path / "one.jsonl")) == 0
    assert run(*asked, "--batch-size", "8", "--out", str(tmp_path / "many.jsonl")) == 0
    one, many = ({row["file"]: row["answer"] for row in rows(tmp_path / f"{name}.jsonl")} for name in ("one", "many"))
    assert one == many and len(one) == 5


def test_a_generator_that_only_paints_is_told_apart(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ask", str(shelf), "What?", "--model", "grpo-toy-flow") == EXIT_USAGE
    assert "does not answer questions" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("judge: {weights: google/some}", "tastemaker export .* --out judge"),
        ("autoencoder: {type: vae}", "trains no model that answers"),
    ],
)
def test_runs_that_cannot_be_asked_say_what_can(
    text: str, said: str, shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    assert run("ask", str(shelf / "a_0.png"), "What is this?", *settings(tmp_path / "run")) == EXIT_USAGE
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert run("ask", str(shelf / "a_0.png"), "What is this?", *settings(Path("paligemma-finetune"))) == EXIT_USAGE
    assert "such as google/paligemma2" in " ".join(capsys.readouterr().err.split())
