"""`tastemaker serve-reward`: one reward for whoever asks over HTTP."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from rich.console import Console

from .. import __version__
from ..config.dump import to_plain
from ..core.registry import ConfigError
from ..core.reward import RewardSpec, Rubric, WeightedReward, load_shared_reward
from ..core.types import Placement
from ..rewards.score_cache import reward_fingerprint
from ..rewards.scoring import parse_reward
from .batch_queue import BatchQueue
from .server import RewardService


@dataclass(frozen=True)
class ServerOptions:
    """Where a reward is served, and to whom."""

    host: str = "127.0.0.1"
    port: int = 8800
    token: str = ""  # the name of an environment variable
    queue: int = 64
    limit: int = 256 * 2**20  # bytes of a request


def run_reward_server(text: str, terms: ServerOptions, placement: Placement, console: Console) -> None:
    """Load a reward and answer until interrupted."""
    token = read_token(terms)
    name, spec = parse_reward(text, "serve-reward")

    def failed(sentence: str) -> None:
        console.print(f"refused: {sentence}", markup=False, highlight=False, soft_wrap=True)

    desk = BatchQueue(Rubric({name: WeightedReward(spec, load_shared_reward(spec, placement))}), placement.device)
    service = RewardService(desk, describe_reward(name, spec), token, terms.limit, terms.queue, failed)
    try:
        server = service.server(terms.host, terms.port)
    except OSError as error:
        place = f"{terms.host}:{terms.port}"
        raise ConfigError(f"nothing can be served at {place} ({error}); choose another --port or --host") from error
    url = f"http://{terms.host}:{server.server_address[1]}"
    told = f"{name} answers at {url} on {placement.device}; ask it with {{type: remote, url: '{url}'}}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped", highlight=False)
    desk.close()


def read_token(terms: ServerOptions) -> str:
    """The token, which those must give who come from elsewhere."""
    found = os.environ.get(terms.token, "") if terms.token else ""
    if terms.token and not (found and found.isascii() and found.isprintable()):
        raise ConfigError(f"--token: the environment variable {terms.token} holds no plain text; put the token there")
    if not found and not is_loopback(terms.host):
        raise ConfigError(
            f"--host: {terms.host} lets other machines in, so a token is needed; put one into an environment variable, "
            "and name that with --token"
        )
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def describe_reward(name: str, spec: RewardSpec) -> dict[str, object]:
    """What /version tells."""
    kind = {"differentiable": spec.differentiable, "reads": spec.reads, "batch_size": spec.batch_size}
    return {
        "tastemaker": __version__,
        "name": name,
        "reward": to_plain(spec, None),
        "version": reward_fingerprint(spec),
        **kind,
    }
