"""Plain data to frozen dataclasses: `type` names the class, pydantic checks and converts its fields."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, reduce
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
from pydantic_core import CoreSchema, ValidationError, core_schema
from typing_extensions import TypedDict, get_protocol_members, is_protocol

from ..core.registry import ConfigError
from ..core.reward import RewardSpec
from ..data.spec import DataSpec
from .component_types import COMPONENT_REGISTRIES
from .messages import (
    convert_validation_error,
    describe_type,
    format_location,
    format_value,
    literal_choices,
    make_problem,
    suggest_choice,
)
from .named_datasets import resolve_named_dataset
from .schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, RewardConfig, RunConfig


def require_int64(value: int) -> int:
    """A whole number that fits a tensor."""
    if value.bit_length() > 63:
        raise make_problem(f"expected a whole number of at most 63 bits, found one of {value.bit_length()}")
    return value


def parse_number(value: object) -> object:
    """Text that is a number, as a number."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


# What surrounds the bounds of a number or text: pydantic writes a bound into its schema only next to the type itself.
STRICT: dict[Any, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    float: ((Strict(), Field(allow_inf_nan=False)), (BeforeValidator(parse_number),)),
    int: ((Strict(),), (AfterValidator(require_int64),)),
    str: ((Strict(),), ()),
    bool: ((Strict(),), ()),
}


class ConfigReader(ABC):
    """Metadata of an annotation: how pydantic is to read a mapping there."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"reader": self}  # for schema.py to replace; pydantic would want to know the whole of it here

    @abstractmethod
    def read(self, data: object) -> Any: ...


@dataclass(frozen=True)
class SectionReader(ConfigReader):
    """Reads a mapping as one known class."""

    cls: type
    beside: tuple[str, ...] = ()  # keys the mapping may have that are read elsewhere

    def read(self, data: object) -> Any:
        if not isinstance(data, Mapping):
            raise make_problem(f"expected a mapping of settings, found {format_value(data)}")
        try:
            values = type_adapter_for(self.cls).validate_python(data)
        except ValidationError as error:
            raise convert_validation_error(
                error, [f.name for f in fields(self.cls) if f.init] + list(self.beside)
            ) from None
        except ConfigError as error:
            raise make_problem(str(error)) from error
        try:
            return self.cls(**values)
        except (ValueError, ArithmeticError) as error:  # what the class itself demands of its values
            raise make_problem(str(error)) from error


@dataclass(frozen=True)
class ComponentReader(ConfigReader):
    """Reads a mapping as whichever class of a kind its `type` names."""

    kind: type
    beside: tuple[str, ...] = ()

    def read(self, data: object) -> Any:
        registry = COMPONENT_REGISTRIES[self.kind]
        known = f"one of {', '.join(registry)}"
        if isinstance(data, str) and data in registry:
            raise make_problem(f"expected a mapping of settings, found '{data}'; write {{type: {data}}}")
        if not isinstance(data, Mapping):
            raise make_problem(f"expected a mapping of settings with a 'type', {known}; found {format_value(data)}")
        if "type" not in data:
            raise make_problem(f"'type' is missing; expected {known}")
        if not isinstance(data["type"], str):
            raise make_problem(f"'type' is {format_value(data['type'])}; expected {known}")
        try:
            data = resolve_named_dataset(data) if self.kind is DataSpec else data
            cls = check_component_class(registry.find(data["type"]), self.kind, data["type"])
        except ConfigError as error:
            raise make_problem(str(error)) from error
        settings = {key: value for key, value in registry.spelled(data).items() if key != "type"}
        return SectionReader(cls, ("type", *self.beside)).read(settings)


REWARD_SETTINGS = tuple(f.name for f in fields(RewardConfig) if f.name != "spec")  # keys that say how a reward counts


@dataclass(frozen=True)
class RewardReader(ConfigReader):
    """Reads a reward's settings and, beside them, how it counts."""

    def read(self, data: object) -> Any:
        own, beside = data, {}
        if isinstance(data, Mapping):
            own = {key: value for key, value in data.items() if key not in REWARD_SETTINGS}
            beside = {key: value for key, value in data.items() if key in REWARD_SETTINGS}
        try:
            return RewardConfig(**reward_adapter().validate_python({"spec": own, **beside}))
        except ValidationError as error:
            raise convert_validation_error(error, (), inside="spec") from None
        except ValueError as error:
            raise make_problem(str(error)) from error


@cache
def reward_adapter() -> TypeAdapter[Any]:
    spec = Annotated[Any, ComponentReader(RewardSpec, REWARD_SETTINGS)]
    return adapter("Reward", {**field_types(RewardConfig), "spec": spec})


def check_component_class(cls: type, kind: type, name: str) -> type:
    """The class, once it is sure that it is of the kind."""
    word = COMPONENT_REGISTRIES[kind].kind
    if not is_dataclass(cls):
        told = f"expected a frozen one whose fields are the settings of the {word}"
        own = f"; a network that makes itself is {{type: from_config, of: '{name:.60}', params: ...}}"
        raise ConfigError(f"'{name:.60}' is no dataclass; {told}{own if 'from_config' in dir(cls) else ''}")
    if not is_protocol(kind) and not issubclass(cls, kind):
        raise ConfigError(f"'{name:.60}' is not derived from {kind.__name__}, as every {word} is; name another")
    abstract: set[str] = {*cls.__abstractmethods__} if inspect.isabstract(cls) else set()
    promised = get_protocol_members(kind) if is_protocol(kind) else {*kind.__annotations__, *abstract}
    there = {*dir(cls), *(f.name for f in fields(cls))} - abstract
    lacking = sorted(promised - there)
    if lacking:
        raise ConfigError(f"'{name:.60}' lacks {', '.join(lacking)}, which every {word} has; add it, or name another")
    return cls


@cache
def type_adapter_for(cls: type) -> TypeAdapter[Any]:
    """What pydantic holds a mapping against before it becomes an object of the class."""
    try:
        return adapter(cls.__name__, field_types(cls))
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the fields of {cls.__name__} cannot be read ({reason}); expected plain types") from error


def adapter(name: str, shape: dict[str, Any]) -> TypeAdapter[Any]:
    """Of a mapping that has these keys and no others."""
    make: Any = TypedDict  # its keys are known at run time only, which no type checker follows
    mapping = make(name, shape)
    mapping.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(mapping)


def field_types(cls: type) -> dict[str, Any]:
    """The settings of a class with the types their values are checked against."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        f.name: (Required if f.default is f.default_factory is MISSING else NotRequired)[strict_type(hints[f.name])]
        for f in fields(cls)
        if f.init
    }


def strict_type(hint: Any) -> Any:
    """The same type, strict where pydantic is lenient, with our own classes read by name."""
    origin, args = get_origin(hint), get_args(hint)
    if (origin or hint) in COMPONENT_REGISTRIES:
        return Annotated[Any, ComponentReader(origin or hint)]
    if hint is RewardConfig:
        return Annotated[Any, RewardReader()]
    if isinstance(hint, type) and is_dataclass(hint):
        return Annotated[Any, SectionReader(hint)]
    if origin is Annotated:
        return scalar(args[0], args[1:]) if args[0] in STRICT else Annotated[(strict_type(args[0]), *args[1:])]
    if origin in (Union, UnionType):
        return union(hint)
    if origin in (tuple, dict, Mapping):
        return (tuple if origin is tuple else dict)[tuple(arg if arg is ... else strict_type(arg) for arg in args)]
    return scalar(hint) if hint in STRICT else hint


def scalar(hint: Any, bounds: tuple[Any, ...] = ()) -> Any:
    """A strict number or text within bounds."""
    before, after = STRICT[hint]
    return Annotated[(hint, *before, *bounds, *after)]


def union(hint: Any) -> Any:
    """A choice of types; one complaint where none of them fits."""
    members = tuple(strict_type(member) for member in get_args(hint))
    choice: Any = reduce(or_, members)
    if len(members) == 2 and NoneType in members:
        return choice

    def read(value: object, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise make_problem(
                f"expected {describe_type(hint)}, found {format_value(value)}"
                f"{suggest_choice(value, literal_choices(hint))}"
            ) from None

    return Annotated[choice, WrapValidator(read)]


@cache
def entry(reader: ConfigReader) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[Any, reader])


def build_component(kind: type, data: object, where: str = "") -> Any:
    """An object of a kind, or of a class, out of plain data; every problem at once, one sentence a line."""
    reader = ComponentReader(kind) if kind in COMPONENT_REGISTRIES else SectionReader(kind)
    try:
        return entry(reader).validate_python(data)
    except ValidationError as error:
        start = (where,) if where else ()
        lines = [f"{format_location(start + line['loc'])}: {line['ctx']['sentence']}" for line in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except RecursionError as error:
        raise ConfigError(f"{where or 'config'}: nested too deeply; expected sections of settings") from error


def validate_config(data: object) -> AnyConfig:
    """The configuration of a run: of an objective's, of an autoencoder's, or of a judge's."""
    kinds = {"objective": RunConfig, "autoencoder": AutoencoderRunConfig, "judge": JudgeRunConfig}
    found = [key for key in kinds if isinstance(data, Mapping) and key in data]
    if len(found) > 1:
        both = " and ".join(f"'{key}'" for key in found[:2])
        raise ConfigError(f"config: found both {both}; a recipe trains one of them, remove one")
    config: AnyConfig = build_component(kinds[found[0]] if found else RunConfig, data)
    return config
