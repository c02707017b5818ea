"""Training speed and memory of reward gradients on full-size video generators with random weights.

    python bench/video.py --out video.json          # on a GPU: ModelScope, VideoCrafter2 and Wan 2.1 1.3B
    python bench/video.py --tiny --out tiny.json    # small networks, on any machine
    python bench/video.py --sections modelscope-compiled,plain-modelscope --seconds 260  # compile the UNet as one graph
    python bench/video.py --sections modelscope,modelscope-eager                         # without engine.cuda_graphs

ModelScope generates 16 frames of 256x256, VideoCrafter2 10 of 320x512, both in 25 guided steps; the gradient goes
through the last step only, into LoRA adapters of rank 16 on queries, keys and values; HPS scores one frame or all.
Wan generates 33 frames of 480x832. `plain` sections are baselines/plain_vader.py. A guided call is 9.8 TFLOP for
ModelScope, 15.7 for VideoCrafter2 and 146 for Wan, so 25 take at least 0.6, 1.0 and 9.1 s at 400 TFLOP/s.
Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import DEVICE, print_header  # beside this file, in no package
from sections import Record, Results, log, result_writer, run_sections, section_deadline, section_parser
from training_run import PROMPTS, build_run, free_gradients, time_steps, trace_phases, write_random_embeddings

from tastemaker.config.schema import BatchConfig, EngineConfig, OptimConfig, RewardConfig, RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance
from tastemaker.data.prompts import InlinePrompts
from tastemaker.models.modelscope import ModelscopeSpec
from tastemaker.models.videocrafter import VideocrafterSpec
from tastemaker.models.wan import WanSpec
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.processes.dynamics import DDIM, ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving
from tastemaker.rewards.hps import HpsReward
from tastemaker.training.run import Run

SECTIONS = {  # seconds
    "modelscope": 65, "plain-modelscope": 50, "videocrafter": 70, "plain-videocrafter": 55, "wan": 90,
    "modelscope-eager": 65, "modelscope-compiled": 220, "videocrafter-compiled": 220, "wan-compiled": 120,
}  # fmt: skip
DEFAULT_SECTIONS = "modelscope,plain-modelscope,videocrafter,plain-videocrafter,wan"
COMPILED, EAGER = "-compiled", "-eager"  # torch.compile, or neither that nor CUDA graphs
BASELINES = {"plain-modelscope": ((16, 256, 256), 9.0), "plain-videocrafter": ((10, 320, 512), 12.0)}
# Name, frames that are scored, and batch size
VARIANTS = (("one frame", "random", 1), ("all frames", "all", 1), ("one frame, two videos at once", "random", 2))
PATH = VariancePreserving(
    beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, timestep_spacing="leading", steps_offset=1
)


@dataclass(frozen=True)
class VideoOptions:
    tiny: bool
    compile: bool
    deadline: float  # by time.monotonic()
    folder: Path


def build_model(section: str, options: VideoOptions) -> tuple[Any, Any, Guidance, tuple[str, ...]]:
    """Return model, process, guidance and LoRA target modules of a section."""
    num_steps = 4 if options.tiny else 25
    attention = ("to_q", "to_k", "to_v")
    spec: Any
    if section.startswith("wan"):
        spec, embeddings, targets = WanSpec(weights="random", frames=33), (512, 4096), (*attention, "to_out.0")
        process, guidance = GaussianProcess(RectifiedFlow(3.0), ODE(), num_steps), Guidance(5.0)
    elif section.startswith("modelscope"):
        spec, embeddings, targets = ModelscopeSpec(weights="random"), (77, 1024), attention
        process, guidance = GaussianProcess(PATH, DDIM(0.0), num_steps), Guidance(9.0)
    else:
        spec = VideocrafterSpec(weights="random", frames=10, height=320, width=512, fps=24)
        embeddings, targets, path = (77, 1024), attention, replace(PATH, final_signal_scale=0.7)
        process, guidance = GaussianProcess(path, DDIM(1.0), num_steps), Guidance(12.0)
    if options.tiny:
        return spec.tiny(), process, guidance, targets
    folder = write_random_embeddings(options.folder, prompt_embeds=embeddings)
    return replace(spec, embeddings=folder), process, guidance, targets


def build_section_run(options: VideoOptions, section: str) -> Run:
    spec, process, guidance, targets = build_model(section, options)
    # Calls of Wan are long enough to hide their launches, and a compiled network has its own CUDA graph.
    cuda_graphs = not (section.startswith("wan") or section.endswith((COMPILED, EAGER)))
    config = RunConfig(
        model=spec,
        process=process,
        guidance=guidance,
        objective=RewardGradient(frames="random"),
        data=InlinePrompts(PROMPTS),
        tuning=Lora(rank=16, alpha=8, target_modules=targets),
        rewards={"hps": RewardConfig(HpsReward(resize_mode="stretch"))},
        optim=OptimConfig(lr=2e-4, weight_decay=0.01, max_grad_norm=1.0),
        engine=EngineConfig(
            precision="bf16", activation_memory="checkpoint", compile=options.compile, cuda_graphs=cuda_graphs
        ),
        steps=1000,
    )
    return build_run(config, section, options.folder, options.tiny)


def measure_training(options: VideoOptions, section: str, record: Record) -> None:
    run, is_wan = build_section_run(options, section), section.startswith("wan")
    timeline, seconds = trace_phases(run), 0.0
    for number, (name, frames, batch_size) in enumerate(VARIANTS[:2] if is_wan else VARIANTS):
        if number and time.monotonic() + min(seconds, 20) > options.deadline:  # the first variant also compiles
            log(section, f"no time is left for {name}")
            return
        run.objective, start = replace(run.objective, frames=frames), time.monotonic()
        log(section, name)
        prompts = 1 if is_wan else 2  # one video of Wan takes long enough
        batch = BatchConfig(prompts, rollout_batch_size=batch_size, micro_batch_size=batch_size)
        num_steps = 1 if is_wan or frames == "all" else 2
        try:
            result = time_steps(run, timeline, section, batch, options.deadline, num_steps)
            weights = sum(p.numel() for p in run.policy.weights.net.parameters())
            record({**result, "frames": name, "weights": weights})
        except torch.OutOfMemoryError as error:
            log(section, f"{name}: {str(error).splitlines()[0]:.150}")
            free_gradients(run)
        seconds = time.monotonic() - start


def measure_baseline(options: VideoOptions, section: str, record: Record) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    from plain_vader import measure

    for result in measure(DEVICE, options.tiny, *BASELINES[section], lambda text: log(section, text)):
        record({"section": section, **result})


def print_table(results: Results) -> None:
    seconds = {(result["section"], result["frames"]): result["seconds per prompt"] for result in results}
    print_header()
    print("| section | scored | s per video | vs plain | peak GiB | graphs, recompiled | shares |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        name, frames = result["section"], result["frames"]
        baseline = seconds.get((f"plain-{name.removesuffix(COMPILED).removesuffix(EAGER)}", frames.split(",")[0]))
        speedup = f"{baseline / result['seconds per prompt']:.2f}x" if baseline else ""
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in result.get("shares", {}).items())
        graphs = f"{result['graphs']}, {result['recompiled']}" if "graphs" in result else ""
        cells = [name, frames, f"{result['seconds per prompt']:.3f}", speedup, f"{result['peak GiB']:.1f}"]
        print(f"| {' | '.join([*cells, graphs, shares])} |")


def main() -> None:
    options = section_parser(DEFAULT_SECTIONS, 300.0).parse_args()
    if not options.section:
        print_table(run_sections(__file__, SECTIONS, options))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if options.tiny else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        compiled = options.section.endswith(COMPILED) and not options.tiny
        section_options = VideoOptions(options.tiny, compiled, section_deadline(options), Path(folder))
        measure = measure_baseline if options.section in BASELINES else measure_training
        measure(section_options, options.section, result_writer(options.out))


if __name__ == "__main__":
    main()
