"""Places that answers point to, drawn on their pictures: PaliGemma's boxes, and its outlines where it can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from torch import Tensor

from ..core.registry import ConfigError
from ..data.image_io import read_image, save_image, to_uint8
from .paligemma_segmentation import PaliGemmaDetection, PaliGemmaMaskDecoder, load_mask_decoder, parse_detections

COLORS = ((230, 57, 70), (29, 131, 226), (42, 157, 80), (244, 162, 30), (142, 68, 173), (0, 168, 168))
SHARE = 0.5  # of a covered pixel that its colour takes
STILLS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class AnnotationWriter:
    """Where to draw, and the decoder that outlines need."""

    out: Path
    decoder: PaliGemmaMaskDecoder | None

    def target(self, file: Path, home: Path | None) -> Path:
        """Of a folder's pictures each at its own place below `out`; of one picture `out` itself."""
        if home is None:
            return self.out
        inside = file.relative_to(home) if file.is_relative_to(home) else Path(file.name)
        return self.out / (inside if inside.suffix.lower() == ".png" else inside.with_name(f"{inside.name}.png"))


def open_annotation_writer(out: Path | None, weights: Path | None, *, folder: bool) -> AnnotationWriter | None:
    """Refuse what cannot be drawn before a large model is loaded."""
    if out is None:
        if weights is not None:
            raise ConfigError(f"--outlines {weights} draws nothing without --draw; say where to draw to")
        return None
    if not folder and out.suffix.lower() not in STILLS:
        raise ConfigError(f"--draw {out} is no picture; expected a name that ends in {', '.join(STILLS)}")
    return AnnotationWriter(out, load_mask_decoder(weights) if weights else None)


def detections_as_json(answer: str, height: int, width: int) -> list[dict[str, Any]]:
    """What an answer points to, in pixels, as a row of JSON holds it."""
    return [{"label": place.label, "box": list(place.corners(width, height))} for place in parse_detections(answer)]


def annotate_images(
    marker: AnnotationWriter, said: Sequence[tuple[Path, str]], home: Path | None, console: Console
) -> int:
    """Draw the answers about pictures that point somewhere; how many pictures were drawn on."""
    by_file: dict[Path, list[PaliGemmaDetection]] = {}
    for file, answer in said:
        by_file.setdefault(file, []).extend(parse_detections(answer))
    pointed = {file: found for file, found in by_file.items() if found}
    if marker.decoder is None and any(place.codes for found in pointed.values() for place in found):
        print_line(
            console, "outlines are drawn as boxes, for their decoder is not here; --outlines vae-oid.npz names it"
        )
    for file, found in pointed.items():
        pixels = read_image(file)
        shown = draw_detections(pixels[len(pixels) // 2], found, marker.decoder)
        save_image(shown[None], marker.target(file, home))
    if pointed:
        print_line(
            console, f"{sum(map(len, pointed.values()))} places drawn on {len(pointed)} pictures, see {marker.out}"
        )
    else:
        print_line(
            console, "no answer points anywhere, so nothing is drawn; ask a PaliGemma to 'detect ...' or 'segment ...'"
        )
    return len(pointed)


def draw_detections(
    pixels: Tensor, found: Sequence[PaliGemmaDetection], decoder: PaliGemmaMaskDecoder | None
) -> Tensor:
    """A picture [3, H, W] with boxes, names and, where they can be decoded, outlines on it."""
    height, width = pixels.shape[-2:]
    shown = pixels.float().clone()
    colors = {label: COLORS[i % len(COLORS)] for i, label in enumerate(dict.fromkeys(place.label for place in found))}
    for place in found:
        mask = decoder.mask(place, width, height) if decoder else None
        if mask is not None:
            color = torch.tensor(colors[place.label]).view(3, 1, 1) / 255
            shown = shown + SHARE * mask * (color - shown)
    image = Image.fromarray(to_uint8(shown))
    pen, line = ImageDraw.Draw(image), max(1, round(min(height, width) / 200))
    font: Any = ImageFont.load_default(max(10, round(min(height, width) / 32)))
    for place in found:
        left, top, right, bottom = place.corners(width - 1, height - 1)
        pen.rectangle((left, top, right, bottom), outline=colors[place.label], width=line)
        if place.label:
            _, _, wide, high = pen.textbbox((0, 0), place.label, font=font)
            # Within the picture, where it is as large as that: what lies at its right edge has a name too.
            start = max(0, min(left + line, width - wide - 1)), max(0, min(top + line, height - high - 1))
            pen.rectangle(pen.textbbox(start, place.label, font=font), fill=colors[place.label])
            pen.text(start, place.label, fill="white", font=font)
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
