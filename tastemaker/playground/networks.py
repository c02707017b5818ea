"""Networks of the playground's reward models: a convolutional stem, a caption encoder, and scorers built from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.types import Metadata, Prompts
from .art import CLASSES, COLORS
from .captions import POSITION, RELATIONS, SceneCaptions, parse_captions
from .scenes import SIDE

GROUPS = 8


class ResidualBlock(nn.Module):
    """Two convolutions with group norm and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.first = nn.GroupNorm(GROUPS, width), nn.Conv2d(width, width, 3, padding=1)
        self.between, self.second = nn.GroupNorm(GROUPS, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        inner = self.first(F.silu(self.before(h)))
        out: Tensor = h + self.second(F.silu(self.between(inner)))
        return out


class Stem(nn.Module):
    """Features at 16x16 and 8x8 of images [N, 3, 64, 64] in [0, 1]; the frames of videos are channels."""

    def __init__(self, widths: tuple[int, int, int], channels: int = 3) -> None:
        super().__init__()
        fine, middle, coarse = widths
        self.enter, self.seen = nn.Conv2d(channels, fine, 4, 2, 1), ResidualBlock(fine)
        self.narrow, self.known = nn.Conv2d(fine, middle, 4, 2, 1), ResidualBlock(middle)
        self.narrower = nn.Conv2d(middle, coarse, 3, 2, 1)
        self.whole = nn.Sequential(ResidualBlock(coarse), ResidualBlock(coarse))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.known(self.narrow(self.seen(self.enter(2 * pixels - 1))))
        return h, self.whole(self.narrower(h))


def first_frame(pixels: Tensor) -> Tensor:
    """The first frames of pixels [N, F, 3, H, W] at the size of the networks: [N, 3, 64, 64]."""
    frame = pixels[:, 0]
    if frame.shape[-2:] == (SIDE, SIDE):
        return frame
    return F.interpolate(frame, size=(SIDE, SIDE), mode="bilinear", antialias=True)


PLACES = (4, 1 + len(COLORS), len(CLASSES), 2 + len(RELATIONS), 1 + len(COLORS), 1 + len(CLASSES))
OFFSETS = tuple(sum(PLACES[:k]) for k in range(len(PLACES)))


def caption_words(captions: SceneCaptions) -> Tensor:
    """Word ids of captions: count, color, class; link, color, class; 0 where a caption has none: [N, 6]."""
    paired = captions.has_two_objects()
    link = torch.where(captions.task == POSITION, 2 + captions.relation, 1)
    columns = [
        captions.count - 1,
        captions.first_color,
        captions.first,
        torch.where(paired, link, 0),
        torch.where(paired, captions.second_color, 0),
        torch.where(paired, 1 + captions.second, 0),
    ]
    return torch.stack(columns, 1)


class CaptionEncoder(nn.Module):
    """Encodes word ids [N, 6] as vectors [N, C]."""

    offsets: Tensor

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.word = nn.Embedding(sum(PLACES), width)
        self.first, self.second = nn.Linear(len(PLACES) * width, 4 * width), nn.Linear(4 * width, out)
        self.register_buffer("offsets", torch.tensor(OFFSETS), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        read = self.word(words + self.offsets).flatten(1)
        out: Tensor = self.second(F.silu(self.first(read)))
        return out


def requested_captions(prompts: Prompts, metadata: Sequence[Metadata], device: torch.device) -> SceneCaptions:
    """The captions to score: the prompt of the metadata if it has one, because rewards may get prefixed prompts."""
    texts = [str(known.get("prompt", prompt)) for prompt, known in zip(prompts, metadata, strict=True)]
    return parse_captions(texts).to(device)


QUALITIES = ("", "crisp", "blurry", "noisy")  # prefixes of a prompt that describe the image's quality


class ImageTextScorer(nn.Module):
    widths: tuple[int, int, int, int] = (32, 80, 144, 256)  # of the stem, and of the joint embedding
    tiny: tuple[int, int, int, int] = (8, 16, 16, 16)

    def __init__(self, widths: tuple[int, int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.norm = Stem(widths[:3]), nn.GroupNorm(GROUPS, widths[2])
        self.squeeze = nn.Conv2d(widths[2], widths[0], 1)
        self.image = nn.Linear(widths[0] * 64, widths[3])
        self.reader = CaptionEncoder(widths[3] // 4, widths[3])
        self.quality = nn.Embedding(len(QUALITIES), widths[3])
        self.scale = nn.Parameter(torch.tensor(2.5))  # log of the temperature's inverse

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Normalized embeddings of images [N, 3, 64, 64]: [N, C]."""
        h = self.squeeze(F.silu(self.norm(self.stem(pixels)[1])))
        return F.normalize(self.image(h.flatten(1)).float(), dim=1)

    def encode_captions(self, captions: SceneCaptions) -> Tensor:
        """Normalized embeddings of captions: [N, C]."""
        return F.normalize(self.reader(caption_words(captions)).float(), dim=1)

    def judge_quality(self, seen: Tensor) -> Tensor:
        """Cosine with each word of QUALITIES; 0 for no word: [N, 4]."""
        fits = seen @ F.normalize(self.quality.weight.float(), dim=1).T
        return torch.cat([torch.zeros_like(fits[:, :1]), fits[:, 1:]], 1)

    def forward(self, pixels: Tensor, captions: SceneCaptions, quality: Tensor) -> Tensor:
        """The cosine with the caption plus that with the quality word: [N]."""
        seen = self.encode_images(pixels)
        fits = self.judge_quality(seen).gather(1, quality[:, None])[:, 0]
        return (seen * self.encode_captions(captions)).sum(1) + fits


def split_quality(prompts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Split prompts such as 'crisp. a photo of a dog' into caption and index into QUALITIES."""
    rest, places = [], []
    for prompt in prompts:
        before, stop, after = prompt.partition(". ")
        word = before.strip().lower() if stop else ""
        if word not in QUALITIES:
            known = ", ".join(QUALITIES[1:])
            raise ValueError(
                f"'{prompt:.80}' begins with '{word:.40}'; the scorer of the playground expects one of {known} as "
                "the first word [TM760]"
            )
        rest.append(after if stop else prompt)
        places.append(QUALITIES.index(word))
    return rest, places


CLEAR = 0.4  # noise level up to which a preview can be judged


class YesNoJudge(nn.Module):
    widths: tuple[int, int, int, int] = (32, 80, 144, 64)  # of the stem, and of word embeddings
    tiny: tuple[int, int, int, int] = (8, 16, 16, 8)

    def __init__(self, widths: tuple[int, int, int, int] = widths) -> None:
        super().__init__()
        middle, coarse = widths[1:3]
        self.stem, self.reader = Stem(widths[:3]), CaptionEncoder(widths[3], 2 * middle + 2 * coarse)
        self.near, self.between = nn.GroupNorm(GROUPS, middle), nn.Conv2d(middle + 2, coarse, 3, 2, 1)
        self.far, self.after = nn.GroupNorm(GROUPS, coarse), ResidualBlock(coarse)
        self.norm, self.answer = nn.GroupNorm(GROUPS, coarse), nn.Linear(2 * coarse, 1)
        self.clear = nn.Linear(coarse, 1)
        self.split = [middle, middle, coarse, coarse]

    def forward(self, pixels: Tensor, captions: SceneCaptions) -> Tensor:
        """Logits of 'the image shows the caption' and 'it can be judged', for images [N, 3, 64, 64]: [N, 2]."""
        fine, coarse = self.stem(pixels)
        read = self.reader(caption_words(captions))[..., None, None].split(self.split, 1)
        modulated = torch.cat([F.silu(self.near(fine) * (1 + read[0]) + read[1]), coordinate_grid(fine)], 1)
        h = self.between(modulated) + F.silu(self.far(coarse) * (1 + read[2]) + read[3])
        h = F.silu(self.norm(self.after(h)))
        yes = self.answer(torch.cat([h.mean((2, 3)), h.amax((2, 3))], 1))
        return torch.cat([yes, self.clear(coarse.mean((2, 3)))], 1).float()


def coordinate_grid(like: Tensor) -> Tensor:
    """Coordinates of the cells from -1 to 1: [N, 2, H, W]."""
    down, across = (torch.linspace(-1, 1, n, device=like.device, dtype=like.dtype) for n in like.shape[2:])
    return torch.stack(torch.meshgrid(down, across, indexing="ij")).expand(len(like), -1, -1, -1)


class QualityScorer(nn.Module):
    widths: tuple[int, int, int] = (24, 48, 64)
    tiny: tuple[int, int, int] = (8, 8, 16)

    def __init__(self, widths: tuple[int, int, int] = widths) -> None:
        super().__init__()
        self.stem, self.near, self.norm = (
            Stem(widths),
            nn.GroupNorm(GROUPS, widths[1]),
            nn.GroupNorm(GROUPS, widths[2]),
        )
        self.fine, self.coarse = nn.Linear(widths[1], 1), nn.Linear(widths[2], 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Scores of images [N, 3, 64, 64], higher for fewer artifacts: [N]."""
        fine, coarse = self.stem(pixels)
        details = self.fine(F.silu(self.near(fine)).mean((2, 3)))
        out: Tensor = (details + self.coarse(F.silu(self.norm(coarse)).mean((2, 3)))).float()[:, 0]
        return out
