"""Scorers that ask a judge: GenEval 2 (Soft-TIFA), DPG-Bench, WISE and T2I-CompBench; and one that reads text (OCR)."""

from __future__ import annotations

import hashlib
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..core.registry import ConfigError
from ..core.safe_files import read_text
from ..core.types import Metadata, Prompts
from ..rewards.ocr import OcrEngine, StubOcrEngine, normalize_text, text_similarity
from ..vlm.question_judge import NO, YES, JudgeQuestion, QuestionJudge, Spellings
from .benchmark_files import NUMBERS, is_count
from .benchmarks import Benchmark
from .evaluate import BenchmarkScorer
from .metrics import question_intervals

GENEVAL2_QUESTION = "{question} Answer in one word."
YES_NO_QUESTION = "{question} Answer yes or no."
PHRASE_QUESTION = "Does the image show {question}? Answer yes or no."
# Our own words: the published text has no license. Give it as a file with `--judge '{template: FILE}'`.
WISE_QUESTION = """An image was generated for this prompt: "{prompt}"
A correct image shows this: "{explanation}"
Does the image show it, clearly enough to tell, and without deformations that hide it? Beauty and style do not count.
Answer with one line and nothing else: "Score: 1" if it does, "Score: 0" if it does not or if you are in doubt."""
WISE_TOKENS, WISE_ATTEMPTS = 500, 3
WISE_SCORE = re.compile(r"score[\s*_]{0,4}:[\s*_]{0,4}([01])(?![\d/]|\.\d)", re.IGNORECASE)  # also bold
WISE_LINE = re.compile(r"^[ \t*_]*([01])[ \t*_.]*$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{(prompt|explanation|question)\}")
OCR_SIZE = 256  # pixels; smaller images are enlarged to it


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

    def __init__(self, judge: QuestionJudge, template: str = "") -> None:
        super().__init__(judge)
        self.template = read_template(Path(template)) if template else WISE_QUESTION
        digest = hashlib.sha256(self.template.encode()).hexdigest()[:8]
        self.question_name = f"{Path(template).name} {digest}" if template else "of the package"

    @property
    def detector(self) -> str:
        return f"{super().detector}, question {self.question_name}"

    def score_images(self, images: Tensor, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        questions = [
            JudgeQuestion(i, fill_template(self.template, prompt=each["prompt"], explanation=each["explanation"]))
            for i, each in enumerate(metadata)
        ]
        texts = self.judge.ask_texts(images, questions, WISE_TOKENS)
        for _ in range(0 if self.judge.deterministic else WISE_ATTEMPTS - 1):
            if unparsed := [i for i, text in enumerate(texts) if parse_wise_score(text) is None]:
                again = self.judge.ask_texts(images, [questions[i] for i in unparsed], WISE_TOKENS)
                for i, text in zip(unparsed, again, strict=True):
                    texts[i] = text
        rows = []
        for text, requested in zip(texts, metadata, strict=True):
            score = parse_wise_score(text)
            answer = {"question": requested["explanation"], "expected": "Score: 1", "answer": text}
            answers = [{**answer, "score": score or 0.0, "part": ""}]
            rows.append({"correct": score or 0.0, "parsed": float(score is not None), "answers": answers})
        return rows

    def summarize(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        missing = [tag for tag, _ in benchmark.tag_weights if tag not in benchmark.tags]
        unparsed = sum(not row["parsed"] for row in rows)
        return {**super().summarize(benchmark, rows), "unparsed": unparsed, "missing_categories": missing}


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
