"""Benchmarks whose prompts and questions come from their own published files, which you give with `--metadata`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..core.registry import ConfigError
from ..core.safe_files import parse_json, read_json, read_json_object, read_text
from ..core.types import Metadata
from ..rewards.ocr import QUOTED
from .benchmarks import Benchmark

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WISE_WEIGHTS = (
    ("culture", 0.40), ("time", 0.12), ("space", 0.12), ("biology", 0.12), ("physics", 0.12), ("chemistry", 0.12),
)  # fmt: skip
WISE_WORDS = {  # that name a category in the fields Category and Subcategory
    "culture": ("cultur",),
    "time": ("time", "tempor"),
    "space": ("space", "spatial", "spatio"),
    "biology": ("biolog",),
    "physics": ("physic",),
    "chemistry": ("chemi",),
}
WISE_LAST_IDS = (
    ("culture", 400),
    ("time", 520),
    ("space", 640),
    ("biology", 760),
    ("physics", 880),
    ("chemistry", 1000),
)
COMPBENCH_CATEGORIES = ("color", "shape", "texture")
COMPBENCH_IGNORED = ("top", "the side", "the left", "the right")  # noun phrases that are positions
DPG_COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
UNIGENBENCH_COLUMNS = ("index", "prompt_en", "sub_dims_en")
UNIGENBENCH_KEYS = ("Testpoints", "Testpoint Description")
UNIGENBENCH_TEXTS = Path(__file__).with_name("unigenbench.json")
VBENCH_DIMENSIONS = (
    "subject_consistency", "motion_smoothness", "dynamic_degree", "temporal_flickering", "imaging_quality",
)  # fmt: skip
# Words between noun phrases. Prompts of T2I-CompBench are plain, so no parser is needed for most of them.
PHRASE_BREAKS = re.compile(
    r"[,.;:]|\b(?:and|with|on|in|at|of|by|near|under|over|above|below|behind|beside|between|next to|to|from|into|for|"
    r"through|while|which|is|are|was|were|has|have|sits?|sitting|stands?|standing|rests?|holds?|hangs?|parked|features?|"
    r"display|displays|provide|provides|cooks?|mix|mixes|serves?|lies?|reads?)\b",
    re.IGNORECASE,
)
SAMPLE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".mp4", ".gif")
ARTICLE = re.compile(r"^(?:a|an|the|two|three|one|its|his|her|their)\s+", re.IGNORECASE)


@dataclass(frozen=True)
class PromptRow:
    """A prompt with its task and with what scores depend on."""

    prompt: str
    tag: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedBenchmark:
    """How the files of a benchmark are read, and how its scores are averaged."""

    read: Callable[[Path], list[PromptRow]]
    file: str  # what it is called where it is published
    source: str  # where that is
    samples_per_prompt: int
    score_names: tuple[str, ...]
    overall: Literal["tags", "prompts"] = "prompts"
    tag_weights: tuple[tuple[str, float], ...] = ()
    video: bool = False
    headline: str = ""  # the score that models are compared by, if it is not the first


def load_published_benchmark(name: str, prompts: int | None, count: int | None, metadata: Path | None) -> Benchmark:
    """Return the first `prompts` prompts of a benchmark's own file, with `count` samples each."""
    published = PUBLISHED_BENCHMARKS[name]
    if metadata is None:
        raise ConfigError(
            f"evaluate: {name} needs its published prompts, which are not part of this package; download "
            f"{published.file} from {published.source} and give it with --metadata [TM2154]"
        )
    if not metadata.exists():
        raise ConfigError(f"--metadata: {metadata} does not exist; give {published.file} of {name} [TM2155]")
    rows = published.read(metadata)[:prompts]
    if not rows:
        raise ConfigError(f"--metadata: {metadata} contains no prompt; give {published.file} of {name} [TM2156]")
    return Benchmark(
        name,
        prompts=tuple(row.prompt for row in rows),
        metadata=tuple({"prompt": row.prompt, **row.metadata} for row in rows),
        tags=tuple(row.tag for row in rows),
        samples_per_prompt=published.samples_per_prompt if count is None else count,
        score_names=published.score_names,
        video=published.video,
        overall=published.overall,
        tag_weights=published.tag_weights,
        headline=published.headline,
    )


def find_samples(benchmark: Benchmark, folder: Path) -> list[Path]:
    """List existing samples by prompt: `00000/0000.png` as written here, or `NAME_0.png` and, for one, `NAME.png`.

    The name is the prompt's id in the benchmark's file (item_id, prompt_id), or else its number from 0.
    """
    if not folder.is_dir():
        raise ConfigError(f"--images: {folder} is not a folder; give the folder of the samples [TM2173]")
    files = []
    for prompt, metadata in enumerate(benchmark.metadata):
        name = Path(str(metadata.get("item_id") or metadata.get("prompt_id") or prompt)).name
        for seed in range(benchmark.samples_per_prompt):
            stems = [
                f"{prompt:05d}/{seed:04d}",
                f"{name}_{seed}",
                *([name] if benchmark.samples_per_prompt == 1 else []),
            ]
            paths = [folder / f"{stem}{suffix}" for stem in stems for suffix in SAMPLE_SUFFIXES]
            found = next((path for path in paths if path.is_file()), None)
            if found is None:
                raise ConfigError(
                    f"--images: {folder} lacks sample {seed} of prompt {prompt}, for example {stems[-1]}.png; complete "
                    "the folder, or set --num-prompts and --count to what it contains [TM2174]"
                )
            files.append(found)
    return files


# Files


def list_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return a file, or the files of a folder with one of the suffixes, by name."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in suffixes)
    if not files:
        raise ConfigError(
            f"--metadata: the folder {path} has no file that ends in {' or '.join(suffixes)}; give the benchmark's "
            "own file or folder [TM2157]"
        )
    return files


def read_rows(path: Path) -> list[tuple[str, Any]]:
    """Return the rows of a JSON list or of JSON lines, each with its place for messages."""
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
        return [(f"{path}, line {number}", parse_json(line, f"{path}, line {number}")) for number, line in lines]
    rows = read_json(path)
    if not isinstance(rows, list):
        raise ConfigError(
            f"--metadata: {path} contains a {type(rows).__name__}; expected a list of objects, so give the "
            "benchmark's own file [TM2158]"
        )
    return [(f"{path}, entry {number}", row) for number, row in enumerate(rows, 1)]


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


def require_text(row: Any, key: str, where: str) -> str:
    """Return a non-empty text field of a row."""
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"--metadata: {where} has no text '{key}'; give the benchmark's own file, with all of its fields [TM2159]"
        )
    return value


# GenEval 2


def read_geneval2(path: Path) -> list[PromptRow]:
    """Read `geneval2_data.jsonl`: prompts with questions, answers and the skill of each question."""
    prompts = []
    for where, row in read_rows(path):
        text = require_text(row, "prompt", where)
        questions, skills = row.get("vqa_list"), row.get("skills")
        pairs = questions if isinstance(questions, list) else []
        if not pairs or not all(_is_pair(pair) for pair in pairs):
            raise ConfigError(
                f"--metadata: {where} has no list 'vqa_list' of question and answer; give geneval2_data.jsonl [TM2160]"
            )
        names = [str(skill) for skill in skills] if isinstance(skills, list) else []
        if len(names) != len(pairs):
            raise ConfigError(
                f"--metadata: {where} has {len(pairs)} questions and {len(names)} skills; expected one skill per "
                "question, so give geneval2_data.jsonl [TM2161]"
            )
        for question, answer in pairs:
            if answer.lower() != "yes" and not (is_count(question) and answer.lower() in NUMBERS):
                raise ConfigError(
                    f"--metadata: {where} expects the answer '{answer:.40}'; expected Yes, or a number from zero to "
                    "ten for a question with 'How many' [TM2162]"
                )
        atoms = row.get("atom_count", len(pairs))
        prompts.append(PromptRow(text, f"{atoms} atoms", {"vqa_list": pairs, "skills": names}))
    return prompts


def is_count(question: str) -> bool:
    return question.startswith("How many")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)


# DPG-Bench


def read_dpg(path: Path) -> list[PromptRow]:
    """Read `dpg_bench.csv`: one line per question, with the questions that it depends on."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    missing = [name for name in DPG_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"--metadata: {path} lacks the column '{missing[0]}'; give dpg_bench.csv [TM2163]")
    items: dict[str, list[dict[str, Any]]] = {}
    texts: dict[str, str] = {}
    for number, row in enumerate(reader, 2):
        where = f"{path}, line {number}"
        item = require_text(row, "item_id", where)
        texts[item] = texts.get(item) or (row["text"] or "").strip()
        label = require_text(row, "tuple", where)
        question = {
            "id": _parse_ids(row["proposition_id"], where)[0],
            "parents": [parent for parent in _parse_ids(row["dependency"], where) if parent != 0],
            "question": require_text(row, "question_natural_language", where),
            "category": label.partition("-")[0].strip(),
            "detail": label.partition("(")[0].strip(),
        }
        items.setdefault(item, []).append(question)
    rows = []
    for item, questions in items.items():
        known = {question["id"] for question in questions}
        unknown = [parent for question in questions for parent in question["parents"] if parent not in known]
        if unknown or not texts[item]:
            found = f"depends on question {unknown[0]}, which it lacks" if unknown else "has no text"
            raise ConfigError(f"--metadata: item '{item:.60}' of {path} {found}; give dpg_bench.csv [TM2164]")
        rows.append(PromptRow(texts[item], "all", {"item_id": item, "questions": questions}))
    return rows


def _parse_ids(text: str | None, where: str) -> list[int]:
    numbers = [part.strip() for part in (text or "").split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(
            f"--metadata: {where} has the question id '{text!s:.40}'; expected numbers with commas between them "
            "[TM2165]"
        )
    return [int(number) for number in numbers]


# WISE


def read_wise(path: Path) -> list[PromptRow]:
    """Read the JSON files of `data_verified`: prompts with the explanation that the judge sees."""
    rows = []
    for file in list_files(path, (".json",)):
        for where, row in read_rows(file):
            text, explanation = require_text(row, "Prompt", where), require_text(row, "Explanation", where)
            metadata = {"prompt_id": row.get("prompt_id"), "explanation": explanation}
            rows.append(PromptRow(text, find_wise_category(row, where), metadata))
    return rows


def find_wise_category(row: Metadata, where: str) -> str:
    """Return the category that Category or Subcategory name; else the one that the number of the prompt belongs to."""
    for key in ("Category", "Subcategory"):
        text = str(row.get(key, "")).lower()
        named = [name for name, words in WISE_WORDS.items() if any(word in text for word in words)]
        if len(named) == 1:  # spatio-temporal names two
            return named[0]
    number = row.get("prompt_id")
    for name, last in WISE_LAST_IDS:
        if isinstance(number, int) and 1 <= number <= last:
            return name
    raise ConfigError(
        f"--metadata: {where} names no category, and its prompt_id is {number!r:.40}; expected a number from 1 to "
        "1000, so give the files of data_verified [TM2166]"
    )


# UniGenBench++


@cache
def read_unigenbench_texts() -> dict[str, Any]:
    """The published question and the explanation of each testpoint, by CodeGoat24/UniGenBench under CC BY 4.0."""
    return read_json_object(UNIGENBENCH_TEXTS)


def primary_dimension(testpoint: str) -> str:
    """Attribute of `Attribute - Color`."""
    return testpoint.partition("-")[0].strip()


def read_unigenbench(path: Path) -> list[PromptRow]:
    """Read `test_prompts_en.csv`: prompts with testpoints and their descriptions."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    missing = [name for name in UNIGENBENCH_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"--metadata: {path} lacks the column '{missing[0]}'; give test_prompts_en.csv or test_prompts_en_long.csv "
            "[TM2308]"
        )
    rows = []
    for number, row in enumerate(reader, 2):
        where = f"{path}, line {number}"
        index, prompt = require_text(row, "index", where), require_text(row, "prompt_en", where)
        settings = parse_json(require_text(row, "sub_dims_en", where), where)
        lists = [settings.get(key) if isinstance(settings, dict) else None for key in UNIGENBENCH_KEYS]
        points, descriptions = ([*map(str, each)] if isinstance(each, list) else [] for each in lists)
        unknown = [point for point in points if point not in read_unigenbench_texts()["explanations"]]
        if not points or len(points) != len(descriptions) or unknown:
            found = f"the unknown testpoint '{unknown[0]:.40}'" if unknown else "no testpoint with a description each"
            raise ConfigError(f"--metadata: {where} has {found}; give test_prompts_en.csv [TM2309]")
        metadata = {"item_id": index.strip(), "testpoints": points, "descriptions": descriptions}
        rows.append(PromptRow(prompt, "all", metadata))
    return rows


# T2I-CompBench


def read_compbench(path: Path) -> list[PromptRow]:
    """Read `color_val.txt`, `shape_val.txt` and `texture_val.txt`, or JSON lines with `prompt` and `phrases`."""
    rows = []
    for file in list_files(path, (".txt", ".jsonl")):
        category = file.stem.partition("_")[0]
        if category not in COMPBENCH_CATEGORIES:
            if path.is_dir():
                continue  # other categories need a detector, a depth network or CLIP
            raise ConfigError(
                f"--metadata: {file.name} is not of the categories that are scored with questions; give the file of "
                f"{', '.join(COMPBENCH_CATEGORIES)}, such as color_val.txt, or a folder of them [TM2167]"
            )
        if path.is_dir() and file.suffix == ".txt" and not file.stem.endswith("_val"):
            continue  # the folder of the repository holds the training prompts too
        rows += _read_compbench_file(file, category)
    return rows


def _read_compbench_file(file: Path, category: str) -> list[PromptRow]:
    if file.suffix == ".txt":
        return [PromptRow(line, category, {"phrases": split_noun_phrases(line)}) for line in read_lines(file)]
    rows = []
    for where, row in read_rows(file):
        text, phrases = require_text(row, "prompt", where), row.get("phrases")
        if not isinstance(phrases, list) or not phrases or not all(isinstance(x, str) and x for x in phrases):
            raise ConfigError(
                f"--metadata: {where} has no list 'phrases' of noun phrases; write for example "
                '["a green bench", "a blue bowl"] [TM2168]'
            )
        rows.append(PromptRow(text, category, {"phrases": phrases}))
    return rows


def split_noun_phrases(prompt: str) -> list[str]:
    """Return the noun phrases of a plain prompt: what stands between conjunctions, prepositions and common verbs.

    The published scores use spaCy's noun chunks. Both agree on "a green bench and a blue bowl". On longer sentences
    they may differ; then the phrases can be given in the file.
    """
    parts = [part.strip() for part in PHRASE_BREAKS.split(prompt)]
    phrases = [part for part in parts if ARTICLE.sub("", part).strip() and part.lower() not in COMPBENCH_IGNORED]
    return list(dict.fromkeys(phrases)) or [prompt]


# VBench and OCR


def read_vbench(path: Path) -> list[PromptRow]:
    """Read `VBench_full_info.json`, whose prompts name their dimensions, or a text file with a prompt per line."""
    if path.suffix == ".txt":
        return [PromptRow(line, "all", {"dimensions": list(VBENCH_DIMENSIONS)}) for line in read_lines(path)]
    rows = []
    for where, row in read_rows(path):
        text, named = require_text(row, "prompt_en", where), row.get("dimension")
        if not isinstance(named, list):
            raise ConfigError(f"--metadata: {where} has no list 'dimension'; give VBench_full_info.json [TM2169]")
        # Imaging quality and the others of VBench's list have prompts of their own; the rest is not measured here.
        if dimensions := [name for name in VBENCH_DIMENSIONS if name in named]:
            rows.append(PromptRow(text, "all", {"dimensions": dimensions}))
    return rows


def read_ocr(path: Path) -> list[PromptRow]:
    """Read prompts with the text to render in quotes, one per line, or JSON lines with `prompt` and `text`."""
    rows = []
    if path.suffix == ".txt":
        entries = [(f"{path}, line {k}", {"prompt": line}) for k, line in enumerate(read_lines(path), 1)]
    else:
        entries = read_rows(path)
    for where, row in entries:
        prompt = require_text(row, "prompt", where)
        quoted = QUOTED.search(prompt)
        text = row.get("text") or (quoted[1] if quoted else "")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(
                f"--metadata: {where} asks for no text; put the text in double quotes, or add 'text' [TM2170]"
            )
        rows.append(PromptRow(prompt, count_words(text), {"text": text}))
    return rows


def count_words(text: str) -> str:
    """Return the task of a text: its number of words."""
    count = len(text.split())
    return "1 word" if count == 1 else f"{count} words" if count <= 4 else "5 words or more"


PUBLISHED_BENCHMARKS = {
    "geneval2": PublishedBenchmark(
        read_geneval2, "geneval2_data.jsonl", "github.com/facebookresearch/GenEval2", 1, ("am", "gm"),
        headline="gm",
    ),
    "dpg": PublishedBenchmark(
        read_dpg, "dpg_bench.csv", "github.com/TencentQQGYLab/ELLA, folder dpg_bench", 4, ("dpg",)
    ),
    "wise": PublishedBenchmark(
        read_wise, "the folder data_verified", "github.com/PKU-YuanGroup/WISE", 1, ("correct", "parsed"), "tags",
        WISE_WEIGHTS,
    ),
    "unigenbench": PublishedBenchmark(
        read_unigenbench, "test_prompts_en.csv", "github.com/CodeGoat24/UniGenBench, folder data", 4,
        ("met", "parsed"), headline="dimensions",
    ),
    "t2i-compbench": PublishedBenchmark(
        read_compbench, "the folder examples/dataset", "github.com/Karine-Huang/T2I-CompBench", 10, ("vqa",), "tags"
    ),
    "vbench-lite": PublishedBenchmark(
        read_vbench, "VBench_full_info.json", "github.com/Vchitect/VBench, folder vbench", 5, VBENCH_DIMENSIONS,
        video=True, headline="quality",
    ),
    "ocr": PublishedBenchmark(
        read_ocr, "test.txt of its OCR prompts", "github.com/yifan123/flow_grpo, folder dataset/ocr", 4,
        ("exact", "contains", "similarity", "words"), headline="similarity",
    ),
}  # fmt: skip
