"""Every way of writing chooses the tokens that one call of the network a token would."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from tiers import fast
from torch import Tensor

from tastemaker.core.distributions import TokenSampler
from tastemaker.core.guidance import count_guided_tokens
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.models.nets.cuda_graph_decoder import CudaGraphDecoder, DecodeKernels, DecoderPool, TorchKernels
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest, StaticKVCacheDecoder, prefill

# Kernels are carried out on the host where Triton is there and told so, at half a minute a test.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
SHAPES = {
    "class": GPTConfig(32, 2, 4, None, 60, 4, "class", 1, 10),
    "grouped": GPTConfig(32, 2, 4, 2, 60, 4, "class", 1, 10),
    "head of 100": GPTConfig(200, 1, 2, None, 60, 3, "class", 1, 10),
    "caption": GPTConfig(32, 2, 4, None, 60, 4, "caption", 5, 12),
    "words": GPTConfig(32, 2, 4, 1, 60, 3, "words", 5, 12),
}
GUIDANCE = {
    "none": None,
    "always": Guidance(3.0),
    "first": Guidance(3.0, interval=(0.6, 1.0)),
    "middle": Guidance(3.0, interval=(0.3, 0.8)),
    "rescaled": Guidance(3.0, rescale=True),
    "rising": Guidance(3.0, power_schedule=1.5),
}
ROWS = 6


def stirred(shape: GPTConfig) -> GPT:
    torch.manual_seed(0)
    net = GPT(shape)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net


def ordered(shape: GPTConfig, choice: TokenSampler, guidance: Guidance | None, seed: int = 0) -> DecodeRequest:
    """Two groups of three samples, and as many without a prompt."""
    chance = torch.Generator().manual_seed(seed)
    made: dict[str, Callable[[], Tensor]] = {
        "class": lambda: torch.randint(0, 10, (2,), generator=chance),
        "caption": lambda: torch.randn(2, shape.prefix_length, shape.vocabulary, generator=chance),
        "words": lambda: torch.randint(0, shape.vocabulary, (2, shape.prefix_length), generator=chance),
    }
    cond = made[shape.conditioning]().repeat_interleave(ROWS // 2, 0)
    if guidance:
        cond = torch.cat([cond, torch.full_like(cond, 10) if shape.conditioning == "class" else torch.zeros_like(cond)])
    shown = None
    if shape.conditioning == "caption":
        shown = torch.arange(shape.prefix_length)[None] >= torch.arange(ROWS)[:, None] % 3
        shown = torch.cat([shown, shown]) if guidance else shown
    uniform = Randomness(seed, 0, torch.arange(ROWS)).uniform("token", shape.grid_size**2)
    return DecodeRequest(cond, shown, uniform, choice, guidance)


@torch.no_grad()
def spelled(net: GPT, order: DecodeRequest, instead: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """By one call of the network a token, each half by itself; what is read may be other than what is written."""
    count, length = order.uniform.shape
    ids, log_prob = torch.zeros(count, length, dtype=torch.long), torch.zeros(count, length)
    parts = [slice(0, count), slice(count, None)][: 1 + (order.guidance is not None)]
    caches: list[tuple[tuple[Tensor, Tensor], ...]] = [()] * len(parts)
    for i in range(length):
        logits = []
        for n, part in enumerate(parts):
            shown = None if order.prefix_mask is None else order.prefix_mask[part]
            last = (ids if instead is None else instead)[:, i - 1 : i]
            out, caches[n] = net(last if i else None, None if i else order.cond[part], caches[n], shown)
            logits.append(out[:, -1])
        ids[:, i], log_prob[:, i] = order.sampler.sample(
            order.apply_guidance(torch.cat(logits), i), order.uniform[:, i]
        )
    return ids, log_prob


def written(scribe: StaticKVCacheDecoder | CudaGraphDecoder, length: int) -> tuple[Tensor, Tensor]:
    for _ in range(length):
        scribe.decode_next()
    return scribe.ids, scribe.log_prob


def available_kernels() -> dict[str, DecodeKernels]:
    if not INTERPRETED:
        return {"torch": TorchKernels()}
    from tastemaker.models.nets import decode_kernels

    return {"torch": TorchKernels(), "triton": decode_kernels}


@pytest.fixture(params=["eager", *available_kernels()])
def writer(request: pytest.FixtureRequest) -> Callable[[GPT, DecodeRequest], StaticKVCacheDecoder | CudaGraphDecoder]:
    if request.param == "eager":
        return StaticKVCacheDecoder
    pool = DecoderPool(available_kernels()[request.param])
    return lambda net, decode_request: CudaGraphDecoder(pool, net, decode_request)


@pytest.mark.parametrize("guidance", fast(GUIDANCE, "none", "middle", "rising"))
@pytest.mark.parametrize("shape", fast(SHAPES, "grouped", "caption"))
def test_decoded_tokens_equal_uncached_sampling(
    shape: str, guidance: str, writer: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    sizes = SHAPES[shape]
    net, order = stirred(sizes), ordered(sizes, TokenSampler(0.9, 20), GUIDANCE[guidance])
    ids, log_prob = spelled(net, order)
    found = written(writer(net, order), sizes.grid_size**2)
    assert torch.equal(found[0], ids)
    torch.testing.assert_close(found[1], log_prob, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", [TokenSampler(), TokenSampler(0.7, 0, 0.8), TokenSampler(1.3, 10, 0.5)], ids=str)
def test_decoder_applies_temperature_top_k_and_top_p(
    choice: TokenSampler, writer: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    net, order = stirred(SHAPES["class"]), ordered(SHAPES["class"], choice, Guidance(2.0, interval=(0.5, 1.0)))
    assert torch.equal(written(writer(net, order), 16)[0], spelled(net, order)[0])


@pytest.mark.parametrize("guidance", ["none", "first"])
@pytest.mark.parametrize("after", [0, 3])
def test_replaced_token_is_read_instead_of_the_sampled_one(
    after: int, guidance: str, writer: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    net, order = stirred(SHAPES["grouped"]), ordered(SHAPES["grouped"], TokenSampler(), GUIDANCE[guidance])
    instead = torch.randint(0, 60, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    scribe, kept = writer(net, order), torch.tensor([4, 1])
    for i in range(16):
        if i == after:
            scribe = scribe.select(kept)
        scribe.decode_next()
        scribe.replace_last(instead[kept, i] if i >= after else instead[:, i])
    ids, log_prob = spelled(net, order, instead)
    assert torch.equal(scribe.ids, ids[kept])
    torch.testing.assert_close(scribe.log_prob, log_prob[kept], rtol=1e-4, atol=1e-4)
    assert not torch.equal(ids, spelled(net, order)[0])


def test_second_batch_equals_first(
    writer: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder],
) -> None:
    net, shape = stirred(SHAPES["caption"]), SHAPES["caption"]
    orders = [ordered(shape, TokenSampler(), Guidance(2.0), seed) for seed in (0, 1)]
    for order in orders:
        assert torch.equal(written(writer(net, order), 16)[0], spelled(net, order)[0])


@pytest.mark.parametrize("after", [0, 3])
def test_selected_rows_continue_unchanged(
    after: int, writer: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    net, order = stirred(SHAPES["caption"]), ordered(SHAPES["caption"], TokenSampler(), Guidance(2.0))
    kept = torch.tensor([4, 1])
    scribe = writer(net, order)
    for _ in range(after):
        scribe.decode_next()
    scribe = scribe.select(kept)
    ids, log_prob = spelled(net, order)
    found = written(scribe, 16 - after)
    assert torch.equal(found[0], ids[kept])
    torch.testing.assert_close(found[1], log_prob[kept], rtol=1e-4, atol=1e-4)


def test_interleaved_batches_are_independent(
    writer: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder],
) -> None:
    net, shape = stirred(SHAPES["class"]), SHAPES["class"]
    orders = [ordered(shape, TokenSampler(), None, seed) for seed in (0, 1)]
    scribes = [writer(net, order) for order in orders]
    for _ in range(16):
        for scribe in scribes:
            scribe.decode_next()
    for scribe, order in zip(scribes, orders, strict=True):
        assert torch.equal(scribe.ids, spelled(net, order)[0])


def test_prefill_reads_equal_neighbors_once() -> None:
    net, order = stirred(SHAPES["class"]), ordered(SHAPES["class"], TokenSampler(), Guidance(2.0))
    with torch.no_grad():
        logits, past, number = prefill(net, order)
    assert len(past[0][0]) == 3 and number.tolist() == [0] * 3 + [1] * 3 + [2] * 6
    assert logits.shape == (2 * ROWS, 60)


def test_unconditional_rows_are_skipped_after_last_guided_token() -> None:
    assert count_guided_tokens(Guidance(3.0, interval=(0.5, 1.0)), 16) == 9
    assert count_guided_tokens(Guidance(3.0), 16) == 16
    assert count_guided_tokens(Guidance(3.0, interval=(0.97, 0.98)), 16) == 0
    net, seen = stirred(SHAPES["class"]), list[int]()
    net.tok_embeddings.register_forward_hook(lambda _, given, out: seen.append(len(out)))
    written(StaticKVCacheDecoder(net, ordered(SHAPES["class"], TokenSampler(), Guidance(3.0, interval=(0.5, 1.0)))), 16)
    assert seen == [2 * ROWS] * 8 + [ROWS] * 7


def test_fused_weights_share_storage_and_train() -> None:
    net = stirred(SHAPES["class"])
    before = {key: x.clone() for key, x in net.state_dict().items()}
    plain = copy.deepcopy(net)
    CudaGraphDecoder(DecoderPool(TorchKernels()), net, ordered(SHAPES["class"], TokenSampler(), None))
    forward = net.layers[0].feed_forward
    assert forward.w1.weight.untyped_storage().data_ptr() == forward.w3.weight.untyped_storage().data_ptr()
    assert all(torch.equal(x, before[key]) for key, x in net.state_dict().items())
    ids, cond = torch.arange(15)[None], torch.tensor([3])
    for each in (net, plain):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-3)
        each(ids, cond)[0].square().mean().backward()
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(net.parameters(), plain.parameters(), strict=True))
