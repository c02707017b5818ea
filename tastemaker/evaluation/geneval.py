"""GenEval: its 553 prompts, its folders of pictures, its detector as a marker, and its lines of results."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Metadata, Prompts
from ..rewards.geneval import GenevalScorer
from .benchmarks import Benchmark
from .evaluate import SCORES, read_jsonl
from .geneval_rules import CLASSES, COLORS, RELATIONS, validate_metadata

METADATA = "evaluation_metadata.jsonl"
METADATA_URL = f"https://raw.githubusercontent.com/djghosh13/geneval/main/prompts/{METADATA}"
METADATA_MD5 = "9a0ed515640279a48ed3380d90aec0ed"  # of the published file
RESULTS, SUMMARY = "results.jsonl", "summary.txt"
PROMPTS, IMAGES_PER_PROMPT = 553, 4
PROMPTS_PER_TASK = 100  # prompts drawn of a task, before those drawn twice are dropped
NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}
IMAGE_NAME = re.compile(r"\d+\.png")


def published_prompts() -> tuple[Metadata, ...]:
    """The published prompts with their metadata, drawn again as they were, and held against the published file."""
    text = published_metadata()
    found = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    if found != METADATA_MD5:
        raise ConfigError(
            f"the prompts drawn here have the MD5 {found}, the published ones {METADATA_MD5}: "
            "this NumPy draws other numbers; "
            f"fetch {METADATA_URL} and name it with --metadata"
        )
    return tuple(json.loads(line) for line in text.splitlines())


@lru_cache(maxsize=1)
def published_metadata() -> str:
    """The text of `evaluation_metadata.jsonl`."""
    lines = dict.fromkeys(json.dumps(row) for row in _draw_prompts(np.random.default_rng(43)))
    return "".join(f"{line}\n" for line in lines)


def _draw_prompts(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """All tasks one after the other; the order of draws and of keys is the published file's."""
    for place in rng.choice(len(CLASSES), len(CLASSES), replace=False):
        yield _prompt_row("single_object", [_object(place)], _with_article(CLASSES[place]))
    for _ in range(PROMPTS_PER_TASK):
        first, second = rng.choice(len(CLASSES), 2, replace=False)
        words = f"{_with_article(CLASSES[first])} and {_with_article(CLASSES[second])}"
        yield _prompt_row("two_object", [_object(first), _object(second)], words)
    for _ in range(PROMPTS_PER_TASK):
        place, count = rng.choice(len(CLASSES)), int(rng.integers(2, 4, endpoint=True))
        name = CLASSES[place]
        wanted, unwanted = {"class": name, "count": count}, {"class": name, "count": count + 1}
        text = f"a photo of {NUMBER_WORDS[count]} {name}{'es' if name.endswith('s') else 's'}"
        yield {"tag": "counting", "include": [wanted], "exclude": [unwanted], "prompt": text}
    for _ in range(PROMPTS_PER_TASK):
        place, color = rng.choice(len(CLASSES) - 1) + 1, COLORS[rng.choice(len(COLORS))]  # people have no colour
        yield _prompt_row("colors", [_object(place, color=color)], _with_article(f"{color} {CLASSES[place]}"))
    for _ in range(PROMPTS_PER_TASK):
        first, second = rng.choice(len(CLASSES), 2, replace=False)
        relation = RELATIONS[rng.choice(len(RELATIONS))]
        words = f"{_with_article(CLASSES[first])} {relation} {_with_article(CLASSES[second])}"
        yield _prompt_row("position", [_object(second), _object(first, position=[relation, 0])], words)
    for _ in range(PROMPTS_PER_TASK):
        things = rng.choice(len(CLASSES) - 1, 2, replace=False) + 1
        colors = [COLORS[place] for place in rng.choice(len(COLORS), 2, replace=False)]
        pairs = list(zip(things, colors, strict=True))
        words = " and ".join(_with_article(f"{color} {CLASSES[place]}") for place, color in pairs)
        yield _prompt_row("color_attr", [_object(place, color=color) for place, color in pairs], words)


def _object(place: int, **more: Any) -> dict[str, Any]:
    return {"class": CLASSES[place], "count": 1, **more}


def _prompt_row(tag: str, include: list[dict[str, Any]], words: str) -> dict[str, Any]:
    return {"tag": tag, "include": include, "prompt": f"a photo of {words}"}


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def read_metadata(path: Path) -> tuple[Metadata, ...]:
    """Prompts of a file in the published layout, every one of them sound."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as one JSON mapping a line ({error}); check the path") from error
    if not rows:
        raise ConfigError(f"{path} holds no prompts; expected GenEval's {METADATA}")
    return tuple(_check_row(row, f"{path}, line {number}") for number, row in enumerate(rows, 1))


def geneval(count: int = PROMPTS, seeds: int = IMAGES_PER_PROMPT, metadata: Path | None = None) -> Benchmark:
    """The first so many of the prompts, published or of a file."""
    if count < 1 or seeds < 1:
        raise ValueError(f"GenEval was asked for {count} prompts, {seeds} pictures each; expected at least 1 and 1")
    facts = (read_metadata(metadata) if metadata else published_prompts())[:count]
    texts, tags = tuple(fact["prompt"] for fact in facts), tuple(fact["tag"] for fact in facts)
    places = "images/{prompt:05d}/samples/{seed:04d}.png", "images/{prompt:05d}/metadata.jsonl"
    return Benchmark("geneval", texts, facts, tags, seeds, ("correct",), layout=places[0], metadata=places[1])


def find_images(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Pictures in the layout of GenEval's own scripts, those of a prompt one after the other, none missing or over."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected one that holds 00000, 00001 and so on")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name.isdigit())
    wanted = [f"{place:05d}" for place in range(len(benchmark))]
    _check_complete(
        folder, [name for name in wanted if name not in found], [n for n in found if n not in wanted], "folders"
    )
    return [
        file for place in range(len(benchmark)) for file in _images_of_prompt(benchmark, folder / wanted[place], place)
    ]


def _images_of_prompt(benchmark: Benchmark, folder: Path, place: int) -> list[Path]:
    facts, samples = folder / "metadata.jsonl", folder / "samples"
    if not facts.is_file() or not samples.is_dir():
        raise ConfigError(f"{folder} lacks metadata.jsonl or samples/; expected both, as GenEval's scripts write them")
    told = _metadata(facts)
    if told != benchmark.facts[place]:
        raise ConfigError(
            f"{facts} asks for '{told['prompt']:.80}', but prompt {place} is '{benchmark.prompts[place]:.80}'; "
            f"give the {METADATA} that the pictures were made of with --metadata"
        )
    files = sorted(path for path in samples.iterdir() if not path.name.startswith("."))
    extra = [path.name for path in files if not IMAGE_NAME.fullmatch(path.name)]
    pictures = sorted((path for path in files if path.name not in extra), key=lambda path: int(path.stem))
    extra += [path.name for path in pictures[benchmark.seeds :]]
    lost = [f"{k:04d}.png" for k in range(len(pictures), benchmark.seeds)]
    _check_complete(samples, lost, extra, "pictures")
    return pictures


def _metadata(path: Path) -> Metadata:
    """What a folder's pictures were asked to show: a mapping on one line, or on many as Image-Generation-CoT has it."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return read_metadata(path)[0]
    return _check_row(told, f"{path}")


def _check_row(row: Any, where: str) -> Metadata:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(f"{where}: has no 'prompt'; expected a mapping as in GenEval's {METADATA}")
    validate_metadata(row, where)
    return row


def _check_complete(folder: Path, lost: Sequence[str], extra: Sequence[str], kind: str) -> None:
    for names, what in ((lost, "lacks"), (extra, "holds beyond what was asked for")):
        if names:
            raise ConfigError(
                f"{folder} {what} {len(names)} {kind}, {names[0]} the first; mend it, or say by --prompts, --count and "
                "--metadata what it is to hold"
            )


@dataclass(frozen=True)
class GenEvalBenchmarkScorer:
    """Marks pictures by GenEval's detector and rules."""

    scorer: GenevalScorer
    device: torch.device

    def mark(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> list[dict[str, Any]]:
        rows, size = [], self.scorer.spec.batch_size
        for first in range(0, len(pixels), size):
            some = pixels[first : first + size, 0].to(self.device)
            for told in self.scorer.sight.look(some, facts[first : first + size]):
                kept = [(name, told.kept[name]) for name in CLASSES if name in told.kept]  # in the published order
                boxes = {name: [[*d.box, d.score] for d in group] for name, group in kept}
                rows.append({"correct": float(told.correct), "reasons": list(told.reasons), "details": boxes})
        return rows


def write_results(benchmark: Benchmark, out: Path) -> Path:
    """The scores as GenEval's own evaluation writes them, for scripts that read that, and its summary of them."""
    lines, rows = [], read_jsonl(out / SCORES)
    for row in rows:
        file, fact = row["file"], benchmark.facts[row["index"]]
        known = {"filename": file, "tag": row["tag"], "prompt": row["prompt"], "correct": bool(row["correct"])}
        texts = {"reason": "\n".join(row["reasons"]), "metadata": json.dumps(fact)}
        lines.append(json.dumps({**known, **texts, "details": json.dumps(row["details"])}) + "\n")
    (out / RESULTS).write_text("".join(lines), encoding="utf-8")
    (out / SUMMARY).write_text(format_summary(rows), encoding="utf-8")
    return out / RESULTS


def format_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """What GenEval's own script says of scores, in its words."""
    tasks, prompts = defaultdict[str, list[float]](list), defaultdict[int, list[float]](list)
    for row in rows:
        tasks[row["tag"]].append(row["correct"])
        prompts[row["index"]].append(row["correct"])
    shares = [sum(task) / len(task) for task in tasks.values()]
    whole, once = sum(row["correct"] for row in rows) / len(rows), sum(map(max, prompts.values())) / len(prompts)
    head = [f"Total images: {len(rows)}", f"Total prompts: {len(prompts)}"]
    head += [f"% correct images: {whole:.2%}", f"% correct prompts: {once:.2%}"]
    told = zip(tasks.items(), shares, strict=True)
    each = [f"{tag:<16} = {share:.2%} ({sum(task):.0f} / {len(task)})" for (tag, task), share in told]
    last = f"Overall score (avg. over tasks): {sum(shares) / len(shares):.5f}"
    return "\n".join(["Summary", "=======", *head, "", "Task breakdown", "==============", *each, "", last, ""])
