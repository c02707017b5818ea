"""Settings of the command line that a run at small size has no use for: said once, in one sentence."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .build import make_tiny_any
from .dump import config_to_dict
from .load import apply_overrides
from .schema import AnyConfig

Keys = tuple[str, ...]

LONGEST = 60  # characters of a setting worth repeating


def find_ignored_overrides(config: AnyConfig, overrides: Sequence[str]) -> list[str]:
    """Those whose value is another at small size, as in model.frames=9."""
    asked, small = config_to_dict(config), config_to_dict(make_tiny_any(config))
    said = {
        keys: value for assignment in overrides for keys, value in iterate_settings(apply_overrides({}, [assignment]))
    }
    lost = {keys: value for keys, value in said.items() if get_setting(asked, keys) != get_setting(small, keys)}
    return [f"{'.'.join(keys)}={text(value)}"[:LONGEST] for keys, value in lost.items()]


def warn_ignored_overrides(config: AnyConfig, overrides: Sequence[str]) -> None:
    """Say which settings small models leave aside, if there are any."""
    found = find_ignored_overrides(config, overrides)
    if not found:
        return
    told = " and ".join([*([", ".join(found[:-1])] if found[1:] else []), found[-1]])
    are = "are" if found[1:] else "is"
    warnings.warn(f"--tiny: {told} {are} not used; small models have settings of their own", stacklevel=2)


def iterate_settings(data: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every value within sections, with the keys that lead to it."""
    for key, value in data.items():
        keys = (*above, str(key))
        if isinstance(value, Mapping):
            yield from iterate_settings(value, keys)
        else:
            yield keys, value


def get_setting(data: Any, keys: Keys) -> Any:
    """The value those keys lead to; nothing where none is, or a whole section."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return None if isinstance(data, Mapping) else data


def text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
