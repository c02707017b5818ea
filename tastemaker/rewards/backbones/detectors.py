"""Detectors of objects by name: YOLOS and Grounding DINO of transformers, EfficientDet-Lite on the CPU."""

from __future__ import annotations

import importlib
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.registry import ConfigError, suggest_name
from ...core.types import Placement
from ...data.image_io import to_uint8
from ...evaluation.geneval_rules import GenEvalRules
from ...models.pretrained import WeightsSource, find_weights
from .frozen_models import load_network, random_network, read_config
from .preprocessing import IMAGENET_MEAN, IMAGENET_STD
from .tokenizers import BERT_TOKENIZER, load_tokenizer

TINY_YOLOS, TINY_DINO = "tiny", "tiny/grounding-dino"  # as `weights`: few random weights, in no file
YOLOS = WeightsSource("hustvl/yolos-base", size="0.5 GB", license="Apache-2.0")
DINO = WeightsSource("IDEA-Research/grounding-dino-base", size="0.9 GB", license="Apache-2.0")
SOURCES = (
    YOLOS,
    WeightsSource("hustvl/yolos-tiny", size="26 MB", license="Apache-2.0"),
    DINO,
    WeightsSource("IDEA-Research/grounding-dino-tiny", size="0.7 GB", license="Apache-2.0"),
)
MIN_WIDTH = 32  # pixels: neither network has larger patches
COCO_NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}  # by GenEval's
ObjectNames = Sequence[Sequence[str]]  # those to look for in each image


@dataclass(frozen=True)
class DetectorOutput:
    """Scores of Q boxes for K names; images with fewer names have zeros at the rest."""

    scores: Tensor  # [N, Q, K] probabilities
    is_top: Tensor  # [N, Q, K] bool, no other name has a higher score there
    boxes: Tensor  # [N, Q, 4] left, top, right, bottom as fractions of the image


class ObjectDetector(ABC):
    """A frozen network that finds objects by name."""

    default_threshold: float  # VADER's
    rules: GenEvalRules  # GenEval's, with thresholds for this detector
    names: tuple[str, ...] = ()  # the classes it knows; empty if it takes any words

    @abstractmethod
    def detect(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        """Look for names in images [N, 3, H, W] in [0, 1], resized to a height in pixels."""


class Yolos(ObjectDetector):
    """A vision transformer with fixed classes, COCO's as published."""

    default_threshold, rules = 0.2, GenEvalRules()

    def __init__(self, net: Any) -> None:
        self.net = net
        labels = {int(number): str(name).lower() for number, name in self.net.config.id2label.items()}
        self.label_ids = {name: number for number, name in labels.items() if name != "n/a"}
        self.names = tuple(self.label_ids)

    def detect(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        out = self.net(pixel_values=resize_for_detector(pixels, height).to(self.net.dtype))
        probabilities = _at_least_float32(out.logits).softmax(-1)[..., :-1]  # the last class is `no object`
        ids = pad_label_ids([[self.label_ids[known_name(name, self.names)] for name in row] for row in names])
        ids = ids.to(probabilities.device)[:, None].expand(-1, probabilities.shape[1], -1)  # [N, Q, K]
        scores = probabilities.gather(2, ids.clamp(min=0)) * (ids >= 0)
        return DetectorOutput(scores, probabilities.argmax(2, keepdim=True) == ids, box_corners(out.pred_boxes))


class GroundingDino(ObjectDetector):
    """An open-vocabulary detector: each name is a phrase of its text, ended by a period."""

    # Its probabilities are lower than those of GenEval's detector.
    default_threshold, rules = 0.4, GenEvalRules(threshold=0.4, counting_threshold=0.4)

    def __init__(self, net: Any, tokenizer: Any) -> None:
        self.net, self.tokenizer, self.period_id = net, tokenizer, tokenizer.convert_tokens_to_ids(".")

    def detect(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        texts = ["".join(f"{name}. " for name in row).strip() for row in names]
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        tokens = {key: x.to(pixels.device) for key, x in encoded.items() if key != "token_type_ids"}
        out = self.net(pixel_values=resize_for_detector(pixels, height).to(self.net.dtype), **tokens)
        probabilities = _at_least_float32(out.logits).sigmoid()  # [N, Q, tokens], zero beyond the text
        phrases = self._phrases(tokens["input_ids"], probabilities.shape[2], names)
        count = max(map(len, names))
        scores = torch.stack([(probabilities * (phrases == k)[:, None]).amax(2) for k in range(count)], 2)
        is_top = scores.argmax(2, keepdim=True) == torch.arange(count, device=scores.device)
        return DetectorOutput(scores, is_top, box_corners(out.pred_boxes))

    def _phrases(self, ids: Tensor, tokens: int, names: ObjectNames) -> Tensor:
        """The index of the name that each token belongs to: [N, tokens]."""
        starts = F.pad(ids == self.period_id, (1, tokens - ids.shape[1] - 1)).long()  # a period ends its own phrase
        last = torch.tensor([len(row) - 1 for row in names], device=ids.device)[:, None]
        return starts.cumsum(1).minimum(last)


class EfficientDet(ObjectDetector):
    """EfficientDet-Lite from TensorFlow's .tflite file, on the CPU: COCO's classes, without gradients."""

    default_threshold, rules = 0.4, GenEvalRules(threshold=0.4, counting_threshold=0.4)

    def __init__(self, path: Path) -> None:
        try:
            litert = importlib.import_module("ai_edge_litert.interpreter")
            self.interpreter = litert.Interpreter(str(path), num_threads=1)
        except ImportError as error:
            raise ConfigError(
                f"a .tflite detector needs the package {error.name}, which is not installed; run `pip install "
                "ai-edge-litert` [TM346]"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not a readable .tflite file; download the file again [TM347]") from error
        self.interpreter.allocate_tensors()
        self.image_size = int(self.interpreter.get_input_details()[0]["shape"][1])
        try:
            with zipfile.ZipFile(path) as archive:  # at the end of the file
                self.labels = archive.read("labelmap.txt").decode().splitlines()
        except (zipfile.BadZipFile, KeyError) as error:
            raise ConfigError(
                f"{path} does not contain labelmap.txt; use an EfficientDet-Lite file with metadata [TM348]"
            ) from error
        self.names = tuple(label for label in self.labels if label != "???")

    def detect(self, pixels: Tensor, names: ObjectNames, height: int) -> DetectorOutput:
        """Look for names; the height is not used, because the network has a fixed input size."""
        size = (self.image_size, self.image_size)
        prepared = F.interpolate(pixels.detach().cpu().float(), size, mode="bilinear", antialias=True)
        ids = pad_label_ids([[self.labels.index(known_name(name, self.names)) for name in row] for row in names])
        outputs = [self._detect_image(image, labels) for image, labels in zip(prepared, ids, strict=True)]
        scores, boxes = (torch.stack(column).to(pixels.device) for column in zip(*outputs, strict=True))
        return DetectorOutput(scores, scores > 0, boxes)

    def _detect_image(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [Q, K] and boxes [Q, 4]; the network reports only the best class of each box."""
        self.interpreter.set_tensor(
            self.interpreter.get_input_details()[0]["index"], to_uint8(image.nan_to_num())[None]
        )
        self.interpreter.invoke()
        indices = [detail["index"] for detail in self.interpreter.get_output_details()]
        boxes, classes, scores = (torch.tensor(self.interpreter.get_tensor(index)[0]) for index in indices[:3])
        scores = scores[:, None] * (classes[:, None] == labels) + 0 * image.sum()  # NaN pixels give NaN scores
        return scores, boxes[:, [1, 0, 3, 2]]  # they come as top, left, bottom, right


def known_name(name: str, names: Sequence[str]) -> str:
    """COCO's name of an object; refuses names that the detector does not know."""
    known = COCO_NAMES.get(name, name)
    if known not in names:
        raise ValueError(f"the detector does not have the class '{name:.60}'{suggest_name(known, names)} [TM349]")
    return known


def pad_label_ids(ids: Sequence[Sequence[int]]) -> Tensor:
    """Class ids of each image, padded with -1: [N, K]."""
    length = max(map(len, ids))
    return torch.tensor([[*row, *[-1] * (length - len(row))] for row in ids])


def resize_for_detector(pixels: Tensor, height: int) -> Tensor:
    """Images [N, 3, H, W] resized to a height as in VADER, without antialiasing, and normalized as ImageNet's."""
    width = max(MIN_WIDTH, height * pixels.shape[-1] // pixels.shape[-2])
    pixels = F.interpolate(pixels.clamp(0, 1), (height, width), mode="bilinear")
    mean, std = (pixels.new_tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    return (pixels - mean) / std


def box_corners(boxes: Tensor) -> Tensor:
    """Center and size to left, top, right, bottom."""
    boxes = boxes.float()
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


def short_name(source: WeightsSource) -> str:
    """The name on the Hub without its owner, which is how VADER names detectors."""
    return source.hub.rpartition("/")[2]


def published_source(weights: str) -> WeightsSource:
    """The published weights of that name, long or short, or else the default ones of the same architecture."""
    default = DINO if "dino" in weights.lower() else YOLOS
    return next((source for source in SOURCES if weights in (source.hub, short_name(source))), default)


def load_detector(weights: str, placement: Placement) -> ObjectDetector:
    """A frozen YOLOS or Grounding DINO, according to its config.json, or an EfficientDet-Lite of a .tflite file."""
    from transformers import GroundingDinoConfig, GroundingDinoForObjectDetection, YolosConfig, YolosForObjectDetection

    if weights == TINY_YOLOS:
        return Yolos(tiny_yolos(placement))
    if weights == TINY_DINO:
        return GroundingDino(*tiny_dino(placement))
    source = published_source(weights)
    path = find_weights(weights if Path(weights).exists() or weights != short_name(source) else source.hub, source)
    if path.suffix == ".tflite":
        return EfficientDet(path)
    model_type = read_config(path).get("model_type")
    if model_type == "yolos":
        config: Any = YolosConfig.from_pretrained(path, local_files_only=True)
        return Yolos(load_network(YolosForObjectDetection, config, path, placement))
    if model_type == "grounding-dino":
        config = GroundingDinoConfig.from_pretrained(path, local_files_only=True)
        config.disable_custom_kernels = True  # transformers would download them
        tokenizer = load_tokenizer(None, path, "bert", BERT_TOKENIZER, config.text_config.vocab_size)
        return GroundingDino(load_network(GroundingDinoForObjectDetection, config, path, placement), tokenizer)
    expected = "give the folder of a yolos or grounding-dino model"
    raise ConfigError(f"weights: '{weights:.200}' has the model type {model_type}; {expected} [TM350]")


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


TINY_LABELS = ("person", "cat", "dog", "book", "cup", "mouse")
BERT_TOKENS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}
TINY_VOCABULARY = BERT_TOKENS | {name: 1030 + i for i, name in enumerate(TINY_LABELS)}


def tiny_yolos(placement: Placement) -> Any:
    """A small random YOLOS that detects cats in every image."""
    from transformers import YolosConfig, YolosForObjectDetection

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"image_size": [64, 64], "num_detection_tokens": 6, "initializer_range": 0.3}
    config = YolosConfig.from_dict({**sizes, **vision, "id2label": dict(enumerate(TINY_LABELS))})
    net = random_network(YolosForObjectDetection, config, placement)
    tokens = net.vit.embeddings.detection_tokens  # zeros before training, and so all the same
    tokens.data = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens)
    net.class_labels_classifier.layers[-1].bias.data[1] += 2
    return net


def tiny_dino(placement: Placement) -> tuple[Any, Any]:
    """A small random Grounding DINO and its tokenizer."""
    from transformers import BertTokenizer, GroundingDinoConfig, GroundingDinoForObjectDetection

    swin = {"model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 4}
    bert = {"model_type": "bert", "vocab_size": max(TINY_VOCABULARY.values()) + 1, "hidden_size": 32}
    sizes = {"d_model": 32, "num_queries": 6, "disable_custom_kernels": True}
    encoder = {"encoder_layers": 1, "encoder_ffn_dim": 64, "encoder_attention_heads": 2}
    decoder = {"decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 2}
    parts = {
        "backbone_config": {**swin, "image_size": 64, "out_indices": [2, 3, 4]},
        "text_config": {**bert, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    }
    config = GroundingDinoConfig.from_dict({**parts, **sizes, **encoder, **decoder})
    return random_network(GroundingDinoForObjectDetection, config, placement), BertTokenizer(vocab=TINY_VOCABULARY)
