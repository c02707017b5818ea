"""EfficientDet-Lite, a small detector for a host's CPU, from a .tflite file as TensorFlow published it."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.registry import ConfigError, suggest_name
from ...data.image_io import to_uint8
from ...evaluation.geneval_rules import GenEvalRules
from .detectors import GENEVAL, DetectorOutput, ObjectNames


class EfficientDet:
    """Finds COCO's things; it has no gradients, and of a place it tells the likeliest name alone."""

    enough, rules = 0.4, GenEvalRules(threshold=0.4, counting_threshold=0.4)

    def __init__(self, path: Path) -> None:
        self.live = _interpreter(path)
        self.live.allocate_tensors()
        self.side = int(self.live.get_input_details()[0]["shape"][1])
        self.labels = _labels(path)
        self.names = tuple(label for label in self.labels if label != "???")

    def find(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        """The height is not asked for: the network has one size."""
        shape = (self.side, self.side)
        prepared = F.interpolate(pixels.detach().cpu().float(), shape, mode="bilinear", antialias=True)
        places, most = [self._places(row) for row in names], max(map(len, names))
        rows = [
            self._one(picture, [*row, *[-1] * (most - len(row))]) for picture, row in zip(prepared, places, strict=True)
        ]
        sure, boxes = (torch.stack(column).to(pixels.device) for column in zip(*rows, strict=True))
        return DetectorOutput(sure, sure > 0, boxes)

    def _one(self, picture: Tensor, places: list[int]) -> tuple[Tensor, Tensor]:
        self.live.set_tensor(self.live.get_input_details()[0]["index"], to_uint8(picture.nan_to_num())[None])
        self.live.invoke()
        numbers = [detail["index"] for detail in self.live.get_output_details()]
        boxes, kinds, scores = (torch.tensor(self.live.get_tensor(number)[0]) for number in numbers[:3])
        sure = (
            scores[:, None] * (kinds[:, None] == torch.tensor(places)) + 0 * picture.sum()
        )  # of no numbers comes none
        return sure, boxes[:, [1, 0, 3, 2]]  # which come as top, left, bottom, right

    def _places(self, names: Any) -> list[int]:
        known = [GENEVAL.get(name, name) for name in names]
        strange = [name for name in known if name not in self.names]
        if strange:
            raise ValueError(f"the detector knows no '{strange[0]:.60}'{suggest_name(strange[0], self.names)}")
        return [self.labels.index(name) for name in known]


def _interpreter(path: Path) -> Any:
    try:
        return importlib.import_module("ai_edge_litert.interpreter").Interpreter(str(path), num_threads=1)
    except ImportError as error:
        way_out = "run `pip install ai-edge-litert`"
        raise ConfigError(f"a .tflite detector needs the package {error.name}, which is not here; {way_out}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a readable .tflite file; fetch it again") from error


def _labels(path: Path) -> list[str]:
    """Their list lies in an archive at the end of the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read("labelmap.txt").decode().splitlines()
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{path} carries no labelmap.txt; expected EfficientDet-Lite with its metadata") from error
