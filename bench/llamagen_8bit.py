"""Speed of LlamaGen's sampling with 8-bit weights beside that with bf16 ones, and how much the logits differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from device import CUDA, median_seconds, reset_memory, seconds_in_graph  # beside this file, in no package
from llamagen_networks import LlamagenOptions, build_gpt, bytes_per_batch, decode_all, gpt_config, make_request
from sections import Record, log, log_errors
from torch import Tensor

from tastemaker.core.policy import Guidance
from tastemaker.core.quantization import Kind, quantize_rows
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.models.nets.cuda_graph_decoder import (
    CudaGraphDecoder,
    DecodeKernels,
    DecoderPool,
    TorchKernels,
    fastest_kernels,
)
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest

KINDS: dict[str, Kind] = {"fp8": "fp8", "int8": "int8"}
COMPARED_TOKENS = 32  # for which logits are compared, at most
LINEAR_TILINGS = [(16, 128, 4), (16, 256, 4), (16, 512, 3), (32, 128, 4), (32, 256, 3), (64, 128, 3)]
GATED_TILINGS = [(16, 128, 4), (16, 256, 4), (32, 128, 4), (32, 256, 3)]  # columns, depth, stages


def make_decoder(net: GPT, pool: DecoderPool, request: DecodeRequest, kind: Kind | None) -> CudaGraphDecoder:
    """A decoder of 8-bit weights, or of the network's own ones."""
    net.rollout_kind = kind
    with ROLLOUTS.calls():
        decoder = pool.make_decoder(net, request)
    assert isinstance(decoder, CudaGraphDecoder) and decoder.low_precision == (kind is not None)
    return decoder


def make_pool(kernels: DecodeKernels | None = None) -> DecoderPool:
    """A pool of graph decoders, on a CPU too."""
    return DecoderPool(kernels or (None if CUDA else TorchKernels()))


def measure_8bit_sampling(section: str, options: LlamagenOptions, record: Record) -> None:
    """Time a guided batch of images with 8-bit and with bf16 weights in turns, and compare their logits."""
    size, *count, name = section.split("-")
    kind, num_images = KINDS[name], 2 if options.tiny else int(count[0]) if count else 8
    config = gpt_config(size, options.tiny)
    net, pool = build_gpt(config, torch.bfloat16 if CUDA else torch.float32), make_pool()
    length, times = config.grid_size**2, dict[str, list[float]]()
    reset_memory()
    for turn in range(3):
        for each in (None, kind):
            request = make_request(config, num_images, Guidance(4.0), turn)
            seconds = median_seconds(lambda e=each, r=request: decode_all(make_decoder(net, pool, r, e), length), 1)  # type: ignore[misc]
            times.setdefault(each or "plain", []).append(seconds)
    plain, low = (sorted(times[each])[1] for each in ("plain", kind))
    copies = next(x.weights.quantized for x in pool.runners.values() if x.weights.kind)
    copied_bytes = sum(x.weight.nbytes + x.scale.nbytes for x in copies)
    matrices = sum(x.weight.numel() for x in copies) * next(net.parameters()).element_size()
    low_bytes = bytes_per_batch(net, 2 * num_images) - (length - 1) * (matrices - copied_bytes)
    result = {
        "section": section,
        "8-bit layers": len(copies),
        "8-bit seconds": low,
        "plain seconds": plain,
        "x plain": plain / low,
        "8-bit GB/s": low_bytes / low / 1e9,
        "copies GiB": copied_bytes / 2**30,
    }
    log(
        section,
        f"{num_images} images in {low:.3f} s with {kind}, {plain:.3f} s without: {plain / low:.2f}x; copies of "
        f"{result['copies GiB']:.2f} GiB",
    )
    record(result)
    pool.runners.clear()
    with log_errors(section, "comparison of logits"):
        differences = compare_logits(section, net, config, kind)
        record({"section": section, "8-bit layers": len(copies), **differences})


def compare_logits(section: str, net: GPT, config: GPTConfig, kind: Kind) -> dict[str, float]:
    """Largest differences of logits of 8-bit decoders from the others, while all read the same tokens."""
    request = make_request(config, 2, Guidance(4.0))
    exact = make_decoder(net, make_pool(), request, None)
    low = make_decoder(net, make_pool(), request, kind)
    expanded = make_decoder(net, make_pool(TorchKernels()), request, kind)
    rounding, kernels, largest = 0.0, 0.0, 0.0
    for i in range(min(COMPARED_TOKENS, config.grid_size**2)):
        for decoder in (exact, low, expanded):
            decoder.decode_next()
        if i:
            logits = [decoder.graph_runner.scratch[-1].float() for decoder in (exact, low, expanded)]
            largest = max(largest, logits[0].abs().max().item())
            rounding = max(rounding, (logits[1] - logits[0]).abs().max().item())
            kernels = max(kernels, (logits[1] - logits[2]).abs().max().item())
        for decoder in (low, expanded):
            decoder.replace_last(exact.ids[:, i])
    log(
        section,
        f"logits up to {largest:.2f}: {kind} differs from plain weights by at most {rounding:.4f}, kernels from "
        f"expanded weights by at most {kernels:.4f}",
    )
    return {"largest logit": largest, "logit difference": rounding, "kernel difference": kernels}


def measure_8bit_kernels(section: str, options: LlamagenOptions, record: Record) -> None:
    """Time the products of a decoding step with 8-bit weights in several tilings, beside cuBLAS in bf16."""
    kind = KINDS[section.rpartition("-")[2]]
    for size, rows in (("B", 16), ("XXL", 16), ("XXL", 128)):
        config = gpt_config(size, options.tiny)
        heads = config.heads + 2 * (config.kv_heads or config.heads)
        hidden, width = config.intermediate_size, config.width
        shapes = {"wqkv": (heads * config.head_dim, width), "wo": (width, width), "w1 and w3": (2 * hidden, width)}
        for name, (height, depth) in (shapes | {"w2": (width, hidden)}).items():
            product = Product(height, depth, rows, kind)
            calls = product.calls(gated=name == "w1 and w3")
            for call, work in calls.items():
                with log_errors(section, call):  # a tiling may need more shared memory than there is
                    error = product.difference(work, gated="gate" in call)
                    microseconds = 1e6 * seconds_in_graph(work) if CUDA else 0.0
                    log(section, f"{size}, {rows} rows, {name}, {call}: {microseconds:.1f} us, differs by {error:.1e}")
                    label = f"{size} {rows} rows: {name}, {call}"
                    record({"section": section, "8-bit layers": 1, "name": label, "ms": microseconds / 1000})


class Product:
    """A matrix product of a decoding step: several copies of the weight, so that it is not read from the L2 cache."""

    def __init__(self, height: int, depth: int, rows: int, kind: Kind) -> None:
        dtype, copies = torch.bfloat16 if CUDA else torch.float32, 16 if CUDA else 1
        device = "cuda" if CUDA else "cpu"
        self.x = torch.randn(rows, depth, device=device, dtype=dtype)
        self.weights = [0.05 * torch.randn(height, depth, device=device, dtype=dtype) for _ in range(copies)]
        self.quantized = [quantize_rows(weight, kind) for weight in self.weights]
        self.out = torch.empty(rows, height, device=device, dtype=dtype)
        self.gated = torch.empty(rows, height // 2, device=device, dtype=dtype)
        self.kernels: Any = fastest_kernels(self.x.device)
        self.number = 0

    def _next(self) -> int:
        self.number += 1
        return self.number % len(self.weights)

    def calls(self, *, gated: bool) -> dict[str, Callable[[], Any]]:
        """The product in bf16, and in 8 bits in every tiling."""
        tilings: Sequence[tuple[int, ...]] = [(), *LINEAR_TILINGS] if CUDA else [()]
        calls: dict[str, Callable[[], Any]] = {
            "plain": lambda: torch.mm(self.x, self.weights[self._next()].t(), out=self.out)
        }
        for tiling in tilings:
            calls[f"8 bits {tiling or ''}"] = lambda t=tiling: self._linear(*t)  # type: ignore[misc]
        if gated and len(self.x) <= self.kernels.MAX_GATED_ROWS:
            for tiling in [(), *GATED_TILINGS]:
                calls[f"8 bits with gate {tiling or ''}"] = lambda t=tiling: self._gated(*t)  # type: ignore[misc]
        return calls

    def _linear(self, *tiling: int) -> None:
        weight, scale = self.quantized[self._next()]
        self.kernels.linear(self.x, weight, self.out, *tiling, scale=scale)

    def _gated(self, *tiling: int) -> None:
        weight, scale = self.quantized[self._next()]
        self.kernels.gated_linear(self.x, weight, self.gated, *tiling, scale=scale)

    def difference(self, work: Callable[[], Any], *, gated: bool) -> float:
        """Relative difference of a call's result from that of the expanded or plain weight in float32."""
        self.number = -1
        work()
        plain = (self.x.float() @ self.weights[0].float().t(), self.out)
        weight, scale = self.quantized[0]
        low = self.x.float() @ (weight.float() * scale).t()
        first, second = low.chunk(2, 1)
        pairs = [(torch.nn.functional.silu(first) * second, self.gated)] if gated else [plain, (low, self.out)]
        return min(relative_difference(found, expected) for expected, found in pairs)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
