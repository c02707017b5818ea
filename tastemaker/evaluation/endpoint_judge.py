"""A judge of benchmarks behind an OpenAI-compatible chat-completions endpoint (vLLM, SGLang, a vendor)."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from ..core.reward import RewardError
from ..data.image_io import to_uint8
from ..rewards.judge_answers import MIN_COVERED, AnswerError, JudgeAnswer, require_logprobs
from ..rewards.openai_judge import RETRY_TEMPERATURE, AnswerTally, OpenaiJudgeReward, encode_data_url
from ..serving.chat_client import AbandonedRequest, EndpointPool, JudgeBudget
from ..serving.judge_usage import UsageFiles
from ..vlm.question_judge import JudgeQuestion, QuestionJudge, Spellings

T = TypeVar("T")
WORD_TOKENS = 16  # of an answer in one word
LOGPROBS = {"logprobs": True, "top_logprobs": 20}  # the most that vLLM and OpenAI return
SEED_STEP = 1_000_003  # between attempts at the same question
SPACES = str.maketrans({"\u0120": " ", "\u2581": " "})  # how byte-level and sentencepiece tokens spell a space


@dataclass(frozen=True)
class JudgeEndpoint:
    """Where a judge answers, and what its answers may take. The settings mean what they do in `openai_judge`."""

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)  # several share the load
    model: str = ""  # name on the server; by default the only one that it serves
    api_key_env: str = ""  # name of the environment variable that holds the API key
    answers: Literal["logprobs", "text"] = "logprobs"  # of questions with one word; text: 1 for the word, else 0
    concurrency: PositiveInt = 8
    timeout: PositiveFloat = 180.0
    max_retries: NonNegativeInt = 5
    retry_delay: NonNegativeFloat = 0.5
    retry_budget: NonNegativeFloat = 300.0
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    image_format: Literal["png", "jpeg95"] = "png"
    enable_thinking: bool | None = None
    budget: JudgeBudget = field(default_factory=JudgeBudget)

    def __post_init__(self) -> None:
        self.reward()  # checks the addresses and the name of the variable

    def reward(self) -> OpenaiJudgeReward:
        """The reward with the same connection."""
        return OpenaiJudgeReward(
            urls=self.urls, model=self.model, api_key_env=self.api_key_env, concurrency=self.concurrency,
            timeout=self.timeout, max_retries=self.max_retries, retry_delay=self.retry_delay,
            retry_budget=self.retry_budget, max_bad_share=self.max_bad_share, image_format=self.image_format,
            enable_thinking=self.enable_thinking, budget=self.budget,
        )  # fmt: skip

    def load(self, directory: Path | None = None) -> EndpointQuestionJudge:
        """Connect. The spent budget is kept in `directory`, so that an evaluation that resumes goes on counting."""
        pool, model = self.reward().connect()
        if directory is not None:
            pool.usage.keep_in(UsageFiles(directory, f"evaluation {model}"))
        return EndpointQuestionJudge(self, pool, model)


class EndpointQuestionJudge(QuestionJudge):
    """Asks an endpoint: probabilities from the log-probabilities of the first token, texts from messages.

    An endpoint returns the likeliest tokens only, so the probability of others counts as 0.
    """

    deterministic = False  # an answer that cannot be parsed is asked for again, at another temperature and seed

    def __init__(self, settings: JudgeEndpoint, pool: EndpointPool, model: str) -> None:
        super().__init__(describe_judge(model, settings))
        self.settings, self.pool, self.model = settings, pool, model
        self.tally = AnswerTally(settings.max_bad_share)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge")

    def probabilities(
        self, pixels: Tensor, texts: Sequence[str], answers: Sequence[tuple[Spellings, ...]]
    ) -> list[tuple[float, ...]]:
        questions = [JudgeQuestion(i, *each) for i, each in enumerate(zip(texts, answers, strict=True))]
        return self.ask_probabilities(pixels, questions)

    def texts(self, pixels: Tensor, texts: Sequence[str], max_new_tokens: int) -> list[str]:
        return self.ask_texts(pixels, [JudgeQuestion(i, text) for i, text in enumerate(texts)], max_new_tokens)

    def ask_probabilities(self, pixels: Tensor, questions: Sequence[JudgeQuestion]) -> list[tuple[float, ...]]:
        """Probabilities of the answers to several questions about images [N, 3, H, W], several at the same time."""
        in_words = self.settings.answers == "text"
        options = {"max_tokens": WORD_TOKENS} if in_words else {"max_tokens": 1, **LOGPROBS}

        def parse(question: JudgeQuestion, answer: JudgeAnswer) -> tuple[float, ...]:
            if in_words:
                return match_word(answer.text, question.answers)
            return sum_logprobs(answer, question.answers)

        found = self._ask_all(pixels, questions, options, 0, parse)
        for question, each in zip(questions, found, strict=True):
            if len(question.answers) > 1:  # together they should be likely
                unclear = sum(each) < MIN_COVERED
                self.tally.count_answer(f"none of {describe(question.answers)}" if unclear else "")
        return found

    def ask_texts(
        self, pixels: Tensor, questions: Sequence[JudgeQuestion], max_new_tokens: int, attempt: int = 0
    ) -> list[str]:
        """Texts that answer several questions about images [N, 3, H, W], several at the same time."""
        options = {"max_tokens": max_new_tokens}
        return self._ask_all(pixels, questions, options, attempt, lambda question, answer: answer.text)

    def _ask_all(
        self,
        pixels: Tensor,
        questions: Sequence[JudgeQuestion],
        options: Mapping[str, Any],
        attempt: int,
        parse: Callable[[JudgeQuestion, JudgeAnswer], T],
    ) -> list[T]:
        """Answers in the order of the questions. The first failure ends the other requests."""
        images = to_uint8(pixels)
        urls = self._threads.map(lambda i: encode_data_url(images[i], self.settings.image_format), range(len(images)))
        encoded, failed = list(urls), threading.Event()

        def ask(question: JudgeQuestion) -> T:
            body = self._build_body(question, encoded[question.image], options, attempt)
            try:
                return parse(question, JudgeAnswer.from_response(self.pool.request(json.dumps(body).encode(), failed)))
            except BaseException:
                failed.set()
                raise

        futures = [self._threads.submit(ask, question) for question in questions]
        done, running = wait(futures, return_when=FIRST_EXCEPTION)
        for future in running:  # only after a failure
            future.cancel()
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, AbandonedRequest):
                raise error
        return [future.result() for future in futures]

    def _build_body(
        self, question: JudgeQuestion, image: str, options: Mapping[str, Any], attempt: int
    ) -> dict[str, Any]:
        """The JSON of a request; a first attempt does not sample, later ones do."""
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question.text}]
        content = parts[::-1] if question.text_first else parts
        messages = [{"role": "system", "content": question.system}] if question.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": content}],
            "temperature": RETRY_TEMPERATURE if attempt else 0.0,
            "seed": SEED_STEP * attempt,
            **options,
        }
        if self.settings.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.settings.enable_thinking}
        return body


def describe_judge(model: str, settings: JudgeEndpoint) -> str:
    """The model, and the settings that its answers depend on."""
    parts = [f"{model} at an endpoint"]
    parts += ["answers as text"] if settings.answers == "text" else []
    parts += ["jpeg95"] if settings.image_format == "jpeg95" else []
    parts += [f"enable_thinking {settings.enable_thinking}"] if settings.enable_thinking is not None else []
    return ", ".join(parts)


def describe(answers: Sequence[Spellings]) -> str:
    return " and ".join(repr(spellings[0]) for spellings in answers)


def sum_logprobs(answer: JudgeAnswer, answers: Sequence[Spellings]) -> tuple[float, ...]:
    """Probability of each answer: the sum over the listed first tokens that spell it."""
    try:
        likely = require_logprobs(answer)
    except AnswerError as error:
        problem = str(error).partition(";")[0]
        raise RewardError(
            f"--judge: {problem}; start the endpoint with logprobs, or set 'endpoint: {{answers: text}}' [TM2306]"
        ) from error
    tokens = [(token.translate(SPACES), logprob) for token, logprob in likely]
    sums = [sum(math.exp(logprob) for token, logprob in tokens if token in spellings) for spellings in answers]
    return tuple(min(each, 1.0) for each in sums)


def match_word(text: str, answers: Sequence[Spellings]) -> tuple[float, ...]:
    """1 for the answers that the first word of a text spells, 0 for the others."""
    word = re.match(r"\W*(\w+)", text)
    first = word[1].lower() if word else ""
    return tuple(float(first in {spelling.strip().lower() for spelling in spellings}) for spellings in answers)
