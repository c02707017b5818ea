"""Frozen networks of transformers, loaded from local folders in the Hub's layout, or tiny random ones for tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.reward import TINY as TINY
from ...core.safe_files import read_json
from ...core.types import Placement
from ...models.pretrained import load_state_dict

LAYER_NUMBER = re.compile(r"\.\d+\.")
ROPE_FREQUENCIES = "inv_freq"  # transformers' name of the buffer


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a folder's config.json."""
    try:
        config = read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} does not have a readable config.json; give a folder in the layout of the hub [TM355]"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path}/config.json contains a {type(config).__name__}; expected an object with settings, so download "
            "the folder again [TM356]"
        )
    return config


def require_model_type(path: Path, expected: str, key: str) -> None:
    """Refuse a folder whose config.json is of another type of network."""
    found = read_config(path if path.is_dir() else path.parent).get("model_type")
    if found != expected:
        raise ConfigError(
            f"{key} is '{path!s:.200}', the folder of a network of the type {found!s:.40}; expected {expected} [TM893]"
        )


def load_network(
    model_class: Any, config: Any, path: Path, placement: Placement, tensors: Mapping[str, Tensor] | None = None
) -> Any:
    """A frozen network with the tensors of a folder, or with those given; a missing tensor is an error."""
    state = load_state_dict(path) if tensors is None else dict(tensors)
    with silence_transformers():
        try:
            net, info = model_class.from_pretrained(
                None, config=config, state_dict=state, dtype=placement.dtype, output_loading_info=True
            )
        except RuntimeError as error:  # tensors of other shapes
            raise ConfigError(
                f"the tensors in {path} do not match its config.json; download the folder again [TM357]"
            ) from error
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        raise ConfigError(
            f"{path} lacks '{missing[0]}' and {len(missing) - 1} more tensors; download the folder again [TM358]"
        )
    kinds = {LAYER_NUMBER.sub(".N.", key) for key in net.state_dict()}
    surplus = [key for key in sorted(map(str, info["unexpected_keys"])) if LAYER_NUMBER.sub(".N.", key) in kinds]
    if surplus:  # heads of other tasks are no layers of this network, and are ignored
        raise ConfigError(
            f"{path} holds '{surplus[0]}' and {len(surplus) - 1} more tensors of layers that its config.json does not "
            "have; fetch the folder again"
            " [TM884]"
        )
    return freeze_network(net, placement)


def freeze_network(net: nn.Module, placement: Placement) -> Any:
    """Freeze a network and cast it, except for rotary frequencies, which 16 bits would distort."""
    exact = {name: x for name, x in net.named_buffers() if name.endswith(ROPE_FREQUENCIES)}
    net = net.to(placement.device, placement.dtype).eval().requires_grad_(False)
    for name, x in exact.items():
        parent, _, attribute = name.rpartition(".")
        net.get_submodule(parent).register_buffer(attribute, x.to(placement.device), persistent=False)
    return net


def random_network(model_class: Any, config: Any, placement: Placement) -> Any:
    """A frozen network with the same random weights every time; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return freeze_network(model_class(config), placement)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and reports within the block."""
    from transformers.utils import logging

    log: Any = logging
    verbosity, progress_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if progress_bars:
            log.enable_progress_bar()
