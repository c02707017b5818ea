"""Words on signs in several fonts, shapes and colors: a small text rendering task."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_uppercase

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..core.randomness import Randomness
from ..core.types import Metadata, select_rows
from .art import ART
from .captions import SIGN, Split
from .purposes import PlaygroundPurpose
from .scenes import CHUNK, SIDE, Painter

WORDS: tuple[str, ...] = tuple((ART / "words.txt").read_text(encoding="utf-8").split())
NUM_PSEUDOWORDS = 3000  # random strings, from which a generator learns to spell unseen words
FONTS: tuple[str, ...] = (
    *("DejaVuSans-Bold", "DejaVuSansMono-Bold", "DejaVuSerif-Bold"),
    *("OpenSans-Bold", "OpenSans-CondBold", "Quicksand-Bold"),
)
BOARDS = (  # colors of a sign and of its text
    ((0.10, 0.45, 0.25), (1.00, 1.00, 1.00)),
    ((0.10, 0.30, 0.70), (1.00, 1.00, 1.00)),
    ((0.75, 0.10, 0.12), (1.00, 1.00, 1.00)),
    ((0.98, 0.82, 0.15), (0.08, 0.08, 0.08)),
    ((0.98, 0.98, 0.96), (0.08, 0.08, 0.10)),
    ((0.13, 0.13, 0.15), (0.98, 0.95, 0.85)),
    ((0.42, 0.26, 0.14), (1.00, 0.95, 0.80)),
    ((0.98, 0.98, 0.96), (0.75, 0.10, 0.12)),
)
CORNER_RADII = (1.5, 4.0, 8.0)  # corner radius of a sign in pixels
POST = (0.36, 0.30, 0.26)
WIDE, HIGH = 52, 24  # largest size of a word in pixels
SQUEEZE = 1.3  # how much wider a word is drawn before it is compressed; else long words are too small to read
TEXT = re.compile(rf'{SIGN} "(?P<word>[^"]+)"')


def held_out_words() -> Tensor:
    """Which words are held out, about a fifth: [len(WORDS)] bool."""
    return torch.tensor([zlib.crc32(word.encode()) % 5 == 0 for word in WORDS])


@lru_cache(maxsize=1)
def load_lexicon() -> tuple[str, ...]:
    """All words, followed by pseudowords."""
    rng = Randomness(0, 0, torch.arange(NUM_PSEUDOWORDS + 100))  # some are drawn twice, or are words
    lengths = 3 + rng.words(PlaygroundPurpose.PSEUDOWORD_LENGTH, 1)[:, 0] % 4
    letters = rng.words(PlaygroundPurpose.PSEUDOWORD_LETTERS, 6) % 26
    rows = zip(letters.tolist(), lengths.tolist(), strict=True)
    cut = ["".join(ascii_uppercase[k] for k in row[:length]) for row, length in rows]
    return tuple(dict.fromkeys([*WORDS, *cut]))[: len(WORDS) + NUM_PSEUDOWORDS]


def sample_words(
    rng: Randomness, split: Split, purpose: str = PlaygroundPurpose.WORD, pseudoword_ratio: float = 0.0
) -> Tensor:
    """Sample words as indices into the lexicon, with a fraction of pseudowords: [N]."""
    places = (held_out_words() == (split == "held_out")).nonzero()[:, 0].to(rng.rows.device)
    drawn = rng.words(purpose, 1)[:, 0]
    if not pseudoword_ratio:
        return places[drawn % len(places)]
    strange = rng.uniform(f"{purpose} invented", 1)[:, 0] < pseudoword_ratio
    return torch.where(strange, len(WORDS) + drawn % NUM_PSEUDOWORDS, places[drawn % len(places)])


def corrupt_words(
    words: Tensor, probability: float, rng: Randomness, split: Split, pseudoword_ratio: float = 0.0
) -> Tensor:
    """Resample words with a probability: [N]."""
    bad = rng.uniform(PlaygroundPurpose.CORRUPT_WORD, 1)[:, 0] < probability
    return torch.where(bad, sample_words(rng, split, PlaygroundPurpose.WRONG_WORD, pseudoword_ratio), words)


def sign_captions(words: Tensor) -> tuple[str, ...]:
    known = load_lexicon()
    return tuple(f'{SIGN} "{known[place]}"' for place in words.tolist())


def sign_metadata(words: Tensor) -> tuple[Metadata, ...]:
    """The text of each sign, for OCR rewards."""
    known = load_lexicon()
    return tuple({"text": known[place]} for place in words.tolist())


def requested_words(prompts: Sequence[str]) -> tuple[str, ...]:
    """The word of each prompt."""
    matches = [TEXT.fullmatch(prompt) for prompt in prompts]
    for prompt, match in zip(prompts, matches, strict=True):
        if match is None:
            raise ValueError(
                f"'{prompt:.80}' does not describe a sign; write a prompt such as '{SIGN} \"HELLO\"' [TM761]"
            )
    return tuple(match["word"] for match in matches if match)


@lru_cache(maxsize=2)
def render_words(pseudowords: bool = False) -> tuple[Tensor, Tensor]:
    """Render every word in every font, and each pseudoword in one font, as large as fits: [.., 1, 24, 52] uint8 and the
    sizes [.., 2]."""
    if pseudowords:
        known, strange = render_words(), load_lexicon()[len(WORDS) :]
        more = _drawn([_ink(word, FONTS[k % len(FONTS)]) for k, word in enumerate(strange)])
        return torch.cat([known[0], more[0]]), torch.cat([known[1], more[1]])
    return _drawn([_ink(word, font) for word in WORDS for font in FONTS])


def _drawn(images: list[tuple[Image.Image, tuple[int, int]]]) -> tuple[Tensor, Tensor]:
    ink = torch.stack([torch.from_numpy(np.array(image)) for image, _ in images])
    return ink[:, None], torch.tensor([size for _, size in images], dtype=torch.float32)


def _ink(word: str, font: str) -> tuple[Image.Image, tuple[int, int]]:
    largest = _font(font, 30).getbbox(word)
    room = min(WIDE * SQUEEZE / (largest[2] - largest[0]), HIGH / (largest[3] - largest[1]))
    for size in range(min(30, int(30 * room) + 3), 5, -1):  # larger sizes do not fit with any hinting
        left, top, right, bottom = map(round, _font(font, size).getbbox(word))
        if right - left <= WIDE * SQUEEZE and bottom - top <= HIGH:
            break
    tight = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(tight).text((-left, -top), word, 255, _font(font, size))
    width, height = min(tight.width, WIDE), tight.height
    whole = Image.new("L", (WIDE, HIGH))
    whole.paste(tight.resize((width, height), Image.Resampling.BOX), ((WIDE - width) // 2, (HIGH - height) // 2))
    return whole, (width, height)


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(ART / "fonts" / f"{name}.ttf", size, layout_engine=ImageFont.Layout.BASIC)


@dataclass(frozen=True)
class SignLayouts:
    """The layout of each sign."""

    ink: Tensor  # [N] index of the rendered word
    board: Tensor  # [N] index into BOARDS
    corner_radius: Tensor  # [N] pixels
    scale: Tensor  # [N] of the letters
    x: Tensor  # [N] the middle of the sign, pixels from the left
    y: Tensor  # [N] and from the top
    half: Tensor  # [N, 2] half its width and height in pixels


class SignPainter:
    """Paints words on signs; rendering pseudowords takes longer to prepare."""

    def __init__(self, device: torch.device | str = "cpu", pseudowords: bool = False) -> None:
        self.device = torch.device(device)
        self.ink, self.spans = (part.to(self.device) for part in render_words(pseudowords))
        self.boards = torch.tensor(BOARDS, device=self.device)  # [8, 2, 3]
        self.painter = Painter(device=self.device)

    def arrange(self, words: Tensor, rng: Randomness) -> SignLayouts:
        """Sample a layout for each word."""
        draws = rng.uniform(PlaygroundPurpose.SIGN, 7).to(self.device)
        words, fonts = words.to(self.device), (draws[:, 0] * len(FONTS)).long()
        after = (len(FONTS) - 1) * len(WORDS)  # pseudowords come after all words in all fonts
        ink = torch.where(words < len(WORDS), words * len(FONTS) + fonts, words + after)
        scale = 0.85 + 0.15 * draws[:, 1]
        corner_radius = torch.tensor(CORNER_RADII, device=self.device)[(draws[:, 3] * len(CORNER_RADII)).long()]
        margin = 3 + draws[:, 2:3] + 0.1 * corner_radius[:, None] * torch.tensor([1, 0], device=self.device)
        half = scale[:, None] * self.spans[ink] / 2 + margin
        room = (SIDE / 2 - 1 - half).clamp(min=0)  # [N, 2] pixels the middle can move either way
        return SignLayouts(
            ink=ink,
            board=(draws[:, 4] * len(BOARDS)).long(),
            corner_radius=torch.minimum(corner_radius, half[:, 1]),
            scale=scale,
            x=SIDE / 2 + (2 * draws[:, 5] - 1) * room[:, 0],
            y=SIDE / 2 - draws[:, 6] * room[:, 1],  # in the upper half, above the post
            half=half,
        )

    def paint(self, words: Tensor, rng: Randomness) -> Tensor:
        """Paint a sign for each word: [N, 1, 3, 64, 64] in [0, 1]."""
        signs, background = self.arrange(words, rng), self.painter.background(rng)
        parts = torch.split(torch.arange(len(words), device=self.device), CHUNK)
        return torch.cat([background[:0], *(self._over(background[rows], select_rows(signs, rows)) for rows in parts)])[
            :, None
        ]

    def _over(self, pixels: Tensor, signs: SignLayouts) -> Tensor:
        line = torch.arange(SIDE, device=self.device) + 0.5
        across = (line - signs.x[:, None])[:, None, :].expand(-1, SIDE, -1)  # [N, 64, 64] pixels from the middle
        down = (line - signs.y[:, None])[:, :, None].expand(-1, -1, SIDE)
        post = (2 - across.abs()).clamp(0, 1) * (down > 0)
        board, frame = (_inside(across, down, signs, edge) for edge in (0.0, 1.5))
        where = torch.stack([across / (WIDE / 2), down / (HIGH / 2)], 3) / signs.scale[:, None, None, None]
        shapes = self.ink[signs.ink].float() / 255
        ink = F.grid_sample(shapes, where, padding_mode="zeros", align_corners=False)[:, 0]
        plain, written = self.boards[signs.board].unbind(1)  # [N, 3] each
        for cover, color in (
            (post, torch.tensor([POST], device=self.device)),
            *((board, written), (frame, plain), (ink, written)),
        ):
            pixels = pixels + cover[:, None] * (color[..., None, None] - pixels)
        return pixels.clamp(0, 1)


def _inside(across: Tensor, down: Tensor, signs: SignLayouts, edge: float) -> Tensor:
    """Coverage of each pixel by a rounded rectangle, inset by `edge` pixels: [N, 64, 64]."""
    corner_radius = signs.corner_radius[:, None, None]
    beyond = [
        (distance.abs() - half[:, None, None] + corner_radius)
        for distance, half in zip((across, down), signs.half.unbind(1), strict=True)
    ]
    outer = torch.hypot(beyond[0].clamp(min=0), beyond[1].clamp(min=0))
    distance = outer + torch.maximum(*beyond).clamp(max=0) - corner_radius
    return (0.5 - edge - distance).clamp(0, 1)
