"""Detectors as rewards: agreement with transformers, GenEval's rules, gradients and refused checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.detectors import DetectorOutput, ObjectDetector, load_detector, resize_for_detector
from tastemaker.rewards.detection import (
    DetectionReward,
    DetectionScorer,
    geneval_fractions,
    mean_confidence,
    objects_in_prompt,
    requested_objects,
)

KINDS = ["yolos", "grounding-dino"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def tiny(weights: str = "yolos", placement: Placement = Placement(), **settings: Any) -> DetectionScorer:
    spec = DetectionReward(weights, **settings).tiny()
    return DetectionScorer(spec, network(spec.weights, placement))


@cache
def network(weights: str, placement: Placement) -> ObjectDetector:
    """A frozen detector, shared by all tests."""
    return load_detector(weights, placement)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of both detectors, small and random, in the layout of the Hugging Face Hub."""
    paths = {}
    for kind in KINDS:
        scorer, folder = tiny(kind), tmp_path_factory.mktemp(kind)
        net: Any = scorer.net
        net.net.save_pretrained(folder)
        if kind == "grounding-dino":
            net.tokenizer.save_pretrained(folder)
        paths[kind] = folder
    return paths


def test_yolos_score_is_mean_of_transformers_detections() -> None:
    from transformers import YolosImageProcessorPil

    scorer, pixels = tiny(), random(4, 1, 3, 60, 90)
    net: Any = scorer.net
    with torch.no_grad():
        out = net.net(pixel_values=resize_for_detector(pixels[:, 0], 96))
    kept = YolosImageProcessorPil().post_process_object_detection(out, threshold=0.2)
    counts = [int((one["labels"] == 1).sum()) for one in kept]
    assert max(counts) > 1, "the mean needs several detections to be tested"
    expected = [one["scores"][one["labels"] == 1].mean().nan_to_num(0).item() for one in kept]
    assert scorer.score(pixels, [""] * 4, [{}] * 4).tolist() == pytest.approx(expected, rel=1e-5)


def test_grounding_dino_score_is_mean_of_transformers_detections() -> None:
    from transformers import GroundingDinoImageProcessorPil, GroundingDinoProcessor

    scorer, pixels = tiny("grounding-dino"), random(4, 1, 3, 60, 90)
    net: Any = scorer.net
    processor = GroundingDinoProcessor(GroundingDinoImageProcessorPil(), net.tokenizer)
    words = net.tokenizer(["cat."] * 4, return_tensors="pt")
    with torch.no_grad():
        out = net.net(pixel_values=resize_for_detector(pixels[:, 0], 96), **words)
    kept = processor.post_process_grounded_object_detection(out, words["input_ids"], threshold=0.4, text_threshold=0.3)
    assert max(len(one["scores"]) for one in kept) > 1
    expected = [one["scores"].mean().nan_to_num(0).item() for one in kept]
    assert scorer.score(pixels, [""] * 4, [{}] * 4).tolist() == pytest.approx(expected, rel=1e-5)


def test_boxes_match_transformers() -> None:
    from transformers import YolosImageProcessorPil

    net: Any = tiny().net
    pixels = random(1, 3, 64, 64)
    with torch.no_grad():
        out, detections = net.net(pixel_values=resize_for_detector(pixels, 96)), net.detect(pixels, [["cat"]], 96)
    kept = YolosImageProcessorPil().post_process_object_detection(out, threshold=-1)
    torch.testing.assert_close(detections.boxes[0], kept[0]["boxes"])


def test_images_are_resized_to_height_with_no_antialiasing() -> None:
    pixels = random(1, 3, 40, 60)
    assert resize_for_detector(pixels, 512).shape == (1, 3, 512, 768)
    assert resize_for_detector(random(1, 3, 320, 7), 512).shape == (1, 3, 512, 32), "no narrower than a patch"
    every_other = resize_for_detector(pixels.repeat_interleave(2, 2).repeat_interleave(2, 3), 40)
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(every_other, (pixels - mean) / std)


@pytest.mark.parametrize("kind", KINDS)
def test_hub_directory_scores_like_the_network_in_memory(kind: str, folders: dict[str, Path]) -> None:
    pixels = random(2, 1, 3, 64, 64)
    loaded = DetectionReward(str(folders[kind]), objects="cat", image_height=96).load(Placement())
    torch.testing.assert_close(loaded.score(pixels, ["", ""], [{}, {}]), tiny(kind).score(pixels, ["", ""], [{}, {}]))
    net: Any = loaded.net
    assert not any(p.requires_grad for p in net.net.parameters())
    assert not net.net.training


@pytest.mark.parametrize("kind", KINDS)
def test_sample_scores_are_independent_of_the_batch(kind: str) -> None:
    scorer, pixels = DetectionScorer(DetectionReward(kind, image_height=96), tiny(kind).net), random(3, 1, 3, 64, 64)
    prompts = ["cat", "a dog. a cup and a book.", "mouse"]
    batched = scorer.score(pixels, prompts, [{}] * 3)
    single = [scorer.score(pixels[i : i + 1], prompts[i : i + 1], [{}]).item() for i in range(3)]
    assert batched.tolist() == pytest.approx(single, rel=1e-4, abs=1e-6)


@pytest.fixture
def default_float64() -> Iterator[None]:
    """Make float64 the default, because Grounding DINO allocates its logits in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", ["confidence", "best"])
@pytest.mark.usefixtures("default_float64")
def test_gradients_agree_with_finite_differences(kind: str, output: Any) -> None:
    scorer = tiny(kind, Placement(dtype=torch.float64), output=output)
    pixels = (0.2 + 0.6 * random(1, 1, 3, 48, 48)).double().requires_grad_()
    score = scorer.score(pixels, [""], [{}])
    assert score.item() > 0
    assert scorer.spec.differentiable
    assert torch.autograd.gradcheck(lambda x: scorer.score(x, [""], [{}]), (pixels,), fast_mode=True, eps=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_undetected_object_scores_zero_and_has_a_gradient_only_for_output_best(kind: str) -> None:
    pixels = random(2, 1, 3, 64, 64).requires_grad_()
    scores = tiny(kind, threshold=0.9999).score(pixels, ["", ""], [{}, {}])
    scores.sum().backward()
    assert scores.tolist() == [0, 0]
    assert pixels.grad is not None
    assert not pixels.grad.any()
    tiny(kind, threshold=0.9999, output="best").score(pixels, ["", ""], [{}, {}]).sum().backward()
    assert pixels.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_expect_absent_scores_one_minus_confidence(kind: str) -> None:
    pixels, rest = random(2, 1, 3, 64, 64), (["", ""], [{}, {}])
    torch.testing.assert_close(tiny(kind, expect="absent").score(pixels, *rest), 1 - tiny(kind).score(pixels, *rest))


def test_requested_objects_come_from_setting_metadata_or_prompt() -> None:
    known = ("dog", "hot dog", "cup", "bus")
    assert requested_objects("Book.", "a dog", {}, known) == ["book"]
    assert requested_objects("book. tea  cup.", "", {}, ()) == ["book", "tea cup"]
    assert requested_objects("", "a dog", {"object": "cup"}, known) == ["cup"]
    assert requested_objects(
        "", "", {"include": [{"class": "bus", "count": 1}, {"class": "bus", "count": 2}]}, known
    ) == ["bus"]
    assert requested_objects("", "A hot dog, two cups and buses", {}, known) == ["hot dog", "cup", "bus"]
    assert requested_objects("", "A red thing. Another", {}, ()) == ["a red thing", "another"]
    assert objects_in_prompt("hotdog dogma", known) == []
    with pytest.raises(ValueError, match=r"'a red thing'.*TM384"):
        requested_objects("", "a red thing", {}, known)


def test_mean_confidence_averages_over_boxes_then_names() -> None:
    confidence = torch.tensor([[[0.9, 0.1], [0.5, 0.4], [0.1, 0.8]]])
    first = confidence == confidence.amax(2, keepdim=True)
    detections = DetectorOutput(confidence, first, torch.zeros(1, 3, 4))
    assert mean_confidence(detections, [["cat", "dog"]], 0.2).item() == pytest.approx((0.7 + 0.8) / 2)
    assert mean_confidence(detections, [["cat", "dog"]], 0.6).item() == pytest.approx((0.9 + 0.8) / 2)
    assert mean_confidence(detections, [["cat", "dog"]], None).item() == pytest.approx((0.9 + 0.8) / 2)
    assert mean_confidence(detections, [["cat"]], 0.95).item() == 0


def make_detections(*objects: tuple[int, float, tuple[float, float]]) -> DetectorOutput:
    """Detections of (class id, confidence, box center); boxes are a fifth of the image wide."""
    confidence, boxes = torch.zeros(1, len(objects), 2), torch.zeros(1, len(objects), 4)
    for index, (name, score, (x, y)) in enumerate(objects):
        confidence[0, index, name] = score
        boxes[0, index] = torch.tensor([x - 0.1, y - 0.1, x + 0.1, y + 0.1])
    return DetectorOutput(confidence, confidence > 0, boxes)


def test_counts_and_positions_follow_geneval_rules() -> None:
    scorer = tiny(output="graded")
    names, rules, size = [["cat", "dog"]], scorer.net.rules, (100, 200)
    pair = make_detections((0, 0.95, (0.2, 0.5)), (1, 0.95, (0.8, 0.5)))
    left, right = (
        {
            "tag": "position",
            "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": [side, 0]}],
        }
        for side in ("left of", "right of")
    )
    assert geneval_fractions(pair, names, [left], rules, size).item() == 1
    assert geneval_fractions(pair, names, [right], rules, size).item() == 0.5
    three = make_detections(*[(0, 0.95, (0.2 * k, 0.5)) for k in range(1, 4)])
    count = {"tag": "counting", "include": [{"class": "cat", "count": 3}], "exclude": [{"class": "cat", "count": 4}]}
    assert geneval_fractions(three, names, [count], rules, size).item() == 1
    more = make_detections(*[(0, 0.95, (0.2 * k, 0.5)) for k in range(1, 5)])
    assert geneval_fractions(more, names, [count], rules, size).item() == 0.5
    unsure = make_detections(*[(0, 0.8, (0.2 * k, 0.5)) for k in range(1, 4)])
    assert geneval_fractions(unsure, names, [count], rules, size).item() == 0.5, (
        "counting uses detections with a confidence of at least 0.9"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_geneval_rules_apply_to_network_detections(kind: str) -> None:
    pixels = random(3, 1, 3, 64, 64)
    metadata = [{"tag": "", "include": [{"class": name, "count": 1}]} for name in ("cat", "computer mouse", "cat")]
    metadata[2]["exclude"] = [{"class": "cat", "count": 1}]
    graded = tiny(kind, output="graded", threshold=0.3).score(pixels, ["a", "b", "c"], metadata)
    verdict = tiny(kind, output="verdict", threshold=0.3).score(pixels, ["a", "b", "c"], metadata)
    assert not DetectionReward(output="graded").differentiable
    assert graded[0] == 1
    assert graded[2] == 0.5
    assert verdict.tolist() == [float(share == 1) for share in graded.tolist()]
    strict = tiny(kind, output="graded", threshold=0.0, strict=True).score(pixels, ["a", "b", "c"], metadata)
    assert strict[0] < 1, "six objects are detected where one was requested"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (3, 200), (200, 3)])
def test_images_of_any_size_and_prompts_of_any_length_are_scored(kind: str, size: tuple[int, int]) -> None:
    scorer = DetectionScorer(DetectionReward(kind, image_height=96), tiny(kind).net)
    prompts = ["a cat. " + "x " * 1000, "dog"]
    assert scorer.score(random(2, 1, 3, *size), prompts, [{}, {}]).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", ["confidence", "best", "graded", "verdict"])
def test_nan_pixels_give_nan_scores(kind: str, output: Any) -> None:
    pixels = torch.full((1, 1, 3, 64, 64), float("nan"))
    metadata = {"include": [{"class": "dog", "count": 1}]}
    assert tiny(kind, output=output).score(pixels, ["dog"], [metadata]).isnan().all()


@pytest.mark.parametrize(
    ("output", "metadata", "pattern"),
    [
        ("confidence", {"object": "dgo"}, "'dgo'.*'dog'"),
        ("verdict", {}, "'a dog'.*'include'"),
        ("verdict", {"include": [{"class": "dog", "count": 1, "color": "red"}]}, "'a dog'.*color"),
    ],
)
def test_unusable_requests_are_refused(output: Any, metadata: dict[str, Any], pattern: str) -> None:
    scorer = DetectionScorer(DetectionReward(output=output, image_height=96), tiny().net)
    with pytest.raises(ValueError, match=pattern):
        scorer.score(random(1, 1, 3, 64, 64), ["a dog"], [metadata])


def test_unusable_checkpoint_directories_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hustvl/yolos-base .*Apache-2.0.*TM505"):
        DetectionReward("nobody/nothing").load(Placement())
    with pytest.raises(ConfigError, match=r"config\.json.*TM355"):
        DetectionReward(str(tmp_path)).load(Placement())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bert.*yolos.*grounding-dino.*TM350"):
        DetectionReward(str(tmp_path)).load(Placement())
    (tmp_path / "config.json").write_bytes((folders["yolos"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folders["yolos"] / "model.safetensors").read_bytes()[:9000])
    with pytest.raises(ConfigError, match=r"readable safetensors.*TM506"):
        DetectionReward(str(tmp_path)).load(Placement())
    (tmp_path / "model.safetensors").write_bytes((folders["grounding-dino"] / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"'bbox_predictor\.layers\.0\.bias'.*TM358"):
        DetectionReward(str(tmp_path)).load(Placement())


@pytest.mark.parametrize(
    ("short", "hub"),
    [
        ("yolos-base", "hustvl/yolos-base"),
        ("yolos-tiny", "hustvl/yolos-tiny"),
        ("grounding-dino-base", "IDEA-Research/grounding-dino-base"),
        ("grounding-dino-tiny", "IDEA-Research/grounding-dino-tiny"),
    ],
)
def test_vader_short_names_map_to_hub_names(short: str, hub: str) -> None:
    assert [source.hub for source in DetectionReward(short).card.sources] == [hub]
    with pytest.raises(ConfigError, match=f"'{hub}'.*`tastemaker download {hub}`"):
        DetectionReward(short).load(Placement())
