"""The likelihood of a text in an image: agreement with onnxruntime, and gradients that increase it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.playground import signs as sign_module
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
    word_ids = sign_module.sample_words(rng, "held_out")
    return SignPainter().paint(word_ids, rng), [entry["text"] for entry in sign_module.sign_metadata(word_ids)]


def prompts_and_metadata(texts: list[str]) -> tuple[list[str], list[dict[str, str]]]:
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


def test_correct_text_is_far_likelier_than_others(signs: tuple[Tensor, list[str]]) -> None:
    pixels, texts = signs
    scorer = OcrGradientReward().load(Placement())
    with torch.no_grad():
        right = scorer.score(pixels, *prompts_and_metadata(texts))
        wrong = scorer.score(pixels, *prompts_and_metadata(texts[1:] + texts[:1]))
        single = scorer.score(pixels[2:3], *prompts_and_metadata(texts[2:3]))
        swapped_case = scorer.score(pixels[:2], *prompts_and_metadata([text.swapcase() for text in texts[:2]]))
    assert (right > -0.5).float().mean() > 0.8 and (wrong < -2).all(), (right, wrong)
    torch.testing.assert_close(single, right[2:3], atol=1e-4, rtol=0)
    torch.testing.assert_close(swapped_case, right[:2])


def test_gradient_step_increases_the_likelihood(signs: tuple[Tensor, list[str]]) -> None:
    pixels, texts = signs[0][:2].clone(), signs[1][1:3]
    scorer = OcrGradientReward().load(Placement())
    pixels.requires_grad_()
    before = scorer.score(pixels, *prompts_and_metadata(texts))
    (gradient,) = torch.autograd.grad(before.sum(), pixels)
    assert gradient.isfinite().all() and all(row.any() for row in gradient)
    with torch.no_grad():
        after = scorer.score(pixels + 0.01 * gradient.sign(), *prompts_and_metadata(texts))
    assert (after > before).all()


def test_gradients_agree_with_finite_differences(signs: tuple[Tensor, list[str]]) -> None:
    """Uses float64 and noise, because flat pixels lie at kinks of the ReLUs, and one line, so no detection runs."""
    generator = torch.Generator().manual_seed(0)
    pixels, text = signs[0][:1].double(), signs[1][0].lower()
    pixels = pixels + 0.05 * torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
    recognizer = load_text_recognizer(recognizer_file(), CPU)
    net: torch.nn.Module = recognizer.net  # type: ignore[assignment]
    net.double()

    def value(x: Tensor) -> Tensor:
        return recognizer.log_likelihood(recognizer.log_probs([prepare_line(x[0, 0], text)])[0], text)

    pixels.requires_grad_()
    (gradient,) = torch.autograd.grad(value(pixels), pixels)
    direction = torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        measured = (value(pixels + 1e-7 * direction) - value(pixels - 1e-7 * direction)) / 2e-7
    torch.testing.assert_close((gradient * direction).sum(), measured, rtol=1e-3, atol=1e-6)


def test_likelihoods_of_all_texts_sum_to_one() -> None:
    """With letters a and b and three time steps, every outcome is one of the texts, ignoring case and spaces."""
    recognizer = make_text_recognizer(lambda x: x, ["a", "b", "A"])
    log_probs = torch.randn(3, 5, dtype=torch.float64).log_softmax(-1)
    texts = ["a", "b", "ab", "ba", "aa", "bb", "aba", "bab", "abb", "baa", "aab", "bba", "aaa", "bbb"]
    total = sum(float((recognizer.log_likelihood(log_probs, text) * len(text)).exp()) for text in texts)
    empty = float(log_probs[:, [0, 4]].logsumexp(1).sum().exp())
    assert abs(total + empty - 1) < 1e-5


def test_lines_are_detected_and_cropped_in_small_images(signs: tuple[Tensor, list[str]]) -> None:
    image = signs[0][0, 0]
    (corners, *_) = OcrEngine().detect_lines(image, 160)
    crop = crop_quad(image, corners)
    assert corners.min() >= -1 and corners.max() <= 65 and crop.shape[1] < crop.shape[2]
    square = torch.tensor([[8.0, 4.0], [24.0, 4.0], [24.0, 12.0], [8.0, 12.0]])
    torch.testing.assert_close(crop_quad(image, square), image[:, 4:12, 8:24])


def test_tiny_reward_has_gradients_and_needs_no_engine() -> None:
    pixels = torch.rand(3, 1, 3, 8, 8, requires_grad=True)
    scores = (
        OcrGradientReward().tiny().load(Placement()).score(pixels, *prompts_and_metadata(["one", "balloon", "O K"]))
    )
    scores.sum().backward()
    assert scores.shape == (3,) and scores.isfinite().all() and pixels.grad is not None and pixels.grad.any()


def test_invalid_text_and_files_are_refused(tmp_path: Path) -> None:
    scorer = OcrGradientReward().tiny().load(Placement())
    with pytest.raises(ValueError, match=r"'€'.*TM401"):
        scorer.score(torch.rand(1, 1, 3, 8, 8), *prompts_and_metadata(["5\N{EURO SIGN}"]))
    (tmp_path / "x.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match=r"x\.onnx.*ONNX.*TM370"):
        read_onnx(tmp_path / "x.onnx")
    (tmp_path / "y.onnx").write_bytes(recognizer_file().read_bytes().replace(b"conv2d_68.w_0", b"conv2d_00.w_0", 1))
    with pytest.raises(ConfigError, match="PP-OCRv6"):
        load_ppocr_recognizer(tmp_path / "y.onnx")
