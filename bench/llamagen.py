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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sections import Keep, carry_out, keeper, say  # beside this file, in no package
from torch import Tensor, nn

from tastemaker.distributions import Categorical, Choice, Projected
from tastemaker.models.llamagen import Llamagen, LlamagenBackbone
from tastemaker.models.nets.decoding import Ledger, Order
from tastemaker.models.nets.desk import Desk, Typist, computed
from tastemaker.models.nets.gpt import GPT, GPTShape
from tastemaker.models.nets.vq import VQ, VQShape
from tastemaker.objectives.forcing import drawn, read
from tastemaker.objectives.surrogate import clipped
from tastemaker.policy import Guidance, Policy
from tastemaker.processes.autoregressive import Autoregressive
from tastemaker.randomness import Randomness
from tastemaker.types import Placement, index
from tastemaker.weights import Full

SECTIONS = {
    "parts": 60, "agreement": 60, "B": 50, "L": 45, "XL": 45, "XXL": 60, "3B": 60, "XXL-64": 50, "grpo": 110,
}  # fmt: skip  # seconds at most
AIMS = {"B": 0.35, "L": 0.7, "XL": 1.2, "XXL": 1.9, "3B": 2.2}
PUBLISHED = {"B": 7.7, "L": 14.6, "XL": 26.2, "XXL": 36.5, "3B": 19.7}  # published code on an H200, as told
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
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DATASHEET = 4.8e12  # bytes a second of an H200


def settle() -> None:
    if CUDA:
        torch.cuda.synchronize()


def gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def forget() -> None:
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """A call's, the median; the first is not counted."""
    found = []
    for number in range(repeats + 1):
        settle()
        began = time.perf_counter()
        work()
        settle()
        if number:
            found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 2]


def copied() -> float:
    """Bytes a second that a copy within the device reads and writes."""
    source = torch.randn(2**30 if CUDA else 2**20, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source), 5)


def shaped(size: str, tiny: bool) -> GPTShape:
    if tiny:
        return replace(Llamagen(weights=None).tiny().sizes(), depth=2)
    return Llamagen(size=size, weights=None, pixels=384).sizes()  # type: ignore[arg-type]


def network(shape: GPTShape, dtype: torch.dtype) -> GPT:
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        net = GPT(shape)
    torch.set_default_dtype(before)
    nn.init.normal_(net.output.weight, std=0.05)
    net.factors = net.factors.to(DEVICE)
    return net.requires_grad_(False)


def ordered(shape: GPTShape, images: int, guidance: Guidance | None, seed: int = 0) -> Order:
    labels = torch.arange(images, device=DEVICE) % shape.vocabulary
    cond = torch.cat([labels, torch.full_like(labels, shape.vocabulary)]) if guidance else labels
    uniform = Randomness(seed, 0, torch.arange(images, device=DEVICE)).uniform("token", shape.side**2)
    return Order(cond, None, uniform, Choice(1.0, min(2000, shape.codes)), guidance)


def moved(net: GPT, rows: int) -> float:
    """Bytes of all steps of a batch: weights, and what was read."""
    shape, size = net.shape, next(net.parameters()).element_size()
    tables = net.tok_embeddings.weight.numel() + sum(p.numel() for p in net.cls_embedding.parameters())
    weights = size * (sum(p.numel() for p in net.parameters()) - tables)
    length = shape.side**2
    place = 2 * size * shape.depth * rows * (shape.kv_heads or shape.heads) * shape.head
    return (length - 1) * weights + place * sum(range(shape.prefix, shape.prefix + length - 1))


def finish(scribe: Any, length: int) -> Tensor:
    for _ in range(length):
        scribe.write()
    ids: Tensor = scribe.ids
    return ids


@dataclass(frozen=True)
class Options:
    tiny: bool
    deadline: float  # of time.monotonic()


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


def fast(section: str, shape: GPTShape, dtype: torch.dtype, images: int, keep: Keep) -> None:
    net, desk, guidance = network(shape, dtype), Desk(), Guidance(4.0)
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


def parts(section: str, options: Options, keep: Keep) -> None:
    """What a step is made of, each part many times in a graph; and how deep attention reads ahead."""
    keep({"section": section, "name": "copy, TB/s", "ms": copied() / 1e12})
    for size, images in (("XL", 8), ("XXL", 64)):
        shape = shaped(size, options.tiny)
        net = network(shape, torch.bfloat16 if CUDA else torch.float32)
        desk = Desk()
        order = ordered(shape, 2 if options.tiny else images, Guidance(4.0))
        if not CUDA:
            finish(Ledger(net, order), shape.side**2)
            keep({"section": section, "name": f"{size}: a step by hand", "ms": 0.0})
            continue
        machine = Typist(desk, net, order).typewriter
        machine.place.fill_(shape.prefix + shape.side**2 // 2)
        for name, work in pieces(machine).items():
            spent = repeated(work)
            say(section, f"{size}, {len(machine.last)} rows, {name}: {1e6 * spent:.1f} us")
            keep({"section": section, "name": f"{size} {len(machine.last)} rows: {name}", "ms": 1000 * spent})


def pieces(machine: Any) -> dict[str, Callable[[], Any]]:
    from tastemaker.models.nets import kernels

    net, layer, place = machine.net, machine.matrices.layers[0], machine.place
    normed, qkv, mixed, out, opened, hidden, logits = machine.sheets
    turn = iter(range(10**9))
    layers = machine.matrices.layers

    def other() -> Any:
        return layers[next(turn) % len(layers)]  # another matrix each time, or the cache would be measured

    def attend(stages: int, tile: int, warps: int) -> Callable[[], None]:
        def work() -> None:
            kernels.STAGES, kernels.TILE, kernels.WARPS = stages, tile, warps
            kernels.attend(
                qkv, machine.cache, next(turn) % len(layers), None, machine.factors, place, mixed, net.shape.heads
            )

        return work

    def open_(columns: int, deep: int, stages: int) -> Callable[[], None]:
        return lambda: kernels.opened(normed, other().opened, hidden, columns, deep, stages)

    prefix, choice = net.shape.prefix, machine.order.choice
    chosen = {"scale": 4.0, "rescaled": False, "temperature": 1.0, "top_k": choice.top_k}
    state = (machine.uniform, machine.ids, machine.log_prob, machine.last, place)
    return {
        "add and norm": lambda: kernels.add_norm(machine.stream, out, layer.first_norm, normed, 1e-5),
        "wqkv": lambda: torch.mm(normed, other().wqkv.t(), out=qkv),
        **{f"attention, {a} ahead, tiles of {b}, {c} warps": attend(a, b, c) for a, b, c in READING},
        "wo": lambda: torch.mm(mixed, other().wo.t(), out=out),
        "w1 and w3": lambda: torch.mm(normed, other().opened.t(), out=opened),
        "gate": lambda: kernels.gate(opened, hidden),
        **{f"w1, w3 and gate, {a} columns, {b} deep": open_(a, b, c) for a, b, c in OPENING},
        "w2": lambda: torch.mm(hidden, other().w2.t(), out=out),
        "output": lambda: torch.mm(normed, machine.matrices.output.t(), out=logits),
        "choice": lambda: kernels.choose(logits, *state, prefix=prefix, **chosen),
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


def agreement(section: str, options: Options, keep: Keep) -> None:
    """Whether the fast way and one call a token choose alike, in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        shape = shaped("B", options.tiny)
        net, length = network(shape, dtype), shape.side**2
        order = ordered(shape, 2 if options.tiny else 4, Guidance(4.0))
        scribe = Desk().scribe(net, order)
        assert scribe is not None
        ids = finish(scribe, length)
        with torch.no_grad():
            given = net(torch.cat([ids, ids])[:, :-1], order.cond)[0].float()
            guided = order.led(given.flatten(1)).view(len(ids), length, -1)
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
def spelled(net: GPT, order: Order) -> Tensor:
    count, length = order.uniform.shape
    ids, cache = torch.zeros(count, length, dtype=torch.long, device=DEVICE), ()
    for i in range(length):
        last = ids[:, i - 1 : i]
        logits, cache = net(torch.cat([last, last]) if i else None, None if i else order.cond, cache)
        ids[:, i], _ = order.choice.take(order.combined(logits[:, -1], i), order.uniform[:, i])
    return ids


def grpo(section: str, options: Options, keep: Keep) -> None:
    """A step of GRPO by GPT-XL, 8 samples of each of 32 prompts: what takes how long, free-running and forced."""
    tiny = options.tiny
    prompts, group, chunk, micro = (4, 2, 4, 2) if tiny else (32, 8, 128, 16)
    spec = Llamagen(size="XL", weights=None, codec=None, pixels=384)
    placement = Placement(DEVICE, torch.bfloat16 if CUDA else torch.float32, trained=torch.float32)
    model = (spec.tiny() if tiny else spec).load(placement)
    nn.init.normal_(model.net.get_parameter("output.weight"), std=0.05)
    if not tiny:
        model.codec = VQ(VQShape()).to(DEVICE).requires_grad_(False)  # type: ignore[assignment]
    process = Autoregressive(top_k=min(2000, spec.codes), replay=False)
    weights = Full().apply(model, ())
    optimizer = torch.optim.AdamW(model.net.parameters(), 1e-5, betas=(0.9, 0.95), fused=CUDA)
    bench = Learning(model, process, weights, optimizer, micro, section, keep)
    rng = Randomness(0, 0, torch.arange(prompts, device=DEVICE))
    for guidance in (Guidance(4.0, rollouts_only=True), None):
        bench.free(guidance, rng, group, chunk)
        if time.monotonic() > options.deadline - 25:
            return
    bench.forced(rng, group, 8 if not tiny else 2)
    bench.memory()


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        settle()
        began = time.perf_counter()
        yield
        settle()
        self.times[name] += time.perf_counter() - began


@dataclass(frozen=True)
class Learning:
    model: LlamagenBackbone
    process: Autoregressive
    weights: Any
    optimizer: torch.optim.Optimizer
    micro: int  # rows trained at once
    section: str
    keep: Keep

    def policy(self, guidance: Guidance | None) -> Policy[Autoregressive]:
        model = self.process.guide(self.model, guidance) if guidance else self.model
        return Policy(model, self.process, self.weights)

    def free(self, guidance: Guidance | None, rng: Randomness, group: int, chunk: int) -> None:
        """Rollouts, their log-probabilities once more, pictures, and the update; twice, for things are made once."""
        policy, rows = self.policy(guidance), rng.repeat(group)
        for _ in range(2):
            forget()
            clock = Clock()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
                for part in torch.arange(len(rows)).split(chunk):
                    cond = policy.embed([str(int(i) // group % 10) for i in part])
                    with clock.of("rollout"):
                        made = policy.sample(cond, index(rows, part))
                    with clock.of("replay"):
                        segment = replace(made.segments[0], log_prob=self.replayed(policy, made))
                    with clock.of("pictures"):
                        self.shown(made.final)
                    with clock.of("update"):
                        self.updated(policy, made.cond, segment)
                with clock.of("update"):
                    self.stepped()
        self.tell("free-running" + (", guided" if guidance else ""), clock.times)

    @torch.no_grad()
    def replayed(self, policy: Policy[Autoregressive], made: Any) -> Tensor:
        (segment,), parts = made.segments, torch.arange(len(made)).split(self.micro)
        found = [policy.decide(index(made.cond, r), index(segment, r)).log_prob(segment.action[r]) for r in parts]
        return torch.cat(found)

    def updated(self, policy: Policy[Autoregressive], cond: Any, segment: Any) -> None:
        for r in torch.arange(len(cond)).split(self.micro):
            part = index(segment, r)
            log_prob = policy.decide(index(cond, r), part).log_prob(part.action)
            gain, _ = clipped(log_prob, part, torch.randn(len(r), device=DEVICE), 0.2)
            torch.autograd.backward(-gain.mean())

    def stepped(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forced(self, rng: Randomness, group: int, micro: int) -> None:
        """All samples of a picture by one call of the network."""
        policy, length = self.policy(None), self.model.shape[0]
        clean = (rng.uniform("clean", length) * 60).long()
        for _ in range(2):
            forget()
            clock = Clock()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
                for part in torch.arange(len(rng)).split(micro):
                    cond, seen = policy.embed([str(int(i) % 10) for i in part]), clean[part.to(DEVICE)]
                    with clock.of("rollout"):
                        tokens = drawing(policy, cond, seen, index(rng, part).uniform("token", group, length))
                    with clock.of("pictures"):
                        self.shown(tokens.flatten(0, 1))
                    with clock.of("update"):
                        torch.autograd.backward(-read(policy, cond, seen).each(tokens).mean())
                with clock.of("update"):
                    self.stepped()
        self.tell("teacher-forced", clock.times)

    @torch.no_grad()
    def shown(self, tokens: Tensor) -> None:
        for x in tokens.split(16):
            self.model.decode(x)

    def tell(self, name: str, times: dict[str, float]) -> None:
        total = sum(times.values())
        shares = {key: value / total for key, value in times.items()}
        said = ", ".join(f"{key} {value:.2f} s ({shares[key]:.0%})" for key, value in times.items())
        say(self.section, f"{name}: a step of {total:.2f} s; {said}; {gib():.1f} GiB at most")
        self.keep({"section": self.section, "step": name, "seconds": total, "shares": shares, "GiB": gib()})

    def memory(self) -> None:
        """What scoring takes beyond the network: all logits at once, or a few at a time."""
        net = self.model.net
        assert isinstance(net, GPT)
        shape, rows = net.shape, self.micro
        ids = torch.randint(0, shape.codes, (rows, shape.side**2), device=DEVICE)
        dtype = torch.bfloat16 if CUDA else computed(net, DEVICE)
        weight = net.output.weight.detach().to(dtype).requires_grad_()
        states = torch.randn(*ids.shape, shape.width, device=DEVICE, dtype=dtype, requires_grad=True)
        for name in ("all logits at once", "a few at a time"):
            forget()
            before = gib()

            def work(name: str = name) -> None:
                few = name.startswith("a few")
                here = Projected(states, weight) if few else Categorical((states @ weight.t()).float())
                torch.autograd.grad(here.log_prob(ids).mean(), (states, weight))

            spent = seconds(work)
            say(self.section, f"log-probabilities of {rows} rows, {name}: {gib() - before:.2f} GiB, {spent:.4f} s")
            self.keep({"section": self.section, "name": name, "ms": 1000 * spent, "GiB": gib() - before})


@torch.no_grad()
def drawing(policy: Policy[Autoregressive], cond: Any, seen: Tensor, uniform: Tensor) -> Tensor:
    return drawn(policy.process, read(policy, cond, seen), uniform)


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
