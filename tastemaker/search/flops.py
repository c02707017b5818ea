"""Floating-point operations of a search: those of a network call and of a verifier call, counted on one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..core.fused_lora import FLOP_FORMULAS
from ..core.policy import Policy
from ..core.randomness import Randomness
from ..core.reward import Verdict, Verifier
from ..core.types import PromptBatch
from .base import SearchCost


@dataclass(frozen=True)
class FlopCosts:
    """Floating-point operations of matrix products, convolutions and attention."""

    per_network_call: float = 0.0  # for one sample
    per_verifier_call: float = 0.0  # for one sample, with decoding it

    def add_flops(self, cost: SearchCost) -> SearchCost:
        """The cost with the operations of its calls."""
        return replace(cost, flops=cost.calls * self.per_network_call + cost.verifier_calls * self.per_verifier_call)


@torch.no_grad()
def measure_flop_costs(
    policy: Policy[Any], verifier: Verifier | None, batch: PromptBatch, rng: Randomness
) -> FlopCosts:
    """Count on the first prompt; the operations of remote rewards are not counted."""
    first = PromptBatch(batch.prompts[:1], batch.metadata[:1])
    model, process = policy.model.unguided, policy.process
    draws = replace(rng, rows=rng.rows[:1])
    cond = model.embed(first.prompts, first.metadata)
    x = torch.zeros_like(process.start(model, cond, draws).start)
    noisy = process.corrupt(x, draws)
    # One prediction of an autoregressive model reads a whole sequence, which takes a call per token to sample.
    calls = model.forward_passes * process.calls_per_prediction(model.shape)
    per_network_call = 1 / calls * count_flops(lambda: process.likelihood(model, cond, x, noisy))
    if verifier is None:
        return FlopCosts(per_network_call)

    def judge(verifier: Verifier = verifier) -> Verdict:
        return verifier.judge(policy.decode(x).float().clamp(0, 1), first.prompts, first.metadata, 1.0)

    return FlopCosts(per_network_call, count_flops(judge))


def count_flops(function: Callable[[], object]) -> float:
    """Count the operations of a function, without compiled code and fused CPU attention, which are not counted."""
    counter: Any = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), counter:
        function()
    return float(counter.get_total_flops())


def format_cost(cost: SearchCost) -> str:
    """A cost for users: '1,200 network calls, 60 verifier calls and 38 TFLOP'."""
    operations = f" and {format_flops(cost.flops)}" if cost.flops else ""
    return f"{cost.calls:,.0f} network calls, {cost.verifier_calls:,.0f} verifier calls{operations}"


def format_flops(flops: float) -> str:
    """A number of operations with at most three digits: '38 TFLOP'."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= size:
            return f"{flops / size:.3g} {letter}FLOP"
    return f"{flops:.0f} FLOP"
