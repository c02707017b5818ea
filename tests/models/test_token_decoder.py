"""Token decoders sample the same tokens as one call of the network per token."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable

import numpy
import pytest
import torch
from tiers import fast
from torch import Tensor, nn

from tastemaker.core.distributions import TokenSampler
from tastemaker.core.guidance import count_guided_tokens
from tastemaker.core.policy import Guidance
from tastemaker.core.quantization import Kind, expand, quantize_rows
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.models.nets.cuda_graph_decoder import CudaGraphDecoder, DecodeKernels, DecoderPool, TorchKernels
from tastemaker.models.nets.decode_weights import SQUARES_GROUP, InputNorm
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest, StaticKVCacheDecoder, prefill

# Triton interprets kernels on the CPU if TRITON_INTERPRET is set; a test then takes about half a minute.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
CONFIGS = {
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
BATCH_SIZE = 6
KINDS = pytest.mark.parametrize("kind", ["int8", "fp8"])


def random_gpt(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    net = GPT(config)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net


def make_request(config: GPTConfig, sampler: TokenSampler, guidance: Guidance | None, seed: int = 0) -> DecodeRequest:
    """A request for two groups of three samples, followed by their unconditional rows if guided."""
    generator = torch.Generator().manual_seed(seed)
    conditionings: dict[str, Callable[[], Tensor]] = {
        "class": lambda: torch.randint(0, 10, (2,), generator=generator),
        "caption": lambda: torch.randn(2, config.prefix_length, config.vocabulary, generator=generator),
        "words": lambda: torch.randint(0, config.vocabulary, (2, config.prefix_length), generator=generator),
    }
    cond = conditionings[config.conditioning]().repeat_interleave(BATCH_SIZE // 2, 0)
    if guidance:
        cond = torch.cat(
            [cond, torch.full_like(cond, 10) if config.conditioning == "class" else torch.zeros_like(cond)]
        )
    prefix_mask = None
    if config.conditioning == "caption":
        prefix_mask = torch.arange(config.prefix_length)[None] >= torch.arange(BATCH_SIZE)[:, None] % 3
        prefix_mask = torch.cat([prefix_mask, prefix_mask]) if guidance else prefix_mask
    uniform = Randomness(seed, 0, torch.arange(BATCH_SIZE)).uniform("token", config.grid_size**2)
    return DecodeRequest(cond, prefix_mask, uniform, sampler, guidance)


@torch.no_grad()
def decode_eagerly(net: GPT, request: DecodeRequest, replacement: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities from one network call per token, conditional and unconditional rows apart.

    With `replacement`, the network reads these tokens as inputs instead of the sampled ones.
    """
    batch_size, length = request.uniform.shape
    ids, log_prob = torch.zeros(batch_size, length, dtype=torch.long), torch.zeros(batch_size, length)
    halves = [slice(0, batch_size), slice(batch_size, None)][: 1 + (request.guidance is not None)]
    caches: list[tuple[tuple[Tensor, Tensor], ...]] = [()] * len(halves)
    for i in range(length):
        logits = []
        for n, half in enumerate(halves):
            prefix_mask = None if request.prefix_mask is None else request.prefix_mask[half]
            last = (ids if replacement is None else replacement)[:, i - 1 : i]
            out, caches[n] = net(last if i else None, None if i else request.cond[half], caches[n], prefix_mask)
            logits.append(out[:, -1])
        ids[:, i], log_prob[:, i] = request.sampler.sample(
            request.apply_guidance(torch.cat(logits), i), request.uniform[:, i]
        )
    return ids, log_prob


def decode_all(decoder: StaticKVCacheDecoder | CudaGraphDecoder, length: int) -> tuple[Tensor, Tensor]:
    for _ in range(length):
        decoder.decode_next()
    return decoder.ids, decoder.log_prob


class FusedTorchKernels(TorchKernels):
    """Norms as parts of products, as Triton has them for few rows."""

    MAX_FUSED_ROWS = 32


def available_kernels() -> dict[str, DecodeKernels]:
    kernels: dict[str, DecodeKernels] = {"torch": TorchKernels(), "fused": FusedTorchKernels()}
    if INTERPRETED:
        from tastemaker.models.nets import decode_kernels

        kernels["triton"] = decode_kernels
    return kernels


@pytest.fixture(params=["eager", *available_kernels()])
def make_decoder(
    request: pytest.FixtureRequest,
) -> Callable[[GPT, DecodeRequest], StaticKVCacheDecoder | CudaGraphDecoder]:
    if request.param == "eager":
        return StaticKVCacheDecoder
    pool = DecoderPool(available_kernels()[request.param])
    return lambda net, decode_request: CudaGraphDecoder(pool, net, decode_request)


@pytest.mark.parametrize("guidance", fast(GUIDANCE, "none", "middle", "rising"))
@pytest.mark.parametrize("shape", fast(CONFIGS, "grouped", "caption"))
def test_decoded_tokens_equal_uncached_sampling(
    shape: str, guidance: str, make_decoder: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    config = CONFIGS[shape]
    net, request = random_gpt(config), make_request(config, TokenSampler(0.9, 20), GUIDANCE[guidance])
    ids, log_prob = decode_eagerly(net, request)
    decoded = decode_all(make_decoder(net, request), config.grid_size**2)
    assert torch.equal(decoded[0], ids)
    torch.testing.assert_close(decoded[1], log_prob, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", [TokenSampler(), TokenSampler(0.7, 0, 0.8), TokenSampler(1.3, 10, 0.5)], ids=str)
def test_decoder_applies_temperature_top_k_and_top_p(
    sampler: TokenSampler, make_decoder: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    net, request = (
        random_gpt(CONFIGS["class"]),
        make_request(CONFIGS["class"], sampler, Guidance(2.0, interval=(0.5, 1.0))),
    )
    assert torch.equal(decode_all(make_decoder(net, request), 16)[0], decode_eagerly(net, request)[0])


@pytest.mark.parametrize("guidance", ["none", "first"])
@pytest.mark.parametrize("select_at", [0, 3])
def test_replaced_token_is_read_instead_of_the_sampled_one(
    select_at: int, guidance: str, make_decoder: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    net, request = random_gpt(CONFIGS["grouped"]), make_request(CONFIGS["grouped"], TokenSampler(), GUIDANCE[guidance])
    replacement = torch.randint(0, 60, (BATCH_SIZE, 16), generator=torch.Generator().manual_seed(0))
    decoder, kept = make_decoder(net, request), torch.tensor([4, 1])
    for i in range(16):
        if i == select_at:
            decoder = decoder.select(kept)
        decoder.decode_next()
        decoder.replace_last(replacement[kept, i] if i >= select_at else replacement[:, i])
    ids, log_prob = decode_eagerly(net, request, replacement)
    assert torch.equal(decoder.ids, ids[kept])
    torch.testing.assert_close(decoder.log_prob, log_prob[kept], rtol=1e-4, atol=1e-4)
    assert not torch.equal(ids, decode_eagerly(net, request)[0])


def test_every_batch_of_a_decoder_pool_equals_uncached_sampling(
    make_decoder: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder],
) -> None:
    net, config = random_gpt(CONFIGS["caption"]), CONFIGS["caption"]
    requests = [make_request(config, TokenSampler(), Guidance(2.0), seed) for seed in (0, 1)]
    for request in requests:
        assert torch.equal(decode_all(make_decoder(net, request), 16)[0], decode_eagerly(net, request)[0])


@pytest.mark.parametrize("num_steps", [0, 3])
def test_selected_rows_continue_unchanged(
    num_steps: int, make_decoder: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder]
) -> None:
    net, request = random_gpt(CONFIGS["caption"]), make_request(CONFIGS["caption"], TokenSampler(), Guidance(2.0))
    kept = torch.tensor([4, 1])
    decoder = make_decoder(net, request)
    for _ in range(num_steps):
        decoder.decode_next()
    decoder = decoder.select(kept)
    ids, log_prob = decode_eagerly(net, request)
    decoded = decode_all(decoder, 16 - num_steps)
    assert torch.equal(decoded[0], ids[kept])
    torch.testing.assert_close(decoded[1], log_prob[kept], rtol=1e-4, atol=1e-4)


def test_interleaved_batches_are_independent(
    make_decoder: Callable[..., StaticKVCacheDecoder | CudaGraphDecoder],
) -> None:
    net, config = random_gpt(CONFIGS["class"]), CONFIGS["class"]
    requests = [make_request(config, TokenSampler(), None, seed) for seed in (0, 1)]
    decoders = [make_decoder(net, request) for request in requests]
    for _ in range(16):
        for decoder in decoders:
            decoder.decode_next()
    for decoder, request in zip(decoders, requests, strict=True):
        assert torch.equal(decoder.ids, decode_eagerly(net, request)[0])


def test_prefill_reads_equal_neighbors_once() -> None:
    net, request = random_gpt(CONFIGS["class"]), make_request(CONFIGS["class"], TokenSampler(), Guidance(2.0))
    with torch.no_grad():
        logits, past, number = prefill(net, request)
    assert len(past[0][0]) == 3 and number.tolist() == [0] * 3 + [1] * 3 + [2] * 6
    assert logits.shape == (2 * BATCH_SIZE, 60)


def test_unconditional_rows_are_skipped_after_last_guided_token() -> None:
    assert count_guided_tokens(Guidance(3.0, interval=(0.5, 1.0)), 16) == 9
    assert count_guided_tokens(Guidance(3.0), 16) == 16
    assert count_guided_tokens(Guidance(3.0, interval=(0.97, 0.98)), 16) == 0
    net, batch_sizes = random_gpt(CONFIGS["class"]), list[int]()
    net.tok_embeddings.register_forward_hook(lambda _, inputs, out: batch_sizes.append(len(out)))
    decode_all(
        StaticKVCacheDecoder(net, make_request(CONFIGS["class"], TokenSampler(), Guidance(3.0, interval=(0.5, 1.0)))),
        16,
    )
    assert batch_sizes == [2 * BATCH_SIZE] * 8 + [BATCH_SIZE] * 7


def test_fused_weights_share_storage_and_train() -> None:
    net = random_gpt(CONFIGS["class"])
    before = {key: x.clone() for key, x in net.state_dict().items()}
    plain = copy.deepcopy(net)
    CudaGraphDecoder(DecoderPool(TorchKernels()), net, make_request(CONFIGS["class"], TokenSampler(), None))
    forward = net.layers[0].feed_forward
    assert forward.w1.weight.untyped_storage().data_ptr() == forward.w3.weight.untyped_storage().data_ptr()
    assert all(torch.equal(x, before[key]) for key, x in net.state_dict().items())
    ids, cond = torch.arange(15)[None], torch.tensor([3])
    for each in (net, plain):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-3)
        each(ids, cond)[0].square().mean().backward()
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(net.parameters(), plain.parameters(), strict=True))


@torch.no_grad()
def rounded(net: GPT, kind: Kind) -> GPT:
    """A copy of the network whose blocks have the rounded weights."""
    net = copy.deepcopy(net)
    for module in net.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(expand(*quantize_rows(module.weight, kind), torch.float32))
    return net


def decode_8bit(net: GPT, request: DecodeRequest, kind: Kind, kernels: str = "torch") -> CudaGraphDecoder:
    """A decoder that has decoded all tokens, within a rollout."""
    net.rollout_kind = kind
    with ROLLOUTS.calls():
        decoder = DecoderPool(available_kernels()[kernels]).make_decoder(net, request)
    assert isinstance(decoder, CudaGraphDecoder) and decoder.low_precision
    decode_all(decoder, request.uniform.shape[1])
    return decoder


@KINDS
@pytest.mark.parametrize("kernels", available_kernels())
@pytest.mark.parametrize(("shape", "guidance"), [("grouped", "none"), ("caption", "middle")])
def test_decoder_samples_from_the_rounded_network(kind: Kind, kernels: str, shape: str, guidance: str) -> None:
    """Blocks are rounded for image tokens; prompts and the head keep their precision."""
    net, request = random_gpt(CONFIGS[shape]), make_request(CONFIGS[shape], TokenSampler(0.9, 20), GUIDANCE[guidance])
    reference = StaticKVCacheDecoder(net, request)
    reference.net = rounded(net, kind)
    ids, log_prob = decode_all(reference, 16)
    decoder = decode_8bit(net, request, kind, kernels)
    assert torch.equal(decoder.ids, ids)
    torch.testing.assert_close(decoder.log_prob, log_prob, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.05), ("fp8", 0.2)])
def test_log_probs_are_near_those_of_the_exact_network(kind: Kind, bound: float) -> None:
    """Both decoders read the same tokens, so that only the rounding differs."""
    net, request = random_gpt(CONFIGS["class"]), make_request(CONFIGS["class"], TokenSampler(), None)
    low = decode_8bit(net, request, kind)
    with torch.no_grad():
        logits = net(low.ids[:, :-1], request.cond)[0]
    exact = logits.log_softmax(-1).gather(2, low.ids[..., None])[..., 0]
    difference = (low.log_prob - exact).abs()
    assert 1e-3 < difference.mean() < bound
    torch.testing.assert_close(low.log_prob[:, 0], exact[:, 0], rtol=1e-4, atol=1e-4)  # from the exact prompt


def test_only_rollouts_decode_in_8_bits() -> None:
    net, request = random_gpt(CONFIGS["class"]), make_request(CONFIGS["class"], TokenSampler(), None)
    net.rollout_kind = "int8"
    pool = DecoderPool()
    assert isinstance(pool.make_decoder(net, request), StaticKVCacheDecoder)
    with ROLLOUTS.exact(), ROLLOUTS.calls():
        assert isinstance(pool.make_decoder(net, request), StaticKVCacheDecoder)
    with ROLLOUTS.calls():
        decoder = pool.make_decoder(net, request)
    assert decoder is not None and decoder.low_precision
    decoder.decode_next()
    assert decoder.select(torch.tensor([4, 1])).low_precision  # also outside of the block


@KINDS
@pytest.mark.parametrize("kernels", available_kernels())
@pytest.mark.parametrize("shape", [(3, 96, 40), (40, 300, 70), (130, 64, 48)])
def test_8bit_product_multiplies_the_expanded_weight(kind: Kind, kernels: str, shape: tuple[int, int, int]) -> None:
    rows, width, height = shape
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(2 * height, width, generator=generator)
    numbers, scale = quantize_rows(weight * torch.logspace(-2, 2, 2 * height)[:, None], kind)
    exact = x.double() @ (numbers.double() * scale.double()).t()
    out, chosen = torch.empty(rows, 2 * height), available_kernels()[kernels]
    chosen.linear(x, numbers, out, scale=scale)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-6 * exact.abs().max().item())
    gated, (first, second) = torch.empty(rows, height), exact.chunk(2, 1)
    chosen.gated_linear(x, numbers, gated, scale=scale)
    expected = nn.functional.silu(first) * second
    torch.testing.assert_close(gated.double(), expected, rtol=1e-3, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("kernels", available_kernels())
@pytest.mark.parametrize("shape", [(3, 96, 40), (20, 600, 200)])
def test_products_add_to_the_residual_stream_and_normalize_it(kernels: str, shape: tuple[int, int, int]) -> None:
    """The input of the second product is the norm of what the first one wrote."""
    rows, width, height = shape
    generator = torch.Generator().manual_seed(0)
    h, x = torch.randn(rows, height, generator=generator), torch.randn(rows, width, generator=generator)
    first = torch.randn(height, width, generator=generator)
    second = torch.randn(2 * width, height, generator=generator)
    weight, chosen = torch.rand(height, generator=generator), available_kernels()[kernels]
    added, squares = h.clone(), torch.full((rows, -(-height // SQUARES_GROUP)), torch.nan)
    chosen.add_linear(x, first, added, squares)
    expected = h.double() + x.double() @ first.double().t()
    torch.testing.assert_close(added.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares.sum(1).double(), expected.square().sum(1), rtol=1e-4, atol=0.0)
    out, gated, norm = torch.empty(rows, 2 * width), torch.empty(rows, width), InputNorm(weight, squares, 1e-5)
    chosen.linear(added, second, out, norm=norm)
    chosen.gated_linear(added, second, gated, norm=norm)
    normed = nn.functional.rms_norm(expected, (height,), eps=1e-5) * weight.double()
    expected = normed @ second.double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-3)
    values, factors = expected.chunk(2, 1)
    torch.testing.assert_close(gated.double(), nn.functional.silu(values) * factors, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kernels", available_kernels())
def test_embedding_advances_the_position(kernels: str) -> None:
    embeddings, ids = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)), torch.tensor([8, 0, 3])
    position, h, squares = torch.tensor([6], dtype=torch.int32), torch.empty(3, 40), torch.empty(3, 3)
    available_kernels()[kernels].embed(embeddings, ids, position, h, squares)
    assert position.item() == 7 and torch.equal(h, embeddings[ids])
    torch.testing.assert_close(squares.sum(1), embeddings[ids].square().sum(1))


@pytest.mark.skipif(not INTERPRETED, reason="Triton's kernels need a GPU or its interpreter")
def test_sampling_kernel_keeps_the_top_k() -> None:
    """Equal logits at the bound are all kept, and tokens and log-probabilities are those of the sampler."""
    from tastemaker.models.nets import decode_kernels

    generator = torch.Generator().manual_seed(0)
    plain = 3 * torch.randn(6, 300, generator=generator)
    tied = torch.randint(-2, 3, (6, 300), generator=generator).float()
    tail = torch.cat([plain[:, :290] * 1e-30, 1e6 * plain[:, 290:]], 1)
    for logits, top_k in ((plain, 20), (plain, 1), (plain, 299), (tied, 20), (tail, 100), (-tail.exp(), 7)):
        uniform = torch.rand(6, 1, generator=generator)
        ids, log_prob = torch.zeros(6, 1, dtype=torch.long), torch.zeros(6, 1)
        state = (uniform, ids, log_prob, torch.zeros(6, dtype=torch.long), torch.zeros(1, dtype=torch.int32))
        with numpy.errstate(all="ignore"):  # some logits are infinite
            decode_kernels.sample(logits, *state, prefix=1, scale=None, rescale=False, temperature=1.0, top_k=top_k)
        expected = TokenSampler(1.0, top_k).sample(logits, uniform[:, 0])
        assert torch.equal(ids[:, 0], expected[0]), top_k
        torch.testing.assert_close(log_prob[:, 0], expected[1], rtol=1e-4, atol=1e-4)


def test_networks_with_other_embeddings_are_refused() -> None:
    net, request = random_gpt(CONFIGS["class"]), make_request(CONFIGS["class"], TokenSampler(), None)
    net.rollout_kind = "fp8"
    net.tok_embeddings = nn.Sequential(net.tok_embeddings)  # type: ignore[assignment]
    with ROLLOUTS.calls(), pytest.raises(ConfigError, match=r"engine\.rollout_precision: fp8.*TM2690"):
        DecoderPool().make_decoder(net, request)
    assert isinstance(DecoderPool().make_decoder(net, request), StaticKVCacheDecoder)
