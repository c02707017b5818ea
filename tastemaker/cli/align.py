"""The command that aligns a model to votes: align."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    from ..preferences.alignment import Alignment

app = typer.Typer()


@app.command(
    rich_help_panel=TRAIN, epilog="Example: tastemaker align --votes votes.jsonl --model reward-gradient-playground"
)
def align(
    overrides: Overrides = None,
    votes: Annotated[Path | None, typer.Option(help="Vote log: the votes.jsonl of a voting session.")] = None,
    model: Annotated[str, typer.Option(help="Model to align: a recipe, the directory of a run, or an export.")] = "",
    method: Annotated[
        Literal["reward_gradient", "grpo", "nft", "dpo", "kto"] | None,
        typer.Option(
            help="How to train: with the learned taste as a reward, on votes (dpo) or on likes (kto). Default: kto if "
            "there are only likes, else reward_gradient."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the result; default: runs/align-MODEL.")] = None,
    preference: Annotated[str, typer.Option(help="Recipe of the preference model; default: one that fits.")] = "",
    voter: Annotated[str, typer.Option(help="Use only the votes of this voter.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="File of prompts for the blind evaluation.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the blind evaluation, two pairs each.")] = 30,
    result: Annotated[
        Path | None, typer.Option(help="Print the result of the blind evaluation in this directory, and stop.")
    ] = None,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Align a model to a person's votes, and prepare a blind evaluation that shows whether it worked.

    Learns the taste as a reward, trains the model with it beside the rewards of the content, and generates pairs of
    the model before and after for unseen prompts. Settings (key=value) are those of the training run. Resumes if
    interrupted.
    """
    from ..core.registry import ConfigError
    from ..preferences import alignment, sessions

    if result is not None:
        folder = result / alignment.EVALUATION if (result / alignment.EVALUATION).is_dir() else result
        typer.echo(sessions.describe_result(sessions.load_session(folder)))
        return
    if votes is None or not model:
        raise ConfigError("align: expected --votes FILE and --model RECIPE (or --result DIR); add them [TM1325]")
    done = alignment.align(
        votes,
        model,
        merge_overrides(overrides, device),
        method=method,
        out=out,
        preference=preference,
        preference_overrides=merge_overrides(None, device),
        voter=voter,
        prompts=prompts,
        num_prompts=num_prompts,
        tiny=tiny,
        console=stderr_console(),
    )
    if not done.completed or done.session is None:
        stderr_console().print("Interrupted; run the same command again to continue.", soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    print_alignment(done)


def print_alignment(done: Alignment) -> None:
    """Print what was made, and how to vote and go on."""
    assert done.session is not None
    if done.summary:
        typer.echo(f"preference model: {done.summary}")
    pairs = f"{done.session.target} pairs of the model before and after"
    typer.echo(f"aligned model: {done.run}\nblind evaluation: {pairs}, in {done.session.directory}")
    print_next_steps(
        f"tastemaker studio {done.directory.parent}",
        f"tastemaker align --result {done.directory}",
        f"tastemaker generate {done.run}",
    )
