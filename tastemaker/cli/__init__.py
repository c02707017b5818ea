"""The command line: every mistake is one sentence, and the exit code tells whose it was."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from ..errors import CheckpointError, ConfigError, FetchError, PictureError, RewardError, TrainingError
from . import demo, hub, judges, runs, sets
from .options import FAILURE, INTERRUPTED, MISTAKE, console
from .threads import choose_wait_policy

app = typer.Typer(
    name="tastemaker",
    help="Teach image and video generators what people want.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for part in (demo, runs, hub, judges, sets):
    app.add_typer(part.app)


def sentence(error: BaseException) -> tuple[str, int] | None:
    """What to tell the user of an error, and the exit code; None for an error that is ours."""
    from ..train.failures import explain

    if isinstance(error, (ConfigError, PictureError)):
        return str(error), MISTAKE
    if isinstance(error, (RewardError, TrainingError, CheckpointError, FetchError)):
        return str(error), FAILURE
    known = explain(error)
    return (known, FAILURE) if known else None


PACKAGE = str(Path(__file__).parent.parent)
usual = warnings.formatwarning


def warned(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning of our own as the sentence it is, without the line of code it comes from."""
    if not filename.startswith(PACKAGE):
        return usual(message, category, filename, lineno, line)
    return f"warning: {message}\n" if os.environ.get("RANK", "0") == "0" else ""


def main(arguments: list[str] | None = None) -> None:
    """Run a command; under torchrun only the first rank speaks."""
    warnings.formatwarning = warned
    choose_wait_policy()
    sys.path.insert(0, os.getcwd())  # a component of the user's own may lie beside the recipe that names it
    try:
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        told: Any = sentence(error)
        if told is None:
            raise
        if os.environ.get("RANK", "0") == "0":
            console().print(f"[red]error:[/] {escape(told[0])}", highlight=False, soft_wrap=True)
        sys.exit(told[1])
