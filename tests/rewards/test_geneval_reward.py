"""GenEval as a reward: what is cut out and coloured, what the rules make of it, and a detector on trial."""

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


def fact(tag: str, *include: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tag": tag, "include": list(include), "prompt": "a photo", **more}


def thing(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


@dataclass(frozen=True)
class Seer:
    """A detector that sees what it is told to, in the left half of every picture."""

    names: tuple[str, ...]
    scores: tuple[float, ...]
    variant: str = "seer"

    def detect(self, pixels: Tensor, floor: float) -> list[Instances]:
        height, width = pixels.shape[-2:]
        mask = torch.zeros(len(self.names), height, width, dtype=torch.bool)
        mask[:, :, : width // 2] = True
        box = torch.tensor([[0.0, 0.0, width // 2, height]] * len(self.names)).view(-1, 4)
        labels = torch.tensor([CLASSES.index(name) for name in self.names], dtype=torch.long)
        return [Instances(labels, torch.tensor(self.scores), box, mask)] * len(pixels)


class Painter:
    """Tells colours by the pixels of what is cut out."""

    image_size = 32

    def classify(self, crops: Any, names: Any) -> list[str]:
        plain = {color: torch.tensor(rgb) for color, rgb in COLORS.items()}
        mean, std = (
            torch.tensor([0.48145466, 0.4578275, 0.40821073]),
            torch.tensor([0.26862954, 0.26130258, 0.27577711]),
        )
        seen = [crop.mean((1, 2)) * std + mean for crop in crops]
        return [min(plain, key=lambda color: float((plain[color] - x).norm())) for x in seen]


def sight(*names: str, score: float = 0.95, rules: GenEvalRules = GenEvalRules()) -> GenevalChecker:
    seer: Any = Seer(names, (score,) * len(names))
    painter: Any = Painter()
    return GenevalChecker(seer, painter, rules)


def halves(left: str, right: str) -> Tensor:
    """A picture of two colours: [1, 3, 40, 60]."""
    colors = (torch.tensor(COLORS[name])[:, None, None].expand(3, 40, 30) for name in (left, right))
    return torch.cat(list(colors), 2)[None]


def test_the_colour_is_that_of_the_thing_and_not_of_what_is_around_it() -> None:
    pixels = halves("red", "blue")
    assert sight("car").check(pixels, [fact("colors", thing("car", color="red"))])[0].correct
    told = sight("car").check(pixels, [fact("colors", thing("car", color="blue"))])[0]
    assert not told.correct and told.reasons == ("expected blue car>=1, found 0 blue; and 1 red",)


def test_what_is_cut_out_is_what_pil_would_cut_out() -> None:
    rng = np.random.default_rng(0)
    picture, mask = rng.integers(0, 256, (37, 53, 3), np.uint8), rng.random((37, 53)) > 0.5
    blank = Image.new("RGB", (53, 37), "#999")
    image = Image.composite(Image.fromarray(picture), blank, Image.fromarray(mask)).crop((5, 3, 45, 30))
    image = image.resize((int(24 * 40 / 27), 24), Image.Resampling.BICUBIC)
    left = round((image.width - 24) / 2)
    theirs = torch.from_numpy(np.array(image.crop((left, 0, left + 24, 24)))).movedim(-1, 0) / 255
    mean, std = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    ours = crop_object(picture, mask, (5.0, 3.0, 45.0, 30.0), 24)
    torch.testing.assert_close(ours * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None], theirs)
    assert crop_object(picture, mask, (0.0, 0.0, 0.0, 0.0), 24).shape == (3, 24, 24), "a mask of nothing"


def test_only_the_surest_that_are_asked_for_are_looked_at_closely() -> None:
    seen = [DetectedObject("car", (0, 0, 9, 9), score) for score in (0.5, 0.9, 0.7, 0.2)] + [
        DetectedObject("dog", (0, 0, 9, 9), 1)
    ]
    asked = fact("colors", thing("car", 2, color="red"), thing("dog"))
    assert color_candidates(seen, asked, GenEvalRules()) == [1, 2]
    assert color_candidates(seen, fact("two_object", thing("car"), thing("dog")), GenEvalRules()) == []


def test_colours_of_a_class_are_directions_of_three_sentences() -> None:
    teller = load_color_classifier("tiny", Placement())
    known = teller.class_embeddings("hot dog")
    assert known.shape[0] == 10 and teller.class_embeddings("hot dog") is known
    torch.testing.assert_close(known.norm(dim=1), torch.ones(10))
    texts = ["a photo of a green hot dog", "a photo of a green-colored hot dog", "a photo of a green object"]
    read = teller.net.get_text_features(**teller.tokenize(texts, torch.device("cpu"))).pooler_output
    mean = torch.nn.functional.normalize(torch.nn.functional.normalize(read, dim=-1).mean(0), dim=0)
    torch.testing.assert_close(known[3], mean)


def scorer(*names: str, score: float = 0.95, **settings: Any) -> GenevalScorer:
    spec = GenevalReward(**settings)
    return GenevalScorer(spec, replace(sight(*names, score=score), rules=spec.rules))


def test_the_score_is_the_verdict_or_the_share_that_holds() -> None:
    pixels = halves("red", "blue")[:, None]
    both = fact("two_object", thing("car"), thing("dog"))
    assert scorer("car").score(pixels, ["it"], [both]).tolist() == [0]
    assert scorer("car", output="graded").score(pixels, ["it"], [both]).tolist() == [0.5]
    assert scorer("car", "dog").score(pixels, ["it"], [both]).tolist() == [1]
    assert scorer("car", "dog", "cat", strict=True).score(pixels, ["it"], [both]).tolist() == [0]


def test_counted_are_only_things_that_are_surer() -> None:
    asked = fact("counting", thing("car", 2), exclude=[thing("car", 3)])
    pixels = halves("red", "blue")[:, None]
    assert scorer("car", "car").score(pixels, ["it"], [asked]).item() == 1
    assert scorer("car", "car", score=0.8).score(pixels, ["it"], [asked]).item() == 0
    assert scorer("car", "car", score=0.8, counting_threshold=0.7).score(pixels, ["it"], [asked]).item() == 1
    assert scorer("car", "car", nms_threshold=0.5).score(pixels, ["it"], [asked]).item() == 0, (
        "one on top of the other is one"
    )


def test_all_conditions_are_counted_in_the_share() -> None:
    asked = fact("counting", thing("car", 2), exclude=[thing("car", 3)])
    three = [DetectedObject("car", (20 * k, 0, 20 * k + 9, 9), 0.95) for k in range(3)]
    assert (
        apply_rules(three, asked, GenEvalRules()).fraction_correct == 0.5
        and apply_rules(three[:2], asked, GenEvalRules()).fraction_correct == 1
    )


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "'a dog': metadata have no 'tag' or no 'include'"),
        (fact("colors", thing("dgo")), "GenEval knows no class 'dgo'; did you mean 'dog'?"),
        (fact("colors", thing("dog", color="rde")), "GenEval knows no color 'rde'; did you mean 'red'?"),
        (fact("counting", thing("dog", 0)), "the count of 'dog' is 0; expected a whole number from 1"),
        (fact("position", thing("dog", position=["left of", 0])), "expected one of left of, right of, above, below"),
        (
            fact("position", thing("dog"), thing("cat", position=["above"])),
            "the position of 'cat' is ['above']; expected",
        ),
        (fact("position", thing("dog"), thing("cat", position=["above", "0"])), "the number of an object before it"),
        (fact("position", thing("dog"), thing("cat", position="above")), "the position of 'cat' is above; expected"),
        (fact("colors", thing("dog", color=3)), "GenEval knows no color '3'"),
        (fact("counting", thing("dog", True)), "the count of 'dog' is True; expected a whole number"),
        ({"tag": "colors", "include": ["dog"]}, "objects are ['dog']; expected a list of mappings"),
        ({"tag": "colors", "include": thing("dog")}, "expected a list of mappings with 'class' and 'count'"),
        ({"tag": "colors", "include": None}, "objects are None; expected a list of mappings"),
    ],
)
def test_metadata_that_cannot_be_used_are_a_sentence(metadata: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        scorer("dog").score(halves("red", "blue")[:, None], ["a dog"], [metadata])
    assert sentence in str(told.value)


def test_no_row_depends_on_its_company() -> None:
    tiny = GenevalReward(output="graded").tiny().load(Placement())
    pixels = torch.rand(3, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = [tiny.checker.detector.detect(x[None, 0], 0.3)[0] for x in pixels]
    names = [CLASSES[row.label[0]] for row in found]
    asked = [fact("two_object", thing(name), thing("dog", color="red")) for name in names]
    together = tiny.score(pixels, ["a", "b", "c"], asked)
    alone = [tiny.score(pixels[k : k + 1], ["it"], asked[k : k + 1]).item() for k in range(3)]
    assert together.tolist() == alone and (together >= 0.5).all()


def test_a_random_detector_fails_its_trial_loudly() -> None:
    with pytest.raises(ConfigError, match=r"'random' fails its self-test: \d of 48"):
        require_selftest(
            GenevalChecker(load_mask2former("tiny", Placement()), load_color_classifier("tiny", Placement())),
            Placement(),
        )
    with pytest.raises(ConfigError, match="fails its self-test"):
        replace(GenevalReward().tiny(), self_test=True).load(Placement())


@dataclass(frozen=True)
class Reader:
    """Knows every drawing, for it counts the sheets."""

    sheets: list[int]
    variant: str = "reader"

    def detect(self, pixels: Tensor, floor: float) -> list[Instances]:
        from tastemaker.playground.art import CLASSES as DRAWN

        first = 6 * len(self.sheets)
        self.sheets.append(first)
        assert torch.equal(pixels[0], selftest_image(first)) and pixels.shape[-2:] == (ROWS * CELL, COLUMNS * CELL)
        corners = [(CELL * (k % COLUMNS), CELL * (k // COLUMNS)) for k in range(6)]
        boxes = torch.tensor([[x + 20.0, y + 20.0, x + 100.0, y + 100.0] for x, y in corners])
        labels = torch.tensor([CLASSES.index(name) for name in DRAWN[first : first + 6]])
        return [Instances(labels, torch.full((6,), 0.9), boxes, torch.zeros(6, 1, 1, dtype=torch.bool))]


def test_who_knows_the_drawings_and_the_colours_passes() -> None:
    reader: Any = Reader([])
    painter: Any = Painter()
    outcome = run_selftest(GenevalChecker(reader, painter), Placement())
    assert (outcome.recognized, outcome.colors) == (48, 10)
    assert str(outcome) == "48 of 48 drawings and 10 of 10 colors recognized"
