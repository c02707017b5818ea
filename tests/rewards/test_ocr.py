"""Reading real signs with the real engine."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement
from tastemaker.playground import signs as words
from tastemaker.playground.signs import FONTS, SignPainter
from tastemaker.rewards.ocr import OcrEngine, OcrReward, edit_distance, expected_text, text_similarity


@pytest.fixture(scope="module")
def signs() -> tuple[Tensor, list[str], tuple[Metadata, ...]]:
    rng = Randomness(4, 0, torch.arange(20))
    places = words.sample_words(rng, "held_out")
    return SignPainter().paint(places, rng), list(words.sign_captions(places)), words.sign_metadata(places)


def rubric(spec: OcrReward) -> Rubric:
    return Rubric({"ocr": WeightedReward(spec, spec.load(Placement()))})


def test_real_signs_are_read_and_say_nothing_else(signs: tuple[Tensor, list[str], tuple[Metadata, ...]]) -> None:
    pixels, prompts, metadata = signs
    right = rubric(OcrReward(strict=True)).score(pixels, prompts, metadata).total
    assert (right == 1).float().mean() >= 0.95 and right.mean() >= 0.98
    wrong = rubric(OcrReward(strict=True)).score(pixels[:5], prompts[1:6], metadata[1:6]).total
    assert wrong.mean() < 0.3 and wrong.min() >= 0


@pytest.mark.slow
def test_signs_are_read_in_every_font() -> None:
    places = words.sample_words(Randomness(5, 0, torch.arange(6)), "train").repeat_interleave(20)
    painter, rng = SignPainter(), Randomness(5, 0, torch.arange(120))
    fonts = painter.arrange(places, rng).ink % len(FONTS)
    found = OcrEngine().read(painter.paint(places, rng)[:, 0], 160)
    right = torch.tensor(
        [text == fact["text"].lower() for text, fact in zip(found, words.sign_metadata(places), strict=True)]
    )
    assert all(right[fonts == font].float().mean() >= 0.9 for font in range(len(FONTS)))


def test_the_quoted_text_of_a_prompt_is_as_good_as_a_fact(
    signs: tuple[Tensor, list[str], tuple[Metadata, ...]],
) -> None:
    pixels, prompts, metadata = (part[:3] for part in signs)
    known, alone = (rubric(OcrReward()).score(pixels, prompts, some).total for some in (metadata, ()))
    assert torch.equal(known, alone)
    assert (
        expected_text('A neon "Open  Late" sign', {}) == "openlate"
        and expected_text("a sign", {"text": "No Way"}) == "noway"
    )


def test_of_a_clip_every_frame_counts(signs: tuple[Tensor, list[str], tuple[Metadata, ...]]) -> None:
    pixels, prompts, metadata = (part[:2] for part in signs)
    clip = torch.cat([pixels, torch.full_like(pixels, 0.5)], 1)
    still, moving = (rubric(OcrReward()).score(frames, prompts, metadata).total for frames in (pixels, clip))
    torch.testing.assert_close(moving, still / 2)


def test_what_else_is_written_is_forgiven_by_the_published_rule_only() -> None:
    painter, rng = SignPainter(), Randomness(0, 0, torch.arange(2))
    both = painter.paint(torch.tensor([words.WORDS.index("BIRD"), words.WORDS.index("BOAT")]), rng)
    twice = both.permute(1, 2, 3, 0, 4).reshape(1, 1, 3, 64, 128)
    lenient, strict = (rubric(OcrReward(strict=it)).score(twice, ['"BIRD"']).total.item() for it in (False, True))
    assert lenient == 1 and strict == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (200, 40)])
def test_nothing_is_read_where_nothing_is_written(shape: tuple[int, int]) -> None:
    pixels = torch.full((2, 1, 3, *shape), 0.5)
    assert rubric(OcrReward()).score(pixels, ['"HOUSE"'] * 2).total.tolist() == [0, 0]


def test_a_prompt_without_a_text_is_refused_by_name() -> None:
    with pytest.raises(RewardError, match="'a red car' asks for no text"):
        rubric(OcrReward()).score(torch.zeros(1, 1, 3, 64, 64), ["a red car"])


def test_without_the_engine_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("rapidocr", "onnxruntime"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=r"which is not installed; run `pip install 'tastemaker\[ocr\]'`"):
                OcrReward().load(Placement())


def test_the_small_one_tells_pictures_apart_that_say_nothing() -> None:
    pixels = Randomness(1, 0, torch.arange(64)).uniform("pixels", 1, 3, 8, 8)
    score = rubric(OcrReward().tiny()).score(pixels, ['"TRAIN"'] * 64).total
    assert 0.05 < score.mean() < 0.6 and score.std() > 0.1


def test_edits_are_a_distance() -> None:
    texts = ["".join(letters) for length in range(5) for letters in product("AB", repeat=length)] + ["ABC", "CAB", "CC"]
    apart = torch.tensor([[edit_distance(one, two) for two in texts] for one in texts])
    lengths = torch.tensor([len(text) for text in texts])
    assert torch.equal(apart, apart.T) and (apart <= torch.maximum(lengths[:, None], lengths)).all()
    assert torch.equal(apart == 0, torch.eye(len(texts), dtype=torch.bool))
    assert (apart[:, None] <= apart[:, :, None] + apart).all()  # from one text to another by way of any third
    assert all(edit_distance(text, text + "A") == 1 == edit_distance("B" + text, text) for text in texts)


def test_likeness_is_flow_grpos() -> None:
    assert text_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert (
        text_similarity("", "river") == 0 == text_similarity("somethingelse", "cat")
        and text_similarity("cat", "cat") == 1
    )
