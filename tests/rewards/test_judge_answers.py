"""Answers and templates of judges: every recorded case, hand-made defects, and template files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.evaluation.endpoint_judge import match_word
from tastemaker.evaluation.question_scorers import parse_testpoint_scores, parse_wise_score
from tastemaker.rewards.judge_answers import (
    AnswerError,
    AnswerFormat,
    AxisScores,
    DigitExpectation,
    JsonScores,
    JsonWinner,
    JudgeAnswer,
    NumberAnswer,
    PairScores,
    PairShares,
    SentenceWinner,
    TaggedWinner,
    YesNoProbability,
    YesNoText,
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


SCORES_ON_OTHER_SCALES = (": 3.8/10", ": 4 out of 10", " (1-10): 3", " (0-1): 1", ": 1-5", ": 3 to 4")
SHARES_UNLIKE_1 = ((0.9, 0.8), (0.1, 0.2), (0, 0), (1, 1))


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
        (load_template("rationalrewards").questions[0].answer, "# Detailed Judgement\nNone.\n# Summary:"),
        (load_template("unifiedreward_think_pair").questions[0].answer, "<answer>Image 3 is better</answer>"),
        (load_template("unifiedreward_flex_pair").questions[0].answer, '{"winner": "both"}'),
        (load_template("yes_no_text").questions[0].answer, "Yesterday"),
        *((SentenceWinner(), text) for text in ("", "Edited image 1 is better, or edited image 2 is better", "3")),
        *((PairScores(), text) for text in ("3.5", "Edited Image 1: 3.5, Image 2: 4.5 of 5", "image 1: v2.5 and 3")),
        *((PairScores(), text) for text in ("Image 2: 3, 4", "Image 1: 3, image 1: 4", "3 and 4, so image 2 wins")),
        *((AxisScores(("style",)), f"Style Score{text}") for text in SCORES_ON_OTHER_SCALES),
        *(
            (NumberAnswer(), f"Final Score: {text}")
            for text in ("3.8/10", "4 out of 10", "1-5", "1 to 5", "3%", "3..5")
        ),
        *((PairShares(("style",)), f"Style Score:\nImage 1: {x}\nImage 2: {y}") for x, y in SHARES_UNLIKE_1),
        (PairShares(("style",)), "Style Score (0-10):\nImage 1: 0.4\nImage 2: 0.6"),
        *((TaggedWinner(), f"<answer>Image 1 {text}</answer>") for text in ("is not better", "and Image 2", "2")),
        (JsonWinner(), '{"categories": [{"cat_winner": "Image 1"}]}'),
    ],
)
def test_defective_answer_is_refused(answer: Any, text: str) -> None:
    with pytest.raises(AnswerError):
        answer.parse(JudgeAnswer(text))


ADVERSARIAL_SIZE = 100_000  # characters
REPEATED = [
    " ", "\n", "*", "1", "1,", "1.", "=1", "{", "[", "<think>", "</think>", "<answer>", "<score>", "both ", "edited ",
    "Edited image 1 is ", "Total score: Image 1: =1 ", "1. Text Faithfulness\n", "# Detailed Judgement\n",
    "alignment score:\n", '"score": [1, ',
]  # fmt: skip
BEGUN = [
    ('{"a": "b "c"", "score": [', "1"), ('{"a": "b "c"", "score": [', "1 "), ('"score": [1', " "),
    ("Final Score:", " "), ("Final Score: ", "1"), ("Final Score: 1", ".1"), ("Style Score", " "),
    ("Style Score (1-5): 3", " "), ("Alignment Score:\n Image 1: 0.4", " \n"), ("Edited image", " "),
    ("# Detailed Judgement", "\n"), ("# Detailed Judgement\n1. Text Faithfulness", " "),
    ("# Detailed Judgement\n1. Text Faithfulness\n## Score: a", " "), ("<answer>Image 1", " "),
]  # fmt: skip


def interrupt(number: int, frame: object) -> None:
    raise TimeoutError("parsing takes much longer than in proportion to the answer's length")


def test_parsing_time_is_proportional_to_the_length() -> None:
    """No pattern backtracks: its quadratic time would be minutes here, and an exponential one stops a run for good."""
    texts = [part * (ADVERSARIAL_SIZE // len(part)) + "x" for part in REPEATED]
    texts += [beginning + part * (ADVERSARIAL_SIZE // len(part)) + "x\n# Summary:" for beginning, part in BEGUN]
    questions = [question for template in published_templates().values() for question in template.questions]
    formats = {type(question.answer): question.answer for question in questions}
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    try:
        for text in texts:
            for answer in formats.values():
                with suppress(AnswerError):
                    answer.parse(JudgeAnswer(text))
            parse_wise_score(text)
            parse_testpoint_scores(text, 2)
            match_word(text, (("Yes",),))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        (AxisScores(("style",)), "- Style Score (1-5): 3.0 / 5", 0.5),
        (AxisScores(("style",)), "**Style Score** (1 to 5): **3 out of 5**", 0.5),
        (AxisScores(("style", "physics")), "Style Score: 2\r\nPhysics Score: 4\r\n", 0.5),
        (NumberAnswer(), "Final Score: 1\n\nFinal Score: **2 / 5**. It is - all in all - poor.", 0.25),
        (NumberAnswer(), "Final Score: 3 - a fair image", 0.5),
        (NumberAnswer(r"(\d+) points", 0, 100), "40 points/100", 0.4),
        (PairShares(("style",)), "- Style Score (0-1):\n  - Image 1: 0.25\n  - Image 2: 0.75", 0.25),
        (PairShares(("style",)), "Style Score:\r\n Image 1: 0.26\r\n Image 2: 0.78\r\n", 0.25),
        (TaggedWinner(), "<answer>**Image 2 is better**</answer>", 0),
        (TaggedWinner(), "<answer>\nimage 1\n</answer>", 1),
        (PairScores(), "Edited Image 2: 4.5, Edited Image 1: 3.0", 0),
        (PairScores(), "Image 1: \N{MINUS SIGN}1.25, image 2: -1.5", 1),
        (PairScores(), "Image 2 wins: 3 for image 1, 4 for the edited image 2.", 0),
        (PairScores(), "Image 2 and image 1 get 4.5 and 3.", 0),
        (PairScores(), "Image 1: 2, image 2: 1. Image 1 is better than image 2.", 1),
    ],
)
def test_other_spellings_are_read(answer: AnswerFormat, text: str, score: float) -> None:
    assert answer.parse(JudgeAnswer(text)).score == pytest.approx(score)


def test_missing_winner_of_a_category_does_not_hide_the_winner() -> None:
    text = '{"categories": [{"cat_winner": "image 2"}, {"cat_winner": "Both"}, {}], "winner": "Image 1"}'
    parsed = JsonWinner().parse(JudgeAnswer(text))
    assert parsed.score == 1 and parsed.repaired and parsed.parts["category_winners"] == [2, None, None]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("<think>yes</think>No", 0),
        ("so yes it is\n</think>\nNo", 0),  # the chat template holds the first tag
        ("<think>a <think>b</think> yes </think>\r\nno", 0),
        ("No <think>yes", 0),
        ("<think>yes</think>No <think>but yes", 0),
        ("<think>Yes", None),
        ("Yes, because</think>", None),
        ("</think><think>Yes", None),
    ],
)
def test_thinking_is_no_verdict(text: str, verdict: float | None) -> None:
    answer = JudgeAnswer(text)
    if verdict is None:
        with pytest.raises(AnswerError):
            YesNoText().parse(answer)
    else:
        assert YesNoText().parse(answer).score == verdict


def test_unclosed_thinking_holds_no_answer() -> None:
    with pytest.raises(AnswerError):
        TaggedWinner().parse(JudgeAnswer("<think>I could write <answer>Image 1 is better</answer>, but"))


def test_numbers_that_may_be_cut_off_are_refused() -> None:
    cases: list[tuple[AnswerFormat, str]] = [
        (AxisScores(("style",)), "Style Score (1-5): 3"),
        (AxisScores(("style",)), "Style Score (1-5): 3."),
        (PairShares(("style",)), "Style Score:\nImage 1: 0.4\nImage 2: 0.6"),
        (PairScores(), "Image 1: 3, image 2: -1"),
        (NumberAnswer(), "Final Score: 4"),
    ]
    for answer, text in cases:
        assert answer.parse(JudgeAnswer(text, "stop")).score >= 0
        with pytest.raises(AnswerError, match="max_tokens"):
            answer.parse(JudgeAnswer(text, "length"))
        if not text.endswith("."):
            assert answer.parse(JudgeAnswer(f"{text}\nThe", "length" if answer != PairScores() else "stop")).score >= 0
    yes = (("Yes", -0.1), ("No", -2.4))
    assert YesNoProbability().parse(JudgeAnswer("1.", "length", yes)).score > 0.8  # one token is always cut off


def test_vqascore_is_the_probability_of_one_token() -> None:
    """P("Yes") under the full softmax; against no, all spellings count."""
    tokens = tuple((token, math.log(p)) for token, p in (("Yes", 0.4), ("yes", 0.2), (" Yes", 0.1), ("No", 0.1)))
    exact, relative = (load_template(name).questions[0].answer for name in ("vqascore", "yes_no"))
    assert exact.parse(JudgeAnswer("Yes", "length", tokens)).score == pytest.approx(0.4)
    assert relative.parse(JudgeAnswer("Yes", "length", tokens)).score == pytest.approx(0.7 / 0.8)
    with pytest.raises(AnswerError):  # of an endpoint whose tokens are spelled in another way
        exact.parse(JudgeAnswer("Yes", "length", tokens[1:3]))


def logprob_body(top_logprobs: Any) -> dict[str, Any]:
    position = {"token": "Yes", "logprob": 0.0, "top_logprobs": top_logprobs}
    return {"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [position]}}]}


def test_answers_without_a_list_of_likely_tokens_are_not_certain() -> None:
    missing = logprob_body(None)
    del missing["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    no = {"token": "No", "logprob": -2.0}
    for body in (
        missing,
        *map(
            logprob_body, (None, [], {}, 5, [no, {"token": "Yes"}], [no, None], [no, {"token": "Yes", "logprob": "0"}])
        ),
    ):
        with pytest.raises(AnswerError) as caught:
            YesNoProbability().parse(JudgeAnswer.from_response(body))
        assert caught.value.kind == "no logprobs"
    for wrong in (math.nan, math.inf, -math.inf, 0.5, 10**400, -(10**400)):
        for answer in (YesNoProbability(), YesNoProbability(full_softmax=True), DigitExpectation()):
            body = logprob_body([no, {"token": "3", "logprob": -1.0}, {"token": "Yes", "logprob": wrong}])
            with pytest.raises(AnswerError) as caught:
                answer.parse(JudgeAnswer.from_response(json.loads(json.dumps(body))))
            assert caught.value.kind == "range"
    certain = logprob_body([{"token": "Yes", "logprob": 1e-7}, {"token": "No", "logprob": -9999.0}])
    assert YesNoProbability().parse(JudgeAnswer.from_response(certain)).score == 1


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
