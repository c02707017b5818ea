"""Text in pictures: what an engine reads, and how like two texts are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.registry import ConfigError
from ...data.image_io import to_uint8

READS = "PP-OCRv6_rec_small.onnx"  # lines
ENOUGH = 736  # pixels a side beyond which text is searched for in a smaller copy


class OcrEngine:
    """PP-OCRv6, as it comes in rapidocr's wheel: a network that finds lines of text and one that reads them."""

    def __init__(self) -> None:
        self.live = _rapidocr()

    def read(self, pixels: Tensor, enlarge: int = 0) -> list[str]:
        """All text in pictures [N, 3, H, W], in lower case without spaces; small ones are brought to a side first."""
        pixels, _ = upscale_to_side(pixels, enlarge)
        with ThreadPoolExecutor(torch.get_num_threads()) as readers:  # in a batch a CPU reads no faster than one by one
            return list(readers.map(self._one, pixels))

    def lines(self, picture: Tensor, enlarge: int = 0) -> list[Tensor]:
        """Where lines of text are in a picture [3, H, W]: corners [4, 2] in pixels, clockwise from the upper left."""
        seen, factor = upscale_to_side(picture.detach()[None], enlarge)
        # The engine keeps what it was last told, so all of it is told each time.
        found = self.live(to_uint8(seen[0])[..., ::-1], use_det=True, use_cls=False, use_rec=False).boxes
        return [] if found is None else [torch.from_numpy(corners).float() / factor for corners in found]

    def _one(self, picture: Tensor) -> str:
        blue_first = to_uint8(picture)[..., ::-1]
        return normalize_text("".join(self.live(blue_first, use_det=True, use_cls=False, use_rec=True).txts or ()))


def upscale_to_side(pixels: Tensor, side: int) -> tuple[Tensor, float]:
    """Pictures brought to a side if they are smaller, and how much larger they are now."""
    factor = side / max(pixels.shape[-2:])
    if factor <= 1:
        return pixels, 1.0
    return F.interpolate(pixels.float(), scale_factor=factor, mode="bicubic"), factor


class StubOcrEngine:
    """Sees three common letters in every picture, by how bright its parts are; for tests of untrained generators, in
    whose pictures there is nothing to read."""

    def read(self, pixels: Tensor, enlarge: int = 0) -> list[str]:
        shades = F.adaptive_avg_pool2d(pixels.float().nan_to_num(0.0).mean(1, keepdim=True), (1, 3))[:, 0, 0]
        return ["".join("eaoristn"[k] for k in row) for row in ((1000 * shades).long() % 8).tolist()]


def recognizer_file() -> Path:
    """The file of the network that reads lines."""
    return _models() / READS


def _models() -> Path:
    """The folder rapidocr has its networks in."""
    try:
        import onnxruntime  # noqa: F401  # rapidocr computes with it and does not ask for it
        import rapidocr
    except ImportError as error:
        way_out = "run `pip install 'tastemaker[ocr]'`"
        raise ConfigError(f"reading text needs the package {error.name}, which is not installed; {way_out}") from error
    return Path(rapidocr.__file__).parent / "models"


def _rapidocr() -> Any:
    models = _models()
    import rapidocr

    settings = {
        # With their paths given, a lost file is an error; without, it would be downloaded.
        "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
        "Rec.model_path": str(models / READS),
        "Det.limit_type": "max",
        "Det.limit_side_len": ENOUGH,
        "Rec.rec_img_shape": [3, 48, 48],  # a line's own width is used where it is more; the usual 320 costs four times
        "Global.use_cls": False,  # text upside down is not looked for
        "Global.text_score": 0.0,  # what is read unsurely counts too, as in Flow-GRPO
        "Global.log_level": "error",
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # pictures are read side by side
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    return rapidocr.RapidOCR(params=settings)


def text_similarity(found: str, wanted: str) -> float:
    """1 - edits / letters of what was wanted, not below nought."""
    return 1 - min(edit_distance(found, wanted) / len(wanted), 1.0)


def edit_distance(one: str, other: str) -> int:
    """Letters to put in, take out or change to make one text the other (Levenshtein)."""
    row = list(range(len(other) + 1))
    for done, letter in enumerate(one, 1):
        corner, row[0] = row[0], done
        for place, wanted in enumerate(other, 1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (letter != wanted))
    return row[-1]


def normalize_text(text: str) -> str:
    """As texts are compared: in lower case, without spaces."""
    return "".join(text.lower().split())
