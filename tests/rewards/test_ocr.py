"""The OCR reward on rendered signs with the real OCR engine."""

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
from tastemaker.playground import signs as sign_module
from tastemaker.playground.signs import FONTS, SignPainter
from tastemaker.rewards.ocr import OcrEngine, OcrReward, edit_distance, expected_text, text_similarity


@pytest.fixture(scope="module")
def signs() -> tuple[Tensor, list[str], tuple[Metadata, ...]]:
    rng = Randomness(4, 0, torch.arange(20))
    word_ids = sign_module.sample_words(rng, "held_out")
    return (
        SignPainter().paint(word_ids, rng),
        list(sign_module.sign_captions(word_ids)),
        sign_module.sign_metadata(word_ids),
    )


def rubric(spec: OcrReward) -> Rubric:
    return Rubric({"ocr": WeightedReward(spec, spec.load(Placement()))})


def test_strict_ocr_reads_matching_signs_and_rejects_others(
    signs: tuple[Tensor, list[str], tuple[Metadata, ...]],
) -> None:
    pixels, prompts, metadata = signs
    right = rubric(OcrReward(strict=True)).score(pixels, prompts, metadata).total
    assert (right == 1).float().mean() >= 0.95 and right.mean() >= 0.98
    wrong = rubric(OcrReward(strict=True)).score(pixels[:5], prompts[1:6], metadata[1:6]).total
    assert wrong.mean() < 0.3 and wrong.min() >= 0


@pytest.mark.slow
def test_signs_are_read_in_every_font() -> None:
    word_ids = sign_module.sample_words(Randomness(5, 0, torch.arange(6)), "train").repeat_interleave(20)
    painter, rng = SignPainter(), Randomness(5, 0, torch.arange(120))
    fonts = painter.arrange(word_ids, rng).ink % len(FONTS)
    texts = OcrEngine().read(painter.paint(word_ids, rng)[:, 0], 160)
    correct = torch.tensor(
        [text == entry["text"].lower() for text, entry in zip(texts, sign_module.sign_metadata(word_ids), strict=True)]
    )
    assert all(correct[fonts == font].float().mean() >= 0.9 for font in range(len(FONTS)))


def test_quoted_text_of_the_prompt_replaces_metadata(
    signs: tuple[Tensor, list[str], tuple[Metadata, ...]],
) -> None:
    pixels, prompts, metadata = (part[:3] for part in signs)
    from_metadata, from_prompt = (rubric(OcrReward()).score(pixels, prompts, some).total for some in (metadata, ()))
    assert torch.equal(from_metadata, from_prompt)
    assert (
        expected_text('A neon "Open  Late" sign', {}) == "openlate"
        and expected_text("a sign", {"text": "No Way"}) == "noway"
    )


def test_clip_score_is_the_mean_over_frames(signs: tuple[Tensor, list[str], tuple[Metadata, ...]]) -> None:
    pixels, prompts, metadata = (part[:2] for part in signs)
    clip = torch.cat([pixels, torch.full_like(pixels, 0.5)], 1)
    still, moving = (rubric(OcrReward()).score(frames, prompts, metadata).total for frames in (pixels, clip))
    torch.testing.assert_close(moving, still / 2)


def test_extra_text_is_accepted_unless_strict() -> None:
    painter, rng = SignPainter(), Randomness(0, 0, torch.arange(2))
    both = painter.paint(torch.tensor([sign_module.WORDS.index("BIRD"), sign_module.WORDS.index("BOAT")]), rng)
    twice = both.permute(1, 2, 3, 0, 4).reshape(1, 1, 3, 64, 128)
    lenient, strict = (
        rubric(OcrReward(strict=strict)).score(twice, ['"BIRD"']).total.item() for strict in (False, True)
    )
    assert lenient == 1 and strict == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (200, 40)])
def test_blank_images_score_zero(shape: tuple[int, int]) -> None:
    pixels = torch.full((2, 1, 3, *shape), 0.5)
    assert rubric(OcrReward()).score(pixels, ['"HOUSE"'] * 2).total.tolist() == [0, 0]


def test_prompt_with_no_requested_text_is_refused() -> None:
    with pytest.raises(RewardError, match=r"'a red car'.*TM399"):
        rubric(OcrReward()).score(torch.zeros(1, 1, 3, 64, 64), ["a red car"])


def test_missing_ocr_engine_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("rapidocr", "onnxruntime"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=r"`pip install 'tastemaker\[ocr\]'`.*TM400"):
                OcrReward().load(Placement())


def test_tiny_ocr_reward_varies_over_random_images() -> None:
    pixels = Randomness(1, 0, torch.arange(64)).uniform("pixels", 1, 3, 8, 8)
    score = rubric(OcrReward().tiny()).score(pixels, ['"TRAIN"'] * 64).total
    assert 0.05 < score.mean() < 0.6 and score.std() > 0.1


def test_edit_distance_is_a_metric() -> None:
    texts = ["".join(letters) for length in range(5) for letters in product("AB", repeat=length)] + ["ABC", "CAB", "CC"]
    distances = torch.tensor([[edit_distance(one, two) for two in texts] for one in texts])
    lengths = torch.tensor([len(text) for text in texts])
    assert torch.equal(distances, distances.T) and (distances <= torch.maximum(lengths[:, None], lengths)).all()
    assert torch.equal(distances == 0, torch.eye(len(texts), dtype=torch.bool))
    assert (
        distances[:, None] <= distances[:, :, None] + distances
    ).all()  # from one text to another by way of any third
    assert all(edit_distance(text, text + "A") == 1 == edit_distance("B" + text, text) for text in texts)


def test_text_similarity_matches_flow_grpo() -> None:
    assert text_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert (
        text_similarity("", "river") == 0 == text_similarity("somethingelse", "cat")
        and text_similarity("cat", "cat") == 1
    )
