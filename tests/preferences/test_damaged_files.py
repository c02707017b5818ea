"""Damaged files of votes, sessions and alignments are one message, also nested ones that no parser follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tastemaker.core.errors import ConfigError
from tastemaker.preferences.alignment import STATE_FILE, AlignmentOptions, claim_directory
from tastemaker.preferences.interchange import read_rows
from tastemaker.preferences.session_results import SCORES_FILE, read_scores
from tastemaker.preferences.session_taste import MODELS_FILE, REPORT_FILE, list_preference_models, read_report
from tastemaker.preferences.sessions import (
    ORDER_FILE,
    SAMPLES_FILE,
    SESSION_FILE,
    SessionSource,
    declare_session,
    load_session,
    order_actively,
)
from tastemaker.preferences.votes import VoteLog, read_votes

SOURCES = [SessionSource("a", "grpo-toy-flow"), SessionSource("b", "grpo-toy-flow")]
DAMAGE = {
    "nested": "[" * 100_000 + "]" * 100_000,
    "nested objects": '{"a": ' * 100_000,
    "number": "3",
    "list of numbers": "[1, 2]",
    "list of lists": '[[{}, []], ["a", 1]]',
    "object of lists": json.dumps({key: [[]] for key in ("sources", "prompts", "seeds", "name", "kind", "samples")}),
    "not JSON": "{",
    "not UTF-8": "\udcff",
}


def align(folder: Path) -> None:
    (folder / "votes.jsonl").write_text("")
    claim_directory(AlignmentOptions(folder / "votes.jsonl", "grpo-toy-flow", folder, "dpo"))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "votes": ("votes.jsonl", read_votes),
    "vote log": ("votes.jsonl", lambda folder: VoteLog(folder / "votes.jsonl").read()),
    "session": (SESSION_FILE, load_session),
    "samples": (SAMPLES_FILE, load_session),
    "order": (ORDER_FILE, lambda folder: order_actively(load_session(folder))),
    "scores": (SCORES_FILE, lambda folder: read_scores(load_session(folder))),
    "models": (MODELS_FILE, lambda folder: list_preference_models(load_session(folder))),
    "report": (REPORT_FILE, read_report),
    "rows": ("rows.jsonl", lambda folder: list(read_rows(folder / "rows.jsonl", "train"))),
    "alignment": (STATE_FILE, align),
}


@pytest.mark.parametrize("reader", READERS)
def test_damaged_file_is_one_message(tmp_path: Path, reader: str) -> None:
    file, read = READERS[reader]
    messages, wrong = 0, []
    for number, (name, text) in enumerate(DAMAGE.items()):
        folder = tmp_path / str(number)
        declare_session(folder, SOURCES, ["a red"], [0, 1], "pair", blind=True, target=None)
        (folder / file).write_text(text + "\n", errors="surrogateescape")
        try:
            read(folder)
        except ConfigError as error:
            messages += "[TM" in str(error) and len(str(error)) < 2000
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error!s:.100}")
    assert not wrong, wrong
    assert messages or reader in ("models", "report", "samples")  # those count as missing
