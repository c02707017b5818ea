"""Benchmarks as data: prompts, their metadata, and the number of samples per prompt."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import torch

from ..core.randomness import Randomness
from ..core.types import Metadata, PromptBatch, concatenate, select_rows
from ..playground import motion, signs
from ..playground.captions import TASKS, SceneCaptions, sample_split_captions

SCORE_NAMES = ("strict", "lenient", "graded")  # scores of the playground's benchmarks
CAPTION_SEED = 20_24  # part of the definition of PlayEval: other captions would be another benchmark


@dataclass(frozen=True)
class Benchmark:
    """Prompts to sample and score. Sample k belongs to prompt k // samples_per_prompt."""

    name: str
    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...]
    tags: tuple[str, ...]  # task of each prompt; the report has a row for each task
    samples_per_prompt: int
    score_names: tuple[str, ...] = SCORE_NAMES
    breakdown_keys: tuple[str, ...] = ()  # metadata whose values have a row in the report too
    video: bool = False
    image_path: str = "samples/{prompt:05d}/{seed:04d}.png"
    metadata_path: str = ""  # where the metadata of a prompt is written beside its samples, if it is
    overall: Literal["tags", "prompts"] = "tags"  # unweighted mean over tags, as GenEval's, or over prompts
    headline: str = ""  # the score that models are compared by, if it is not the first
    tag_weights: tuple[tuple[str, float], ...] = ()  # of the mean over tags, if they are not equal

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    def prompt_index(self, sample: int) -> int:
        return sample // self.samples_per_prompt

    def batch(self, indices: list[int]) -> PromptBatch:
        """Return some of the prompts with their metadata."""
        return PromptBatch(tuple(self.prompts[i] for i in indices), tuple(self.metadata[i] for i in indices))

    def fingerprint(self) -> str:
        """Return a hash of the prompts and the number of samples, to detect results of another benchmark."""
        identity = [self.name, self.prompts, self.metadata, self.tags, self.samples_per_prompt]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def playeval(prompts: int = 504, samples_per_prompt: int = 2) -> Benchmark:
    """GenEval's six tasks in the playground, equally often, on captions that are held out from training."""
    if prompts < len(TASKS) or samples_per_prompt < 1:
        raise ValueError(
            f"PlayEval: expected at least 6 prompts and 1 sample per prompt, got {prompts} prompts and "
            f"{samples_per_prompt} samples per prompt; use higher numbers [TM594]"
        )
    captions = held_out_captions(prompts)
    tags = tuple(TASKS[task] for task in captions.task.tolist())
    return Benchmark("playeval", captions.texts(), captions.metadata(), tags, samples_per_prompt)


def playeval_motion(prompts: int = 504, samples_per_prompt: int = 2) -> Benchmark:
    """PlayEval's captions, each with a motion. Every motion is equally frequent within a task."""
    images = playeval(prompts, samples_per_prompt)
    motion_ids = torch.arange(prompts) // len(TASKS) % len(motion.MOTIONS)
    texts = motion.motion_captions(images.prompts, motion_ids)
    metadata = tuple(
        {**image_metadata, "prompt": text, "motion": motion.MOTIONS[motion_id]}
        for image_metadata, text, motion_id in zip(images.metadata, texts, motion_ids.tolist(), strict=True)
    )
    score_names = (*SCORE_NAMES, "content", "motion")
    return Benchmark(
        "playeval-motion", texts, metadata, images.tags, samples_per_prompt, score_names, ("motion",), video=True
    )


def wordeval(prompts: int = 504, samples_per_prompt: int = 2) -> Benchmark:
    """Signs with words that are held out from training, in a fixed random order. There may be fewer than asked for."""
    if prompts < 1 or samples_per_prompt < 1:
        raise ValueError(
            f"WordEval: expected at least 1 word and 1 sample per word, got {prompts} words and "
            f"{samples_per_prompt} samples per word; use higher numbers [TM595]"
        )
    held_out = signs.held_out_words().nonzero()[:, 0]
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(CAPTION_SEED))[:prompts]
    metadata = signs.sign_metadata(held_out[order])
    tags = tuple(f"{len(each['text'])} letters" for each in metadata)
    return Benchmark("wordeval", signs.sign_captions(held_out[order]), metadata, tags, samples_per_prompt)


def held_out_captions(count: int) -> SceneCaptions:
    """Sample held-out captions with the tasks in turn, so that every prefix is a smaller benchmark of the same kind."""
    indices = torch.arange(count)
    by_task = []
    for task in range(len(TASKS)):
        task_weights = [float(task == k) for k in range(len(TASKS))]
        rng = Randomness(CAPTION_SEED, 0, indices[indices % len(TASKS) == task])
        by_task.append(sample_split_captions(rng, "held_out", task_weights))
    order = torch.cat([indices[indices % len(TASKS) == task] for task in range(len(TASKS))]).argsort()
    return select_rows(concatenate(by_task), order)
