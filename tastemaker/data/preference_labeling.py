"""`tastemaker rank`: prompts to samples, samples to labels, labels to pairs and to questions for judges."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..config.build import build, build_rubric, make_tiny
from ..config.schema import RewardConfig, RunConfig
from ..core import output_paths
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import RewardSpec
from ..core.types import PromptBatch
from ..evaluation.benchmark_run import load_benchmark
from ..evaluation.geneval_rules import validate_metadata
from ..models.downloads import spec_sources
from ..models.pretrained import find_weights
from ..rewards.geneval import Geneval
from ..rewards.scoring import FolderScorer, ImageRecord, parse_reward
from ..search.base import start_candidates
from ..search.generation import ROWS, check_weights_exist
from ..search.sample_directory import RECORD, SampleDirectory, drop_partial_line
from ..training.engine import Engine
from ..training.run import Run
from ..training.sample_grid import sampling_policy
from . import preference_pairs
from .image_io import read_image, save_image
from .prompts import check_prompt_file

SAMPLES, LABELS = "samples", "labels.jsonl"
BY = {"playground": "{type: playground_verdict, form: verdict}"}  # who labels, by a shorter name
ASKED = 2048  # prompts of a benchmark without end that are kept apart


@dataclass(frozen=True)
class PreferenceOptions:
    """What to make lessons of."""

    prompts: PromptBatch
    count: int  # samples of each
    by: str  # a reward
    out: Path
    seed: int = 0
    weights: str = "live"
    previews: tuple[float, ...] = ()  # progress at which samples are looked at on their way
    rules: preference_pairs.LabelRules = preference_pairs.LabelRules()

    def __post_init__(self) -> None:
        if not self.prompts.prompts:
            raise ConfigError("no prompt is left that the benchmark does not ask; give others with --prompts")
        if any(not 0 < progress < 1 for progress in self.previews):
            raise ConfigError(f"--previews: found {list(self.previews)}; expected numbers above 0 and below 1")

    def __len__(self) -> int:
        return len(self.prompts) * self.count

    def made(self, config: RunConfig, found: Path | None) -> str:
        """A name for all that a sample depends on but its prompt and index."""
        told = repr((config.model, config.process, config.guidance, found, self.seed, self.weights, self.previews))
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def asked(self, index: int) -> str:
        """A name for what a sample is to show: a label says nothing of what was asked for before."""
        place = index // self.count
        told = json.dumps([self.prompts.prompts[place], self.prompts.facts[place]], sort_keys=True, default=str)
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def select_prompts(
    file: Path | None, config: RunConfig, limit: int, against: Sequence[str]
) -> tuple[PromptBatch, list[str]]:
    """Prompts of a file or of the recipe's data, at most so many, and those left out that benchmarks ask too."""
    data = check_prompt_file(file).load(config.seed) if file else config.data.load(config.seed)
    batch = data.first(min(limit or len(data), len(data)) if file else limit or ROWS)
    return preference_pairs.exclude_benchmark_prompts(batch, [benchmark_prompts(name) for name in against])


def parse_progress(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{option}: found '{text:.60}'; expected numbers with commas between them") from error


def benchmark_prompts(name: str) -> PromptBatch:
    """What a benchmark asks, by its name or in a file."""
    if Path(name).is_file():
        data = check_prompt_file(Path(name), "--against").load(0)
        return data.first(len(data))
    told = load_benchmark(name, ASKED, 1)
    return PromptBatch(told.prompts, told.facts)


def label_preferences(
    config: RunConfig, found: Path | None, order: PreferenceOptions, *, tiny: bool, console: Console
) -> dict[str, int]:
    """Make what is not there yet, sample by sample and label by label; how many lessons there are."""
    output_paths.check_output_directory(order.out)
    config, who = make_tiny(config) if tiny else config, load_labeler(order, tiny=tiny)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)  # for its ranks: networks come and go
    comm, shown = engine.comm, console if engine.comm.rank == 0 else Console(quiet=True)
    made = order.made(config, found)
    ledger = SampleDirectory(order.out / SAMPLES, made, comm.rank)
    there = ledger.known()
    comm.barrier()  # all have read before anyone writes
    ledger.mend()
    left = [i for i in range(len(order)) if there.get(i) != order.prompts.prompts[i // order.count]]
    if left:
        sample_missing(config, found, order, ledger, left, shown)
        gc.collect()
    comm.barrier()
    if comm.rank == 0:
        ledger.close(len(order))
    comm.barrier()
    label_samples(order, who, engine, made, shown)
    comm.barrier()  # all have labelled before the labels are put together
    counts = write_outputs(order, made, shown) if comm.rank == 0 else {}
    comm.barrier()
    engine.close()
    return counts


def sample_missing(
    config: RunConfig,
    found: Path | None,
    order: PreferenceOptions,
    ledger: SampleDirectory,
    left: Sequence[int],
    console: Console,
) -> None:
    """Make the samples that are left, each rank its share."""
    run = build(replace(config, engine=replace(config.engine, context=1)), fed=False)
    if found is not None:
        run.resume(found)
    check_weights_exist(run, order.weights)
    comm = run.engine.comm
    size = max(1, min(run.batch.rollout or ROWS, -(-len(left) // comm.world)))
    shares = [list(left[i : i + size]) for i in range(0, len(left), size)]
    for first in track(range(0, len(shares), comm.world), "sampling", console=console):
        mine = first + comm.rank
        # Without a share of its own a rank makes another's once more, for a sharded network takes all of them.
        share = shares[min(mine, len(shares) - 1)]
        final, looks = sample_with_previews(run, order, share)
        if mine < len(shares):
            write_samples(order, ledger, share, final, looks)


@torch.no_grad()
def sample_with_previews(
    run: Run, order: PreferenceOptions, rows: list[int]
) -> tuple[torch.Tensor, list[tuple[float, torch.Tensor]]]:
    """Pixels [B, F, 3, H, W] of some samples, and of what they looked like on their way, with how far that was."""
    places = [i // order.count for i in rows]
    prompts = [order.prompts.prompts[place] for place in places]
    facts = [order.prompts.facts[place] for place in places]
    rng = Randomness(order.seed, 0, torch.tensor(rows, device=run.engine.device))
    borrowed = nullcontext() if order.weights == "live" else run.policy.weights.use(order.weights)
    looks, due = [], sorted(order.previews)
    with run.engine.computing(), borrowed:
        policy = sampling_policy(run.policy)
        rollout = start_candidates(policy, policy.embed(prompts, facts), rng)
        while rollout.progress < 1:
            rollout.step()
            if due and due[0] <= rollout.progress < 1:
                looks.append((rollout.progress, policy.decode(rollout.preview()).float().clamp(0, 1).cpu()))
                due = [progress for progress in due if progress > rollout.progress]
        final = policy.decode(rollout.preview()).float().clamp(0, 1).cpu()
    return final, looks


def write_samples(
    order: PreferenceOptions,
    ledger: SampleDirectory,
    rows: list[int],
    final: torch.Tensor,
    looks: list[tuple[float, torch.Tensor]],
) -> None:
    """Write samples down, each after its previews, so that they are all there where it is."""
    for place, i in enumerate(rows):
        group, name = i // order.count, f"{i // order.count:05d}/{i % order.count:04d}"
        seen = []
        for number, (progress, pixels) in enumerate(looks):
            file = f"{name}-{number}.png"
            save_image(pixels[place], ledger.folder / file)
            seen.append({"file": f"{SAMPLES}/{file}", "progress": progress})
        prompt = order.prompts.prompts[group]
        ledger.add(final[place], f"{name}.png", {"index": i, "group": group, "prompt": prompt, "previews": seen})


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a last one that was cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def read_labels(order: PreferenceOptions, made: str) -> dict[int, float]:
    """Scores that are there, by sample, of those who labelled the same samples for the same prompts."""
    files = [order.out / LABELS, *sorted(order.out.glob(f"{LABELS}.*"))]
    rows = [row for path in files for row in read_jsonl(path) if (row["made"], row["by"]) == (made, order.by)]
    ours = [row for row in rows if row["index"] < len(order) and row.get("asked") == order.asked(row["index"])]
    return {row["index"]: row["score"] for row in ours}


def format_label(order: PreferenceOptions, made: str, index: int, score: float) -> dict[str, Any]:
    return {"index": index, "by": order.by, "made": made, "asked": order.asked(index), "score": score}


def load_labeler(order: PreferenceOptions, *, tiny: bool) -> tuple[str, RewardSpec]:
    """Who labels; one that is not there, or prompts it can say nothing of, are told before anything is sampled."""
    name, spec = parse_reward(BY.get(order.by, order.by), "--by")
    if isinstance(spec, Geneval):
        for prompt, fact in zip(order.prompts.prompts, order.prompts.facts, strict=True):
            validate_metadata(fact, f"--by geneval, '{prompt:.80}'")
    if tiny:
        return name, spec.tiny()
    for source in spec_sources(spec):
        find_weights(source.hub, source)
    return name, spec


def label_samples(
    order: PreferenceOptions, who: tuple[str, RewardSpec], engine: Engine, made: str, console: Console
) -> None:
    """Score the samples that have no label, each rank its share."""
    samples, there = read_jsonl(order.out / SAMPLES / RECORD), read_labels(order, made)
    engine.comm.barrier()  # all have read before anyone writes
    left = [row for row in samples if row["index"] not in there]
    if not left:
        return
    name, spec = who
    jury = FolderScorer(build_rubric({name: RewardConfig(spec)}, engine.placement()), engine.device)
    mine = left[engine.comm.rank :: engine.comm.world]
    drop_partial_line(own := order.out / f"{LABELS}.{engine.comm.rank}")
    with own.open("a", encoding="utf-8") as record:
        for first in track(range(0, len(mine), ROWS), "labelling", console=console):
            rows = mine[first : first + ROWS]
            pictures = [
                ImageRecord(Path(row["file"]), row["prompt"], order.prompts.facts[row["group"]],
                        read_image(order.out / SAMPLES / row["file"]))
                for row in rows
            ]  # fmt: skip
            for row, scores in zip(rows, jury.scores(pictures), strict=True):
                record.write(json.dumps(format_label(order, made, row["index"], scores[name])) + "\n")
            record.flush()


def write_outputs(order: PreferenceOptions, made: str, console: Console) -> dict[str, int]:
    """One file of labels and one of each set; say how many lessons there are."""
    there = read_labels(order, made)
    others = [row for row in read_jsonl(order.out / LABELS) if (row["made"], row["by"]) != (made, order.by)]
    told = [format_label(order, made, i, score) for i, score in sorted(there.items())]
    partial = order.out / f".{LABELS}.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in [*others, *told]), encoding="utf-8")
    partial.replace(order.out / LABELS)
    for path in order.out.glob(f"{LABELS}.*"):
        path.unlink()
    rows = [
        {**row, "file": f"{SAMPLES}/{row['file']}", "score": there[row["index"]]}
        for row in read_jsonl(order.out / SAMPLES / RECORD)
    ]
    counts = preference_pairs.write_preference_sets(order.out, rows, order.rules)
    right = sum(order.rules.right(row) for row in rows)
    held = ", ".join(f"{count} in {name}" for name, count in counts.items())
    console.print(f"{len(rows)} samples, {right} of them right; lessons in {order.out}: {held}", markup=False)
    return counts
