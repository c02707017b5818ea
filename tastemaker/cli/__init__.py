"""The command line. Errors print as one message; exit code 2 is a user error, 1 a failure, 130 an interruption."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..core.errors import CheckpointError, ConfigError, DownloadError, ImageError, RewardError, TrainingError
from ..core.interruption import exit_now, handle_signals
from ..core.safe_files import check_text
from . import (
    align,
    components,
    data,
    diagnose,
    evaluate,
    export,
    generate,
    init,
    jobs,
    launch,
    new,
    rewards,
    studio,
    sweep,
    train,
    verify,
    vlm,
    votes,
)
from .options import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, stderr_console
from .plain_help import CommandGroup, needs_plain_text
from .thread_policy import choose_wait_policy

app = typer.Typer(
    name="tastemaker",
    cls=CommandGroup,
    help="Post-train image and video generators with rewards.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Example: tastemaker demo",
)
GROUPS = (
    init,
    train,
    align,
    sweep,
    launch,
    components,
    generate,
    studio,
    votes,
    jobs,
    evaluate,
    export,
    new,
    rewards,
    data,
    vlm,
    diagnose,
    verify,
)
for group in GROUPS:
    app.add_typer(group.app)


def print_version(requested: bool) -> None:
    if requested:
        from .. import __version__

        typer.echo(f"tastemaker {__version__}")
        raise typer.Exit


@app.callback()
def set_up(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Python module to import first, which registers your own components; repeatable."
        ),
    ] = None,
) -> None:
    if modules:
        from ..core.registry import import_modules

        import_modules(modules)


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """The message and exit code of an error; None for an unexpected one, which is a bug."""
    from ..core.errors import explain_error

    if isinstance(error, (ConfigError, ImageError)):
        return str(error), EXIT_USAGE
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = f"'{Path(str(error.filename)).name:.40}...'" if error.filename else "given"
        return f"the name {name} is longer than file systems allow; choose a shorter one [TM1165]", EXIT_USAGE
    if isinstance(error, (RewardError, TrainingError, CheckpointError, DownloadError)):
        return str(error), EXIT_FAILURE
    known = explain_error(error)
    return (known, EXIT_FAILURE) if known else None


PACKAGE = str(Path(__file__).parent.parent)
default_formatwarning = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format our own warnings without the line of code; on rank 0 only."""
    if not filename.startswith(PACKAGE):
        return default_formatwarning(message, category, filename, lineno, line)
    return f"warning: {message}\n" if os.environ.get("RANK", "0") == "0" else ""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Under torchrun only rank 0 prints."""
    warnings.formatwarning = format_warning
    choose_wait_policy()
    app.rich_markup_mode = None if needs_plain_text() else "markdown"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        for argument in sys.argv[1:] if arguments is None else arguments:
            check_text(argument, "command line")
        with handle_signals(raising=True):
            app(arguments)
    except KeyboardInterrupt:
        exit_now(EXIT_INTERRUPTED)
    except SystemExit as error:
        if error.code != EXIT_INTERRUPTED:
            raise
        exit_now(EXIT_INTERRUPTED)
    except Exception as error:
        explanation = explain_error(error)
        if explanation is None:
            raise
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":  # once on each machine
            stderr_console().print(f"[red]error:[/] {escape(explanation[0])}", highlight=False, soft_wrap=True)
        sys.exit(explanation[1])
