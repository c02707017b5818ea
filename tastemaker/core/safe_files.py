"""Read text, JSON and YAML from files that nobody vouches for: bounded in size and depth, and data only.

Every other file may have been cut off, edited or replaced: recipes, the files of a run, the configurations in model
folders. A file that breaks a bound is a ConfigError that names it; nothing is executed, and nothing expands.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

MAX_YAML_BYTES = 1_000_000  # PyYAML reads about 100 KB per second
MAX_JSON_BYTES = 256_000_000  # of one document, such as the index of a checkpoint
MAX_ROWS_BYTES = 4_000_000_000  # of a file with a sample or a step per row
MAX_LINE_BYTES = 64_000_000
# What parsed JSON occupies, about: a list, an object, and a value with its place in them. "[]" is a list.
BYTES_PER_LIST, BYTES_PER_OBJECT, BYTES_PER_VALUE = 64, 184, 50
MAX_PARSED_BYTES = 1_500_000_000
MAX_DEPTH = 100  # of nested lists and mappings
MAX_DIGITS = 300  # of an integer; a longer one is no float
FLOAT = "tag:yaml.org,2002:float"
TEXT = "tag:yaml.org,2002:str"
EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")  # text in YAML 1.1: 3e-4 and 1.5e3
CLOCK = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?$")  # 556 seconds in YAML 1.1: the aspect ratio 9:16


def read_text(path: Path, limit: int = MAX_JSON_BYTES, errors: str = "strict") -> str:
    """The text of a regular file with at most `limit` bytes in UTF-8; `errors` as in `bytes.decode`."""
    data = read_bytes(path, limit)
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text [TM041]") from error


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file with at most `limit` bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe may never end
            raise ConfigError(f"{path}: expected a file, got a directory or device; give another path [TM1150]")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # `read` allocates all that it may read
            data = file.read(min(limit, size) + 1)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # a path may hold characters that the file system refuses
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}: the file cannot be read ({reason}); check the path and its permissions [TM042]"
        ) from error
    if len(data) > limit:
        raise ConfigError(
            f"{path}: the file has more than {limit} bytes, so it is not what is expected here; replace it [TM1151]"
        )
    return data


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits [TM1152]")
    return int(digits)


DECODER = json.JSONDecoder(parse_int=_parse_integer)


def parse_json(text: str, where: str | Path) -> Any:
    """Parse JSON; `where` names the source in error messages. NaN and Infinity are numbers, as Python writes them."""
    check_json_memory(text, where)
    try:
        value = DECODER.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and _measure_depth(value) > MAX_DEPTH:
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:
            _check_unicode(value)
    except RecursionError:
        raise ConfigError(
            f"{where}: the JSON is nested more than {MAX_DEPTH} levels deep; replace the file [TM1153]"
        ) from None
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: the JSON holds half of a surrogate pair, {error.object[error.start]!a}, which is no character; "
            "remove it [TM1154]"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); correct or replace the file [TM1155]") from error
    return value


def check_json_memory(text: str, where: str | Path) -> None:
    """Refuse JSON of so many small parts that it would take far more memory than its text."""
    lists, objects, others = text.count("["), text.count("{"), text.count(",") + text.count(":")
    needed = BYTES_PER_LIST * lists + BYTES_PER_OBJECT * objects + BYTES_PER_VALUE * others
    if needed > MAX_PARSED_BYTES:
        raise ConfigError(
            f"{where}: the JSON has up to {lists + objects} lists and objects and {others} values, which take about "
            f"{needed / 1e9:.1f} GB, more than the limit of {MAX_PARSED_BYTES / 1e9:g}; split the file [TM1180]"
        )


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """The JSON document in a file."""
    return parse_json(read_text(path, limit), path)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: expected a JSON object, got a {type(value).__name__}; correct or replace the file [TM1156]"
        )
    return value


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line, which a run or command appended to; none if there is no such file.

    A kill leaves half a line, so lines that are no JSON objects are skipped.
    """
    if not path.is_file():
        return
    if path.stat().st_size > MAX_ROWS_BYTES:
        raise ConfigError(
            f"{path}: the file has more than {MAX_ROWS_BYTES} bytes; shorten it, or move it away [TM1157]"
        )
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                row = parse_json(line.decode("utf-8", "replace"), path)
            except ConfigError:
                continue
            if isinstance(row, dict):
                yield row


def check_text(text: str, where: str) -> str:
    """Return a text that can be encoded; refuse one with half of a surrogate pair, such as bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {text[max(0, error.start - 20) : error.end + 20]!a} holds bytes that are no UTF-8; write "
            "or rename it as text in UTF-8 [TM1162]"
        ) from error
    return text


def _measure_depth(value: Any) -> int:
    """How many lists and mappings are nested, counted to one more than is allowed."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH and (level := [x for x in level if isinstance(x, dict | list)]):
        level = [inner for x in level for inner in (x.values() if isinstance(x, dict) else x)]
        depth += 1
    return depth


def _check_unicode(value: Any) -> None:
    """Raise UnicodeEncodeError if a text holds a lone surrogate, which no file and no terminal can be given."""
    json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()


class Loader(yaml.SafeLoader):
    """Loads plain data: no tags, no aliases, no duplicate keys, and a bounded depth."""

    yaml_implicit_resolvers = {
        first: [(TEXT, CLOCK), *known] if first in "-+0123456789" else list(known)
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "found an alias (*name); write its value out, or use 'extends'"
        elif event.tag is not None:
            problem = f"found the tag {event.tag:.60}; write plain values"
        elif self.depth > MAX_DEPTH:
            raise RecursionError
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"duplicate key '{key.value}'", problem_mark=key.start_mark)
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > MAX_DIGITS:
            problem = f"an integer has {len(node.value)} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_yaml_int(node)


Loader.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def parse_yaml(text: str, where: str | Path) -> Any:
    """Parse YAML; `where` names the source in error messages."""
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(
            f"{where}: the YAML has more than {MAX_YAML_BYTES} characters; move long lists to a file of their own "
            "[TM1158]"
        )
    try:
        value = yaml.load(text, Loader)  # a SafeLoader
        if "\\" in text:
            _check_unicode(value)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{where}{line}: invalid YAML: {error.problem or error.context}; correct this line [TM064]"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{where}: the YAML is nested too deeply; write sections with settings, such as optim: {{lr: 1e-4}} [TM065]"
        ) from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: the YAML holds half of a surrogate pair, {error.object[error.start]!a}, which is no character; "
            "remove it [TM1159]"
        ) from error
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # invalid dates and numbers raise ValueError
        raise ConfigError(f"{where}: invalid YAML: {str(error).splitlines()[0]}; correct the file [TM066]") from error
    return value


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    return parse_yaml_mapping(read_text(path, MAX_YAML_BYTES), path)


def parse_yaml_mapping(text: str, where: str | Path) -> dict[str, Any]:
    """Parse a YAML mapping; an empty text is an empty one."""
    data = parse_yaml(text, where)
    if data is not None and not isinstance(data, dict):
        raise ConfigError(
            f"{where}: expected a mapping of sections, got a {type(data).__name__}; write sections such as optim: "
            "{lr: 1e-4} [TM043]"
        )
    return data or {}
