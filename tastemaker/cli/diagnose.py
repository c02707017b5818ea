"""Commands that examine a configuration before training: check, plan and doctor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..core.registry import ConfigError
from .options import DIAGNOSE, EXIT_FAILURE, Overrides, Recipe, RunDeviceOption, Tiny, merge_overrides, stderr_console

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
    "total_updates": "updates in total",
}
MEMORY_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "snapshots": "weight snapshots (EMA, reference)",
    "frozen": "autoencoder and rewards",
    "kv_cache": "KV cache and copied weights",
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
    from ..config.dump import config_to_yaml
    from ..config.load import load_any_config
    from ..training.device_precision import describe_precision

    config, console = load_any_config(recipe, merge_overrides(overrides)), Console()
    console.print(config_to_yaml(config), markup=False, highlight=False, soft_wrap=True)
    table = Table("batch", "", title="one training step")
    counts = asdict(checks.compute_step_counts(config, world_size or checks.torchrun_world_size()))
    for key, label in STEP_COUNT_LABELS.items():
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
) -> None:
    """Predict GPU memory and step time of a run without loading it, and suggest settings if it does not fit."""
    from ..config.load import load_any_config
    from ..config.schema import AutoencoderRunConfig, JudgeRunConfig
    from ..diagnostics import plan as planner
    from ..diagnostics.gpu_presets import find_gpu
    from ..training.device_precision import resolve_for_planning

    preset = find_gpu(gpu) if gpu else None
    gpu_gib = gpu_gib or (preset.gib if preset else 80.0)
    tflops, tbps = tflops or (preset.tflops if preset else 540.0), tbps or (preset.tbps if preset else 4.3)
    config = load_any_config(recipe, merge_overrides(overrides))
    if isinstance(config, JudgeRunConfig):
        raise ConfigError(
            "plan: the recipe trains a judge, whose size is not known; run `tastemaker train` instead [TM071]"
        )
    engine, precision = resolve_for_planning(config.engine)
    config, console = replace(config, engine=engine), Console()
    is_autoencoder = isinstance(config, AutoencoderRunConfig)
    with show_progress(f"planning {config.name}: tracing one rollout and one update on fake tensors"):
        estimate = planner.estimate_any(config, world_size)
    labels = AUTOENCODER_MEMORY_LABELS if is_autoencoder else MEMORY_LABELS
    table = Table("per GPU", "GiB", title=f"{config.name} on {world_size} GPU{'s' if world_size > 1 else ''}")
    for key, label in labels.items():
        table.add_row(label, f"{getattr(estimate, key) / GIB:.1f}")
    table.add_row("peak", f"{estimate.total / GIB:.1f}", style="bold")
    console.print(table)
    if estimate.host_memory:
        host_gib = world_size * estimate.host_memory / GIB
        console.print(f"Host memory of engine.cpu_offload: {host_gib:.1f} GiB over all ranks.", highlight=False)
    console.print(f"precision: {precision}", highlight=False, markup=False, soft_wrap=True)
    console.print(describe_batch(config, estimate, world_size))
    console.print(describe_step_time(config.steps, estimate, tflops, tbps))
    if estimate.total <= gpu_gib * GIB:
        console.print(f"It fits into {gpu_gib:.0f} GiB.")
        return
    console.print(f"It does not fit into {gpu_gib:.0f} GiB. Settings that save memory, each with all before it:")
    print_savings(planner.suggest_any_savings(config, estimate, world_size, gpu_gib * GIB), gpu_gib, console)
    raise typer.Exit(EXIT_FAILURE)


def print_savings(savings: Iterator[tuple[str, float]], gpu_gib: float, console: Console) -> None:
    """Print settings that save memory until the run fits; each is estimated when it is asked for."""
    while True:
        with show_progress("estimating with less memory"):
            saving = next(savings, None)
        if saving is None:
            console.print(f"None of these is enough for {gpu_gib:.0f} GiB.")
            return
        override, total = saving
        console.print(f"  {override}: {total / GIB:.1f} GiB", highlight=False, soft_wrap=True)
        if total <= gpu_gib * GIB:
            return


@contextmanager
def show_progress(text: str) -> Iterator[None]:
    """Show what is being done on stderr: a spinner on a terminal, and a plain line elsewhere."""
    console = stderr_console()
    if not console.is_terminal:
        console.print(f"{text} ...", markup=False, highlight=False, soft_wrap=True)
        yield
        return
    with console.status(f"{escape(text)} ..."):
        yield


def describe_batch(config: RunConfig | AutoencoderRunConfig, estimate: ResourceEstimate, world_size: int) -> str:
    from ..config.check import compute_step_counts

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


@app.command(rich_help_panel=DIAGNOSE, epilog="Example: tastemaker doctor grpo-toy-flow")
def doctor(recipe: Recipe, overrides: Overrides = None, tiny: Tiny = False, device: RunDeviceOption = None) -> None:
    """Check on the real configuration that training can work: ratios, gradients, rewards, pixels, resume, ranks."""
    from ..config.build import warn_ignored_overrides
    from ..config.load import load
    from ..diagnostics.doctor import run_doctor

    config, console, failures = load(recipe, merge_overrides(overrides, device)), Console(), 0
    if tiny:
        warn_ignored_overrides(config, overrides or ())
    for result in run_doctor(config, tiny=tiny):
        failures += result.verdict == "fail"
        console.print(f"{VERDICTS[result.verdict]}  {escape(result.name)}: {escape(result.number)}", highlight=False)
        if result.advice:
            console.print(f"      {escape(result.advice)}", highlight=False)
    if failures:
        console.print(f"{failures} check(s) failed: this run would not train as it should")
        raise typer.Exit(EXIT_FAILURE)
    console.print("all checks that apply passed")
