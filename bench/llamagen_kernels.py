"""What a step of LlamaGen's sampler is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from device import CUDA, copied, seconds, settle  # beside this file, in no package
from llamagen_networks import Options, finish, network, ordered, shaped
from sections import Keep, say

from tastemaker.core.policy import Guidance
from tastemaker.models.nets.decoder_pool import CudaGraphDecoder, DecoderPool
from tastemaker.models.nets.token_decoder import StaticKVCacheDecoder

# Stages, numbers and warps of a tile.
READING = [
    (1, 4096, 4),
    (2, 4096, 4),
    (4, 4096, 4),
    (1, 8192, 8),
    (3, 8192, 8),
    (2, 2048, 2),
    (4, 2048, 2),
    (3, 4096, 4),
]
OPENING = [(16, 128, 4), (16, 128, 6), (16, 256, 4), (32, 128, 4), (32, 64, 6)]  # columns, depth and stages


def parts(section: str, options: Options, keep: Keep) -> None:
    """What a step is made of, each part many times in a graph; and how deep attention reads ahead."""
    keep({"section": section, "name": "copy, TB/s", "ms": copied() / 1e12})
    for size, images in (("XL", 8), ("XXL", 64)):
        shape = shaped(size, options.tiny)
        net = network(shape, torch.bfloat16 if CUDA else torch.float32)
        desk = DecoderPool()
        order = ordered(shape, 2 if options.tiny else images, Guidance(4.0))
        if not CUDA:
            finish(StaticKVCacheDecoder(net, order), shape.side**2)
            keep({"section": section, "name": f"{size}: a step by hand", "ms": 0.0})
            continue
        machine = CudaGraphDecoder(desk, net, order).typewriter
        machine.place.fill_(shape.prefix + shape.side**2 // 2)
        for name, work in pieces(machine).items():
            spent = repeated(work)
            say(section, f"{size}, {len(machine.last)} rows, {name}: {1e6 * spent:.1f} us")
            keep({"section": section, "name": f"{size} {len(machine.last)} rows: {name}", "ms": 1000 * spent})


def pieces(machine: Any) -> dict[str, Callable[[], Any]]:
    from tastemaker.models.nets import decode_kernels_triton

    net, layer, place = machine.net, machine.matrices.layers[0], machine.place
    normed, qkv, mixed, out, opened, hidden, logits = machine.sheets
    turn = iter(range(10**9))
    layers = machine.matrices.layers

    def other() -> Any:
        return layers[next(turn) % len(layers)]  # another matrix each time, or the cache would be measured

    def attend(stages: int, tile: int, warps: int) -> Callable[[], None]:
        def work() -> None:
            decode_kernels_triton.STAGES, decode_kernels_triton.TILE, decode_kernels_triton.WARPS = stages, tile, warps
            decode_kernels_triton.attend(
                qkv, machine.cache, next(turn) % len(layers), None, machine.factors, place, mixed, net.shape.heads
            )

        return work

    def open_(columns: int, deep: int, stages: int) -> Callable[[], None]:
        return lambda: decode_kernels_triton.opened(normed, other().opened, hidden, columns, deep, stages)

    prefix, choice = net.shape.prefix, machine.order.choice
    chosen = {"scale": 4.0, "rescaled": False, "temperature": 1.0, "top_k": choice.top_k}
    state = (machine.uniform, machine.ids, machine.log_prob, machine.last, place)
    return {
        "add and norm": lambda: decode_kernels_triton.add_norm(machine.stream, out, layer.first_norm, normed, 1e-5),
        "wqkv": lambda: torch.mm(normed, other().wqkv.t(), out=qkv),
        **{f"attention, {a} ahead, tiles of {b}, {c} warps": attend(a, b, c) for a, b, c in READING},
        "wo": lambda: torch.mm(mixed, other().wo.t(), out=out),
        "w1 and w3": lambda: torch.mm(normed, other().opened.t(), out=opened),
        "gate": lambda: decode_kernels_triton.gate(opened, hidden),
        **{f"w1, w3 and gate, {a} columns, {b} deep": open_(a, b, c) for a, b, c in OPENING},
        "w2": lambda: torch.mm(hidden, other().w2.t(), out=out),
        "output": lambda: torch.mm(normed, machine.matrices.output.t(), out=logits),
        "choice": lambda: decode_kernels_triton.choose(logits, *state, prefix=prefix, **chosen),
    }


def repeated(work: Callable[[], Any], times: int = 50) -> float:
    """Seconds of one of many calls in a graph."""
    work()
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return seconds(graph.replay, 5) / times
