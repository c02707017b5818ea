"""The form of a new run: typed fields of a recipe's settings, from the JSON schema of the configuration.

Only fields that differ from the recipe become overrides. Nothing here imports torch or code of the user's: the
configuration is checked by `config_worker`, in a process of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..config import registries
from ..config.field_comments import describe_setting, field_comments
from ..config.recipes import RECIPES, find_recipe, list_trainable_recipes, merge_parents
from ..config.yaml_io import parse_yaml
from ..core.errors import ConfigError
from ..core.registry import AUTOENCODERS, Registry

FieldKind = Literal["number", "choice", "switch", "text", "lines", "yaml"]
Schema = Mapping[str, Any]
COMMON_KEYS = ("optim", "ema_decay", "checkpoint", "engine", "loggers", "steps", "seed")
BATCH_KEYS = ("batch_size", "micro_batch_size")
KEYS = {  # sections of each kind of run, in the order of the form
    "objective": ("objective", "rewards", "sample", "batch", "guard", "guidance", "data", "process", "model", "tuning"),
    "autoencoder": ("autoencoder", "loss", "discriminator", "data", "validation", "sample", *BATCH_KEYS),
    "judge": ("judge", "tuning", "data", "validation", *BATCH_KEYS),
}
RUN_SETTINGS = (
    "steps",
    "optim.lr",
    "batch.prompts",
    "batch_size",
    "batch.micro_batch_size",
    "micro_batch_size",
    "seed",
)
IMPORTANT = (*RUN_SETTINGS, "sample.prompts", "sample.every")  # shown first
MAX_OBJECTIVE_SETTINGS = 8  # that stand among the important ones
REFUSED_KEYS = {  # that a form may not set, with the reason
    "output_dir": "the studio writes runs to its own directory",
    "name": "set it in the field 'name'",
    "extends": "choose another recipe instead",
}
SECTION_CLASSES = {  # where the comments of a section's settings are
    "optim": "OptimConfig",
    "batch": "BatchConfig",
    "engine": "EngineConfig",
    "checkpoint": "CheckpointConfig",
    "sample": "SampleConfig",
    "guard": "GuardConfig",
    "loss": "ReconstructionLossConfig",
    "discriminator": "DiscriminatorConfig",
    "validation": "ValidationConfig",
    "judge": "JudgeModelConfig",
}
REGISTRIES: dict[str, Registry] = {
    "model": registries.MODELS,
    "autoencoder": AUTOENCODERS,
    "process": registries.PROCESSES,
    "path": registries.PATHS,
    "dynamics": registries.DYNAMICS,
    "objective": registries.OBJECTIVES,
    "reward": registries.REWARDS,
    "weighted reward": registries.REWARDS,
    "tuning": registries.TUNINGS,
    "data": registries.DATA,
    "search": registries.SEARCHES,
}
DESCRIPTIONS = {  # of settings without a comment beside their field
    "steps": "training steps",
    "seed": "of random numbers",
    "optim.lr": "learning rate",
}
OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
CODE_KEYS = ("type", "class_path", "function")
MAX_OVERRIDES, MAX_VALUE_LENGTH = 400, 20_000


@dataclass(frozen=True)
class FormField:
    """One setting: what its input shows first, and how its text becomes an override."""

    key: str
    kind: FieldKind
    value: str  # of the recipe, as text
    default: str
    description: str = ""
    choices: tuple[str, ...] = ()
    optional: bool = False  # whether it may be null, which an empty text means
    is_important: bool = False

    @property
    def id(self) -> str:
        return "field-" + re.sub(r"[^\w-]", "-", self.key)

    @property
    def label(self) -> str:
        return self.key

    def to_override(self, text: str) -> str:
        """Return `key=value` for a text that the user entered; values are YAML."""
        if self.kind == "lines":
            value = json.dumps([line.strip() for line in text.splitlines() if line.strip()], ensure_ascii=False)
        elif not text.strip() and (self.optional or self.kind != "text"):
            value = "null"
        elif self.kind in ("text", "choice"):
            value = json.dumps(text, ensure_ascii=False)
        else:
            value = text.strip()
        return f"{self.key}={value}"


@dataclass(frozen=True)
class FormSection:
    """The settings of one part of a configuration."""

    title: str
    description: str
    fields: tuple[FormField, ...]
    type: str = ""  # of the component


@dataclass(frozen=True)
class ConfigForm:
    """All fields of a recipe or of the configuration of a run."""

    source: str  # recipe, or path of a file
    sections: tuple[FormSection, ...]

    def fields(self) -> Iterator[FormField]:
        for section in self.sections:
            yield from section.fields

    def important_fields(self) -> list[FormField]:
        return sorted((f for f in self.fields() if f.is_important), key=lambda f: _importance(f.key))

    def read_overrides(self, values: Mapping[str, str]) -> list[str]:
        """Return an override for each field whose text differs from the recipe's."""
        changed = [f for f in self.fields() if f.key in values and _unify(values[f.key]) != _unify(f.value)]
        return [f.to_override(values[f.key].replace("\r\n", "\n")) for f in changed]


def _unify(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _importance(key: str) -> tuple[int, str]:
    if key in RUN_SETTINGS:
        return RUN_SETTINGS.index(key), key
    return 10 + ("objective", "rewards", "sample").index(key.split(".")[0]), ""


@cache
def load_schema() -> dict[str, Any]:
    """Read the JSON schema of recipes, which `make schema` writes."""
    schema: dict[str, Any] = json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))
    return schema


def read_source(source: str) -> dict[str, Any]:
    """Read the settings of a recipe by name, or of a YAML file by path, without checking them."""
    if not source.endswith(".yaml") and source not in list_trainable_recipes():
        raise ConfigError(
            f"recipe: '{source:.60}' is not a recipe that can be trained; choose one from the list [TM1445]"
        )
    return merge_parents(find_recipe(source, Path()))


def build_form(source: str) -> ConfigForm:
    """Build the form of a recipe by name, or of a YAML file by path."""
    data, properties = read_source(source), load_schema()["properties"]
    kind = next((kind for kind in KEYS if kind in data), "objective")
    comments = field_comments("tastemaker.config.schema:SupervisedConfig")  # with those that all runs have
    sections: list[FormSection] = []
    single = []
    for key in (*KEYS[kind], *COMMON_KEYS):
        schema, value = properties[key], data.get(key)
        if key == "rewards":
            for name, reward in (value or {}).items():
                sections += _build_section(f"rewards.{name}", {"$ref": "#/$defs/weighted reward"}, reward)
        elif _is_section(schema, value):
            sections += _build_section(key, schema, value)
        else:
            single.append(_build_field(key, schema, value, data, comments, properties))
    sections.append(FormSection("run", "Settings of the whole run.", tuple(single)))
    return ConfigForm(source, tuple(section for section in sections if section.fields))


def _is_section(schema: Schema, value: Any) -> bool:
    inner = _find_object(schema)
    return "$ref" in schema or "properties" in schema or (inner is not None and isinstance(value, Mapping))


def _find_object(schema: Schema) -> Schema | None:
    """The object among the choices of a schema, such as an optional section."""
    choices = [each for each in schema.get("anyOf", ()) if "properties" in each or "$ref" in each]
    return choices[0] if len(choices) == 1 else None


def _build_section(key: str, schema: Schema, value: Any) -> list[FormSection]:
    """Build the section of a key, and those of the components and sections inside."""
    values = value if isinstance(value, Mapping) else {}
    type_name, schema = str(values.get("type", "")), _find_object(schema) or schema
    comments = {}
    if "$ref" in schema:
        kind = schema["$ref"].rpartition("/")[2]
        schema = _find_component(load_schema()["$defs"][kind], type_name)
        place = REGISTRIES[kind].locate(type_name)
        if place.startswith("tastemaker."):
            comments = field_comments(place)
        if kind == "weighted reward":
            weight = {"weight": "in the sum of rewards; 0: only logged"}
            comments = {**weight, **field_comments("tastemaker.config.schema:RewardConfig"), **comments}
    elif (name := SECTION_CLASSES.get(key)) is not None:
        comments = field_comments(f"tastemaker.config.schema:{name}")
    elif key == "guidance":
        comments = field_comments("tastemaker.core.policy:Guidance")
    fields, inner = [], []
    for name, setting in schema.get("properties", {}).items():
        place, current = f"{key}.{name}", values.get(name)
        if name == "type" or place == "engine.device":
            continue
        if isinstance(current, Mapping) and _is_section(setting, current):
            inner += _build_section(place, setting, current)
        else:
            fields.append(_build_field(place, setting, current, values, comments, schema["properties"]))
    return [FormSection(key, str(schema.get("description", "")), tuple(fields), type_name), *inner]


def _find_component(definition: Schema, name: str) -> Schema:
    for choice in definition["anyOf"]:
        kind = choice.get("properties", {}).get("type", {})
        if kind.get("const") == name or name in kind.get("enum", ()):
            found: Schema = choice
            return found
    return {"properties": {}}


def _build_field(
    key: str, schema: Schema, value: Any, given: Mapping[str, Any], comments: Mapping[str, str], siblings: Schema
) -> FormField:
    name = key.rpartition(".")[2]
    inner, optional = _strip_null(schema)
    kind, choices = _choose_kind(inner)
    default = schema.get("default")
    is_given = name in given
    important = key in IMPORTANT or (key.startswith("rewards.") and name == "weight" and key.count(".") == 2)
    if key.startswith("objective.") and key.count(".") == 1 and is_given and kind != "yaml":
        important = list(given).index(name) <= MAX_OBJECTIVE_SETTINGS
    return FormField(
        key,
        kind,
        _to_text(value if is_given else default, kind),
        _to_text(default, kind) if "default" in schema else "",
        DESCRIPTIONS.get(key) or describe_setting(name, comments, siblings),
        (*([""] if optional and kind == "choice" else []), *choices),
        optional,
        important,
    )


def _strip_null(schema: Schema) -> tuple[Schema, bool]:
    """Return a schema without the choice of null, and whether it had that."""
    choices = schema.get("anyOf")
    if not choices:
        return schema, False
    others = [each for each in choices if each.get("type") != "null"]
    return (others[0] if len(others) == 1 else {"anyOf": others}), len(others) < len(choices)


def _choose_kind(schema: Schema) -> tuple[FieldKind, tuple[str, ...]]:
    if "enum" in schema and all(isinstance(each, str) for each in schema["enum"]):
        return "choice", tuple(schema["enum"])
    if (
        schema.get("type") == "array"
        and schema.get("items", {}).get("type") == "string"
        and "enum" not in schema["items"]
    ):
        return "lines", ()
    kinds: dict[str, FieldKind] = {"boolean": "switch", "integer": "number", "number": "number", "string": "text"}
    return kinds.get(str(schema.get("type")), "yaml"), ()


def _to_text(value: Any, kind: FieldKind) -> str:
    if value is None:
        return ""
    if kind == "lines" and isinstance(value, list | tuple):
        return "\n".join(str(each) for each in value)
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


# Overrides and user code


def check_overrides(overrides: Sequence[str]) -> list[str]:
    """Return a message for every text that is not an override, or that a form may not set."""
    messages = []
    if len(overrides) > MAX_OVERRIDES:
        messages.append(f"extra: at most {MAX_OVERRIDES} settings can be changed at once [TM1446]")
    for override in overrides[:MAX_OVERRIDES]:
        key = override.partition("=")[0]
        if not OVERRIDE.fullmatch(override):
            messages.append(f"extra: '{override:.60}' is not key=value; write for example optim.lr=3e-4 [TM1447]")
        elif key.split(".")[0] in REFUSED_KEYS:
            messages.append(f"extra: {key} cannot be set here; {REFUSED_KEYS[key.split('.')[0]]} [TM1448]")
        elif len(override) > MAX_VALUE_LENGTH:
            messages.append(f"{key}: the value is longer than {MAX_VALUE_LENGTH} characters; shorten it [TM1449]")
    return messages


def find_user_code(settings: Any, key: str = "") -> list[str]:
    """Return `key: name` for every setting that names code of the user's own, which a run would import."""
    found = []
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            place = f"{key}.{name}" if key else str(name)
            if name in CODE_KEYS and isinstance(value, str) and (":" in value or name == "function"):
                found.append(f"{place}: {value:.100}")
            found += find_user_code(value, place)
    elif isinstance(settings, list | tuple):
        found += [each for index, item in enumerate(settings) for each in find_user_code(item, f"{key}[{index}]")]
    return found


def find_user_code_in_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that name code of the user's own. What is not YAML is left to the check."""
    found = []
    for override in overrides:
        place, _, text = override.partition("=")
        try:
            value = parse_yaml(text, place)
        except ConfigError:
            continue
        for name in reversed(place.split(".")):
            value = {name: value}
        found += find_user_code(value)
    return found


def refuse_user_code(found: Sequence[str]) -> None:
    """Raise ConfigError if some settings name code of the user's own."""
    if found:
        listed = ", ".join(found[:5])
        raise ConfigError(
            f"this configuration imports code of your own ({listed}), which the browser may not start; start the "
            "studio with --allow-code, or run the command in a terminal [TM1450]"
        )


def find_paths(overrides: Sequence[str]) -> list[str]:
    """Return the overrides whose value looks like a path, so that the user sees which files a run will read."""
    return [each for each in overrides if re.search(r"=\W*(?:[\w.~-]*[/\\])", each)]


KEY_OF_MESSAGE = re.compile(r"([A-Za-z_][\w.-]*(?:\[\d+\])?):? ")


def sort_messages(messages: Sequence[str], keys: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split messages into those of a field, by key, and others."""
    by_key: dict[str, str] = {}
    others = []
    for message in messages:
        match = KEY_OF_MESSAGE.match(message)
        place = match[1].partition("[")[0] if match else ""
        while place and place not in keys:
            place = place.rpartition(".")[0]
        if place:
            by_key[place] = f"{by_key[place]}\n{message}" if place in by_key else message
        else:
            others.append(message)
    return by_key, others
