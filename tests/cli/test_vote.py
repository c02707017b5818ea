"""The command vote: create, stats, export, import, learn and order."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import run_cli
from painted_votes import paint_pictures
from voting_pictures import write_pictures

from tastemaker.preferences.sessions import choose_strategy, load_session, next_ballots, next_pair, record_vote
from tastemaker.preferences.votes import read_votes


def test_session_is_created_voted_on_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [f"--source={write_pictures(tmp_path / name, level)}" for name, level in (("old", 20), ("new", 200))]
    assert run_cli("vote", "create", "taste", *sources, "--seeds", "0", "--target", "2") == 0
    session = load_session(Path("runs/.studio/votes/taste"))
    while ballot := next_pair(session, "anna"):
        record_vote(session, "anna", ballot, "tie")
    assert run_cli("vote", "stats", "taste", "--reward", "jpeg", "--device", "cpu") == 0
    output = capsys.readouterr().out
    assert "anna: 2 votes" in output and "50 % of 2 pairs" in output and "not decided yet" in output
    assert run_cli("vote", "export", str(session.directory), "--out", "votes.jsonl") == 0
    assert run_cli("vote", "import", "votes.jsonl", "--out", "imported", "--voter", "ben") == 0
    assert [vote.voter for vote in read_votes(Path("imported"))] == ["ben", "ben"]
    assert run_cli("vote", "import", "old", "--liked", "--against", "new", "--out", "liked") == 0
    assert len(read_votes(Path("liked"))) == 4


def test_taste_is_learned_and_the_next_pairs_are_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures = paint_pictures(tmp_path / "pictures", prompts=8, samples=3)
    assert run_cli("vote", "create", "taste", "--source", str(pictures), "--seeds", "0-2") == 0
    session = load_session(Path("runs/.studio/votes/taste"))
    for number, ballot in enumerate(next_ballots(session, "anna", 14)):
        record_vote(session, "anna", ballot, number % 2)
    assert run_cli("vote", "order", "taste") == 2
    assert "TM1502" in capsys.readouterr().err
    learn = ("vote", "learn", "taste", "--recipe", "preference-playground", "--active", "--device", "cpu")
    assert run_cli(*learn) == 0
    output = capsys.readouterr().out
    assert "it predicts" in output and "10 pairs ordered by expected information" in output
    assert Path("runs/preference-taste/preference.safetensors").is_file() and choose_strategy(session) == "active"
    assert run_cli("vote", "order", "taste", "--balanced") == 0
    assert choose_strategy(session) == "balanced"
    assert run_cli("vote", "order", "taste", "--device", "cpu") == 0
    assert choose_strategy(session) == "active"


def test_mistakes_are_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("vote", "create", str(tmp_path / "x"), "--source", "a", "--source", "b", "--seeds", "x") == 2
    assert "TM1428" in capsys.readouterr().err
    assert run_cli("vote", "import", str(tmp_path), "--liked") == 2
    assert "TM1429" in capsys.readouterr().err
    assert run_cli("vote", "stats", str(tmp_path)) == 2
    assert "TM1406" in capsys.readouterr().err
