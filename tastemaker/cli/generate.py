"""The command that samples a model: generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import (
    LOOK,
    Overrides,
    PromptFileOption,
    RunDeviceOption,
    SaveStepsOption,
    SearchOption,
    Tiny,
    VerifierOption,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

app = typer.Typer()

VideoFormat = Literal["mp4", "gif", "png", "frames"]


@app.command(rich_help_panel=LOOK, epilog='Example: tastemaker generate runs/demo --prompt "two red circles"')
def generate(
    recipe: Annotated[str, typer.Argument(help="A recipe, the directory of a run, or an export.")],
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt; repeatable.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="Image to edit, or first frame; repeatable for several.")
    ] = None,
    prompts: PromptFileOption = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("generated"),
    count: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    search: SearchOption = "single",
    num_candidates: Annotated[int, typer.Option(min=1, help="Candidates of the search.")] = 4,
    verifier: VerifierOption = "run",
    scheduler: Annotated[str, typer.Option(help="Scheduler class of diffusers, instead of the recipe's sampler.")] = "",
    num_inference_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of --scheduler; default: the recipe's.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Weights: live, or a snapshot such as ema or reference.")] = "live",
    lora: Annotated[Path | None, typer.Option(help="LoRA to load: a file or a hub id.")] = None,
    lora_scale: Annotated[float, typer.Option(help="Scale of the LoRA; 0 is the base model.")] = 1.0,
    video_format: Annotated[
        VideoFormat | None, typer.Option(help="Video format; default: mp4 if PyAV is installed.")
    ] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames per second of videos.")] = 8,
    save_steps: SaveStepsOption = False,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Generate images or videos from prompts. Resumes if interrupted; runs on several GPUs under torchrun."""
    from .. import api

    api.generate(
        recipe,
        prompt or (),
        merge_overrides(overrides, device),
        images=image or (),
        prompt_file=prompts,
        out=out,
        count=count,
        seed=seed,
        search=search,
        num_candidates=num_candidates,
        verifier=verifier,
        scheduler=scheduler,
        num_inference_steps=num_inference_steps,
        save_steps=save_steps,
        weights=weights,
        lora=lora,
        lora_scale=lora_scale,
        video_format=video_format or "",
        fps=fps,
        tiny=tiny,
        console=stderr_console(),
    )
    print_next_steps(
        f"open {out / 'sheet.png'}, which shows the samples with their prompts",
        f"tastemaker score {out} --reward REWARD (see `tastemaker list rewards`)",
    )
