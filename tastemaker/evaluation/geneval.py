"""GenEval (Ghosh et al. 2023): its 553 prompts, folder layout, detector, result files and downloads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.request
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ..config.validate import build_component
from ..config.yaml_io import parse_yaml
from ..console import BYTES, ProgressBar
from ..core.registry import ConfigError
from ..core.reward import RewardSpec
from ..core.safe_files import parse_json, read_json, read_text
from ..core.types import Metadata, Placement, Prompts
from ..models.downloads import DownloadError
from ..rewards.backbones.frozen_models import TINY
from ..rewards.backbones.mask2former import GENEVAL_DETECTOR, PublishedFile
from ..rewards.geneval import GenevalReward, GenevalScorer
from .benchmarks import Benchmark
from .evaluate import SCORES, BenchmarkScorer, read_jsonl
from .geneval_rules import CLASSES, COLORS, RELATIONS, validate_metadata

METADATA = "evaluation_metadata.jsonl"
METADATA_URL = f"https://raw.githubusercontent.com/djghosh13/geneval/main/prompts/{METADATA}"
METADATA_MD5 = "9a0ed515640279a48ed3380d90aec0ed"  # of the published file
PROMPTS_FILE = "generation_prompts.txt"
RESULTS, SUMMARY = "results.jsonl", "summary.txt"
PROMPTS, IMAGES_PER_PROMPT = 553, 4
PROMPTS_PER_TASK = 100  # before duplicates are removed
NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}
IMAGE_NAME = re.compile(r"\d+\.png")
CHUNK = 1 << 20  # bytes


# Prompts


def geneval(
    count: int = PROMPTS, samples_per_prompt: int = IMAGES_PER_PROMPT, metadata: Path | None = None
) -> Benchmark:
    """Return the first `count` prompts, published or from a metadata file, as a benchmark."""
    if count < 1 or samples_per_prompt < 1:
        raise ValueError(
            f"GenEval: expected at least 1 prompt and 1 sample per prompt, got {count} prompts and "
            f"{samples_per_prompt} samples per prompt; use higher numbers [TM603]"
        )
    rows = (read_metadata(metadata) if metadata else published_prompts())[:count]
    return Benchmark(
        "geneval",
        prompts=tuple(row["prompt"] for row in rows),
        metadata=rows,
        tags=tuple(row["tag"] for row in rows),
        samples_per_prompt=samples_per_prompt,
        score_names=("correct",),
        image_path="images/{prompt:05d}/samples/{seed:04d}.png",
        metadata_path="images/{prompt:05d}/metadata.jsonl",
    )


def published_prompts() -> tuple[Metadata, ...]:
    """Return the published prompts with their metadata, regenerated and checked against the MD5 of the file."""
    text = published_metadata()
    md5 = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    if md5 != METADATA_MD5:
        raise ConfigError(
            f"GenEval: the regenerated prompts have the MD5 {md5}, but the published prompts have {METADATA_MD5}, "
            f"because this version of NumPy draws different random numbers; download {METADATA_URL} and give the "
            "file with --metadata [TM604]"
        )
    return tuple(json.loads(line) for line in text.splitlines())


@lru_cache(maxsize=1)
def published_metadata() -> str:
    """Return the text of `evaluation_metadata.jsonl`."""
    lines = dict.fromkeys(json.dumps(row) for row in _draw_prompts(np.random.default_rng(43)))
    return "".join(f"{line}\n" for line in lines)


def _draw_prompts(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Draw the prompts of all tasks. The order of random numbers and of keys is that of the published script."""
    for class_id in rng.choice(len(CLASSES), len(CLASSES), replace=False):
        yield _prompt_row("single_object", [_object(class_id)], _with_article(CLASSES[class_id]))
    for _ in range(PROMPTS_PER_TASK):
        first, second = rng.choice(len(CLASSES), 2, replace=False)
        text = f"{_with_article(CLASSES[first])} and {_with_article(CLASSES[second])}"
        yield _prompt_row("two_object", [_object(first), _object(second)], text)
    for _ in range(PROMPTS_PER_TASK):
        class_id, count = rng.choice(len(CLASSES)), int(rng.integers(2, 4, endpoint=True))
        name = CLASSES[class_id]
        include, exclude = {"class": name, "count": count}, {"class": name, "count": count + 1}
        text = f"a photo of {NUMBER_WORDS[count]} {name}{'es' if name.endswith('s') else 's'}"
        yield {"tag": "counting", "include": [include], "exclude": [exclude], "prompt": text}
    for _ in range(PROMPTS_PER_TASK):
        class_id, color = rng.choice(len(CLASSES) - 1) + 1, COLORS[rng.choice(len(COLORS))]  # persons have no color
        yield _prompt_row("colors", [_object(class_id, color=color)], _with_article(f"{color} {CLASSES[class_id]}"))
    for _ in range(PROMPTS_PER_TASK):
        first, second = rng.choice(len(CLASSES), 2, replace=False)
        relation = RELATIONS[rng.choice(len(RELATIONS))]
        text = f"{_with_article(CLASSES[first])} {relation} {_with_article(CLASSES[second])}"
        yield _prompt_row("position", [_object(second), _object(first, position=[relation, 0])], text)
    for _ in range(PROMPTS_PER_TASK):
        class_ids = rng.choice(len(CLASSES) - 1, 2, replace=False) + 1
        colors = [COLORS[i] for i in rng.choice(len(COLORS), 2, replace=False)]
        pairs = list(zip(class_ids, colors, strict=True))
        text = " and ".join(_with_article(f"{color} {CLASSES[class_id]}") for class_id, color in pairs)
        yield _prompt_row("color_attr", [_object(class_id, color=color) for class_id, color in pairs], text)


def _object(class_id: int, **attributes: Any) -> dict[str, Any]:
    return {"class": CLASSES[class_id], "count": 1, **attributes}


def _prompt_row(tag: str, include: list[dict[str, Any]], text: str) -> dict[str, Any]:
    return {"tag": tag, "include": include, "prompt": f"a photo of {text}"}


def _with_article(text: str) -> str:
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"


def read_metadata(path: Path) -> tuple[Metadata, ...]:
    """Read and validate prompts from a file in the published layout."""
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
        rows = [parse_json(line, f"line {number}") for number, line in enumerate(lines, 1)]
    except ConfigError as error:
        raise ConfigError(
            f"--metadata: {path} cannot be read as one JSON object per line ({error}); check the path and the "
            "file [TM605]"
        ) from error
    if not rows:
        raise ConfigError(f"--metadata: {path} does not contain prompts; give GenEval's file {METADATA} [TM606]")
    return tuple(_check_row(row, f"{path}, line {number}") for number, row in enumerate(rows, 1))


def _check_row(row: Any, where: str) -> Metadata:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(f"{where}: 'prompt' is missing; write an object as in GenEval's file {METADATA} [TM607]")
    validate_metadata(row, where)
    return row


# Folders of images


def find_images(benchmark: Benchmark, folder: Path) -> list[Path]:
    """List the images in the layout of GenEval's scripts, ordered by prompt. None may be missing or left over."""
    if not folder.is_dir():
        raise ConfigError(
            f"--images: {folder} is not a folder; give a folder with the subfolders 00000, 00001 and so on [TM608]"
        )
    existing = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name.isdigit())
    expected = [f"{prompt:05d}" for prompt in range(len(benchmark))]
    missing = [name for name in expected if name not in existing]
    _check_complete(folder, missing, [name for name in existing if name not in expected], "folders")
    return [
        file for prompt, name in enumerate(expected) for file in _images_of_prompt(benchmark, folder / name, prompt)
    ]


def _images_of_prompt(benchmark: Benchmark, folder: Path, prompt: int) -> list[Path]:
    metadata_file, samples = folder / "metadata.jsonl", folder / "samples"
    if not metadata_file.is_file() or not samples.is_dir():
        raise ConfigError(
            f"--images: {folder} does not contain both metadata.jsonl and samples/; write the images as GenEval's "
            "scripts do [TM609]"
        )
    try:  # one JSON mapping, on several lines as in Image-Generation-CoT, or one a line
        row = read_json(metadata_file)
    except ConfigError:
        row = read_metadata(metadata_file)[0]
    metadata = _check_row(row, f"{metadata_file}")
    if metadata != benchmark.metadata[prompt]:
        raise ConfigError(
            f"{metadata_file} has the prompt '{metadata['prompt']:.80}', but prompt {prompt} is "
            f"'{benchmark.prompts[prompt]:.80}'; give the {METADATA} of these images with --metadata [TM610]"
        )
    files = sorted(path for path in samples.iterdir() if not path.name.startswith("."))
    extra = [path.name for path in files if not IMAGE_NAME.fullmatch(path.name)]
    images = sorted((path for path in files if path.name not in extra), key=lambda path: int(path.stem))
    extra += [path.name for path in images[benchmark.samples_per_prompt :]]
    missing = [f"{k:04d}.png" for k in range(len(images), benchmark.samples_per_prompt)]
    _check_complete(samples, missing, extra, "images")
    return images


def _check_complete(folder: Path, missing: Sequence[str], extra: Sequence[str], what: str) -> None:
    for names, verb in ((missing, "lacks"), (extra, "should not have")):
        if names:
            raise ConfigError(
                f"--images: {folder} {verb} {len(names)} {what}, the first is {names[0]}; complete the folder, or "
                "set --num-prompts, --count and --metadata to what it contains [TM611]"
            )


# Scores


@dataclass(frozen=True)
class GenEvalBenchmarkScorer(BenchmarkScorer):
    """Scores images with GenEval's detector and rules."""

    scorer: GenevalScorer
    device: torch.device

    @property
    def detector(self) -> str:
        spec = self.scorer.spec
        settings = "" if spec.self_test else ", without self-test"
        settings += "" if spec.rules == GenevalReward().rules else f", {spec.rules}"
        settings += "" if spec.color_model in (GenevalReward.color_model, TINY) else f", colors {spec.color_model}"
        return f"detector {self.scorer.checker.detector.variant}{settings}"

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> list[dict[str, Any]]:
        rows, batch_size = [], self.scorer.spec.batch_size
        for first in range(0, len(pixels), batch_size):
            batch = slice(first, first + batch_size)
            for result in self.scorer.checker.check(pixels[batch, 0].to(self.device), metadata[batch]):
                kept = [(name, result.kept[name]) for name in CLASSES if name in result.kept]  # in the published order
                boxes = {name: [[*d.box, d.score] for d in detections] for name, detections in kept}
                rows.append({"correct": float(result.correct), "reasons": list(result.reasons), "details": boxes})
        return rows


def parse_detector(detector: str, *, self_test: bool) -> GenevalReward:
    """Parse --detector: empty for GenEval's own, a path or hub id, or settings such as {threshold: 0.4}."""
    if not detector.lstrip().startswith("{"):
        return GenevalReward(weights=detector or GenevalReward.weights, self_test=self_test)
    settings = parse_yaml(detector, "--detector")
    spec: RewardSpec = build_component(
        RewardSpec, {"type": "geneval", **(settings if isinstance(settings, dict) else {})}, "--detector"
    )
    if not isinstance(spec, GenevalReward):
        raise ConfigError(
            f"--detector: expected settings of the geneval reward, got '{detector:.60}'; give for example "
            "--detector '{threshold: 0.4}' [TM612]"
        )
    return replace(spec, self_test=spec.self_test and self_test)


def load_geneval_scorer(spec: GenevalReward, placement: Placement, *, tiny: bool) -> GenEvalBenchmarkScorer:
    if tiny and spec.weights not in (TINY, GenevalReward.weights):
        warnings.warn(
            f"--tiny: the detector {spec.weights!s:.200} is ignored; tiny detectors have random weights [TM845]",
            stacklevel=2,
        )
    return GenEvalBenchmarkScorer((spec.tiny() if tiny else spec).load(placement), placement.device)


def write_results(benchmark: Benchmark, out: Path) -> Path:
    """Write scores and summary in the format of GenEval's own evaluation, for scripts that read it."""
    lines, rows = [], read_jsonl(out / SCORES)
    for row in rows:
        line = {
            "filename": row["file"],
            "tag": row["tag"],
            "prompt": row["prompt"],
            "correct": bool(row["correct"]),
            "reason": "\n".join(row["reasons"]),
            "metadata": json.dumps(benchmark.metadata[row["index"]]),
            "details": json.dumps(row["details"]),
        }
        lines.append(json.dumps(line) + "\n")
    (out / RESULTS).write_text("".join(lines), encoding="utf-8")
    (out / SUMMARY).write_text(format_summary(rows), encoding="utf-8")
    return out / RESULTS


def format_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary that GenEval's own script prints."""
    by_task, by_prompt = defaultdict[str, list[float]](list), defaultdict[int, list[float]](list)
    for row in rows:
        by_task[row["tag"]].append(row["correct"])
        by_prompt[row["index"]].append(row["correct"])
    fractions = {tag: sum(correct) / len(correct) for tag, correct in by_task.items()}
    images = sum(row["correct"] for row in rows) / len(rows)
    prompts = sum(map(max, by_prompt.values())) / len(by_prompt)
    tasks = [
        f"{tag:<16} = {fractions[tag]:.2%} ({sum(correct):.0f} / {len(correct)})" for tag, correct in by_task.items()
    ]
    lines = [
        "Summary",
        "=======",
        f"Total images: {len(rows)}",
        f"Total prompts: {len(by_prompt)}",
        f"% correct images: {images:.2%}",
        f"% correct prompts: {prompts:.2%}",
        "",
        "Task breakdown",
        "==============",
        *tasks,
        "",
        f"Overall score (avg. over tasks): {sum(fractions.values()) / len(fractions):.5f}",
        "",
    ]
    return "\n".join(lines)


# Downloads


def download_geneval(*, only_list: bool, console: Console) -> None:
    """List the files that GenEval needs beside CLIP, and download or write those that are missing."""
    detector = GENEVAL_DETECTOR
    source = f"{detector.url} ({detector.size}, {detector.license}, SHA-256 {detector.sha256_prefix}...)"
    state = "downloaded" if detector.path.is_file() else "not downloaded"
    print_line(console, f"GenEval's detector is {source}, {state}")
    print_line(console, f"GenEval's prompts are those of {METADATA_URL}, regenerated and checked against its MD5")
    if only_list:
        return
    for path in write_prompts(detector.path.parent):
        print_line(console, f"the prompts are in {path}")
    print_line(console, f"the detector is in {fetch_verified(detector, console)}")


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def write_prompts(folder: Path) -> list[Path]:
    """Write the published metadata file, and a file with the prompts only."""
    prompts = "".join(f"{row['prompt']}\n" for row in published_prompts())  # checks the MD5
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((METADATA, published_metadata()), (PROMPTS_FILE, prompts)):
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / METADATA, folder / PROMPTS_FILE]


def fetch_verified(file: PublishedFile, console: Console) -> Path:
    """Download and verify a file, resuming a partial download. Returns its path."""
    if file.path.is_file():
        return file.verify(file.path)
    partial = file.path.with_name(f"{file.path.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(file, partial, console)
    except OSError as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DownloadError(
            f"{file.url} could not be downloaded ({reason}); run the same command again to resume, or copy the "
            f"file to {file.path}. To use another path, set {file.setting} [TM613]"
        ) from error
    try:
        file.verify(partial)
    except ConfigError:
        partial.unlink()  # a damaged download cannot be resumed
        raise
    os.replace(partial, file.path)
    return file.path


def _fetch(file: PublishedFile, partial: Path, console: Console) -> None:
    offset = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={offset}-"} if offset else {})
    response: HTTPResponse
    with urllib.request.urlopen(request, timeout=60) as response, ProgressBar(console) as progress:
        resumed = bool(offset and response.status == 206)
        offset = offset if resumed else 0
        total = int(response.headers.get("Content-Length", 0)) + offset
        progress.start(file.name, total or None, offset, BYTES)
        with partial.open("ab" if resumed else "wb") as out:
            while chunk := response.read(CHUNK):
                out.write(chunk)
                progress.advance(len(chunk))
