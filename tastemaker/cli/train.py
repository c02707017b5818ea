"""Commands that train: train and demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    EXIT_INTERRUPTED,
    TRAIN,
    Overrides,
    RunDeviceOption,
    Tiny,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

if TYPE_CHECKING:
    from ..config.schema import AnyConfig

app = typer.Typer()


@app.command(rich_help_panel=TRAIN, epilog="Example: tastemaker demo")
def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("runs/demo"),
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the training run; default: the recipe's.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of PlayEval prompts.")] = 252,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: the recipe's.")] = None,
    device: RunDeviceOption = None,
) -> None:
    """Train a small text-to-image model with a reward, evaluate it before and after, and write a report.

    Needs no GPU and no downloads. Resumes if interrupted.
    """
    finished = False
    try:
        from ..playground.demo import run_demo

        chosen = [f"{key}={value}" for key, value in (("seed", seed), ("steps", steps)) if value is not None]
        finished = run_demo(
            out, [*merge_overrides(overrides, device), *chosen], prompts=num_prompts, console=stderr_console()
        )
    except KeyboardInterrupt:
        pass  # finished stages and images are on disk
    if not finished:
        message = "Interrupted. Everything done so far is kept; run the same command again to continue."
        stderr_console().print(f"\n{message}", soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command(rich_help_panel=TRAIN, epilog="Example: tastemaker train grpo-playground-flow steps=100")
def train(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe (see `list recipes`), a YAML file, or the directory of a run.")
    ],
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Continue from this checkpoint, with optimizer and step.")] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from the weights of this run, checkpoint, file or exported folder.")
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(min=0, help="Continue this run from its checkpoint of this step; newer ones are kept aside."),
    ] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="Key that may differ when resuming; repeatable.")
    ] = None,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Train a model from a recipe. Given the directory of an earlier run, resume it."""
    from ..config.build import warn_ignored_overrides
    from ..training.trainer import load_run_config, run_training

    config = load_run_config(recipe, merge_overrides(overrides, device))
    if tiny:
        warn_ignored_overrides(config, overrides or ())
    done = run_training(
        config,
        tiny=tiny,
        resume=resume,
        init_from=init_from,
        from_step=from_step,
        allow_change=allow_change or (),
        console=stderr_console(),
    )
    if not done:
        raise typer.Exit(EXIT_INTERRUPTED)
    print_next_steps(*suggest_commands(config))


def suggest_commands(config: AnyConfig) -> list[str]:
    """Commands that use a finished run: those that sample or apply it, measure it and export it."""
    from ..config.dump import config_to_dict

    directory, settings = config.directory, config_to_dict(config)
    export = f"tastemaker export {directory} --out {directory.name}.safetensors"
    if "autoencoder" in settings:
        return [f"tastemaker reconstruct IMAGES --model {directory}", export]
    if "preference" in settings:
        reward = f"{{type: preference, path: {directory}}}"
        return [f'tastemaker score IMAGES --reward "{reward}"', "tastemaker align --votes VOTES --model RECIPE"]
    if "judge" in settings:
        return [f"tastemaker export {directory} --out {directory.name}"]
    data, is_video = str(settings["data"]["type"]), settings["model"].get("frames", 1) > 1
    benchmark = ""
    if data.startswith("playground"):
        kinds = {
            "playground_edits": "playeval-edit",
            "playground_signs": "wordeval",
            "playground_sign_prompts": "wordeval",
        }
        benchmark = kinds.get(data, "playeval-motion" if is_video else "playeval")
    elif "prompt" in data and not is_video and not str(settings["model"]["type"]).startswith("toy"):
        benchmark = "geneval"
    evaluate = [f"tastemaker evaluate {benchmark} --model {directory}"] if benchmark else []
    return [f"tastemaker generate {directory}", *evaluate, export]
