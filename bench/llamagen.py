"""How fast LlamaGen writes pictures and learns by GRPO at random weights, beside code written straight down.

    python bench/llamagen.py --out llamagen.json         # on a GPU of at least 100 GiB
    python bench/llamagen.py --tiny --out tiny.json      # the same lines at small size, on any machine

A step must move every weight but the embeddings, and the keys and values of what was read. For 8 guided pictures of 576
tokens in bfloat16 that is on average 0.36 (B), 1.1 (L), 2.4 (XL), 4.1 (XXL) and 7.5 GB (3B), so that a batch takes at
least 0.05, 0.15, 0.31, 0.55 and 1.0 s at 4.3 TB/s; 64 guided pictures by XXL move 13.6 GB a step: 1.8 s a batch.
Every section is a process of its own with a time limit, which tells each number once it is known.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, copied, forget, gib, seconds, settle  # beside this file, in no package
from llamagen_grpo import grpo
from llamagen_kernels import parts
from llamagen_networks import Options, finish, moved, network, ordered, shaped
from sections import Keep, carry_out, keeper, say
from torch import Tensor

from tastemaker.core.distributions import Categorical
from tastemaker.core.guidance import apply_guidance
from tastemaker.core.policy import Guidance
from tastemaker.models.nets.decoder_pool import DecoderPool
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.models.nets.token_decoder import DecodeRequest

SECTIONS = {
    "parts": 60, "agreement": 60, "B": 50, "L": 45, "XL": 45, "XXL": 60, "3B": 60, "XXL-64": 50, "grpo": 110,
}  # fmt: skip  # seconds at most
AIMS = {"B": 0.35, "L": 0.7, "XL": 1.2, "XXL": 1.9, "3B": 2.2}
PUBLISHED = {"B": 7.7, "L": 14.6, "XL": 26.2, "XXL": 36.5, "3B": 19.7}  # published code on an H200, as told
DATASHEET = 4.8e12  # bytes a second of an H200


def written(section: str, options: Options, keep: Keep) -> None:
    """A batch of pictures, fast and plain."""
    size, _, many = section.partition("-")
    images = (2 if options.tiny else 8) if not many else (4 if options.tiny else int(many))
    shape = shaped(size, options.tiny)
    dtype = torch.bfloat16 if CUDA else torch.float32
    fast(section, shape, dtype, images, keep)
    if many or time.monotonic() > options.deadline - 15:
        return
    forget()
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    from plain_llamagen import measure

    length = shape.side**2
    sizes = (shape.width, shape.depth, shape.heads, shape.hidden, shape.codes, shape.side, shape.vocabulary)
    plain = measure(sizes, DEVICE, dtype, images, length if options.tiny or size == "B" else length // 8)
    say(section, f"plain: {plain['seconds']:.2f} s, by {plain['tokens measured']} of {length} tokens")
    keep({"section": section, "plain": plain["seconds"], "tokens measured": plain["tokens measured"]})


def fast(section: str, shape: GPTConfig, dtype: torch.dtype, images: int, keep: Keep) -> None:
    net, desk, guidance = network(shape, dtype), DecoderPool(), Guidance(4.0)
    length, peak = shape.side**2, copied()
    forget()
    began = time.perf_counter()
    finish(desk.scribe(net, ordered(shape, images, guidance)), length)
    settle()
    say(section, f"first batch, with all that is made once: {time.perf_counter() - began:.1f} s")
    spent = seconds(lambda: finish(desk.scribe(net, ordered(shape, images, guidance, 1)), length))
    rate = moved(net, 2 * images) / spent
    caches = [kept.cache for kept in desk.kept.values()]
    line = {
        "section": section,
        "images": images,
        "seconds": spent,
        "ms a step": 1000 * spent / length,
        "GB/s": rate / 1e9,
        "of copy": rate / peak,
        "of datasheet": rate / DATASHEET,
        "GiB": gib(),
        "cache GiB": sum(x.numel() * x.element_size() for x in caches) / 2**30,
    }
    told = f"{line['ms a step']:.3f} ms a step, {rate / 1e12:.2f} TB/s, {line['of copy']:.0%} of a copy"
    say(section, f"{images} pictures in {spent:.3f} s; {told}; cache {line['cache GiB']:.2f} GiB")
    keep(line)
    desk.kept.clear()
    half = Guidance(4.0, interval=(0.5, 1.0))
    spent = seconds(lambda: finish(desk.scribe(net, ordered(shape, images, half)), length), 1)
    say(section, f"guided for the first half alone: {spent:.3f} s")
    keep({"section": section, "name": "guided for half", "ms": 1000 * spent})


def agreement(section: str, options: Options, keep: Keep) -> None:
    """Whether the fast way and one call a token choose alike, in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        shape = shaped("B", options.tiny)
        net, length = network(shape, dtype), shape.side**2
        order = ordered(shape, 2 if options.tiny else 4, Guidance(4.0))
        scribe = DecoderPool().scribe(net, order)
        assert scribe is not None
        ids = finish(scribe, length)
        with torch.no_grad():
            given, without = net(torch.cat([ids, ids])[:, :-1], order.cond)[0].float().chunk(2)
            guided = apply_guidance(Guidance(4.0), given, without, torch.ones((), device=DEVICE))
        found = Categorical(guided)
        off = (found.log_prob(ids) - scribe.log_prob).abs()
        taken = order.choice.over(guided).quantile(order.uniform)
        alike = (taken == ids).float().mean().item()
        name = str(dtype).removeprefix("torch.")
        line = {"section": section, "dtype": name, "log-prob off": off.mean().item(), "at most": off.max().item()}
        keep({**line, "tokens alike": alike})
        told = f"log-probabilities off by {off.mean():.2e}, at most {off.max():.2e}; {alike:.2%} of tokens alike"
        say(section, f"{name}, beside one call of the whole: {told}")
        if dtype == torch.float32 and time.monotonic() < options.deadline - 30:
            plain = spelled(net, order)
            same = (plain == ids).float().mean().item()
            say(section, f"{name}, beside one call a token: {same:.2%} of tokens alike")
            keep({"section": section, "dtype": name + ", one call a token", "tokens alike": same})


@torch.no_grad()
def spelled(net: GPT, order: DecodeRequest) -> Tensor:
    count, length = order.uniform.shape
    ids, cache = torch.zeros(count, length, dtype=torch.long, device=DEVICE), ()
    for i in range(length):
        last = ids[:, i - 1 : i]
        logits, cache = net(torch.cat([last, last]) if i else None, None if i else order.cond, cache)
        ids[:, i], _ = order.choice.take(order.combined(logits[:, -1], i), order.uniform[:, i])
    return ids


def work(section: str, options: Options, out: Path) -> None:
    {"parts": parts, "agreement": agreement, "grpo": grpo}.get(section, written)(section, options, keeper(out))


def table(found: list[dict[str, Any]]) -> None:
    plain = {line["section"]: line["plain"] for line in found if "plain" in line}
    print(f"\n{torch.cuda.get_device_name() if CUDA else 'cpu'}, PyTorch {torch.__version__}")
    print("| size | pictures | s | aim | plain, s | published, s | ms a step | TB/s | of copy | of 4.8 | cache GiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for line in found:
        if "images" in line:
            name = line["section"]
            slow = f"{plain[name]:.2f}" if name in plain else ""
            start = f"| {name} | {line['images']} | {line['seconds']:.3f} | {AIMS.get(name, '')} | {slow} "
            rates = f"{line['GB/s'] / 1000:.2f} | {line['of copy']:.0%} | {line['of datasheet']:.0%}"
            end = f"{line['ms a step']:.3f} | {rates} | {line['cache GiB']:.2f} |"
            print(f"{start}| {PUBLISHED.get(name, '')} | {end}")
    for line in found:
        if "dtype" in line:
            off = f", log-probabilities off by {line['log-prob off']:.1e}" if "log-prob off" in line else ""
            print(f"{line['dtype']}: {line['tokens alike']:.2%} of tokens alike{off}")
        if "step" in line:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in line["shares"].items())
            print(f"GRPO, {line['step']}: {line['seconds']:.2f} s, {shares}; {line['GiB']:.1f} GiB")
        if "name" in line:
            held = f", {line['GiB']:.2f} GiB" if "GiB" in line else ""
            print(
                f"{line['section']}, {line['name']}: {line['ms']:.4f}{' ms' if 'TB' not in line['name'] else ''}{held}"
            )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--sections", default=",".join(SECTIONS))
    options.add_argument("--seconds", type=float, default=480.0, help="of all sections together")
    options.add_argument("--section", default="")
    chosen = options.parse_args()
    if not chosen.section:
        table(carry_out(__file__, SECTIONS, chosen))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
    work(chosen.section, Options(chosen.tiny, time.monotonic() + chosen.seconds), Path(chosen.out))


if __name__ == "__main__":
    main()
