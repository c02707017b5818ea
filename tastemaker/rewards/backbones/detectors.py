"""Detectors of transformers: where in a picture things of given names are, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.registry import ConfigError, suggest_name
from ...core.types import Placement
from ...evaluation.geneval_rules import GenEvalRules
from ...models.pretrained import WeightsSource, find_weights
from .loading import load_network, read_config
from .preprocessing import IMAGENET_MEAN, IMAGENET_STD
from .tokenizers import BERT_TOKENIZER, load_tokenizer

TINY_YOLOS, TINY_DINO = "tiny", "tiny/grounding-dino"  # weights that are in no file
YOLOS = WeightsSource("hustvl/yolos-base", size="0.5 GB", licence="Apache-2.0")
DINO = WeightsSource("IDEA-Research/grounding-dino-base", size="0.9 GB", licence="Apache-2.0")
SOURCES = (
    YOLOS,
    WeightsSource("hustvl/yolos-tiny", size="26 MB", licence="Apache-2.0"),
    DINO,
    WeightsSource("IDEA-Research/grounding-dino-tiny", size="0.7 GB", licence="Apache-2.0"),
)
NARROWEST = 32  # pixels: the patches of neither network are wider
GENEVAL = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}  # in COCO's words
ObjectNames = Sequence[Sequence[str]]  # those asked for in each picture


@dataclass(frozen=True)
class DetectorOutput:
    """What each of Q places of a picture shows, of K names; pictures with fewer names have nought at the rest."""

    sure: Tensor  # [N, Q, K] probabilities
    first: Tensor  # [N, Q, K] bool, no other name is likelier there
    boxes: Tensor  # [N, Q, 4] left, top, right, bottom as shares of the picture


class ObjectDetector(Protocol):
    """A frozen network that looks for things by name."""

    enough: float  # VADER's threshold of what is found at all
    rules: GenEvalRules  # GenEval's, with thresholds for this detector
    names: tuple[str, ...]  # all it knows; nothing if any words will do

    def find(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput: ...


class Yolos:
    """A vision transformer that knows the things of its training by name, COCO's as published."""

    enough, rules = 0.2, GenEvalRules()

    def __init__(self, net: Any) -> None:
        self.net = net
        labels = {int(number): str(name).lower() for number, name in self.net.config.id2label.items()}
        self.places = {name: number for number, name in labels.items() if name != "n/a"}
        self.names = tuple(self.places)

    def find(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        out = self.net(pixel_values=resize_for_detector(pixels, height).to(self.net.dtype))
        likely = _exact(out.logits).softmax(-1)[..., :-1]  # the last is `nothing`
        places = [[self._place(name) for name in row] for row in names]
        most = max(map(len, places))
        asked = torch.tensor([[*row, *[-1] * (most - len(row))] for row in places], device=likely.device)[:, None]
        asked = asked.expand(-1, likely.shape[1], -1)  # [N, Q, K]
        sure = likely.gather(2, asked.clamp(min=0)) * (asked >= 0)
        return DetectorOutput(sure, likely.argmax(2, keepdim=True) == asked, box_corners(out.pred_boxes))

    def _place(self, name: str) -> int:
        known = GENEVAL.get(name, name)
        if known not in self.places:
            raise ValueError(f"the detector knows no '{name:.60}'{suggest_name(known, self.names)}")
        return self.places[known]


class GroundingDino:
    """A detector of whatever words name: each name is a phrase of its text, ended by a full stop."""

    enough, rules = (
        0.4,
        GenEvalRules(threshold=0.4, counting_threshold=0.4),
    )  # its probabilities are lower than GenEval's
    names: tuple[str, ...] = ()

    def __init__(self, net: Any, words: Any) -> None:
        self.net, self.words, self.stop = net, words, words.convert_tokens_to_ids(".")

    def find(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        texts = ["".join(f"{name}. " for name in row).strip() for row in names]
        read = self.words(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        words = {key: x.to(pixels.device) for key, x in read.items() if key != "token_type_ids"}
        out = self.net(pixel_values=resize_for_detector(pixels, height).to(self.net.dtype), **words)
        likely = _exact(out.logits).sigmoid()  # [N, Q, tokens], nought beyond the text
        phrases = self._phrases(words["input_ids"], likely.shape[2], names)
        ranks = range(max(map(len, names)))
        sure = torch.stack([(likely * (phrases == rank)[:, None]).amax(2) for rank in ranks], 2)
        first = sure.argmax(2, keepdim=True) == torch.arange(len(ranks), device=sure.device)
        return DetectorOutput(sure, first, box_corners(out.pred_boxes))

    def _phrases(self, ids: Tensor, tokens: int, names: ObjectNames) -> Tensor:
        """Which name each token belongs to, those before the first and after the last to these: [N, tokens]."""
        stops = F.pad(ids == self.stop, (1, tokens - ids.shape[1] - 1)).long()  # a full stop ends its own phrase
        last = torch.tensor([len(row) - 1 for row in names], device=ids.device)[:, None]
        return stops.cumsum(1).minimum(last)


def resize_for_detector(pixels: Tensor, height: int) -> Tensor:
    """Pictures [N, 3, H, W] at the height VADER gives detectors, unsmoothed as there, and as ImageNet's are."""
    width = max(NARROWEST, height * pixels.shape[-1] // pixels.shape[-2])
    pixels = F.interpolate(pixels.clamp(0, 1), (height, width), mode="bilinear")
    mean, std = (pixels.new_tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    return (pixels - mean) / std


def box_corners(boxes: Tensor) -> Tensor:
    """Centre and size to left, top, right, bottom."""
    boxes = boxes.float()
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - size / 2, centre + size / 2], -1)


def short_name(source: WeightsSource) -> str:
    """A name on the hub without its owner, which is how VADER names detectors."""
    return source.hub.rpartition("/")[2]


def published_source(weights: str) -> WeightsSource:
    """The one of that name, long or short, or else the usual one of its kind."""
    usual = DINO if "dino" in weights.lower() else YOLOS
    return next((source for source in SOURCES if weights in (source.hub, short_name(source))), usual)


def load_detector(weights: str, placement: Placement) -> ObjectDetector:
    """A frozen YOLOS or Grounding DINO, by what its folder says it is, or an EfficientDet, by its file."""
    from transformers import GroundingDinoConfig, GroundingDinoForObjectDetection, YolosConfig, YolosForObjectDetection

    if weights in (TINY_YOLOS, TINY_DINO):
        from .tiny_detectors import tiny_dino, tiny_yolos

        return Yolos(tiny_yolos(placement)) if weights == TINY_YOLOS else GroundingDino(*tiny_dino(placement))
    source = published_source(weights)
    path = find_weights(weights if Path(weights).exists() or weights != short_name(source) else source.hub, source)
    if path.suffix == ".tflite":
        from .efficientdet import EfficientDet

        return EfficientDet(path)
    kind = read_config(path).get("model_type")
    if kind == "yolos":
        config: Any = YolosConfig.from_pretrained(path, local_files_only=True)
        return Yolos(load_network(YolosForObjectDetection, config, path, placement))
    if kind == "grounding-dino":
        config = GroundingDinoConfig.from_pretrained(path, local_files_only=True)
        config.disable_custom_kernels = True  # they would be fetched from the network
        words = load_tokenizer(None, path, "bert", BERT_TOKENIZER, config.text_config.vocab_size)
        return GroundingDino(load_network(GroundingDinoForObjectDetection, config, path, placement), words)
    raise ConfigError(f"'{weights:.200}' is of the type {kind}; expected the folder of a yolos or a grounding-dino")


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
