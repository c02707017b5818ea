"""The command studio: runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import LOOK, stderr_console

app = typer.Typer()


@app.command(rich_help_panel=LOOK, epilog="Example: tastemaker studio runs")
def studio(
    runs: Annotated[Path, typer.Argument(help="Directory of runs, or one run.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8700,
    host: Annotated[str, typer.Option(help="Host; if other machines can reach it, a token is needed.")] = "127.0.0.1",
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token; default: a new one if the host needs one.")
    ] = "",
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further name of this machine in requests. Repeatable; '*': any.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Start configurations that name your own Python classes.")
    ] = False,
) -> None:
    """Watch, compare and start runs in the browser."""
    from ..studio.server import StudioServerOptions, run_studio

    console = stderr_console()
    options = StudioServerOptions(
        runs, host, port, token_env, tuple(allowed_host or ()), not no_browser, allow_code=allow_code
    )
    run_studio(options, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
