"""Text rendering: whether the requested text can be read in an image (Flow-GRPO, Liu et al. 2025)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import to_uint8

QUOTED = re.compile(r'"([^"]*\S[^"]*)"')
DETECTOR_FILE, RECOGNIZER_FILE = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"
MAX_DETECTION_SIDE = 736  # pixels; text in larger images is detected in a smaller copy


@dataclass(frozen=True)
class OcrReward(RewardSpec):
    """1 - edit distance / length, at least 0, between the text in the image and the requested one.

    The requested text is the metadata field `text`, or what the prompt puts in quotes. Case and spaces do not count.
    """

    strict: bool = False  # other text in the image counts as wrong; Flow-GRPO's own rule ignores it
    engine: Literal["rapidocr", "guess"] = "rapidocr"  # PP-OCRv6, or a stub for tests
    upscale_to: Annotated[int, Field(ge=0, le=2048)] = 160  # pixels a side for smaller images
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="large plain letters; with the lenient rule also many copies of the word",
        memory="15 MB",
    )
    runs_on: ClassVar[Literal["host"]] = "host"

    def load(self, placement: Placement) -> OcrScorer:
        return OcrScorer(self, OcrEngine() if self.engine == "rapidocr" else StubOcrEngine())

    def tiny(self) -> Self:
        return replace(self, engine="guess")


@dataclass(frozen=True)
class OcrScorer(Reward):
    spec: OcrReward
    engine: OcrEngine | StubOcrEngine

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        expected = [expected_text(*pair) for pair in zip(prompts, metadata, strict=True)]
        read = self.engine.read(pixels[:, 0], self.spec.upscale_to)
        return torch.tensor(
            [
                1.0 if not self.spec.strict and text in seen else text_similarity(seen, text)
                for seen, text in zip(read, expected, strict=True)
            ]
        )


def expected_text(prompt: str, metadata: Metadata) -> str:
    """The text that an image should show, normalized for comparison."""
    quoted = QUOTED.search(prompt)
    text = normalize_text(str(metadata.get("text") or (quoted[1] if quoted else "")))
    if not text:
        raise ValueError(
            f"prompt '{prompt:.80}' does not ask for text; put the text in quotes, or add 'text' to the metadata "
            "[TM399]"
        )
    return text


class OcrEngine:
    """PP-OCRv6 of rapidocr's wheel: a detector of text lines and a recognizer."""

    def __init__(self) -> None:
        self.engine = _load_rapidocr()

    def read(self, pixels: Tensor, upscale_to: int = 0) -> list[str]:
        """All text in images [N, 3, H, W], normalized; smaller images are upscaled first."""
        pixels, _ = upscale_to_side(pixels, upscale_to)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # on a CPU a batch is no faster than single images
            return list(threads.map(self._read_image, pixels))

    def detect_lines(self, image: Tensor, upscale_to: int = 0) -> list[Tensor]:
        """Text lines in an image [3, H, W]: corners [4, 2] in pixels each, clockwise from the upper left."""
        large, factor = upscale_to_side(image.detach()[None], upscale_to)
        # The engine remembers the options of its last call, so every call passes all of them.
        boxes = self.engine(to_uint8(large[0])[..., ::-1], use_det=True, use_cls=False, use_rec=False).boxes
        return [] if boxes is None else [torch.from_numpy(corners).float() / factor for corners in boxes]

    def _read_image(self, image: Tensor) -> str:
        bgr = to_uint8(image)[..., ::-1]
        return normalize_text("".join(self.engine(bgr, use_det=True, use_cls=False, use_rec=True).txts or ()))


class StubOcrEngine:
    """Reads three letters in every image, by the brightness of its parts; for tests with untrained generators."""

    def read(self, pixels: Tensor, upscale_to: int = 0) -> list[str]:
        gray = pixels.float().nan_to_num(0.0).mean(1, keepdim=True)
        shades = F.adaptive_avg_pool2d(gray, (1, 3))[:, 0, 0]
        return ["".join("eaoristn"[k] for k in letters) for letters in ((1000 * shades).long() % 8).tolist()]


def upscale_to_side(pixels: Tensor, side: int) -> tuple[Tensor, float]:
    """Images whose longer side is smaller than `side` upscaled to it, and the scale factor."""
    factor = side / max(pixels.shape[-2:])
    if factor <= 1:
        return pixels, 1.0
    return F.interpolate(pixels.float(), scale_factor=factor, mode="bicubic"), factor


def rapidocr_models() -> Path:
    """The folder with rapidocr's networks."""
    try:
        import onnxruntime  # noqa: F401  # rapidocr needs it, but does not depend on it
        import rapidocr
    except ImportError as error:
        advice = "run `pip install 'tastemaker[ocr]'`"
        raise ConfigError(f"OCR needs the package {error.name}, which is not installed; {advice} [TM400]") from error
    return Path(rapidocr.__file__).parent / "models"


def recognizer_file() -> Path:
    """The ONNX file of the text recognizer."""
    return rapidocr_models() / RECOGNIZER_FILE


def _load_rapidocr() -> Any:
    models = rapidocr_models()
    import rapidocr

    settings = {
        # With their paths given, a lost file is an error; without, it would be downloaded.
        "Det.model_path": str(models / DETECTOR_FILE),
        "Rec.model_path": str(recognizer_file()),
        "Det.limit_type": "max",
        "Det.limit_side_len": MAX_DETECTION_SIDE,
        "Rec.rec_img_shape": [3, 48, 48],  # a line's own width is used where it is more; the usual 320 costs four times
        "Global.use_cls": False,  # no search for upside-down text
        "Global.text_score": 0.0,  # keep uncertain text, as Flow-GRPO does
        "Global.log_level": "error",
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # images are read in parallel threads
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    return rapidocr.RapidOCR(params=settings)


def text_similarity(read: str, expected: str) -> float:
    """1 - edit distance / length of the expected text, at least 0."""
    return 1 - min(edit_distance(read, expected) / len(expected), 1.0)


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions of characters."""
    costs = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        diagonal, costs[0] = costs[0], i
        for j, target in enumerate(other, 1):
            diagonal, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, diagonal + (letter != target))
    return costs[-1]


def normalize_text(text: str) -> str:
    """Lower case without spaces."""
    return "".join(text.lower().split())
