"""The likelihood of a word in a picture: as the engine's own network has it, and with gradients that raise it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.playground import signs as words
from tastemaker.playground.signs import SignPainter
from tastemaker.rewards.backbones.ppocr import load_ppocr_recognizer, read_onnx
from tastemaker.rewards.ocr import OcrEngine, recognizer_file
from tastemaker.rewards.ocr_gradient import (
    OcrGradientReward,
    crop_quad,
    load_text_recognizer,
    make_text_recognizer,
    prepare_line,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def signs() -> tuple[Tensor, list[str]]:
    rng = Randomness(4, 0, torch.arange(5))
    places = words.sample_words(rng, "held_out")
    return SignPainter().paint(places, rng), [fact["text"] for fact in words.sign_metadata(places)]


def asking(texts: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    return ["a sign"] * len(texts), [{"text": text} for text in texts]


def test_network_agrees_with_onnxruntime() -> None:
    import onnxruntime

    engine = onnxruntime.InferenceSession(str(recognizer_file()))
    recognizer = load_text_recognizer(recognizer_file(), CPU)
    for width in (48, 131, 320):
        lines = torch.rand(2, 3, 48, width, generator=torch.Generator().manual_seed(0)) * 2 - 1
        (expected,) = engine.run(None, {"x": lines.numpy()})
        assert np.abs(expected - recognizer.net(lines).softmax(-1).numpy()).max() < 3e-5, width
    characters = read_onnx(recognizer_file()).metadata["character"].split("\n")
    assert recognizer.characters["a"] == tuple(1 + characters.index(letter) for letter in "Aa")


def test_the_right_word_is_far_likelier_than_others(signs: tuple[Tensor, list[str]]) -> None:
    pixels, texts = signs
    scorer = OcrGradientReward().load(Placement())
    with torch.no_grad():
        right = scorer.score(pixels, *asking(texts))
        wrong = scorer.score(pixels, *asking(texts[1:] + texts[:1]))
        alone = scorer.score(pixels[2:3], *asking(texts[2:3]))
        upper = scorer.score(pixels[:2], *asking([text.swapcase() for text in texts[:2]]))
    assert (right > -0.5).float().mean() > 0.8 and (wrong < -2).all(), (right, wrong)
    torch.testing.assert_close(alone, right[2:3], atol=1e-4, rtol=0)
    torch.testing.assert_close(upper, right[:2])


def test_a_step_up_the_gradient_makes_a_word_likelier(signs: tuple[Tensor, list[str]]) -> None:
    pixels, texts = signs[0][:2].clone(), signs[1][1:3]
    scorer = OcrGradientReward().load(Placement())
    pixels.requires_grad_()
    before = scorer.score(pixels, *asking(texts))
    (slope,) = torch.autograd.grad(before.sum(), pixels)
    assert slope.isfinite().all() and all(row.any() for row in slope)
    with torch.no_grad():
        after = scorer.score(pixels + 0.01 * slope.sign(), *asking(texts))
    assert (after > before).all()


def test_slopes_are_those_of_finite_differences(signs: tuple[Tensor, list[str]]) -> None:
    """In double precision and with some noise, for plain pixels lie at the kinks of rectifiers; as one line, for then
    nothing has to be found again."""
    chance = torch.Generator().manual_seed(0)
    pixels, text = signs[0][:1].double(), signs[1][0].lower()
    pixels = pixels + 0.05 * torch.randn(pixels.shape, generator=chance, dtype=torch.float64)
    known = load_text_recognizer(recognizer_file(), CPU)
    net: torch.nn.Module = known.net  # type: ignore[assignment]
    net.double()

    def value(x: Tensor) -> Tensor:
        return known.log_likelihood(known.log_probs([prepare_line(x[0, 0], text)])[0], text)

    pixels.requires_grad_()
    (slope,) = torch.autograd.grad(value(pixels), pixels)
    way = torch.randn(pixels.shape, generator=chance, dtype=torch.float64)
    with torch.no_grad():
        measured = (value(pixels + 1e-7 * way) - value(pixels - 1e-7 * way)) / 2e-7
    torch.testing.assert_close((slope * way).sum(), measured, rtol=1e-3, atol=1e-6)


def test_likelihoods_of_all_words_add_up() -> None:
    """With letters a and b and three places, every outcome is one of the words; in other cases and with spaces too."""
    known = make_text_recognizer(lambda x: x, ["a", "b", "A"])
    said = torch.randn(3, 5, dtype=torch.float64).log_softmax(-1)
    texts = ["a", "b", "ab", "ba", "aa", "bb", "aba", "bab", "abb", "baa", "aab", "bba", "aaa", "bbb"]
    total = sum(float((known.log_likelihood(said, text) * len(text)).exp()) for text in texts)
    empty = float(said[:, [0, 4]].logsumexp(1).sum().exp())
    assert abs(total + empty - 1) < 1e-5


def test_lines_are_found_and_cut_out_of_small_pictures_too(signs: tuple[Tensor, list[str]]) -> None:
    picture = signs[0][0, 0]
    (corners, *_) = OcrEngine().detect_lines(picture, 160)
    part = crop_quad(picture, corners)
    assert corners.min() >= -1 and corners.max() <= 65 and part.shape[1] < part.shape[2]
    square = torch.tensor([[8.0, 4.0], [24.0, 4.0], [24.0, 12.0], [8.0, 12.0]])
    torch.testing.assert_close(crop_quad(picture, square), picture[:, 4:12, 8:24])


def test_a_guessing_one_has_slopes_and_needs_no_engine() -> None:
    pixels = torch.rand(3, 1, 3, 8, 8, requires_grad=True)
    scores = OcrGradientReward().tiny().load(Placement()).score(pixels, *asking(["one", "balloon", "O K"]))
    scores.sum().backward()
    assert scores.shape == (3,) and scores.isfinite().all() and pixels.grad is not None and pixels.grad.any()


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    scorer = OcrGradientReward().tiny().load(Placement())
    with pytest.raises(ValueError, match="has the character '\N{EURO SIGN}'"):
        scorer.score(torch.rand(1, 1, 3, 8, 8), *asking(["5\N{EURO SIGN}"]))
    (tmp_path / "x.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="cannot be read as an ONNX file"):
        read_onnx(tmp_path / "x.onnx")
    (tmp_path / "y.onnx").write_bytes(recognizer_file().read_bytes().replace(b"conv2d_68.w_0", b"conv2d_00.w_0", 1))
    with pytest.raises(ConfigError, match="another network than PP-OCRv6"):
        load_ppocr_recognizer(tmp_path / "y.onnx")
