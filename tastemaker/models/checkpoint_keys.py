"""Rename checkpoint tensors between diffusers' keys and those of a model's authors, by rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.model_spec import Tensors
from ..core.registry import ConfigError

TensorShapes = Mapping[str, torch.Size]  # by diffusers' keys
KeyRules = tuple[tuple[str, str], ...]  # regular expressions for the start of diffusers' keys, and their replacements
KEEP_OTHER_NAMES = ("", "")  # the last of rules for a network most of whose names the authors share


def rename_and_concat(tensors: Mapping[str, Tensor], rules: KeyRules) -> Tensors:
    """Rename tensors; those that get the same key are concatenated in the order of the rules (q, k and v to qkv)."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for key, x in tensors.items():
        order, name = _rename(key, rules)
        pieces.setdefault(name, {})[order] = x
    return {
        name: torch.cat([parts[order] for order in sorted(parts)]) if len(parts) > 1 else next(iter(parts.values()))
        for name, parts in pieces.items()
    }


def split_and_rename(tensors: Mapping[str, Tensor], shapes: TensorShapes, rules: KeyRules) -> Tensors:
    """Undo `rename_and_concat` for a network with these keys and shapes; unknown tensors keep their names.

    Sizes come from `shapes`: diffusers' own converters assume those of the published networks.
    """
    pieces: dict[str, dict[int, str]] = {}
    for key in shapes:
        order, name = _rename(key, rules)
        pieces.setdefault(name, {})[order] = key
    renamed: Tensors = {}
    for name, x in tensors.items():
        keys = [key for _, key in sorted(pieces.get(name, {}).items())]
        sizes = [shapes[key][0] for key in keys]
        matches = bool(keys) and x.dim() > 0 and sum(sizes) == len(x)
        renamed |= dict(zip(keys, torch.split(x, sizes), strict=True)) if matches else {name: x}
    return renamed


def _rename(key: str, rules: KeyRules) -> tuple[int, str]:
    """Return the index of the first rule that applies, and the new key."""
    for order, (pattern, replacement) in enumerate(rules):
        name, count = re.subn(f"^{pattern}", replacement, key)
        if count:
            return order, name
    raise ValueError(f"the authors' layout does not have a name for '{key}'; export with --layout diffusers [TM420]")


def invert_key_rules(name: str, rules: KeyRules) -> str:
    """Return the key that rules rename to `name`, for rules that rename one key each and have at most one group."""
    for pattern, replacement in rules:
        renamed = re.escape(replacement).replace(r"\\1", r"(\d+)")
        key, count = re.subn(f"^{renamed}", pattern.replace(r"(\d+)", r"\g<1>").replace(r"\.", "."), name)
        if count:
            return key
    raise ValueError(f"the authors of this network have no name for '{name}'; leave --layout out [TM852]")


def swap_scale_shift(x: Tensor) -> Tensor:
    """Swap the halves of a modulation layer: diffusers keeps scale before shift, the authors after it."""
    return torch.cat([*reversed(x.chunk(2))])


def keep_names(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Return the tensors unchanged, for authors who publish with diffusers' keys."""
    return tensors


def reject_unknown_names(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Refuse the conversion, for authors whose keys are not known here."""
    raise ConfigError(
        "--layout: the names in the authors' layout are not known for this network; use --layout diffusers [TM421]"
    )
