"""The schedule, weight decay, and AdamW on bf16 weights."""

from __future__ import annotations

import zlib

import pytest
import torch
from engine_toys import equal, full_weights, learn, ready, whole
from torch import nn

from tastemaker.config.run import Optim
from tastemaker.train.optimizer import Plain, Rounding, rate, round_to_bf16, scramble


def test_the_rate_rises_over_the_warm_up_and_ends_at_zero() -> None:
    for schedule, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        optim = Optim(lr=2.0, warmup=4, schedule=schedule)  # type: ignore[arg-type]
        assert [rate(optim, step, 24) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
        assert rate(optim, 4, 24) == pytest.approx(2.0)
        assert rate(optim, 14, 24) == pytest.approx(2.0 * middle)
        assert rate(optim, 24, 24) == pytest.approx(2.0 if schedule == "constant" else 0.0)
        assert rate(optim, 30, 24) >= 0


def test_only_matrices_decay() -> None:
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2)), "vector": nn.Parameter(torch.ones(2))}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    Plain(parameters, Optim(weight_decay=0.1)).update(1.0)
    assert torch.allclose(parameters["matrix"], torch.tensor(0.9))
    assert torch.equal(parameters["vector"], torch.ones(2))


def test_rounding_is_unbiased_and_leaves_bf16_numbers_alone() -> None:
    # bf16 steps by 2**-7 above 1: a quarter of the way must go up a quarter of the time.
    x = torch.full((1 << 16,), 1 + 2**-9)
    rounded = round_to_bf16(x, scramble(torch.arange(len(x)) ^ 12345)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    up = (rounded > 1).float().mean().item()
    assert abs(up - 0.25) < 4 * (0.25 * 0.75 / len(x)) ** 0.5
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_to_bf16(exact.float(), scramble(torch.arange(1000))), exact)
    for value in (-(1 + 2**-9), 3e-39, -1e30):
        mean = round_to_bf16(torch.full_like(x, value), scramble(torch.arange(len(x)))).double().mean().item()
        assert mean == pytest.approx(value, rel=2e-4)


def test_bits_of_one_element_are_even_and_unrelated_over_updates() -> None:
    keys = [zlib.crc32(f"0/{step}/blocks.0.up.weight".encode()) for step in range(2000)]
    bits = torch.stack([scramble(torch.arange(64) ^ key) & 0xFFFF for key in keys]).float() / 65536
    assert (bits.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 2000) ** 0.5
    centred = bits - 0.5
    neighbours = (centred[1:] * centred[:-1]).mean() * 12
    assert abs(neighbours.item()) < 5 / (64 * 2000) ** 0.5


def test_rounding_follows_adam_in_fp32_on_average() -> None:
    # Steps of 1e-3 are below what bf16 can hold at 1 (2**-8 down): rounding to nearest would never move.
    count = 4096
    optim = Optim(weight_decay=0.0)
    rounded, exact = nn.Parameter(torch.ones(count, dtype=torch.bfloat16)), nn.Parameter(torch.ones(count))
    ours, theirs = Rounding({"p": rounded}, optim, seed=0), Plain({"p": exact}, optim)
    for _ in range(20):
        rounded.grad, exact.grad = torch.ones_like(rounded), torch.ones_like(exact)
        ours.update(1e-3)
        theirs.update(1e-3)
    assert exact.mean().item() == pytest.approx(0.98, abs=1e-4)
    assert rounded.float().mean().item() == pytest.approx(0.98, abs=4 * 2**-8 / count**0.5)


def test_shards_round_like_the_whole() -> None:
    x = torch.full((1000,), 1 + 2**-9)
    whole_ = round_to_bf16(x, scramble(torch.arange(1000) ^ 5))
    part = round_to_bf16(x[300:], scramble(torch.arange(300, 1000) ^ 5))
    assert torch.equal(whole_[300:], part)


def test_bf16_training_is_a_function_of_the_seed() -> None:
    ends = []
    for _ in range(2):
        weights = full_weights()
        engine = ready(weights, precision="bf16", trainable="bf16")
        for step in range(3):
            learn(engine, weights, step)
        ends.append(whole(weights.trainable()))
    equal(*ends)
    assert {x.dtype for x in ends[0].values()} == {torch.bfloat16}
