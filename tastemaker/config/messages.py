"""What pydantic found wrong, told as sentences that name what was found, what was expected and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, ValidationError

from ..core.registry import suggest_name

Location = tuple[int | str, ...]

PROBLEM = "problem"  # the type of an error that is a sentence already
LONGEST = 60  # characters of a value worth repeating
# What others call a choice that is several settings here, by the key it is written under.
THEIRS = {("through", "last"): "VADER's 'last' is 'tail' here, with tail: 1"}

EXPECTED = {
    "int_type": "a whole number",
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
    "int_from_float": "a whole number",
    "string_pattern_mismatch": "text that fits {pattern}",
    "too_long": "{max_length} items",
    "too_short": "at least {min_length} items",
}
NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list",
    dict: "a mapping",
    NoneType: "null",
}


def format_value(value: object) -> str:
    """A value as it stands in YAML, cut where it grows long."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print the longest ones
        return "a whole number of very many digits"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def describe_type(hint: Any) -> str:
    """The values a type allows, in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(member) for member in get_args(hint))
    if origin is Annotated:
        return describe_type(get_args(hint)[0])
    if origin is Literal:
        return " or ".join(format_value(choice) for choice in get_args(hint))
    return NAMES.get(origin or hint, "a mapping")


def literal_choices(hint: Any) -> list[str]:
    """The words among the values a type allows."""
    if get_origin(hint) is Literal:
        return [choice for choice in get_args(hint) if isinstance(choice, str)]
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [word for member in members for word in literal_choices(member)]


def make_problem(sentence: str) -> PydanticCustomError:
    """A sentence in a form that pydantic carries to the place it belongs to."""
    # The sentence is no template: braces in it are the user's own. Lone surrogates are no text to pydantic.
    printable = sentence.encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError(PROBLEM, "{sentence}", {"sentence": printable})


def convert_validation_error(error: ValidationError, known: Iterable[str], inside: str = "") -> ValidationError:
    """The same errors as sentences; `known` are the keys there are, `inside` one that the user does not write."""
    lines = []
    for found in error.errors(include_url=False):
        where, sentence = describe_error(found, list(known))
        where = where[1:] if where[:1] == (inside,) else where
        lines.append(InitErrorDetails(type=make_problem(sentence), loc=where, input=None))
    return ValidationError.from_exception_data(error.title, lines)


def describe_error(error: ErrorDetails, known: list[str]) -> tuple[Location, str]:
    """Where an error is and what to say of it."""
    kind, where, value, context = error["type"], error["loc"], error["input"], error.get("ctx", {})
    if kind == PROBLEM:
        return where, context["sentence"]
    if kind == "extra_forbidden":
        return where[:-1], f"unknown key '{where[-1]!s:.60}'{suggest_name(str(where[-1]), known)}"
    if kind == "invalid_key" or where[-1:] == ("[key]",):
        return where[:-2], f"expected names as keys, found {format_value(value)}"
    if kind == "missing" and isinstance(where[-1], int):
        return where[:-1], f"expected more than {where[-1]} item{'' if where[-1] == 1 else 's'}"
    if kind == "missing":
        return where[:-1], f"'{where[-1]}' is missing"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        theirs = THEIRS.get((str(where[-1]), value)) if where and isinstance(value, str) else None
        hint = f"; {theirs}" if theirs else suggest_choice(value, choices)
        return where, f"expected {context['expected']}, found {format_value(value)}{hint}"
    if kind == "too_long":
        return where, f"expected {context['max_length']} items, found {context['actual_length']}"
    expected = EXPECTED[kind].format(**context) if kind in EXPECTED else error["msg"].removeprefix("Input should be ")
    return where, f"expected {expected}, found {format_value(value)}"


def suggest_choice(word: object, choices: Iterable[str]) -> str:
    """The choice a misspelt word may have meant, if one is near."""
    hint = suggest_name(word, choices) if isinstance(word, str) else ""
    return hint if "did you mean" in hint else ""


def format_location(where: Location) -> str:
    """A place as the user writes it: optim.betas[1]."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step:.60}" for step in where)
    return text.removeprefix(".") or "config"
