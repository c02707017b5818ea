"""How likely a network that reads lines of text finds a word in pictures, with gradients to their pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from .onnx_files import read_onnx
from .onnx_torch import OnnxNetwork, before_softmax

HIGH = 48  # pixels of a line as the network wants it
STRIDE = 8  # pixels that one of its answers stands for
GRAIN = 32  # widths are multiples of it, so that many lines are read in one call
LONGEST = 1536  # pixels of a line


@dataclass(frozen=True)
class TextRecognizer:
    """The network, and which of its answers stand for a letter whatever its case; a space counts as no letter."""

    net: Callable[[Tensor], Tensor]  # from lines [N, 3, 48, W] in [-1, 1], blue first, to logits [N, W/8, V]
    letters: Mapping[str, tuple[int, ...]]
    silent: tuple[int, ...]

    def known(self, word: str) -> str:
        """A word that can be spelled, or a sentence."""
        lost = [letter for letter in word if letter not in self.letters]
        if lost:
            raise ValueError(f"'{word:.60}' has the letter '{lost[0]}', which the reader does not know; leave it out")
        return word

    def read(self, lines: Sequence[Tensor]) -> list[Tensor]:
        """What each line [3, 48, W] says, place by place: [W/8, V] log-probabilities each."""
        said: list[Tensor] = [torch.empty(0)] * len(lines)
        for width in sorted({line.shape[-1] for line in lines}):
            rows = [i for i, line in enumerate(lines) if line.shape[-1] == width]
            found = self.net(torch.stack([lines[i] for i in rows])).log_softmax(-1)
            for row, i in enumerate(rows):
                said[i] = found[row]
        return said

    def likelihood(self, said: Tensor, word: str) -> Tensor:
        """Of a word, by all the ways it may be spread over the places (CTC), as a mean over its letters."""
        distinct = list(dict.fromkeys(word))
        classes = [self.silent, *(self.letters[letter] for letter in distinct)]
        own = torch.stack([said[:, list(answers)].logsumexp(1) for answers in classes], 1)
        # All that is none of them; without it what CTC's gradient takes for granted, a sum of one, would not hold.
        rest = torch.log1p(-own.exp().sum(1, keepdim=True).clamp(max=1 - 1e-6))
        spelled = torch.tensor([[1 + distinct.index(letter) for letter in word]])
        places, letters = torch.tensor([len(said)]), torch.tensor([len(word)])
        every = torch.cat([own, rest], 1)[:, None]
        lost = F.ctc_loss(every, spelled.to(said.device), places, letters, reduction="none")
        return -lost[0] / len(word)


def load_text_recognizer(path: Path, device: torch.device) -> TextRecognizer:
    """The network of an ONNX file of PaddleOCR's, whose letters are noted in it: nothing first, and last the space."""
    file = read_onnx(path)
    if "character" not in file.notes:
        raise ConfigError(f"{path} does not say which letters it knows; expected a recogniser of PaddleOCR's")
    letters = file.notes["character"].split("\n")
    net = OnnxNetwork(file, before_softmax(file)).to(device).eval()
    return TextRecognizer(net, case_insensitive_ids(letters, first=1), (0, len(letters) + 1))


def case_insensitive_ids(letters: Sequence[str], first: int) -> dict[str, tuple[int, ...]]:
    """The answers that stand for each letter in lower case."""
    found: dict[str, tuple[int, ...]] = {}
    for place, letter in enumerate(letters, first):
        found[letter.lower()] = (*found.get(letter.lower(), ()), place)
    return found


class RandomTextRecognizer(nn.Module):
    """A random network in the reader's place, for tests: each answer is a mixture of the colours of a few pixels."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randn(answers, 3 * HIGH * STRIDE, generator=chance) / STRIDE)

    def forward(self, lines: Tensor) -> Tensor:
        patches = F.unfold(lines, (HIGH, STRIDE), stride=STRIDE).movedim(1, 2)
        return patches @ self.get_buffer("weight").T


def random_text_recognizer(device: torch.device) -> TextRecognizer:
    """One that spells at random."""
    letters = [*map(chr, range(33, 127))]
    return TextRecognizer(
        RandomTextRecognizer(len(letters) + 2).to(device), case_insensitive_ids(letters, first=1), (0, len(letters) + 1)
    )


def crop_quad(picture: Tensor, corners: Tensor) -> Tensor:
    """The part of a picture [3, H, W] between four corners in pixels, clockwise from the upper left: [3, h, w]."""
    a, b, c, d = corners.to(picture)
    wide, high = (
        max(1, round(float(torch.stack(sides).norm(dim=1).max()))) for sides in ((b - a, c - d), (d - a, c - b))
    )
    across = ((torch.arange(wide, device=picture.device) + 0.5) / wide)[None, :, None]
    down = ((torch.arange(high, device=picture.device) + 0.5) / high)[:, None, None]
    places = (1 - down) * ((1 - across) * a + across * b) + down * ((1 - across) * d + across * c)
    size = torch.tensor(picture.shape[:0:-1], device=picture.device)
    where = (2 * places / size - 1)[None]
    return F.grid_sample(picture[None], where, padding_mode="border", align_corners=False)[0]


def prepare_line(picture: Tensor, word: str) -> Tensor:
    """A picture [3, h, w] in [0, 1] as the network wants it, wide enough to have a place for each letter."""
    least = STRIDE * (2 * len(word) + 1)
    wide = max(least, min(LONGEST, HIGH * picture.shape[2] / picture.shape[1]))
    whole = GRAIN * -(-round(wide) // GRAIN)
    seen = F.interpolate(picture[None], (HIGH, whole), mode="bilinear", antialias=True)[0]
    return 2 * seen.flip(0) - 1
