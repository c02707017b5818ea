"""GenEval as a reward: object crops and colors, scores by the rules, and the self-test of a detector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.evaluation.geneval_rules import CLASSES, DetectedObject, GenEvalRules
from tastemaker.playground.art import COLORS
from tastemaker.rewards.backbones.mask2former import Instances, load_mask2former
from tastemaker.rewards.geneval import (
    CELL,
    COLUMNS,
    ROWS,
    GenevalChecker,
    GenevalReward,
    GenevalScorer,
    apply_rules,
    color_candidates,
    crop_object,
    load_color_classifier,
    require_selftest,
    run_selftest,
    selftest_image,
)


def request(tag: str, *include: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tag": tag, "include": list(include), "prompt": "a photo", **more}


def object_entry(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


@dataclass(frozen=True)
class StubDetector:
    """A detector that returns the configured classes, in the left half of every image."""

    names: tuple[str, ...]
    scores: tuple[float, ...]
    variant: str = "stub"

    def detect(self, pixels: Tensor, floor: float) -> list[Instances]:
        height, width = pixels.shape[-2:]
        mask = torch.zeros(len(self.names), height, width, dtype=torch.bool)
        mask[:, :, : width // 2] = True
        box = torch.tensor([[0.0, 0.0, width // 2, height]] * len(self.names)).view(-1, 4)
        labels = torch.tensor([CLASSES.index(name) for name in self.names], dtype=torch.long)
        return [Instances(labels, torch.tensor(self.scores), box, mask)] * len(pixels)


class MeanColorClassifier:
    """Classifies the color of a crop by its mean pixel."""

    image_size = 32

    def classify(self, crops: Any, names: Any) -> list[str]:
        palette = {color: torch.tensor(rgb) for color, rgb in COLORS.items()}
        mean, std = (
            torch.tensor([0.48145466, 0.4578275, 0.40821073]),
            torch.tensor([0.26862954, 0.26130258, 0.27577711]),
        )
        means = [crop.mean((1, 2)) * std + mean for crop in crops]
        return [min(palette, key=lambda color: float((palette[color] - x).norm())) for x in means]


def make_checker(*names: str, score: float = 0.95, rules: GenEvalRules = GenEvalRules()) -> GenevalChecker:
    detector: Any = StubDetector(names, (score,) * len(names))
    color_classifier: Any = MeanColorClassifier()
    return GenevalChecker(detector, color_classifier, rules)


def two_color_image(left: str, right: str) -> Tensor:
    """An image with a left and a right color: [1, 3, 40, 60]."""
    colors = (torch.tensor(COLORS[name])[:, None, None].expand(3, 40, 30) for name in (left, right))
    return torch.cat(list(colors), 2)[None]


def test_color_is_read_from_the_object_mask_only() -> None:
    pixels = two_color_image("red", "blue")
    assert make_checker("car").check(pixels, [request("colors", object_entry("car", color="red"))])[0].correct
    verdict = make_checker("car").check(pixels, [request("colors", object_entry("car", color="blue"))])[0]
    assert not verdict.correct and verdict.reasons == ("expected blue car>=1, found 0 blue; and 1 red",)


def test_object_crop_matches_pil() -> None:
    rng = np.random.default_rng(0)
    pixels, mask = rng.integers(0, 256, (37, 53, 3), np.uint8), rng.random((37, 53)) > 0.5
    blank = Image.new("RGB", (53, 37), "#999")
    image = Image.composite(Image.fromarray(pixels), blank, Image.fromarray(mask)).crop((5, 3, 45, 30))
    image = image.resize((int(24 * 40 / 27), 24), Image.Resampling.BICUBIC)
    left = round((image.width - 24) / 2)
    expected = torch.from_numpy(np.array(image.crop((left, 0, left + 24, 24)))).movedim(-1, 0) / 255
    mean, std = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    crop = crop_object(pixels, mask, (5.0, 3.0, 45.0, 30.0), 24)
    torch.testing.assert_close(crop * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None], expected)
    assert crop_object(pixels, mask, (0.0, 0.0, 0.0, 0.0), 24).shape == (3, 24, 24), "an empty box"


def test_only_the_most_confident_requested_objects_are_classified_by_color() -> None:
    detections = [DetectedObject("car", (0, 0, 9, 9), score) for score in (0.5, 0.9, 0.7, 0.2)] + [
        DetectedObject("dog", (0, 0, 9, 9), 1)
    ]
    metadata = request("colors", object_entry("car", 2, color="red"), object_entry("dog"))
    assert color_candidates(detections, metadata, GenEvalRules()) == [1, 2]
    assert (
        color_candidates(detections, request("two_object", object_entry("car"), object_entry("dog")), GenEvalRules())
        == []
    )


def test_color_embeddings_average_three_prompt_templates() -> None:
    classifier = load_color_classifier("tiny", Placement())
    embeddings = classifier.class_embeddings("hot dog")
    assert embeddings.shape[0] == 10 and classifier.class_embeddings("hot dog") is embeddings
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(10))
    texts = ["a photo of a green hot dog", "a photo of a green-colored hot dog", "a photo of a green object"]
    text_features = classifier.net.get_text_features(**classifier.tokenize(texts, torch.device("cpu"))).pooler_output
    mean = torch.nn.functional.normalize(torch.nn.functional.normalize(text_features, dim=-1).mean(0), dim=0)
    torch.testing.assert_close(embeddings[3], mean)


def scorer(*names: str, score: float = 0.95, **settings: Any) -> GenevalScorer:
    spec = GenevalReward(**settings)
    return GenevalScorer(spec, replace(make_checker(*names, score=score), rules=spec.rules))


def test_score_is_the_verdict_or_the_fraction_of_satisfied_conditions() -> None:
    pixels = two_color_image("red", "blue")[:, None]
    both = request("two_object", object_entry("car"), object_entry("dog"))
    assert scorer("car").score(pixels, ["it"], [both]).tolist() == [0]
    assert scorer("car", output="graded").score(pixels, ["it"], [both]).tolist() == [0.5]
    assert scorer("car", "dog").score(pixels, ["it"], [both]).tolist() == [1]
    assert scorer("car", "dog", "cat", strict=True).score(pixels, ["it"], [both]).tolist() == [0]


def test_counting_uses_a_higher_confidence_threshold() -> None:
    metadata = request("counting", object_entry("car", 2), exclude=[object_entry("car", 3)])
    pixels = two_color_image("red", "blue")[:, None]
    assert scorer("car", "car").score(pixels, ["it"], [metadata]).item() == 1
    assert scorer("car", "car", score=0.8).score(pixels, ["it"], [metadata]).item() == 0
    assert scorer("car", "car", score=0.8, counting_threshold=0.7).score(pixels, ["it"], [metadata]).item() == 1
    assert scorer("car", "car", nms_threshold=0.5).score(pixels, ["it"], [metadata]).item() == 0, (
        "overlapping boxes are merged"
    )


def test_fraction_correct_counts_all_conditions() -> None:
    metadata = request("counting", object_entry("car", 2), exclude=[object_entry("car", 3)])
    detections = [DetectedObject("car", (20 * k, 0, 20 * k + 9, 9), 0.95) for k in range(3)]
    assert (
        apply_rules(detections, metadata, GenEvalRules()).fraction_correct == 0.5
        and apply_rules(detections[:2], metadata, GenEvalRules()).fraction_correct == 1
    )


@pytest.mark.parametrize(
    ("metadata", "fragments"),
    [
        ({}, ("'a dog'", "'tag'", "'include'")),
        (request("colors", object_entry("dgo")), ("class 'dgo'", "'dog'")),
        (request("colors", object_entry("dog", color="rde")), ("color 'rde'", "'red'")),
        (request("counting", object_entry("dog", 0)), ("count of 'dog', got 0", "TM617")),
        (request("position", object_entry("dog", position=["left of", 0])), ("left of, right of, above, below",)),
        (
            request("position", object_entry("dog"), object_entry("cat", position=["above"])),
            ("position of 'cat', got ['above']", "TM619"),
        ),
        (
            request("position", object_entry("dog"), object_entry("cat", position=["above", "0"])),
            ("position of 'cat', got ['above', '0']", "TM619"),
        ),
        (
            request("position", object_entry("dog"), object_entry("cat", position="above")),
            ("position of 'cat', got above", "TM619"),
        ),
        (request("colors", object_entry("dog", color=3)), ("color '3'",)),
        (request("counting", object_entry("dog", True)), ("count of 'dog', got True", "TM617")),
        ({"tag": "colors", "include": ["dog"]}, ("got ['dog']", "TM614")),
        ({"tag": "colors", "include": object_entry("dog")}, ("'class' and 'count'", "TM614")),
        ({"tag": "colors", "include": None}, ("got None", "TM614")),
    ],
)
def test_invalid_metadata_is_refused(metadata: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        scorer("dog").score(two_color_image("red", "blue")[:, None], ["a dog"], [metadata])
    assert all(fragment in str(error.value) for fragment in fragments)


def test_sample_scores_are_independent_of_the_batch() -> None:
    tiny = GenevalReward(output="graded").tiny().load(Placement())
    pixels = torch.rand(3, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    detections = [tiny.checker.detector.detect(x[None, 0], 0.3)[0] for x in pixels]
    names = [CLASSES[row.label[0]] for row in detections]
    metadata = [request("two_object", object_entry(name), object_entry("dog", color="red")) for name in names]
    batched = tiny.score(pixels, ["a", "b", "c"], metadata)
    single = [tiny.score(pixels[k : k + 1], ["it"], metadata[k : k + 1]).item() for k in range(3)]
    assert batched.tolist() == single and (batched >= 0.5).all()


def test_random_detector_fails_the_self_test() -> None:
    with pytest.raises(ConfigError, match=r"'random'.*self-test.*\d of 48.*TM395"):
        require_selftest(
            GenevalChecker(load_mask2former("tiny", Placement()), load_color_classifier("tiny", Placement())),
            Placement(),
        )
    with pytest.raises(ConfigError, match=r"self-test.*TM395"):
        replace(GenevalReward().tiny(), self_test=True).load(Placement())


@dataclass(frozen=True)
class SheetDetector:
    """Recognizes every drawing, because it counts the self-test images it has seen."""

    sheets: list[int]
    variant: str = "sheets"

    def detect(self, pixels: Tensor, floor: float) -> list[Instances]:
        from tastemaker.playground.art import CLASSES as DRAWN_CLASSES

        first = 6 * len(self.sheets)
        self.sheets.append(first)
        assert torch.equal(pixels[0], selftest_image(first)) and pixels.shape[-2:] == (ROWS * CELL, COLUMNS * CELL)
        corners = [(CELL * (k % COLUMNS), CELL * (k // COLUMNS)) for k in range(6)]
        boxes = torch.tensor([[x + 20.0, y + 20.0, x + 100.0, y + 100.0] for x, y in corners])
        labels = torch.tensor([CLASSES.index(name) for name in DRAWN_CLASSES[first : first + 6]])
        return [Instances(labels, torch.full((6,), 0.9), boxes, torch.zeros(6, 1, 1, dtype=torch.bool))]


def test_perfect_detector_and_classifier_pass_the_self_test() -> None:
    detector: Any = SheetDetector([])
    color_classifier: Any = MeanColorClassifier()
    outcome = run_selftest(GenevalChecker(detector, color_classifier), Placement())
    assert (outcome.recognized, outcome.colors) == (48, 10)
    assert "48 of 48" in str(outcome) and "10 of 10" in str(outcome)
