"""PaliGemma's boxes (`<loc....>`) and segmentation masks (`<seg...>`): parsed from answers and drawn on images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from torch import Tensor, nn

from ..core.array_files import read_arrays
from ..core.registry import ConfigError
from ..core.text_layout import truncate_text
from ..data.image_io import read_image, save_image, to_uint8
from ..models.pretrained import load_state_dict

COLORS = ((230, 57, 70), (29, 131, 226), (42, 157, 80), (244, 162, 30), (142, 68, 173), (0, 168, 168))
MASK_OPACITY = 0.5
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
LOCATION_SCALE = 1024  # of <loc....>, along either side
CODE_WIDTH, CODE_GRID = 512, 4  # of the embedding of a mask's code, and the side of the grid of its 16 codes
DETECTION = re.compile(r"<loc(\d{4})>" * 4 + r"\s*((?:<seg\d{3}>){16})?(?:<seg\d{3}>)*\s*([^;<>]*)")
MASK_DECODER_FILE = "PaliGemma's VQ-VAE, vae-oid.npz of big_vision"


@dataclass(frozen=True)
class PaliGemmaDetection:
    """An object in an answer."""

    label: str
    box: tuple[float, float, float, float]  # left, top, right, bottom as fractions of the image
    codes: tuple[int, ...] = ()  # of its mask, if the answer has one

    def corners(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The box in pixels."""
        left, top, right, bottom = self.box
        return round(left * width), round(top * height), round(right * width), round(bottom * height)


def parse_detections(answer: str) -> list[PaliGemmaDetection]:
    """Objects of an answer such as `<loc0100><loc0200><loc0900><loc0800> cat ; ...`, which names the top first."""
    detections = []
    for match in DETECTION.finditer(answer):
        top, left, bottom, right = (int(number) / LOCATION_SCALE for number in match.groups()[:4])
        codes = tuple(int(number) for number in re.findall(r"\d{3}", match[5] or ""))
        box = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        detections.append(PaliGemmaDetection(match[6].strip(), box, codes))
    return detections


def detections_as_json(answer: str, height: int, width: int) -> list[dict[str, Any]]:
    """The objects of an answer with boxes in pixels, for a row of JSON."""
    return [{"label": each.label, "box": list(each.corners(width, height))} for each in parse_detections(answer)]


class MaskDecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.net(x)
        return out


class PaliGemmaMaskDecoder(nn.Module):
    """The decoder of PaliGemma's VQ-VAE: sixteen codes to a mask of 64 x 64 within a box."""

    def __init__(self, width: int = 128, codes: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(codes, CODE_WIDTH), requires_grad=False)
        layers: list[nn.Module] = [
            nn.Conv2d(CODE_WIDTH, width, 1),
            nn.ReLU(),
            MaskDecoderBlock(width),
            MaskDecoderBlock(width),
        ]
        previous = width
        for _ in range(4):
            layers += [nn.ConvTranspose2d(previous, width, 4, stride=2, padding=1), nn.ReLU()]
            previous, width = width, width // 2
        self.decoder = nn.Sequential(*layers, nn.Conv2d(previous, 1, 1))

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Codes [B, 16] to coverage in [0, 1]: [B, 64, 64]."""
        grid = self.embedding[codes].view(-1, CODE_GRID, CODE_GRID, CODE_WIDTH).movedim(-1, 1)
        out: Tensor = self.decoder(grid)[:, 0] / 2 + 0.5
        return out.clamp(0, 1)

    def mask(self, detection: PaliGemmaDetection, width: int, height: int) -> Tensor | None:
        """Coverage of each pixel of an image [height, width]; None if the detection has no mask."""
        if not detection.codes:
            return None
        if max(detection.codes) >= len(self.embedding):
            raise ConfigError(
                f"--mask-decoder: the answer has the mask code {max(detection.codes)}, but the weights have "
                f"{len(self.embedding)} codes; give {MASK_DECODER_FILE} [TM696]"
            )
        left, top, right, bottom = detection.corners(width, height)
        coverage = torch.zeros(height, width)
        if right > left and bottom > top:
            square = self(torch.tensor([detection.codes]))[:, None]
            resized = F.interpolate(square, (bottom - top, right - left), mode="bicubic", antialias=True)
            coverage[top:bottom, left:right] = resized[0, 0].clamp(0, 1)
        return coverage


def load_mask_decoder(path: Path) -> PaliGemmaMaskDecoder:
    """The decoder from `vae-oid.npz` as big_vision publishes it, or its tensors in a .safetensors file."""
    tensors = _read_tensors(path)
    net = PaliGemmaMaskDecoder()
    state = {key: x.float() for key, x in tensors.items() if key.startswith("decoder.")}
    state["embedding"] = tensors.get("_vq_vae._embedding", torch.zeros(0)).float()
    wrong = [key for key, x in net.state_dict().items() if key not in state or state[key].shape != x.shape]
    if wrong:
        raise ConfigError(
            f"--mask-decoder: {path} does not have a matching '{wrong[0]}'; give {MASK_DECODER_FILE} [TM697]"
        )
    net.load_state_dict({key: state[key] for key in net.state_dict()})
    return net.eval().requires_grad_(False)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"--mask-decoder: the file {path} does not exist; give {MASK_DECODER_FILE} [TM698]")
    if path.suffix != ".npz":
        return dict(load_state_dict(path))
    try:
        return {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in read_arrays(path).items()}
    except (ConfigError, TypeError) as error:  # arrays of text are no tensors
        raise ConfigError(
            f"--mask-decoder: {path} is not a readable .npz file ({error!s:.100}); download vae-oid.npz again [TM699]"
        ) from error


@dataclass(frozen=True)
class AnnotationWriter:
    """Where annotated images are written, and the decoder of masks."""

    out: Path
    decoder: PaliGemmaMaskDecoder | None

    def output_path(self, file: Path, folder: Path | None) -> Path:
        """The path below `out` that an image of a folder has in it; of a single image `out` itself."""
        if folder is None:
            return self.out
        relative = file.relative_to(folder) if file.is_relative_to(folder) else Path(file.name)
        png = relative if relative.suffix.lower() == ".png" else relative.with_name(f"{relative.name}.png")
        return self.out / png


def open_annotation_writer(out: Path | None, weights: Path | None, *, folder: bool) -> AnnotationWriter | None:
    """Check the options for drawing before a large model is loaded; None if nothing is to be drawn."""
    if out is None:
        if weights is not None:
            raise ConfigError(
                f"--mask-decoder: {weights} has no effect without --draw; add --draw with the output path [TM700]"
            )
        return None
    if not folder and out.suffix.lower() not in IMAGE_SUFFIXES:
        raise ConfigError(
            f"--draw: {out} is not an image file; use a name that ends in {', '.join(IMAGE_SUFFIXES)} [TM701]"
        )
    return AnnotationWriter(out, load_mask_decoder(weights) if weights else None)


def annotate_images(
    writer: AnnotationWriter, answers: Sequence[tuple[Path, str]], folder: Path | None, console: Console
) -> int:
    """Draw the detections of answers on their images; returns the number of annotated images."""
    by_file: dict[Path, list[PaliGemmaDetection]] = {}
    for file, answer in answers:
        by_file.setdefault(file, []).extend(parse_detections(answer))
    annotated = {file: detections for file, detections in by_file.items() if detections}
    if writer.decoder is None and any(x.codes for detections in annotated.values() for x in detections):
        print_line(
            console, "masks are drawn as boxes, because their decoder is missing; name it by --mask-decoder FILE.npz"
        )
    for file, detections in annotated.items():
        pixels = read_image(file)
        image = draw_detections(pixels[len(pixels) // 2], detections, writer.decoder)
        save_image(image[None], writer.output_path(file, folder))
    count = sum(map(len, annotated.values()))
    if annotated:
        print_line(console, f"{count} objects drawn on {len(annotated)} images, see {writer.out}")
    else:
        advice = "ask a PaliGemma to 'detect ...' or 'segment ...'"
        print_line(console, f"no answer contains a location, so nothing is drawn; {advice}")
    return len(annotated)


def draw_detections(
    pixels: Tensor, detections: Sequence[PaliGemmaDetection], decoder: PaliGemmaMaskDecoder | None
) -> Tensor:
    """An image [3, H, W] with boxes, labels and, if there is a decoder, masks on it."""
    height, width = pixels.shape[-2:]
    painted = pixels.float().clone()
    labels = dict.fromkeys(detection.label for detection in detections)
    colors = {label: COLORS[i % len(COLORS)] for i, label in enumerate(labels)}
    for detection in detections:
        mask = decoder.mask(detection, width, height) if decoder else None
        if mask is not None:
            color = torch.tensor(colors[detection.label]).view(3, 1, 1) / 255
            painted = painted + MASK_OPACITY * mask * (color - painted)
    image = Image.fromarray(to_uint8(painted))
    pen, line_width = ImageDraw.Draw(image), max(1, round(min(height, width) / 200))
    font: Any = ImageFont.load_default(max(10, round(min(height, width) / 32)))
    for detection in detections:
        color_rgb = colors[detection.label]
        left, top, right, bottom = detection.corners(width - 1, height - 1)
        pen.rectangle((left, top, right, bottom), outline=color_rgb, width=line_width)
        if label := truncate_text(detection.label, width, font.getlength):
            _, _, text_width, text_height = pen.textbbox((0, 0), label, font=font)
            # Labels of objects at the right or lower edge are moved into the image.
            x = max(0, min(left + line_width, width - text_width - 1))
            y = max(0, min(top + line_width, height - text_height - 1))
            pen.rectangle(pen.textbbox((x, y), label, font=font), fill=color_rgb)
            pen.text((x, y), label, fill="white", font=font)
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping, markup or highlighting."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
