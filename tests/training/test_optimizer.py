"""Learning rate schedules, weight decay, and AdamW with low-bit weights and states."""

from __future__ import annotations

import zlib

import pytest
import torch
from engine_toys import assert_equal, build_engine, full_tensors, full_weights, train_step
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
    # The spacing of bf16 above 1 is 2**-7: a value at a quarter of it must round up with probability 1/4.
    x = torch.full((1 << 16,), 1 + 2**-9)
    rounded = round_to_bf16(x, hash_bits(torch.arange(len(x)) ^ 12345)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    share_rounded_up = (rounded > 1).float().mean().item()
    assert abs(share_rounded_up - 0.25) < 4 * (0.25 * 0.75 / len(x)) ** 0.5
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_to_bf16(exact.float(), hash_bits(torch.arange(1000))), exact)
    for value in (-(1 + 2**-9), 3e-39, -1e30):
        mean = round_to_bf16(torch.full_like(x, value), hash_bits(torch.arange(len(x)))).double().mean().item()
        assert mean == pytest.approx(value, rel=2e-4)


def test_random_bits_are_uniform_and_independent_over_updates() -> None:
    keys = [zlib.crc32(f"0/{step}/blocks.0.up.weight".encode()) for step in range(2000)]
    bits = torch.stack([hash_bits(torch.arange(64) ^ key) & 0xFFFF for key in keys]).float() / 65536
    assert (bits.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 2000) ** 0.5
    centered = bits - 0.5
    correlation = (centered[1:] * centered[:-1]).mean() * 12
    assert abs(correlation.item()) < 5 / (64 * 2000) ** 0.5


def test_bf16_adamw_follows_fp32_on_average() -> None:
    # Updates of 1e-3 are below the spacing of bf16 at 1 (2**-8 downwards): rounding to nearest would change nothing.
    count = 4096
    optim = OptimConfig(weight_decay=0.0)
    rounded, exact = nn.Parameter(torch.ones(count, dtype=torch.bfloat16)), nn.Parameter(torch.ones(count))
    low_bit, torch_adamw = LowBitAdamW({"p": rounded}, optim, seed=0), TorchAdamW({"p": exact}, optim)
    for _ in range(20):
        rounded.grad, exact.grad = torch.ones_like(rounded), torch.ones_like(exact)
        low_bit.update(1e-3)
        torch_adamw.update(1e-3)
    assert exact.mean().item() == pytest.approx(0.98, abs=1e-4)
    assert rounded.float().mean().item() == pytest.approx(0.98, abs=4 * 2**-8 / count**0.5)


def test_rounding_does_not_depend_on_shards() -> None:
    x = torch.full((1000,), 1 + 2**-9)
    full = round_to_bf16(x, hash_bits(torch.arange(1000) ^ 5))
    shard = round_to_bf16(x[300:], hash_bits(torch.arange(300, 1000) ^ 5))
    assert torch.equal(full[300:], shard)


def test_bf16_training_is_a_function_of_the_seed() -> None:
    weights_after = []
    for _ in range(2):
        weights = full_weights()
        engine = build_engine(weights, precision="bf16", param_dtype="bf16")
        for step in range(3):
            train_step(engine, weights, step)
        weights_after.append(full_tensors(weights.trainable()))
    assert_equal(*weights_after)
    assert {x.dtype for x in weights_after[0].values()} == {torch.bfloat16}


def test_hash_bits_match_unsigned_arithmetic() -> None:
    mask = 0xFFFFFFFF
    numbers = [0, 1, 77, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, mask]
    hashes = hash_bits(torch.tensor(numbers)).tolist()
    for number, bits in zip(numbers, hashes, strict=True):
        x = number ^ (number >> 16)
        x = (x * 0x7FEB352D) & mask
        x ^= x >> 15
        x = (x * 0x846CA68B) & mask
        assert bits & mask == x ^ (x >> 16)


def test_int8_quantization_is_unbiased_and_keeps_small_values() -> None:
    # Each block has one large value and many equal small values.
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


@pytest.mark.parametrize(("state_dtype", "tolerance"), [("bf16", 0.01), ("int8", 0.05)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_bit_states_follow_fp32(state_dtype: str, tolerance: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 256, generator=generator)
    scales = 10.0 ** torch.linspace(-3, 0, 256)  # neighboring gradients of very different size
    exact, low_bit = nn.Parameter(torch.zeros(64, 256)), nn.Parameter(torch.zeros(64, 256, dtype=dtype))
    low_bit_adamw = LowBitAdamW({"p": low_bit}, OptimConfig(weight_decay=0.0, state_dtype=state_dtype), seed=0)  # type: ignore[arg-type]
    torch_adamw = TorchAdamW({"p": exact}, OptimConfig(weight_decay=0.0))
    for step in range(100):
        noisy = 0.3 * torch.randn(64, 256, generator=generator)
        for p in (exact, low_bit):
            p.grad = ((p.detach().float() - target + noisy) * scales).to(p.dtype)
        for optimizer in (low_bit_adamw, torch_adamw):
            optimizer.update(2e-2 * (1 - step / 100))
    assert (exact - target).square().mean() < 0.25 * target.square().mean()
    assert (low_bit.float() - exact).square().mean() < tolerance * exact.square().mean()
    num_bytes = sum(x.numel() * x.itemsize for x in low_bit_adamw.state_dict().values())
    assert num_bytes < {"bf16": 4.1, "int8": 2.1}[state_dtype] * low_bit.numel()


def test_small_tensors_keep_fp32_states() -> None:
    shapes = {"bias": (512,), "narrow": (8, 3), "odd": (4, 251), "filter": (8, 320, 3, 3), "scalar": ()}
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = LowBitAdamW(parameters, OptimConfig(state_dtype="int8"), seed=0)
    dtypes = {name: state.exp_avg.dtype for name, state in optimizer.moments.items()}
    assert dtypes == dict.fromkeys(shapes, torch.float32) | {"filter": torch.int8, "odd": torch.int8}
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.update(0.1)
    assert all(torch.allclose(p, torch.tensor(0.9), atol=1e-3) for p in parameters.values())


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_chunked_update_equals_the_full_update(state_dtype: str) -> None:
    results = []
    for chunk in (1 << 24, 512):
        p = nn.Parameter(torch.linspace(-1, 1, 2048).view(8, 256).bfloat16())
        optimizer = LowBitAdamW({"p": p}, OptimConfig(state_dtype=state_dtype), seed=0)  # type: ignore[arg-type]
        optimizer.chunk = chunk
        for _ in range(3):
            p.grad = torch.sin(p.detach().float() * 9).bfloat16()
            optimizer.update(1e-3)
        results.append({"p": p.detach().clone()} | optimizer.state_dict())
    assert_equal(*results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch itself
def test_compiled_update_is_identical_with_one_graph_for_all_sizes() -> None:
    for state_dtype in ("fp32", "bf16", "int8"):
        torch._dynamo.reset()
        counters.clear()
        results = []
        for step, chunk in ((adamw_step, 1 << 24), (_compiled(), None)):
            shapes = {"a": (80, 256), "b": (7, 512), "c": (33, 256), "d": (9, 64), "e": (12, 64), "f": (1, 256)}
            parameters = {name: nn.Parameter(torch.ones(shape).bfloat16()) for name, shape in shapes.items()}
            optimizer = LowBitAdamW(parameters, OptimConfig(state_dtype=state_dtype), seed=0)  # type: ignore[arg-type]
            optimizer.step_fn, optimizer.chunk = step, chunk
            for _ in range(3):
                for p in parameters.values():
                    p.grad = torch.sin(torch.arange(float(p.numel()))).view(p.shape).bfloat16()
                optimizer.update(1e-3)
            results.append(torch.cat([p.detach().float().flatten() for p in parameters.values()]))
        # A compiler may fuse a product and a sum, which changes the last bit of fp32 and rarely a bit of bf16.
        assert (results[0] != results[1]).float().mean() < 1e-3
        assert torch.allclose(results[0], results[1], rtol=2**-7)
        assert counters["stats"]["unique_graphs"] <= (3 if state_dtype == "int8" else 1)
