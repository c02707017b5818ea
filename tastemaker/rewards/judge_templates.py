"""What judges are asked: the published templates by name, and templates of your own from a YAML file.

The texts of published templates lie in judge_templates.json, letter for letter: their models were trained on them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ..core.registry import ConfigError
from ..core.reward import Modality
from ..core.safe_files import read_json_object, read_yaml_mapping
from .judge_answers import (
    AnswerFormat,
    AxisScores,
    DigitExpectation,
    JsonScores,
    JsonWinner,
    NumberAnswer,
    PairScores,
    PairShares,
    SectionScores,
    SentenceWinner,
    TaggedWinner,
    YesNoProbability,
    YesNoText,
)

TEXTS = Path(__file__).with_name("judge_templates.json")
SUFFIXES = (".yaml", ".yml")
ImageName = Literal["sample", "first", "second", "source"]
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)


@dataclass(frozen=True)
class MessagePart:
    """A text, or the place of an image (of all frames of a clip)."""

    text: str = ""
    image: ImageName | None = None


@dataclass(frozen=True)
class Question:
    """One request: its parts in order, and the format of its answer."""

    parts: tuple[MessagePart, ...]
    answer: AnswerFormat
    system: str = ""
    placeholders: tuple[str, ...] = ("prompt",)


@dataclass(frozen=True)
class Sampling:
    """Decoding settings of a template, which those of the reward override. None is not sent."""

    temperature: float = 0.0
    max_tokens: int = 512
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # of the first pass; by default a number that depends on the sample


@dataclass(frozen=True)
class JudgeTemplate:
    """The questions about a sample or a pair, and how their scores are combined."""

    questions: tuple[Question, ...]
    sampling: Sampling = field(default_factory=Sampling)
    combine: Literal["mean", "geometric_mean", "checklist"] = "mean"
    weights: tuple[float, ...] = ()  # of the questions of a checklist
    modality: Modality = "image"
    pairwise: bool = False
    frame_sampling: Literal["floor", "linspace"] = "floor"  # int(i T / n), or the first to the last frame
    range: str = "0 to 1"

    @property
    def needs_source(self) -> bool:
        """Whether the judge sees the image that was edited."""
        return any(part.image == "source" for question in self.questions for part in question.parts)

    def combine_scores(self, scores: Sequence[float]) -> float:
        """The score of a sample from those of its questions; of a checklist the mean of weight (2 p - 1)."""
        if self.combine == "geometric_mean":
            return math.prod(scores) ** (1 / len(scores))
        if self.combine == "checklist":
            scores = [weight * (2 * p - 1) for weight, p in zip(self.weights, scores, strict=True)]
        return sum(scores) / len(scores)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the template says."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


def fill_placeholders(text: str, values: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Replace {name} by its value, in one pass: braces in a value or elsewhere in the text stay as they are."""
    return PLACEHOLDER.sub(lambda m: values[m[1]] if m[1] in names else m[0], text)


@cache
def read_texts() -> dict[str, str]:
    """Published texts by name."""
    return {name: entry["text"] for name, entry in read_json_object(TEXTS).items()}


def _ask(key: str, answer: AnswerFormat, *images: ImageName, **settings: Any) -> Question:
    """Images, then the published text."""
    parts = (*(MessagePart(image=image) for image in images), MessagePart(read_texts()[key]))
    return Question(parts, answer, **settings)


def _unifiedreward_pair(key: str, answer: AnswerFormat, modality: Modality, **settings: Any) -> JudgeTemplate:
    return JudgeTemplate((_ask(key, answer, "first", "second"),), pairwise=True, modality=modality, **settings)


def _editscore() -> JudgeTemplate:
    system, source, sample = "You are a helpful assistant.", MessagePart(image="source"), MessagePart(image="sample")
    texts, first, second = read_texts(), MessagePart("<img1>: "), MessagePart("<img2>: ")
    consistency = Question(
        (first, source, second, sample, MessagePart(texts["editscore.sc25"])),
        JsonScores(("prompt_following", "consistency"), scale=0.4), system, ("instruction",),
    )  # fmt: skip
    quality = Question(
        (first, sample, MessagePart(texts["editscore.pq25"])),
        JsonScores(("naturalness", "artifacts"), scale=0.4), system, (),
    )  # fmt: skip
    sampling = Sampling(0.7, 512, top_p=0.9, top_k=20, seed=42)
    return JudgeTemplate((consistency, quality), sampling, "geometric_mean", range="0 to 10")


def _unifiedreward_edit() -> JudgeTemplate:
    following = JsonScores(("editing_success", "consistency"), reduce="mean", scale=1 / 25)
    quality = JsonScores(("naturalness", "artifacts"), reduce="mean", scale=1 / 25)
    names = {"placeholders": ("instruction",)}
    return JudgeTemplate(
        (
            _ask("unifiedreward_edit.point_instruction", following, "source", "sample", **names),
            _ask("unifiedreward_edit.point_quality", quality, "sample", **names),
        )
    )


def _unifiedreward_edit_pair(key: str, answer: AnswerFormat) -> JudgeTemplate:
    names = {"placeholders": ("instruction",)}
    return JudgeTemplate((_ask(key, answer, "source", "first", "second", **names),), LONG, pairwise=True)


ASPECTS = (
    ("text_faithfulness", "Text Faithfulness"),
    ("image_faithfulness", "Image Faithfulness"),
    ("physical_quality", "Physical and Visual Quality"),
    ("text_rendering", "Text Rendering"),
)


def _rationalrewards() -> JudgeTemplate:
    texts, key = read_texts(), "rationalrewards.t2i."
    parts = (
        MessagePart(texts[f"{key}before_image"]),
        MessagePart(image="sample"),
        MessagePart(texts[f"{key}after_image"]),
    )
    answer = SectionScores(tuple(aspect for aspect in ASPECTS if aspect[0] != "image_faithfulness"))
    return JudgeTemplate((Question(parts, answer, texts[f"{key}system"]),), Sampling(0.1, 2048))


def _rationalrewards_edit(counted: tuple[str, ...]) -> JudgeTemplate:
    texts, key = read_texts(), "rationalrewards.edit."
    parts = (
        MessagePart(texts[f"{key}before_source"]),
        MessagePart(image="source"),
        MessagePart(texts[f"{key}between"]),
        MessagePart(image="sample"),
        MessagePart(texts[f"{key}after_edited"]),
    )
    question = Question(parts, SectionScores(ASPECTS, counted), texts[f"{key}system"], ("instruction",))
    return JudgeTemplate((question,), Sampling(0.1, 2048))


IMAGE_AXES, VIDEO_AXES = ("alignment", "coherence", "style"), ("alignment", "physics", "style")
LONG, ONE_TOKEN = Sampling(max_tokens=4096), Sampling(max_tokens=1)
VIDEO_QUESTION = 'The images are frames of a video. Does it show "{prompt}"? Please answer Yes or No.'


@cache
def published_templates() -> dict[str, JudgeTemplate]:
    """Templates by name."""
    pair, edit_names = _unifiedreward_pair, {"placeholders": ("prompt", "requirement")}
    frames = MessagePart(image="sample")
    return {
        "unifiedreward_point": JudgeTemplate((_ask("unifiedreward2.point_image", AxisScores(IMAGE_AXES), "sample"),)),
        "unifiedreward_point_video": JudgeTemplate(
            (_ask("unifiedreward2.point_video", AxisScores(VIDEO_AXES), "sample"),), modality="video"
        ),
        "unifiedreward_pair": pair("unifiedreward2.pair_image", PairShares(IMAGE_AXES), "image"),
        "unifiedreward_pair_video": pair("unifiedreward2.pair_video", PairShares(IMAGE_AXES, "Video"), "video"),
        "unifiedreward_think_pair": pair("unifiedreward_think.pair_image", TaggedWinner(), "image", sampling=LONG),
        "unifiedreward_think_pair_video": pair(
            "unifiedreward_think.pair_video", TaggedWinner("Video"), "video", sampling=LONG, frame_sampling="linspace"
        ),
        "unifiedreward_flex_pair": pair("unifiedreward_flex.pair_image", JsonWinner(), "image", sampling=LONG),
        "unifiedreward_flex_pair_video": pair(
            "unifiedreward_flex.pair_video", JsonWinner("Video"), "video", sampling=LONG
        ),
        "unifiedreward_edit": _unifiedreward_edit(),
        "unifiedreward_edit_pair_rank": _unifiedreward_edit_pair("unifiedreward_edit.pair_rank", SentenceWinner()),
        "unifiedreward_edit_pair_score": _unifiedreward_edit_pair("unifiedreward_edit.pair_score", PairScores()),
        "unifiedreward1_point": JudgeTemplate((_ask("unifiedreward1.point_image", NumberAnswer(), "sample"),)),
        "editscore": _editscore(),
        "rationalrewards": _rationalrewards(),
        "rationalrewards_edit": _rationalrewards_edit(("text_faithfulness", "physical_quality", "text_rendering")),
        "rationalrewards_edit_all": _rationalrewards_edit(()),
        "yes_no": JudgeTemplate((_ask("vqascore.qwen", YesNoProbability(), "sample"),), ONE_TOKEN),
        "yes_no_text": JudgeTemplate((_ask("vqascore.qwen", YesNoText(), "sample"),), Sampling(max_tokens=16)),
        "yes_no_video": JudgeTemplate(
            (Question((frames, MessagePart(VIDEO_QUESTION)), YesNoProbability()),), ONE_TOKEN, modality="video"
        ),
        "vqascore": JudgeTemplate((_ask("vqascore.qwen", YesNoProbability(full_softmax=True), "sample"),), ONE_TOKEN),
        "edit_digits": JudgeTemplate(
            (_ask("edit_r1.score_logit", DigitExpectation(), "source", "sample", **edit_names),), ONE_TOKEN
        ),
    }  # fmt: skip


STRICT = ConfigDict(extra="forbid")
AnswerType = Literal["yes_no", "yes_no_text", "digits", "axes", "number", "winner"]
TYPES = frozenset(get_args(AnswerType))


@checked_dataclass(frozen=True, config=STRICT)
class AnswerSettings:
    """How a template of your own is answered: the settings of one format."""

    type: AnswerType
    axes: tuple[str, ...] = ()  # of `axes`: lines `NAME Score: 3`
    pattern: str = ""  # of `number`: a regular expression with one group
    low: float = 1.0
    high: float = 5.0

    def build(self) -> AnswerFormat:
        """The format; raises ValueError if a setting is missing."""
        if not self.low < self.high:
            raise ValueError("'low' must be less than 'high'; correct them [TM2003]")
        if self.type == "axes" and not self.axes:
            raise ValueError("'axes' is missing; name the lines that the judge answers [TM2004]")
        if self.type == "number" and (not self.pattern or re.compile(self.pattern).groups != 1):
            raise ValueError(
                "'pattern' must be a regular expression with one group; put the group around the number [TM2005]"
            )
        formats: dict[AnswerType, AnswerFormat] = {
            "yes_no": YesNoProbability(),
            "yes_no_text": YesNoText(),
            "winner": TaggedWinner(),
            "digits": DigitExpectation(int(self.high)),
            "axes": AxisScores(self.axes, self.low, self.high),
            "number": NumberAnswer(self.pattern, self.low, self.high),
        }
        return formats[self.type]


@checked_dataclass(frozen=True, config=STRICT)
class TemplateFile:
    """The keys of a template file."""

    text: Annotated[str, Field(min_length=1)]  # with {prompt}, and any other column of the data in braces
    answer: AnswerSettings
    images: tuple[ImageName, ...] = ()  # before the text; by default the sample, or both samples of a pair
    system: str = ""
    modality: Modality = "image"
    pairwise: bool = False
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # by default 1 for log-probabilities, otherwise 1024

    def build(self) -> JudgeTemplate:
        """The template; raises ValueError about settings that do not fit together."""
        own: set[ImageName] = {"first", "second"} if self.pairwise else {"sample"}
        images: tuple[ImageName, ...] = self.images or (("first", "second") if self.pairwise else ("sample",))
        if not own <= set(images) <= {*own, "source"}:
            raise ValueError(
                f"'images' must hold {' and '.join(sorted(own))}, and may hold source; correct them [TM2006]"
            )
        answer = self.answer.build()
        allowed = ("winner", "yes_no", "yes_no_text") if self.pairwise else tuple(TYPES - {"winner"})
        if self.answer.type not in allowed:
            raise ValueError(
                f"'answer.type': expected one of {', '.join(sorted(allowed))} here, got {self.answer.type}; change it, "
                "or 'pairwise' [TM2007]"
            )
        parts = (*(MessagePart(image=image) for image in images), MessagePart(self.text))
        names = tuple(sorted(set(PLACEHOLDER.findall(self.text + self.system))))
        max_tokens = self.max_tokens or (1 if answer.uses_logprobs else 1024)
        return JudgeTemplate(
            (Question(parts, answer, self.system, names),),
            Sampling(self.temperature, max_tokens),
            modality=self.modality,
            pairwise=self.pairwise,
        )


@checked_dataclass(frozen=True, config=STRICT)
class ChecklistItem:
    """A question that is answered with yes or no."""

    question: Annotated[str, Field(min_length=1)]  # with {prompt}, and any other column of the data in braces
    weight: float = 1.0  # negative if no is the better answer


@checked_dataclass(frozen=True, config=STRICT)
class ChecklistFile:
    """The keys of a template file with a checklist: each question is asked by itself."""

    checklist: Annotated[tuple[ChecklistItem | str, ...], Field(min_length=1)]
    suffix: str = " Answer yes or no."  # after each question
    answer: Literal["yes_no", "yes_no_text"] = "yes_no"  # by log-probabilities, or by the text
    images: tuple[ImageName, ...] = ("sample",)  # before each question
    system: str = ""
    modality: Modality = "image"

    def build(self) -> JudgeTemplate:
        """The template; raises ValueError about settings that do not fit together."""
        if not {"sample"} <= set(self.images) <= {"sample", "source"}:
            raise ValueError("'images' must hold sample, and may hold source; correct them [TM2311]")
        items = [item if isinstance(item, ChecklistItem) else ChecklistItem(item) for item in self.checklist]
        if not all(math.isfinite(item.weight) for item in items):
            raise ValueError("'checklist': a weight is not finite; write numbers [TM2312]")
        answer: AnswerFormat = YesNoProbability() if self.answer == "yes_no" else YesNoText()
        questions = []
        for item in items:
            text = item.question + self.suffix
            names = tuple(sorted(set(PLACEHOLDER.findall(text + self.system))))
            parts = (*(MessagePart(image=image) for image in self.images), MessagePart(text))
            questions.append(Question(parts, answer, self.system, names))
        weights = tuple(item.weight for item in items)
        bound = sum(map(abs, weights)) / len(weights)
        return JudgeTemplate(
            tuple(questions),
            ONE_TOKEN if answer.uses_logprobs else Sampling(max_tokens=16),
            "checklist",
            weights,
            modality=self.modality,
            range=f"{-bound:g} to {bound:g}",
        )


def load_template(name: str) -> JudgeTemplate:
    """The template of a published name, or that of a YAML file."""
    if name in published_templates():
        return published_templates()[name]
    path = Path(name).expanduser()
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"'template': '{name:.60}' is unknown; use one of {', '.join(published_templates())}, or the path of a "
            ".yaml file [TM2000]"
        )
    return _read_template(path, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=16)
def _read_template(path: Path, modified: int) -> JudgeTemplate:
    """The template of a YAML file, read again after the file was changed."""
    content = read_yaml_mapping(path)
    kind: type[TemplateFile | ChecklistFile] = ChecklistFile if "checklist" in content else TemplateFile
    try:
        return TypeAdapter(kind).validate_python(content).build()
    except ValidationError as error:
        problems = "; ".join(f"'{'.'.join(map(str, each['loc']))}': {each['msg']}" for each in error.errors())
        raise ConfigError(f"{path}: {problems}; correct this template [TM2001]") from error
    except (ValueError, re.error) as error:
        raise ConfigError(f"{path}: this template cannot be used: {error} [TM2002]") from error
