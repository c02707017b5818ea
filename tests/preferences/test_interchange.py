"""Import and export of votes in the column layouts of other tools, and liked pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from voting_pictures import PROMPTS, make_session, write_pictures

from tastemaker.core.errors import ConfigError
from tastemaker.data.pairs import PairFile
from tastemaker.preferences.interchange import Layout, export_votes, import_liked_pictures, import_votes
from tastemaker.preferences.sessions import next_ballots, record_vote
from tastemaker.preferences.votes import Vote, read_votes, to_pairs


def summarize(votes: list[Vote]) -> list[tuple[object, ...]]:
    return [
        (v.prompt, v.voter, tuple(s.sha256 for s in v.samples), tuple(s.source for s in v.samples), v.choice)
        for v in votes
    ]


@pytest.fixture(scope="module")
def voted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    session = make_session(tmp_path_factory.mktemp("voted"), per_prompt=1)
    for ballot, choice in zip(next_ballots(session, "anna", 4), (0, 1, 1, "tie"), strict=True):
        record_vote(session, "anna", ballot, choice)
    return session.directory


@pytest.mark.parametrize("name", ["votes.jsonl", "votes.parquet", "saved"])
def test_pickapic_columns_make_a_round_trip(voted: Path, tmp_path: Path, name: str) -> None:
    assert export_votes(voted, tmp_path / name) == 4
    report = import_votes(tmp_path / name, tmp_path / "imported")
    assert (report.added, report.known, report.skipped) == (4, 0, 0)
    assert summarize(read_votes(tmp_path / "imported")) == summarize(read_votes(voted))
    assert all((tmp_path / "imported" / s.file).is_file() for v in read_votes(tmp_path / "imported") for s in v.samples)
    assert import_votes(tmp_path / name, tmp_path / "imported").added == 0  # a second import adds nothing


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_chosen_and_rejected_make_a_round_trip(voted: Path, tmp_path: Path, name: str) -> None:
    layout: Layout = "pairs"
    assert export_votes(voted, tmp_path / name, layout=layout) == 3  # without the tie
    import_votes(tmp_path / name, tmp_path / "imported", voter="ben")
    votes = read_votes(tmp_path / "imported")
    expected = to_pairs(read_votes(voted), voted)
    assert [pair.chosen.read_bytes() for pair in to_pairs(votes, tmp_path / "imported")] == [
        pair.chosen.read_bytes() for pair in expected
    ]
    assert {vote.voter for vote in votes} == {"ben"}
    if name.endswith("jsonl"):  # DPO reads it as it is
        assert len(PairFile(tmp_path / name).load(0)) == 3


def test_rows_of_pickapic_without_preference_are_skipped(voted: Path, tmp_path: Path) -> None:
    export_votes(voted, tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    rows[0]["has_label"] = False
    rows[1]["are_different"] = False
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = import_votes(tmp_path / "all.jsonl", tmp_path / "out")
    assert (report.added, report.skipped) == (2, 2)


def test_rows_that_cannot_be_imported_are_named(voted: Path, tmp_path: Path) -> None:
    export_votes(voted, tmp_path / "all.jsonl")
    row = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[0])
    (tmp_path / "secret.txt").write_text("not an image")
    cases = {
        "TM1416": {"has_label": False},
        "TM1420": {"caption": 3},
        "TM1421": {"label_0": "high"},
        "TM1422": {"jpg_0": "missing.png"},
        "TM1424": {"jpg_0": str(tmp_path / "secret.txt")},
    }
    for code, change in cases.items():
        (tmp_path / "bad.jsonl").write_text(json.dumps({**row, **change}))
        with pytest.raises(ConfigError, match=code):
            import_votes(tmp_path / "bad.jsonl", tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text(json.dumps({**row, "jpg_0": None}))
    with pytest.raises(ConfigError, match="TM1422"):
        import_votes(tmp_path / "bad.jsonl", tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"line 1.*TM1418"):
        import_votes(tmp_path / "bad.jsonl", tmp_path / "out")
    with pytest.raises(ConfigError, match="TM1417"):
        import_votes(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / "votes.jsonl").exists()


def test_liked_pictures_win_against_samples_of_their_captions(tmp_path: Path) -> None:
    liked = write_pictures(tmp_path / "liked", 200, prompts=PROMPTS[:2])
    samples = write_pictures(tmp_path / "samples", 20, per_prompt=2)
    for _ in range(2):  # the second call adds nothing
        session = import_liked_pictures(liked, str(samples), tmp_path / "out", seeds=(0, 1), voter="anna")
    pairs = to_pairs(read_votes(session.directory), session.directory)
    assert len(pairs) == 4 and {pair.prompt for pair in pairs} == {*PROMPTS[:2]}
    pictures = {file.read_bytes() for file in liked.glob("*.png")}
    assert all(pair.chosen.read_bytes() in pictures for pair in pairs)
    assert not any(pair.rejected.read_bytes() in pictures for pair in pairs)
