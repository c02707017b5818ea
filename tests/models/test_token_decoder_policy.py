"""Policies sample with the decoder of their model, which uses the current weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_toys import build_engine
from tiers import fast
from torch import Tensor, nn

from tastemaker.core.guidance import batch_conditions
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.quantization import DTYPES, quantize_rows
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FrozenCopyFinetuning, FullFinetuning, FullWeights
from tastemaker.models.gpt import GptBackbone, GptSpec
from tastemaker.models.nets.cuda_graph_decoder import DecodeKernels, DecoderPool, TorchKernels
from tastemaker.models.nets.gpt import GPT
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


def copies_of(policy: Policy[AutoregressiveProcess]) -> list[tuple[Tensor, Tensor]]:
    (runner,) = policy.model.decoder_pool.runners.values()  # type: ignore[attr-defined]
    assert runner.weights.kind == "int8"
    return [(each.weight, each.scale) for each in runner.weights.quantized]


def expected_copies(net: GPT) -> list[tuple[Tensor, Tensor]]:
    layers = [
        layer
        for block in net.layers
        for layer in (
            *(block.attention.wqkv, block.attention.wo),
            *(block.feed_forward.w1, block.feed_forward.w3, block.feed_forward.w2),
        )
    ]
    return [quantize_rows(layer.weight.detach(), "int8") for layer in layers]


def assert_equal_copies(found: list[tuple[Tensor, Tensor]], net: GPT) -> None:
    for (numbers, scale), (expected, expected_scale) in zip(found, expected_copies(net), strict=True):
        assert torch.equal(numbers, expected) and torch.equal(scale, expected_scale)


def test_copies_are_renewed_after_updates_and_swaps() -> None:
    model = make_backbone(TorchKernels())
    weights = FullFinetuning().apply(model, ("reference",))
    engine = build_engine(weights, rollout_precision="int8")
    assert weights.net.rollout_kind == "int8"
    policy = Policy(model, AutoregressiveProcess(), weights)
    cond = policy.embed(PROMPTS)
    before = policy.sample(cond, RNG)
    first = copies_of(policy)
    assert_equal_copies(first, model.net)
    assert {x.dtype for x, _ in first} == {DTYPES["int8"]}
    engine.backward(policy.action_distribution(cond, before.segments[0]).log_prob(before.final).mean(), last=True)
    engine.step(0)
    policy.sample(cond, RNG)
    assert [x.data_ptr() for x, _ in copies_of(policy)] == [x.data_ptr() for x, _ in first]  # captured by graphs
    assert_equal_copies(copies_of(policy), model.net)
    perturb(model.net)
    assert not torch.equal(policy.sample(cond, RNG).final, before.final)
    with weights.use("reference"):
        assert torch.equal(policy.sample(cond, RNG).final, before.final)
        assert_equal_copies(copies_of(policy), model.net)
    policy.sample(cond, RNG)
    assert_equal_copies(copies_of(policy), model.net)


def test_batches_of_several_sizes_share_the_copies() -> None:
    model = make_backbone(TorchKernels())
    model.net.rollout_kind = "int8"
    policy = Policy(model, AutoregressiveProcess(), FullWeights(model.net))
    for prompts in (PROMPTS, PROMPTS[:2]):
        policy.sample(policy.embed(prompts), type(RNG)(0, 0, torch.arange(len(prompts))))
    one, other = model.decoder_pool.runners.values()
    assert one.weights is other.weights


def test_adapters_are_part_of_the_8_bit_weights() -> None:
    model = make_backbone(TorchKernels())
    weights = Lora(rank=2).apply(model, ())
    model.net.rollout_kind = "int8"
    policy = Policy(model, AutoregressiveProcess(), weights)
    cond = policy.embed(PROMPTS)
    for _ in range(2):
        perturb(weights.net)
        (segment,) = policy.sample(cond, RNG).segments
        ratio = segment.precision_log_ratio
        assert ratio is not None and 0 < ratio.abs().max() < 0.5 and ratio.abs().mean() < 0.05
