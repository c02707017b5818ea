"""Commands that examine a configuration before training: check, plan, profile and doctor."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..console import ProgressBar, Table, make_console, show_status
from ..core.registry import ConfigError
from .options import (
    DIAGNOSE,
    EXIT_FAILURE,
    Overrides,
    Recipe,
    RunDeviceOption,
    Tiny,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

if TYPE_CHECKING:
    from ..config.schema import AnyConfig, AutoencoderRunConfig, RunConfig
    from ..diagnostics.plan import ResourceEstimate

app = typer.Typer()

GIB = 2**30
STEP_COUNT_LABELS = {
    "prompts": "prompts, images or pairs per step",
    "samples": "samples per step",
    "network_calls_per_sample": "network calls per sample",
    "rollout_network_calls": "network calls per rollout",
    "updates": "updates per step",
    "minibatch_size": "samples per update",
    "micro_batch_size": "micro-batch per GPU (samples)",
    "timesteps_per_call": "sampling steps per backward pass",
    "total_updates": "updates in total",
}
MEMORY_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "snapshots": "weight snapshots (EMA, reference)",
    "frozen": "autoencoder and rewards",
    "kv_cache": "KV cache and copied weights",
    "encoders": "text or image encoder, before the rollout",
    "rollout_copies": "copies of weights for rollouts",
    "collect_activations": "activations of the rollout",
    "update_activations": "activations of the update",
}
AUTOENCODER_MEMORY_LABELS = {
    "weights": "weights, with the discriminator",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "snapshots": "weight snapshots (EMA)",
    "frozen": "LPIPS",
    "collect_activations": "activations of the discriminator's update",
    "update_activations": "activations of the autoencoder's update",
}
VERDICTS = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]", "skip": "[yellow]skip[/]"}


@app.command(rich_help_panel=DIAGNOSE, epilog="Example: tastemaker check grpo-playground-flow optim.lr=3e-4")
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: torchrun's.")] = None,
) -> None:
    """Print the resolved configuration, the batch arithmetic of a step, the share of the data, and every problem.

    Reads the data and looks for all files that the run needs, but loads no model.
    """
    from ..config import check as checks
    from ..config import config_warnings, required_files
    from ..config.dump import config_to_dict, config_to_yaml
    from ..config.load import load_any_config
    from ..config.step_counts import compute_step_counts
    from ..training.device_precision import describe_precision

    config, console = load_any_config(recipe, merge_overrides(overrides)), make_console()
    console.print(config_to_yaml(config), markup=False, highlight=False, soft_wrap=True)
    table = Table("batch", "", title="one training step")
    counts = asdict(compute_step_counts(config, world_size or checks.torchrun_world_size()))
    for key, label in STEP_COUNT_LABELS.items():
        if key != "timesteps_per_call" or counts[key] > 1:
            table.add_row(label, f"{counts[key]:,}")
    console.print(table)
    precision, emulation = describe_precision(config.engine)
    console.print(f"precision: {precision}", markup=False, highlight=False, soft_wrap=True)
    problems = [*checks.find_problems(config, world_size), *required_files.find_missing_files(config)]
    data, problem = read_data(config) if not checks.check_data_files(config, 1) else ("", "")
    problems += [problem] if problem else []
    if problems:
        raise ConfigError("\n".join(problems))
    if data:
        console.print(f"data: {data}", markup=False, highlight=False, soft_wrap=True)
    for warning in [
        *config_warnings.collect_warnings(config),
        *config_warnings.warn_small_lora_updates(config),
        *required_files.find_missing_downloads(config),
        *([emulation] if emulation else []),
    ]:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    console.print("no problems found")
    settings = shlex.join([recipe, *(overrides or [])])
    doctor = [f"tastemaker doctor {settings} --tiny"] if "objective" in config_to_dict(config) else []
    print_next_steps(f"tastemaker plan {settings}", *doctor, f"tastemaker train {settings}")


def read_data(config: AnyConfig) -> tuple[str, str]:
    """Return how much of the data the run sees, and the problem of reading it; empty if there is none."""
    from ..config import required_files

    try:
        return str(required_files.summarize_data(config) or ""), ""
    except ConfigError as error:
        return "", str(error)


@app.command(rich_help_panel=DIAGNOSE, epilog="Example: tastemaker plan flowgrpo-sd35 --gpu h100-80g --world-size 8")
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    gpu: Annotated[str, typer.Option(help="GPU by name: h100-80g, a100-40g, rtx4090-24g, l40s-48g, ...")] = "",
    gpu_gib: Annotated[float | None, typer.Option(min=1, help="Memory of a GPU in GiB; default: 80.")] = None,
    tflops: Annotated[float | None, typer.Option(min=1, help="TFLOP/s of a GPU; default: 540, an H200.")] = None,
    tbps: Annotated[float | None, typer.Option(min=0.1, help="Memory bandwidth in TB/s; default: 4.3.")] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure again, even if this configuration was planned before.")
    ] = False,
) -> None:
    """Predict GPU memory and step time of a run without loading it, and suggest settings if it does not fit."""
    from ..config.load import load_any_config
    from ..config.schema import JudgeRunConfig, PreferenceRunConfig
    from ..diagnostics import plan as planner
    from ..diagnostics.activation_budget import fit_activation_memory
    from ..diagnostics.gpu_presets import find_gpu
    from ..diagnostics.plan_cache import PlanCache
    from ..training.device_precision import resolve_for_planning

    preset = find_gpu(gpu) if gpu else None
    gpu_gib = gpu_gib or (preset.gib if preset else 80.0)
    tflops, tbps = tflops or (preset.tflops if preset else 540.0), tbps or (preset.tbps if preset else 4.3)
    config = load_any_config(recipe, merge_overrides(overrides))
    if isinstance(config, JudgeRunConfig | PreferenceRunConfig):
        raise unplanned_error(config)
    engine, precision = resolve_for_planning(config.engine)
    config, console, cache = replace(config, engine=engine), make_console(), PlanCache(enabled=not no_cache)
    known = "found in the cache" if cache.knows(config, world_size) else "tracing one rollout and one update"
    choice = None
    with show_status(f"planning {config.name}: {known}", stderr_console()):
        if config.engine.activation_memory == "auto":
            choice = fit_activation_memory(config, gpu_gib * GIB, world_size, cache.estimate)
            config = replace(config, engine=choice.engine)
        estimate = cache.estimate(config, world_size)
    print_memory(config, estimate, world_size, console)
    console.print(f"precision: {precision}", highlight=False, markup=False, soft_wrap=True)
    if choice is not None:
        console.print(f"activation memory: {choice.reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(describe_batch(config, estimate, world_size))
    console.print(describe_step_time(config.steps, estimate, tflops, tbps))
    if estimate.total <= gpu_gib * GIB:
        console.print(f"It fits into {gpu_gib:.0f} GiB.")
        print_next_steps(train_command(recipe, overrides or [], world_size))
        return
    console.print(f"It does not fit into {gpu_gib:.0f} GiB. Settings that save memory, each with all before it:")
    savings = planner.suggest_any_savings(config, estimate, world_size, gpu_gib * GIB, cache.estimate)
    chosen = print_savings(savings, gpu_gib, console)
    if "engine.activation_memory=checkpoint" in chosen:
        hint = "With engine.activation_memory=auto only as many blocks are recomputed as the GPU needs."
        console.print(hint, highlight=False, soft_wrap=True)
    if chosen:
        embed = [f"tastemaker embed {shlex.join([recipe, *(overrides or [])])}"]
        before = embed if planner.EMBED_BEFOREHAND in chosen else []
        print_next_steps(*before, train_command(recipe, overrides or [], world_size, chosen))
    raise typer.Exit(EXIT_FAILURE)


def print_memory(
    config: RunConfig | AutoencoderRunConfig, estimate: ResourceEstimate, world_size: int, console: Console
) -> None:
    """Print the memory of one GPU by purpose, and what is kept in host memory."""
    from ..config.schema import AutoencoderRunConfig

    labels = AUTOENCODER_MEMORY_LABELS if isinstance(config, AutoencoderRunConfig) else MEMORY_LABELS
    table = Table("per GPU", "GiB", title=f"{config.name} on {world_size} GPU{'s' if world_size > 1 else ''}")
    for key, label in labels.items():
        table.add_row(label, f"{getattr(estimate, key) / GIB:.1f}")
    table.add_row("peak", f"{estimate.total / GIB:.1f}", style="bold")
    console.print(table)
    if estimate.host_memory:
        host_gib = world_size * estimate.host_memory / GIB
        console.print(f"Host memory of engine.cpu_offload: {host_gib:.1f} GiB over all ranks.", highlight=False)


def unplanned_error(config: AnyConfig) -> ConfigError:
    """The error about a kind of run whose memory and time are not estimated."""
    if "judge" in vars(config):
        return ConfigError(
            "plan: this recipe trains a judge, and plan cannot estimate the memory of a judge; run `tastemaker "
            "train` instead [TM071]"
        )
    return ConfigError(
        "plan: a preference model trains in seconds, with the memory of its tower; run `tastemaker train` "
        "instead [TM1307]"
    )


def print_savings(savings: Iterator[tuple[str, float]], gpu_gib: float, console: Console) -> list[str]:
    """Print settings that save memory until the run fits, and return them; each is estimated when it is asked for.

    Returns nothing if none of them is enough.
    """
    chosen = []
    while True:
        with show_status("estimating with less memory", stderr_console()):
            saving = next(savings, None)
        if saving is None:
            console.print(f"None of these is enough for {gpu_gib:.0f} GiB.")
            return []
        override, total = saving
        chosen.append(override)
        console.print(f"  {override}: {total / GIB:.1f} GiB", highlight=False, soft_wrap=True)
        if total <= gpu_gib * GIB:
            return chosen


def train_command(recipe: str, overrides: Sequence[str], world_size: int, savings: Sequence[str] = ()) -> str:
    """The command that trains a recipe with some of the suggested savings, on several GPUs with torchrun."""
    settings = [saving.removesuffix(" (approximate)") for saving in savings]
    if settings and (ranks := re.fullmatch(r"(\S+) on (\d+) GPUs, .*", settings[-1])):
        settings[-1], world_size = ranks[1], int(ranks[2])
    start = "tastemaker" if world_size == 1 else f"torchrun --nproc-per-node={world_size} -m tastemaker"
    return " ".join([start, "train", shlex.join([recipe, *overrides]), *settings])


def describe_batch(config: RunConfig | AutoencoderRunConfig, estimate: ResourceEstimate, world_size: int) -> str:
    from ..config.step_counts import compute_step_counts

    counts = compute_step_counts(config, world_size)
    rollout = f"{estimate.collect_batch} samples in rollouts, " if estimate.collect_batch else ""
    total = f"{counts.samples or counts.prompts} samples and {counts.updates} update(s) per step"
    return f"Batch of the network per GPU: {rollout}{estimate.update_batch} in updates; {total}."


def describe_step_time(steps: int, estimate: ResourceEstimate, tflops: float, tbps: float) -> str:
    seconds = estimate.seconds(tflops * 1e12, tbps * 1e12)
    work, speed = f"{estimate.flops / 1e15:.3g} PFLOP", f"{tflops:.0f} TFLOP/s"
    if estimate.collect_bytes_read:
        work += f" and {estimate.collect_bytes_read / 1e12:.2g} TB read for decoding"
        speed += f" and {tbps:.1f} TB/s"
    total = steps * seconds
    time = f"{total / 3600:.1f} h" if total >= 360 else f"{total / 60:.1f} min"
    return f"A step takes {work}: {seconds:.2g} s at {speed}, {time} for {steps} steps."


@app.command(rich_help_panel=DIAGNOSE, epilog="Example: tastemaker profile grpo-toy-flow --trace trace.json")
def profile(
    recipe: Recipe,
    overrides: Overrides = None,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured, after one that is not.")] = 3,
    trace: Annotated[Path | None, typer.Option(help="Write a trace of one step for https://ui.perfetto.dev.")] = None,
    tflops: Annotated[
        float | None, typer.Option(min=1, help="Peak TFLOP/s, for the utilization; default: the GPU's.")
    ] = None,
) -> None:
    """Train a few steps without saving them; show where their time and memory go, and settings worth changing."""
    from ..config.build import build, make_tiny
    from ..config.load import load
    from ..diagnostics.activation_budget import choose_activation_memory
    from ..diagnostics.profile import profile_run, suggest_settings

    config, console = load(recipe, merge_overrides(overrides, device)), make_console()
    config = make_tiny(config) if tiny else config
    config = replace(config, steps=max(config.steps, steps + 2))
    with tempfile.TemporaryDirectory() as folder, ProgressBar(stderr_console()) as progress:
        run = build(config, Path(folder), choose_memory=partial(choose_activation_memory, config))
        config = replace(config, engine=run.engine.config)
        progress.start("training", 1 + steps + (trace is not None), unit="steps")
        result = profile_run(run, config, steps, trace, progress.advance)
        run.engine.close()
    table = Table("part of a step", "seconds", "share", title=f"{config.name}: {result.seconds:.3g} s per step")
    for name, seconds in result.phases.items():
        table.add_row(
            "waiting for rewards" if name == "waiting" else name, f"{seconds:.3f}", f"{result.share(name):.0%}"
        )
    other = result.seconds - sum(result.phases.values())
    table.add_row("other", f"{other:.3f}", f"{other / result.seconds:.0%}")
    console.print(table)
    memory = Table("memory", "GiB, if not MiB")
    for name, count in result.memory.items():
        memory.add_row(name, f"{count / GIB:.2f}" if count > GIB / 10 else f"{count / 2**20:.1f} MiB")
    if result.peak_memory and result.device_memory:
        memory.add_row("peak on the GPU", f"{result.peak_memory / GIB:.1f} of {result.device_memory / GIB:.0f}")
    console.print(memory)
    if result.flops:
        rate, peak = result.flops / result.seconds / 1e12, tflops or result.peak_tflops
        share = f", {rate / peak:.0%} of {peak:g}" if peak else ""
        console.print(f"{rate:.3g} TFLOP/s{share}, counted by `tastemaker plan`.", highlight=False)
    if trace is not None:
        console.print(f"trace: {trace}; open it with https://ui.perfetto.dev", highlight=False, markup=False)
    suggestions = suggest_settings(result, run, config)
    console.print("Worth a try:" if suggestions else "No setting stands out.")
    for each in suggestions:
        console.print(f"  {each.setting}: {each.reason}", highlight=False, markup=False, soft_wrap=True)
    print_next_steps(f"tastemaker train {shlex.join([recipe, *(overrides or [])])}")


@app.command(rich_help_panel=DIAGNOSE, epilog="Example: tastemaker doctor grpo-toy-flow")
def doctor(recipe: Recipe, overrides: Overrides = None, tiny: Tiny = False, device: RunDeviceOption = None) -> None:
    """Check on the real configuration that training can work: ratios, gradients, rewards, pixels, resume, ranks."""
    from ..config.build import warn_ignored_overrides
    from ..config.load import load
    from ..diagnostics.doctor import count_checks, run_doctor

    config, console, failures = load(recipe, merge_overrides(overrides, device)), make_console(), 0
    if tiny:
        warn_ignored_overrides(config, overrides or ())
    with ProgressBar(stderr_console()) as progress:
        progress.start("checking", count_checks(), unit="checks")
        for result in run_doctor(config, tiny=tiny):
            failures += result.verdict == "fail"
            line = f"{VERDICTS[result.verdict]}  {escape(result.name)}: {escape(result.number)}"
            progress.print_above(line, console)
            if result.advice:
                progress.print_above(f"      {escape(result.advice)}", console)
            progress.advance()
    if failures:
        console.print(f"{failures} check(s) failed: this run would not train as it should")
        raise typer.Exit(EXIT_FAILURE)
    console.print("all checks that apply passed")
    print_next_steps(f"tastemaker train {shlex.join([recipe, *(overrides or [])])}")
