"""The vote log: durable, shared by processes, with undo; and the pairs of its votes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tastemaker.core.errors import ConfigError
from tastemaker.preferences.votes import (
    Choice,
    Kind,
    Vote,
    VotedSample,
    VoteLog,
    likes,
    new_vote_id,
    now,
    parse_vote,
    read_votes,
    to_pairs,
)

WRITER = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, now
log, voter, count = VoteLog(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
for k in range(count):
    samples = (VotedSample("a.png"), VotedSample("b.png"))
    log.append(Vote(f"{voter}-{k:05d}", now(), voter, "pair", "x" * 3000, samples, k % 2))
    print(k, flush=True)
"""


def make_vote(
    choice: Choice, kind: Kind = "pair", voter: str = "anna", prompt: str = "a cat", files: str = "ab"
) -> Vote:
    samples = tuple(VotedSample(f"{name}.png", source=name, seed=3) for name in files)
    return Vote(new_vote_id(), now(), voter, kind, prompt, samples, choice)


def start_writer(log: Path, voter: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(log), voter, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_votes_are_read_as_they_were_written(tmp_path: Path) -> None:
    log = VoteLog(tmp_path / "new" / "votes.jsonl")
    pair = Vote(
        new_vote_id(), now(), "anna", "pair", "ein Kätzchen\n<b>", make_vote(0).samples, 0, (1, 0), 2.4, "session"
    )
    written = [pair, make_vote("tie"), make_vote(3, "best_of", files="abcd"), make_vote(False, "like", files="a")]
    for vote in written:
        assert log.append(vote)
    assert not log.append(pair)  # sent again after a lost answer
    assert read_votes(log.path) == written == log.read() == VoteLog(log.path).read()
    time.sleep(0.002)  # ids of the same millisecond have no order
    assert [len(vote.id) for vote in written] == [26] * 4 and written[1].id < new_vote_id()
    assert json.loads(log.path.read_text().splitlines()[0])["shown"] == [1, 0]
    assert pair.pairs() == ((0, 1),) and written[1].pairs() == ()
    assert written[2].pairs() == ((3, 0), (3, 1), (3, 2))


def test_undo_is_an_appended_record(tmp_path: Path) -> None:
    log = VoteLog(tmp_path / "votes.jsonl")
    first, second = make_vote(0), make_vote(1)
    log.append(first)
    log.append(second)
    before = log.path.read_bytes()
    assert VoteLog(log.path).undo(second.id, "anna") and not log.undo(second.id)
    assert log.path.read_bytes().startswith(before) and len(log.path.read_text().splitlines()) == 3
    assert read_votes(log.path) == [first] == log.read()
    with pytest.raises(ConfigError, match="TM1390"):
        log.undo(first.id, "ben")


def test_line_that_was_cut_off_is_ignored_and_does_not_damage_the_next_vote(tmp_path: Path) -> None:
    log = VoteLog(tmp_path / "votes.jsonl")
    first, second = make_vote(0), make_vote(1)
    log.append(first)
    with log.path.open("ab") as file:
        file.write(b'{"id": "cut off \xc3')
    assert read_votes(log.path) == [first]
    log.append(second)
    assert read_votes(log.path) == [first, second]
    log.path.write_bytes(log.path.read_bytes()[:-1])  # only the newline is missing
    assert read_votes(log.path) == [first, second]
    log.append(third := make_vote("both_bad"))
    assert read_votes(log.path) == [first, second, third]


def test_damaged_line_is_named(tmp_path: Path) -> None:
    log = VoteLog(tmp_path / "votes.jsonl")
    log.append(make_vote(0))
    with log.path.open("a") as file:
        file.write("oops\n")
    with pytest.raises(ConfigError, match=r"line 2.*TM1393"):
        read_votes(log.path)
    with pytest.raises(ConfigError, match="TM1392"):
        read_votes(tmp_path / "missing.jsonl")


def test_votes_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    good = json.loads(
        '{"id": "1", "voter": "a", "kind": "pair", "samples": [{"file": "a"}, {"file": "b"}], "choice": 1}'
    )
    assert parse_vote(good).choice == 1
    cases = {
        "TM1395": {"kind": "guess"},
        "TM1396": {"voter": "a\nb"},
        "TM1397": {"choice": 2},
        "TM1398": {"shown": [0, 0]},
    }
    for code, change in cases.items():
        with pytest.raises(ConfigError, match=code):
            parse_vote({**good, **change})
    for change in ({"choice": True}, {"kind": "like"}, {"choice": "left"}, {"kind": "undo"}):
        with pytest.raises(ConfigError, match="TM1397"):
            parse_vote({**good, **change})


def test_likes_become_pairs_within_prompt_and_voter(tmp_path: Path) -> None:
    votes = [
        make_vote(True, "like", files="a"),
        make_vote(False, "like", files="b"),
        make_vote(False, "like", files="c"),
        make_vote(False, "like", files="d", prompt="a dog"),
        make_vote(True, "like", files="e", voter="ben"),
    ]
    assert [sample.file for sample, _ in likes(votes)["a cat"].disliked] == ["b.png", "c.png"]
    pairs = to_pairs(votes, tmp_path)
    assert {(pair.chosen.name, pair.rejected.name) for pair in pairs} == {("a.png", "b.png"), ("a.png", "c.png")}
    changed = [*votes, make_vote(False, "like", files="a")]  # anna changes her mind
    assert to_pairs(changed, tmp_path) == []
    tied = to_pairs([make_vote("tie"), make_vote(1)], tmp_path, ties=True)
    assert [pair.tie for pair in tied] == [True, False] and tied[1].chosen == tmp_path / "b.png"


@pytest.mark.slow
def test_processes_append_at_once_and_kill_9_loses_no_acknowledged_vote(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    killed = start_writer(path, "killed", 100_000)
    others = [start_writer(path, f"writer{k}", 60) for k in range(2)]
    assert killed.stdout is not None
    while int(killed.stdout.readline()) < 40:
        pass
    killed.send_signal(signal.SIGKILL)
    rest = killed.communicate()[0].split()
    last = int(rest[-1]) if rest else 40
    for process in others:
        process.communicate()
        assert process.returncode == 0
    VoteLog(path).append(make_vote(1, voter="after"))
    votes = read_votes(path)
    by_voter = {voter: [vote.id for vote in votes if vote.voter == voter] for voter in {vote.voter for vote in votes}}
    for k in range(2):
        assert by_voter[f"writer{k}"] == [f"writer{k}-{n:05d}" for n in range(60)]
    assert by_voter["killed"][: last + 1] == [f"killed-{n:05d}" for n in range(last + 1)]
    assert len(by_voter["killed"]) <= last + 2 and len(by_voter["after"]) == 1


def test_threads_append_to_one_log(tmp_path: Path) -> None:
    log = VoteLog(tmp_path / "votes.jsonl")
    votes = [make_vote(k % 2, voter=f"voter {k % 3}") for k in range(30)]
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(log.append, votes))
    assert {vote.id for vote in read_votes(log.path)} == {vote.id for vote in votes}
