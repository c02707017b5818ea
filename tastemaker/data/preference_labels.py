"""`tastemaker rank`: sample prompts, label the samples with a reward, and write preference pairs and VQA sets.

The pairs train generators (DPO); the questions with yes/no answers train judges (ORM on finished samples, PARM on
previews). Prompts of benchmarks are left out.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config.build import build, build_rubric, make_tiny
from ..config.schema import RewardConfig, RunConfig
from ..console import make_console, track
from ..core import output_paths
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import RewardSpec
from ..core.types import Metadata, PromptBatch
from ..evaluation.benchmark_run import load_benchmark
from ..evaluation.geneval_rules import validate_metadata
from ..models.pretrained import find_weights
from ..rewards.folder_scorer import FolderScorer, ImageRecord, parse_pointwise_reward
from ..rewards.geneval import GenevalReward
from ..search.base import start_candidates
from ..search.generation import (
    DEFAULT_BATCH_SIZE,
    METADATA_FILE,
    SampleDirectory,
    check_weights_exist,
    read_records,
    split_over_ranks,
    truncate_partial_line,
)
from ..training.engine import Engine
from ..training.run import Run
from ..training.samples import sampling_policy
from ..vlm.yes_no import CLARITY, POTENTIAL, QUESTIONS
from .image_io import read_image, save_image
from .prompts import open_prompt_file

SAMPLES, LABELS = "samples", "labels.jsonl"
PAIRS, ORM, PARM = "pairs.jsonl", "orm.json", "parm.json"
LABELER_ALIASES = {"playground": "{type: playground_verdict, output: verdict}"}
MAX_BENCHMARK_PROMPTS = 2048  # prompts that are excluded of a benchmark without end
Row = Mapping[str, Any]  # a sample with its label


@dataclass(frozen=True)
class LabelRules:
    """How scores become preferences and answers."""

    threshold: float = 0.5  # score from which a sample is correct
    margin: float | None = None  # smallest score difference of a pair; by default correct against incorrect
    max_pairs: int = 1  # per prompt
    unclear: float = 0.55  # progress up to which a preview cannot be judged; published: steps below 10 of 18
    clear: float = 0.62  # progress from which it can; published: steps above 11 of 18

    def __post_init__(self) -> None:
        if self.unclear > self.clear:
            raise ConfigError(
                f"--clear-from: expected at least the value of --unclear-until, got --clear-from {self.clear} and "
                f"--unclear-until {self.unclear}; raise --clear-from [TM208]"
            )

    def is_correct(self, row: Row) -> bool:
        return bool(row["score"] >= self.threshold)

    def is_preferred(self, chosen: Row, rejected: Row) -> bool:
        if self.margin is None:
            return self.is_correct(chosen) and not self.is_correct(rejected)
        return bool(chosen["score"] - rejected["score"] >= max(self.margin, 1e-9))


def preference_pairs(rows: Sequence[Row], rules: LabelRules) -> list[dict[str, str]]:
    """Pair each prompt's best sample with its worst, the second best with the second worst, while one is preferred."""
    pairs = []
    for _, group in groupby(rows, key=lambda row: row["group"]):
        ranked = sorted(group, key=lambda row: -row["score"])  # stable: the first of equals stays first
        candidates = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
        kept = [(best, worst) for best, worst in candidates if rules.is_preferred(best, worst)][: rules.max_pairs]
        pairs += [{"prompt": a["prompt"], "chosen": a["file"], "rejected": b["file"]} for a, b in kept]
    return pairs


def orm_examples(rows: Sequence[Row], rules: LabelRules) -> list[dict[str, Any]]:
    """Finished samples for an outcome reward model, in LLaVA's layout."""
    return [
        llava_example(
            row["file"], (QUESTIONS["orm"], _answer(rules.is_correct(row))), row["prompt"], f"orm-{row['index']}"
        )
        for row in rows
    ]


def parm_examples(rows: Sequence[Row], rules: LabelRules) -> list[dict[str, Any]]:
    """Previews for a PARM: whether each can be judged and, if so, whether its finished sample is correct."""
    examples = []
    for row in rows:
        for position, preview in enumerate(row["previews"]):
            if rules.unclear < preview["progress"] < rules.clear:
                continue
            clear = preview["progress"] >= rules.clear
            turns = [CLARITY, _answer(clear), *([POTENTIAL, _answer(rules.is_correct(row))] if clear else [])]
            examples.append(llava_example(preview["file"], turns, row["prompt"], f"parm-{row['index']}-{position}"))
    return examples


def llava_example(file: str, turns: Sequence[str], prompt: str, name: str) -> dict[str, Any]:
    conversations = [
        {"from": "human" if k % 2 == 0 else "gpt", "value": turn.replace("{prompt}", prompt)}
        for k, turn in enumerate(turns)
    ]
    return {"id": name, "image": file, "conversations": conversations}


def _answer(correct: bool) -> str:
    return "yes" if correct else "no"


def write_preference_sets(out: Path, rows: Sequence[Row], rules: LabelRules) -> dict[str, int]:
    """Write each set to its file atomically; returns the number of examples by file."""
    pairs, orm, parm = preference_pairs(rows, rules), orm_examples(rows, rules), parm_examples(rows, rules)
    texts = {PAIRS: "".join(json.dumps(row) + "\n" for row in pairs)}
    texts |= {ORM: json.dumps(orm, indent=1) + "\n", PARM: json.dumps(parm, indent=1) + "\n"}
    for name, text in texts.items():
        output_paths.write_text_atomically(out / name, text)
    return {PAIRS: len(pairs), ORM: len(orm), PARM: len(parm)}


def prompt_signatures(prompt: str, metadata: Metadata) -> set[str]:
    """Keys that equivalent prompts share: the words without case, punctuation and framing, and GenEval's metadata."""
    words = re.sub(r"[^\w ]+", " ", prompt.lower()).split()
    bare = " ".join(word for word in words if word not in ("a", "an", "the"))
    signatures = {re.sub(r"^(photo|picture|image) of ", "", bare)}
    if metadata.get("include"):
        objects = {"include": metadata["include"], "exclude": metadata.get("exclude", [])}
        signatures.add(json.dumps(objects, sort_keys=True, default=str))
    return signatures


def exclude_benchmark_prompts(batch: PromptBatch, benchmarks: Iterable[PromptBatch]) -> tuple[PromptBatch, list[str]]:
    """The distinct prompts that no benchmark has, and those that were dropped."""
    excluded: set[str] = set()
    for benchmark in benchmarks:
        for prompt, metadata in zip(benchmark.prompts, benchmark.metadata, strict=True):
            excluded |= prompt_signatures(prompt, metadata)
    kept, dropped, previous = [], [], set[str]()
    for index, (prompt, metadata) in enumerate(zip(batch.prompts, batch.metadata, strict=True)):
        if prompt_signatures(prompt, metadata) & excluded or prompt in previous:
            dropped.append(prompt)
        else:
            kept.append(index)
        previous.add(prompt)
    return PromptBatch(tuple(batch.prompts[i] for i in kept), tuple(batch.metadata[i] for i in kept)), dropped


@dataclass(frozen=True)
class PreferenceOptions:
    """What to sample and how to label it."""

    prompts: PromptBatch
    samples_per_prompt: int
    labeler: str  # a reward
    out: Path
    seed: int = 0
    weights: str = "live"
    previews: tuple[float, ...] = ()  # progress at which previews are written
    rules: LabelRules = LabelRules()

    def __post_init__(self) -> None:
        if not self.prompts.prompts:
            raise ConfigError(
                "--prompts: all prompts are also in the benchmark, so none are left; give other prompts with "
                "--prompts [TM209]"
            )
        if any(not 0 < progress < 1 for progress in self.previews):
            raise ConfigError(
                f"--previews: expected numbers above 0 and below 1, got {list(self.previews)}; give for example "
                "--previews 0.25,0.5 [TM210]"
            )

    def __len__(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    def prompt(self, index: int) -> str:
        """The prompt of a sample."""
        return self.prompts.prompts[index // self.samples_per_prompt]

    def metadata(self, index: int) -> Metadata:
        return self.prompts.metadata[index // self.samples_per_prompt]

    def fingerprint(self, config: RunConfig, checkpoint: Path | None) -> str:
        """Fingerprint of everything that a sample depends on but its prompt and index."""
        settings = (config.model, config.process, config.guidance, checkpoint, self.seed, self.weights, self.previews)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]

    def prompt_fingerprint(self, index: int) -> str:
        """Fingerprint of a sample's prompt and metadata; a label is valid for these only."""
        text = json.dumps([self.prompt(index), self.metadata(index)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def select_prompts(
    file: Path | None, config: RunConfig, limit: int, against: Sequence[str]
) -> tuple[PromptBatch, list[str]]:
    """Prompts of a file or of the recipe's data without those of benchmarks, and the prompts that were dropped."""
    data = open_prompt_file(file).load(config.seed) if file else config.data.load(config.seed)
    batch = data.first_prompts(min(limit or len(data), len(data)) if file else limit or DEFAULT_BATCH_SIZE)
    return exclude_benchmark_prompts(batch, [benchmark_prompts(name) for name in against])


def parse_progress(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(
            f"{option}: expected numbers separated by commas, got '{text:.60}'; give for example {option} 0.25,0.5 "
            "[TM211]"
        ) from error


def benchmark_prompts(name: str) -> PromptBatch:
    """The prompts of a benchmark or of a file."""
    if Path(name).is_file():
        data = open_prompt_file(Path(name), "--exclude").load(0)
        return data.first_prompts(len(data))
    benchmark = load_benchmark(name, MAX_BENCHMARK_PROMPTS, 1)
    return PromptBatch(benchmark.prompts, benchmark.metadata)


def label_preferences(
    config: RunConfig, checkpoint: Path | None, options: PreferenceOptions, *, tiny: bool, console: Console
) -> dict[str, int]:
    """Write the samples, labels and sets that are missing; returns the number of examples by file."""
    output_paths.check_output_directory(options.out)
    config, labeler = make_tiny(config) if tiny else config, load_labeler(options, tiny=tiny)
    engine = Engine(config.engine, config.optim, config.steps, config.seed)  # for its ranks, not for its networks
    comm, rank_console = engine.comm, console if engine.comm.rank == 0 else make_console(quiet=True)
    fingerprint = options.fingerprint(config, checkpoint)
    directory = SampleDirectory(options.out / SAMPLES, fingerprint, comm.rank)
    existing = directory.existing_prompts()
    comm.barrier()  # all ranks have read before one writes
    directory.repair()
    missing = [i for i in range(len(options)) if existing.get(i) != options.prompt(i)]
    if missing:
        sample_missing(config, checkpoint, options, directory, missing, rank_console)
        gc.collect()
    comm.barrier()
    if comm.rank == 0:
        directory.merge_records(len(options))
    comm.barrier()
    label_samples(options, labeler, engine, fingerprint, rank_console)
    comm.barrier()  # all ranks have labeled before the labels are merged
    counts = write_outputs(options, fingerprint, rank_console) if comm.rank == 0 else {}
    comm.barrier()
    engine.close()
    return counts


def sample_missing(
    config: RunConfig,
    checkpoint: Path | None,
    options: PreferenceOptions,
    directory: SampleDirectory,
    missing: Sequence[int],
    console: Console,
) -> None:
    """Generate the missing samples, each rank its share."""
    run = build(replace(config, engine=replace(config.engine, context_parallel=1)), load_data=False)
    if checkpoint is not None:
        run.resume(checkpoint)
    check_weights_exist(run, options.weights)
    rounds = split_over_ranks(missing, run.batch.rollout_batch_size, run.engine.comm)
    for indices, is_duplicate in track(rounds, "sampling", console, "batches"):
        final, previews = sample_with_previews(run, options, indices)
        for row, index in enumerate([] if is_duplicate else indices):
            group, sample = divmod(index, options.samples_per_prompt)
            name, records = f"{group:05d}/{sample:04d}", []
            for number, (progress, pixels) in enumerate(previews):
                file = f"{name}-{number}.png"
                save_image(pixels[row], directory.folder / file)
                records.append({"file": f"{SAMPLES}/{file}", "progress": progress})
            metadata = {"index": index, "group": group, "prompt": options.prompt(index), "previews": records}
            directory.add(final[row], f"{name}.png", metadata)  # after its previews: a recorded sample has all of them


@torch.no_grad()
def sample_with_previews(
    run: Run, options: PreferenceOptions, indices: list[int]
) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    """Pixels [B, F, 3, H, W] of samples, and of their previews with the progress of each."""
    prompts, metadata = [options.prompt(i) for i in indices], [options.metadata(i) for i in indices]
    rng = Randomness(options.seed, 0, torch.tensor(indices, device=run.engine.device))
    weights = nullcontext() if options.weights == "live" else run.policy.weights.use(options.weights)
    previews, due = [], sorted(options.previews)
    with run.engine.autocast(), weights:
        policy = sampling_policy(run.policy)
        rollout = start_candidates(policy, policy.embed(prompts, metadata), rng)
        while rollout.progress < 1:
            rollout.step()
            if due and due[0] <= rollout.progress < 1:
                previews.append((rollout.progress, policy.decode(rollout.preview()).float().clamp(0, 1).cpu()))
                due = [progress for progress in due if progress > rollout.progress]
        final = policy.decode(rollout.preview()).float().clamp(0, 1).cpu()
    return final, previews


def load_labeler(options: PreferenceOptions, *, tiny: bool) -> tuple[str, RewardSpec]:
    """Name and spec of the reward; missing weights and unsuitable prompts are refused before anything is sampled."""
    name, spec = parse_pointwise_reward(LABELER_ALIASES.get(options.labeler, options.labeler), "--labeler")
    if isinstance(spec, GenevalReward):
        for prompt, metadata in zip(options.prompts.prompts, options.prompts.metadata, strict=True):
            validate_metadata(metadata, f"--labeler geneval, '{prompt:.80}'")
    if tiny:
        return name, spec.tiny()
    for source in spec.sources:
        find_weights(source.hub, source)
    return name, spec


def read_labels(options: PreferenceOptions, fingerprint: str) -> dict[int, float]:
    """Existing scores by sample index, of the same labeler, samples and prompts."""
    files = [options.out / LABELS, *sorted(options.out.glob(f"{LABELS}.*"))]
    rows = [row for path in files for row in read_records(path) if _is_label_of(row, options, fingerprint)]
    rows = [row for row in rows if row["index"] < len(options)]
    return {i: row["score"] for row in rows if row.get("asked") == options.prompt_fingerprint(i := row["index"])}


def _is_label_of(row: Row, options: PreferenceOptions, fingerprint: str) -> bool:
    return bool((row["made"], row["by"]) == (fingerprint, options.labeler))


def format_label(options: PreferenceOptions, fingerprint: str, index: int, score: float) -> dict[str, Any]:
    prompt = options.prompt_fingerprint(index)
    return {"index": index, "by": options.labeler, "made": fingerprint, "asked": prompt, "score": score}


def label_samples(
    options: PreferenceOptions, labeler: tuple[str, RewardSpec], engine: Engine, fingerprint: str, console: Console
) -> None:
    """Score the samples that have no label, each rank its share."""
    samples, labeled = read_records(options.out / SAMPLES / METADATA_FILE), read_labels(options, fingerprint)
    engine.comm.barrier()  # all ranks have read before one writes
    missing = [row for row in samples if row["index"] not in labeled]
    if not missing:
        return
    name, spec = labeler
    scorer = FolderScorer(build_rubric({name: RewardConfig(spec)}, engine.placement()), engine.device)
    share = missing[engine.comm.rank :: engine.comm.world_size]
    truncate_partial_line(path := options.out / f"{LABELS}.{engine.comm.rank}")
    with path.open("a", encoding="utf-8") as file:
        for first in track(range(0, len(share), DEFAULT_BATCH_SIZE), "labeling", console, "batches"):
            rows = share[first : first + DEFAULT_BATCH_SIZE]
            images = [
                ImageRecord(
                    Path(row["file"]),
                    row["prompt"],
                    options.prompts.metadata[row["group"]],
                    read_image(options.out / SAMPLES / row["file"]),
                )
                for row in rows
            ]
            for row, scores in zip(rows, scorer.score_images(images), strict=True):
                file.write(json.dumps(format_label(options, fingerprint, row["index"], scores[name])) + "\n")
            file.flush()


def write_outputs(options: PreferenceOptions, fingerprint: str, console: Console) -> dict[str, int]:
    """Merge the labels of all ranks and write the sets; returns the number of examples by file."""
    scores = read_labels(options, fingerprint)
    others = [row for row in read_records(options.out / LABELS) if not _is_label_of(row, options, fingerprint)]
    labels = [format_label(options, fingerprint, i, score) for i, score in sorted(scores.items())]
    output_paths.write_text_atomically(
        options.out / LABELS, "".join(json.dumps(row) + "\n" for row in [*others, *labels])
    )
    for path in options.out.glob(f"{LABELS}.*"):
        path.unlink()
    rows = [
        {**row, "file": f"{SAMPLES}/{row['file']}", "score": scores[row["index"]]}
        for row in read_records(options.out / SAMPLES / METADATA_FILE)
    ]
    counts = write_preference_sets(options.out, rows, options.rules)
    correct = sum(options.rules.is_correct(row) for row in rows)
    files = ", ".join(f"{count} in {name}" for name, count in counts.items())
    console.print(f"{len(rows)} samples, {correct} of them correct; examples in {options.out}: {files}", markup=False)
    return counts
