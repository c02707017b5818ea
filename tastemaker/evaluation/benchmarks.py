"""Benchmarks are data: prompts, what is known of each, and how many pictures to make of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from ..core.randomness import Randomness
from ..core.types import Metadata, PromptBatch, concatenate, select_rows
from ..playground import motion, signs
from ..playground.captions import TASKS, SceneCaptions, sample_split_captions

SCORE_NAMES = ("strict", "lenient", "graded")  # scores every benchmark has
CAPTION_SEED = 20_24  # of the captions of PlayEval; another seed would be another benchmark


@dataclass(frozen=True)
class Benchmark:
    name: str
    prompts: tuple[str, ...]
    facts: tuple[Metadata, ...]
    tags: tuple[str, ...]  # one a prompt; reports have a line for each
    seeds: int  # pictures of each prompt
    numbers: tuple[str, ...] = SCORE_NAMES  # scores that are reported
    lines: tuple[str, ...] = ()  # facts whose values have a line in the report too
    moving: bool = False  # asks for clips
    layout: str = "samples/{prompt:05d}/{seed:04d}.png"  # where its pictures lie
    metadata: str = ""  # where the facts of a prompt lie beside its pictures, if they do

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, places: list[int]) -> PromptBatch:
        """Some of the prompts."""
        return PromptBatch(tuple(self.prompts[i] for i in places), tuple(self.facts[i] for i in places))

    def fingerprint(self) -> str:
        """The same for the same questions, so that answers to others are not taken for theirs."""
        told = json.dumps([self.name, self.prompts, self.facts, self.tags, self.seeds], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def playeval(prompts: int = 504, seeds: int = 2) -> Benchmark:
    """GenEval's six tasks in the playground, as evenly as they divide, on captions that no training saw."""
    if prompts < len(TASKS) or seeds < 1:
        raise ValueError(f"PlayEval was asked for {prompts} prompts, {seeds} pictures each; expected at least 6 and 1")
    captions = held_out_captions(prompts)
    tags = tuple(TASKS[task] for task in captions.task.tolist())
    return Benchmark("playeval", captions.texts(), captions.facts(), tags, seeds)


def playeval_motion(prompts: int = 504, seeds: int = 2) -> Benchmark:
    """PlayEval's captions, each with a motion; within a task every motion as often."""
    still = playeval(prompts, seeds)
    places = torch.arange(prompts) // len(TASKS) % len(motion.MOTIONS)
    texts = motion.motion_captions(still.prompts, places)
    said = [motion.MOTIONS[place] for place in places.tolist()]
    known = zip(still.facts, texts, said, strict=True)
    facts = tuple({**fact, "prompt": text, "motion": moves} for fact, text, moves in known)
    numbers = (*SCORE_NAMES, "content", "motion")
    return Benchmark("playeval-motion", texts, facts, still.tags, seeds, numbers, ("motion",), moving=True)


def wordeval(prompts: int = 504, seeds: int = 2) -> Benchmark:
    """Words on signs that no training saw, in an order of its own; all there are if more are asked for."""
    if prompts < 1 or seeds < 1:
        raise ValueError(f"WordEval was asked for {prompts} words, {seeds} pictures each; expected at least 1 and 1")
    places = signs.held_out().nonzero()[:, 0]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(CAPTION_SEED))[:prompts]
    facts = signs.sign_metadata(places[order])
    tags = tuple(f"{len(fact['text'])} letters" for fact in facts)
    return Benchmark("wordeval", signs.sign_captions(places[order]), facts, tags, seeds)


def held_out_captions(count: int) -> SceneCaptions:
    """The tasks in turn, so that the first so many are a smaller benchmark of the same kind."""
    rows = torch.arange(count)
    by_task = []
    for place in range(len(TASKS)):
        only = [float(place == k) for k in range(len(TASKS))]
        by_task.append(
            sample_split_captions(Randomness(CAPTION_SEED, 0, rows[rows % len(TASKS) == place]), "held_out", only)
        )
    order = torch.cat([rows[rows % len(TASKS) == place] for place in range(len(TASKS))]).argsort()
    return select_rows(concatenate(by_task), order)
