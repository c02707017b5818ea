"""Policies sample with the decoder of their model, which uses the current weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiers import fast
from torch import nn

from tastemaker.core.guidance import batch_conditions
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FrozenCopyFinetuning, FullFinetuning, FullWeights
from tastemaker.models.gpt import GptBackbone, GptSpec
from tastemaker.models.nets.cuda_graph_decoder import DecodeKernels, DecoderPool, TorchKernels
from tastemaker.models.nets.token_decoder import StaticKVCacheDecoder
from tastemaker.processes.autoregressive import AutoregressiveProcess, AutoregressiveRollout, EagerDecoder

TORCH = TorchKernels()


def make_backbone(kernels: DecodeKernels | None) -> GptBackbone:
    model = replace(GptSpec().tiny(), depth=2).load(Placement())
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    model.decoder_pool = DecoderPool(kernels)
    return model


RNG = Randomness(0, 0, torch.arange(4))
PROMPTS = ("a photo of a cat", "a photo of a cat", "a photo of a dog", "")


def assert_samples_equal_eager_decoding(policy: Policy[AutoregressiveProcess]) -> None:
    """Check that the policy samples the same tokens as one call of the network per token."""
    cond = policy.embed(PROMPTS)
    eager = EagerDecoder(policy.model, cond, RNG.uniform("token", *policy.model.shape), policy.process.sampler)  # type: ignore[arg-type]
    with torch.no_grad():
        for _ in range(policy.model.shape[0]):
            eager.decode_next()
    assert torch.equal(policy.sample(cond, RNG).final, eager.ids)


def perturb(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))


@pytest.mark.parametrize("kernels", fast([None, TORCH], TORCH))
@pytest.mark.parametrize(
    "tuning", [FullFinetuning(), FrozenCopyFinetuning(), Lora(rank=2)], ids=["full", "frozen_copy", "lora"]
)
@pytest.mark.parametrize("scale", fast([1.0, 2.0], 2.0))
def test_decoder_uses_updated_and_swapped_weights(
    tuning: FullFinetuning | FrozenCopyFinetuning | Lora, kernels: DecodeKernels | None, scale: float
) -> None:
    model = make_backbone(kernels)
    weights = tuning.apply(model, ("reference",))
    guided = AutoregressiveProcess().wrap_guidance(model, Guidance(scale)) if scale > 1 else model
    policy = Policy(guided, AutoregressiveProcess(top_k=40), weights)
    before = policy.sample(policy.embed(PROMPTS), RNG).final
    assert_samples_equal_eager_decoding(policy)
    for _ in range(2):
        perturb(weights.net)
        assert_samples_equal_eager_decoding(policy)
    assert not torch.equal(policy.sample(policy.embed(PROMPTS), RNG).final, before)
    with weights.use("reference"):
        assert_samples_equal_eager_decoding(policy)
        assert torch.equal(policy.sample(policy.embed(PROMPTS), RNG).final, before)
    assert_samples_equal_eager_decoding(policy)


def test_graph_runner_is_reused_until_weights_move() -> None:
    model = make_backbone(TORCH)
    policy = Policy(model, AutoregressiveProcess(), FullWeights(model.net))
    policy.sample(policy.embed(PROMPTS), RNG)
    (first,) = model.decoder_pool.runners.values()
    perturb(model.net)
    policy.sample(policy.embed(PROMPTS), RNG)
    assert list(model.decoder_pool.runners.values()) == [first]
    for p in model.net.parameters():
        p.data = p.data.clone()
    assert_samples_equal_eager_decoding(policy)
    assert list(model.decoder_pool.runners.values()) != [first]


@pytest.mark.parametrize("kernels", [None, TORCH])
def test_decoder_follows_autocast_dtype(kernels: DecodeKernels | None) -> None:
    model = make_backbone(kernels)
    policy = Policy(model, AutoregressiveProcess(recompute_log_probs=False), FullWeights(model.net))
    cond = policy.embed(PROMPTS)
    with torch.autocast("cpu", torch.bfloat16):
        (segment,) = policy.sample(cond, RNG).segments
        log_prob = policy.action_distribution(cond, segment).log_prob(segment.action)
    assert ((log_prob - segment.log_prob).exp() - 1).abs().mean() < 0.03


def test_rollout_uses_the_models_decoder() -> None:
    model = make_backbone(None)
    rollout = AutoregressiveProcess().start(model, model.embed(PROMPTS), RNG)
    assert isinstance(rollout, AutoregressiveRollout) and isinstance(rollout.decoder, StaticKVCacheDecoder)
    guided = AutoregressiveProcess().wrap_guidance(model, Guidance(2.0))
    assert isinstance(AutoregressiveProcess().start(guided, guided.embed(PROMPTS), RNG).decoder, StaticKVCacheDecoder)
    assert len(batch_conditions(guided.embed(PROMPTS)).tensors["token_ids"]) == 2 * len(PROMPTS)
