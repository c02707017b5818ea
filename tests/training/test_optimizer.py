"""Learning rate schedules, weight decay, and AdamW with low-bit weights and states."""

from __future__ import annotations

import zlib

import pytest
import torch
from engine_toys import equal, full_weights, learn, ready, whole
from torch import nn
from torch._dynamo.utils import counters

from tastemaker.config.schema import OptimConfig
from tastemaker.training.optimizer import (
    LowBitAdamW,
    TorchAdamW,
    _compiled,
    adamw_step,
    dequantize_positive,
    dequantize_signed,
    hash_bits,
    learning_rate,
    quantize_positive,
    quantize_signed,
    round_to_bf16,
)


def test_learning_rate_schedules() -> None:
    for schedule, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        optim = OptimConfig(lr=2.0, warmup_steps=4, lr_schedule=schedule)  # type: ignore[arg-type]
        assert [learning_rate(optim, step, 24) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
        assert learning_rate(optim, 4, 24) == pytest.approx(2.0)
        assert learning_rate(optim, 14, 24) == pytest.approx(2.0 * middle)
        assert learning_rate(optim, 24, 24) == pytest.approx(2.0 if schedule == "constant" else 0.0)
        assert learning_rate(optim, 30, 24) >= 0


def test_weight_decay_applies_to_matrices_only() -> None:
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2)), "vector": nn.Parameter(torch.ones(2))}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    TorchAdamW(parameters, OptimConfig(weight_decay=0.1)).update(1.0)
    assert torch.allclose(parameters["matrix"], torch.tensor(0.9))
    assert torch.equal(parameters["vector"], torch.ones(2))


def test_stochastic_rounding_is_unbiased() -> None:
    # bf16 steps by 2**-7 above 1: a quarter of the way must go up a quarter of the time.
    x = torch.full((1 << 16,), 1 + 2**-9)
    rounded = round_to_bf16(x, hash_bits(torch.arange(len(x)) ^ 12345)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    up = (rounded > 1).float().mean().item()
    assert abs(up - 0.25) < 4 * (0.25 * 0.75 / len(x)) ** 0.5
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_to_bf16(exact.float(), hash_bits(torch.arange(1000))), exact)
    for value in (-(1 + 2**-9), 3e-39, -1e30):
        mean = round_to_bf16(torch.full_like(x, value), hash_bits(torch.arange(len(x)))).double().mean().item()
        assert mean == pytest.approx(value, rel=2e-4)


def test_random_bits_are_uniform_and_independent_over_updates() -> None:
    keys = [zlib.crc32(f"0/{step}/blocks.0.up.weight".encode()) for step in range(2000)]
    bits = torch.stack([hash_bits(torch.arange(64) ^ key) & 0xFFFF for key in keys]).float() / 65536
    assert (bits.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 2000) ** 0.5
    centred = bits - 0.5
    neighbours = (centred[1:] * centred[:-1]).mean() * 12
    assert abs(neighbours.item()) < 5 / (64 * 2000) ** 0.5


def test_bf16_adamw_follows_fp32_on_average() -> None:
    # Steps of 1e-3 are below what bf16 can hold at 1 (2**-8 down): rounding to nearest would never move.
    count = 4096
    optim = OptimConfig(weight_decay=0.0)
    rounded, exact = nn.Parameter(torch.ones(count, dtype=torch.bfloat16)), nn.Parameter(torch.ones(count))
    ours, theirs = LowBitAdamW({"p": rounded}, optim, seed=0), TorchAdamW({"p": exact}, optim)
    for _ in range(20):
        rounded.grad, exact.grad = torch.ones_like(rounded), torch.ones_like(exact)
        ours.update(1e-3)
        theirs.update(1e-3)
    assert exact.mean().item() == pytest.approx(0.98, abs=1e-4)
    assert rounded.float().mean().item() == pytest.approx(0.98, abs=4 * 2**-8 / count**0.5)


def test_rounding_does_not_depend_on_shards() -> None:
    x = torch.full((1000,), 1 + 2**-9)
    whole_ = round_to_bf16(x, hash_bits(torch.arange(1000) ^ 5))
    part = round_to_bf16(x[300:], hash_bits(torch.arange(300, 1000) ^ 5))
    assert torch.equal(whole_[300:], part)


def test_bf16_training_is_a_function_of_the_seed() -> None:
    ends = []
    for _ in range(2):
        weights = full_weights()
        engine = ready(weights, precision="bf16", param_dtype="bf16")
        for step in range(3):
            learn(engine, weights, step)
        ends.append(whole(weights.trainable()))
    equal(*ends)
    assert {x.dtype for x in ends[0].values()} == {torch.bfloat16}


def test_hash_bits_match_unsigned_arithmetic() -> None:
    word = 0xFFFFFFFF
    numbers = [0, 1, 77, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, word]
    result = hash_bits(torch.tensor(numbers)).tolist()
    for number, bits in zip(numbers, result, strict=True):
        x = number ^ (number >> 16)
        x = (x * 0x7FEB352D) & word
        x ^= x >> 15
        x = (x * 0x846CA68B) & word
        assert bits & word == x ^ (x >> 16)


def test_int8_quantization_is_unbiased_and_keeps_small_values() -> None:
    # One large number a block, and beside it the same small one many times over.
    bits = hash_bits(torch.arange(256 * 256)).view(256, 256)
    for small in (1e-5, 3e-3, 0.2):
        x = torch.full((256, 256), small)
        x[:, 0] = 7.0
        signed, positive = torch.zeros_like(x, dtype=torch.int8), torch.zeros_like(x, dtype=torch.uint8)
        scale = torch.zeros(256, 1)
        quantize_signed(signed, scale, -x, bits)
        assert -dequantize_signed(signed, scale)[:, 1:].double().mean().item() == pytest.approx(small, rel=0.05)
        assert torch.allclose(dequantize_signed(signed, scale)[:, 0], torch.tensor(-7.0))
        quantize_positive(positive, scale, x, bits)
        assert dequantize_positive(positive, scale)[:, 1:].double().mean().item() == pytest.approx(small, rel=0.05)
        assert (positive > 0).all()
    quantize_positive(positive, scale, torch.zeros_like(x), bits)
    assert not dequantize_positive(positive, scale).any()


@pytest.mark.parametrize(("moments", "apart"), [("bf16", 0.01), ("int8", 0.05)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_bit_states_follow_fp32(moments: str, apart: float, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(0)
    target = torch.randn(64, 256, generator=noise)
    scales = 10.0 ** torch.linspace(-3, 0, 256)  # slopes of very different size side by side
    exact, few = nn.Parameter(torch.zeros(64, 256)), nn.Parameter(torch.zeros(64, 256, dtype=dtype))
    ours = LowBitAdamW({"p": few}, OptimConfig(weight_decay=0.0, state_dtype=moments), seed=0)  # type: ignore[arg-type]
    theirs = TorchAdamW({"p": exact}, OptimConfig(weight_decay=0.0))
    for step in range(100):
        noisy = 0.3 * torch.randn(64, 256, generator=noise)
        for p in (exact, few):
            p.grad = ((p.detach().float() - target + noisy) * scales).to(p.dtype)
        for optimizer in (ours, theirs):
            optimizer.update(2e-2 * (1 - step / 100))
    assert (exact - target).square().mean() < 0.25 * target.square().mean()
    assert (few.float() - exact).square().mean() < apart * exact.square().mean()
    bytes_held = sum(x.numel() * x.itemsize for x in ours.state_dict().values())
    assert bytes_held < {"bf16": 4.1, "int8": 2.1}[moments] * few.numel()


def test_small_tensors_keep_fp32_states() -> None:
    shapes = {"bias": (512,), "narrow": (8, 3), "odd": (4, 251), "filter": (8, 320, 3, 3), "scalar": ()}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = LowBitAdamW(parameters, OptimConfig(state_dtype="int8"), seed=0)
    kinds = {name: kept.exp_avg.dtype for name, kept in optimizer.moments.items()}
    assert kinds == dict.fromkeys(shapes, torch.float32) | {"filter": torch.int8, "odd": torch.int8}
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.update(0.1)
    assert all(torch.allclose(p, torch.tensor(0.9), atol=1e-3) for p in parameters.values())


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_chunked_update_equals_the_whole_update(moments: str) -> None:
    ends = []
    for chunk in (1 << 24, 512):
        p = nn.Parameter(torch.linspace(-1, 1, 2048).view(8, 256).bfloat16())
        optimizer = LowBitAdamW({"p": p}, OptimConfig(state_dtype=moments), seed=0)  # type: ignore[arg-type]
        optimizer.chunk = chunk
        for _ in range(3):
            p.grad = torch.sin(p.detach().float() * 9).bfloat16()
            optimizer.update(1e-3)
        ends.append({"p": p.detach().clone()} | optimizer.state_dict())
    equal(*ends)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_compiled_update_is_identical_with_one_graph_for_all_sizes() -> None:
    for moments in ("fp32", "bf16", "int8"):
        torch._dynamo.reset()
        counters.clear()
        ends = []
        for step, chunk in ((adamw_step, 1 << 24), (_compiled(), None)):
            shapes = {"a": (80, 256), "b": (7, 512), "c": (33, 256), "d": (9, 64), "e": (12, 64), "f": (1, 256)}
            parameters = {name: nn.Parameter(torch.ones(shape).bfloat16()) for name, shape in shapes.items()}
            optimizer = LowBitAdamW(parameters, OptimConfig(state_dtype=moments), seed=0)  # type: ignore[arg-type]
            optimizer.step_fn, optimizer.chunk = step, chunk
            for _ in range(3):
                for p in parameters.values():
                    p.grad = torch.sin(torch.arange(float(p.numel()))).view(p.shape).bfloat16()
                optimizer.update(1e-3)
            ends.append(torch.cat([p.detach().float().flatten() for p in parameters.values()]))
        # A compiler may join a product and a sum, which moves the last bit of fp32, and that rarely a bit of bf16.
        assert (ends[0] != ends[1]).float().mean() < 1e-3
        assert torch.allclose(ends[0], ends[1], rtol=2**-7)
        assert counters["stats"]["unique_graphs"] <= (3 if moments == "int8" else 1)
