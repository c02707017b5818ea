"""LlamaGen's sampler by torch.compile with a static KV cache, as gpt-fast does it, against our CUDA-graph decoder.

The compiled step is our own network read with one new token per row: keys and values go into preallocated caches by
`index_copy_`, attention covers the whole cache under a mask, both halves of guidance share a batch, and the next token
is drawn by the same sampler from the same uniform numbers. All state is in buffers, so that `mode="reduce-overhead"`
can replay the step as one CUDA graph. On a CPU nothing is captured.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from device import CUDA, median_seconds, reset_memory, synchronize  # beside this file, in no package
from llamagen_networks import LlamagenOptions, build_gpt, decode_all, gpt_config, make_request
from sections import Record, log
from torch import Tensor, nn

from tastemaker.core.guidance import apply_guidance
from tastemaker.core.policy import Guidance
from tastemaker.models.nets.cuda_graph_decoder import DecoderPool
from tastemaker.models.nets.gpt import GPT, GPTBlock, GPTConfig, apply_rotary_emb
from tastemaker.models.nets.token_decoder import DecodeRequest, prefill


class StaticCacheLayer(nn.Module):
    """A transformer block that reads one token per row; its keys and values are buffers [R, kv heads, L, head]."""

    keys: Tensor
    values: Tensor

    def __init__(self, block: GPTBlock, config: GPTConfig, rows: int) -> None:
        super().__init__()
        self.block = block
        like = block.attention.wqkv.weight
        size = (rows, block.attention.kv_heads, config.prefix_length + config.grid_size**2, config.head_dim)
        self.register_buffer("keys", like.new_zeros(size))
        self.register_buffer("values", like.new_zeros(size))

    def forward(self, h: Tensor, rotary: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        attention, rows = self.block.attention, len(h)
        heads, kv_heads = attention.heads, attention.kv_heads
        qkv = attention.wqkv(self.block.attention_norm(h)).view(rows, 1, heads + 2 * kv_heads, attention.head)
        rotated = apply_rotary_emb(qkv[:, :, : heads + kv_heads], rotary)
        q, k = (part.transpose(1, 2) for part in rotated.tensor_split([heads], 2))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, qkv[:, :, heads + kv_heads :].transpose(1, 2))
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, mask, enable_gqa=heads != kv_heads)
        h = h + attention.wo(mixed.transpose(1, 2).reshape(rows, 1, -1))
        return h + self.block.feed_forward(self.block.ffn_norm(h))


class StaticCacheSampler(nn.Module):
    """Samples all tokens of a request, guided throughout, one call of `step` per token."""

    position: Tensor
    uniform: Tensor
    ids: Tensor
    last: Tensor
    rotary: Tensor

    def __init__(self, net: GPT, request: DecodeRequest) -> None:
        super().__init__()
        assert request.guidance is not None and all(request.guided_tokens), "only guidance of all tokens is compared"
        self.net, self.request, self.config = net, request, net.config
        blocks = [block for block in net.layers if isinstance(block, GPTBlock)]
        self.caches = nn.ModuleList(StaticCacheLayer(block, net.config, len(request.cond)) for block in blocks)
        self.register_buffer("position", torch.zeros(1, dtype=torch.long, device=request.uniform.device))
        self.register_buffer("uniform", request.uniform.clone())
        self.register_buffer("ids", torch.zeros_like(request.uniform, dtype=torch.long))
        self.register_buffer("last", torch.zeros(len(request.cond), dtype=torch.long, device=request.uniform.device))
        self.register_buffer("rotary", net.rotary_factors)

    def step(self) -> None:
        """Read the last token of every row at `position` and sample the next one."""
        self.draw(self.read(), self.position - self.config.prefix_length + 1)
        self.position.add_(1)

    def read(self) -> Tensor:
        """Read the last token of every row at `position`: logits [R, V] of the next one."""
        position = self.position
        rotary = self.rotary.index_select(1, position)
        positions = torch.arange(self.caches[0].keys.shape[2], device=position.device)  # type: ignore[union-attr]
        mask = (positions <= position)[None, None, None]
        h = self.net.tok_embeddings(self.last[:, None])
        for cache in self.caches:
            h = cache(h, rotary, mask, position)
        return self.net.output(self.net.norm(h))[:, 0].float()  # type: ignore[no-any-return]

    def draw(self, logits: Tensor, number: Tensor) -> None:
        """Sample token `number` [1] of every row from guided logits."""
        cond, uncond = logits.chunk(2)
        assert self.request.guidance is not None
        guided = apply_guidance(self.request.guidance, cond, uncond, 1 - number / self.uniform.shape[1])
        token, _ = self.request.sampler.sample(guided, self.uniform.index_select(1, number)[:, 0])
        self.ids.index_copy_(1, number, token[:, None])
        self.last.copy_(token.repeat(2))

    @torch.no_grad()
    def sample(self, request: DecodeRequest, step: Any) -> Tensor:
        """Prefill, then every token but the first by `step`: [B, L]."""
        logits, past, number = prefill(self.net, request)
        for cache, (keys, values) in zip(self.caches, past, strict=True):
            cache.keys[:, :, : keys.shape[2]] = keys[number]  # type: ignore[index, operator]
            cache.values[:, :, : values.shape[2]] = values[number]  # type: ignore[index, operator]
        self.uniform.copy_(request.uniform)
        self.position.fill_(self.config.prefix_length)
        self.draw(logits, torch.zeros(1, dtype=torch.long, device=logits.device))
        for _ in range(self.uniform.shape[1] - 1):
            torch.compiler.cudagraph_mark_step_begin()
            step()
        return self.ids.clone()


def compile_step(section: str, sampler: StaticCacheSampler, request: DecodeRequest) -> tuple[Any, Tensor, float]:
    """Return the compiled step, the tokens of its first request, and the seconds of compilation.

    If Inductor cannot compile the whole step (PyTorch 2.11 fails on the sampler), only the network is compiled and
    tokens are sampled eagerly.
    """
    whole = torch.compile(sampler.step, mode="reduce-overhead", fullgraph=True)
    read = torch.compile(sampler.read, mode="reduce-overhead", fullgraph=True)

    def split() -> None:
        sampler.draw(read().clone(), sampler.position - sampler.config.prefix_length + 1)
        sampler.position.add_(1)

    for step, what in ((whole, "network and sampler"), (split, "network only")):
        start = time.perf_counter()
        try:
            tokens = sampler.sample(request, step)
        except torch._dynamo.exc.BackendCompilerFailed as error:  # base class of InductorError
            log(section, f"{what}: {str(error).splitlines()[0][:150]}")
            continue
        synchronize()
        log(section, f"compiled: {what}")
        return step, tokens, time.perf_counter() - start
    raise RuntimeError("torch.compile failed on the whole step and on the network alone")


def compare_with_compile(section: str, options: LlamagenOptions, record: Record) -> None:
    """Record seconds per batch of both samplers, their ratio, and the share of equal tokens."""
    size, num_images = section.removeprefix("compile-"), 2 if options.tiny else 8
    config, guidance = gpt_config(size, options.tiny), Guidance(4.0)
    net = build_gpt(config, torch.bfloat16 if CUDA else torch.float32)
    request, length = make_request(config, num_images, guidance), config.grid_size**2
    pool = DecoderPool()
    expected = decode_all(pool.make_decoder(net, request), length)
    decoder_seconds = median_seconds(lambda: decode_all(pool.make_decoder(net, request), length))
    log(section, f"CUDA-graph decoder: {decoder_seconds:.3f} s, {1000 * decoder_seconds / length:.3f} ms per step")
    pool.runners.clear()
    reset_memory()
    sampler = StaticCacheSampler(net, request)
    step, tokens, compiling = compile_step(section, sampler, request)
    compiled_seconds = median_seconds(lambda: sampler.sample(request, step))
    equal = (tokens == expected).float().mean().item()
    ratio = compiled_seconds / decoder_seconds
    log(
        section,
        f"torch.compile: {compiled_seconds:.3f} s after {compiling:.0f} s of compilation; {equal:.2%} of tokens equal",
    )
    log(section, f"torch.compile takes {ratio:.2f} times as long as the CUDA-graph decoder")
    record(
        {
            "section": section,
            "decoder seconds": decoder_seconds,
            "compiled seconds": compiled_seconds,
            "ratio": ratio,
            "compilation seconds": compiling,
            "compiled tokens equal": equal,
        }
    )
