"""Detectors as rewards: transformers' own post-processing, GenEval's rules, gradients, folders and sentences."""

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
    """Frozen, so all tests may share it."""
    return load_detector(weights, placement)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both detectors, small and random, in the hub's layout."""
    found = {}
    for kind in KINDS:
        scorer, folder = tiny(kind), tmp_path_factory.mktemp(kind)
        net: Any = scorer.net
        net.net.save_pretrained(folder)
        if kind == "grounding-dino":
            net.tokenizer.save_pretrained(folder)
        found[kind] = folder
    return found


def test_yolos_scores_are_the_mean_of_what_transformers_keeps() -> None:
    from transformers import YolosImageProcessorPil

    scorer, pixels = tiny(), random(4, 1, 3, 60, 90)
    net: Any = scorer.net
    with torch.no_grad():
        out = net.net(pixel_values=resize_for_detector(pixels[:, 0], 96))
    kept = YolosImageProcessorPil().post_process_object_detection(out, threshold=0.2)
    counts = [int((one["labels"] == 1).sum()) for one in kept]
    assert max(counts) > 1, "a mean of one alone shows little"
    expected = [one["scores"][one["labels"] == 1].mean().nan_to_num(0).item() for one in kept]
    assert scorer.score(pixels, [""] * 4, [{}] * 4).tolist() == pytest.approx(expected, rel=1e-5)


def test_grounding_dino_scores_are_the_mean_of_what_transformers_keeps() -> None:
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


def test_boxes_are_transformers_own() -> None:
    from transformers import YolosImageProcessorPil

    net: Any = tiny().net
    pixels = random(1, 3, 64, 64)
    with torch.no_grad():
        out, found = net.net(pixel_values=resize_for_detector(pixels, 96)), net.detect(pixels, [["cat"]], 96)
    kept = YolosImageProcessorPil().post_process_object_detection(out, threshold=-1)
    torch.testing.assert_close(found.boxes[0], kept[0]["boxes"])


def test_pictures_are_brought_to_the_height_without_smoothing() -> None:
    pixels = random(1, 3, 40, 60)
    assert resize_for_detector(pixels, 512).shape == (1, 3, 512, 768)
    assert resize_for_detector(random(1, 3, 320, 7), 512).shape == (1, 3, 512, 32), "no narrower than a patch"
    every_other = resize_for_detector(pixels.repeat_interleave(2, 2).repeat_interleave(2, 3), 40)
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(every_other, (pixels - mean) / std)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_the_hubs_layout_scores_the_same(kind: str, folders: dict[str, Path]) -> None:
    pixels = random(2, 1, 3, 64, 64)
    loaded = DetectionReward(str(folders[kind]), objects="cat", image_height=96).load(Placement())
    torch.testing.assert_close(loaded.score(pixels, ["", ""], [{}, {}]), tiny(kind).score(pixels, ["", ""], [{}, {}]))
    net: Any = loaded.net
    assert not any(p.requires_grad for p in net.net.parameters())
    assert not net.net.training


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_depends_on_its_company(kind: str) -> None:
    scorer, pixels = DetectionScorer(DetectionReward(kind, image_height=96), tiny(kind).net), random(3, 1, 3, 64, 64)
    prompts = ["cat", "a dog. a cup and a book.", "mouse"]
    together = scorer.score(pixels, prompts, [{}] * 3)
    alone = [scorer.score(pixels[i : i + 1], prompts[i : i + 1], [{}]).item() for i in range(3)]
    assert together.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-6)


@pytest.fixture
def doubled() -> Iterator[None]:
    """Grounding DINO makes its logits anew, of the usual type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["confidence", "best"])
@pytest.mark.usefixtures("doubled")
def test_gradients_agree_with_finite_differences(kind: str, form: Any) -> None:
    scorer = tiny(kind, Placement(dtype=torch.float64), output=form)
    pixels = (0.2 + 0.6 * random(1, 1, 3, 48, 48)).double().requires_grad_()
    score = scorer.score(pixels, [""], [{}])
    assert score.item() > 0
    assert scorer.spec.differentiable
    assert torch.autograd.gradcheck(lambda x: scorer.score(x, [""], [{}]), (pixels,), fast_mode=True, eps=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_found_scores_nought_and_only_the_best_place_has_a_gradient(kind: str) -> None:
    pixels = random(2, 1, 3, 64, 64).requires_grad_()
    blind = tiny(kind, threshold=0.9999).score(pixels, ["", ""], [{}, {}])
    blind.sum().backward()
    assert blind.tolist() == [0, 0]
    assert pixels.grad is not None
    assert not pixels.grad.any()
    tiny(kind, threshold=0.9999, output="best").score(pixels, ["", ""], [{}, {}]).sum().backward()
    assert pixels.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_to_be_absent_scores_one_less_its_confidence(kind: str) -> None:
    pixels, rest = random(2, 1, 3, 64, 64), (["", ""], [{}, {}])
    torch.testing.assert_close(tiny(kind, expect="absent").score(pixels, *rest), 1 - tiny(kind).score(pixels, *rest))


def test_the_names_to_look_for() -> None:
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
    with pytest.raises(ValueError, match="'a red thing' names nothing"):
        requested_objects("", "a red thing", {}, known)


def test_confidence_is_the_mean_over_names_of_the_mean_over_places() -> None:
    sure = torch.tensor([[[0.9, 0.1], [0.5, 0.4], [0.1, 0.8]]])
    first = sure == sure.amax(2, keepdim=True)
    found = DetectorOutput(sure, first, torch.zeros(1, 3, 4))
    assert mean_confidence(found, [["cat", "dog"]], 0.2).item() == pytest.approx((0.7 + 0.8) / 2)
    assert mean_confidence(found, [["cat", "dog"]], 0.6).item() == pytest.approx((0.9 + 0.8) / 2)
    assert mean_confidence(found, [["cat", "dog"]], None).item() == pytest.approx((0.9 + 0.8) / 2)
    assert mean_confidence(found, [["cat"]], 0.95).item() == 0


def seen(*things: tuple[int, float, tuple[float, float]]) -> DetectorOutput:
    """Things of one of two names, surely so, about a place; boxes are a fifth of the picture wide."""
    sure, boxes = torch.zeros(1, len(things), 2), torch.zeros(1, len(things), 4)
    for place, (name, score, (x, y)) in enumerate(things):
        sure[0, place, name] = score
        boxes[0, place] = torch.tensor([x - 0.1, y - 0.1, x + 0.1, y + 0.1])
    return DetectorOutput(sure, sure > 0, boxes)


def test_counts_and_positions_are_marked_by_genevals_rules() -> None:
    scorer = tiny(output="graded")
    names, rules, size = [["cat", "dog"]], scorer.net.rules, (100, 200)
    pair = seen((0, 0.95, (0.2, 0.5)), (1, 0.95, (0.8, 0.5)))
    left, right = (
        {
            "tag": "position",
            "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": [side, 0]}],
        }
        for side in ("left of", "right of")
    )
    assert geneval_fractions(pair, names, [left], rules, size).item() == 1
    assert geneval_fractions(pair, names, [right], rules, size).item() == 0.5
    three = seen(*[(0, 0.95, (0.2 * k, 0.5)) for k in range(1, 4)])
    count = {"tag": "counting", "include": [{"class": "cat", "count": 3}], "exclude": [{"class": "cat", "count": 4}]}
    assert geneval_fractions(three, names, [count], rules, size).item() == 1
    more = seen(*[(0, 0.95, (0.2 * k, 0.5)) for k in range(1, 5)])
    assert geneval_fractions(more, names, [count], rules, size).item() == 0.5
    unsure = seen(*[(0, 0.8, (0.2 * k, 0.5)) for k in range(1, 4)])
    assert geneval_fractions(unsure, names, [count], rules, size).item() == 0.5, (
        "counted are only things of 0.9 and more"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_are_applied_to_what_the_network_finds(kind: str) -> None:
    pixels = random(3, 1, 3, 64, 64)
    demand = [{"tag": "", "include": [{"class": name, "count": 1}]} for name in ("cat", "computer mouse", "cat")]
    demand[2]["exclude"] = [{"class": "cat", "count": 1}]
    graded = tiny(kind, output="graded", threshold=0.3).score(pixels, ["a", "b", "c"], demand)
    verdict = tiny(kind, output="verdict", threshold=0.3).score(pixels, ["a", "b", "c"], demand)
    assert not DetectionReward(output="graded").differentiable
    assert graded[0] == 1
    assert graded[2] == 0.5
    assert verdict.tolist() == [float(share == 1) for share in graded.tolist()]
    strict = tiny(kind, output="graded", threshold=0.0, strict=True).score(pixels, ["a", "b", "c"], demand)
    assert strict[0] < 1, "six things are found where one was asked for"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (3, 200), (200, 3)])
def test_pictures_of_any_size_and_prompts_of_any_length_are_scored(kind: str, size: tuple[int, int]) -> None:
    scorer = DetectionScorer(DetectionReward(kind, image_height=96), tiny(kind).net)
    prompts = ["a cat. " + "x " * 1000, "dog"]
    assert scorer.score(random(2, 1, 3, *size), prompts, [{}, {}]).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["confidence", "best", "graded", "verdict"])
def test_pixels_that_are_no_numbers_have_no_score(kind: str, form: Any) -> None:
    pixels = torch.full((1, 1, 3, 64, 64), float("nan"))
    fact = {"include": [{"class": "dog", "count": 1}]}
    assert tiny(kind, output=form).score(pixels, ["dog"], [fact]).isnan().all()


@pytest.mark.parametrize(
    ("form", "fact", "sentence"),
    [
        ("confidence", {"object": "dgo"}, "the detector knows no 'dgo'; did you mean 'dog'?"),
        ("verdict", {}, "'a dog' has no metadata 'include'"),
        ("verdict", {"include": [{"class": "dog", "count": 1, "color": "red"}]}, "'a dog' asks for a color"),
    ],
)
def test_what_cannot_be_looked_for_is_a_sentence(form: Any, fact: dict[str, Any], sentence: str) -> None:
    scorer = DetectionScorer(DetectionReward(output=form, image_height=96), tiny().net)
    with pytest.raises(ValueError, match=sentence):
        scorer.score(random(1, 1, 3, 64, 64), ["a dog"], [fact])


def test_wrong_folders_are_sentences(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a local path, or hustvl/yolos-base .*Apache-2.0"):
        DetectionReward("nobody/nothing").load(Placement())
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        DetectionReward(str(tmp_path)).load(Placement())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="is of the type bert; expected the folder of a yolos or a grounding-dino"):
        DetectionReward(str(tmp_path)).load(Placement())
    (tmp_path / "config.json").write_bytes((folders["yolos"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folders["yolos"] / "model.safetensors").read_bytes()[:9000])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        DetectionReward(str(tmp_path)).load(Placement())
    (tmp_path / "model.safetensors").write_bytes((folders["grounding-dino"] / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"lacks 'bbox_predictor\.layers\.0\.bias' and"):
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
def test_vaders_short_names_are_those_of_the_hub(short: str, hub: str) -> None:
    assert [source.hub for source in DetectionReward(short).card.sources] == [hub]
    with pytest.raises(ConfigError, match=f"'{hub}' were not found; .* `tastemaker download {hub}`"):
        DetectionReward(short).load(Placement())
