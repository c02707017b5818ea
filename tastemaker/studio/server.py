"""`tastemaker studio`: the web server of the studio, for the command line and in the background of a Python program."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ..core.errors import ConfigError
from ..serving.access import is_loopback

if TYPE_CHECKING:
    import uvicorn

SHUTDOWN_SECONDS = 3  # for requests in progress
MAX_CONNECTIONS = 256
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class StudioServerOptions:
    """Address of the studio, and what it serves."""

    runs: Path
    host: str = "127.0.0.1"
    port: int = 8700  # 0 for any free one
    token_variable: str = ""  # name of the environment variable with the token
    allowed_hosts: tuple[str, ...] = ()  # further names of this machine in the Host header
    open_browser: bool = True
    allow_code: bool = False  # start configurations that name the user's own classes


def run_studio(options: StudioServerOptions, say: Callable[[str], None]) -> None:
    """Serve the studio until interrupted. `say` gets the lines for the user."""
    server, listener, address = prepare_server(options)
    say(f"the studio is at {address}")
    say("press Ctrl-C to stop it; runs go on")
    # The first page then finds what it needs in memory.
    threading.Thread(target=server.config.app.state.studio.index.summaries, daemon=True).start()  # type: ignore[union-attr]
    if options.open_browser and has_display():
        opener = threading.Timer(0.5, webbrowser.open, [address])
        opener.daemon = True
        opener.start()
    previous = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        server.run([listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again after it has stopped
        pass
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
    say("stopped")


@contextmanager
def serve_studio(options: StudioServerOptions) -> Iterator[str]:
    """Serve the studio in the background within the block, as in a notebook. Yields its address."""
    server, listener, address = prepare_server(options)
    thread = threading.Thread(target=server.run, args=([listener],), name="studio", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(10)


def prepare_server(options: StudioServerOptions) -> tuple[uvicorn.Server, socket.socket, str]:
    """Return the server, its listening socket, and the address for the browser with the token if there is one."""
    if not options.runs.is_dir():
        raise ConfigError(
            f"studio: the directory {options.runs!s:.300} does not exist; give the directory with your runs, such as "
            "runs, or start one with `tastemaker train` [TM1351]"
        )
    token = choose_token(options)
    try:
        import uvicorn

        from ..serving.closing_server import ClosingServer
        from .app import StudioOptions, create_app
    except ImportError as error:
        raise ConfigError(
            f"studio needs Starlette, uvicorn and Jinja2 ({error}); run `pip install 'tastemaker[studio]'` [TM1352]"
        ) from error
    app = create_app(StudioOptions(options.runs, token, (options.host, *options.allowed_hosts), options.allow_code))
    config = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    listener = bind(options)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{listener.getsockname()[1]}/"
    if token:
        address += f"?token={quote(token, safe='')}"
    server = ClosingServer(config)
    app.state.studio.is_closing = lambda: server.should_exit
    return server, listener, address


def choose_token(options: StudioServerOptions) -> str:
    """Return the token from the environment, or a new one if other machines can reach the studio."""
    if not options.token_variable:
        return "" if is_loopback(options.host) else secrets.token_urlsafe(24)
    token = os.environ.get(options.token_variable, "")
    if not (token and token.isascii() and token.isprintable()):
        raise ConfigError(
            f"--token-env: the environment variable {options.token_variable:.100} is empty or not plain ASCII text; "
            "set it to the token [TM1353]"
        )
    return token


def bind(options: StudioServerOptions) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--port: cannot serve at {options.host}:{options.port} ({error}); choose another --port or --host [TM1354]"
        ) from error


def has_display() -> bool:
    """Whether a browser can open a window here: not on a server that is used through a terminal."""
    return os.name == "nt" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ or os.uname()[0] == "Darwin"
