"""A configuration as the YAML that gives it back, every default written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from .component_types import COMPONENT_REGISTRIES
from .schema import AnyConfig, RewardConfig
from .yaml_io import render_yaml


def config_to_dict(config: AnyConfig) -> dict[str, Any]:
    """Plain data that validates to an equal configuration."""
    return dataclass_to_dict(config)


def config_to_yaml(config: AnyConfig) -> str:
    """The resolved configuration as YAML."""
    return render_yaml(config_to_dict(config))


def dataclass_to_dict(section: Any, *, terse: bool = False) -> dict[str, Any]:
    """The fields of a dataclass, by name; tersely, those that differ from their defaults."""
    cls: type = type(section)
    hints = _hints(cls)
    told = [f for f in fields(section) if f.init and not (terse and getattr(section, f.name) == default_value(f))]
    return {f.name: to_plain(getattr(section, f.name), hints[f.name], terse=terse) for f in told}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def default_value(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def to_plain(value: Any, hint: Any, *, terse: bool = False) -> Any:
    """A value in the types YAML has; an object whose field leaves its class open says which with `type`."""
    if isinstance(value, RewardConfig):
        said = dataclass_to_dict(value, terse=terse)
        beside = {name: value for name, value in said.items() if name != "spec" and value is not None}
        return {**to_plain(value.spec, None, terse=terse), **beside}
    if is_dataclass(value):
        closed = type(value) in (hint, *get_args(hint))
        said = dataclass_to_dict(value, terse=terse)
        return said if closed else {"type": registered_name(type(value)), **said}
    if isinstance(value, tuple):
        return [to_plain(item, get_args(hint)[:1], terse=terse) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item, None, terse=terse) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def registered_name(cls: type) -> str:
    """The shortest name any registry has for a class."""
    return min((registry.name(cls) for registry in COMPONENT_REGISTRIES.values()), key=len)
