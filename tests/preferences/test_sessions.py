"""Voting sessions: what is shown next, to whom, in which order, and the result."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from voting_pictures import PROMPTS, make_session, write_pictures

import tastemaker
from tastemaker.core.errors import ConfigError
from tastemaker.core.types import Placement
from tastemaker.preferences.session_results import describe_progress, summarize_session
from tastemaker.preferences.session_samples import score_session
from tastemaker.preferences.sessions import (
    Ballot,
    Session,
    choose_strategy,
    count_wins,
    create_session,
    describe_result,
    load_session,
    next_ballots,
    next_pair,
    parse_source,
    record_vote,
    write_active_order,
)
from tastemaker.preferences.votes import Choice, hash_file, read_votes


def prefer_bright(session: Session, ballot: Ballot) -> int:
    """Return the position of the sample with the most red, as a person who looks at the screen."""
    reds = [Image.open(session.sample_path(n)).convert("RGB").getpixel((0, 0)) for n in ballot.samples]
    return max(range(len(reds)), key=lambda k: reds[k])


def vote_all(session: Session, voter: str, choice: Choice = None) -> int:
    count = 0
    while ballot := next_pair(session, voter):
        record_vote(session, voter, ballot, prefer_bright(session, ballot) if choice is None else choice, 1.5)
        count += 1
    return count


def test_session_of_pictures_is_voted_on_and_resumed(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    assert session.is_ready and len(session.samples) == 24 and set(session.prompts) == set(PROMPTS)
    assert all(hash_file(session.sample_path(k)) == sample.sha256 for k, sample in enumerate(session.samples))
    # 3 pairs of equal seeds and 6 of unequal ones for each of 4 prompts
    assert len(session.schedule) == 36 == session.voter_target
    for ballot in next_ballots(session, "anna", 5):
        record_vote(session, "anna", ballot, prefer_bright(session, ballot))
    again = load_session(session.directory)
    assert describe_progress(again, "anna") == {"votes": 5, "target": 36, "decided": False}
    assert vote_all(again, "anna") == 31 and next_pair(again, "anna") is None
    words = describe_result(again)
    assert words.startswith(
        "you preferred the new model in 100 % of 36 pairs; 95 % interval 90 to 100 %; decided: the new"
    )
    assert count_wins(again) == (36, 36) and "no votes yet" not in words
    (comparison,) = summarize_session(again).comparisons
    assert (comparison.source, comparison.wins, comparison.pairs) == ("secretafter", 36, 36)
    assert "you preferred secretafter in 100 % of 36 pairs" in summarize_session(again).sentences()[0]
    assert describe_progress(session, "anna")["decided"]  # the same log, seen by another process


def test_votes_name_samples_as_they_were_shown(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    ballot = next_pair(session, "anna")
    assert ballot is not None
    vote = record_vote(session, "anna", ballot, 1, 2.0)
    assert vote == read_votes(session.directory)[0]
    assert isinstance(vote.choice, int)
    assert vote.samples[vote.choice].file == session.samples[ballot.samples[1]].file
    assert [vote.samples[k].file for k in vote.shown] == [session.samples[n].file for n in ballot.samples]
    assert [sample.source for sample in vote.samples] == ["secretbefore", "secretafter"]
    assert vote.session == "taste" and vote.prompt == ballot.prompt and vote.seconds == 2.0
    record_vote(session, "anna", ballot, 1, 2.0)  # sent twice
    assert len(session.votes()) == 1
    session.vote_log.undo(vote.id, "anna")
    repeated = next_pair(session, "anna")
    assert repeated is not None and repeated.samples == ballot.samples and repeated.id != ballot.id


def test_every_prefix_is_balanced_and_the_order_on_the_screen_random(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    samples = session.samples
    for prefix in range(4, 37, 4):
        counts = Counter(samples[a].prompt for a, _ in session.schedule[:prefix])
        assert set(counts.values()) == {prefix // 4}
    assert all(samples[a].seed == samples[b].seed for a, b in session.schedule[:12])
    ballots = next_ballots(session, "anna", 36)
    left = Counter(samples[ballot.samples[0]].source for ballot in ballots)
    assert min(left.values()) > 8
    assert [b.key for b in ballots] == [b.key for b in next_ballots(session, "ben", 36)]
    assert [b.samples for b in ballots] != [b.samples for b in next_ballots(session, "ben", 36)]
    assert [b.key for b in ballots] != [b.key for b in next_ballots(session, "anna", 36, "random")]
    waiting = [ballot.key for ballot in ballots[:3]]
    assert [b.key for b in next_ballots(session, "anna", 2, exclude=waiting)] == [b.key for b in ballots[3:5]]


def test_active_order_is_that_of_the_preference_model(tmp_path: Path) -> None:
    session = make_session(tmp_path, per_prompt=1)
    assert choose_strategy(session) == "balanced"
    with pytest.raises(ConfigError, match="TM1405"):
        next_pair(session, "anna", "active")
    with pytest.raises(ConfigError, match="TM1400"):
        next_pair(session, "anna", "best")  # type: ignore[arg-type]
    last = session.schedule[-1]
    write_active_order(session, [(last[1], last[0])])
    ballots = next_ballots(session, "anna", 4, choose_strategy(session))
    assert ballots[0].key == tuple(sorted(last)) and len({ballot.key for ballot in ballots}) == 4


def test_target_limits_votes_unless_more_are_wanted(tmp_path: Path) -> None:
    session = replace(make_session(tmp_path), target=2)
    assert vote_all(session, "anna") == 2 and session.is_over
    assert len(next_ballots(session, "anna", 3, beyond_target=True)) == 3
    assert len(next_ballots(session, "ben", 5)) == 2
    session.end()
    assert next_pair(session, "ben") is None
    with pytest.raises(ConfigError, match="TM1401"):
        record_vote(session, "ben", Ballot("x", "pair", "", session.schedule[0]), 0)


def test_best_of_four_and_likes(tmp_path: Path) -> None:
    session = make_session(tmp_path / "best", "best_of", per_prompt=4)
    assert len(session.schedule) == 8 and all(len(group) == 4 for group in session.schedule)
    assert all(Counter(session.samples[n].source for n in group) == {0: 2, 1: 2} for group in session.schedule)
    vote_all(session, "anna")
    assert summarize_session(session).comparisons[0].share == 1
    liked = make_session(tmp_path / "like", "like", per_prompt=1)
    while ballot := next_pair(liked, "anna"):
        red = Image.open(liked.sample_path(ballot.samples[0])).convert("RGB").getpixel((0, 0))
        record_vote(liked, "anna", ballot, red[0] > 128)  # type: ignore[index]
    assert [(each.name, each.successes, each.count) for each in summarize_session(liked).likes] == [
        ("secretbefore", 0, 4),
        ("secretafter", 4, 4),
    ]


def test_agreement_with_rewards_and_between_voters(tmp_path: Path) -> None:
    session = make_session(tmp_path, per_prompt=1)
    vote_all(session, "anna")
    vote_all(session, "ben", 0)
    scores = score_session(session, ["jpeg"], Placement(torch.device("cpu"), torch.float32))
    assert len(scores["jpeg"]) == 8
    result = summarize_session(session)
    assert result.agreement.total.count == 4 and result.rewards[0].name == "jpeg" and result.rewards[0].count == 8
    assert any("ranks" in line for line in result.sentences()) and any("agree" in line for line in result.sentences())


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    a, b = write_pictures(tmp_path / "a", 0), write_pictures(tmp_path / "b", 9, prompts=("something else",))
    cases = {
        "TM1409": {"sources": [str(a), str(a)]},
        "TM1410": {"sources": [str(a), str(b)], "kind": "guess"},
        "TM1411": {"sources": [str(a)]},
        "TM1413": {"sources": [str(a), str(b)]},
    }
    for number, (code, settings) in enumerate(cases.items()):
        with pytest.raises(ConfigError, match=code):
            create_session(tmp_path / f"session{number}", **settings)  # type: ignore[arg-type]
    session = make_session(tmp_path / "good")
    with pytest.raises(ConfigError, match="TM1412"):
        create_session(session.directory, [str(a), str(b)])
    for samples in (
        (0, 0),
        (0, 99),
        (0, next(k for k, s in enumerate(session.samples) if s.prompt != session.samples[0].prompt)),
    ):
        with pytest.raises(ConfigError, match="TM1402"):
            record_vote(session, "anna", Ballot("x", "pair", "", samples), 0)
    for voter in ("", "a\nb", "x" * 200):
        with pytest.raises(ConfigError, match="TM1404"):
            next_pair(session, voter)
    with pytest.raises(ConfigError, match="TM1406"):
        load_session(tmp_path)


def test_sources_are_parsed() -> None:
    assert parse_source("runs/a@step-000100").checkpoint == "step-000100"
    assert parse_source("new=runs/a").name == "new" and parse_source("runs/x=1").model == "runs/x=1"
    with pytest.raises(ConfigError, match="TM1408"):
        parse_source("runs/a@")


@pytest.mark.slow
def test_models_are_sampled_as_generate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources, overrides = ["grpo-toy-flow", "other=grpo-toy-flow"], ["engine.device=cpu"]
    session = create_session(tmp_path / "s", sources, ["a", "b"], [0, 3], overrides=overrides, tiny=True)
    files = tastemaker.generate("grpo-toy-flow", ["a", "b"], overrides, seed=3, out=tmp_path / "g", tiny=True)
    assert len(session.samples) == 8 and len(session.schedule) == 8
    ours = {s.prompt: s.sha256 for s in session.samples if s.seed == 3 and s.source == 0}
    assert [ours[k] for k in range(2)] == [hash_file(file) for file in files]
