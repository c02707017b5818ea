"""How fast reward gradients train generators of clips at full size and random weights, and what memory they take.

    python bench/video.py --out video.json          # on a GPU: ModelScope, VideoCrafter2 and Wan 2.1 of 1.3 billion
    python bench/video.py --tiny --out tiny.json    # the same lines at small size, on any machine

ModelScope makes 16 frames of 256x256, VideoCrafter2 10 of 320x512, both in 25 steps with guidance; the gradient goes
through the last step alone, into adapters of rank 16 on queries, keys and values; HPS sees one frame, or all of them.
Wan makes 33 frames of 480x832. `plain` sections are baselines/plain_vader.py, in the same run. A guided call is 9.8
TFLOP for ModelScope, 15.7 for VideoCrafter2 and 146 for Wan: 25 take at least 0.6, 1.0 and 9.1 s at 400 TFLOP/s.
Every section is a process of its own with a time limit, which tells each number once it is known. To compile a UNet as
one graph takes minutes: `--sections modelscope-compiled,plain-modelscope --seconds 260`. What recorded rollouts
(`engine.graphs`) are worth: `--sections modelscope,modelscope-launched`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA  # beside this file, in no package
from reward_setup import PROMPTS, assembled
from sections import Found, Keep, carry_out, deadline, keeper, say
from timeline import timed, watched

from tastemaker.config.schema import BatchConfig, EngineConfig, OptimConfig, RewardConfig, RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.data.prompts import InlinePrompts
from tastemaker.models.modelscope import Modelscope
from tastemaker.models.videocrafter import Videocrafter
from tastemaker.models.wan import Wan
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.processes.dynamics import DDIM, ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving
from tastemaker.rewards.hps import Hps
from tastemaker.training.run import Run

SECTIONS = {  # seconds at most
    "modelscope": 65, "plain-modelscope": 50, "videocrafter": 70, "plain-videocrafter": 55, "wan": 90,
    "modelscope-launched": 65, "modelscope-compiled": 220, "videocrafter-compiled": 220, "wan-compiled": 120,
}  # fmt: skip
USUAL = "modelscope,plain-modelscope,videocrafter,plain-videocrafter,wan"
COMPILED, LAUNCHED = "-compiled", "-launched"  # kernels of the compiler's, or each call's by itself
PLAIN = {"plain-modelscope": ((16, 256, 256), 9.0), "plain-videocrafter": ((10, 320, 512), 12.0)}
WAYS = (("one frame", "random", 1), ("all frames", "all", 1), ("one frame, two clips at once", "random", 2))
LATENT = {"betas": "scaled_linear", "first": 0.00085, "last": 0.012, "spacing": "leading", "offset": 1}


@dataclass(frozen=True)
class Options:
    tiny: bool
    compile: bool
    deadline: float  # of time.monotonic()
    folder: Path


def shelf(folder: Path, words: int, width: int) -> Path:
    """Random embeddings of the prompts, as `tastemaker embed` would write them: no text encoder is loaded."""
    texts, draw = [*PROMPTS, ""], torch.Generator().manual_seed(0)
    ShardedEmbeddingStore(folder, {}).add(
        texts, {"words": torch.randn(len(texts), words, width, generator=draw).bfloat16()}
    )
    return folder


def model(section: str, options: Options) -> tuple[Any, Any, Guidance, tuple[str, ...]]:
    """The generator, its process, its guidance and what is adapted of it."""
    steps = 4 if options.tiny else 25
    attention = ("to_q", "to_k", "to_v")
    if section.startswith("wan"):
        wan = Wan(weights="random", frames=33)
        told = wan.tiny() if options.tiny else replace(wan, embeddings=shelf(options.folder, 512, 4096))
        return told, GaussianProcess(RectifiedFlow(3.0), ODE(), steps), Guidance(5.0), (*attention, "to_out.0")
    path = VariancePreserving(**LATENT)  # type: ignore[arg-type]
    if section.startswith("modelscope"):
        spec: Any = Modelscope(weights="random")
        process, guidance = GaussianProcess(path, DDIM(0.0), steps), Guidance(9.0)
    else:
        spec = Videocrafter(weights="random", frames=10, height=320, width=512, fps=24)
        process, guidance = GaussianProcess(replace(path, shrinks=0.7), DDIM(1.0), steps), Guidance(12.0)
    told = spec.tiny() if options.tiny else replace(spec, embeddings=shelf(options.folder, 77, 1024))
    return told, process, guidance, attention


def built(options: Options, section: str) -> Run:
    """The run of a section, as a recipe would describe it."""
    spec, process, guidance, targets = model(section, options)
    # A call of Wan's takes long enough to be launched, and a graph of the compiler's is one already.
    recorded = not (section.startswith("wan") or section.endswith((COMPILED, LAUNCHED)))
    config = RunConfig(
        model=spec,
        process=process,
        guidance=guidance,
        objective=RewardGradient(frames="random"),
        data=InlinePrompts(PROMPTS),
        tuning=Lora(rank=16, alpha=8, targets=targets),
        rewards={"hps": RewardConfig(Hps(fit="stretch"))},
        optim=OptimConfig(lr=2e-4, weight_decay=0.01, clip=1.0),
        engine=EngineConfig(precision="bf16", memory="recompute", compile=options.compile, graphs=recorded),
        steps=1000,
    )
    return assembled(config, section, options.folder, options.tiny)


def train(options: Options, section: str, keep: Keep) -> None:
    run, wan = built(options, section), section.startswith("wan")
    line, spent = watched(run), 0.0
    for number, (name, frames, rows) in enumerate(WAYS[:2] if wan else WAYS):
        if number and time.monotonic() + min(spent, 20) > options.deadline:  # the first compiles, too
            say(section, f"no time is left for {name}")
            return
        run.objective, began = replace(run.objective, frames=frames), time.monotonic()
        say(section, name)
        # A clip of Wan's takes long enough to be measured by one alone.
        batch = BatchConfig(1, rollout=1, microbatch=1) if wan else BatchConfig(2, rollout=rows, microbatch=rows)
        try:
            found = timed(run, line, section, batch, options.deadline, 1 if wan or frames == "all" else 2)
            keep({**found, "frames": name, "weights": sum(p.numel() for p in run.policy.weights.net.parameters())})
        except torch.OutOfMemoryError as error:
            say(section, f"{name}: {str(error).splitlines()[0]:.150}")
            for p in run.engine.parameters.values():
                p.grad = None
            torch.cuda.empty_cache()
        spent = time.monotonic() - began


def plain(options: Options, section: str, keep: Keep) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    from plain_vader import measure

    device = torch.device("cuda" if CUDA else "cpu")
    for found in measure(device, options.tiny, *PLAIN[section], lambda text: say(section, text)):
        keep({"section": section, **found})


def table(found: Found) -> None:
    times = {(line["section"], line["frames"]): line["seconds a prompt"] for line in found}
    print(f"\n{torch.cuda.get_device_name() if CUDA else 'cpu'}, PyTorch {torch.__version__}")
    print("| what | scored | s a clip | of plain | peak GiB | graphs, later | shares |\n|---|---|---|---|---|---|---|")
    for line in found:
        alike = f"plain-{line['section'].removesuffix(COMPILED).removesuffix(LAUNCHED)}", line["frames"].split(",")[0]
        each, other = line["seconds a prompt"], times.get(alike)
        gain = f"{other / each:.2f}x" if other else ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in line.get("shares", {}).items())
        made = f"{line['graphs']}, {line['recompiled']}" if "graphs" in line else ""
        first = f"| {line['section']} | {line['frames']} | {each:.3f} | {gain} | {line['peak GiB']:.1f}"
        print(f"{first} | {made} | {shares} |")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--sections", default=USUAL, help=f"of {', '.join(SECTIONS)}")
    options.add_argument("--seconds", type=float, default=300.0, help="of all sections together")
    options.add_argument("--slack", type=float, default=1.0, help="factor on each section's own limit")
    options.add_argument("--section", default="")
    chosen = options.parse_args()
    if not chosen.section:
        table(carry_out(__file__, {name: most * chosen.slack for name, most in SECTIONS.items()}, chosen))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        compiled = chosen.section.endswith(COMPILED) and not chosen.tiny
        told = Options(chosen.tiny, compiled, deadline(chosen), Path(folder))
        (plain if chosen.section in PLAIN else train)(told, chosen.section, keeper(chosen.out))


if __name__ == "__main__":
    main()
