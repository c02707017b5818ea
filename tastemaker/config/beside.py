"""The rules between sections of runs that train no generator, and what data and components are called in sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..types import Answers, Latents, Pairs, Pictures, PromptBatch, Tokens
from .dump import named
from .run import AutoencoderConfig, JudgeConfig

CONTENTS = {
    PromptBatch: "prompts",
    Pictures: "captioned pictures",
    Pairs: "preference pairs",
    Tokens: "tokens",
    Latents: "latents",
    Answers: "answers to questions",
}
SOURCES = {
    PromptBatch: "prompts or prompt_file",
    Pictures: "toy_pictures or picture_folder",
    Pairs: "toy_pairs or pair_file",
}


@runtime_checkable
class Continuing(Protocol):
    """A model's settings that say which picture its clips go on from, unless a prompt has one of its own."""

    @property
    def image(self) -> Path | None: ...


def name(component: object) -> str:
    return named(type(component))


def samples_and_autoencoder(config: AutoencoderConfig, world: int) -> str | None:
    sample = config.sample
    if any(x is not None for x in (sample.height, sample.width, sample.steps, sample.guidance)):
        return "sample: an autoencoder shows its data as it is; leave height, width, steps and guidance out"
    return None


def rows_and_ranks(config: AutoencoderConfig | JudgeConfig, world: int) -> str | None:
    if config.rows % world:
        return f"rows: {config.rows} rows do not divide among {world} ranks; choose a multiple of {world}"
    return None


def autoencoder_and_data(config: AutoencoderConfig, world: int) -> str | None:
    found = config.data.yields
    if found is Pictures:
        return None
    holds, advice = CONTENTS.get(found, found.__name__), f"set data.type to {SOURCES[Pictures]}"
    return f"data: {name(config.autoencoder)} learns from pictures, but {name(config.data)} holds {holds}; {advice}"


def validation_and_data(config: AutoencoderConfig, world: int) -> str | None:
    data = config.validation.data
    if data is None or data.yields is Pictures:
        return None
    return f"validation.data: {name(data)} holds {CONTENTS.get(data.yields, data.yields.__name__)}; expected pictures"


def judge_and_data(config: JudgeConfig, world: int) -> str | None:
    wrong = [data for data in (config.data, config.validation.data) if data is not None and data.yields is not Answers]
    if not wrong:
        return None
    holds, advice = CONTENTS.get(wrong[0].yields, wrong[0].yields.__name__), "set data.type to answer_file"
    return f"data: a judge learns from answers to questions, but {name(wrong[0])} holds {holds}; {advice}"


JUDGE_RULES: tuple[Callable[[JudgeConfig, int], str | None], ...] = (judge_and_data, rows_and_ranks)
CODEC_RULES: tuple[Callable[[AutoencoderConfig, int], str | None], ...] = (
    autoencoder_and_data,
    rows_and_ranks,
    samples_and_autoencoder,
    validation_and_data,
)
