"""Philox random numbers: published vectors, moments, and independence of batches and ranks."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec

import pytest
import torch

from tastemaker.core.randomness import WORD_MASK, Randomness, philox, philox_words_torch
from tastemaker.core.types import select_rows

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[str]:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    return [f"{int(word):08x}" for word in philox((a, b, c, d), key)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # test vectors published with Random123
        ((0, 0, 0, 0), (0, 0), ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
        ((WORD_MASK,) * 4, (WORD_MASK, WORD_MASK), ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
        (PI, (0xA4093822, 0x299F31D0), ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]),
    ],
)
def test_philox_matches_published_vectors(counter, key, expected) -> None:
    assert words(counter, key) == expected


def test_uniform_moments() -> None:
    draws = Randomness(1, 2, torch.arange(64)).uniform("test", 4096).double().flatten()
    error = 1 / math.sqrt(len(draws))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 1 / 2) < 4 * error * math.sqrt(1 / 12)
    assert abs((draws**2).mean() - 1 / 3) < 4 * error * math.sqrt(4 / 45)
    assert draws.histc(16, 0, 1).sub(len(draws) / 16).abs().max() < 5 * math.sqrt(len(draws) / 16)


def test_normal_moments() -> None:
    draws = Randomness(1, 2, torch.arange(64)).normal("test", 4095).double().flatten()
    error = 1 / math.sqrt(len(draws))
    assert torch.isfinite(draws).all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # variance: E x^2n - (E x^n)^2
        assert abs((draws**power).mean() - moment) < 4 * error * math.sqrt(variance)


def test_streams_are_uncorrelated() -> None:
    def draws(seed: int = 1, step: int = 2, first: int = 0, purpose: str = "test", draw: int = 0) -> torch.Tensor:
        return Randomness(seed, step, torch.arange(first, first + 16)).normal(purpose, 4096, draw=draw).flatten()

    one = draws()
    others = [draws(seed=2), draws(step=3), draws(first=16), draws(purpose="tests"), draws(draw=1), one.roll(1)]
    for other in others:
        assert abs((one * other).mean()) < 4 / math.sqrt(len(one))


def test_random_numbers_are_independent_of_the_batch() -> None:
    rng = Randomness(5, 6, torch.arange(8))
    rows = torch.tensor([6, 1, 1])
    assert torch.equal(select_rows(rng, rows).normal("noise", 3, 4), rng.normal("noise", 3, 4)[rows])
    assert torch.equal(select_rows(rng, rows).uniform("mask", 5, draw=9), rng.uniform("mask", 5, draw=9)[rows])


def test_words_are_a_prefix_of_longer_draws() -> None:
    rng = Randomness(5, 6, torch.arange(8))
    assert torch.equal(rng.words("noise", 9)[:, :5], rng.words("noise", 5))
    assert torch.equal(rng.uniform("noise", 9)[:, :5], rng.uniform("noise", 5))


def test_repeated_rows_have_their_own_numbers() -> None:
    repeated = Randomness(5, 6, torch.arange(6)).repeat(3)
    assert repeated.rows.tolist() == list(range(18))
    assert Randomness(5, 6, torch.tensor([4, 5])).repeat(3).rows.tolist() == repeated.rows[12:].tolist()


def test_shared_numbers_are_equal_on_all_rows_and_ranks() -> None:
    first, second = (Randomness(5, 6, torch.arange(4) + 4 * rank) for rank in (0, 1))
    noise = first.same_for_all_rows().normal("start", 7)
    assert torch.equal(noise, noise[:1].expand_as(noise))
    assert torch.equal(noise, second.same_for_all_rows().normal("start", 7))
    assert first.shared_uniform("window") == second.shared_uniform("window") != first.shared_uniform("window", 1)


def test_64_bit_seeds() -> None:
    low, high = (Randomness(seed, 0, torch.arange(1)).words("test", 4) for seed in (7, 7 + (3 << 32)))
    assert not torch.equal(low, high)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch for GPUs")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="TRITON_INTERPRET=1 runs it"
)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (2**31 - 2, 7), (2**32 + 5, 515)])
def test_triton_kernel_matches_torch(first: int, count: int) -> None:
    from tastemaker.core.philox_triton import philox_words_triton

    rows = torch.arange(first, first + 5, device="cuda" if torch.cuda.is_available() else "cpu")
    for purpose, draw, key in ((0, 0, (0, 0)), (WORD_MASK, 2**31, (PI[1], PI[2])), (1, 16, (2**31, WORD_MASK))):
        assert philox_words_triton(rows, count, purpose, draw, key).equal(
            philox_words_torch(rows, count, purpose, draw, key)
        )
