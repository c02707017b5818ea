"""The red team's script: its quick set finds no broken promise, and a broken promise is counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from docs_pages import ROOT

SCRIPT = ROOT / "tools/redteam.py"


@pytest.mark.slow
def test_quick_attacks_break_no_promise(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(table)]
    process = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "| **all** |" in table.read_text() and "Lost:" not in table.read_text()


@pytest.mark.long
@pytest.mark.alone
def test_all_attacks_break_no_promise_within_15_minutes(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    command = [sys.executable, str(SCRIPT), "--out", str(table)]
    process = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    measured = re.search(r"(\d+) attacks in ([\d.]+) minutes", table.read_text())
    assert measured is not None and int(measured[1]) >= 36 and float(measured[2]) < 15, table.read_text()


def test_a_broken_promise_is_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from attacks.lab import Attack, Lab, expect
    from redteam import format_table, run_attack

    def function(lab: Lab) -> None:
        for message in ("", "broken"):
            with lab.attempt("a try"):
                expect(not message, message)
        with lab.attempt("an attack that cannot be carried out"):
            raise OSError("no such thing")
        with lab.attempt("a command that fails"):
            lab.start(launcher=["-c", "raise SystemExit(3)"]).wait().expect_success()
        with lab.attempt("a command that hangs"):
            lab.start(launcher=["-c", "import time; time.sleep(60)"]).wait(0.2)

    row = run_attack(Attack("sample", "nothing breaks", function, quick=True), tmp_path, quick=True, seed=0)
    assert row.tries == 5 and len(row.losses) == 4
    assert "| sample | nothing breaks | 5 | 1 | 4 |" in format_table([row])
    assert "exit code 3" in row.losses[2] and "did not end" in row.losses[3]


def test_an_attack_that_cannot_be_carried_out_says_so_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from attacks import runs
    from attacks.lab import ATTACKS, Lab
    from redteam import format_table, run_attack

    @contextmanager
    def mount_nothing(folder: Path, megabytes: float) -> Iterator[bool]:
        folder.mkdir()
        yield False

    monkeypatch.setattr(runs, "mount_small_disk", mount_nothing)
    monkeypatch.setattr(runs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(Lab, "copy_run", None)  # nothing else is tried
    for name in ("full-disk", "read-only-disk"):
        row = run_attack(ATTACKS[name], tmp_path, quick=True, seed=0)
        assert "skipped" in format_table([row]), name
