"""Training within the memory of a small GPU: FLUX.1-dev with 24 GiB, SD3.5 medium and Z-Image with 16 GiB.

    python bench/small_gpu.py --out small.json          # on a GPU of at least 24 GiB; FP8 needs Ada or Hopper
    python bench/small_gpu.py --kind int8               # on an older GPU
    python bench/small_gpu.py --tiny --out tiny.json    # small networks, on any machine
    python bench/small_gpu.py --plan small.json         # add what `tastemaker plan` estimates, without a GPU

PyTorch refuses to allocate more than the limit of a section, so a section that ends did fit. Networks have published
sizes and random weights: the generator with its base in 8 bits, its text encoders in host memory except while they
encode, its VAE and HPS v2.1. Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA, device_name, synchronize  # beside this file, in no package
from sections import Record, Results, log, read_results, result_writer, run_sections, section_parser, write_results
from training_run import PROMPTS, build_run, num_8bit_layers, override, warm_up

from tastemaker.config.schema import BatchConfig, EngineConfig, OptimConfig, RewardConfig, RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance
from tastemaker.data.prompts import InlinePrompts
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.models.flux import FluxSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.z_image import ZImageSpec
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.hps import HpsReward
from tastemaker.training.loop import train_step

SECTIONS = {"srpo-flux": 130, "grpo-flux": 130, "grpo-sd35": 100, "grpo-z-image": 100}  # seconds
LIMITS = {"srpo-flux": 24.0, "grpo-flux": 24.0, "grpo-sd35": 16.0, "grpo-z-image": 16.0}  # GiB
SIDE = 512
NUM_STEPS = 2  # training steps that are timed


@dataclass(frozen=True)
class SmallOptions:
    tiny: bool
    kind: str  # of the 8-bit numbers
    compile: bool
    settings: tuple[str, ...]  # KEY=VALUE
    deadline: float  # by time.monotonic()


def run_config(options: SmallOptions, section: str) -> RunConfig:
    """Return the configuration of a section: one prompt per step, one sample per backward pass."""
    size = {"weights": "random", "height": SIDE, "width": SIDE}
    flux = FluxSpec(**size, guidance_scale=3.5)  # type: ignore[arg-type]
    specs: dict[str, Any] = {
        "srpo-flux": replace(flux, rollout_guidance_scale=1.0, truncate_timesteps=True),
        "grpo-flux": flux,
        "grpo-sd35": Sd3Spec(**size),  # type: ignore[arg-type]
        "grpo-z-image": ZImageSpec(**size),  # type: ignore[arg-type]
    }
    spec = specs[section]
    is_srpo = section.startswith("srpo")
    num_steps = 4 if options.tiny else 25 if is_srpo else 10
    config = RunConfig(
        model=spec.tiny() if options.tiny else spec,
        process=GaussianProcess(RectifiedFlow(shift=3.0), num_steps=num_steps),
        objective=SRPO(num_grid_steps=50),
        data=InlinePrompts(PROMPTS),
        tuning=Lora(rank=16),
        rewards={"hps": RewardConfig(HpsReward())},
        optim=OptimConfig(lr=1e-5),
        batch=BatchConfig(2, rollout_batch_size=2, micro_batch_size=1),
        engine=EngineConfig(
            precision="bf16",
            base_precision=options.kind,  # type: ignore[arg-type]
            rollout_precision=options.kind if is_srpo else "same",  # type: ignore[arg-type]
            activation_memory="checkpoint",
            compile=options.compile,
        ),
        steps=1000,
    )
    if is_srpo:
        return override(config, options.settings)
    config = replace(
        config,
        process=GaussianProcess(RectifiedFlow(shift=3.0), FlowSDE(0.7), num_steps),
        objective=GRPO(group_size=4, clip_range=1e-4),
        guidance=None if section == "grpo-flux" else Guidance(4.5),
        batch=BatchConfig(1, rollout_batch_size=2, micro_batch_size=1),
    )
    return override(config, options.settings)


def measure(options: SmallOptions, section: str, record: Record) -> None:
    """Train under the section's limit and record peak memory, seconds per prompt, and what the plan estimates."""
    config, limit = run_config(options, section), LIMITS[section]
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total))
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(config, section, Path(folder), options.tiny)
        run.batch = config.batch
        after_build = reserved_gib()
        start = time.perf_counter()
        warm_up(run)
        log(section, f"warm after {time.perf_counter() - start:.0f} s, {reserved_gib():.2f} GiB reserved so far")
        times: list[float] = []
        for step in range(1, NUM_STEPS + 1):
            if times and time.monotonic() + times[-1] > options.deadline:
                break
            synchronize()
            start = time.perf_counter()
            event = train_step(run, step).to_event()
            synchronize()
            times.append(time.perf_counter() - start)
            metrics = " ".join(f"{key} {value:.4g}" for key, value in event.metrics.items())
            log(section, f"step of {times[-1]:.2f} s; {metrics}")
            record(
                {
                    "section": section,
                    "limit GiB": limit,
                    "kind": options.kind,
                    "8-bit layers": num_8bit_layers(run),
                    "max reserved GiB": reserved_gib(),
                    "max allocated GiB": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
                    "reserved after building GiB": after_build,
                    "steps": len(times),
                    "seconds per prompt": min(times) / config.batch.prompts,
                }
            )


def reserved_gib() -> float:
    return torch.cuda.max_memory_reserved() / 2**30 if CUDA else 0.0


def add_planned_memory(results: Results, options: SmallOptions) -> None:
    """Add the estimate of `tastemaker plan` to every result; this needs no GPU."""
    planned: dict[tuple[str, str], float] = {}
    for result in results:
        key = result["section"], result["kind"]
        if key not in planned:
            config = run_config(replace(options, kind=result["kind"]), result["section"])
            planned[key] = estimate_resources(config).total / 2**30
        result["planned GiB"] = planned[key]


def print_table(results: Results) -> None:
    print(f"\n{device_name()}, PyTorch {torch.__version__}")
    print("| section | limit GiB | max reserved GiB | max allocated GiB | planned GiB | steps | s per prompt |")
    print("|---|---|---|---|---|---|---|")
    for result in {each["section"]: each for each in results}.values():  # the last of each section
        keys = ("limit GiB", "max reserved GiB", "max allocated GiB", "planned GiB")
        cells = [f"{result[key]:.2f}" if key in result else "" for key in keys]
        cells += [str(result["steps"]), f"{result['seconds per prompt']:.2f}"]
        print(f"| {' | '.join([result['section'], *cells])} |")


def main() -> None:
    parser = section_parser(",".join(SECTIONS), 480.0)
    parser.add_argument("--kind", default="fp8", choices=("fp8", "int8"), help="8-bit numbers of base and rollouts")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, such as engine.*")
    parser.add_argument("--plan", default="", help="results file: add the planned memory, measure nothing")
    chosen = parser.parse_args()
    compiled, deadline = not chosen.eager and not chosen.tiny, time.monotonic() + chosen.seconds
    options = SmallOptions(chosen.tiny, chosen.kind, compiled, tuple(chosen.set), deadline)
    if chosen.section:
        torch.manual_seed(0)
        torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
        measure(options, chosen.section, result_writer(chosen.out))
        return
    if chosen.plan:
        results = read_results(Path(chosen.plan))
        add_planned_memory(results, options)
        write_results(chosen.plan, results)
        print_table(results)
        return
    arguments = ["--kind", chosen.kind, *(["--eager"] if chosen.eager else [])]
    arguments += [word for setting in chosen.set for word in ("--set", setting)]
    # Segments that grow: weights that visit the GPU leave holes that activations of other sizes would not fit into.
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    print_table(run_sections(__file__, SECTIONS, chosen, arguments, **environment))


if __name__ == "__main__":
    main()
