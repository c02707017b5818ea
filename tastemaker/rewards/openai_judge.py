"""A judge behind an OpenAI-compatible chat-completions endpoint (vLLM, SGLang, a vendor), for samples and for pairs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import torch
from numpy import uint8
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Modality, PairwiseReward, Reward, RewardCard, RewardError, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import to_uint8
from ..serving.chat_client import AbandonedRequest, ChatClient, EndpointPool, JudgeBudget, list_models
from ..serving.judge_usage import UsageFiles
from .cached import ScoreCache
from .color import BrightnessReward
from .judge_answers import AnswerError, JudgeAnswer
from .judge_templates import JudgeTemplate, Question, fill_placeholders, load_template
from .reference_images import reference_images

DEFAULT_TEMPLATE = "unifiedreward_point"
DEFAULT_RANGE = "0 to 1"  # of the default template: `tastemaker list` reads it without importing templates
TINY = "http://tiny"  # computed in this process
RECENT_ANSWERS = 200  # of which the share of bad ones is limited
MIN_ANSWERS = 20  # before the share counts
RETRY_TEMPERATURE = 0.7  # of a question that is asked again: at 0 the same text would return
MAX_CACHE_ENTRIES = 10_000_000
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Frame = NDArray[uint8]  # [H, W, 3]


@dataclass(frozen=True)
class OpenaiJudgeReward(RewardSpec):
    """Asks a vision-language model behind a chat-completions endpoint about images, videos, edits or pairs.

    `template` is `unifiedreward_point`, `unifiedreward_pair`, `editscore`, `rationalrewards`, `yes_no`, another name of
    docs/openai-judge.md, or the path of your own .yaml file. Templates of pairs belong into `win_rate`.
    """

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)  # several share the load; a base URL such as .../v1 is fine
    model: str = ""  # name on the server; by default the only one that it serves
    template: str = DEFAULT_TEMPLATE
    api_key_env: str = ""  # name of the environment variable that holds the API key
    concurrency: PositiveInt = 8  # requests under way at the same time
    timeout: PositiveFloat = 180.0  # seconds for a whole answer
    max_retries: NonNegativeInt = 5  # after connection errors, timeouts, cut-off answers, 408, 429, 500, 502, 503, 504
    retry_delay: NonNegativeFloat = 0.5  # seconds before the first retry, doubled each time up to 30, with jitter
    retry_budget: NonNegativeFloat = 300.0  # seconds from the first failure of a request to its last retry
    parse_retries: NonNegativeInt = 2  # of a question whose answer holds no score, at temperature 0.7
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.2  # of the last 200 answers without a score; then it stops
    on_failure: float | None = None  # score of a sample whose answers hold none; by default the run stops
    passes: PositiveInt = 1  # questions about each sample with different seeds, averaged
    frames: PositiveInt = 8  # of a video that the judge sees
    image_format: Literal["png", "jpeg95"] = "png"
    temperature: NonNegativeFloat | None = None  # by default the template's
    max_tokens: PositiveInt | None = None  # by default the template's
    enable_thinking: bool | None = None  # sent as chat_template_kwargs; by default not sent
    cache: Path | None = None  # directory of scores by template, model and image, for all runs and processes
    budget: JudgeBudget = field(default_factory=JudgeBudget)
    batch_size: BatchSize = 64
    runs_on: ClassVar[Literal["remote"]] = "remote"

    def __post_init__(self) -> None:
        load_template(self.template)
        for url in self.urls or ("",):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"'urls': expected addresses such as http://127.0.0.1:8000, got {url!r:.60}; correct 'urls' "
                    "[TM2020]"
                )
            if parts.username or parts.password or parts.query:
                raise ValueError(
                    f"'urls': the address of {parts.hostname} holds a user or a query, which would be logged; put the "
                    "key into an environment variable and name it in 'api_key_env' [TM2021]"
                )
        if self.api_key_env and not VARIABLE.fullmatch(self.api_key_env):
            raise ValueError(  # without the value, which may be a key
                "'api_key_env': expected the name of an environment variable, such as OPENAI_API_KEY, not the key "
                "itself; set the variable and write its name [TM2022]"
            )
        if self.on_failure is not None and not math.isfinite(self.on_failure):
            raise ValueError("'on_failure': expected a finite number; set it to a score of the judge's range [TM2023]")
        if self.compares_pairs and self.on_failure is not None and not 0 <= self.on_failure <= 1:
            raise ValueError("'on_failure': expected 0 to 1 for a pair; set 0.5, a tie [TM2024]")

    @property
    def judge_template(self) -> JudgeTemplate:
        return load_template(self.template)

    @property
    def modality(self) -> Modality:
        return "image" if self.template == DEFAULT_TEMPLATE else self.judge_template.modality

    @property
    def compares_pairs(self) -> bool:
        return self.template != DEFAULT_TEMPLATE and self.judge_template.pairwise

    @property
    def card(self) -> RewardCard:
        failure_modes = "the prompt or praise written into the image, collages; edits that change almost nothing"
        values = DEFAULT_RANGE if self.template == DEFAULT_TEMPLATE else self.judge_template.range
        return RewardCard(range=values, failure_modes=failure_modes, memory="the server's")

    def tiny(self) -> Self:
        return replace(self, urls=(TINY,), api_key_env="", cache=None)

    def load(self, placement: Placement) -> Reward:
        if self.urls == (TINY,):
            return BrightnessReward()
        pool, model = self.connect()
        judge = ChatJudge(self, model, pool)
        return ChatPairJudge(judge) if self.compares_pairs else ChatScorer(judge)

    def connect(self) -> tuple[EndpointPool, str]:
        """The endpoints, which answer, and the name of the model that all of them serve."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(
                "'api_key_env': the environment variable that it names is empty; set it to the key of the endpoint "
                "[TM2025]"
            )
        clients = [
            ChatClient(url, key.strip(), self.timeout, self.max_retries, self.retry_delay, self.retry_budget)
            for url in self.urls
        ]
        names = {client.url: list_models(client) for client in clients}
        return EndpointPool(clients, self.budget), self._choose_model(names)

    def _choose_model(self, names: Mapping[str, list[str] | None]) -> str:
        """The name of the model, which all endpoints must serve."""
        model = self.model
        for url, served in names.items():
            if not model and (served is None or len(served) != 1):
                raise ConfigError(
                    f"'model' is missing, and {url} serves {', '.join(served or ()) or 'an unknown list':.200}; name "
                    "one of its models [TM2026]"
                )
            model = model or (served or [""])[0]
            if served is not None and model not in served:
                raise ConfigError(
                    f"'model': {url} serves {', '.join(served) or 'nothing':.200}, not '{model:.80}'; correct 'model' "
                    "or 'urls' [TM2027]"
                )
        return model


class AnswerTally:
    """Counts of answers; stops a run whose judge cannot be understood. Safe for several threads."""

    def __init__(self, max_bad_share: float) -> None:
        self.max_bad_share, self._lock = max_bad_share, threading.Lock()
        self._recent: deque[bool] = deque(maxlen=RECENT_ANSWERS)  # whether answers were bad
        self.answers = self.bad = self.repaired = self.failed = self.cached = self.asked = 0  # since the last metrics

    def count_answer(self, problem: str = "", repaired: bool = False) -> None:
        """Count an answer; `problem` says why it holds no score. Raise if too many recent ones hold none."""
        with self._lock:
            self.answers, self.bad, self.repaired = self.answers + 1, self.bad + bool(problem), self.repaired + repaired
            self._recent.append(bool(problem))
            bad, total = sum(self._recent), len(self._recent)
        if problem and total >= MIN_ANSWERS and bad > self.max_bad_share * total:
            raise RewardError(
                f"{bad} of the last {total} answers of the judge hold no score, more than max_bad_share "
                f"({self.max_bad_share:g}); the last one: {problem:.400}. Check 'template' and 'model', or raise "
                "'max_tokens' [TM2030]"
            )

    def count_samples(self, *, asked: int = 0, cached: int = 0, failed: int = 0) -> None:
        with self._lock:
            self.asked, self.cached, self.failed = self.asked + asked, self.cached + cached, self.failed + failed

    def take(self) -> dict[str, float]:
        """Shares since the last call."""
        with self._lock:
            samples = max(1, self.asked + self.cached)
            shares = {
                "bad_answers": self.bad / max(1, self.answers),
                "repaired_answers": self.repaired / max(1, self.answers),
                "failed_samples": self.failed / samples,
                "cached_samples": self.cached / samples,
            }
            self.answers = self.bad = self.repaired = self.failed = self.cached = self.asked = 0
        return shares


@dataclass(frozen=True)
class JudgeCase:
    """What one score is about: named images, and values of placeholders."""

    images: dict[str, list[Frame]]
    values: dict[str, str]


class ChatJudge:
    """Asks a model about cases, several at the same time."""

    def __init__(self, spec: OpenaiJudgeReward, model: str, pool: EndpointPool) -> None:
        self.spec, self.model, self.pool, self.template = spec, model, pool, spec.judge_template
        sampling = self.template.sampling
        self.sampling = replace(
            sampling,
            temperature=sampling.temperature if spec.temperature is None else spec.temperature,
            max_tokens=spec.max_tokens or sampling.max_tokens,
        )
        self.tally = AnswerTally(spec.max_bad_share)
        self.cache = ScoreCache(spec.cache / "judge.sqlite", MAX_CACHE_ENTRIES) if spec.cache else None
        self._threads = ThreadPoolExecutor(spec.concurrency, thread_name_prefix="judge")
        settings = [self.template.fingerprint, model, repr(self.sampling), spec.passes, spec.image_format]
        self._identity = json.dumps([*settings, spec.enable_thinking])

    def judge(self, cases: Sequence[JudgeCase]) -> list[float]:
        """A score for each case: from the cache, or asked; equal cases are asked once."""
        keys = [self._key(case) for case in cases]
        scores = self.cache.get(keys) if self.cache else {}
        missing = {key: case for key, case in zip(keys, cases, strict=True) if key not in scores}
        self.tally.count_samples(asked=len(missing), cached=len(cases) - len(missing))
        failed = threading.Event()  # set by the first failure: the other threads need not go on
        futures = {self._threads.submit(self._judge_until, failed, key, case): key for key, case in missing.items()}
        done, running = wait(futures, return_when=FIRST_EXCEPTION)
        for future in running:  # only after a failure
            future.cancel()
        for future in done:
            scores[futures[future]] = future.result()
        return [scores[key] for key in keys]

    def _judge_until(self, failed: threading.Event, key: bytes, case: JudgeCase) -> float:
        """The score of a case; NaN, which nobody sees, after another one has failed."""
        try:
            return math.nan if failed.is_set() else self._judge_case(key, case, failed)
        except AbandonedRequest:
            return math.nan
        except BaseException:
            failed.set()
            raise

    def metrics(self) -> dict[str, float]:
        """Shares of bad answers and more since the last call; requests, tokens and cost since the start."""
        usage = self.pool.usage
        totals = {"requests": usage.requests, "retries": usage.retries, "tokens": usage.tokens, "cost": usage.cost}
        return {**self.tally.take(), **totals}

    def persist_in(self, directory: Path) -> None:
        """Count the budget over all processes and restarts of a run."""
        self.pool.usage.keep_in(UsageFiles(directory, f"{self.spec.template} {self.model}"))

    def _key(self, case: JudgeCase) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        shapes = {name: [frame.shape for frame in frames] for name, frames in case.images.items()}
        digest.update(json.dumps([self._identity, case.values, shapes], sort_keys=True).encode())
        for name in sorted(case.images):
            for frame in case.images[name]:
                digest.update(frame.data)
        return digest.digest()

    def _judge_case(self, key: bytes, case: JudgeCase, failed: threading.Event) -> float:
        encoded = {name: [encode_data_url(f, self.spec.image_format) for f in x] for name, x in case.images.items()}
        seed, scores = int.from_bytes(key[:3], "big"), []
        try:
            for number in range(self.spec.passes):
                first_seed = seed if self.sampling.seed is None else self.sampling.seed
                answers = [
                    self._ask(question, encoded, case.values, first_seed + number, failed)
                    for question in self.template.questions
                ]
                scores.append(self.template.combine_scores(answers))
        except AnswerError as error:
            if self.spec.on_failure is None:
                attempts = 1 + self.spec.parse_retries
                raise RewardError(
                    f"{attempts} answers of the judge hold no score ({error}); check 'template' and 'model', or set "
                    "'on_failure' to the score of such samples [TM2031]"
                ) from error
            self.tally.count_samples(failed=1)
            return self.spec.on_failure
        score = sum(scores) / len(scores)
        if self.cache:
            self.cache.put({key: score})
        return score

    def _ask(
        self,
        question: Question,
        images: Mapping[str, list[str]],
        values: Mapping[str, str],
        seed: int,
        failed: threading.Event,
    ) -> float:
        """The score of one question; an answer without one is asked for again, at another temperature and seed."""
        attempt = 0
        while True:
            body = self._build_body(question, images, values, seed, attempt)
            answer = JudgeAnswer.from_response(self.pool.request(json.dumps(body).encode(), failed))
            try:
                parsed = question.answer.parse(answer)
            except AnswerError as error:
                self.tally.count_answer(str(error))
                attempt += 1
                if attempt > self.spec.parse_retries:
                    raise
            else:
                self.tally.count_answer(repaired=parsed.repaired)
                return parsed.score

    def _build_body(
        self, question: Question, images: Mapping[str, list[str]], values: Mapping[str, str], seed: int, attempt: int
    ) -> dict[str, Any]:
        """The JSON of a request. Temperature 0 is written out: servers have defaults of their own."""
        content: list[dict[str, Any]] = []
        for part in question.parts:
            if part.image is None:
                content.append({"type": "text", "text": fill_placeholders(part.text, values, question.placeholders)})
            else:
                content += [{"type": "image_url", "image_url": {"url": url}} for url in images[part.image]]
        system = fill_placeholders(question.system, values, question.placeholders)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        sampling = self.sampling
        temperature = max(sampling.temperature, RETRY_TEMPERATURE) if attempt else sampling.temperature
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": content}],
            "temperature": temperature,
            "max_tokens": sampling.max_tokens,
            "seed": seed + 1_000_003 * attempt,
        }
        optional = {"top_p": sampling.top_p, "top_k": sampling.top_k}
        body |= {name: value for name, value in optional.items() if value is not None}
        body |= {"logprobs": True, "top_logprobs": 20} if question.answer.uses_logprobs else {}
        if self.spec.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.spec.enable_thinking}
        return body


def encode_data_url(image: Frame, image_format: Literal["png", "jpeg95"]) -> str:
    """An image [H, W, 3] as a data URL."""
    file, kind = BytesIO(), "png" if image_format == "png" else "jpeg"
    options = {"compress_level": 1} if kind == "png" else {"quality": 95}
    Image.fromarray(image).save(file, kind, **options)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"


def sample_frames(total: int, count: int, rule: Literal["floor", "linspace"]) -> list[int]:
    """Indices of `count` of `total` frames, in order; all of them if there are fewer."""
    count = min(count, total)
    if rule == "floor":
        return [i * total // count for i in range(count)]
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def select_frames(pixels: Tensor, spec: OpenaiJudgeReward) -> NDArray[uint8]:
    """The frames [F, H, W, 3] of a sample [F, 3, H, W] that the judge sees: several, or for images the middle one."""
    total, template = len(pixels), spec.judge_template
    video = template.modality == "video"
    return to_uint8(pixels[sample_frames(total, spec.frames, template.frame_sampling) if video else [total // 2]])


def text_values(prompt: str, metadata: Metadata) -> dict[str, str]:
    """Values of placeholders: the prompt, also as instruction, and the columns of the data that are text or numbers."""
    columns = {key: str(value) for key, value in metadata.items() if isinstance(value, (str, int, float))}
    return {"instruction": prompt, **columns, "prompt": prompt}


def source_images(prompt: str, metadata: Metadata) -> list[Frame]:
    """The image that was edited, or several, from the column `image` of the data: paths or pixels."""
    if metadata.get("image") is None:
        raise RewardError(
            f"this template shows the judge the image that was edited, but '{prompt:.80}' has no 'image'; use data of "
            "type edit_file, or another template [TM2032]"
        )
    return [to_uint8(image[None])[0] for image in reference_images("image", [prompt], [metadata])[0]]


def build_cases(
    spec: OpenaiJudgeReward, samples: Mapping[str, Tensor], prompts: Prompts, metadata: Sequence[Metadata]
) -> list[JudgeCase]:
    """One case for each row of the named samples [B, F, 3, H, W]."""
    template, cases = spec.judge_template, []
    for i, (prompt, entry) in enumerate(zip(prompts, metadata, strict=True)):
        images = {name: list(select_frames(pixels[i], spec)) for name, pixels in samples.items()}
        images |= {"source": source_images(prompt, entry)} if template.needs_source else {}
        cases.append(JudgeCase(images, choose_values(template, prompt, entry)))
    return cases


def choose_values(template: JudgeTemplate, prompt: str, metadata: Metadata) -> dict[str, str]:
    """The values of a template's placeholders; each must be a column of the data."""
    names = sorted({name for question in template.questions for name in question.placeholders})
    values = text_values(prompt, metadata)
    missing = [name for name in names if name not in values]
    if missing:
        raise RewardError(
            f"the template asks for {{{missing[0]:.60}}}, but the data of '{prompt:.80}' have only the columns "
            f"{', '.join(sorted(values)):.300}; correct the template, or add the column to the data [TM2060]"
        )
    return {name: values[name] for name in names}


class ChatScorer(Reward):
    """Scores of single samples."""

    def __init__(self, judge: ChatJudge) -> None:
        self.judge, self.version = judge, judge.model

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        cases = build_cases(self.judge.spec, {"sample": pixels}, prompts, metadata)
        return torch.tensor(self.judge.judge(cases), dtype=torch.float32, device=pixels.device)

    def metrics(self) -> dict[str, float]:
        return self.judge.metrics()

    def persist_in(self, directory: Path) -> None:
        self.judge.persist_in(directory)


class ChatPairJudge(PairwiseReward):
    """Comparisons of two samples, for `win_rate`."""

    def __init__(self, judge: ChatJudge) -> None:
        self.judge, self.version = judge, judge.model

    def compare(self, first: Tensor, second: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        cases = build_cases(self.judge.spec, {"first": first, "second": second}, prompts, metadata)
        return torch.tensor(self.judge.judge(cases), dtype=torch.float32, device=first.device)

    def metrics(self) -> dict[str, float]:
        return self.judge.metrics()

    def persist_in(self, directory: Path) -> None:
        self.judge.persist_in(directory)
