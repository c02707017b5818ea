"""How fast SRPO and Flow-GRPO train full-size generators at random weights, and what memory they take.

    python bench/flux.py --out flux.json            # on a GPU of at least 100 GiB: FLUX.1-dev and SD3.5 medium
    python bench/flux.py --tiny --out tiny.json     # the same lines at small size, on any machine

Floor of SRPO at 720x720, 25 steps: a forward pass of FLUX is 37 TFLOP (2537 tokens), so 25 of them and two recomputed
backward passes are 1.23 PFLOP a prompt, 1.6 s at 790 TFLOP/s. LoRA spares the gradient of the weights: 1.15 PFLOP.
Every section is a process of its own with a time limit, which tells each number once it is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA  # beside this file, in no package
from flux_runs import Options, built, settings
from reward_setup import PROMPTS
from sections import carry_out, keeper, say
from timeline import describe, gib, once, timed, watched

from tastemaker.config.schema import BatchConfig
from tastemaker.training.run import Run

SECTIONS = {"parts": 60, "full": 160, "lora": 130, "plain": 60, "grpo-sd35": 150, "grpo-flux": 150}  # seconds at most
PFLOP = {"full": 1.23, "lora": 1.15}


def planned(found: list[dict[str, Any]], options: Options) -> None:
    """Write beside every measured peak what `tastemaker plan` says of it."""
    from tastemaker.diagnostics.resource_plan import estimate_resources

    for line in found:
        if "geometry" in line:
            prompts, rollout, micro = line["geometry"]
            batch = BatchConfig(prompts, rollout=rollout, microbatch=micro)
            (options.folder / str(len(list(options.folder.iterdir())))).mkdir()
            told = replace(options, folder=sorted(options.folder.iterdir())[-1])
            line["planned GiB"] = (
                estimate_resources(replace(settings(told, line["section"]), batch=batch)).total / 2**30
            )


def train(options: Options, section: str, keep: Callable[[dict[str, Any]], None]) -> None:
    sizes = {
        "full": [(8, 8, 4), (4, 4, 2), (2, 2, 1)],
        "lora": [(8, 8, 4), (8, 8, 2), (2, 2, 1)],
        "grpo-sd35": [(1, 8, 8), (1, 4, 4)],
        "grpo-flux": [(1, 8, 8), (1, 4, 4)],
    }[section]
    run = built(options, section)
    line = watched(run)
    for number, (prompts, rollout, micro) in enumerate(sizes):
        if number and time.monotonic() > options.deadline - 55:
            say(section, "no time is left for other batches")
            return
        batch = BatchConfig(prompts, rollout=rollout, microbatch=micro)
        try:
            found = timed(run, line, section, batch, options.deadline)
            found["geometry"] = (prompts, rollout, micro)
            if section in PFLOP:
                found["TFLOP/s"] = 1000 * PFLOP[section] / found["seconds a prompt"]
            found["weights"] = sum(p.numel() for p in run.policy.weights.net.parameters())
            keep(found)
            if not options.every:
                return
        except torch.OutOfMemoryError as error:
            say(section, f"{describe(batch)}: {str(error).splitlines()[0]:.150}")
            for p in run.engine.parameters.values():
                p.grad = None
            if CUDA:
                torch.cuda.empty_cache()


def parts(options: Options, section: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """The decoder, the reward, an update, and the network alone."""
    run = built(options, section)
    model: Any = run.policy.model
    sizes = (1, 2) if options.tiny else (1, 8)

    def note(name: str, milliseconds: float, rows: int) -> None:
        each = f"{milliseconds / rows:.1f} ms a row"
        say(section, f"{name}, {rows} rows: {milliseconds:.1f} ms, {each}, {gib(peak=True):.1f} GiB at most so far")
        keep({"section": section, "name": name, "rows": rows, "ms": milliseconds, "ms a row": milliseconds / rows})

    def forward(rows: int) -> Callable[[], None]:
        cond = run.policy.embed(PROMPTS[:rows])
        x = torch.randn(rows, *model.shape, device=run.engine.device)
        t = torch.full((rows,), 0.8, device=run.engine.device)

        def work() -> None:
            with torch.no_grad(), run.engine.computing():
                model.predict(x, t, cond)

        return work

    looks(run, note, sizes[-1])
    update(run, note)
    for rows in sizes[::-1]:
        note("network, compiled", once(forward(rows), 3), rows)


def looks(run: Run, note: Callable[[str, float, int], None], rows: int) -> None:
    """The decoder and the reward with their gradients, the decoder in both layouts of memory."""
    model: Any = run.policy.model
    x = torch.randn(rows, *model.shape, device=run.engine.device, requires_grad=True)

    def decode() -> None:
        torch.autograd.grad(model.decode(x).square().mean(), x)

    def score() -> None:
        leaf = pixels.detach().requires_grad_()
        torch.autograd.grad(run.rubric.score(leaf, PROMPTS[:rows]).total.sum(), leaf)

    note("decoder with gradient", once(decode, 3), rows)
    with torch.no_grad():
        pixels = model.decode(x)
    note("reward with gradient", once(score, 3), rows)
    model.codec.net.to(memory_format=torch.channels_last)
    note("decoder with gradient, channels last", once(decode, 3), rows)
    model.codec.net.to(memory_format=torch.contiguous_format)


def update(run: Run, note: Callable[[str, float, int], None]) -> None:
    """One update of every weight."""
    for p in run.engine.parameters.values():
        p.grad = torch.full_like(p, 1e-4)
    note("update", once(lambda: run.engine.optimizer.update(1e-6), 3), 1)
    for p in run.engine.parameters.values():
        p.grad = None


def plain(options: Options, section: str, keep: Callable[[dict[str, Any]], None]) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    from plain_srpo import measure

    device = torch.device("cuda" if CUDA else "cpu")
    keep({"section": section, **measure(device, options.tiny, lambda text: say(section, text))})


def work(section: str, options: Options, out: Path) -> None:
    {"parts": parts, "plain": plain}.get(section, train)(options, section, keeper(out))


def table(found: list[dict[str, Any]]) -> None:
    plain_time = next((line["seconds a prompt"] for line in found if line["section"] == "plain"), None)
    counted = Counter(line["section"] for line in found)
    print(f"\n{torch.cuda.get_device_name() if CUDA else 'cpu'}, PyTorch {torch.__version__}, {dict(counted)}")
    print("| what | batch | s a prompt | of plain | peak GiB | planned | graphs, later | shares |")
    print("|---|---|---|---|---|---|---|---|")
    for line in found:
        if "seconds a prompt" not in line:
            continue
        each = line["seconds a prompt"]
        gain = f"{plain_time / each:.2f}x" if plain_time and line["section"] in ("full", "lora", "plain") else ""
        planned = f"{line['planned GiB']:.1f}" if line.get("planned GiB") else ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in line.get("shares", {}).items())
        made = f"{line.get('graphs', 0)}, {line.get('recompiled', 0)}"
        first = f"| {line['section']} | {line.get('batch', '')} | {each:.3f} | {gain} | {line['peak GiB']:.1f}"
        print(f"{first} | {planned} | {made} | {shares} |")
    print("| part | rows | ms | ms a row |\n|---|---|---|---|")
    for line in found:
        if "ms" in line:
            print(f"| {line['name']} | {line['rows']} | {line['ms']:.1f} | {line['ms a row']:.1f} |")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--sections", default=",".join(SECTIONS))
    options.add_argument("--seconds", type=float, default=720.0, help="of all sections together")
    options.add_argument("--slack", type=float, default=1.0, help="factor on each section's own limit")
    options.add_argument("--attention", default="auto")
    options.add_argument("--plain", action="store_true", help="compile nothing")
    options.add_argument("--every", action="store_true", help="batch, not only the first that fits")
    options.add_argument("--section", default="")
    options.add_argument(
        "--plan", default="", help="a file of results: show it beside what was planned, measure nothing"
    )
    chosen = options.parse_args()
    if not chosen.section and not chosen.plan:
        limits = {name: most * chosen.slack for name, most in SECTIONS.items()}
        more = ["--attention", chosen.attention]
        more += [f"--{name}" for name in ("plain", "every") if getattr(chosen, name)]
        # One cache of PyTorch's takes graphs with different kernels of attention for the same.
        table(carry_out(__file__, limits, chosen, more, TORCHINDUCTOR_AUTOGRAD_CACHE="0"))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        compiled = not chosen.plain and not chosen.tiny
        deadline = time.monotonic() + chosen.seconds
        told = Options(chosen.tiny, chosen.attention, compiled, chosen.every, deadline, Path(folder))
        if chosen.plan:
            found = json.loads(Path(chosen.plan).read_text(encoding="utf-8"))
            planned(found, told)
            table(found)
            return
        work(chosen.section, told, Path(chosen.out))


if __name__ == "__main__":
    main()
