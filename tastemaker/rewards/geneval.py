"""GenEval as a reward: Mask2Former finds the objects, CLIP classifies their colors, and GenEval's rules judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..data.image_io import to_uint8
from ..evaluation.geneval_rules import (
    CLASSES,
    COLORS,
    Box,
    DetectedObject,
    GenEvalRules,
    evaluate_detections,
    filter_detections,
    validate_metadata,
)
from ..playground.art import CLASSES as DRAWN_CLASSES
from ..playground.art import COLORS as DRAWN_COLORS
from ..playground.art import load_sprites
from .backbones.dual_encoder import CLIP_L, Tokenize, load_image_text_model
from .backbones.frozen_models import TINY
from .backbones.mask2former import GENEVAL_DETECTOR, Instances, Mask2FormerDetector, load_mask2former
from .backbones.preprocessing import CLIP_MEAN, CLIP_STD

Fraction = Annotated[float, Field(ge=0, le=1)]
TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
GRAY = 0x99  # background of objects that are cut out
CELL, COLUMNS, ROWS = 128, 3, 2  # pixels of a drawing with its margin, and the grid of a self-test image
MIN_RECOGNIZED = 8  # of the 48 drawings; a guessing network finds one in eighty
MIN_COLORS = 7  # of ten


@dataclass(frozen=True)
class GenevalReward(RewardSpec):
    """GenEval's verdict on an image, by its metadata. `graded` is the fraction of the requirements that hold.

    `strict` forbids objects that were not asked for, so that four copies do not pass for one.
    """

    weights: str = GENEVAL_DETECTOR.name  # mmdet's published file, its path, or a folder of a Mask2Former of the Hub
    color_model: str = CLIP_L.hub
    output: Literal["verdict", "graded"] = "verdict"
    strict: bool = False
    threshold: Fraction = 0.3
    counting_threshold: Fraction = 0.9
    max_objects: BatchSize = 16  # of a class
    nms_threshold: Fraction = 1.0  # overlap from which two objects are one; 1 keeps all of them
    position_threshold: Annotated[float, Field(ge=0)] = 0.1  # least distance of centers, relative to both sizes
    self_test: bool = True  # refuse a detector that does not recognize drawings of known objects
    batch_size: BatchSize = 8
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="many copies of the objects, unless strict; textures that only this detector takes for objects",
        memory="0.3 GB (Mask2Former Swin-S of mmdet) and 1.7 GB (CLIP)",
        sources=(CLIP_L,),
    )

    @property
    def rules(self) -> GenEvalRules:
        return GenEvalRules(
            self.threshold,
            self.counting_threshold,
            self.max_objects,
            self.nms_threshold,
            self.position_threshold,
            self.strict,
        )

    def load(self, placement: Placement) -> GenevalScorer:
        detector = load_mask2former(self.weights, placement)
        checker = GenevalChecker(detector, load_color_classifier(self.color_model, placement), self.rules)
        if self.self_test:
            require_selftest(checker, placement)
        return GenevalScorer(self, checker)

    def tiny(self) -> Self:
        return replace(self, weights=TINY, color_model=TINY, self_test=False)


@dataclass(frozen=True)
class GenevalScorer(Reward):
    spec: GenevalReward
    checker: GenevalChecker

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        for prompt, fields in zip(prompts, metadata, strict=True):
            validate_metadata(fields, f"'{prompt:.80}'")
        results = self.checker.check(pixels[:, 0], metadata)
        graded = self.spec.output == "graded"
        return pixels.new_tensor([x.fraction_correct if graded else float(x.correct) for x in results])


@dataclass(frozen=True)
class GenevalResult:
    """Verdict on one image."""

    correct: bool
    reasons: tuple[str, ...]
    kept: dict[str, list[DetectedObject]]  # detections above the threshold, by class
    fraction_correct: float  # of the requirements


@dataclass(frozen=True)
class GenevalChecker:
    """Detector, color classifier and rules, applied to images of one size."""

    detector: Mask2FormerDetector
    color_classifier: ClipColorClassifier
    rules: GenEvalRules = GenEvalRules()

    def check(self, pixels: Tensor, metadata: Sequence[Metadata]) -> list[GenevalResult]:
        """The result of each image of [N, 3, H, W] in [0, 1]."""
        instances = self.detector.detect(pixels, min(self.rules.threshold, self.rules.counting_threshold))
        detections = self.add_colors(pixels, instances, [to_detections(each) for each in instances], metadata)
        return [apply_rules(objects, fields, self.rules) for objects, fields in zip(detections, metadata, strict=True)]

    def add_colors(
        self,
        pixels: Tensor,
        instances: Sequence[Instances],
        detections: Sequence[list[DetectedObject]],
        metadata: Sequence[Metadata],
    ) -> list[list[DetectedObject]]:
        """Detections with the colors that the rules will look at."""
        crops, names, locations = [], [], []
        for image, (objects, fields) in enumerate(zip(detections, metadata, strict=True)):
            candidates = color_candidates(objects, fields, self.rules)
            array = to_uint8(pixels[image]) if candidates else np.zeros((0, 0, 3), np.uint8)
            for i in candidates:
                mask = instances[image].masks[i].cpu().numpy()
                crops.append(crop_object(array, mask, objects[i].box, self.color_classifier.image_size))
                names.append(objects[i].name)
                locations.append((image, i))
        colored = [list(objects) for objects in detections]
        for (image, i), color in zip(locations, self.color_classifier.classify(crops, names), strict=True):
            colored[image][i] = replace(colored[image][i], color=color)
        return colored


def to_detections(instances: Instances) -> list[DetectedObject]:
    """Instances of one image as the rules take them."""
    columns = zip(instances.label.tolist(), instances.boxes.tolist(), instances.score.tolist(), strict=True)
    return [DetectedObject(CLASSES[label], (box[0], box[1], box[2], box[3]), score) for label, box, score in columns]


def color_candidates(detections: Sequence[DetectedObject], metadata: Metadata, rules: GenEvalRules) -> list[int]:
    """Indices of the detections whose color the rules look at: the most certain ones, as many as are asked for."""
    required = [entry for entry in metadata.get("include", ()) if entry.get("color")]
    kept = filter_detections(detections, metadata["tag"], rules) if required else {}
    chosen = [detection for entry in required for detection in kept.get(entry["class"], [])[: entry["count"]]]
    return [i for i, detection in enumerate(detections) if any(detection is other for other in chosen)]


def apply_rules(detections: Sequence[DetectedObject], metadata: Metadata, rules: GenEvalRules) -> GenevalResult:
    correct, reasons = evaluate_detections(detections, metadata, rules)
    requirements = len(metadata.get("include", ())) + len(metadata.get("exclude", ())) + rules.strict
    kept = filter_detections(detections, metadata["tag"], rules)
    return GenevalResult(correct, tuple(reasons), kept, 1 - len(reasons) / requirements)


class ClipColorClassifier:
    """Zero-shot classification of an object's color by CLIP, among GenEval's ten."""

    def __init__(self, net: Any, tokenize: Tokenize, image_size: int) -> None:
        self.net, self.tokenize, self.image_size = net, tokenize, image_size
        self._embeddings: dict[str, Tensor] = {}

    @torch.no_grad()
    def class_embeddings(self, name: str) -> Tensor:
        """Text embeddings of an object's name in each color: [10, C]."""
        if name not in self._embeddings:
            texts = [template.format(color=color, name=name) for color in COLORS for template in TEMPLATES]
            features = self.net.get_text_features(**self.tokenize(texts, self.net.device)).pooler_output.float()
            unit = F.normalize(features, dim=-1).view(len(COLORS), len(TEMPLATES), -1)
            self._embeddings[name] = F.normalize(unit.mean(1), dim=-1)
        return self._embeddings[name]

    @torch.no_grad()
    def classify(self, crops: Sequence[Tensor], names: Sequence[str]) -> list[str]:
        """Colors of objects, each a crop [3, size, size] with the name of its class."""
        if not crops:
            return []
        pixels = torch.stack(list(crops)).to(self.net.device, self.net.dtype)
        features = F.normalize(self.net.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1)
        cosines = torch.einsum("nc,nkc->nk", features, torch.stack([self.class_embeddings(name) for name in names]))
        return [COLORS[i] for i in cosines.argmax(1).tolist()]


def load_color_classifier(weights: str, placement: Placement) -> ClipColorClassifier:
    model = load_image_text_model(weights, CLIP_L, placement)
    return ClipColorClassifier(model.net, model.tokenizer(None), model.image_size)


def crop_object(image: NDArray[np.uint8], mask: NDArray[np.bool_], box: Box, size: int) -> Tensor:
    """CLIP's input of an object in an image [H, W, 3]: on gray, cropped to its box, resized and center-cropped."""
    masked = Image.fromarray(np.where(mask[..., None], image, np.uint8(GRAY)))
    crop = masked.crop((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    if min(crop.size) == 0:
        crop = Image.new("RGB", (1, 1), (GRAY, GRAY, GRAY))  # the box of an empty mask is empty
    shorter = min(crop.size)
    width, height = (int(size * side / shorter) for side in crop.size)
    crop = crop.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    pixels = torch.from_numpy(np.array(crop.crop((left, top, left + size, top + size)))).movedim(-1, 0) / 255
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    return (pixels - mean) / std


@dataclass(frozen=True)
class SelfTestResult:
    recognized: int  # drawings with the right class at the right place
    total: int
    colors: int  # plain colors with the right name

    def __str__(self) -> str:
        return f"{self.recognized} of {self.total} drawings and {self.colors} of {len(DRAWN_COLORS)} colors recognized"


def run_selftest(checker: GenevalChecker, placement: Placement) -> SelfTestResult:
    """Test the detector on drawings of known objects and the color classifier on plain colors.

    A network with wrong settings, wrong kernels or permuted weights still runs, and detects almost nothing.
    """
    recognized = 0
    for first in range(0, len(DRAWN_CLASSES), COLUMNS * ROWS):
        names = DRAWN_CLASSES[first : first + COLUMNS * ROWS]
        image = selftest_image(first)[None].to(placement.device)
        instances = checker.detector.detect(image, checker.rules.threshold)[0]
        recognized += sum(_is_recognized(instances, name, i) for i, name in enumerate(names))
    return SelfTestResult(recognized, len(DRAWN_CLASSES), _count_colors(checker.color_classifier))


def require_selftest(checker: GenevalChecker, placement: Placement) -> SelfTestResult:
    """Run the self-test and refuse a detector or color classifier that fails it."""
    result = run_selftest(checker, placement)
    if result.recognized < MIN_RECOGNIZED or result.colors < MIN_COLORS:
        raise ConfigError(
            f"the detector '{checker.detector.variant}' failed its self-test: {result}, expected at least "
            f"{MIN_RECOGNIZED} and {MIN_COLORS}; its scores would be wrong, so download the weights again, or use "
            "other weights [TM395]"
        )
    return result


def selftest_image(first: int) -> Tensor:
    """Six drawings, beginning with the given one, on light gray: [3, H, W]."""
    drawings = load_sprites("noto")[first : first + COLUMNS * ROWS]
    large = F.interpolate(drawings, (CELL * 3 // 4, CELL * 3 // 4), mode="bicubic", antialias=True).clamp(0, 1)
    margin = CELL // 8
    large = F.pad(large, (margin, margin, margin, margin))
    opaque = large[:, :3] * large[:, 3:] + 0.9 * (1 - large[:, 3:])
    cells = opaque.view(ROWS, COLUMNS, 3, CELL, CELL)
    return cells.permute(2, 0, 3, 1, 4).reshape(3, ROWS * CELL, COLUMNS * CELL)


def _is_recognized(instances: Instances, name: str, cell: int) -> bool:
    """Whether an instance of that class has its center in that cell of a self-test image."""
    centers = (instances.boxes[:, :2] + instances.boxes[:, 2:]) / 2
    inside = (centers // CELL == centers.new_tensor([cell % COLUMNS, cell // COLUMNS])).all(1)
    return bool(((instances.label == CLASSES.index(name)) & inside).any())


def _count_colors(classifier: ClipColorClassifier) -> int:
    """How many plain colors are classified correctly."""
    size = classifier.image_size
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    plain = [(torch.tensor(rgb)[:, None, None].expand(3, size, size) - mean) / std for rgb in DRAWN_COLORS.values()]
    names = classifier.classify(plain, ["car"] * len(plain))
    return sum(name == color for name, color in zip(names, DRAWN_COLORS, strict=True))
