"""The command line. Errors print as one message; exit code 2 is a user error, 1 a failure, 130 an interruption."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from ..core.errors import CheckpointError, ConfigError, DownloadError, ImageError, RewardError, TrainingError
from . import demo, image_sets, rewards, runs, vlm
from .options import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, stderr_console
from .thread_policy import choose_wait_policy

app = typer.Typer(
    name="tastemaker",
    help="Teach image and video generators what people want.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for part in (demo, runs, rewards, vlm, image_sets):
    app.add_typer(part.app)


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """What to tell the user of an error, and the exit code; None for an error that is ours."""
    from ..training.errors import explain_error

    if isinstance(error, (ConfigError, ImageError)):
        return str(error), EXIT_USAGE
    if isinstance(error, (RewardError, TrainingError, CheckpointError, DownloadError)):
        return str(error), EXIT_FAILURE
    known = explain_error(error)
    return (known, EXIT_FAILURE) if known else None


PACKAGE = str(Path(__file__).parent.parent)
default_formatwarning = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of our own as the sentence it is, without the line of code it comes from."""
    if not filename.startswith(PACKAGE):
        return default_formatwarning(message, category, filename, lineno, line)
    return f"warning: {message}\n" if os.environ.get("RANK", "0") == "0" else ""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Under torchrun only rank 0 prints."""
    warnings.formatwarning = format_warning
    choose_wait_policy()
    sys.path.insert(0, os.getcwd())  # a component of the user's own may lie beside the recipe that names it
    try:
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        told: Any = explain_error(error)
        if told is None:
            raise
        if os.environ.get("RANK", "0") == "0":
            stderr_console().print(f"[red]error:[/] {escape(told[0])}", highlight=False, soft_wrap=True)
        sys.exit(told[1])
