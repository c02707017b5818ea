"""The command that writes job files for clusters: launch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..console import show_status
from ..core.registry import ConfigError
from .options import TRAIN, Overrides, Recipe, print_next_steps, stderr_console

app = typer.Typer()


@app.command(
    rich_help_panel=TRAIN, epilog="Example: tastemaker launch flowgrpo-sd35 --slurm --gpu h100-80g --out job.sh"
)
def launch(
    recipe: Recipe,
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for sbatch.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="Write a PyTorchJob of Kubeflow.")] = False,
    sky: Annotated[bool, typer.Option("--sky", help="Write a task of SkyPilot.")] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
    gpu: Annotated[str, typer.Option(help="GPU by name, as of `plan`.")] = "h100-80g",
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs; default: the fewest that suffice.")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a machine.")] = 8,
    hours: Annotated[int, typer.Option(min=1, help="Time limit of a job, of Slurm.")] = 24,
    image: Annotated[str, typer.Option(help="Container image, of Kubernetes.")] = "",
    bucket: Annotated[str, typer.Option(help="Bucket that keeps the runs, of SkyPilot.")] = "",
) -> None:
    """Write a job file for a cluster from a recipe and its plan; nothing is submitted."""
    from ..config.load import load_any_config
    from ..config.schema import JudgeRunConfig, PreferenceRunConfig
    from ..core.output_paths import check_output_file, write_text_atomically
    from ..diagnostics import gpu_presets, job_files
    from ..diagnostics.activation_budget import estimate_on_gpu
    from ..diagnostics.plan_cache import PlanCache
    from .diagnose import unplanned_error

    chosen: dict[job_files.System, bool] = {"slurm": slurm, "k8s": k8s, "sky": sky}
    systems = [system for system, wanted in chosen.items() if wanted]
    if len(systems) != 1:
        raise ConfigError(
            f"launch: expected one of --slurm, --k8s and --sky, got {len(systems)}; choose the system of your "
            "cluster [TM2583]"
        )
    if out is not None:
        check_output_file(out)
    config = load_any_config(recipe, overrides or [])
    if isinstance(config, JudgeRunConfig | PreferenceRunConfig):
        raise unplanned_error(config)
    gpu_bytes = gpu_presets.find_gpu(gpu).gib * 2**30
    estimate = partial(estimate_on_gpu, config, gpu_bytes, estimate=PlanCache().estimate)
    with show_status(f"planning {config.name}", stderr_console()):
        nodes, per_node, planned = job_files.choose_size(config, gpu, estimate, gpus_per_node, gpus)
    job = job_files.Job(
        job_files.job_name(config.name or recipe),
        (recipe, *(overrides or [])),
        gpu.lower(),
        nodes,
        per_node,
        job_files.host_memory_gib(planned, per_node),
        hours,
        image,
        bucket,
    )
    note = (
        f"Written by `tastemaker launch {recipe} --{systems[0]}`: {nodes * per_node} x {gpu}, of which each needs "
        f"{planned.total / 2**30:.0f} GiB by the plan."
    )
    text = job_files.render_job(systems[0], job, [note])
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text_atomically(out, text)
    print_next_steps(job_files.SUBMIT[systems[0]].format(out))
