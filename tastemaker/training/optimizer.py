"""AdamW and its learning rate: PyTorch's in fp32, or our own with weights in bf16 and states in bf16 or int8."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config.schema import OptimConfig
from . import distributed

CHUNK = 1 << 24  # elements updated at once without torch.compile, which bounds the memory for intermediate results
BLOCK = 256  # elements of an int8 state that share a scale; fewer where the row length is no multiple of it
MIN_BLOCK = 64  # smaller blocks would need more memory for their scales than int8 saves
GOLDEN_RATIO = 0x9E3779B9 - (1 << 32)


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step counted from 0: linear warm-up, then constant or decaying to 0 at `steps`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    left = 1 - (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[optim.lr_schedule]
    return optim.lr * max(0.0, factor)


class Optimizer(Protocol):
    """Updates parameters from their gradients."""

    def update(self, lr: float) -> None: ...
    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors as `PARAMETER.STATE`, to be saved, or loaded in place."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], optim: OptimConfig, dtype: torch.dtype, seed: int, device: torch.device
) -> Optimizer:
    """Return PyTorch's AdamW if weights and states are in fp32; otherwise LowBitAdamW, which computes on `device`."""
    exact = dtype == torch.float32 and optim.state_dtype == "fp32"
    return TorchAdamW(parameters, optim) if exact else LowBitAdamW(parameters, optim, seed, device)


@dataclass(frozen=True)
class AdamWMoments:
    """AdamW's state of one parameter. Only int8 moments have scales."""

    step: Tensor  # updates so far, a scalar
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None  # [rows, blocks per row]: the largest absolute value of each block
    exp_avg_sq_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if x is not None}


def named_state(moments: Mapping[str, AdamWMoments]) -> dict[str, Tensor]:
    """Return the tensors of all parameters as `PARAMETER.STATE`."""
    return {f"{name}.{key}": x for name, state in moments.items() for key, x in state.tensors().items()}


class TorchAdamW:
    """PyTorch's AdamW. Weight decay applies to matrices and larger tensors only."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optim: OptimConfig, fused: bool | None = None) -> None:
        values = list(parameters.values())
        self.fused = fused = all(p.is_cuda for p in values) if fused is None else fused
        groups = [
            {"params": [p for p in values if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in values if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], optim.lr, optim.betas, optim.eps, fused=fused
        )
        self.moments: dict[str, AdamWMoments] = {}
        for name, p in parameters.items():
            # Allocated now and not at the first update: memory runs out early, and every checkpoint is complete.
            step = torch.zeros((), device=p.device if fused else "cpu")
            zeros = [torch.zeros_like(p, requires_grad=False) for _ in range(2)]
            state = self.moments[name] = AdamWMoments(step, *zeros)
            self.adam.state[p] = {"step": state.step, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}

    def update(self, lr: float, skip: Tensor | None = None, grad_divisor: Tensor | None = None) -> None:
        """Step. If fused, `skip` (1 to change nothing) and `grad_divisor` are scalars that only the GPU reads."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        if skip is not None:
            # The attributes through which PyTorch's gradient scaler talks to fused optimizers.
            self.adam.found_inf, self.adam.grad_scale = skip, grad_divisor  # type: ignore[attr-defined]
        self.adam.step()

    def state_dict(self) -> dict[str, Tensor]:
        return named_state(self.moments)


class LowBitAdamW:
    """AdamW computed in fp32 on weights and moments that are stored in bf16 or int8 with stochastic rounding.

    The random bits are a function of seed, update, parameter and element, so a resumed run, a replica and any number
    of shards round alike. Weights in host memory visit `device` one by one: 12 billion of them would take minutes on
    a CPU, and seconds over the bus.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optim: OptimConfig, seed: int, device: torch.device | None = None
    ) -> None:
        self.parameters, self.optim, self.seed = dict(parameters), optim, seed
        self.device = device or next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self.moments = {name: init_state(p, optim.state_dtype) for name, p in parameters.items()}
        compiled = self.device.type == "cuda" and find_spec("triton") is not None
        self.step_fn: Callable[..., None] = _compiled() if compiled else adamw_step
        self.chunk = None if compiled else CHUNK

    def state_dict(self) -> dict[str, Tensor]:
        return named_state(self.moments)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        parameters = {
            name: p for name, p in self.parameters.items() if p.grad is not None and distributed.local_shard(p).numel()
        }
        if not parameters:
            return
        keys = [self._random_key(name, p) for name, p in parameters.items()]
        # One copy to the device for all parameters: a copy for each of a thousand would take longer than the update.
        device_keys = torch.tensor(keys).to(self.device)
        coefficients: dict[tuple[int, bool], Tensor] = {}
        for key, (name, p) in zip(device_keys, parameters.items(), strict=True):
            decays, step = p.ndim >= 2, int(self.moments[name].step)
            if (step, decays) not in coefficients:
                coefficients[step, decays] = self._coefficients(step, lr, decays=decays).to(self.device)
            self._update_parameter(p, self.moments[name], key, coefficients[step, decays])

    def _random_key(self, name: str, p: nn.Parameter) -> tuple[int, int]:
        """Count the update, and return the key of its random bits and the index of this shard's first element."""
        state = self.moments[name]
        state.step.add_(1)
        key = zlib.crc32(f"{self.seed}/{int(state.step)}/{name}".encode())
        return key, distributed.shard_offset(p) * (p.numel() // max(1, p.shape[0] if p.ndim else 1))

    def _coefficients(self, step: int, lr: float, *, decays: bool) -> Tensor:
        """Return [1 - beta1, beta2, 1 - beta2, lr / bias correction 1, 1 / bias correction 2, eps, lr * decay]."""
        beta1, beta2 = self.optim.betas
        decay = lr * self.optim.weight_decay if decays else 0.0
        return torch.tensor(
            [1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), 1 / (1 - beta2**step), self.optim.eps, decay]
        )

    def _update_parameter(self, p: nn.Parameter, state: AdamWMoments, key: Tensor, coefficients: Tensor) -> None:
        grad = p.grad
        assert grad is not None  # `update` leaves the others out
        flat = [distributed.local_shard(x.detach()).view(-1) for x in (p, grad, state.exp_avg, state.exp_avg_sq)]
        scales: list[Tensor] = []
        if state.exp_avg_scale is not None and state.exp_avg_sq_scale is not None:
            scales = [distributed.local_shard(x).view(-1, 1) for x in (state.exp_avg_scale, state.exp_avg_sq_scale)]
            flat = [x.view(len(scales[0]), -1) for x in flat]
        on_device = [x.to(self.device) for x in (*flat, *scales)]  # the tensors themselves if they are there already
        self._update_chunks(on_device[:4], on_device[4:], key, coefficients)
        if flat[0].device != on_device[0].device:
            for stored, updated in zip((*flat, *scales), on_device, strict=True):
                if stored is not flat[1]:  # the gradient does not change
                    stored.copy_(updated)

    def _update_chunks(
        self, flat: Sequence[Tensor], scales: Sequence[Tensor], key: Tensor, coefficients: Tensor
    ) -> None:
        if self.chunk is None:
            for x in (*flat, *scales):
                torch._dynamo.maybe_mark_dynamic(x, 0)
            self.step_fn(*flat, scales, key, coefficients)
            return
        width = flat[0].shape[1] if flat[0].ndim == 2 else 1
        start = key.clone()
        for chunk in zip(*(torch.split(x, max(1, self.chunk // width)) for x in (*flat, *scales)), strict=True):
            self.step_fn(*chunk[:4], chunk[4:], start, coefficients)
            start[1] += chunk[0].numel()


def init_state(p: nn.Parameter, dtype: str) -> AdamWMoments:
    """Return zero moments of a parameter in fp32, bf16 or int8; with int8, small tensors keep theirs in fp32."""
    width = p.numel() // max(1, p.shape[0]) if p.ndim >= 2 else 0
    block = next((n for n in range(min(BLOCK, width), 0, -1) if width % n == 0), 0)
    if dtype != "int8" or block < MIN_BLOCK:
        zeros = torch.zeros_like(p, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, requires_grad=False)
        return AdamWMoments(torch.zeros(()), zeros, torch.zeros_like(zeros))
    signed = torch.zeros_like(p, dtype=torch.int8, requires_grad=False)
    scale = distributed.zeros_like_rows(p, width // block)
    return AdamWMoments(
        torch.zeros(()), signed, torch.zeros_like(signed, dtype=torch.uint8), scale, torch.zeros_like(scale)
    )


def adamw_step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scales: Sequence[Tensor],
    key: Tensor,
    coefficients: Tensor,
) -> None:
    """One step of AdamW in place. Tensors are [n], or [n, block] with scales [n, 1] if the moments are int8.

    `key` is [2]: the key of the random bits, and the index of the first element; `coefficients` are those of
    `LowBitAdamW._coefficients`.
    """
    index = torch.arange(weight.numel(), device=weight.device, dtype=torch.int32).view(weight.shape)
    bits = hash_bits((index + key[1].to(torch.int32)) ^ key[0].to(torch.int32))
    moment_bits = hash_bits(bits ^ GOLDEN_RATIO)
    one_minus_beta1, beta2, one_minus_beta2, lr, correction, eps, decay = coefficients.unbind()
    gradient = grad.float()
    if scales:
        old_mean, old_square = dequantize_signed(exp_avg, scales[0]), dequantize_positive(exp_avg_sq, scales[1])
    else:
        old_mean, old_square = exp_avg.float(), exp_avg_sq.float()
    mean = old_mean + one_minus_beta1 * (gradient - old_mean)
    square = old_square * beta2 + one_minus_beta2 * gradient * gradient
    change = lr * mean / ((square * correction).sqrt() + eps) + decay * weight.float()
    updated = weight.float() - change
    weight.copy_(round_to_bf16(updated, bits) if weight.dtype == torch.bfloat16 else updated)
    if scales:
        quantize_signed(exp_avg, scales[0], mean, moment_bits)
        quantize_positive(exp_avg_sq, scales[1], square, moment_bits >> 16)
    elif exp_avg.dtype == torch.bfloat16:
        exp_avg.copy_(round_to_bf16(mean, moment_bits))
        exp_avg_sq.copy_(round_to_bf16(square, moment_bits >> 16))
    else:
        exp_avg.copy_(mean)
        exp_avg_sq.copy_(square)


@cache
def _compiled() -> Callable[..., None]:
    # The number of elements is dynamic and the block size is not: one kernel serves parameters of all sizes and reads
    # each element once.
    return torch.compile(adamw_step, dynamic=False, fullgraph=True)


def hash_bits(index: Tensor) -> Tensor:
    """Hash each number below 2**32 to 32 bits, as int32 (the mixer lowbias32 of C. Wellons)."""
    x = index.to(torch.int32)
    x = x ^ ((x >> 16) & 0xFFFF)  # int32 shifts copy the sign bit, which the mask removes
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16 stochastically, with the 16 low bits of `bits`: the expected result is x."""
    # Adding noise below the last kept bit carries into it with the probability of the part that is cut off.
    noisy = x.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (noisy & -0x10000).view(torch.float32).to(torch.bfloat16)


def dequantize_signed(code: Tensor, scale: Tensor) -> Tensor:
    """Return sign(code) * (code / 127)^2 * scale: values down to 1/16,000 of the largest keep some precision."""
    x = code.float() / 127
    return x * x.abs() * scale


def dequantize_positive(code: Tensor, scale: Tensor) -> Tensor:
    """Return (code / 255)^4 * scale, whose square root, AdamW's divisor, is as precise as the signed moment."""
    x = code.float() / 255
    return (x * x) * (x * x) * scale


def quantize_signed(code: Tensor, scale: Tensor, x: Tensor, bits: Tensor) -> None:
    """Write x into int8 codes and scales such that the expected dequantized value is x."""
    largest = x.abs().amax(1, keepdim=True)
    size = x.abs() / largest.clamp(min=1e-38)
    below = (size.sqrt() * 127).floor().clamp(0, 126)
    low, high = (below / 127).square(), ((below + 1) / 127).square()
    code.copy_((below + _round_up_mask(size, low, high, bits)) * x.sign())
    scale.copy_(largest)


def quantize_positive(code: Tensor, scale: Tensor, x: Tensor, bits: Tensor) -> None:
    """Write x >= 0 into uint8 codes and scales; codes are at least 1, because AdamW divides by the value."""
    largest = x.amax(1, keepdim=True)
    size = x / largest.clamp(min=1e-38)
    below = (size.sqrt().sqrt() * 255).floor().clamp(0, 254)
    low, high = (below / 255).square().square(), ((below + 1) / 255).square().square()
    code.copy_((below + _round_up_mask(size, low, high, bits)).clamp(min=1))
    scale.copy_(largest)


def _round_up_mask(size: Tensor, low: Tensor, high: Tensor, bits: Tensor) -> Tensor:
    """Return 1 with probability (size - low) / (high - low), and 0 otherwise."""
    threshold = ((bits & 0xFFFF).float() + 0.5) / 65536
    return (threshold < (size - low) / (high - low)).float()
