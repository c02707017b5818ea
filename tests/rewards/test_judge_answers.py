"""Answers and templates of judges: every recorded case, hand-made defects, and template files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.rewards.judge_answers import (
    AnswerError,
    AxisScores,
    JsonScores,
    JudgeAnswer,
    NumberAnswer,
    PairScores,
    SentenceWinner,
)
from tastemaker.rewards.judge_templates import fill_placeholders, load_template, published_templates, read_texts

FIXTURES = Path(__file__).parent.parent / "fixtures" / "judges"
CASES = [json.loads(path.read_text()) for path in sorted(FIXTURES.glob("[01]*.json"))]
QUESTIONS = {
    "unifiedreward2.point": ("unifiedreward_point", 0),
    "unifiedreward2.pair": ("unifiedreward_pair", 0),
    "unifiedreward_think.pair": ("unifiedreward_think_pair", 0),
    "unifiedreward_flex.pair": ("unifiedreward_flex_pair", 0),
    "editscore.sc": ("editscore", 0),
    "editscore.pq": ("editscore", 1),
    "rationalrewards.t2i": ("rationalrewards", 0),
    "rationalrewards.edit": ("rationalrewards_edit_all", 0),
    "yes_no": ("yes_no", 0),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_recorded_answer(case: dict[str, Any]) -> None:
    name, number = QUESTIONS[case["judge"]]
    template, expected = load_template(name), dict(case["expected"])
    question, answer = template.questions[number], JudgeAnswer.from_response(case["response"])
    texts = [part.text for part in question.parts] + [question.system]
    assert read_texts()[case["request"]["template"]] in texts
    sampling = {key: x for key, x in case["request"]["sampling"].items() if key in ("temperature", "top_p", "top_k")}
    assert {key: vars(template.sampling)[key] for key in sampling} == sampling
    if not expected.pop("ok"):
        with pytest.raises(AnswerError) as caught:
            question.answer.parse(answer)
        assert caught.value.kind == expected["error"]
        assert caught.value.missing == tuple(expected.get("missing", ()))
        assert answer.finish_reason != "length" or "max_tokens" in str(caught.value)
        return
    parsed = question.answer.parse(answer)
    assert parsed.repaired == expected.pop("repaired", False)
    scores = expected.pop("score", expected.pop("sc", None))
    if scores is None:
        scores = float(expected["winner"] == 1)
    assert parsed.score == pytest.approx(scores[0] if isinstance(scores, list) else scores)
    published = expected.pop("score_without_image_faithfulness", None)
    if published is not None:
        assert load_template("rationalrewards_edit").questions[0].answer.parse(answer).score == pytest.approx(published)
    parts = expected.pop("axes", expected.pop("aspects", {})) | expected
    for key, value in parts.items():
        found = parsed.parts[key]
        assert (list(found) if isinstance(found, tuple) else found) == (
            value if value is None else pytest.approx(value)
        )


def test_replies_without_a_verdict_are_named() -> None:
    kinds = {}
    for case in json.loads((FIXTURES / "transport.json").read_text()):
        if case["expected"]["action"] == "fail":
            template = load_template("yes_no" if "logprobs" in case["name"] else "unifiedreward_point")
            with pytest.raises(AnswerError) as caught:
                template.questions[0].answer.parse(JudgeAnswer.from_response(case["response"]))
            assert caught.value.kind == case["expected"]["error"]
            assert case["expected"].get("hint", "") in str(caught.value)
            kinds[caught.value.kind] = True
    assert set(kinds) == {"empty", "no logprobs"}


def test_strange_bodies_are_empty_answers() -> None:
    for body in ({}, {"choices": []}, {"choices": [None]}, {"choices": [{"message": None}]}, {"choices": "x"}):
        with pytest.raises(AnswerError):
            AxisScores(("style",)).parse(JudgeAnswer.from_response(body))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (AxisScores(("style",)), "Style Score (1-5): 50"),
        (AxisScores(("style",)), "Style Score (1-5): X"),
        (AxisScores(("style",)), "Style Score (1-5): 3\nStyle Score (1-5): 4"),
        (NumberAnswer(), "Final Score: 33"),
        (NumberAnswer(), "3.5"),
        (JsonScores(("a", "b")), '{"score": [1, 2, 3]}'),
        (JsonScores(("a", "b")), '{"score": [true, 2]}'),
        (JsonScores(("a", "b")), '{"reasoning": "12 and 13'),
        (load_template("unifiedreward_pair").questions[0].answer, "Alignment Score:\n Image 1: 0\n Image 2: 0\n"),
        (load_template("rationalrewards").questions[0].answer, "1. Text Faithfulness:\n## Score: 3\n# Summary:"),
        (load_template("unifiedreward_think_pair").questions[0].answer, "<answer>Image 3 is better</answer>"),
        (load_template("unifiedreward_flex_pair").questions[0].answer, '{"winner": "both"}'),
        (load_template("yes_no_text").questions[0].answer, "Yesterday"),
        *((SentenceWinner(), text) for text in ("", "Edited image 1 is better, or edited image 2 is better", "3")),
        *((PairScores(), text) for text in ("3.5", "Edited Image 1: 3.5, Image 2: 4.5 of 5", "image 1: v2.5 and 3")),
    ],
)
def test_defective_answer_is_refused(answer: Any, text: str) -> None:
    with pytest.raises(AnswerError):
        answer.parse(JudgeAnswer(text))


def test_published_texts_are_unchanged_and_filled_literally() -> None:
    facts = json.loads((FIXTURES / "templates.json").read_text())["templates"]
    assert {name: hashlib.sha256(text.encode()).hexdigest() for name, text in read_texts().items()} == {
        name: fact["sha256"] for name, fact in facts.items()
    }
    assert len(published_templates()) == 21
    text = fill_placeholders('{"a": 1} {prompt} {other}', {"prompt": "{other} \\1"}, ("prompt",))
    assert text == '{"a": 1} {other} \\1 {other}'


def test_template_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("text: 'Rate {prompt} for {style}.'\nanswer: {type: number, pattern: 'Rating: (\\d+)', high: 9}\n")
    template = load_template(str(path))
    assert template.questions[0].placeholders == ("prompt", "style") and not template.pairwise
    assert template.questions[0].answer.parse(JudgeAnswer("Rating: 5")).score == 0.5
    wrong = {
        "text: Rate it.": "TM2001",
        "text: Rate it.\nanswer: {type: number}": "TM2002",
        "text: Rate it.\nanswer: {type: yes_no, colour: 1}": "TM2001",
        "text: Better?\npairwise: true\nanswer: {type: axes, axes: [style]}": "TM2002",
        "text: Better?\nimages: [source]\nanswer: {type: yes_no}": "TM2002",
    }
    for number, (content, code) in enumerate(wrong.items()):
        path.write_text(content)
        os.utime(path, (number, number))  # a file system may give writes in quick succession the same time
        with pytest.raises(ConfigError, match=code):
            load_template(str(path))
    with pytest.raises(ValueError, match="TM2000"):
        load_template("unifiedreward")


def test_pairs_of_edits_are_read_from_prose() -> None:
    rank, scores = (load_template(f"unifiedreward_edit_pair_{kind}") for kind in ("rank", "score"))
    assert [part.image for part in rank.questions[0].parts] == ["source", "first", "second", None]
    assert rank.pairwise and scores.pairwise and rank.needs_source
    cases = {
        "Edited image 1 is better.": 1,
        "The first one lost its text. **Edited Image 2** is better": 0,
        "Both edited images are equally good.": 0.5,
        "edited image 2 is better. So, edited image 2 is better.": 0,
    }
    assert {text: rank.questions[0].answer.parse(JudgeAnswer(text)).score for text in cases} == cases
    cases = {
        "Edited Image 1: 3.75\nEdited Image 2: -1.25": 1,
        "Image 1 gets -2 and image 2 gets +0.5.": 0,
        "The scores are 2.5 and 2.50": 0.5,
    }
    assert {text: scores.questions[0].answer.parse(JudgeAnswer(text)).score for text in cases} == cases


def test_checklist_file(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(
        "checklist:\n"
        "- {question: 'Does it show \"{prompt}\"?', weight: 3}\n"
        "- {question: 'Is it blurred?', weight: -1}\n"
        "- Is the style {style}?\n",
        encoding="utf-8",
    )
    template = load_template(str(path))
    assert [question.parts[1].text for question in template.questions][1] == "Is it blurred? Answer yes or no."
    assert [question.placeholders for question in template.questions] == [("prompt",), (), ("style",)]
    assert template.combine_scores([0.9, 0.2, 0.3]) == pytest.approx((3 * 0.8 - 1 * -0.6 - 0.4) / 3)
    assert template.sampling.max_tokens == 1 and template.questions[0].answer.uses_logprobs
    assert float(template.range.split()[0]) == pytest.approx(-5 / 3, abs=1e-3)
    wrong = {
        "checklist: []\n": "TM2001",
        "checklist: [{question: ''}]\n": "TM2001",
        "checklist: ['Good?']\nimages: [source]\n": "TM2311",
        "checklist: [{question: 'Good?', weight: .inf}]\n": "TM2312",
        "checklist: ['Good?']\ntext: Good?\n": "TM2001",
    }
    for number, (text, code) in enumerate(wrong.items()):
        other = tmp_path / f"wrong{number}.yaml"
        other.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=code):
            load_template(str(other))
