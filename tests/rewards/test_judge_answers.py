"""Answers and templates of judges: every recorded case, hand-made defects, and template files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.rewards.judge_answers import AnswerError, AxisScores, JsonScores, JudgeAnswer, NumberAnswer
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
    assert len(published_templates()) == 19
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
    for content, code in wrong.items():
        path.write_text(content)
        with pytest.raises(ConfigError, match=code):
            load_template(str(path))
    with pytest.raises(ValueError, match="TM2000"):
        load_template("unifiedreward")
