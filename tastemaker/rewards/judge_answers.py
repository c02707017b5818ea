"""Formats of judges' answers: how the text or the token log-probabilities of an answer become a score.

Parsing is strict: everything that was asked for is there and in range, or the answer is refused. An answer that is
read halfway would put a sample on another scale than the others of its group.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import ConfigError
from ..core.safe_files import parse_json

NUMBER = r"[-+]?\d+(?:\.\d+)?"
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
MIN_COVERED = 1e-3  # probability of all accepted tokens below which an answer counts as neither of them
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
        """The content without the text in <think> tags."""
        return THINKING.sub("", self.content).strip()


def _read_logprobs(logprobs: object) -> tuple[tuple[str, float], ...] | None:
    """Tokens and log-probabilities at the first position."""
    positions = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(positions, list) or not positions or not isinstance(positions[0], dict):
        return None
    entries = positions[0].get("top_logprobs")
    entries = entries if isinstance(entries, list) and entries else [positions[0]]
    pairs = [(e.get("token"), e.get("logprob")) for e in entries if isinstance(e, dict)]
    return tuple((t, float(p)) for t, p in pairs if isinstance(t, str) and isinstance(p, (int, float))) or None


@dataclass(frozen=True)
class ParsedAnswer:
    """The score of an answer and what it was computed from."""

    score: float  # of a sample, or the probability that the first sample of a pair is the better one
    parts: dict[str, Any] = field(default_factory=dict)
    repaired: bool = False  # whether the answer had a defect that does not touch the score


class AnswerFormat(ABC):
    """What a judge is asked to answer."""

    uses_logprobs: bool = False

    def parse(self, answer: JudgeAnswer) -> ParsedAnswer:
        """The score; raises AnswerError with a hint about an answer that was cut off or is empty."""
        if not self.uses_logprobs and not answer.content.strip():
            hint = "; set enable_thinking: false, or raise max_tokens" if answer.reasoning else ""
            raise AnswerError("empty", f"the answer is empty{hint}")
        try:
            return self.read(answer)
        except AnswerError as error:
            cut = answer.finish_reason == "length" and not self.uses_logprobs
            hint = "; it was cut off, so raise max_tokens" if cut else ""
            quote = f", in {answer.content[-MAX_QUOTE:]!r}" if answer.content else ""
            raise AnswerError(error.kind, f"{error}{hint}{quote}", error.missing) from None

    @abstractmethod
    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        """The score of an answer that is not empty."""


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

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        found = {axis: self._find(axis, answer.text) for axis in self.axes}
        missing = [axis for axis, texts in found.items() if len(texts) != 1]
        if missing:
            raise AnswerError("missing", f"expected one line for each of {', '.join(missing)}", missing)
        values = {axis: read_number(texts[0], self.low, self.high, axis) for axis, texts in found.items()}
        mean = sum(values.values()) / len(values)
        return ParsedAnswer((mean - self.low) / (self.high - self.low), values)

    def _find(self, axis: str, text: str) -> list[str]:
        scale = r"(?:[ \t]*\([^)\n]*\))?"
        line = rf"^[ \t*\-]*{re.escape(axis)} score{scale}[ \t*]*:[ \t*]*({NUMBER})(?:[ \t]*/[ \t]*\d+)?[ \t*.]*$"
        return re.findall(line, text, re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class NumberAnswer(AnswerFormat):
    """One number that a regular expression with one group finds; the last match counts. From 0 to 1."""

    pattern: str = rf"Final Score:\s*\**\s*({NUMBER})(?![\d.]*\d)"
    low: float = 1.0
    high: float = 5.0

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        found = re.findall(self.pattern, answer.text)
        if not found:
            raise AnswerError("missing", f"nothing matches {self.pattern!r:.80}", ["score"])
        if not re.fullmatch(NUMBER, found[-1]):
            raise AnswerError("missing", f"{found[-1]!r:.40} is no number", ["score"])
        value = read_number(found[-1], self.low, self.high, "the score")
        return ParsedAnswer((value - self.low) / (self.high - self.low), {"score": value})


@dataclass(frozen=True)
class PairShares(AnswerFormat):
    """Blocks of `Alignment Score:`, ` Image 1: 0.4`, ` Image 2: 0.6`; the mean share of the first, after division
    of each pair by its sum."""

    axes: tuple[str, ...]
    noun: str = "Image"

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        values: dict[str, tuple[float, float]] = {}
        for axis in self.axes:
            lines = "".join(rf"\s*{self.noun} {i}[ \t*]*:[ \t*]*({NUMBER})[ \t*]*(?:\n|$)" for i in (1, 2))
            found = re.findall(rf"^[ \t*]*{axis} score[ \t*]*:[ \t*]*\n{lines}", answer.text, re.I | re.M)
            if len(found) == 1:
                first, second = (read_number(text, 0, 1, axis) for text in found[0])
                if first + second <= 0:
                    raise AnswerError("range", f"both shares of {axis} are 0")
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
        found = re.findall(r"<answer>(.*?)</answer>", answer.text, re.DOTALL)
        winner = re.fullmatch(rf"\s*{self.noun} ([12]) is better\.?\s*", found[-1]) if found else None
        if not winner:
            raise AnswerError("no answer", f"expected <answer>{self.noun} 1 is better</answer> or 2")
        parts: dict[str, Any] = {"winner": int(winner[1])}
        lines = [rf"{self.noun} {i}:[^\n]*?=\s*({NUMBER})" for i in (1, 2)]
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
        tie = re.search(rf"\b(?:both|{self.noun}s?)\b[^.\n]*\bequally good", text, re.IGNORECASE)
        if len(found) + bool(tie) != 1:
            raise AnswerError("no answer", f"expected '{self.noun} 1 is better' or 2, once")
        winner = int(found.pop()) if found else 0
        return ParsedAnswer({0: 0.5, 1: 1.0, 2: 0.0}[winner], {"winner": winner})


@dataclass(frozen=True)
class PairScores(AnswerFormat):
    """Two scores in prose, of the first and of the second image, possibly negative; the higher one wins."""

    noun: str = "image"

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        text = re.sub(rf"(?:edited\s+)?{self.noun}\s*[12]\b", " ", answer.text, flags=re.IGNORECASE)
        numbers = [float(number) for number in re.findall(rf"(?<![\w.]){NUMBER}(?![\w]|\.\d)", text)]
        if len(numbers) != 2:
            raise AnswerError("missing", f"expected two scores, found {len(numbers)} numbers", ["scores"])
        first, second = numbers
        return ParsedAnswer(((first > second) + (first >= second)) / 2, {"scores": numbers})


@dataclass(frozen=True)
class JsonWinner(AnswerFormat):
    """A JSON object with `winner: "Image 1"` and the winners of categories."""

    noun: str = "Image"

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        value = read_json_object(answer.text)
        winner = self._winner(value.get("winner"))
        categories = value.get("categories")
        entries = [each for each in categories if isinstance(each, dict)] if isinstance(categories, list) else []
        parts = {"winner": winner, "category_winners": [self._winner(each.get("cat_winner")) for each in entries]}
        return ParsedAnswer(float(winner == 1), parts)

    def _winner(self, text: object) -> int:
        found = re.fullmatch(rf"\s*{self.noun} ([12])\s*", text) if isinstance(text, str) else None
        if not found:
            raise AnswerError("missing", f"expected a winner '{self.noun} 1' or 2, got {text!r:.40}", ["winner"])
        return int(found[1])


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
            lists = re.findall(rf'"score"\s*:\s*\[((?:\s*{NUMBER}\s*,?)*)\s*\]', answer.text)
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
        body = re.search(r"^# Detailed Judgement\s*$(.*?)^# Summary:", text, re.DOTALL | re.MULTILINE)
        names = [name for name, _ in self.headings]
        if not body:
            raise AnswerError("missing", "expected '# Detailed Judgement' and then '# Summary:'", names)
        sections = self._split(body[1])
        missing = [name for name in names if name not in sections]
        values: dict[str, float | None] = {}
        for name in [name for name in names if name in sections]:
            lines = re.findall(r"^[ \t]*## Score:[ \t]*(.*?)[ \t]*$", sections[name], re.MULTILINE)
            score = re.fullmatch(rf"({NUMBER})(?:\s*/\s*4(?:\.0)?)?|n/?a\.?", "".join(lines[:1]), re.IGNORECASE)
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
            for match in re.finditer(rf"^[ \t]*\d+\.[ \t]*{heading}[ \t]*:?[ \t]*$", body, re.I | re.MULTILINE)
        ]
        heads.sort()
        ends = [start for start, _, _ in heads[1:]] + [len(body)]
        once = {name for _, _, name in heads if sum(other == name for _, _, other in heads) == 1}
        return {name: body[at:end] for (_, at, name), end in zip(heads, ends, strict=True) if name in once}


@dataclass(frozen=True)
class YesNoProbability(AnswerFormat):
    """The probability of yes from the log-probabilities of the first token, in any spelling.

    Against no, or with `full_softmax` among all tokens, where yes may miss in the list only if it is improbable.
    """

    full_softmax: bool = False
    uses_logprobs = True

    def read(self, answer: JudgeAnswer) -> ParsedAnswer:
        tokens = require_logprobs(answer)
        yes, no = (sum(math.exp(p) for t, p in tokens if t.strip().lower() == word) for word in ("yes", "no"))
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
    """Tokens and log-probabilities at the first position of an answer."""
    if answer.top_logprobs is None:
        raise AnswerError(
            "no logprobs", "the answer has no log-probabilities; use an endpoint with logprobs, or yes_no_text"
        )
    return answer.top_logprobs
