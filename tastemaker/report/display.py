"""`tastemaker.show` and `tastemaker.compare`: look at samples in a notebook or from plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.policy import Policy
from ..core.reward import Rubric
from ..core.types import PromptBatch
from ..training.run import Run
from .figure import Figure, draw_pairs, draw_samples
from .sample_sets import (
    METRICS_FILE,
    SampleSet,
    choose_prompts,
    collect_samples,
    generate_samples,
    read_common_evaluation,
    score_samples,
)

MAX_SAMPLES, MAX_PAIRS = 16, 12


def show(
    samples: Any,
    prompts: Sequence[str] = (),
    *,
    columns: int | None = None,
    count: int = MAX_SAMPLES,
    score: str = "",
    rubric: Rubric | None = None,
    seed: int | None = None,
    step: int | None = None,
    title: str = "",
) -> Figure:
    """Draw samples as one grid with captions; the figure displays itself in a notebook, and `save(path)` writes it.

    Args:
        samples: the files that `generate` returned, image files, PIL images, pixels [B, 3, H, W] or [B, F, 3, H, W] in
            [0, 1], the directory of a run or of images, a run from `build`, or a policy. A run generates samples with
            its current weights and scores them; the directory of a run shows the last samples of its training.
        prompts: what a run or a policy generates, by default the run's own prompts; captions of other samples.
        count: at most this many samples.
        score: the score in the captions, by default the first.
        rubric: rewards to score the samples with, such as `run.rubric`.
        seed: of the noise of a run or policy.
        step: of the samples in the directory of a run.
    """
    sample_set = collect_samples(samples, count=count, prompts=prompts, seed=seed, step=step)
    return draw_samples(score_samples(sample_set, rubric) if rubric else sample_set, columns, score, title)


def compare(
    a: Any,
    b: Any,
    prompts: Sequence[str] = (),
    *,
    labels: tuple[str, str] | None = None,
    columns: int | None = None,
    count: int = MAX_PAIRS,
    score: str = "",
    rubric: Rubric | None = None,
    seed: int | None = None,
    title: str = "",
) -> Figure:
    """Draw samples of the same prompts and seeds side by side, with scores and their difference where they exist.

    `a` and `b` are anything that `show` accepts, or a figure that it returned. If one of them is a run or a policy, it
    generates the prompts of the other, from the same noise. For the directories of two runs that were evaluated on the
    same benchmark, the samples of the evaluations are compared, which have verdicts.

    The mean scores are in `figure.scores`, by label and as "difference" (b minus a).
    """
    first, second = collect_pair(a, b, prompts, count, seed)
    if len(first) != len(second):
        raise ConfigError(
            f"compare: expected equally many samples on both sides, got {len(first)} and {len(second)}; "
            "pass equal numbers [TM830]"
        )
    for left, right in zip(first.prompts, second.prompts, strict=True):
        if left and right and left != right:
            raise ConfigError(
                f"the prompts differ: '{left:.60}' and '{right:.60}'; compare samples of the same prompts [TM831]"
            )
    if rubric:
        first, second = score_samples(first, rubric), score_samples(second, rubric)
    names = labels or (first.name or "a", second.name or "b")
    if names[0] == names[1]:
        names = (f"{names[0]} (a)", f"{names[1]} (b)")
    return draw_pairs(first, second, names, columns, score, title)


def collect_pair(a: Any, b: Any, prompts: Sequence[str], count: int, seed: int | None) -> tuple[SampleSet, SampleSet]:
    """Return the samples of two sources; runs and policies generate the same prompts from the same noise."""
    if all(isinstance(each, str | Path) and (Path(each) / METRICS_FILE).is_file() for each in (a, b)):
        evaluated = read_common_evaluation([Path(a), Path(b)], count)
        if evaluated:
            return evaluated[0], evaluated[1]
    live = [isinstance(each, Run | Policy) for each in (a, b)]
    if all(live):
        source = a if isinstance(a, Run) else b
        batch = choose_prompts(source, prompts, count)
        seed = (source.seed if isinstance(source, Run) else 0) if seed is None else seed
        return generate_samples(a, batch, seed), generate_samples(b, batch, seed)
    if not any(live):
        return collect_finished(a, prompts, count), collect_finished(b, prompts, count)
    known = collect_finished(b if live[0] else a, prompts, count)
    if not any(known.prompts):
        raise ConfigError(
            "the prompts of the samples are unknown, so a run cannot generate the same; pass prompts [TM832]"
        )
    batch = PromptBatch(known.prompts, known.metadata or ({},) * len(known))
    generated = generate_samples(a if live[0] else b, batch, known.seed if seed is None else seed)
    return (generated, known) if live[0] else (known, generated)


def collect_finished(source: Any, prompts: Sequence[str], count: int) -> SampleSet:
    """Return samples that exist: those of a figure, of files, images or tensors."""
    if isinstance(source, Figure):
        if len(source.samples) > 1:
            raise ConfigError("a figure of compare() has two sets of samples; pass one of show() [TM833]")
        return source.samples[0].take(count)
    samples = collect_samples(source, count=count, prompts=prompts)
    return replace(samples, prompts=tuple(prompts[: len(samples)])) if not any(samples.prompts) and prompts else samples
