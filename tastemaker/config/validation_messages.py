"""Messages about settings that do not fit: the texts that replace pydantic's, and values and types in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import (
    ErrorDetails,
    InitErrorDetails,
    PydanticCustomError,
    ValidationError,
)

from ..core.registry import suggest_name
from . import registries

Location = tuple[int | str, ...]
MESSAGE = "message"  # the type of a pydantic error whose text is final
MAX_SUGGESTED_PATHS = 4  # places of a setting that are named in a message
MAX_VALUE_LENGTH = 60  # characters of a value in a message
OTHER_NAMES = {"through": "gradient_mode"}  # of settings in other texts, and what they are called here
EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "path_type": "a path",
    "string_unicode": "text in UTF-8",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "multiple_of": "a multiple of {multiple_of:g}",
    "int_from_float": "an integer",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_long": "{max_length} items",
    "too_short": "at least {min_length} items",
}  # by pydantic's error type
EXAMPLES = {
    "int_type": "8",
    "int_from_float": "8",
    "float_type": "0.1 or 1e-4",
    "tuple_type": "[1, 2]",
    "dict_type": "{key: value}",
    "too_short": "[1, 2]",
}  # of values, by pydantic's error type
TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list",
    dict: "a mapping",
    NoneType: "null",
}


def make_error(text: str) -> PydanticCustomError:
    """An error with a final text, which pydantic carries to the place it belongs to."""
    # The text is not a template: braces in it are the user's. Lone surrogates are not text to pydantic.
    printable = text.encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError(MESSAGE, "{text}", {"text": printable})


def describe_errors(
    error: ValidationError,
    keys: Iterable[str],
    hidden_key: str = "",
    find_paths: Callable[[str], list[str]] | None = None,
) -> ValidationError:
    """Replace pydantic's texts by ours.

    `keys` are for suggestions; `hidden_key` is not written by the user. `find_paths` returns the paths of
    settings of this name in other sections.
    """
    lines = []
    for details in error.errors(include_url=False):
        where, text = describe_error(details, list(keys))
        if details["type"] == "extra_forbidden" and find_paths and (paths := find_paths(str(details["loc"][-1]))):
            suggestions = " or ".join(f"'{path}'" for path in paths[:MAX_SUGGESTED_PATHS])
            text = f"unknown key '{details['loc'][-1]!s:.60}'; did you mean {suggestions}? [TM820]"
        where = where[1:] if where[:1] == (hidden_key,) else where
        lines.append(InitErrorDetails(type=make_error(text), loc=where, input=None))
    return ValidationError.from_exception_data(error.title, lines)


def describe_error(error: ErrorDetails, keys: list[str]) -> tuple[Location, str]:
    """The location of an error and the text about it."""
    kind, where, value, context = error["type"], error["loc"], error["input"], error.get("ctx", {})
    if kind == "value_error":  # of a check beside the field, with a text of its own
        return where, str(context["error"])
    if kind == MESSAGE:
        return where, context["text"]
    if kind == "extra_forbidden":
        return where[:-1], f"unknown key '{where[-1]!s:.60}'{suggest_key(str(where[-1]), keys)} [TM820]"
    if kind == "invalid_key" or where[-1:] == ("[key]",):
        return where[:-2], f"expected names as keys, got {format_value(value)}; write keys as text [TM821]"
    if kind == "missing" and isinstance(where[-1], int):
        return where[
            :-1
        ], f"expected more than {where[-1]} item{('' if where[-1] == 1 else 's')}; add the missing items [TM822]"
    if kind == "missing":
        return where[:-1], f"'{where[-1]}' is missing; set a value for '{where[-1]}' [TM815]"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        hint = registries.VALUE_HINTS.get((str(where[-1]), value)) if where and isinstance(value, str) else None
        advice = f"; {hint}" if hint else suggest_choice(value, choices)
        return where, f"expected {context['expected']}, got {format_value(value)}{advice} [TM823]"
    if kind == "too_long":
        return (
            where,
            f"expected {context['max_length']} items, got {context['actual_length']}; remove the extra items [TM824]",
        )
    expected = EXPECTED[kind].format(**context) if kind in EXPECTED else error["msg"].removeprefix("Input should be ")
    example = f"; write for example {EXAMPLES[kind]}" if kind in EXAMPLES else ""
    return where, f"expected {expected}, got {format_value(value)}{example} [TM825]"


def suggest_key(word: str, keys: list[str]) -> str:
    """What to write instead of an unknown key: the setting that goes by this name elsewhere, or a similar one."""
    known = OTHER_NAMES.get(word)
    return f"; use '{known}'" if known in keys else suggest_name(word, keys)


def suggest_choice(word: object, choices: Iterable[str]) -> str:
    """A suggestion for a misspelled word, if a choice is close to it."""
    hint = suggest_name(word, choices) if isinstance(word, str) else ""
    return hint if "did you mean" in hint else ""


def format_value(value: object) -> str:
    """A value as in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print the longest ones
        return "an integer of very many digits"
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 3]}..."


def format_location(where: Location) -> str:
    """A location as the user writes it: optim.betas[1]."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step:.60}" for step in where)
    return text.removeprefix(".") or "config"


def describe_type(hint: Any) -> str:
    """The values that a type allows, in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(member) for member in get_args(hint))
    if origin is Annotated:
        return describe_type(get_args(hint)[0])
    if origin is Literal:
        return " or ".join(format_value(choice) for choice in get_args(hint))
    return TYPE_NAMES.get(origin or hint, "a mapping")


def literal_choices(hint: Any) -> list[str]:
    """The words among the values that a type allows."""
    if get_origin(hint) is Literal:
        return [choice for choice in get_args(hint) if isinstance(choice, str)]
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [word for member in members for word in literal_choices(member)]
