"""Checks for autoencoder and judge runs, and the names of data types in messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..core.types import ImageBatch, LatentBatch, PreferenceBatch, PromptBatch, QuestionAnswerBatch, TokenBatch
from .dump import registered_name
from .schema import AutoencoderRunConfig, JudgeRunConfig

CONTENTS = {
    PromptBatch: "prompts",
    ImageBatch: "captioned pictures",
    PreferenceBatch: "preference pairs",
    TokenBatch: "tokens",
    LatentBatch: "latents",
    QuestionAnswerBatch: "answers to questions",
}
SOURCES = {
    PromptBatch: "prompts or prompt_file",
    ImageBatch: "toy_pictures or picture_folder",
    PreferenceBatch: "toy_pairs or pair_file",
}


@runtime_checkable
class HasInitialImage(Protocol):
    """A model's settings that say which picture its clips go on from, unless a prompt has one of its own."""

    @property
    def image(self) -> Path | None: ...


def component_name(component: object) -> str:
    return registered_name(type(component))


def samples_and_autoencoder(config: AutoencoderRunConfig, world: int) -> str | None:
    sample = config.sample
    if any(x is not None for x in (sample.height, sample.width, sample.steps, sample.guidance)):
        return "sample: an autoencoder shows its data as it is; leave height, width, steps and guidance out"
    return None


def rows_and_ranks(config: AutoencoderRunConfig | JudgeRunConfig, world: int) -> str | None:
    if config.rows % world:
        return f"rows: {config.rows} rows do not divide among {world} ranks; choose a multiple of {world}"
    return None


def autoencoder_and_data(config: AutoencoderRunConfig, world: int) -> str | None:
    found = config.data.yields
    if found is ImageBatch:
        return None
    holds, advice = CONTENTS.get(found, found.__name__), f"set data.type to {SOURCES[ImageBatch]}"
    names = component_name(config.autoencoder), component_name(config.data)
    return f"data: {names[0]} learns from pictures, but {names[1]} holds {holds}; {advice}"


def validation_and_data(config: AutoencoderRunConfig, world: int) -> str | None:
    data = config.validation.data
    if data is None or data.yields is ImageBatch:
        return None
    holds = CONTENTS.get(data.yields, data.yields.__name__)
    return f"validation.data: {component_name(data)} holds {holds}; expected pictures"


def judge_and_data(config: JudgeRunConfig, world: int) -> str | None:
    wrong = [
        data
        for data in (config.data, config.validation.data)
        if data is not None and data.yields is not QuestionAnswerBatch
    ]
    if not wrong:
        return None
    holds, advice = CONTENTS.get(wrong[0].yields, wrong[0].yields.__name__), "set data.type to answer_file"
    return f"data: a judge learns from answers to questions, but {component_name(wrong[0])} holds {holds}; {advice}"


JUDGE_RULES: tuple[Callable[[JudgeRunConfig, int], str | None], ...] = (judge_and_data, rows_and_ranks)
AUTOENCODER_RULES: tuple[Callable[[AutoencoderRunConfig, int], str | None], ...] = (
    autoencoder_and_data,
    rows_and_ranks,
    samples_and_autoencoder,
    validation_and_data,
)
