"""Settings of the command line that a run at small size has no use for: said once, in one sentence."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .build import shrunk_any
from .dump import resolve
from .load import override
from .run import AnyConfig

Keys = tuple[str, ...]

LONGEST = 60  # characters of a setting worth repeating


def unused(config: AnyConfig, overrides: Sequence[str]) -> list[str]:
    """Those whose value is another at small size, as in model.frames=9."""
    asked, small = resolve(config), resolve(shrunk_any(config))
    said = {keys: value for assignment in overrides for keys, value in written(override({}, [assignment]))}
    lost = {keys: value for keys, value in said.items() if setting(asked, keys) != setting(small, keys)}
    return [f"{'.'.join(keys)}={text(value)}"[:LONGEST] for keys, value in lost.items()]


def warn(config: AnyConfig, overrides: Sequence[str]) -> None:
    """Say which settings small models leave aside, if there are any."""
    found = unused(config, overrides)
    if not found:
        return
    told = " and ".join([*([", ".join(found[:-1])] if found[1:] else []), found[-1]])
    are = "are" if found[1:] else "is"
    warnings.warn(f"--tiny: {told} {are} not used; small models have settings of their own", stacklevel=2)


def written(data: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every value within sections, with the keys that lead to it."""
    for key, value in data.items():
        keys = (*above, str(key))
        if isinstance(value, Mapping):
            yield from written(value, keys)
        else:
            yield keys, value


def setting(data: Any, keys: Keys) -> Any:
    """The value those keys lead to; nothing where none is, or a whole section."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return None if isinstance(data, Mapping) else data


def text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
