"""Load and save the networks of reward models; `tiny` is a small random network."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn

from ..models.pretrained import load_weights_into, with_fast_convolutions
from ..models.weight_files import read_weights, write_weights
from .art import Style

TINY = "tiny"  # the name of random weights


class SizedNetwork(Protocol):
    """A network class whose constructor takes a tuple of widths."""

    widths: tuple[int, ...]
    tiny: tuple[int, ...]


N = TypeVar("N", bound=nn.Module)


def random_network(kind: type[N], seed: int, *, tiny: bool = False) -> N:
    """A network with random weights of a seed; the global random state is left alone."""
    sized: SizedNetwork = kind  # type: ignore[assignment]  # an nn.Module that is also a SizedNetwork has no type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(sized.tiny if tiny else sized.widths)


def load_network(kind: type[N], weights: str | Path, device: torch.device | str = "cpu") -> N:
    """Load a trained network, frozen."""
    if str(weights) == TINY:
        net = _perturb(random_network(kind, 0, tiny=True))
    else:
        tensors, config = read_weights(weights)
        net = kind(tuple(config["widths"]))
        load_weights_into(net, tensors, weights)
    return with_fast_convolutions(net.to(device).eval().requires_grad_(False))


@torch.no_grad()
def _perturb(net: N) -> N:
    """Add noise to the weights: an untrained detector finds nothing, a perturbed one finds random objects."""
    generator = torch.Generator().manual_seed(0)
    for weights in net.parameters():
        weights.add_(0.2 * torch.randn(weights.shape, generator=generator))
    return net


def copy_detector_stem(net: nn.Module, widths: tuple[int, ...], detector: Path) -> bool:
    """Initialize the stem of a network from a trained detector; returns False if their widths differ."""
    tensors, config = read_weights(detector)
    if config["widths"][:3] != list(widths[:3]):
        return False
    stem = {key: value for key, value in tensors.items() if key.startswith("stem.")}
    net.load_state_dict({**net.state_dict(), **stem})
    return True


def save_network(
    net: nn.Module, widths: tuple[int, ...], path: Path, evaluation: dict[Style, dict[str, float]]
) -> None:
    """Write a network with its widths and the results of its evaluation."""
    rounded = {style: {name: round(share, 5) for name, share in scores.items()} for style, scores in evaluation.items()}
    write_weights(
        path, net.state_dict(), {"network": type(net).__name__, "widths": list(widths), "evaluation": rounded}
    )
