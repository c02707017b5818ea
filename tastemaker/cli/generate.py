"""The command that samples a model: generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    Overrides,
    RunDeviceOption,
    SearchOption,
    Tiny,
    VerifierOption,
    VideoFormat,
    merge_overrides,
    stderr_console,
    warn_unused_overrides,
)

app = typer.Typer()


@app.command()
def generate(
    recipe: Annotated[str, typer.Argument(help="A recipe, the directory of a run, or an export.")],
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file: .txt, .jsonl or .csv.")] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("generated"),
    count: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    search: SearchOption = "single",
    n: Annotated[int, typer.Option("--n", "--candidates", min=1, help="Candidates of the search.")] = 4,
    scheduler: Annotated[str, typer.Option(help="Scheduler class of diffusers, instead of the recipe's sampler.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of --scheduler; default: the recipe's.")] = None,
    judge: VerifierOption = "run",
    weights: Annotated[str, typer.Option(help="Weights: live, or a snapshot such as ema or reference.")] = "live",
    lora: Annotated[Path | None, typer.Option(help="LoRA to load: a file or a hub id.")] = None,
    lora_scale: Annotated[float, typer.Option(help="Scale of the LoRA; 0 is the base model.")] = 1.0,
    clips: Annotated[VideoFormat | None, typer.Option(help="Video format; default: mp4 if PyAV is installed.")] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames per second of videos.")] = 8,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Generate images or videos from prompts. Resumes if interrupted; runs on several GPUs under torchrun."""
    from ..search import generation, settings

    config, checkpoint = generation.resolve_source(recipe, merge_overrides(overrides, device), lora)
    warn_unused_overrides(config, overrides, tiny=tiny)
    batch = generation.choose_prompts(prompt or (), prompts, config)
    sampler, video_format = settings.build_sampler(search, n, scheduler, steps), clips.value if clips else ""
    options = generation.GenerationOptions(
        batch, count, seed, sampler, weights, out, lora_scale, judge, video_format, fps
    )
    generation.generate_samples(config, checkpoint, options, tiny=tiny, console=stderr_console())
