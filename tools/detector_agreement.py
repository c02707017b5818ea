"""Do both detectors agree about generated pictures, and would you? Prints how often, and draws a sheet to look at.

python tools/detector_agreement.py EVALUATION_FOLDER ... --sheet verdicts.png
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from tastemaker.data.image_io import read_image, to_uint8
from tastemaker.evaluation.confidence_intervals import bootstrap_interval
from tastemaker.evaluation.detector_metrics import PlayEvalScorer, list_detections, load_playeval_scorer
from tastemaker.evaluation.evaluate import BATCH_SIZE, SAMPLES, read_jsonl
from tastemaker.evaluation.geneval_rules import DetectedObject
from tastemaker.playground.blocks import first_frame
from tastemaker.playground.caption_encoder import requested_captions
from tastemaker.playground.detector import THRESHOLD, decode_detections
from tastemaker.playground.verdict import verdict

DETECTORS = ("playground/detector0", "playground/detector1")
SIDE, WORDS, GAP = 128, 50, 6  # pixels of a picture on the sheet, of the words below it, and around both
MARKS = {(True, True): "#2e9e44", (False, False): "#c23b3b"}  # both yes, both no
SPLIT = "#e0a800"  # one of each
NAMES = ("reward", "examiner")


@dataclass(frozen=True)
class DetectorVerdict:
    """What one detector says of a picture."""

    right: bool
    found: str


@dataclass(frozen=True)
class JudgedSample:
    """A picture and what both detectors say of it."""

    file: Path
    prompt: str
    tag: str
    group: tuple[Path, int]  # pictures of one prompt are alike, so they count as one where chance is reckoned
    opinions: tuple[DetectorVerdict, DetectorVerdict]

    @property
    def verdicts(self) -> tuple[bool, bool]:
        return self.opinions[0].right, self.opinions[1].right

    @property
    def agreed(self) -> bool:
        return self.verdicts in MARKS


def judge(folder: Path, judges: Sequence[PlayEvalScorer]) -> list[JudgedSample]:
    """All pictures of an evaluation."""
    rows, judged = read_jsonl(folder / SAMPLES), []
    for start in range(0, len(rows), BATCH_SIZE):
        some = rows[start : start + BATCH_SIZE]
        first, second = (opinions(folder, some, each) for each in judges)
        judged += [
            JudgedSample(folder / row["file"], row["prompt"], row["tag"], (folder, row["index"]), pair)
            for row, pair in zip(some, zip(first, second, strict=True), strict=True)
        ]
    return judged


@torch.no_grad()
def opinions(folder: Path, rows: Sequence[dict[str, Any]], by: PlayEvalScorer) -> list[DetectorVerdict]:
    pixels = torch.stack([read_image(folder / row["file"]) for row in rows])
    prompts = tuple(row["prompt"] for row in rows)
    found = decode_detections(by.net(first_frame(pixels)))
    right = verdict(found, requested_captions(prompts, [{}] * len(prompts), by.device), strict=True).bool().tolist()
    return [
        DetectorVerdict(yes, describe_detections(seen)) for yes, seen in zip(right, list_detections(found), strict=True)
    ]


def describe_detections(seen: Sequence[DetectedObject]) -> str:
    """What was found, the surest first."""
    sure = Counter(f"{each.color} {each.name}" for each in seen if each.score > THRESHOLD)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in sure.items()) or "nothing"


def agreement(judged: Sequence[JudgedSample]) -> str:
    """How often both say the same, with the interval of prompts drawn again."""
    groups: dict[tuple[Path, int], list[float]] = {}
    for each in judged:
        groups.setdefault(each.group, []).append(float(each.agreed))
    found = bootstrap_interval(
        torch.tensor([sum(group) / len(group) for group in groups.values()], dtype=torch.float64)
    )
    counts = Counter(each.verdicts for each in judged)
    ways = f"both yes {counts[True, True]}, both no {counts[False, False]}"
    split = f"only {NAMES[0]} yes {counts[True, False]}, only {NAMES[1]} yes {counts[False, True]}"
    return f"{found['mean']:.3f} ({found['low']:.3f}-{found['high']:.3f}) of {len(judged)}: {ways}, {split}"


def lines(judged: Sequence[JudgedSample]) -> Iterator[str]:
    """The agreement by task, by folder where there are several, and over all."""
    for tag in dict.fromkeys(each.tag for each in judged):
        yield f"{tag}: {agreement([each for each in judged if each.tag == tag])}"
    folders = list(dict.fromkeys(each.group[0] for each in judged))
    for folder in folders if len(folders) > 1 else ():
        yield f"{folder}: {agreement([each for each in judged if each.group[0] == folder])}"
    yield f"agreement: {agreement(judged)}"


def sheet(judged: Sequence[JudgedSample], columns: int = 8) -> Image.Image:
    """Pictures with captions, verdicts and what was found; framed green for yes, red for no, yellow if they differ."""
    wide, high = SIDE + 2 * GAP, SIDE + WORDS + 2 * GAP
    whole = Image.new("RGB", (columns * wide, -(-len(judged) // columns) * high), "white")
    for place, each in enumerate(judged):
        left, top = place % columns * wide, place // columns * high
        frame = MARKS.get(each.verdicts, SPLIT)
        whole.paste(frame, (left + GAP - 3, top + GAP - 3, left + GAP + SIDE + 3, top + GAP + SIDE + 3))
        picture = Image.fromarray(to_uint8(read_image(each.file)[0])).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        whole.paste(picture, (left + GAP, top + GAP))
        write(whole, words(each), (left + GAP, top + GAP + SIDE + 4))
    return whole


def words(each: JudgedSample) -> list[str]:
    first, second = each.opinions
    answers = [f"{'yes' if opinion.right else 'no'}: {opinion.found}" for opinion in (first, second)]
    asks = each.prompt.removeprefix("a photo of ")
    return [asks, f"both {answers[0]}"] if first == second else [asks, *answers]


def write(whole: Image.Image, lines: Sequence[str], corner: tuple[int, int], size: int = 9, most: int = 4) -> None:
    """Words in small lines that fit below a picture, cut off after the last."""
    font, broken = ImageFont.load_default(size), list[str]()
    for line in lines:
        broken.append("")
        for word in line.split():
            longer = f"{broken[-1]} {word}".strip()
            if font.getlength(longer) > SIDE and broken[-1]:
                broken.append(word)
            else:
                broken[-1] = longer
    ImageDraw.Draw(whole).multiline_text(corner, "\n".join(broken[:most]), "black", font, spacing=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="made by `tastemaker evaluate playeval --out`")
    parser.add_argument("--sheet", type=Path, help="the picture to write, .png or .jpg")
    parser.add_argument("--count", type=int, default=64, help="pictures on the sheet, drawn by chance")
    chosen = parser.parse_args()
    judges = [load_playeval_scorer(name) for name in DETECTORS]
    judged = [each for folder in chosen.folders for each in judge(folder, judges)]
    sys.stdout.write("\n".join(lines(judged)) + "\n")
    if chosen.sheet:
        drawn = torch.randperm(len(judged), generator=torch.Generator().manual_seed(0))[: chosen.count].sort().values
        sheet([judged[k] for k in drawn.tolist()]).save(chosen.sheet, quality=75)


if __name__ == "__main__":
    main()
