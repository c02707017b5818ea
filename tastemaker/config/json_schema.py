"""A JSON schema of recipes, by which editors complete and check them."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from ..core.reward import RewardSpec
from ..data.spec import DataSpec
from . import named_datasets
from .component_types import COMPONENT_REGISTRIES
from .dump import to_plain
from .load import RECIPES
from .named_datasets import FILES, NAMED
from .schema import AutoencoderRunConfig, JudgeRunConfig, RewardConfig, RunConfig
from .validate import ComponentReader, RewardReader, SectionReader, type_adapter_for

Schema = dict[str, Any]

WEIGHTED = "weighted reward"


def schema() -> Schema:
    """The whole of it. Nothing is required, for what a recipe leaves out may come from those it extends."""
    root = class_schema(RunConfig)
    for other in (AutoencoderRunConfig, JudgeRunConfig):
        root["properties"] |= class_schema(other)["properties"]
    names = {"type": "string"}
    root["properties"] |= {"extends": {"anyOf": [names, {"type": "array", "items": names}]}}
    kinds = {registry.kind: component_schema(kind) for kind, registry in COMPONENT_REGISTRIES.items()}
    beside = {name: told for name, told in class_schema(RewardConfig)["properties"].items() if name != "spec"}
    kinds[WEIGHTED] = component_schema(RewardSpec, beside)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tastemaker", **root, "$defs": kinds}


def write_schema(path: Path = RECIPES / "schema.json") -> None:
    path.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")


def component_schema(kind: type, beside: Schema | None = None) -> Schema:
    """Any class of a kind, ours by name or a user's own, of which nothing is known; `beside` are further settings."""
    registry = COMPONENT_REGISTRIES[kind]
    choices = []
    for name in registry:
        choice, aliases = class_schema(registry.find(name)), registry.aliases(name)
        called = {"enum": [name, *aliases]} if aliases else {"const": name}
        choice["properties"] = {"type": called, **choice["properties"], **(beside or {})}
        choices.append(choice)
    foreign = {"type": "object", "properties": {"type": {"type": "string", "pattern": ":"}}, "required": ["type"]}
    return {"anyOf": [*choices, *([named_dataset_schema()] if kind is DataSpec else []), foreign]}


def named_dataset_schema() -> Schema:
    """Data by a name that a file of the user's gives it, with further settings beside it."""
    text = {"type": "string"}
    told = {"type": {"const": NAMED}, "name": text, "file": {**text, "default": str(FILES[0])}}
    return {"description": named_datasets.__doc__, "type": "object", "properties": told, "required": ["type", "name"]}


def class_schema(cls: type) -> Schema:
    """The settings of one class, with their defaults."""
    found = type_adapter_for(cls).json_schema()
    hints = get_type_hints(cls)
    properties = {
        f.name: {**expand_readers(found["properties"][f.name]), **default(f, hints[f.name])}
        for f in fields(cls)
        if f.init
    }
    about = {"description": cls.__doc__.strip().split("\n")[0]} if cls.__doc__ else {}
    return {**about, "type": "object", "properties": properties, "additionalProperties": False}


def default(f: Field[Any], hint: Any) -> Schema:
    if f.default is not MISSING:
        return {"default": to_plain(f.default, hint)}
    return {} if f.default_factory is MISSING else {"default": to_plain(f.default_factory(), hint)}


def expand_readers(found: Any) -> Any:
    """What pydantic wrote, with our own readers told in full."""
    if isinstance(found, list):
        return [expand_readers(item) for item in found]
    if not isinstance(found, dict):
        return found
    reader = found.get("reader")
    if isinstance(reader, SectionReader):
        return class_schema(reader.cls)
    if isinstance(reader, ComponentReader):
        return {"$ref": f"#/$defs/{COMPONENT_REGISTRIES[reader.kind].kind}"}
    if isinstance(reader, RewardReader):
        # Nothing in the place of an inherited reward removes it.
        return {"anyOf": [{"$ref": f"#/$defs/{WEIGHTED}"}, {"type": "null"}]}
    return {key: expand_readers(item) for key, item in found.items() if key != "title"}
