"""The reader of JSON and YAML: bounded in size and depth, plain data only, and fast on the files of long runs."""

from __future__ import annotations

import ast
import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

import tastemaker
from tastemaker.core import safe_files
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


@pytest.mark.parametrize("part", ["[]", "{}", "0", '"":0'])
def test_json_that_would_take_much_more_memory_than_its_text_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_files, "MAX_PARSED_BYTES", 1_000_000)
    start, end = "{}" if ":" in part else "[]"
    text = start + ",".join([part] * 20_000) + end
    tracemalloc.start()
    with pytest.raises(ConfigError, match="TM1180"):
        parse_json(text, "bomb")
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert parse_json('["[[[,,,{{{"]', "text") == ["[[[,,,{{{"]


# json.loads here reads what this package wrote itself or a bounded text, with RecursionError handled.
OWN_PARSERS = {
    "core/checkpoint_files.py": 1,  # a bounded, sealed file
    "evaluation/geneval.py": 1,  # a text whose checksum is known
    "evaluation/scoreboard/runner.py": 1,  # the answers of a process of ours
    "export/diffusers_pipeline.py": 1,  # what a network of ours returned
    "preferences/training.py": 1,  # json.loads(json.dumps(...))
    "rewards/remote.py": 1,  # settings that this package wrote
    "serving/chat_client.py": 2,  # a bounded answer, in which a judge may write half of a surrogate pair, and it masked
    "serving/protocol.py": 1,  # bounds of its own
    "studio/config_forms.py": 1,  # a file of the package
    "studio/config_worker.py": 2,  # messages between two processes of ours
    "studio/metric_history.py": 1,  # a bounded line, of which there are many
    "studio/recipe_settings.py": 2,  # the output of a process of ours
    "training/checkpoint.py": 1,  # json.loads(json.dumps(...))
}


def test_files_of_others_are_parsed_by_the_bounded_reader_alone() -> None:
    found: dict[str, int] = {}
    package = Path(tastemaker.__file__).parent
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "json.load" in text or "import load" in text else ():
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load")
            is_import = isinstance(node, ast.ImportFrom) and node.module == "json"
            if is_call or is_import:
                name = path.relative_to(package).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found == OWN_PARSERS
