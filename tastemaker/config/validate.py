"""Build frozen dataclasses from plain data: `type` names the class, pydantic checks and converts its fields.

Errors are one message per problem, with the key, the value, what was expected and, for typos, a suggestion.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    TypeAdapter,
    WrapValidator,
)
from pydantic.errors import PydanticUserError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import (
    CoreSchema,
    ValidationError,
    core_schema,
)
from typing_extensions import TypedDict, get_protocol_members, is_protocol

from ..core.autoencoder import AutoencoderSpec
from ..core.model_spec import ModelSpec
from ..core.objective import Objective
from ..core.policy import Process
from ..core.registry import ConfigError, Registry
from ..core.reward import RewardSpec
from ..core.weights import Tuning
from ..data.dataset import DataSpec
from ..processes.dynamics import SamplerDynamics
from ..processes.paths import NoisePath
from ..search.base import Search
from . import registries
from .named_datasets import resolve_named_dataset
from .schema import (
    AnyConfig,
    AutoencoderRunConfig,
    CommonConfig,
    JudgeRunConfig,
    LoggerConfig,
    PreferenceRunConfig,
    RewardConfig,
    RunConfig,
    ordered_fields,
)
from .validation_messages import (
    describe_errors,
    describe_type,
    format_location,
    format_value,
    literal_choices,
    make_error,
    suggest_choice,
)

# The registry in which the `type` of a value is looked up, by the type of its field.
COMPONENT_REGISTRIES: dict[type, Registry] = {
    ModelSpec: registries.MODELS,
    AutoencoderSpec: registries.AUTOENCODERS,
    Process: registries.PROCESSES,
    NoisePath: registries.PATHS,
    SamplerDynamics: registries.DYNAMICS,
    Objective: registries.OBJECTIVES,
    RewardSpec: registries.REWARDS,
    Tuning: registries.TUNINGS,
    DataSpec: registries.DATA,
    Search: registries.SEARCHES,
}


def validate_config(data: object) -> AnyConfig:
    """Build the configuration of a run from plain data; its kind is the section it has."""
    kinds: dict[str, type] = {"objective": RunConfig, "autoencoder": AutoencoderRunConfig, "judge": JudgeRunConfig}
    kinds["preference"] = PreferenceRunConfig
    present = [key for key in kinds if isinstance(data, Mapping) and key in data]
    if len(present) > 1:
        raise ConfigError(
            f"config: found both '{present[0]}' and '{present[1]}', but a recipe trains only one of them; remove "
            f"'{present[0]}' or '{present[1]}' [TM051]"
        )
    config: AnyConfig = build_component(kinds[present[0]] if present else RunConfig, data)
    return config


def build_component(kind: type, data: object, where: str = "") -> Any:
    """Build an object of a kind (by its `type`) or of a class; ConfigError has one line per problem."""
    reader = ComponentReader(kind) if kind in COMPONENT_REGISTRIES else SectionReader(kind)
    try:
        return reader_adapter(reader).validate_python(data)
    except ValidationError as error:
        start = (where,) if where else ()
        lines = [f"{format_location(start + line['loc'])}: {line['ctx']['text']}" for line in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except RecursionError as error:
        raise ConfigError(
            f"{where or 'config'}: the settings are nested too deeply; write sections with settings, such as optim: "
            "{lr: 1e-4} [TM052]"
        ) from error


def require_int64(value: int) -> int:
    """Refuse an integer that does not fit a tensor."""
    if value.bit_length() > 63:
        raise make_error(
            f"expected an integer of at most 63 bits, got an integer of {value.bit_length()} bits; use a smaller "
            "number [TM053]"
        )
    return value


def parse_number(value: object) -> object:
    """Convert text such as '1e-4' to a float; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


# Validators before and after the bounds of a type: pydantic writes a bound into its schema only next to the type.
STRICT: dict[Any, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    float: ((Strict(), Field(allow_inf_nan=False)), (BeforeValidator(parse_number),)),
    int: ((Strict(),), (AfterValidator(require_int64),)),
    str: ((Strict(),), ()),
    bool: ((Strict(),), ()),
}


class ConfigReader(ABC):
    """Annotation metadata that tells pydantic how to read a mapping."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"reader": self}  # json_schema.py replaces it by the schema of the class

    @abstractmethod
    def read(self, data: object) -> Any: ...


@dataclass(frozen=True)
class SectionReader(ConfigReader):
    """Reads a mapping as one class."""

    cls: type
    extra_keys: tuple[str, ...] = ()  # keys that are read elsewhere, for suggestions

    def read(self, data: object) -> Any:
        if not isinstance(data, Mapping):
            raise make_error(
                f"expected a mapping of settings, got {format_value(data)}; write settings as key: value [TM054]"
            )
        try:
            values = type_adapter_for(self.cls).validate_python(data)
        except ValidationError as error:
            keys = [f.name for f in fields(self.cls) if f.init] + list(self.extra_keys)
            places = partial(find_key_paths, self.cls, data) if issubclass(self.cls, CommonConfig) else None
            raise describe_errors(error, keys, find_paths=places) from None
        except ConfigError as error:
            raise make_error(str(error)) from error
        try:
            return self.cls(**values)
        except (ValueError, ArithmeticError) as error:  # raised by __post_init__
            raise make_error(str(error)) from error


@dataclass(frozen=True)
class ComponentReader(ConfigReader):
    """Reads a mapping as the class of a kind that its `type` names."""

    kind: type
    extra_keys: tuple[str, ...] = ()

    def read(self, data: object) -> Any:
        registry = COMPONENT_REGISTRIES[self.kind]
        choices = f"one of {', '.join(registry)}"
        if isinstance(data, str) and data in registry:
            raise make_error(f"expected a mapping of settings, got '{data}'; write {{type: {data}}} [TM055]")
        if not isinstance(data, Mapping):
            raise make_error(
                f"expected a mapping of settings with a 'type', {choices}, got {format_value(data)}; write for "
                f"example {{type: {next(iter(registry))}}} [TM056]"
            )
        if "type" not in data:
            raise make_error(f"'type' is missing; set it to {choices} [TM057]")
        if not isinstance(data["type"], str):
            raise make_error(f"'type' is {format_value(data['type'])}; set it to {choices} [TM058]")
        try:
            data = resolve_named_dataset(data) if self.kind is DataSpec else data
            data = resolve_function_reward(data) if self.kind is RewardSpec else data
            cls = check_component_class(registry.find(data["type"]), self.kind, data["type"])
        except ConfigError as error:
            raise make_error(str(error)) from error
        settings = {key: value for key, value in registry.resolve_alias(data).items() if key != "type"}
        return SectionReader(cls, ("type", *self.extra_keys)).read(settings)


def resolve_function_reward(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `type: module:function` by the reward that calls this function; return other rewards unchanged."""
    name = data["type"]
    if ":" in name and inspect.isfunction(registries.REWARDS.find_object(name)):
        return {**data, "type": "function", "function": name}
    return data


REWARD_SETTINGS = tuple(f.name for f in fields(RewardConfig) if f.name != "spec")  # weight, normalize, ...


@dataclass(frozen=True)
class RewardReader(ConfigReader):
    """Reads a reward with its weight and the other keys of `RewardConfig` in one mapping."""

    def read(self, data: object) -> Any:
        spec, settings = data, {}
        if isinstance(data, Mapping):
            spec = {key: value for key, value in data.items() if key not in REWARD_SETTINGS}
            settings = {key: value for key, value in data.items() if key in REWARD_SETTINGS}
        try:
            return RewardConfig(**reward_adapter().validate_python({"spec": spec, **settings}))
        except ValidationError as error:
            raise describe_errors(error, (), hidden_key="spec") from None
        except ValueError as error:
            raise make_error(str(error)) from error


@dataclass(frozen=True)
class LoggerReader(ConfigReader):
    """Reads a logger: its name, or a mapping with its `type` and settings."""

    def read(self, data: object) -> Any:
        return SectionReader(LoggerConfig).read({"type": data} if isinstance(data, str) else data)


@cache
def reward_adapter() -> TypeAdapter[Any]:
    spec = Annotated[Any, ComponentReader(RewardSpec, REWARD_SETTINGS)]
    return mapping_adapter("Reward", {**field_types(RewardConfig), "spec": spec})


@cache
def reader_adapter(reader: ConfigReader) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Any, reader])


def check_component_class(cls: type, kind: type, name: str) -> type:
    """Return the class if it is a complete dataclass of the kind, else raise ConfigError."""
    word = COMPONENT_REGISTRIES[kind].kind
    if not is_dataclass(cls):
        advice = f"expected a frozen dataclass whose fields are the settings of the {word}"
        if "from_config" in dir(cls):
            advice += (
                "; for a network with a classmethod from_config write "
                f"{{type: from_config, class_path: '{name:.60}', params: ...}}"
            )
        raise ConfigError(f"'{name:.60}' is not a dataclass; {advice} [TM059]")
    if not is_protocol(kind) and not issubclass(cls, kind):
        raise ConfigError(
            f"'{name:.60}' is not a subclass of {kind.__name__}; derive the class from {kind.__name__}, or name "
            f"another {word} [TM060]"
        )
    abstract: set[str] = {*cls.__abstractmethods__} if inspect.isabstract(cls) else set()
    required = get_protocol_members(kind) if is_protocol(kind) else {*kind.__annotations__, *abstract}
    missing = sorted(required - ({*dir(cls), *(f.name for f in fields(cls))} - abstract))
    if missing:
        raise ConfigError(
            f"'{name:.60}' does not define {', '.join(missing)}, which every {word} needs; add the definition to the "
            "class [TM061]"
        )
    return cls


@cache
def type_adapter_for(cls: type) -> TypeAdapter[Any]:
    """The pydantic validator for the settings of a class."""
    try:
        return mapping_adapter(cls.__name__, field_types(cls))
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"the fields of {cls.__name__} cannot be used as settings ({reason}); annotate the fields with plain "
            "types such as int, float, str, bool and tuple [TM062]"
        ) from error


def mapping_adapter(name: str, types: dict[str, Any]) -> TypeAdapter[Any]:
    """The pydantic validator for a mapping with these keys and no others."""
    make: Any = TypedDict  # its keys are known at run time only, which no type checker follows
    mapping = make(name, types)
    mapping.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(mapping)


def field_types(cls: type) -> dict[str, Any]:
    """The settings of a class with the types that their values are checked against."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        f.name: (Required if f.default is f.default_factory is MISSING else NotRequired)[strict_type(hints[f.name])]
        for f in ordered_fields(cls)
        if f.init
    }


def strict_type(hint: Any) -> Any:
    """Convert a type hint for pydantic: strict numbers and text, and our readers for components and sections."""
    origin, args = get_origin(hint), get_args(hint)
    if (origin or hint) in COMPONENT_REGISTRIES:
        return Annotated[Any, ComponentReader(origin or hint)]
    if hint is RewardConfig:
        return Annotated[Any, RewardReader()]
    if hint is LoggerConfig:
        return Annotated[Any, LoggerReader()]
    if isinstance(hint, type) and is_dataclass(hint):
        return Annotated[Any, SectionReader(hint)]
    if origin is Annotated:
        return strict_scalar(args[0], args[1:]) if args[0] in STRICT else Annotated[(strict_type(args[0]), *args[1:])]
    if origin in (Union, UnionType):
        return strict_union(hint)
    if origin in (tuple, dict, Mapping):
        return (tuple if origin is tuple else dict)[tuple(arg if arg is ... else strict_type(arg) for arg in args)]
    return strict_scalar(hint) if hint in STRICT else hint


def strict_scalar(hint: Any, bounds: tuple[Any, ...] = ()) -> Any:
    before, after = STRICT[hint]
    return Annotated[(hint, *before, *bounds, *after)]


def strict_union(hint: Any) -> Any:
    """A choice of types with one message if none fits."""
    members = tuple(strict_type(member) for member in get_args(hint))
    choice: Any = reduce(or_, members)
    if len(members) == 2 and NoneType in members:
        return choice

    def read(value: object, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            hint_text = suggest_choice(value, literal_choices(hint))
            raise make_error(f"expected {describe_type(hint)}, got {format_value(value)}{hint_text} [TM063]") from None

    return Annotated[choice, WrapValidator(read)]


def find_key_paths(cls: type, settings: Mapping[str, Any], key: str, prefix: str = "") -> list[str]:
    """Where a setting such as `lr` is in the sections of a class: `optim.lr`. Components are those of the settings."""
    paths = []
    for name, hint in get_type_hints(cls).items():
        value = settings.get(name)
        section = find_section_class(hint, value)
        if section is not None:
            paths += [f"{prefix}{name}.{key}"] if key in {f.name for f in fields(section) if f.init} else []
            paths += find_key_paths(section, value if isinstance(value, Mapping) else {}, key, f"{prefix}{name}.")
    return paths


def find_section_class(hint: Any, value: object) -> Any:
    """The dataclass of a section: the type hint itself, or the component that its `type` names; None if neither."""
    members = [member for member in get_args(hint) if member is not NoneType]
    hint = members[0] if get_origin(hint) in (Union, UnionType) and len(members) == 1 else get_origin(hint) or hint
    if hint in COMPONENT_REGISTRIES:
        name = value.get("type") if isinstance(value, Mapping) else None
        try:
            hint = COMPONENT_REGISTRIES[hint].find(name) if isinstance(name, str) else None
        except ConfigError:
            return None
    return hint if isinstance(hint, type) and is_dataclass(hint) else None
