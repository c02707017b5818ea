"""Training speed and memory of SRPO and Flow-GRPO on full-size FLUX.1-dev and SD3.5 medium with random weights.

    python bench/flux.py --out flux.json            # on a GPU of at least 100 GiB
    python bench/flux.py --tiny --out tiny.json     # small networks, on any machine
    python bench/flux.py --plan flux.json           # compare measured peaks with `tastemaker plan`
    python bench/flux.py --sections full,full-fp8,lora,lora-fp8,lora-fp8-base,plain

    python bench/flux.py --sections lora,lora-peft,lora-merged,grpo-flux,grpo-flux-peft    # how adapters are computed

Sections that end in fp8 have FP8 rollouts; lora-fp8-base also keeps the frozen weights in FP8, without copies. Those
that end in peft compute adapters with peft's layers, and those with merged have rollouts with merged adapters:
lora-merged-fp8-base multiplies merged copies in FP8, and its frozen weights are in FP8 too.

Lower bound of SRPO at 720x720 with 25 steps: a forward pass of FLUX is 37 TFLOP (2537 tokens), so 25 of them and two
backward passes with checkpointing are 1.23 PFLOP per prompt, 1.6 s at 790 TFLOP/s. LoRA needs no gradient of the
weights: 1.15 PFLOP. Flow-GRPO on SD3.5 medium at 512x512, a group of 8 in 10 guided steps: 1.10 PFLOP, 1.4 s (see
plain_flow_grpo). Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import DEVICE, device_name, median_seconds, peak_gib  # beside this file, in no package
from sections import Record, Results, log, result_writer, run_sections, section_parser
from training_run import (
    PROMPTS,
    build_run,
    describe_batch,
    free_gradients,
    override,
    time_steps,
    trace_phases,
    write_random_embeddings,
)

from tastemaker.config.schema import BatchConfig, EngineConfig, OptimConfig, RewardConfig, RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance
from tastemaker.core.weights import FullFinetuning
from tastemaker.data.prompts import InlinePrompts
from tastemaker.models.flux import FluxSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.rewards.hps import HpsReward
from tastemaker.training.run import Run

SECTIONS = {
    "parts": 60,
    "full": 160,
    "full-fp8": 160,
    "lora": 130,
    "lora-fp8": 130,
    "lora-fp8-base": 130,
    "lora-peft": 130,
    "lora-merged": 130,
    "lora-merged-fp8": 130,
    "lora-merged-fp8-base": 130,
    "plain": 60,
    "grpo-sd35": 150,
    "plain-grpo-sd35": 60,
    "grpo-flux": 150,
    "grpo-sd35-peft": 150,
    "grpo-flux-peft": 150,
    "offload": 400,
}  # seconds
VARIANTS = ("fp8", "peft", "merged")  # of other sections, measured if asked for
# Prompts, rollout batch size, micro-batch size, timesteps per call if not 1; the first that fits is measured.
BATCHES: dict[str, list[tuple[int, ...]]] = {
    "full": [(8, 8, 4), (4, 4, 2), (2, 2, 1)],
    "lora": [(8, 8, 4), (8, 8, 2), (2, 2, 1)],
    "grpo-sd35": [(1, 8, 8), (1, 8, 8, 3), (1, 4, 4)],
    "grpo-flux": [(1, 8, 8), (1, 4, 4)],
    "offload": [(8, 8, 8), (2, 2, 2)],
}
LORA_SECTIONS = tuple(section for section in SECTIONS if section.startswith("lora"))
BATCHES |= {"full-fp8": BATCHES["full"], **dict.fromkeys(LORA_SECTIONS, BATCHES["lora"])}
BATCHES["lora-merged-fp8-base"] = [(8, 8, 2), (2, 2, 1)]  # in 30 GiB
BATCHES |= {f"{section}-peft": BATCHES[section] for section in ("grpo-sd35", "grpo-flux")}
MEASURED = dict.fromkeys(("grpo-sd35", "grpo-sd35-peft"), 2)  # how many of a section's batches, if not one
BASELINES = dict.fromkeys(("full", "full-fp8", *LORA_SECTIONS, "plain"), "plain")
BASELINES |= dict.fromkeys(("grpo-sd35", "grpo-sd35-peft", "plain-grpo-sd35"), "plain-grpo-sd35")
PFLOP_PER_PROMPT = {"full": 1.23, "full-fp8": 1.23, "offload": 1.23, "grpo-sd35": 1.10, "grpo-sd35-peft": 1.10}
PFLOP_PER_PROMPT |= dict.fromkeys(LORA_SECTIONS, 1.15)
NoteFn = Callable[[str, float, int], None]  # name, milliseconds, batch size


@dataclass(frozen=True)
class FluxOptions:
    tiny: bool
    attention: str
    compile: bool
    all_batches: bool  # not only the first that fits
    deadline: float  # by time.monotonic()
    folder: Path
    settings: tuple[str, ...] = ()  # KEY=VALUE of the configuration of every section


def flux_spec(folder: Path, side: int, tiny: bool) -> FluxSpec:
    spec = FluxSpec(
        weights="random",
        height=side,
        width=side,
        guidance_scale=3.5,
        rollout_guidance_scale=1.0,
        truncate_timesteps=True,
    )
    if tiny:
        return spec.tiny()
    return replace(
        spec, embeddings=write_random_embeddings(folder, prompt_embeds=(512, 4096), pooled_prompt_embeds=(768,))
    )


def sd35_spec(folder: Path, side: int, tiny: bool) -> Sd3Spec:
    spec = Sd3Spec(weights="random", height=side, width=side)
    if tiny:
        return spec.tiny()
    return replace(
        spec, embeddings=write_random_embeddings(folder, prompt_embeds=(333, 4096), pooled_prompt_embeds=(2048,))
    )


def run_config(options: FluxOptions, section: str) -> RunConfig:
    """Return the configuration of a section, with the settings of the command line."""
    return override(section_config(options, section), options.settings)


def section_config(options: FluxOptions, section: str) -> RunConfig:
    """Return the configuration of a section."""
    offloads = section == "offload"
    trains_all_weights = section in ("full", "full-fp8", "parts", "offload")
    lora = Lora(rank=16, fused=not section.endswith("-peft"), merge_rollouts="-merged" in section)
    srpo = RunConfig(
        model=flux_spec(options.folder, 720, options.tiny),
        process=GaussianProcess(RectifiedFlow(shift=3.0), num_steps=4 if options.tiny else 25),
        objective=SRPO(num_grid_steps=50),
        data=InlinePrompts(PROMPTS),
        tuning=FullFinetuning() if trains_all_weights else lora,
        rewards={"hps": RewardConfig(HpsReward())},
        optim=OptimConfig(lr=1e-6, max_grad_norm=0.1, state_dtype="int8" if trains_all_weights else "fp32"),
        engine=EngineConfig(
            precision="bf16",
            param_dtype="bf16" if trains_all_weights else "fp32",
            activation_memory="checkpoint",
            base_precision="fp8" if section.endswith("fp8-base") else "same",
            rollout_precision="fp8" if "-fp8" in section else "same",
            attention_backend=options.attention,  # type: ignore[arg-type]
            compile=options.compile and not offloads,
            strategy="fsdp" if offloads else "replicated",
            cpu_offload=offloads,
        ),
        steps=1000,
    )
    if not section.startswith("grpo"):
        return srpo
    process = GaussianProcess(RectifiedFlow(shift=3.0), FlowSDE(0.7), 4 if options.tiny else 10)
    grpo = replace(srpo, process=process, objective=GRPO(group_size=4 if options.tiny else 8, clip_range=1e-4))
    if section.startswith("grpo-flux"):
        spec = flux_spec(options.folder, 512, options.tiny)
        return replace(grpo, model=replace(spec, rollout_guidance_scale=None, truncate_timesteps=False))
    # Small enough to keep all activations: 48 GiB are planned, and one more forward pass per block is saved.
    engine = replace(grpo.engine, activation_memory="keep")
    return replace(grpo, model=sd35_spec(options.folder, 512, options.tiny), guidance=Guidance(4.5), engine=engine)


def measure_training(options: FluxOptions, section: str, record: Record) -> None:
    run = build_run(run_config(options, section), section, options.folder, options.tiny)
    timeline = trace_phases(run)
    measured = 0
    for number, sizes in enumerate(BATCHES[section]):
        if number and time.monotonic() > options.deadline - 55:
            log(section, "no time is left for other batches")
            return
        batch = batch_config(sizes)
        run.objective = with_timesteps_per_call(run.objective, sizes)
        try:
            result = time_steps(run, timeline, section, batch, options.deadline)
        except torch.OutOfMemoryError as error:
            log(section, f"{describe_batch(batch)}: {str(error).splitlines()[0]:.150}")
            free_gradients(run)
            if measured:  # the others are for less memory
                return
            continue
        result["geometry"] = sizes
        result["batch"] += f", {sizes[3]} timesteps per call" if len(sizes) > 3 else ""
        if section in PFLOP_PER_PROMPT:
            result["TFLOP/s"] = 1000 * PFLOP_PER_PROMPT[section] / result["seconds per prompt"]
        result["weights"] = sum(p.numel() for p in run.policy.weights.net.parameters())
        record(result)
        measured += 1
        if not options.all_batches and measured >= MEASURED.get(section, 1):
            return


def with_timesteps_per_call(objective: Any, sizes: tuple[int, ...]) -> Any:
    return replace(objective, timesteps_per_call=sizes[3]) if len(sizes) > 3 else objective


def batch_config(sizes: tuple[int, ...]) -> BatchConfig:
    prompts, rollout_batch_size, micro_batch_size = sizes[:3]
    return BatchConfig(prompts, rollout_batch_size=rollout_batch_size, micro_batch_size=micro_batch_size)


def measure_parts(options: FluxOptions, section: str, record: Record) -> None:
    """Time decoder, reward, optimizer and network by themselves."""
    run = build_run(run_config(options, section), section, options.folder, options.tiny)
    model: Any = run.policy.model

    def note(name: str, milliseconds: float, batch_size: int) -> None:
        per_sample = milliseconds / batch_size
        text = f"{milliseconds:.1f} ms, {per_sample:.1f} ms per sample, peak so far {peak_gib():.1f} GiB"
        log(section, f"{name}, batch of {batch_size}: {text}")
        record({"section": section, "name": name, "rows": batch_size, "ms": milliseconds, "ms per sample": per_sample})

    def forward(batch_size: int) -> Callable[[], None]:
        cond = run.policy.embed(PROMPTS[:batch_size])
        x = torch.randn(batch_size, *model.shape, device=run.engine.device)
        t = torch.full((batch_size,), 0.8, device=run.engine.device)

        def work() -> None:
            with torch.no_grad(), run.engine.autocast():
                model.predict(x, t, cond)

        return work

    sizes = (2, 1) if options.tiny else (8, 1)
    measure_decoder_and_reward(run, note, sizes[0])
    measure_optimizer(run, note)
    for batch_size in sizes:
        note("network, compiled", milliseconds_per_call(forward(batch_size)), batch_size)


def milliseconds_per_call(work: Callable[[], Any]) -> float:
    return 1000 * median_seconds(work, 3, warmup=2)


def measure_decoder_and_reward(run: Run, note: NoteFn, batch_size: int) -> None:
    """Time decoder and reward with their gradients, the decoder in both memory formats."""
    model: Any = run.policy.model
    x = torch.randn(batch_size, *model.shape, device=run.engine.device, requires_grad=True)

    def decode() -> None:
        torch.autograd.grad(model.decode(x).square().mean(), x)

    def score() -> None:
        leaf = pixels.detach().requires_grad_()
        torch.autograd.grad(run.rubric.score(leaf, PROMPTS[:batch_size]).total.sum(), leaf)

    note("decoder with gradient", milliseconds_per_call(decode), batch_size)
    with torch.no_grad():
        pixels = model.decode(x)
    note("reward with gradient", milliseconds_per_call(score), batch_size)
    model.autoencoder.net.to(memory_format=torch.channels_last)
    note("decoder with gradient, channels last", milliseconds_per_call(decode), batch_size)
    model.autoencoder.net.to(memory_format=torch.contiguous_format)


def measure_optimizer(run: Run, note: NoteFn) -> None:
    """Time one update of all weights."""
    for p in run.engine.parameters.values():
        p.grad = torch.full_like(p, 1e-4)
    note("update", milliseconds_per_call(lambda: run.engine.optimizer.update(1e-6)), 1)
    free_gradients(run)


def measure_baseline(options: FluxOptions, section: str, record: Record) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "baselines"))
    import plain_flow_grpo
    import plain_srpo

    measure = plain_srpo.measure if section == "plain" else plain_flow_grpo.measure
    record({"section": section, **measure(DEVICE, options.tiny, lambda text: log(section, text))})


def add_planned_memory(results: Results, options: FluxOptions) -> None:
    """Add the estimate of `tastemaker plan` to every measured peak."""
    from tastemaker.diagnostics.plan import estimate_resources

    for number, result in enumerate(results):
        if "geometry" in result:
            folder = options.folder / str(number)
            folder.mkdir()
            config = run_config(replace(options, folder=folder), result["section"])
            sizes = tuple(result["geometry"])
            objective = with_timesteps_per_call(config.objective, sizes)
            resources = estimate_resources(replace(config, batch=batch_config(sizes), objective=objective))
            result["planned GiB"] = resources.total / 2**30


def print_table(results: Results) -> None:
    plain = {result["section"]: result["seconds per prompt"] for result in results if "plain" in result["section"]}
    counts = Counter(result["section"] for result in results)
    print(f"\n{device_name()}, PyTorch {torch.__version__}, {dict(counts)}")
    print("| section | batch | s per prompt | x plain | peak GiB | planned GiB | graphs, recompiled | shares |")
    print("|---|---|---|---|---|---|---|---|")
    for result in results:
        if "seconds per prompt" not in result:
            continue
        seconds = result["seconds per prompt"]
        baseline = plain.get(BASELINES.get(result["section"], ""))
        speedup = f"{baseline / seconds:.2f}x" if baseline else ""
        planned = f"{result['planned GiB']:.1f}" if result.get("planned GiB") else ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in result.get("shares", {}).items())
        graphs = f"{result.get('graphs', 0)}, {result.get('recompiled', 0)}"
        cells = [result["section"], result.get("batch", ""), f"{seconds:.3f}", speedup]
        cells += [f"{result['peak GiB']:.1f}", planned, graphs, shares]
        print(f"| {' | '.join(cells)} |")
    print("| part | batch size | ms | ms per sample |\n|---|---|---|---|")
    for result in results:
        if "ms" in result:
            print(f"| {result['name']} | {result['rows']} | {result['ms']:.1f} | {result['ms per sample']:.1f} |")


def main() -> None:
    usual = [section for section in SECTIONS if not set(VARIANTS) & set(section.split("-"))]
    parser = section_parser(",".join(usual), 720.0)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--all-batches", action="store_true", help="not only the first that fits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, such as engine.*")
    parser.add_argument("--plan", default="", help="results file: add the planned memory, measure nothing")
    chosen = parser.parse_args()
    if not chosen.section and not chosen.plan:
        arguments = ["--attention", chosen.attention, *(["--eager"] if chosen.eager else [])]
        arguments += ["--all-batches"] if chosen.all_batches else []
        arguments += [word for setting in chosen.set for word in ("--set", setting)]
        # PyTorch's autograd cache confuses graphs that differ in their attention kernels.
        print_table(run_sections(__file__, SECTIONS, chosen, arguments, TORCHINDUCTOR_AUTOGRAD_CACHE="0"))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if chosen.tiny else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        compiled, deadline = not chosen.eager and not chosen.tiny, time.monotonic() + chosen.seconds
        options = FluxOptions(
            chosen.tiny, chosen.attention, compiled, chosen.all_batches, deadline, Path(folder), tuple(chosen.set)
        )
        if chosen.plan:
            results = json.loads(Path(chosen.plan).read_text(encoding="utf-8"))
            add_planned_memory(results, options)
            print_table(results)
            return
        measures = {"parts": measure_parts, "plain": measure_baseline, "plain-grpo-sd35": measure_baseline}
        measures.get(chosen.section, measure_training)(options, chosen.section, result_writer(chosen.out))


if __name__ == "__main__":
    main()
