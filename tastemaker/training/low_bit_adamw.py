"""AdamW with weights in bf16 and moments in bf16 or int8, with stochastic rounding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from ..config.schema import OptimConfig
from . import distributed

CHUNK = 1 << 24  # elements moved at once without a compiler, which bounds the memory for what lies in between
BLOCK = 256  # elements of an 8-bit moment that share a scale; fewer where rows are no multiple of it
MIN_BLOCK = 64  # below this the scales would cost more than the bits saved
GOLDEN_RATIO = 0x9E3779B9 - (1 << 32)


@dataclass(frozen=True)
class AdamWMoments:
    """What AdamW remembers of one parameter; scales only where it is held in 8 bits."""

    step: Tensor  # updates so far, a scalar
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None  # [rows, blocks a row] the largest number of each block
    exp_avg_sq_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if x is not None}


def named_state(moments: Mapping[str, AdamWMoments]) -> dict[str, Tensor]:
    return {f"{name}.{what}": x for name, kept in moments.items() for what, x in kept.tensors().items()}


class LowBitAdamW:
    """AdamW computed in fp32 on weights and moments held in less.

    The bits are a function of seed, update, parameter and element, so that a resume, a replica and any number of
    shards round alike.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optim: OptimConfig, seed: int) -> None:
        self.parameters, self.optim, self.seed = dict(parameters), optim, seed
        self.moments = {name: init_state(p, optim.moments) for name, p in parameters.items()}
        compiled = all(p.is_cuda for p in parameters.values()) and find_spec("triton") is not None
        self.advance: Callable[..., None] = _compiled() if compiled else adamw_step
        self.chunk = None if compiled else CHUNK

    def state(self) -> dict[str, Tensor]:
        return named_state(self.moments)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        moving = {
            name: p for name, p in self.parameters.items() if p.grad is not None and distributed.local_shard(p).numel()
        }
        if not moving:
            return
        keys = [self._key(name, p) for name, p in moving.items()]
        device = next(iter(moving.values())).device
        # All that the steps need goes to the device at once: a copy for each of a thousand tensors would take longer.
        places = torch.tensor(keys).to(device)
        numbers: dict[tuple[int, bool], Tensor] = {}
        for place, (name, p) in zip(places, moving.items(), strict=True):
            decays, step = p.ndim >= 2, int(self.moments[name].step)
            if (step, decays) not in numbers:
                numbers[step, decays] = self._numbers(step, lr, decays=decays).to(device)
            self._move(p, self.moments[name], place, numbers[step, decays])

    def _key(self, name: str, p: nn.Parameter) -> tuple[int, int]:
        """What the random bits of this update of a parameter start from, and the number of its first element here."""
        kept = self.moments[name]
        kept.step.add_(1)
        key = zlib.crc32(f"{self.seed}/{int(kept.step)}/{name}".encode())
        return key, distributed.shard_offset(p) * (p.numel() // max(1, p.shape[0] if p.ndim else 1))

    def _numbers(self, step: int, lr: float, *, decays: bool) -> Tensor:
        first, second = self.optim.betas
        decay = lr * self.optim.weight_decay if decays else 0.0
        return torch.tensor(
            [1 - first, second, 1 - second, lr / (1 - first**step), 1 / (1 - second**step), self.optim.eps, decay]
        )

    def _move(self, p: nn.Parameter, kept: AdamWMoments, place: Tensor, numbers: Tensor) -> None:
        slope = p.grad
        assert slope is not None  # `update` leaves the others out
        flat = [distributed.local_shard(x.detach()).view(-1) for x in (p, slope, kept.exp_avg, kept.exp_avg_sq)]
        if kept.exp_avg_scale is None or kept.exp_avg_sq_scale is None:
            self._pieces(flat, [], place, numbers)
            return
        scales = [distributed.local_shard(x).view(-1, 1) for x in (kept.exp_avg_scale, kept.exp_avg_sq_scale)]
        self._pieces([x.view(len(scales[0]), -1) for x in flat], scales, place, numbers)

    def _pieces(self, flat: Sequence[Tensor], scales: Sequence[Tensor], place: Tensor, numbers: Tensor) -> None:
        if self.chunk is None:
            for x in (*flat, *scales):
                torch._dynamo.maybe_mark_dynamic(x, 0)
            self.advance(*flat, scales, place, numbers)
            return
        width = flat[0].shape[1] if flat[0].ndim == 2 else 1
        start = place.clone()
        for parts in zip(*(torch.split(x, max(1, self.chunk // width)) for x in (*flat, *scales)), strict=True):
            self.advance(*parts[:4], parts[4:], start, numbers)
            start[1] += parts[0].numel()


def init_state(p: nn.Parameter, form: str) -> AdamWMoments:
    """Moments of nothing yet, for a parameter; small tensors keep theirs in fp32."""
    width = p.numel() // max(1, p.shape[0]) if p.ndim >= 2 else 0
    block = next((n for n in range(min(BLOCK, width), 0, -1) if width % n == 0), 0)
    if form != "int8" or block < MIN_BLOCK:
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        kept = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        return AdamWMoments(torch.zeros(()), kept, torch.zeros_like(kept))
    signed = torch.zeros_like(p, dtype=torch.int8, requires_grad=False)
    scale = distributed.zeros_like_rows(p, width // block)
    return AdamWMoments(
        torch.zeros(()), signed, torch.zeros_like(signed, dtype=torch.uint8), scale, torch.zeros_like(scale)
    )


def adamw_step(
    weight: Tensor,
    slope: Tensor,
    average: Tensor,
    square: Tensor,
    scales: Sequence[Tensor],
    place: Tensor,
    numbers: Tensor,
) -> None:
    """One step of AdamW in place; [n] each, or [n, block] and scales of [n, 1] where moments have 8 bits."""
    index = torch.arange(weight.numel(), device=weight.device, dtype=torch.int32).view(weight.shape)
    bits = hash_bits((index + place[1].to(torch.int32)) ^ place[0].to(torch.int32))
    more = hash_bits(bits ^ GOLDEN_RATIO)
    first, second, rest, lr, correction, eps, decay = numbers.unbind()
    gradient = slope.float()
    before = (
        [dequantize_signed(average, scales[0]), dequantize_positive(square, scales[1])] if scales else [average, square]
    )
    mean = before[0].float() + first * (gradient - before[0].float())
    power = before[1].float() * second + rest * gradient * gradient
    change = lr * mean / ((power * correction).sqrt() + eps) + decay * weight.float()
    moved = weight.float() - change
    weight.copy_(round_to_bf16(moved, bits) if weight.dtype == torch.bfloat16 else moved)
    if scales:
        quantize_signed(average, scales[0], mean, more)
        quantize_positive(square, scales[1], power, more >> 16)
    elif average.dtype == torch.bfloat16:
        average.copy_(round_to_bf16(mean, more))
        square.copy_(round_to_bf16(power, more >> 16))
    else:
        average.copy_(mean)
        square.copy_(power)


@cache
def _compiled() -> Callable[..., None]:
    # The number of elements is left open and that of a block is not, so that one kernel serves parameters of all sizes
    # and moves each element once.
    return torch.compile(adamw_step, dynamic=False, fullgraph=True)


def hash_bits(index: Tensor) -> Tensor:
    """32 random-looking bits of each number below 2**32, as int32 (the mixer lowbias32 of C. Wellons)."""
    x = index.to(torch.int32)
    x = x ^ ((x >> 16) & 0xFFFF)  # shifts carry the sign along, which the mask takes off again
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability of the part cut off; bits: at least 16 random low bits an element."""
    # Adding noise below the last kept bit carries into it exactly as often as it should.
    noisy = x.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (noisy & -0x10000).view(torch.float32).to(torch.bfloat16)


def dequantize_signed(code: Tensor, scale: Tensor) -> Tensor:
    """Squares of the code, so that small numbers beside a large one survive: down to a sixteen-thousandth of it."""
    x = code.float() / 127
    return x * x.abs() * scale


def dequantize_positive(code: Tensor, scale: Tensor) -> Tensor:
    """Fourth powers of the code: its root, which is what AdamW divides by, is held as finely as the other moment."""
    x = code.float() / 255
    return (x * x) * (x * x) * scale


def quantize_signed(code: Tensor, scale: Tensor, x: Tensor, bits: Tensor) -> None:
    """Hold x in 8 bits, up or down with the probability that keeps its mean."""
    most = x.abs().amax(1, keepdim=True)
    size = x.abs() / most.clamp(min=1e-38)
    below = (size.sqrt() * 127).floor().clamp(0, 126)
    low, high = (below / 127).square(), ((below + 1) / 127).square()
    code.copy_((below + _round_up_mask(size, low, high, bits)) * x.sign())
    scale.copy_(most)


def quantize_positive(code: Tensor, scale: Tensor, x: Tensor, bits: Tensor) -> None:
    """The same for numbers of one sign; what is not zero stays so, for AdamW divides by it."""
    most = x.amax(1, keepdim=True)
    size = x / most.clamp(min=1e-38)
    below = (size.sqrt().sqrt() * 255).floor().clamp(0, 254)
    low, high = (below / 255).square().square(), ((below + 1) / 255).square().square()
    code.copy_((below + _round_up_mask(size, low, high, bits)).clamp(min=1))
    scale.copy_(most)


def _round_up_mask(size: Tensor, low: Tensor, high: Tensor, bits: Tensor) -> Tensor:
    """1 where the upper of two neighbours is taken, which happens the more often the nearer it is."""
    chance = ((bits & 0xFFFF).float() + 0.5) / 65536
    return (chance < (size - low) / (high - low)).float()
