"""Networks of transformers out of folders as the hub's, or random small ones; quietly, whole and frozen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...models.pretrained import load_state_dict

TINY = "tiny"  # weights that are in no file
FREQUENCIES = "inv_freq"  # transformers' name for them


def read_config(path: Path) -> dict[str, Any]:
    """What a folder's config.json says."""
    try:
        told = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no readable config.json; expected a folder as the hub's") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{path}/config.json holds a {type(told).__name__}; expected settings by name")
    return told


def load_network(
    kind: Any, config: Any, path: Path, placement: Placement, tensors: Mapping[str, Tensor] | None = None
) -> Any:
    """A network with the tensors of a folder, or with those given, every one of them."""
    state = load_state_dict(path) if tensors is None else dict(tensors)
    with quiet_transformers():
        try:
            net, told = kind.from_pretrained(
                None, config=config, state_dict=state, dtype=placement.dtype, output_loading_info=True
            )
        except RuntimeError as error:  # tensors of other shapes
            raise ConfigError(f"the tensors of {path} do not fit its config.json; fetch the folder again") from error
    lost = sorted(map(str, told["missing_keys"]))
    if lost:
        raise ConfigError(f"{path} lacks '{lost[0]}' and {len(lost) - 1} more tensors; fetch the folder again")
    return freeze_network(net, placement)


def freeze_network(net: nn.Module, placement: Placement) -> Any:
    """In the precision asked for, but for the frequencies of positions, which are computed and would be far off."""
    exact = {name: x for name, x in net.named_buffers() if name.endswith(FREQUENCIES)}
    net = net.to(placement.device, placement.dtype).eval().requires_grad_(False)
    for name, x in exact.items():
        parent, _, own = name.rpartition(".")
        net.get_submodule(parent).register_buffer(own, x.to(placement.device), persistent=False)
    return net


def random_network(kind: Any, config: Any, placement: Placement) -> Any:
    """A network that is the same every time, whatever else draws numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return freeze_network(kind(config), placement)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block transformers neither draws bars nor reports."""
    from transformers.utils import logging

    told: Any = logging
    verbosity, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(verbosity)
        if bars:
            told.enable_progress_bar()
