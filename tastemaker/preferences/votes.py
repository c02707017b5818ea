"""The vote log: one JSON object per line, appended durably by any number of processes, and never rewritten."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from ..core.errors import ConfigError
from ..core.safe_files import MAX_ROWS_BYTES, parse_json, read_text

try:
    import fcntl
except ImportError:  # Windows: one process at a time should append
    fcntl = None  # type: ignore[assignment]

Kind = Literal["pair", "best_of", "like", "undo"]
Choice = int | str | bool | None
KINDS: tuple[str, ...] = get_args(Kind)
UNDECIDED = ("tie", "both_bad")  # choices of a pair that prefer neither sample
ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32, which sorts as numbers do
ID_LENGTH = 26
MAX_LIKED_PAIRS = 32  # pairs of a liked and a disliked sample of one prompt
MAX_NAME_LENGTH, MAX_LINE_BYTES = 100, 2**20


@dataclass(frozen=True)
class VotedSample:
    """A sample that was shown."""

    file: str  # relative to the folder of the vote log, else absolute
    sha256: str = ""
    source: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Vote:
    """One decision of a voter."""

    id: str
    time: str
    voter: str
    kind: Kind
    prompt: str = ""
    samples: tuple[VotedSample, ...] = ()
    choice: Choice = None  # index of the preferred sample, "tie", "both_bad"; like: True or False
    shown: tuple[int, ...] = ()  # indices of the samples in the order on the screen
    seconds: float | None = None
    session: str = ""
    undoes: str = ""  # of kind undo: id of the vote that no longer counts

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Indices of winner and loser of every comparison that the vote decides; none for ties and likes."""
        if self.kind not in ("pair", "best_of") or isinstance(self.choice, bool) or not isinstance(self.choice, int):
            return ()
        return tuple((self.choice, other) for other in range(len(self.samples)) if other != self.choice)


@dataclass(frozen=True)
class PreferencePair:
    """A preferred and a rejected sample of a prompt."""

    prompt: str
    chosen: Path
    rejected: Path
    voter: str = ""
    tie: bool = False  # neither is preferred


@dataclass(frozen=True)
class LikedSamples:
    """Samples of a prompt that voters liked and disliked, with the voter of each."""

    liked: tuple[tuple[VotedSample, str], ...] = ()
    disliked: tuple[tuple[VotedSample, str], ...] = ()


def new_vote_id() -> str:
    """Return a new id of 26 characters; ids sort by time."""
    number = (time.time_ns() // 1_000_000 << 80) | secrets.randbits(80)
    return "".join(ALPHABET[number >> 5 * k & 31] for k in reversed(range(ID_LENGTH)))


def now() -> str:
    """Return the time as it is written to the log: UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class VoteLog:
    """Appends votes to a file. What `append` returned from is on the disk, whatever happens to the process.

    Any number of processes and threads may append to one file. A vote whose id is in the log already is not written
    again, so that a sender who saw no answer may send it once more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._position = 0  # bytes of the file whose ids are known
        self._votes: dict[str, Vote] = {}
        self._undone: set[str] = set()

    def append(self, vote: Vote) -> bool:
        """Append a vote and wait until it is on the disk; False if its id is in the log already."""
        check_vote(vote)
        with self._lock() as file:
            if vote.id in self._votes:
                return False
            self._write(file, vote)
        return True

    def append_all(self, votes: Iterable[Vote]) -> int:
        """Append many votes at once, such as imported ones; returns how many were not in the log already."""
        new: dict[str, Vote] = {}
        for vote in votes:
            check_vote(vote)
            new.setdefault(vote.id, vote)
        with self._lock() as file:
            missing = [vote for vote in new.values() if vote.id not in self._votes]
            self._write(file, *missing)
        return len(missing)

    def undo(self, vote_id: str, voter: str = "") -> bool:
        """Append a record by which a vote no longer counts; False if it did not count before.

        With `voter`, only a vote of this voter is undone.
        """
        with self._lock() as file:
            vote = self._votes.get(vote_id)
            if vote is None or vote.kind == "undo" or (voter and vote.voter != voter):
                raise ConfigError(
                    f"{self.path}: there is no vote {vote_id!r:.40}{f' of {voter!r:.60}' if voter else ''} to undo; "
                    "give the id of a vote in this log [TM1390]"
                )
            if vote_id in self._undone:
                return False
            self._write(file, Vote(new_vote_id(), now(), vote.voter, "undo", session=vote.session, undoes=vote_id))
        return True

    def read(self) -> list[Vote]:
        """Return the votes that count, in the order of the file. Reads only what was appended since the last call."""
        if not self.path.exists():
            return []
        if not os.access(self.path, os.W_OK):  # such as a copy from another machine
            return read_votes(self.path)
        with self._lock():
            return [vote for vote in self._votes.values() if vote.kind != "undo" and vote.id not in self._undone]

    @contextmanager
    def _lock(self) -> Iterator[int]:
        """Hold the lock of the file, which ends with a complete line and whose ids are known."""
        with self._mutex:
            file = self._open()
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX)
                self._repair(file)
                self._catch_up(file)
                yield file
            finally:
                os.close(file)  # releases the lock

    def _open(self) -> int:
        is_new = not self.path.exists()
        if is_new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: the vote log cannot be written ({error.strerror}); choose a folder that you may write "
                "to [TM1391]"
            ) from error
        if is_new:  # the name of the file has to be on the disk too
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        return file

    def _repair(self, file: int) -> None:
        """Complete or remove a last line without a newline, which a killed writer left: it was not acknowledged."""
        size = os.fstat(file).st_size
        if size == 0 or os.pread(file, 1, size - 1) == b"\n":
            return
        first = max(0, size - MAX_LINE_BYTES)
        tail = os.pread(file, size - first, first)
        start = first + tail.rfind(b"\n") + 1
        try:
            parse_vote(parse_json(tail[start - first :].decode(), self.path))
        except (ValueError, TypeError, KeyError, AttributeError):
            os.ftruncate(file, start)
        else:
            os.write(file, b"\n")

    def _catch_up(self, file: int) -> None:
        size = os.fstat(file).st_size
        if size < self._position:  # another file took its place
            self._position, self._votes, self._undone = 0, {}, set()
        content = bytearray()
        while self._position + len(content) < size:
            content += os.pread(file, min(size - self._position - len(content), 2**24), self._position + len(content))
        first = 0 if not self._position else len(self._votes)
        for vote in parse_lines(content.decode("utf-8", errors="replace").split("\n"), self.path, first):
            self._add(vote)
        self._position = size

    def _add(self, vote: Vote) -> None:
        self._votes.setdefault(vote.id, vote)
        if vote.kind == "undo":
            self._undone.add(vote.undoes)

    def _write(self, file: int, *votes: Vote) -> None:
        lines = b"".join(format_vote(vote).encode() + b"\n" for vote in votes)
        size, written = os.fstat(file).st_size, 0
        try:
            while written < len(lines):
                written += os.write(file, lines[written:])
            os.fsync(file)
        except OSError:  # such as a full disk: part of a line must not stay
            os.ftruncate(file, size)
            raise
        for vote in votes:
            self._add(vote)
        self._position = size + len(lines)


def format_vote(vote: Vote) -> str:
    """Return a vote as a line of JSON, without fields that are not set."""
    data = {key: value for key, value in asdict(vote).items() if value not in (None, "", ())}
    if vote.samples:
        data["samples"] = [
            {key: value for key, value in asdict(sample).items() if value not in (None, "")} for sample in vote.samples
        ]
    return json.dumps(data, ensure_ascii=False)


def read_votes(path: Path) -> list[Vote]:
    """Return the votes of a log without those that were undone; a last line that was cut off is ignored."""
    path = path / "votes.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no vote log; give the votes.jsonl of a voting session, or create one with "
            "`tastemaker vote create` [TM1392]"
        )
    votes = list(parse_lines(read_text(path, MAX_ROWS_BYTES, errors="replace").split("\n"), path))
    unique = {vote.id: vote for vote in reversed(votes)}  # of equal ids the first counts
    undone = {vote.undoes for vote in votes if vote.kind == "undo"}
    return [vote for vote in reversed(unique.values()) if vote.kind != "undo" and vote.id not in undone]


def parse_lines(lines: list[str], path: Path, first: int = 0) -> Iterator[Vote]:
    """Yield the votes of lines. The last one, after which no newline came, may be cut off."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield parse_vote(parse_json(line, f"line {first + number}"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                return
            raise ConfigError(
                f"{path}, line {first + number}: not a vote ({error!s:.200}); correct or remove this line [TM1393]"
            ) from error


def parse_vote(data: Mapping[str, Any]) -> Vote:
    """Return the vote of plain data; unknown keys are ignored. Raises ValueError, TypeError or KeyError."""
    if not isinstance(data, Mapping):
        raise TypeError("expected an object with the keys id, voter, kind, prompt, samples and choice [TM1394]")
    samples = tuple(
        VotedSample(str(each["file"]), str(each.get("sha256", "")), str(each.get("source", "")), each.get("seed"))
        for each in data.get("samples", ())
    )
    texts = {key: str(data.get(key, "")) for key in ("time", "voter", "prompt", "session", "undoes")}
    shown, seconds = tuple(map(int, data.get("shown", ()))), data.get("seconds")
    vote = Vote(
        id=str(data["id"]),
        kind=data["kind"],
        samples=samples,
        choice=data.get("choice"),
        shown=shown,
        seconds=None if seconds is None else float(seconds),
        **texts,
    )
    check_vote(vote)
    return vote


def check_vote(vote: Vote) -> None:
    """Refuse a vote whose fields do not fit together."""
    if not vote.id or vote.kind not in KINDS:
        raise ConfigError(
            f"a vote needs an id and a kind, got the id {vote.id!r:.40} and the kind {vote.kind!r:.40}; the kind is "
            f"one of {', '.join(KINDS)} [TM1395]"
        )
    if len(vote.voter) > MAX_NAME_LENGTH or not all(map(str.isprintable, vote.voter)):
        raise ConfigError(
            f"voter: {vote.voter!r:.60} is not a name; use at most {MAX_NAME_LENGTH} printable characters [TM1396]"
        )
    count, choice = len(vote.samples), vote.choice
    is_index = isinstance(choice, int) and not isinstance(choice, bool) and 0 <= choice < count
    fits = {
        "pair": count == 2 and (is_index or choice in UNDECIDED),
        "best_of": count >= 2 and (is_index or choice in UNDECIDED),
        "like": count == 1 and isinstance(choice, bool),
        "undo": bool(vote.undoes),
    }
    if not fits[vote.kind]:
        raise ConfigError(
            f"choice: {choice!r:.40} does not fit a vote of kind {vote.kind} on {count} samples; expected the index of "
            "a sample, tie or both_bad, for like true or false, and for undo the key undoes [TM1397]"
        )
    if vote.shown and sorted(vote.shown) != list(range(count)):
        raise ConfigError(
            f"shown: expected the indices of the {count} samples in the order on the screen, got {vote.shown!r:.60}; "
            "list every index once [TM1398]"
        )


def likes(votes: Iterable[Vote]) -> dict[str, LikedSamples]:
    """Return the liked and disliked samples of each prompt. Of several votes of a voter on a sample the last counts."""
    last: dict[tuple[str, str, str], Vote] = {}
    for vote in votes:
        if vote.kind == "like":
            key = vote.prompt, vote.voter, vote.samples[0].sha256 or vote.samples[0].file
            last.pop(key, None)
            last[key] = vote
    result: dict[str, LikedSamples] = {}
    for vote in last.values():
        before, entry = result.get(vote.prompt, LikedSamples()), (vote.samples[0], vote.voter)
        is_liked = vote.choice is True
        result[vote.prompt] = LikedSamples(
            (*before.liked, entry) if is_liked else before.liked,
            before.disliked if is_liked else (*before.disliked, entry),
        )
    return result


def to_pairs(votes: Iterable[Vote], folder: Path, *, ties: bool = False) -> list[PreferencePair]:
    """Return the preference pairs of votes; files are relative to `folder`, that of the log.

    Likes become pairs within a prompt: every liked sample with every disliked one of the same voter, at most
    MAX_LIKED_PAIRS of a prompt. With `ties`, votes on pairs without a preference are pairs too, marked as such.
    """
    votes, pairs = list(votes), []
    for vote in votes:
        files = [folder / sample.file for sample in vote.samples]
        pairs += [PreferencePair(vote.prompt, files[a], files[b], vote.voter) for a, b in vote.pairs()]
        if ties and vote.kind == "pair" and vote.choice in UNDECIDED:
            pairs.append(PreferencePair(vote.prompt, files[0], files[1], vote.voter, tie=True))
    for prompt, samples in likes(votes).items():
        both = [(a, b, voter) for a, voter in samples.liked for b, other in samples.disliked if voter == other]
        # A step through all combinations, so that a limit keeps many different samples instead of all of the first.
        step = max(1, -(-len(both) // MAX_LIKED_PAIRS))
        pairs += [
            PreferencePair(prompt, folder / a.file, folder / b.file, voter)
            for a, b, voter in both[::step][:MAX_LIKED_PAIRS]
        ]
    return pairs
