"""What a search pays: floating-point operations of a network call and of a judgement, counted once on one picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..core.guidance import unwrap_guidance
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verifier
from ..core.types import PromptBatch
from ..processes.autoregressive import AutoregressiveProcess
from .base import SearchCost


@dataclass(frozen=True)
class FlopCosts:
    """Floating-point operations of matrix products, convolutions and attention."""

    call: float = 0.0  # of the network, one row
    judgement: float = 0.0  # of one picture, decoding it among them

    def of(self, price: SearchCost) -> SearchCost:
        return replace(price, flops=price.calls * self.call + price.judged * self.judgement)


@torch.no_grad()
def measure_flop_costs(
    policy: Policy[Any], verifier: Verifier | None, batch: PromptBatch, rng: Randomness
) -> FlopCosts:
    """Counted on the first row; of rewards that work elsewhere, such as remote ones, nothing is seen."""
    first = PromptBatch(batch.prompts[:1], batch.facts[:1])
    model, process = unwrap_guidance(policy.model)[0], policy.process
    draws = replace(rng, rows=rng.rows[:1])
    cond = model.embed(first.prompts, first.facts)
    x = torch.zeros_like(process.start(model, cond, draws).start)
    noisy = process.corrupt(x, draws)
    # One prediction reads a whole sequence of tokens, which takes a call each to write.
    calls = model.passes * (process.calls(model.shape) if isinstance(process, AutoregressiveProcess) else 1)
    call = 1 / calls * count_flops(lambda: process.likelihood(model, cond, x, noisy))
    if verifier is None:
        return FlopCosts(call)
    judge = verifier

    def look() -> None:
        judge.judge(policy.decode(x).float().clamp(0, 1), first.prompts, first.facts, 1.0)

    return FlopCosts(call, count_flops(look))


def count_flops(work: Callable[[], object]) -> float:
    """Attention in its parts, for of fused kernels a CPU's are not known, and nothing compiled, for none is seen."""
    counter: Any = FlopCounterMode(display=False)
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), counter:
        work()
    return float(counter.get_total_flops())


def format_cost(price: SearchCost) -> str:
    """A price in words."""
    operations = f" and {format_flops(price.flops)}" if price.flops else ""
    return f"{price.calls:,.0f} network calls, {price.judged:,.0f} judgements{operations}"


def format_flops(flops: float) -> str:
    """With three digits at most: 38 TFLOP."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= size:
            return f"{flops / size:.3g} {letter}FLOP"
    return f"{flops:.0f} FLOP"
