"""Show-o with compiled transformer blocks, as its benchmark runs it."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.showo.model import ShowoSpec
from tastemaker.processes.masked import MaskedProcess
from tastemaker.training.activation_memory import compile_blocks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside PyTorch
@torch.no_grad()
def test_compiled_step_gives_the_same_tokens_in_float32() -> None:
    from torch._dynamo.utils import counters

    model = ShowoSpec().tiny().load(Placement())
    model.net.requires_grad_(False)
    process = MaskedProcess(6, recompute_log_probs=False)
    policy = Policy(process.wrap_guidance(model, Guidance(2.75)), process, FullFinetuning().apply(model, ()))
    cond, rng = policy.embed(["a dog"]).repeat(3), Randomness(0, 0, torch.arange(3))
    expected = policy.sample(cond, rng).final
    counters.clear()
    compile_blocks(model.net)
    assert torch.equal(policy.sample(cond, rng).final, expected) and expected.unique().numel() > 10
    assert counters["stats"]["unique_graphs"] > 0
