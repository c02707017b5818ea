"""Samples of voting sessions: generated as `tastemaker generate` does, or copied from folders; and their scores."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from ..config.build import build, make_tiny
from ..config.schema import RunConfig
from ..console import ProgressBar, message_console
from ..core import output_paths
from ..core.registry import ConfigError
from ..core.types import Placement, PromptBatch
from ..data.image_io import read_image, save_image, video_suffix
from ..rewards.folder_scorer import ImageRecord, find_images_with_prompts, load_folder_scorer
from ..search.generation import (
    DEFAULT_BATCH_SIZE,
    GenerationOptions,
    check_weights_exist,
    choose_prompts,
    resolve_source,
    run_search,
)
from ..search.settings import build_sampler
from ..training.run_directory import CONFIG_FILE, RECIPE_FILE
from .session_results import SCORES_FILE, read_scores
from .sessions import SAMPLES_FILE, Session, SessionSample, SessionSource, load_session, write_session
from .votes import hash_file

SAMPLES, SCORE_BATCH_SIZE = "samples", 32


def is_picture_folder(source: SessionSource) -> bool:
    """Whether a source is a folder of pictures instead of a model."""
    folder = Path(source.model)
    return folder.is_dir() and not any((folder / name).is_file() for name in (CONFIG_FILE, RECIPE_FILE))


def source_folder(source: SessionSource) -> str:
    """Return the folder of a source's samples in a session, whose name does not tell the source."""
    text = json.dumps(asdict(source))
    return f"{SAMPLES}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def complete_samples(
    session: Session, overrides: Sequence[str] = (), *, tiny: bool = False, console: Console | None = None
) -> Session:
    """Write the samples of a session that are missing, and then their list."""
    console = console or message_console()
    configs = {}
    for number, source in enumerate(session.sources):  # a mistake in the last source is found before the first samples
        if not is_picture_folder(source):
            configs[number] = resolve_model(source, overrides, tiny=tiny, console=console)
    if not session.prompts:
        session = replace(session, prompts=tuple(choose_session_prompts(session, configs)))
        write_session(session)
    rows: list[SessionSample] = []
    for number, source in enumerate(session.sources):
        folder = source_folder(source)
        (session.directory / folder).mkdir(parents=True, exist_ok=True)
        if number in configs:
            files = generate_source(session, source, *configs[number], tiny=tiny, console=console)
        else:
            files = list(copy_pictures(session, source))
        rows += [
            SessionSample(file, hash_file(session.directory / file), number, prompt, seed)
            for file, prompt, seed in files
        ]
    check_pairs_exist(session, rows)
    random.Random(session.order_seed).shuffle(rows)  # so that the number of a sample does not tell its source
    text = json.dumps([asdict(row) for row in rows], indent=0) + "\n"
    output_paths.write_text_atomically(session.directory / SAMPLES_FILE, text)
    return load_session(session.directory)


def check_pairs_exist(session: Session, rows: Sequence[SessionSample]) -> None:
    """Refuse folders of pictures that have no prompt in common with the other sources."""
    ready = replace(session, samples=tuple(rows))
    if not ready.schedule:
        raise ConfigError(
            "--source: the sources have no two samples of the same prompt, so there is nothing to vote on; give "
            "pictures the same captions, or use --kind like [TM1413]"
        )


def resolve_model(
    source: SessionSource, overrides: Sequence[str], *, tiny: bool, console: Console
) -> tuple[RunConfig, Path | None, str]:
    """Return the configuration, the checkpoint and the name of the weights of a source."""
    config, checkpoint = resolve_source(source.model, [*source.overrides, *overrides], tiny=tiny, console=console)
    name = source.checkpoint or "live"
    path = Path(name) if "/" in name else Path(source.model) / "checkpoints" / name
    if path.is_dir():
        return config, path.resolve(), "live"
    if name.startswith("step-") or "/" in name:
        known = sorted(each.name for each in path.parent.glob("step-*"))
        raise ConfigError(
            f"--source: {source.model:.200} has no checkpoint '{name:.200}'; it has {', '.join(known) or 'none'}, or "
            "leave @ out for the newest [TM1414]"
        )
    return config, checkpoint, name


def choose_session_prompts(session: Session, configs: dict[int, tuple[RunConfig, Path | None, str]]) -> list[str]:
    """Return the prompts of all folders of pictures, else the first of a recipe's data."""
    pictures = [
        record.prompt
        for source in session.sources
        if is_picture_folder(source)
        for record in find_images_with_prompts(Path(source.model), None)
    ]
    prompts = pictures or choose_prompts((), None, next(iter(configs.values()))[0]).prompts
    return list(dict.fromkeys(prompts))


def copy_pictures(session: Session, source: SessionSource) -> Iterator[tuple[str, int, int]]:
    """Copy the pictures of a folder; yields file, prompt and seed. The n-th picture of a prompt gets the n-th seed."""
    places, counts = {prompt: index for index, prompt in enumerate(session.prompts)}, dict[int, int]()
    for record in find_images_with_prompts(Path(source.model), None):
        prompt = places.get(record.prompt.strip())
        if prompt is None or record.file.is_dir():
            continue
        count = counts[prompt] = counts.get(prompt, -1) + 1
        seed = session.seeds[count] if count < len(session.seeds) else max(session.seeds) + 1 + count
        file = f"{source_folder(source)}/{prompt:05d}-{seed}{record.file.suffix.lower()}"
        with output_paths.replace_file(session.directory / file) as partial:
            shutil.copyfile(record.file, partial)
        yield file, prompt, seed


@torch.no_grad()
def generate_source(
    session: Session,
    source: SessionSource,
    config: RunConfig,
    checkpoint: Path | None,
    weights: str,
    *,
    tiny: bool,
    console: Console,
) -> list[tuple[str, int, int]]:
    """Generate the missing samples of a model; returns file, prompt and seed of each."""
    config = make_tiny(config) if tiny else config
    suffix = "png" if config.model.frames == 1 else video_suffix()
    folder = source_folder(source)
    files = [(f"{folder}/{p:05d}-{s}.{suffix}", p, s) for s in session.seeds for p in range(len(session.prompts))]
    missing = {each for each in files if not (session.directory / each[0]).is_file()}
    if not missing:
        return files
    run = build(replace(config, engine=replace(config.engine, context_parallel=1)), load_data=False)
    if checkpoint is not None:
        run.resume(checkpoint)
    check_weights_exist(run, weights)
    batch = PromptBatch(session.prompts, tuple({} for _ in session.prompts))
    size = run.batch.rollout_batch_size or DEFAULT_BATCH_SIZE
    with ProgressBar(console) as progress:
        progress.start("generating", len(missing), unit="samples")
        for seed in session.seeds:
            options = GenerationOptions(
                batch, 1, seed, build_sampler("single", 1, "", None), weights, session.directory
            )
            due = [each for each in files if each in missing and each[2] == seed]
            for first in range(0, len(due), size):
                part = due[first : first + size]
                pixels, _, _ = run_search(run, options, [prompt for _, prompt, _ in part])
                for image, (file, _, _) in zip(pixels, part, strict=True):
                    save_image(image, session.directory / file)
                progress.advance(len(part))
    run.engine.close()
    return files


def score_session(session: Session, rewards: Sequence[str], placement: Placement) -> dict[str, dict[str, float]]:
    """Score all samples with rewards, and write the scores where the result of the session finds them."""
    scores, scorer = read_scores(session), load_folder_scorer(rewards, placement)
    for first in range(0, len(session.samples), SCORE_BATCH_SIZE):
        samples = session.samples[first : first + SCORE_BATCH_SIZE]
        records = [
            ImageRecord(Path(each.file), session.prompts[each.prompt], pixels=read_image(session.directory / each.file))
            for each in samples
        ]
        has_one_size = len({record.pixels.shape for record in records if record.pixels is not None}) == 1
        batches = [records] if has_one_size else [[record] for record in records]
        rows = [row for batch in batches for row in scorer.score_images(batch)]
        for sample, row in zip(samples, rows, strict=True):
            for name, score in row.items():
                scores.setdefault(name, {})[sample.sha256] = score
    output_paths.write_text_atomically(session.directory / SCORES_FILE, json.dumps(scores) + "\n")
    return scores
