"""Convert a configuration back to plain data or YAML, with all defaults written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from .schema import AnyConfig, RewardConfig, ordered_fields
from .validate import COMPONENT_REGISTRIES
from .yaml_io import render_yaml


def config_to_dict(config: AnyConfig) -> dict[str, Any]:
    """Convert a configuration to plain data that validates to an equal one."""
    return dataclass_to_dict(config)


def config_to_yaml(config: AnyConfig) -> str:
    """Format a configuration as YAML."""
    return render_yaml(config_to_dict(config))


def dataclass_to_dict(section: Any, *, terse: bool = False) -> dict[str, Any]:
    """Convert the fields of a dataclass to plain data by name; with `terse` only those that are not the default."""
    cls: type = type(section)
    hints = _hints(cls)
    chosen = [f for f in ordered_fields(cls) if f.init and not (terse and getattr(section, f.name) == default_value(f))]
    return {f.name: to_plain(getattr(section, f.name), hints[f.name], terse=terse) for f in chosen}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def default_value(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def to_plain(value: Any, hint: Any, *, terse: bool = False) -> Any:
    """Convert a value to the types of YAML; an object has its `type` unless the field allows only one class."""
    if isinstance(value, RewardConfig):
        settings = dataclass_to_dict(value, terse=terse)
        settings = {name: each for name, each in settings.items() if name != "spec" and each is not None}
        return {**to_plain(value.spec, None, terse=terse), **settings}
    if is_dataclass(value):
        is_known = type(value) in (hint, *get_args(hint))
        settings = dataclass_to_dict(value, terse=terse)
        return settings if is_known else {"type": registered_name(type(value)), **settings}
    if isinstance(value, tuple):
        return [to_plain(item, next(iter(get_args(hint)), None), terse=terse) for item in value]
    if isinstance(value, Mapping):
        return {
            key: to_plain(item, get_args(hint)[-1] if get_args(hint) else None, terse=terse)
            for key, item in value.items()
        }
    return str(value) if isinstance(value, Path) else value


def registered_name(cls: type) -> str:
    """The shortest name that any registry has for a class."""
    return min((registry.name(cls) for registry in COMPONENT_REGISTRIES.values()), key=len)
