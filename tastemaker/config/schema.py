"""A JSON schema of recipes, by which editors complete and check them."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from ..data.spec import DataSpec
from ..reward import RewardSpec
from . import named
from .dump import plain
from .kinds import KINDS
from .load import RECIPES
from .named import FILES, NAMED
from .run import AutoencoderConfig, JudgeConfig, RewardConfig, RunConfig
from .validate import Component, Section, Weighted, form

Schema = dict[str, Any]

WEIGHTED = "weighted reward"


def schema() -> Schema:
    """The whole of it. Nothing is required, for what a recipe leaves out may come from those it extends."""
    root = of_class(RunConfig)
    for other in (AutoencoderConfig, JudgeConfig):
        root["properties"] |= of_class(other)["properties"]
    names = {"type": "string"}
    root["properties"] |= {"extends": {"anyOf": [names, {"type": "array", "items": names}]}}
    kinds = {registry.kind: of_kind(kind) for kind, registry in KINDS.items()}
    beside = {name: told for name, told in of_class(RewardConfig)["properties"].items() if name != "spec"}
    kinds[WEIGHTED] = of_kind(RewardSpec, beside)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tastemaker", **root, "$defs": kinds}


def write_schema(path: Path = RECIPES / "schema.json") -> None:
    path.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")


def of_kind(kind: type, beside: Schema | None = None) -> Schema:
    """Any class of a kind, ours by name or a user's own, of which nothing is known; `beside` are further settings."""
    registry = KINDS[kind]
    choices = []
    for name in registry:
        choice, aliases = of_class(registry.find(name)), registry.aliases(name)
        called = {"enum": [name, *aliases]} if aliases else {"const": name}
        choice["properties"] = {"type": called, **choice["properties"], **(beside or {})}
        choices.append(choice)
    foreign = {"type": "object", "properties": {"type": {"type": "string", "pattern": ":"}}, "required": ["type"]}
    return {"anyOf": [*choices, *([of_name()] if kind is DataSpec else []), foreign]}


def of_name() -> Schema:
    """Data by a name that a file of the user's gives it, with further settings beside it."""
    text = {"type": "string"}
    told = {"type": {"const": NAMED}, "name": text, "file": {**text, "default": str(FILES[0])}}
    return {"description": named.__doc__, "type": "object", "properties": told, "required": ["type", "name"]}


def of_class(cls: type) -> Schema:
    """The settings of one class, with their defaults."""
    found = form(cls).json_schema()
    hints = get_type_hints(cls)
    properties = {
        f.name: {**finished(found["properties"][f.name]), **default(f, hints[f.name])} for f in fields(cls) if f.init
    }
    about = {"description": cls.__doc__.strip().split("\n")[0]} if cls.__doc__ else {}
    return {**about, "type": "object", "properties": properties, "additionalProperties": False}


def default(f: Field[Any], hint: Any) -> Schema:
    if f.default is not MISSING:
        return {"default": plain(f.default, hint)}
    return {} if f.default_factory is MISSING else {"default": plain(f.default_factory(), hint)}


def finished(found: Any) -> Any:
    """What pydantic wrote, with our own readers told in full."""
    if isinstance(found, list):
        return [finished(item) for item in found]
    if not isinstance(found, dict):
        return found
    reader = found.get("reader")
    if isinstance(reader, Section):
        return of_class(reader.cls)
    if isinstance(reader, Component):
        return {"$ref": f"#/$defs/{KINDS[reader.kind].kind}"}
    if isinstance(reader, Weighted):
        # Nothing in the place of an inherited reward removes it.
        return {"anyOf": [{"$ref": f"#/$defs/{WEIGHTED}"}, {"type": "null"}]}
    return {key: finished(item) for key, item in found.items() if key != "title"}
