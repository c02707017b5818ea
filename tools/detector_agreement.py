"""Measure how often both playground detectors agree about generated images, and draw a sheet to judge them yourself.

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
from tastemaker.evaluation.evaluate import BATCH_SIZE, SAMPLES, read_jsonl
from tastemaker.evaluation.geneval_rules import DetectedObject
from tastemaker.evaluation.metrics import bootstrap_interval
from tastemaker.evaluation.playeval import PlayEvalScorer, list_detections, load_playeval_scorer
from tastemaker.playground.detector import THRESHOLD, decode_detections
from tastemaker.playground.networks import first_frame, requested_captions
from tastemaker.playground.verdict import compute_verdict

DETECTORS = ("playground/detector0", "playground/detector1")
IMAGE_SIZE, TEXT_HEIGHT, GAP = 128, 50, 6  # pixels of an image on the sheet, of the text below it, and around both
FRAME_COLORS = {(True, True): "#2e9e44", (False, False): "#c23b3b"}  # both yes, both no
DISAGREEMENT_COLOR = "#e0a800"
NAMES = ("reward", "benchmark")


@dataclass(frozen=True)
class DetectorVerdict:
    """The verdict of one detector about an image, and the objects it detected."""

    correct: bool
    objects: str


@dataclass(frozen=True)
class ScoredSample:
    """An image with the verdicts of both detectors."""

    file: Path
    prompt: str
    tag: str
    group: tuple[Path, int]  # images of one prompt are correlated and count as one in confidence intervals
    verdicts: tuple[DetectorVerdict, DetectorVerdict]

    @property
    def correct(self) -> tuple[bool, bool]:
        return self.verdicts[0].correct, self.verdicts[1].correct

    @property
    def agreed(self) -> bool:
        return self.correct in FRAME_COLORS


def score_evaluation(folder: Path, scorers: Sequence[PlayEvalScorer]) -> list[ScoredSample]:
    """Score all images of an evaluation with both detectors."""
    rows, samples = read_jsonl(folder / SAMPLES), []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        first, second = (compute_verdicts(folder, batch, scorer) for scorer in scorers)
        samples += [
            ScoredSample(folder / row["file"], row["prompt"], row["tag"], (folder, row["index"]), pair)
            for row, pair in zip(batch, zip(first, second, strict=True), strict=True)
        ]
    return samples


@torch.no_grad()
def compute_verdicts(folder: Path, rows: Sequence[dict[str, Any]], scorer: PlayEvalScorer) -> list[DetectorVerdict]:
    pixels = torch.stack([read_image(folder / row["file"]) for row in rows])
    prompts = tuple(row["prompt"] for row in rows)
    detections = decode_detections(scorer.net(first_frame(pixels)))
    captions = requested_captions(prompts, [{}] * len(prompts), scorer.device)
    correct = compute_verdict(detections, captions, strict=True).bool().tolist()
    return [
        DetectorVerdict(is_correct, describe_detections(objects))
        for is_correct, objects in zip(correct, list_detections(detections), strict=True)
    ]


def describe_detections(objects: Sequence[DetectedObject]) -> str:
    """List the detected objects, the most confident first."""
    counts = Counter(f"{each.color} {each.name}" for each in objects if each.score > THRESHOLD)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items()) or "nothing"


def describe_agreement(samples: Sequence[ScoredSample]) -> str:
    """Return how often both detectors agree, with a bootstrap interval over prompts."""
    groups: dict[tuple[Path, int], list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(float(sample.agreed))
    means = torch.tensor([sum(group) / len(group) for group in groups.values()], dtype=torch.float64)
    interval = bootstrap_interval(means)
    counts = Counter(sample.correct for sample in samples)
    agree = f"both yes {counts[True, True]}, both no {counts[False, False]}"
    disagree = f"only {NAMES[0]} yes {counts[True, False]}, only {NAMES[1]} yes {counts[False, True]}"
    mean = f"{interval['mean']:.3f} ({interval['low']:.3f}-{interval['high']:.3f})"
    return f"{mean} of {len(samples)}: {agree}, {disagree}"


def report_lines(samples: Sequence[ScoredSample]) -> Iterator[str]:
    """Yield the agreement by task, by folder if there are several, and overall."""
    for tag in dict.fromkeys(sample.tag for sample in samples):
        yield f"{tag}: {describe_agreement([sample for sample in samples if sample.tag == tag])}"
    folders = list(dict.fromkeys(sample.group[0] for sample in samples))
    for folder in folders if len(folders) > 1 else ():
        yield f"{folder}: {describe_agreement([sample for sample in samples if sample.group[0] == folder])}"
    yield f"agreement: {describe_agreement(samples)}"


def draw_sheet(samples: Sequence[ScoredSample], columns: int = 8) -> Image.Image:
    """Draw images with captions and verdicts, framed green for yes, red for no, yellow for disagreement."""
    width, height = IMAGE_SIZE + 2 * GAP, IMAGE_SIZE + TEXT_HEIGHT + 2 * GAP
    sheet = Image.new("RGB", (columns * width, -(-len(samples) // columns) * height), "white")
    for i, sample in enumerate(samples):
        left, top = i % columns * width + GAP, i // columns * height + GAP
        frame = FRAME_COLORS.get(sample.correct, DISAGREEMENT_COLOR)
        sheet.paste(frame, (left - 3, top - 3, left + IMAGE_SIZE + 3, top + IMAGE_SIZE + 3))
        image = Image.fromarray(to_uint8(read_image(sample.file)[0]))
        sheet.paste(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST), (left, top))
        draw_text(sheet, caption_lines(sample), (left, top + IMAGE_SIZE + 4))
    return sheet


def caption_lines(sample: ScoredSample) -> list[str]:
    first, second = sample.verdicts
    answers = [f"{'yes' if verdict.correct else 'no'}: {verdict.objects}" for verdict in (first, second)]
    prompt = sample.prompt.removeprefix("a photo of ")
    return [prompt, f"both {answers[0]}"] if first == second else [prompt, *answers]


def draw_text(
    sheet: Image.Image, lines: Sequence[str], corner: tuple[int, int], size: int = 9, max_lines: int = 4
) -> None:
    """Draw lines below an image, wrapped to its width and cut off after the last."""
    font, wrapped = ImageFont.load_default(size), list[str]()
    for line in lines:
        wrapped.append("")
        for word in line.split():
            longer = f"{wrapped[-1]} {word}".strip()
            if font.getlength(longer) > IMAGE_SIZE and wrapped[-1]:
                wrapped.append(word)
            else:
                wrapped[-1] = longer
    ImageDraw.Draw(sheet).multiline_text(corner, "\n".join(wrapped[:max_lines]), "black", font, spacing=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="written by `tastemaker evaluate playeval --out`")
    parser.add_argument("--sheet", type=Path, help="image file to write, .png or .jpg")
    parser.add_argument("--count", type=int, default=64, help="random images on the sheet")
    options = parser.parse_args()
    scorers = [load_playeval_scorer(name) for name in DETECTORS]
    samples = [sample for folder in options.folders for sample in score_evaluation(folder, scorers)]
    sys.stdout.write("\n".join(report_lines(samples)) + "\n")
    if options.sheet:
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        chosen = order[: options.count].sort().values
        draw_sheet([samples[k] for k in chosen.tolist()]).save(options.sheet, quality=75)


if __name__ == "__main__":
    main()
