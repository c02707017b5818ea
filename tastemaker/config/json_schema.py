"""Generate recipes/schema.json, with which editors complete and check recipes."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, get_type_hints

from ..core.reward import RewardSpec
from ..data.dataset import DataSpec
from . import named_datasets
from .dump import to_plain
from .load import RECIPES
from .named_datasets import DATASETS_FILES, NAMED_DATASET
from .schema import (
    AutoencoderRunConfig,
    JudgeRunConfig,
    LoggerConfig,
    PreferenceRunConfig,
    RewardConfig,
    RunConfig,
    ordered_fields,
)
from .validate import COMPONENT_REGISTRIES, ComponentReader, LoggerReader, RewardReader, SectionReader, type_adapter_for

Schema = dict[str, Any]

WEIGHTED = "weighted reward"


def build_schema() -> Schema:
    """Build the schema of all recipes. No key is required: it may come from a recipe that is extended."""
    root = class_schema(RunConfig)
    for other in (AutoencoderRunConfig, JudgeRunConfig, PreferenceRunConfig):
        root["properties"] |= class_schema(other)["properties"]
    names = {"type": "string"}
    root["properties"] |= {"extends": {"anyOf": [names, {"type": "array", "items": names}]}}
    kinds = {registry.kind: component_schema(kind) for kind, registry in COMPONENT_REGISTRIES.items()}
    settings = {name: each for name, each in class_schema(RewardConfig)["properties"].items() if name != "spec"}
    kinds[WEIGHTED] = component_schema(RewardSpec, settings)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tastemaker", **root, "$defs": kinds}


def write_schema(path: Path = RECIPES / "schema.json") -> None:
    path.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8")


def component_schema(kind: type, extra: Schema | None = None) -> Schema:
    """The schema of any class of a kind: registered ones, and a user's own by "module:Class"; `extra` are more keys."""
    registry = COMPONENT_REGISTRIES[kind]
    choices = []
    for name in registry:
        choice, aliases = class_schema(registry.find(name)), registry.aliases(name)
        names = {"enum": [name, *aliases]} if aliases else {"const": name}
        choice["properties"] = {"type": names, **choice["properties"], **(extra or {})}
        choices.append(choice)
    foreign = {"type": "object", "properties": {"type": {"type": "string", "pattern": ":"}}, "required": ["type"]}
    return {"anyOf": [*choices, *([named_dataset_schema()] if kind is DataSpec else []), foreign]}


def named_dataset_schema() -> Schema:
    """The schema of a named dataset."""
    text = {"type": "string"}
    keys = {"type": {"const": NAMED_DATASET}, "name": text, "file": {**text, "default": str(DATASETS_FILES[0])}}
    return {"description": named_datasets.__doc__, "type": "object", "properties": keys, "required": ["type", "name"]}


def class_schema(cls: type) -> Schema:
    """The schema of one class: its settings with their defaults."""
    schema = type_adapter_for(cls).json_schema()
    hints = get_type_hints(cls)
    properties = {
        f.name: {**expand_readers(schema["properties"][f.name]), **default_schema(f, hints[f.name])}
        for f in ordered_fields(cls)
        if f.init
    }
    about = {"description": cls.__doc__.strip().split("\n")[0]} if cls.__doc__ else {}
    return {**about, "type": "object", "properties": properties, "additionalProperties": False}


def default_schema(f: Field[Any], hint: Any) -> Schema:
    if f.default is not MISSING:
        return {"default": to_plain(f.default, hint)}
    return {} if f.default_factory is MISSING else {"default": to_plain(f.default_factory(), hint)}


def expand_readers(schema: Any) -> Any:
    """Replace our readers in pydantic's schema by the schemas of their classes."""
    if isinstance(schema, list):
        return [expand_readers(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reader = schema.get("reader")
    if isinstance(reader, SectionReader):
        return class_schema(reader.cls)
    if isinstance(reader, ComponentReader):
        return {"$ref": f"#/$defs/{COMPONENT_REGISTRIES[reader.kind].kind}"}
    if isinstance(reader, RewardReader):
        # null removes an inherited reward.
        return {"anyOf": [{"$ref": f"#/$defs/{WEIGHTED}"}, {"type": "null"}]}
    if isinstance(reader, LoggerReader):
        logger = class_schema(LoggerConfig)
        return {"anyOf": [logger["properties"]["type"], logger]}
    expanded = {key: expand_readers(item) for key, item in schema.items() if key != "title"}
    if "enum" in expanded:
        # Python caches Literal["a", "b"] and Literal["b", "a"] as one type, so their order depends on imports.
        expanded["enum"] = sorted(expanded["enum"], key=str)
    return expanded
