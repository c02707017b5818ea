"""The reader of JSON and YAML: bounded in size and depth, plain data only, and fast on the files of long runs."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from tastemaker.core.errors import ConfigError
from tastemaker.core.output_paths import read_umask
from tastemaker.core.safe_files import (
    MAX_YAML_BYTES,
    check_text,
    parse_json,
    parse_yaml,
    read_json_object,
    read_json_rows,
    read_text,
    read_yaml_mapping,
)

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (LAUGHS, "TM064"),
        ("a: !!python/object/apply:os.system [id]", "TM064"),
        ("a: !!binary aGk=", "TM064"),
        ("a: {b: [1, 2", "TM064"),
        ("a: " + "[" * 300, "TM065"),
        ("a: " + "9" * 5000, "TM064"),
        ("a: 0x" + "f" * 5000, "TM064"),
        ("a: 2001-02-30", "TM066"),
        ('a: "\\ud800"', "TM1159"),
        ("a: " + "b" * MAX_YAML_BYTES, "TM1158"),
        ("[1, 2]", "TM043"),
    ],
)
def test_hostile_yaml_is_one_message(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml.*({code}|TM1151)"):
        read_yaml_mapping(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"a": 1', "TM1155"),
        ("[" * 200 + "]" * 200, "TM1153"),
        ("[" * 100_000, "TM1153"),
        ('{"a": "\\ud800"}', "TM1154"),
        ('{"a": ' + "9" * 5000 + "}", "TM1155"),
        ("[1]", "TM1156"),
    ],
)
def test_hostile_json_is_one_message(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"a\.json.*{code}"):
        read_json_object(tmp_path / "a.json")


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"a" * 101)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, code in (("pipe", "TM1150"), (".", "TM1150"), ("large", "TM1151"), ("latin", "TM041"), ("none", "TM042")):
        with pytest.raises(ConfigError, match=code):
            read_text(tmp_path / name, 100)
    with pytest.raises(ConfigError, match="TM042"):
        read_text(Path("a\0b"))
    with pytest.raises(ConfigError, match="TM1162"):
        check_text("caf\udce9", "--prompt")


def test_reading_allocates_what_the_file_holds_not_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("text")
    tracemalloc.start()
    try:
        assert read_text(tmp_path / "small", 50_000_000) == "text"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_numbers_and_text_of_valid_files_are_kept() -> None:
    assert parse_yaml("{a: 3e-4, b: 9:16, c: [1, null], d: 1_000}", "x") == {
        "a": 3e-4,
        "b": "9:16",
        "c": [1, None],
        "d": 1000,
    }
    assert parse_json('{"a": NaN, "b": "\\ud83d\\ude00", "c": -12}', "x")["b"] == "\U0001f600"


@pytest.mark.slow
def test_long_metrics_are_read_fast_and_torn_lines_skipped(tmp_path: Path) -> None:
    """100,000 rows take no more than three times what json.loads takes for them."""
    row = json.dumps({"step": 1, **{f"metric/{i}": i * 0.123456789 for i in range(12)}})
    lines = [row] * 100_000
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:-1], "[1]", '{"step": 7}', row[: len(row) // 2]]))
    start = time.process_time()
    for line in lines:
        json.loads(line)
    plain, start = time.process_time() - start, time.process_time()
    assert sum(1 for _ in read_json_rows(tmp_path / "metrics.jsonl")) == 100_000
    assert time.process_time() - start < 3 * plain + 1.0


def test_umask_is_read_as_it_is() -> None:
    before = os.umask(0o027)
    try:
        assert read_umask() == 0o027 == read_umask()
    finally:
        assert os.umask(before) == 0o027
