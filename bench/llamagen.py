"""Speed of LlamaGen's sampling and of its GRPO steps with random weights, against a plain implementation.

    python bench/llamagen.py --out llamagen.json         # on a GPU of at least 100 GiB
    python bench/llamagen.py --tiny --out tiny.json      # small networks, on any machine
    python bench/llamagen.py --sections compile-B,compile-XL,compile-3B  # against torch.compile
    python bench/llamagen.py --sections kernels-fp8,B-fp8,XXL-fp8,XXL-64-fp8  # 8-bit weights against bf16

A step reads all weights but the embeddings, and the cached keys and values. For 8 guided images of 576 tokens in
bfloat16 that is on average 0.36 (B), 1.1 (L), 2.4 (XL), 4.1 (XXL) and 7.5 GB (3B), so that a batch takes at least 0.05,
0.15, 0.31, 0.55 and 1.0 s at 4.3 TB/s; 64 guided images of XXL read 13.6 GB per step: 1.8 s per batch.
Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device import (  # beside this file, in no package
    CUDA,
    DEVICE,
    copy_bandwidth,
    median_seconds,
    peak_gib,
    print_header,
    reset_memory,
    seconds_in_graph,
    synchronize,
)
from llamagen_8bit import measure_8bit_kernels, measure_8bit_sampling
from llamagen_compile import compare_with_compile
from llamagen_grpo import measure_grpo
from llamagen_networks import LlamagenOptions, build_gpt, bytes_per_batch, decode_all, gpt_config, make_request
from sections import Record, Results, log, result_writer, run_sections, section_parser
from torch import Tensor

from tastemaker.core.distributions import Categorical
from tastemaker.core.guidance import apply_guidance
from tastemaker.core.policy import Guidance
from tastemaker.models.nets.cuda_graph_decoder import CudaGraphDecoder, DecodeGraphRunner, DecoderPool
from tastemaker.models.nets.decode_weights import InputNorm
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest, StaticKVCacheDecoder

SECTIONS = {  # seconds
    "kernels": 60, "agreement": 60, "B": 50, "L": 45, "XL": 45, "XXL": 60, "3B": 60, "XXL-64": 50, "grpo": 110,
}  # fmt: skip
COMPILE_SECTIONS = {f"compile-{size}": 200 for size in ("B", "L", "XL", "XXL", "3B")}  # not by default
EIGHT_BIT_SECTIONS = {  # not by default
    f"{name}-{kind}": 90 for kind in ("fp8", "int8") for name in ("kernels", "B", "XL", "XXL", "3B", "XXL-64")
}
TARGET_SECONDS = {"B": 0.18}  # for 8 images
TARGET_SHARES = {"XXL": 0.55}  # of the bandwidth of a copy, for 8 images
PUBLISHED = {"B": 7.7, "L": 14.6, "XL": 26.2, "XXL": 36.5, "3B": 19.7}  # seconds of the published code on an H200
H200_BANDWIDTH = 4.8e12  # bytes per second, by the data sheet
ATTENTION_TILINGS = [  # stages, elements and warps
    (1, 4096, 4), (2, 4096, 4), (4, 4096, 4), (1, 8192, 8), (3, 8192, 8), (2, 2048, 2), (4, 2048, 2), (3, 4096, 4),
]  # fmt: skip
GATED_TILINGS = [
    (32, 128, 3),
    (16, 128, 4),
    (16, 256, 3),
    (32, 128, 4),
    (32, 128, 3, 8),
]  # columns, depth, stages, warps
LINEAR_TILINGS = [(16, 256, 4), (16, 256, 3), (32, 256, 3), (32, 128, 4), (32, 256, 3, 8)]


def measure_sampling(section: str, options: LlamagenOptions, record: Record) -> None:
    """Time a batch of images with our decoder and with the plain implementation."""
    size, _, count = section.partition("-")
    num_images = (4 if options.tiny else int(count)) if count else (2 if options.tiny else 8)
    config, dtype = gpt_config(size, options.tiny), torch.bfloat16 if CUDA else torch.float32
    measure_decoder(section, config, dtype, num_images, record)
    if count or time.monotonic() > options.deadline - 15:
        return
    reset_memory()
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    from plain_llamagen import measure

    length = config.grid_size**2
    sizes = (config.width, config.depth, config.heads, config.intermediate_size)
    sizes += (config.codebook_size, config.grid_size, config.vocabulary)
    num_tokens = length if options.tiny or size == "B" else length // 8
    plain = measure(sizes, DEVICE, dtype, num_images, num_tokens)
    log(section, f"plain: {plain['seconds']:.2f} s, extrapolated from {num_tokens} of {length} tokens")
    record({"section": section, "plain": plain["seconds"], "tokens measured": plain["tokens measured"]})


def measure_decoder(section: str, config: GPTConfig, dtype: torch.dtype, num_images: int, record: Record) -> None:
    net, pool, guidance = build_gpt(config, dtype), DecoderPool(), Guidance(4.0)
    length, bandwidth = config.grid_size**2, copy_bandwidth()

    def sample(guidance: Guidance, seed: int = 0) -> Tensor:
        return decode_all(pool.make_decoder(net, make_request(config, num_images, guidance, seed)), length)

    reset_memory()
    start = time.perf_counter()
    sample(guidance)
    synchronize()
    log(section, f"first batch, with kernel compilation and graph capture: {time.perf_counter() - start:.1f} s")
    seconds = median_seconds(lambda: sample(guidance, seed=1))
    rate = bytes_per_batch(net, 2 * num_images) / seconds
    caches = [runner.cache for runner in pool.runners.values()]
    result = {
        "section": section,
        "images": num_images,
        "seconds": seconds,
        "ms per step": 1000 * seconds / length,
        "GB/s": rate / 1e9,
        "of copy": rate / bandwidth,
        "of datasheet": rate / H200_BANDWIDTH,
        "GiB": peak_gib(),
        "cache GiB": sum(x.numel() * x.element_size() for x in caches) / 2**30,
    }
    text = f"{result['ms per step']:.3f} ms per step, {rate / 1e12:.2f} TB/s, {result['of copy']:.0%} of a copy"
    log(section, f"{num_images} images in {seconds:.3f} s; {text}; KV cache of {result['cache GiB']:.2f} GiB")
    record(result)
    pool.runners.clear()
    half_guidance = Guidance(4.0, interval=(0.5, 1.0))
    seconds = median_seconds(lambda: sample(half_guidance), 1)
    log(section, f"with guidance in the first half only: {seconds:.3f} s")
    record({"section": section, "name": "guidance in the first half", "ms": 1000 * seconds})


def measure_agreement(section: str, options: LlamagenOptions, record: Record) -> None:
    """Compare tokens and log-probs of our decoder with one causal call, and with one call per token."""
    for dtype in (torch.float32, torch.bfloat16):
        config = gpt_config("B", options.tiny)
        net, length = build_gpt(config, dtype), config.grid_size**2
        request = make_request(config, 2 if options.tiny else 4, Guidance(4.0))
        decoder = DecoderPool().make_decoder(net, request)
        assert decoder is not None
        ids = decode_all(decoder, length)
        with torch.no_grad():
            cond, uncond = net(torch.cat([ids, ids])[:, :-1], request.cond)[0].float().chunk(2)
            logits = apply_guidance(Guidance(4.0), cond, uncond, torch.ones((), device=DEVICE))
        error = (Categorical(logits).log_prob(ids) - decoder.log_prob).abs()
        equal = share_of_equal(request.sampler.distribution(logits).quantile(request.uniform), ids)
        name = str(dtype).removeprefix("torch.")
        text = f"log-probs differ by {error.mean():.2e} on average, at most {error.max():.2e}"
        log(section, f"{name}, against one causal call: {text}; {equal:.2%} of tokens equal")
        errors = {"log-prob error": error.mean().item(), "max error": error.max().item()}
        record({"section": section, "dtype": name, **errors, "equal tokens": equal})
        if dtype == torch.float32 and time.monotonic() < options.deadline - 30:
            equal = share_of_equal(sample_with_call_per_token(net, request), ids)
            log(section, f"{name}, against one call per token: {equal:.2%} of tokens equal")
            record({"section": section, "dtype": f"{name}, one call per token", "equal tokens": equal})


def share_of_equal(tokens: Tensor, expected: Tensor) -> float:
    return (tokens == expected).float().mean().item()


@torch.no_grad()
def sample_with_call_per_token(net: GPT, request: DecodeRequest) -> Tensor:
    count, length = request.uniform.shape
    ids, cache = torch.zeros(count, length, dtype=torch.long, device=DEVICE), ()
    for i in range(length):
        last = ids[:, i - 1 : i]
        logits, cache = net(torch.cat([last, last]) if i else None, None if i else request.cond, cache)
        ids[:, i], _ = request.sampler.sample(request.apply_guidance(logits[:, -1], i), request.uniform[:, i])
    return ids


def measure_kernels(section: str, options: LlamagenOptions, record: Record) -> None:
    """Time each kernel of a decoding step, and different tilings of attention and of the gated product."""
    record({"section": section, "name": "copy, TB/s", "ms": copy_bandwidth() / 1e12})
    for size, num_images in (("XL", 8), ("XXL", 64)):
        config = gpt_config(size, options.tiny)
        net = build_gpt(config, torch.bfloat16 if CUDA else torch.float32)
        request = make_request(config, 2 if options.tiny else num_images, Guidance(4.0))
        if not CUDA:
            decode_all(StaticKVCacheDecoder(net, request), config.grid_size**2)
            record({"section": section, "name": f"{size}: static KV cache, not timed", "ms": 0.0})
            continue
        runner = CudaGraphDecoder(DecoderPool(), net, request).graph_runner
        runner.position.fill_(config.prefix_length + config.grid_size**2 // 2)
        rows = len(runner.last)
        for name, kernel in kernel_calls(runner).items():
            seconds = seconds_in_graph(kernel)
            log(section, f"{size}, {rows} rows, {name}: {1e6 * seconds:.1f} us")
            record({"section": section, "name": f"{size} {rows} rows: {name}", "ms": 1000 * seconds})


def kernel_calls(runner: DecodeGraphRunner) -> dict[str, Callable[[], Any]]:
    """Return a function for each kernel of a decoding step."""
    from tastemaker.models.nets import decode_kernels

    net, layers, position = runner.net, runner.weights.layers, runner.position
    normed, qkv, mixed, out, w13, _, logits = runner.scratch
    norm, h, squares = layers[0].attention_norm, runner.residual, runner.squares
    counter = iter(range(10**9))
    decode_kernels.embed(runner.weights.embeddings, runner.last, position.clone(), h, squares)

    def next_layer() -> Any:
        return layers[next(counter) % len(layers)]  # other weights each time, so that they are not in the L2 cache

    def attention(stages: int, tile: int, warps: int) -> Callable[[], None]:
        def call() -> None:
            decode_kernels.STAGES, decode_kernels.TILE, decode_kernels.WARPS = stages, tile, warps
            layer, heads = next(counter) % len(layers), net.config.heads
            decode_kernels.attend(qkv, runner.cache, layer, None, runner.rotary_factors, position, mixed, heads)

        return call

    def sample() -> None:
        state = (runner.uniform, runner.ids, runner.log_prob, runner.last, position)
        top_k, prefix = runner.request.sampler.top_k, net.config.prefix_length
        decode_kernels.sample(logits, *state, prefix=prefix, scale=4.0, rescale=False, temperature=1.0, top_k=top_k)

    ids, start = runner.last.clone(), position.clone()
    calls: dict[str, Callable[[], Any]] = {
        "embedding": lambda: decode_kernels.embed(runner.weights.embeddings, ids, start, h, squares),
        "add and norm": lambda: decode_kernels.add_norm(h, out, norm, normed, 1e-5),
        "wqkv": lambda: torch.mm(normed, next_layer().wqkv.weight.t(), out=qkv),
        **{f"attention, {a} stages, tiles of {b}, {c} warps": attention(a, b, c) for a, b, c in ATTENTION_TILINGS},
        "wo": lambda: torch.mm(mixed, next_layer().wo.weight.t(), out=out),
        "w1 and w3": lambda: torch.mm(normed, next_layer().w13.weight.t(), out=w13),
        "gate": lambda: decode_kernels.gate(w13, runner.scratch[5]),
        "w2": lambda: torch.mm(runner.scratch[5], next_layer().w2.weight.t(), out=out),
        "output": lambda: torch.mm(normed, runner.weights.output.weight.t(), out=logits),
        "sample": sample,
    }
    return calls | (fused_calls(runner, next_layer) if len(h) <= decode_kernels.MAX_FUSED_ROWS else {})


def fused_calls(runner: DecodeGraphRunner, next_layer: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Return a function for each product of few rows, with norms and additions, in several tilings."""
    from tastemaker.models.nets import decode_kernels

    _, qkv, mixed, _, _, hidden, logits = runner.scratch
    h, squares = torch.zeros_like(runner.residual), runner.squares
    norm = InputNorm(runner.weights.layers[0].attention_norm, squares, 1e-5)
    calls: dict[str, Callable[[], Any]] = {}
    for t in LINEAR_TILINGS:
        calls |= {
            f"norm and wqkv {t}": lambda t=t: decode_kernels.linear(h, next_layer().wqkv.weight, qkv, *t, norm=norm),
            f"wo and addition {t}": lambda t=t: decode_kernels.add_linear(
                mixed, next_layer().wo.weight, h, squares, *t
            ),
            f"w2 and addition {t}": lambda t=t: decode_kernels.add_linear(
                hidden, next_layer().w2.weight, h, squares, *t
            ),
            f"norm and output {t}": lambda t=t: decode_kernels.linear(
                h, runner.weights.output.weight, logits, *t, norm=norm
            ),
        }
    for t in GATED_TILINGS:
        calls[f"norm, w1, w3 and gate {t}"] = lambda t=t: decode_kernels.gated_linear(
            h, next_layer().w13.weight, hidden, *t, norm=norm
        )
    return calls


def describe_target(section: str) -> str:
    """Return what a size should reach: seconds for 8 images, or a share of the bandwidth of a copy."""
    if section in TARGET_SECONDS:
        return f"{TARGET_SECONDS[section]} s"
    return f"{TARGET_SHARES[section]:.0%} of copy" if section in TARGET_SHARES else ""


def print_table(results: Results) -> None:
    plain = {result["section"]: result["plain"] for result in results if "plain" in result}
    print_header()
    print(
        "| size | images | s | target | plain, s | published, s | ms per step | TB/s | of copy | of 4.8 | cache GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        if "images" in result:
            name = result["section"]
            cells = [name, result["images"], f"{result['seconds']:.3f}", describe_target(name)]
            cells += [f"{plain[name]:.2f}" if name in plain else "", PUBLISHED.get(name, "")]
            cells += [f"{result['ms per step']:.3f}", f"{result['GB/s'] / 1000:.2f}"]
            cells += [f"{result['of copy']:.0%}", f"{result['of datasheet']:.0%}", f"{result['cache GiB']:.2f}"]
            print(f"| {' | '.join(map(str, cells))} |")
    for result in results:
        if "dtype" in result:
            error = f", log-probs differ by {result['log-prob error']:.1e}" if "log-prob error" in result else ""
            print(f"{result['dtype']}: {result['equal tokens']:.2%} of tokens equal{error}")
        if "ratio" in result:
            times = f"{result['decoder seconds']:.3f} s, torch.compile {result['compiled seconds']:.3f} s"
            print(f"{result['section']}: CUDA-graph decoder {times}: {result['ratio']:.2f}x")
        if "x plain" in result:
            times = f"{result['8-bit seconds']:.3f} s, plain {result['plain seconds']:.3f} s: {result['x plain']:.2f}x"
            print(f"{result['section']}: 8 bits {times}")
        if "logit difference" in result:
            kernels = f"kernels from expanded weights by at most {result['kernel difference']:.4f}"
            text = f"logits up to {result['largest logit']:.2f} differ by at most {result['logit difference']:.4f}"
            print(f"{result['section']}: {text}, {kernels}")
        if "step" in result:
            shares = ", ".join(f"{phase} {share:.0%}" for phase, share in result["shares"].items())
            print(f"GRPO, {result['step']}: {result['seconds']:.2f} s, {shares}; {result['GiB']:.1f} GiB")
        if "name" in result:
            memory = f", {result['GiB']:.2f} GiB" if "GiB" in result else ""
            unit = "" if "TB" in result["name"] else " ms"
            print(f"{result['section']}, {result['name']}: {result['ms']:.4f}{unit}{memory}")


def main() -> None:
    options = section_parser(",".join(SECTIONS), 480.0).parse_args()
    if not options.section:
        print_table(run_sections(__file__, SECTIONS | COMPILE_SECTIONS | EIGHT_BIT_SECTIONS, options))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if options.tiny else torch.get_num_threads())
    measures = {"kernels": measure_kernels, "agreement": measure_agreement, "grpo": measure_grpo}
    measures |= dict.fromkeys(COMPILE_SECTIONS, compare_with_compile)
    measures |= {
        name: measure_8bit_kernels if name.startswith("kernels") else measure_8bit_sampling
        for name in EIGHT_BIT_SECTIONS
    }
    section_options = LlamagenOptions(options.tiny, time.monotonic() + options.seconds)
    measures.get(options.section, measure_sampling)(options.section, section_options, result_writer(options.out))


if __name__ == "__main__":
    main()
