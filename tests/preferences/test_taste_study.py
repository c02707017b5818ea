"""The study of three simulated people: models aligned to their votes please them, and not only the content reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tastemaker.preferences.statistics import wilson_interval

ROOT = Path(__file__).resolve().parents[2]
PEOPLE = ("large", "warm", "high")


def check_study(rows: list[dict[str, Any]]) -> None:
    """Every person prefers the own model on unseen prompts, its content is kept, and tastes stay apart."""
    for name in PEOPLE:
        own = [row for row in rows if row["person"] == name]
        assert len(own) == 3
        for base in ("after_before", "after_control"):
            wins = [win for row in own for win in row[base][name]]
            assert wilson_interval(sum(wins), len(wins))[0] > 0.6, (name, base)
        before, after = ([score for row in own for score in row[key]] for key in ("strict_before", "strict_after"))
        assert sum(after) / len(after) > sum(before) / len(before) - 0.05, name
        by_rule = {rule: sum(sum(row["after_control"][rule]) for row in own) for rule in PEOPLE}
        assert max(by_rule, key=by_rule.__getitem__) == name, by_rule


@pytest.mark.long
def test_three_people_prefer_the_models_that_were_aligned_to_their_votes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "taste_study.py"), "--out", str(tmp_path), "--seeds", "0", "1", "2"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    check_study(json.loads((tmp_path / "study.json").read_text(encoding="utf-8")))
