"""Scorers that ask a judge: GenEval 2 (Soft-TIFA), DPG-Bench, WISE, UniGenBench++ and T2I-CompBench; and OCR."""

from __future__ import annotations

import ast
import hashlib
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.safe_files import read_text
from ..core.types import Metadata, Prompts
from ..rewards.ocr import OcrEngine, StubOcrEngine, normalize_text, text_similarity
from ..vlm.question_judge import NO, YES, JudgeQuestion, QuestionJudge, Spellings
from .benchmark_files import NUMBERS, is_count, primary_dimension, read_unigenbench_texts
from .benchmarks import Benchmark
from .evaluate import BenchmarkScorer
from .metrics import BOOTSTRAP_DRAWS, IntervalDict, interval_of_draws, question_intervals

T = TypeVar("T")

GENEVAL2_QUESTION = "{question} Answer in one word."
YES_NO_QUESTION = "{question} Answer yes or no."
PHRASE_QUESTION = "Does the image show {question}? Answer yes or no."
# Our own words: the published text has no license. Give it as a file with `--judge '{template: FILE}'`.
WISE_QUESTION = """An image was generated for this prompt: "{prompt}"
A correct image shows this: "{explanation}"
Does the image show it, clearly enough to tell, and without deformations that hide it? Beauty and style do not count.
Answer with one line and nothing else: "Score: 1" if it does, "Score: 0" if it does not or if you are in doubt."""
WISE_TOKENS, UNIGENBENCH_TOKENS, ATTEMPTS = 500, 4096, 3
WISE_SCORE = re.compile(r"score[\s*_]{0,4}:[\s*_]{0,4}([01])(?![\d/]|\.\d)", re.IGNORECASE)  # also bold
WISE_LINE = re.compile(r"^[ \t*_]*([01])[ \t*_.]*$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{(prompt|explanation|question|testpoint|test_explanation)\}")
OCR_SIZE = 256  # pixels; smaller images are enlarged to it
MAX_LIST = 20_000  # characters of a list in an answer


class QuestionScorer(BenchmarkScorer):
    """Scores images, and videos by their middle frame, with the answers of a judge."""

    parts_name: ClassVar[str] = ""  # what `parts` groups questions by; empty without groups

    def __init__(self, judge: QuestionJudge) -> None:
        self.judge = judge

    @property
    def detector(self) -> str:
        return f"judge {self.judge.name}"

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        return self.score_images(pixels[:, pixels.shape[1] // 2].float(), metadata)

    @abstractmethod
    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        """Return the scores of images [B, 3, H, W], with `answers`: a dict for each question."""

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the judge, and the mean score of the questions of each part, such as a skill."""
        parts = [
            (row["index"], answer["part"], float(answer["score"]))
            for row in rows
            for answer in row["answers"]
            if self.parts_name
        ]
        tables = {self.parts_name: question_intervals(parts)} if parts else {}
        return {"judge": self.detector.removeprefix("judge "), **({"parts": tables} if tables else {})}

    def ask_yes_no(self, images: Tensor, texts: Sequence[Sequence[str]]) -> list[list[tuple[float, float]]]:
        """Return the probabilities of yes and no for the questions about each image."""
        questions = [JudgeQuestion(i, text, (YES, NO)) for i, each in enumerate(texts) for text in each]
        answers = iter(self.judge.ask_probabilities(images, questions))
        pairs = [[next(answers) for _ in each] for each in texts]
        return [[(yes, no) for yes, no in each] for each in pairs]

    def ask_until_parsed(
        self,
        images: Tensor,
        questions: Sequence[JudgeQuestion],
        parse: Callable[[int, str], T | None],
        max_new_tokens: int,
    ) -> list[tuple[str, T | None]]:
        """Answers as text with what `parse(question number, text)` finds in them; others are asked for again."""
        texts = self.judge.ask_texts(images, questions, max_new_tokens)
        parsed = [parse(i, text) for i, text in enumerate(texts)]
        for attempt in range(1, 1 if self.judge.deterministic else ATTEMPTS):
            if unparsed := [i for i, value in enumerate(parsed) if value is None]:
                again = self.judge.ask_texts(images, [questions[i] for i in unparsed], max_new_tokens, attempt)
                for i, text in zip(unparsed, again, strict=True):
                    texts[i], parsed[i] = text, parse(i, text)
        return list(zip(texts, parsed, strict=True))


class GenEval2Scorer(QuestionScorer):
    """Soft-TIFA: the probabilities of the expected answers, averaged arithmetically (am) and geometrically (gm)."""

    parts_name = "skill"

    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        questions = [
            JudgeQuestion(i, fill_template(GENEVAL2_QUESTION, question=question), (spell_answer(question, answer),))
            for i, requested in enumerate(metadata)
            for question, answer in requested["vqa_list"]
        ]
        probabilities = iter(self.judge.ask_probabilities(images, questions))
        rows = []
        for requested in metadata:
            answers = [
                {"question": question, "expected": answer, "score": next(probabilities)[0], "part": skill}
                for (question, answer), skill in zip(requested["vqa_list"], requested["skills"], strict=True)
            ]
            scores = [answer["score"] for answer in answers]
            rows.append({"am": sum(scores) / len(scores), "gm": geometric_mean(scores), "answers": answers})
        return rows


def spell_answer(question: str, answer: str) -> Spellings:
    """Return the spellings of an expected answer: of a number as word and digit, else of yes."""
    if not is_count(question):
        return YES
    word = answer.lower()
    forms = (word, word.capitalize(), str(NUMBERS.index(word)))
    return (*forms, *(f" {form}" for form in forms))


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean, which is 0 if one value is."""
    if min(values) <= 0:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))


class DpgScorer(QuestionScorer):
    """The share of questions answered with yes, where a question whose parent was answered with no counts as no."""

    parts_name = "category"

    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        texts = [[fill_template(YES_NO_QUESTION, **each) for each in requested["questions"]] for requested in metadata]
        rows = []
        for requested, pairs in zip(metadata, self.ask_yes_no(images, texts), strict=True):
            questions = requested["questions"]
            said = {each["id"]: float(yes > no) for each, (yes, no) in zip(questions, pairs, strict=True)}
            scores = require_parents(said, {each["id"]: each["parents"] for each in questions})
            answers = [
                {
                    "question": each["question"],
                    "expected": "yes",
                    "answer": "yes" if said[each["id"]] else "no",
                    "score": scores[each["id"]],
                    "part": each["category"],
                    "detail": each["detail"],
                }
                for each in questions
            ]
            rows.append({"dpg": sum(scores.values()) / len(scores), "answers": answers})
        return rows

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        summary = super().summarize(benchmark, rows)
        details = [(row["index"], each["detail"], float(each["score"])) for row in rows for each in row["answers"]]
        summary["parts"]["detail"] = question_intervals(details)
        return summary


def require_parents(scores: Mapping[int, float], parents: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Return the scores of questions, with 0 for those that depend on a question with 0, in the order of the file."""
    kept = dict(scores)
    for number, needed in parents.items():
        if any(kept[parent] == 0 for parent in needed):
            kept[number] = 0.0
    return kept


class WiseScorer(QuestionScorer):
    """0 or 1 by a judge that sees the prompt and its explanation. An answer that cannot be parsed counts as 0."""

    def __init__(self, judge: QuestionJudge, template: str = "", system: str = "") -> None:
        super().__init__(judge)
        self.template, self.system = read_template(Path(template)) if template else WISE_QUESTION, system
        digest = hashlib.sha256(f"{system}{self.template}".encode()).hexdigest()[:8]
        self.question_name = f"{Path(template).name} {digest}" if template else "of the package"

    @property
    def detector(self) -> str:
        return f"{super().detector}, question {self.question_name}"

    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        texts = [fill_template(self.template, **pick(each, "prompt", "explanation")) for each in metadata]
        questions = [JudgeQuestion(i, text, (), self.system, text_first=True) for i, text in enumerate(texts)]
        answered = self.ask_until_parsed(images, questions, lambda _, text: parse_wise_score(text), WISE_TOKENS)
        rows = []
        for (text, score), requested in zip(answered, metadata, strict=True):
            answer = {"question": requested["explanation"], "expected": "Score: 1", "answer": text}
            answers = [{**answer, "score": score or 0.0, "part": ""}]
            rows.append({"correct": score or 0.0, "parsed": float(score is not None), "answers": answers})
        return rows

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        missing = [tag for tag, _ in benchmark.tag_weights if tag not in benchmark.tags]
        return {**super().summarize(benchmark, rows), **count_unparsed(rows), "missing_categories": missing}


def pick(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def count_unparsed(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {"unparsed": sum(not row["parsed"] for row in rows)}


def parse_wise_score(text: str) -> float | None:
    """Return the last `Score: 0` or `Score: 1` of an answer, else a line that is only 0 or 1; None without either."""
    found = WISE_SCORE.findall(text) or WISE_LINE.findall(text)
    return float(found[-1]) if found else None


def read_template(path: Path) -> str:
    """Read a question to the judge, which must name the prompt and the explanation."""
    text = read_text(path)
    for name in ("{prompt}", "{explanation}"):
        if name not in text:
            raise ConfigError(
                f"--judge: the template {path} does not contain {name}; write where the prompt and the explanation "
                "stand [TM2171]"
            )
    return text


class UniGenBenchScorer(QuestionScorer):
    """0 or 1 for each testpoint of a prompt, from one answer. An answer that cannot be parsed counts as 0 for all.

    `dimensions` is the mean over primary dimensions, such as Style, of the share of their testpoints that are met.
    """

    parts_name = "testpoint"

    def __init__(self, judge: QuestionJudge) -> None:
        super().__init__(judge)
        self.template = str(read_unigenbench_texts()["question"])

    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        questions = [JudgeQuestion(i, describe_testpoints(self.template, each)) for i, each in enumerate(metadata)]
        counts = [len(each["testpoints"]) for each in metadata]
        answered = self.ask_until_parsed(
            images, questions, lambda i, text: parse_testpoint_scores(text, counts[i]), UNIGENBENCH_TOKENS
        )
        rows = []
        for (text, found), requested in zip(answered, metadata, strict=True):
            scores = found or [0.0] * len(requested["testpoints"])
            answers = [
                {"question": description, "expected": "1", "answer": text, "score": score, "part": point}
                for point, description, score in zip(
                    requested["testpoints"], requested["descriptions"], scores, strict=True
                )
            ]
            points = [(primary_dimension(each["part"]), each["score"]) for each in answers]
            row = {"met": sum(scores) / len(scores), "dimensions": mean_over_dimensions(points)}
            rows.append({**row, "parsed": float(found is not None), "answers": answers})
        return rows

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        points = [
            (row["index"], primary_dimension(each["part"]), float(each["score"]))
            for row in rows
            for each in row["answers"]
        ]
        summary = {**super().summarize(benchmark, rows), **count_unparsed(rows)}
        summary["parts"]["dimension"] = question_intervals(points)
        return {**summary, "scores": {"dimensions": {"overall": dimension_interval(points)}}}


def describe_testpoints(template: str, requested: Metadata) -> str:
    """The published question about a prompt and its testpoints."""
    explanations: Mapping[str, str] = read_unigenbench_texts()["explanations"]
    points, descriptions = requested["testpoints"], requested["descriptions"]
    definitions = "".join(f"\n{point}: {explanations[point]}" for point in points)
    details = "".join(f"\n{point}: {text}" for point, text in zip(points, descriptions, strict=True))
    values = {
        "prompt": requested["prompt"],
        "testpoint": str(list(points)),
        "explanation": f"Checkpoints Defination:\u300c{definitions}\n\u300d",  # spelled as published
        "test_explanation": f"Checkpoints Description:\u300c{details}\n\u300d",
    }
    return fill_template(template, **values)


def parse_testpoint_scores(text: str, count: int) -> list[float] | None:
    """Return the scores of `<analysis>[...]</analysis><score>[1, 0]</score>`; None unless both have `count` entries."""
    lists: list[Any] = []
    for name in ("analysis", "score"):
        _, _, rest = text.partition(f"<{name}>")
        found, end, _ = rest.partition(f"</{name}>")
        try:
            lists.append(ast.literal_eval(found.strip()) if end and len(found) < MAX_LIST else None)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            lists.append(None)
    if not all(isinstance(each, list) and len(each) == count for each in lists):
        return None
    scores = [float(x) for x in lists[1] if type(x) is int and x in (0, 1)]
    return scores if len(scores) == count else None


def mean_over_dimensions(points: Sequence[tuple[str, float]]) -> float:
    """Mean over dimensions of their mean scores, given dimension and score of every testpoint."""
    names = dict.fromkeys(name for name, _ in points)
    means = [[score for other, score in points if other == name] for name in names]
    return sum(sum(scores) / len(scores) for scores in means) / len(means)


def dimension_interval(points: Sequence[tuple[int, str, float]], draws: int = BOOTSTRAP_DRAWS) -> IntervalDict:
    """Mean over dimensions of their mean scores over all testpoints, given prompt, dimension and score of each.

    Prompts are resampled for the interval; a draw without any testpoint of a dimension is left out.
    """
    prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt for prompt, _, _ in points))}
    names = {name: i for i, name in enumerate(dict.fromkeys(name for _, name, _ in points))}
    sums, counts = torch.zeros(2, len(prompts), len(names), dtype=torch.float64)
    for prompt, name, score in points:
        sums[prompts[prompt], names[name]] += score
        counts[prompts[prompt], names[name]] += 1
    chosen = torch.randint(len(prompts), (draws, len(prompts)), generator=torch.Generator().manual_seed(0))
    means = (sums[chosen].sum(1) / counts[chosen].sum(1)).mean(1)
    return interval_of_draws((sums.sum(0) / counts.sum(0)).mean(), means[~means.isnan()], len(prompts))


def fill_template(template: str, **values: Any) -> str:
    """Replace placeholders in one pass, so that a prompt with braces stays as it is."""
    return PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), template)


class CompBenchScorer(QuestionScorer):
    """The product over noun phrases of the probability of yes against no (BLIP-VQA of T2I-CompBench)."""

    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        template = "{question}?" if self.judge.short_questions else PHRASE_QUESTION
        texts = [[fill_template(template, question=phrase) for phrase in each["phrases"]] for each in metadata]
        rows = []
        for requested, pairs in zip(metadata, self.ask_yes_no(images, texts), strict=True):
            scores = [yes / max(yes + no, 1e-12) for yes, no in pairs]
            answers = [
                {"question": f"{phrase}?", "expected": "yes", "score": score, "part": ""}
                for phrase, score in zip(requested["phrases"], scores, strict=True)
            ]
            rows.append({"vqa": math.prod(scores), "answers": answers})
        return rows


@dataclass(frozen=True)
class OcrBenchmarkScorer(BenchmarkScorer):
    """Scores rendered text: whether exactly it was read, whether it is among the text, its similarity and its words."""

    engine: OcrEngine | StubOcrEngine

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        rows = []
        images = pixels[:, pixels.shape[1] // 2]
        for read, requested in zip(self.engine.read(images, OCR_SIZE), metadata, strict=True):
            expected = normalize_text(requested["text"])
            words = [word in read for word in map(normalize_text, requested["text"].split())]
            similarity = text_similarity(read, expected)
            answer = {"question": "text", "expected": requested["text"], "answer": read, "score": similarity}
            rows.append(
                {
                    "exact": float(read == expected),
                    "contains": float(expected in read),
                    "similarity": similarity,
                    "words": sum(words) / len(words),
                    "answers": [answer],
                }
            )
        return rows
