"""`tastemaker serve-reward`: a server for rewards, with batching, a token, and limits on size and load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from rich.console import Console

from .. import __version__
from ..config.dump import to_plain
from ..core.registry import ConfigError
from ..core.reward import RewardSpec, Rubric, WeightedReward, load_shared_reward
from ..core.types import Placement
from ..rewards.cached import reward_fingerprint
from ..rewards.folder_scorer import parse_pointwise_reward
from .access import is_loopback
from .batch_queue import BatchQueue
from .limits import ServiceLimits

if TYPE_CHECKING:
    from .app import RewardService

CLOSE_TIMEOUT = 5.0  # seconds for the batch in progress when the server has stopped


@dataclass(frozen=True)
class ServerOptions:
    """Address and limits of a reward server."""

    host: str = "127.0.0.1"
    port: int = 8800
    token_variable: str = ""  # name of the environment variable that holds the token
    allowed_hosts: tuple[str, ...] = ()  # further names of this machine in the Host header
    limits: ServiceLimits = ServiceLimits()
    batch_wait: float = 0.0  # seconds that a batch waits for requests of other clients


def run_reward_server(rewards: Sequence[str], options: ServerOptions, placement: Placement, console: Console) -> None:
    """Load rewards and serve them until interrupted."""
    token = read_token(options)
    app, http_server = import_web_modules()
    limits = options.limits
    if limits.max_total_bytes < 3 * limits.max_bytes:
        raise ConfigError(
            f"--max-total-mb: a request of {limits.max_bytes >> 20} MB needs up to three times its size while it is "
            f"decoded, but all requests together may use {limits.max_total_bytes >> 20} MB; set --max-total-mb to at "
            f"least {3 * limits.max_bytes >> 20}, or lower --max-request-mb [TM1027]"
        )
    specs = parse_served_rewards(rewards)

    def log_error(text: str) -> None:
        console.print(f"refused: {text}", markup=False, highlight=False, soft_wrap=True)

    served = {
        name: app.ServedReward(
            BatchQueue(
                Rubric({name: WeightedReward(spec, load_shared_reward(spec, placement))}),
                placement.device,
                options.batch_wait,
            ),
            describe_reward(name, spec),
        )
        for name, spec in specs.items()
    }
    allowed_hosts = (options.host, *options.allowed_hosts)
    service: RewardService = app.RewardService(served, token, limits, allowed_hosts, log_error)
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        listener = http_server.bind(options.host, options.port)
    except OSError as error:
        raise ConfigError(
            f"--port: cannot serve at {host}:{options.port} ({error}); choose another --port or --host [TM748]"
        ) from error
    url = f"http://{host}:{listener.getsockname()[1]}"
    name = f", served_reward: {next(iter(specs))}" if len(specs) > 1 else ""
    settings = f"{{type: remote, url: '{url}'{name}}}"
    text = f"serving {', '.join(specs)} at {url} on {placement.device}; use it with {settings}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    http_server.RewardServer(service).run([listener])
    stopped = service.close(CLOSE_TIMEOUT)
    console.print("stopped", highlight=False)
    if not stopped:  # Python cannot end a thread that is computing, and would crash when it tears down the rest
        console.file.flush()
        os._exit(0)


def parse_served_rewards(texts: Sequence[str]) -> dict[str, RewardSpec]:
    """Rewards by the names under which they are served: their types, numbered where a type comes again."""
    specs: dict[str, RewardSpec] = {}
    for text in texts:
        name, spec = parse_pointwise_reward(text, "serve-reward")
        number = 2
        unique = name
        while unique in specs:
            unique, number = f"{name}-{number}", number + 1
        specs[unique] = spec
    return specs


def import_web_modules() -> tuple[ModuleType, ModuleType]:
    """Import the modules that need Starlette and uvicorn, which are optional dependencies."""
    try:
        from . import app, http_server
    except ImportError as error:
        raise ConfigError(
            f"serve-reward needs Starlette and uvicorn ({error}); run `pip install 'tastemaker[serve]'` [TM1000]"
        ) from error
    return app, http_server


def read_token(options: ServerOptions) -> str:
    """Read the token from the environment. A server that other machines can reach needs one."""
    token = os.environ.get(options.token_variable, "") if options.token_variable else ""
    if options.token_variable and not (token and token.isascii() and token.isprintable()):
        raise ConfigError(
            f"--token-env: the environment variable {options.token_variable} is empty or not plain ASCII text; "
            "set it to the token [TM749]"
        )
    if not token and not is_loopback(options.host):
        raise ConfigError(
            f"--host: other machines can reach {options.host}, so a token is needed; put a token into an "
            "environment variable, and give the name of the variable with --token-env [TM750]"
        )
    return token


def describe_reward(name: str, spec: RewardSpec) -> dict[str, object]:
    """Return what `/version` tells about the reward."""
    return {
        "tastemaker": __version__,
        "name": name,
        "reward": to_plain(spec, None),
        "version": reward_fingerprint(spec),
        "differentiable": spec.differentiable,
        "modality": spec.modality,
        "batch_size": spec.batch_size,
    }
