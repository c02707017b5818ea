"""Differentiable text rendering: CTC log-likelihood of the requested text under PP-OCR's recognizer (Direct-Align)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from .backbones.ppocr import load_ppocr_recognizer
from .ocr import OcrEngine, expected_text, recognizer_file

MAX_LINES = 8  # of text per image
LINE_HEIGHT = 48  # pixels of the recognizer's input
STRIDE = 8  # pixels per output position
WIDTH_STEP = 32  # widths are multiples of it, so that many lines share a batch
MAX_LINE_WIDTH = 1536  # pixels


@dataclass(frozen=True)
class OcrGradientReward(RewardSpec):
    """Mean log-likelihood per character of the requested text, regardless of case and spaces.

    The text is the metadata field `text`, or what the prompt puts in quotes. Each detected line of text, all of them
    together and the whole image are scored, and the best counts.
    """

    engine: Literal["rapidocr", "guess"] = "rapidocr"  # PP-OCRv6, or a random network for tests
    detect_lines: bool = True  # on the CPU; without it the whole image is one line
    upscale_to: Annotated[int, Field(ge=0, le=2048)] = 160  # pixels a side for detection in smaller images
    batch_size: BatchSize = 16
    card: ClassVar[RewardCard] = RewardCard(
        range="-20 to 0", failure_modes="large plain letters; grain that only the network reads", memory="0.2 GB"
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> OcrGradientScorer:
        if self.engine == "guess":
            characters = [*map(chr, range(33, 127))]  # printable ASCII
            net = RandomTextRecognizer(len(characters) + 2).to(placement.device)
            return OcrGradientScorer(self, make_text_recognizer(net, characters), None)
        recognizer = load_text_recognizer(recognizer_file(), placement.device)
        return OcrGradientScorer(self, recognizer, OcrEngine() if self.detect_lines else None)

    def tiny(self) -> Self:
        return replace(self, engine="guess")


@dataclass(frozen=True)
class OcrGradientScorer(Reward):
    spec: OcrGradientReward
    recognizer: TextRecognizer
    line_detector: OcrEngine | None

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        images = pixels[:, 0].float()
        texts = [self.recognizer.check_text(expected_text(*pair)) for pair in zip(prompts, metadata, strict=True)]
        with torch.autocast(pixels.device.type, enabled=False):
            lines = [self._lines(image, text) for image, text in zip(images, texts, strict=True)]
            log_probs = iter(self.recognizer.log_probs([line for parts in lines for line in parts]))
            scores = [
                self._best([next(log_probs) for _ in parts], text) for parts, text in zip(lines, texts, strict=True)
            ]
        return torch.stack(scores).to(pixels.dtype)

    def _lines(self, image: Tensor, text: str) -> list[Tensor]:
        """The whole image, then the detected lines of text in reading order, as inputs of the recognizer."""
        quads = self.line_detector.detect_lines(image, self.spec.upscale_to)[:MAX_LINES] if self.line_detector else []
        return [prepare_line(part, text) for part in (image, *(crop_quad(image, corners) for corners in quads))]

    def _best(self, log_probs: list[Tensor], text: str) -> Tensor:
        joined = [torch.cat(log_probs[1:])] if len(log_probs) > 2 else []
        return torch.stack([self.recognizer.log_likelihood(x, text) for x in (*log_probs, *joined)]).max()


@dataclass(frozen=True)
class TextRecognizer:
    """A recognizer of text lines, and its classes for each lower-case character."""

    net: Callable[[Tensor], Tensor]  # lines [N, 3, 48, W] in [-1, 1], blue first, to logits [N, W/8, V]
    characters: Mapping[str, tuple[int, ...]]
    blank: tuple[int, ...]  # CTC's blank, and the space

    def check_text(self, text: str) -> str:
        """Return the text if the recognizer knows all of its characters."""
        unknown = [letter for letter in text if letter not in self.characters]
        if unknown:
            raise ValueError(
                f"text '{text:.60}' contains the character '{unknown[0]}', which the recognizer does not have; "
                "remove this character [TM401]"
            )
        return text

    def log_probs(self, lines: Sequence[Tensor]) -> list[Tensor]:
        """Log-probabilities [W/8, V] of each line [3, 48, W]; lines of one width share a batch."""
        outputs: list[Tensor] = [torch.empty(0)] * len(lines)
        for width in sorted({line.shape[-1] for line in lines}):
            indices = [i for i, line in enumerate(lines) if line.shape[-1] == width]
            batch = self.net(torch.stack([lines[i] for i in indices])).log_softmax(-1)
            for i, log_probs in zip(indices, batch, strict=True):
                outputs[i] = log_probs
        return outputs

    def log_likelihood(self, log_probs: Tensor, text: str) -> Tensor:
        """Log-likelihood of a text under CTC, as a mean over its characters."""
        letters = list(dict.fromkeys(text))
        classes = [self.blank, *(self.characters[letter] for letter in letters)]
        merged = torch.stack([log_probs[:, list(ids)].logsumexp(1) for ids in classes], 1)
        # CTC's gradient assumes that probabilities sum to one, so all other classes are merged into one more.
        rest = torch.log1p(-merged.exp().sum(1, keepdim=True).clamp(max=1 - 1e-6))
        targets = torch.tensor([[1 + letters.index(letter) for letter in text]]).to(log_probs.device)
        input_length, target_length = torch.tensor([len(log_probs)]), torch.tensor([len(text)])
        inputs = torch.cat([merged, rest], 1)[:, None]
        loss = F.ctc_loss(inputs, targets, input_length, target_length, reduction="none")
        return -loss[0] / len(text)


def load_text_recognizer(path: Path, device: torch.device) -> TextRecognizer:
    """PP-OCR's recognizer; class 0 is the blank, the last one the space."""
    net, characters = load_ppocr_recognizer(path)
    return make_text_recognizer(net.to(device), characters)


def make_text_recognizer(net: Callable[[Tensor], Tensor], characters: Sequence[str]) -> TextRecognizer:
    ids: dict[str, tuple[int, ...]] = {}  # the classes of each lower-case character
    for number, letter in enumerate(characters, 1):
        ids[letter.lower()] = (*ids.get(letter.lower(), ()), number)
    return TextRecognizer(net, ids, (0, len(characters) + 1))


class RandomTextRecognizer(nn.Module):
    """A random linear map of patches to classes, for tests."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randn(classes, 3 * LINE_HEIGHT * STRIDE, generator=rng) / STRIDE)

    def forward(self, lines: Tensor) -> Tensor:
        patches = F.unfold(lines, (LINE_HEIGHT, STRIDE), stride=STRIDE).movedim(1, 2)
        return patches @ self.get_buffer("weight").T


def crop_quad(image: Tensor, corners: Tensor) -> Tensor:
    """The part of an image [3, H, W] between four corners in pixels, clockwise from the upper left: [3, h, w]."""
    a, b, c, d = corners.to(image)
    width, height = (
        max(1, round(float(torch.stack(sides).norm(dim=1).max()))) for sides in ((b - a, c - d), (d - a, c - b))
    )
    x = ((torch.arange(width, device=image.device) + 0.5) / width)[None, :, None]
    y = ((torch.arange(height, device=image.device) + 0.5) / height)[:, None, None]
    points = (1 - y) * ((1 - x) * a + x * b) + y * ((1 - x) * d + x * c)
    size = torch.tensor(image.shape[:0:-1], device=image.device)
    grid = (2 * points / size - 1)[None]
    return F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)[0]


def prepare_line(image: Tensor, text: str) -> Tensor:
    """An image [3, h, w] in [0, 1] as input of the recognizer, wide enough for every character of the text."""
    min_width = STRIDE * (2 * len(text) + 1)
    width = max(min_width, min(MAX_LINE_WIDTH, LINE_HEIGHT * image.shape[2] / image.shape[1]))
    rounded = WIDTH_STEP * -(-round(width) // WIDTH_STEP)
    line = F.interpolate(image[None], (LINE_HEIGHT, rounded), mode="bilinear", antialias=True)[0]
    return 2 * line.flip(0) - 1
