"""Formats of judges' answers: how the text or the token log-probabilities of an answer become a score.

Parsing is strict: everything that was asked for is there and in range, or the answer is refused. An answer that is
read halfway would put a sample on another scale than the others of its group.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from ..core.errors import ConfigError
from ..core.safe_files import parse_json

# Every pattern takes time in proportion to an answer's length: a hang in one of them would stop all threads of a run.
# So digits are matched possessively, and no two neighboring repetitions match the same characters.
UNSIGNED = r"\d++(?:\.\d++)?+"
NUMBER = rf"[-+]?{UNSIGNED}"
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
DIGITS = tuple("0123456789.")
MINUS_SIGN = "\N{MINUS SIGN}"  # which some models write for a hyphen
MIN_COVERED = 1e-3  # probability of all accepted tokens below which an answer counts as neither of them
MIN_LOGPROB, MAX_LOGPROB = -1e30, 1e-4  # finite, and above 0 only by rounding
MAX_SUM_ERROR = 0.1  # of two shares that should add up to 1
MAX_QUOTE = 160  # characters of an answer in a message

ErrorKind = Literal["empty", "missing", "no answer", "not json", "range", "no logprobs", "neither"]


class AnswerError(ValueError):
    """An answer that holds no score."""

    def __init__(self, kind: ErrorKind, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.kind, self.missing = kind, tuple(missing)


@dataclass(frozen=True)
class JudgeAnswer:
    """The first choice of a chat completion."""

    content: str = ""
    finish_reason: str = ""
    top_logprobs: tuple[tuple[str, float], ...] | None = None  # of the first token; None if there are none
    reasoning: bool = False  # whether there is text in `reasoning_content`

    @classmethod
    def from_response(cls, response: Mapping[str, Any]) -> JudgeAnswer:
        """Read a body of /v1/chat/completions; what is missing or of another type is empty."""
        choices = response.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        message = message if isinstance(message, dict) else {}
        content = message.get("content")
        return cls(
            content if isinstance(content, str) else "",
            str(choice.get("finish_reason") or ""),
            _read_logprobs(choice.get("logprobs")),
            bool(message.get("reasoning_content")),
        )

    @property
    def text(self) -> str:
        """The content without thinking, also where one of the tags is missing.

        Chat templates may write the first one into the question, and an answer that is cut off lacks the last one.
        """
        before, end, after = self.content.replace("\r\n", "\n").rpartition("</think>")
        before = THINKING.sub("", before + end)
        return (("" if "</think>" in before else before) + after.partition("<think>")[0]).strip()


def _read_logprobs(logprobs: object) -> tuple[tuple[str, float], ...] | None:
    """Likely tokens at the first position; None without such a list. The drawn token alone would make every answer
    look certain."""
    positions = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(positions, list) or not positions or not isinstance(positions[0], dict):
        return None
    entries = positions[0].get("top_logprobs")
    entries = [entry if isinstance(entry, dict) else {} for entry in entries] if isinstance(entries, list) else []
    pairs = [(entry.get("token"), entry.get("logprob")) for entry in entries]
    complete = all(isinstance(token, str) and type(logprob) in (int, float) for token, logprob in pairs)
    return tuple(pairs) if pairs and complete else None


@dataclass(frozen=True)
class ParsedAnswer:
    """The score of an answer and what it was computed from."""

    score: float  # of a sample, or the probability that the first sample of a pair is the better one
    parts: dict[str, Any] = field(default_factory=dict)
    repaired: bool = False  # whether the answer had a defect that does not touch the score


class AnswerFormat(ABC):
    """What a judge is asked to answer."""

    uses_logprobs: bool = False
    ends_with_number: bool = False  # so that an answer that is cut off may lack digits of its last number

    def parse(self, answer: JudgeAnswer) -> ParsedAnswer:
        """The score; raises AnswerError with a hint about an answer that was cut off or is empty."""
        if not self.uses_logprobs and not answer.content.strip():
            hint = "; set enable_thinking: false, or raise max_tokens" if answer.reasoning else ""
            raise AnswerError("empty", f"the answer is empty{hint}")
        cut = answer.finish_reason == "length" and not self.uses_logprobs
        try:
            if cut and self.ends_with_number and answer.text[-1:] in DIGITS:
                raise AnswerError("missing", "its last number may be incomplete", ["score"])
            return self.read(answer)
        except AnswerError as error:
            hint = "; it was cut off, so raise max_tokens" if cut else ""
            quote = f", in {answer.content[-MAX_QUOTE:]!r}" if answer.content else ""
            raise AnswerError(error.kind, f"{error}{hint}{quote}", error.missing) from None

    @abstractmethod
    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        """The score of an answer that is not empty."""


def read_numbers(text: str) -> list[float]:
    """The numbers in a text such as `1-5` or `1 to 5`, without signs."""
    return [float(number) for number in re.findall(UNSIGNED, text)]


def read_number(text: str, low: float, high: float, name: str) -> float:
    """A number from low to high."""
    value = float(text)
    if not low <= value <= high:
        raise AnswerError("range", f"{name} is {text:.20}, expected {low:g} to {high:g}")
    return value


@dataclass(frozen=True)
class AxisScores(AnswerFormat):
    """Lines such as `Alignment Score (1-5): 3.8`, one for each axis; the score is their mean, from 0 to 1."""

    axes: tuple[str, ...]
    low: float = 1.0
    high: float = 5.0
    ends_with_number = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        found = {axis: self._find(axis, answer.text) for axis in self.axes}
        missing = [axis for axis, texts in found.items() if len(texts) != 1]
        if missing:
            raise AnswerError("missing", f"expected one line for each of {', '.join(missing)}", missing)
        values: dict[str, float] = {}
        for axis, [(scale, text, maximum)] in found.items():
            scales: tuple[list[float], ...] = ([], [self.high], [abs(self.low), self.high])
            if read_numbers(scale) not in scales or read_numbers(maximum) not in scales[:2]:
                raise AnswerError("range", f"{axis} is on another scale than {self.low:g} to {self.high:g}")
            values[axis] = read_number(text, self.low, self.high, axis)
        mean = sum(values.values()) / len(values)
        return ParsedAnswer((mean - self.low) / (self.high - self.low), values)

    def _find(self, axis: str, text: str) -> list[tuple[str, str, str]]:
        """Scale, number and maximum of the lines of an axis; scale and maximum may be empty."""
        scale, maximum = r"(?:\(([^)\n]*)\)[ \t*]*)?", rf"(?:[ \t*]*(?:/|out of)[ \t*]*({NUMBER}))?"
        line = rf"^[ \t*•-]*{re.escape(axis)} score[ \t*]*{scale}:[ \t*]*({NUMBER}){maximum}[ \t*.]*$"
        return re.findall(line, text, re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class NumberAnswer(AnswerFormat):
    """One number that a regular expression with one group finds; the last match counts. From 0 to 1."""

    pattern: str = rf"Final Score:[\s*]*({NUMBER})(?!\.+\d)"
    low: float = 1.0
    high: float = 5.0
    ends_with_number = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        text = answer.text
        found = list(re.finditer(self.pattern, text))
        if not found:
            raise AnswerError("missing", f"nothing matches {self.pattern!r:.80}", ["score"])
        last = found[-1]
        number, after = last[1] or "", text[last.end() :]
        if not re.fullmatch(NUMBER, number):
            raise AnswerError("missing", f"{number!r:.40} is no number", ["score"])
        maximum = re.match(rf"[\s*]*(?:/|out of)[\s*]*({NUMBER})", after, re.IGNORECASE)
        if re.match(r"\s*(?:%|(?:[-\u2013]|to\s)\s*\d)", after) or (maximum and float(maximum[1]) != self.high):
            raise AnswerError("range", f"{number:.20} is on another scale than {self.low:g} to {self.high:g}")
        value = read_number(number, self.low, self.high, "the score")
        return ParsedAnswer((value - self.low) / (self.high - self.low), {"score": value})


@dataclass(frozen=True)
class PairShares(AnswerFormat):
    """Blocks of `Alignment Score:`, ` Image 1: 0.4`, ` Image 2: 0.6`; the mean share of the first, after division
    of each pair by its sum, which is about 1."""

    axes: tuple[str, ...]
    noun: str = "Image"
    ends_with_number = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        values: dict[str, tuple[float, float]] = {}
        for axis in self.axes:
            scale = r"(?:\(0(?:\.0)?[ \t]*(?:[-\u2013]|to)[ \t]*1(?:\.0)?\)[ \t*]*)?"
            title = rf"^[ \t*•-]*{axis} score[ \t*]*{scale}:[ \t*]*\n"
            lines = "".join(rf"[\s*•-]*{self.noun} {i}[ \t*]*:[ \t*]*({NUMBER})[ \t*]*$" for i in (1, 2))
            found = re.findall(title + lines, answer.text, re.I | re.M)
            if len(found) == 1:
                first, second = (read_number(text, 0, 1, axis) for text in found[0])
                if abs(first + second - 1) > MAX_SUM_ERROR:
                    raise AnswerError("range", f"the shares of {axis} add up to {first + second:g}, expected 1")
                values[axis] = (first, second)
        missing = [axis for axis in self.axes if axis not in values]
        if missing:
            raise AnswerError("missing", f"expected two shares for each of {', '.join(missing)}", missing)
        share = sum(first / (first + second) for first, second in values.values()) / len(values)
        return ParsedAnswer(share, dict(values))


@dataclass(frozen=True)
class TaggedWinner(AnswerFormat):
    """`<answer>Image 2 is better</answer>`; text outside of the tags does not count."""

    noun: str = "Image"

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        before, _, _ = answer.text.rpartition("</answer>")
        _, tag, verdict = before.rpartition("<answer>")
        sentence = rf"[\s*_]*{self.noun}\s+([12])(?:\s+is\s+better)?[\s*_.]*"
        winner = re.fullmatch(sentence, verdict, re.IGNORECASE) if tag else None
        if not winner:
            raise AnswerError("no answer", f"expected <answer>{self.noun} 1 is better</answer> or 2")
        parts: dict[str, Any] = {"winner": int(winner[1])}
        lines = [rf"{self.noun} {i}:[^\n=:]*=\s*({NUMBER})" for i in (1, 2)]
        totals = re.findall(rf"Total score:\s*{lines[0]}\s*{lines[1]}", answer.content)
        if totals:
            first, second = (float(text) for text in totals[-1])
            better = first > second if parts["winner"] == 1 else second > first
            parts |= {"totals": [first, second], "totals_agree": better}
        return ParsedAnswer(float(parts["winner"] == 1), parts)


@dataclass(frozen=True)
class SentenceWinner(AnswerFormat):
    """A sentence such as `Edited image 1 is better` in a text that names one winner; `equally good` is a tie."""

    noun: str = "Edited image"

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        text = re.sub(r"[*_`]", "", answer.text)
        found = set(re.findall(rf"{self.noun}\s+([12])\s+is\s+(?:clearly\s+)?better", text, re.IGNORECASE))
        tie = any(self._is_tie(sentence) for sentence in re.findall(r"[^.\n]+", text))
        if len(found) + tie != 1:
            raise AnswerError("no answer", f"expected '{self.noun} 1 is better' or 2, once")
        winner = int(found.pop()) if found else 0
        return ParsedAnswer({0: 0.5, 1: 1.0, 2: 0.0}[winner], {"winner": winner})

    def _is_tie(self, sentence: str) -> bool:
        """Whether a sentence says that both are equally good."""
        subject = re.search(rf"\b(?:both|{self.noun}s?)\b", sentence, re.IGNORECASE)
        return bool(subject and re.search(r"\bequally good", sentence[subject.end() :], re.IGNORECASE))


@dataclass(frozen=True)
class PairScores(AnswerFormat):
    """Two scores in prose, of the first and of the second image, possibly negative; the higher one wins.

    A score belongs to the image that is named before it, or after it as in `3.5 for image 1`. Without names the scores
    are in the order of the images.
    """

    noun: str = "image"
    ends_with_number = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        text = answer.text.replace(MINUS_SIGN, "-")
        label = rf"\b{self.noun}[\s#]*(?P<label>[12])\b(?!\.\d)"
        pattern = rf"{label}|(?<![\w.])(?P<number>{NUMBER})(?![\w]|\.\d)"
        marks = list(re.finditer(pattern, text, re.IGNORECASE))
        at = [i for i, mark in enumerate(marks) if mark["number"]]
        if len(at) != 2:
            raise AnswerError("missing", f"expected two scores, found {len(at)} numbers", ["scores"])
        numbers = [float(marks[i]["number"]) for i in at]
        owners = self._owners(text, marks, at)
        if sorted(owners) != [1, 2]:
            raise AnswerError("missing", "expected one score for each image", ["scores"])
        first, second = numbers if owners == [1, 2] else numbers[::-1]
        return ParsedAnswer(((first > second) + (first >= second)) / 2, {"scores": [first, second]})

    def _owners(self, text: str, marks: Sequence[re.Match[str]], at: Sequence[int]) -> list[int]:
        """The images, 1 or 2, that the two numbers at these marks belong to; empty if that is not clear."""
        labels = [int(mark["label"] or 0) for mark in marks]  # 0 for numbers
        if not any(labels):
            return [1, 2]
        after = [labels[i + 1] if self._is_linked(text, marks[i : i + 2]) else 0 for i in at]
        before = [labels[i - 1] if i else 0 for i in at]
        if all(after):
            return after
        if all(before):
            return before
        first, second = at
        return labels[first - 2 : first] if second == first + 1 and first >= 2 else []  # `1 and 2 get 3.5 and 4`

    def _is_linked(self, text: str, marks: Sequence[re.Match[str]]) -> bool:
        """Whether a number is followed by `for image 1`."""
        words = text[marks[0].end() : marks[1].start()].lower().split() if len(marks) == 2 else []
        return bool(words) and words[0] in ("for", "to") and set(words[1:]) <= {"the", "edited"}


@dataclass(frozen=True)
class JsonWinner(AnswerFormat):
    """A JSON object with `winner: "Image 1"` and the winners of categories, some of which may be missing."""

    noun: str = "Image"

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        value = read_json_object(answer.text)
        winner = self._winner(value.get("winner"))
        categories = value.get("categories")
        entries = [each for each in categories if isinstance(each, dict)] if isinstance(categories, list) else []
        if winner is None:
            got = value.get("winner")
            raise AnswerError("missing", f"expected a winner '{self.noun} 1' or 2, got {got!r:.40}", ["winner"])
        winners = [self._winner(each.get("cat_winner")) for each in entries]
        parts = {"winner": winner, "category_winners": winners}
        return ParsedAnswer(float(winner == 1), parts, repaired=None in winners)

    def _winner(self, text: object) -> int | None:
        found = re.fullmatch(rf"\s*{self.noun} ([12])\s*", text, re.IGNORECASE) if isinstance(text, str) else None
        return int(found[1]) if found else None


def read_json_object(text: str) -> dict[str, Any]:
    """The JSON object between the outermost braces."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise AnswerError("not json", "expected a JSON object")
    try:
        value = parse_json(text[start : end + 1], "answer")
    except ConfigError:
        value = None
    if not isinstance(value, dict):
        raise AnswerError("not json", "the JSON object cannot be read")
    return value


@dataclass(frozen=True)
class JsonScores(AnswerFormat):
    """`{"reasoning": "...", "score": [a, b]}`; the score is the smaller one or the mean of both, times `scale`.

    Quotes inside of the reasoning and commas before a bracket are usual defects: then `score` is read alone.
    """

    names: tuple[str, ...]
    high: float = 25.0
    reduce: Literal["min", "mean"] = "min"
    scale: float = 1.0

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        repaired = False
        try:
            scores = read_json_object(answer.text).get("score")
        except AnswerError:
            pattern = rf'"score"\s*:\s*\[\s*({NUMBER}(?:\s*,\s*{NUMBER})*)\s*(?:,\s*)?\]'
            lists = re.findall(pattern, answer.text)
            if len(lists) != 1:
                raise
            scores, repaired = [float(text) for text in re.findall(NUMBER, lists[0])], True
        numbers = scores if isinstance(scores, list) else []
        if len(numbers) != len(self.names) or any(type(x) not in (int, float) for x in numbers):
            raise AnswerError("missing", f"expected {len(self.names)} numbers as score, got {scores!r:.40}", ["score"])
        if not all(0 <= x <= self.high for x in numbers):  # false for NaN
            raise AnswerError("range", f"the scores are {numbers!r:.60}, expected 0 to {self.high:g}")
        value = min(numbers) if self.reduce == "min" else sum(numbers) / len(numbers)
        parts = {name: x * self.scale for name, x in zip(self.names, numbers, strict=True)}
        return ParsedAnswer(value * self.scale, {"scores": [float(x) for x in numbers], **parts}, repaired)


@dataclass(frozen=True)
class SectionScores(AnswerFormat):
    """RationalRewards' numbered sections, each with one line `## Score: 3.4` or N/A, before `# Summary:`.

    The score is the mean of the given aspects in `counted`, from 0 to 1.
    """

    headings: tuple[tuple[str, str], ...]  # name and heading of each aspect, in order
    counted: tuple[str, ...] = ()  # all if empty
    low: float = 1.0
    high: float = 4.0

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        text = re.sub(r"[*~]", "", answer.text)
        names = [name for name, _ in self.headings]
        start = re.search(r"^# Detailed Judgement[ \t]*$", text, re.MULTILINE)
        body = text[start.end() :] if start else ""
        end = re.search(r"^# Summary:", body, re.MULTILINE)
        if not end:
            raise AnswerError("missing", "expected '# Detailed Judgement' and then '# Summary:'", names)
        sections = self._split(body[: end.start()])
        missing = [name for name in names if name not in sections]
        values: dict[str, float | None] = {}
        for name in [name for name in names if name in sections]:
            lines = re.findall(r"^[ \t]*## Score:(.*)$", sections[name], re.MULTILINE)
            line = "".join(lines[:1]).strip(" \t")
            score = re.fullmatch(rf"({NUMBER})(?:\s*/\s*4(?:\.0)?)?|n/?a\.?", line, re.IGNORECASE)
            if len(lines) != 1 or not score:
                missing.append(name)
            else:
                values[name] = read_number(score[1], self.low, self.high, name) if score[1] else None
        if missing:
            raise AnswerError("missing", f"expected one '## Score:' for each of {', '.join(missing)}", missing)
        given = [x for name, x in values.items() if x is not None and name in (self.counted or names)]
        if not given:
            raise AnswerError("missing", "no aspect has a score", names)
        return ParsedAnswer((sum(given) / len(given) - self.low) / (self.high - self.low), dict(values))

    def _split(self, body: str) -> dict[str, str]:
        """The text under each heading; headings that are repeated are left out."""
        heads = [
            (match.start(), match.end(), name)
            for name, heading in self.headings
            for match in re.finditer(rf"^[ \t]*\d+\.[ \t]*{heading}[ \t]*(?::[ \t]*)?$", body, re.I | re.MULTILINE)
        ]
        counts = Counter(name for _, _, name in heads)
        parts = pairwise([*sorted(heads), (len(body), 0, "")])
        return {name: body[start:end] for (_, start, name), (end, _, _) in parts if counts[name] == 1}


@dataclass(frozen=True)
class YesNoProbability(AnswerFormat):
    """The probability of yes against no from the log-probabilities of the first token, in any spelling.

    With `full_softmax`, that of the token `Yes` among all tokens, as in VQAScore: other spellings do not count.
    """

    full_softmax: bool = False
    uses_logprobs = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        tokens = require_logprobs(answer)
        spell = str if self.full_softmax else lambda token: token.strip().lower()
        words = ("Yes", "No") if self.full_softmax else ("yes", "no")
        yes, no = (sum(math.exp(p) for token, p in tokens if spell(token) == word) for word in words)
        covered = yes + no
        if not covered >= MIN_COVERED:
            raise AnswerError("neither", f"the first token is neither yes nor no, with a probability of {covered:.2g}")
        score = yes if self.full_softmax else yes / covered
        return ParsedAnswer(min(score, 1.0), {"yes": yes, "no": no, "covered": covered})


@dataclass(frozen=True)
class DigitExpectation(AnswerFormat):
    """The expected digit from 0 to `high` by the log-probabilities of the first token, divided by `high` (Edit-R1)."""

    high: int = 5
    uses_logprobs = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        digits = [str(k) for k in range(self.high + 1)]
        mass = {k: sum(math.exp(p) for t, p in require_logprobs(answer) if t.strip() == k) for k in digits}
        covered = sum(mass.values())
        if not covered >= MIN_COVERED:
            raise AnswerError("neither", f"the first token is no digit from 0 to {self.high}")
        expected = sum(int(k) * p for k, p in mass.items()) / covered
        return ParsedAnswer(expected / self.high, {"expected": expected, "covered": covered})


@dataclass(frozen=True)
class YesNoText(AnswerFormat):
    """1 if the first word is yes, 0 if it is no; for endpoints without log-probabilities."""

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        word = re.match(r"\W*(yes|no)\b", answer.text, re.IGNORECASE)
        if not word:
            raise AnswerError("neither", "the first word is neither yes nor no")
        return ParsedAnswer(float(word[1].lower() == "yes"), {"answer": word[1].lower()})


def require_logprobs(answer: JudgeAnswer) -> tuple[tuple[str, float], ...]:
    """Likely tokens and their log-probabilities at the first position of an answer."""
    if answer.top_logprobs is None:
        raise AnswerError(
            "no logprobs",
            "the answer has no list of log-probabilities; use an endpoint with top_logprobs, or yes_no_text",
        )
    wrong = [(token, p) for token, p in answer.top_logprobs if not MIN_LOGPROB <= p <= MAX_LOGPROB]
    if wrong:
        raise AnswerError(
            "range", f"the log-probability of {wrong[0][0]!r:.40} is {wrong[0][1]!r:.20}, expected up to 0"
        )
    return answer.top_logprobs
