"""Voting sessions: a folder with samples of several sources, what is shown next, and the votes and their result.

The folder holds session.json (the settings), samples.json (the samples, in random order), samples/ and votes.jsonl.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core import output_paths
from ..core.errors import ConfigError
from ..core.safe_files import read_json
from .statistics import compare_sources
from .votes import Choice, Kind, Vote, VotedSample, VoteLog, new_vote_id, now

if TYPE_CHECKING:
    from rich.console import Console

SESSION_FILE, SAMPLES_FILE, VOTES_FILE = "session.json", "samples.json", "votes.jsonl"
END_FILE, ORDER_FILE = "ended.json", "order.json"
DEFAULT_TARGET = 60  # votes of each voter
MAX_BALLOTS = 20_000
NUM_CANDIDATES = 4  # samples of a best-of ballot
KINDS = ("pair", "best_of", "like")
STRATEGIES = ("balanced", "random", "active")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
Strategy = Literal["balanced", "random", "active"]


@dataclass(frozen=True)
class SessionSource:
    """Where samples come from: a recipe, a run, an export or a folder of pictures."""

    label: str  # shown in the result; by default the model and its checkpoint
    model: str
    checkpoint: str | None = None  # of a run: step-000100, its path, or weights such as reference; else the newest
    overrides: tuple[str, ...] = ()  # settings for the recipe

    @property
    def name(self) -> str:
        return self.label or (f"{self.model}@{self.checkpoint}" if self.checkpoint else self.model)


@dataclass(frozen=True)
class SessionSample:
    """A sample of a session."""

    file: str  # relative to the folder of the session
    sha256: str
    source: int  # index of the source
    prompt: int  # index of the prompt
    seed: int


@dataclass(frozen=True)
class Ballot:
    """What a voter is asked: samples of a prompt, by their numbers in the session, in the order on the screen."""

    id: str  # of the vote that answers it, so that a vote that is sent twice counts once
    kind: Kind
    prompt: str
    samples: tuple[int, ...]

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(sorted(self.samples))


@dataclass(frozen=True)
class Session:
    """A voting session on disk."""

    directory: Path
    name: str
    created: str
    kind: Kind
    blind: bool  # whether sources are hidden until the end
    sources: tuple[SessionSource, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    target: int = DEFAULT_TARGET  # votes of each voter
    order_seed: int = 0  # of all random orders
    samples: tuple[SessionSample, ...] = field(default=(), repr=False)  # empty until they are generated

    @cached_property
    def vote_log(self) -> VoteLog:
        return VoteLog(self.directory / VOTES_FILE)

    @property
    def is_ready(self) -> bool:
        return bool(self.samples)

    @property
    def has_ended(self) -> bool:
        """Whether somebody ended the session."""
        return (self.directory / END_FILE).is_file()

    def end(self) -> None:
        """End the session: the sources are shown, and votes are refused."""
        output_paths.write_text_atomically(self.directory / END_FILE, json.dumps({"time": now()}) + "\n")

    def sample_path(self, number: int) -> Path:
        """Return the file of a sample, which is inside the folder of the session."""
        path = (self.directory / self.samples[number].file).resolve()
        if not path.is_relative_to(self.directory.resolve()):
            raise ConfigError(
                f"{self.directory / SAMPLES_FILE}: sample {number} is outside of the session's folder; create the "
                "session again [TM1399]"
            )
        return path

    def find_sample(self, source: int, prompt: int, seed: int) -> Path:
        """Return the file of the sample of a source (by its index), a prompt (by its index) and a seed."""
        wanted = source, prompt, seed
        return self.sample_path([(each.source, each.prompt, each.seed) for each in self.samples].index(wanted))

    @cached_property
    def schedule(self) -> tuple[tuple[int, ...], ...]:
        """The samples of all ballots in the balanced order: in every prefix, prompts and sources come equally often."""
        return tuple(make_schedule(self))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each sample by its file."""
        return {sample.file: number for number, sample in enumerate(self.samples)}

    def votes(self, voter: str = "") -> list[Vote]:
        """Return the votes that count, of one voter if given."""
        return [vote for vote in self.vote_log.read() if voter in ("", vote.voter)]

    def voters(self) -> dict[str, int]:
        """Return the number of votes of each voter."""
        return dict(Counter(vote.voter for vote in self.vote_log.read()))

    @property
    def voter_target(self) -> int:
        """Votes that are asked of each voter: there may be fewer ballots than the target."""
        return min(self.target, len(self.schedule))

    @property
    def is_over(self) -> bool:
        """Whether it was ended, or every voter who started has reached the target."""
        voters = self.voters()
        return self.has_ended or (bool(voters) and min(voters.values()) >= self.voter_target)

    @property
    def is_revealed(self) -> bool:
        """Whether the sources may be shown."""
        return not self.blind or self.is_over


def make_schedule(session: Session) -> Iterator[tuple[int, ...]]:
    """Yield the samples of ballots, prompts in turn; those of a ballot are ordered by source and seed."""
    rng = random.Random(session.order_seed)
    by_prompt: dict[int, list[int]] = {}
    for number, sample in enumerate(session.samples):
        by_prompt.setdefault(sample.prompt, []).append(number)
    prompts = sorted(by_prompt)
    rng.shuffle(prompts)
    maker = {"pair": make_pairs, "best_of": make_groups, "like": make_singles}[session.kind]
    queues = [maker(session, by_prompt[prompt], place, rng) for place, prompt in enumerate(prompts)]
    count = 0
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue) and count < MAX_BALLOTS:
                count += 1
                yield queue[turn]


def make_pairs(session: Session, numbers: Sequence[int], place: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Return the pairs of a prompt: equal seeds of two sources first, in turns; of one source, any two seeds."""
    samples = session.samples
    ordered = sorted(numbers, key=lambda n: (samples[n].source, samples[n].seed))
    turns: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}
    for a, b in combinations(ordered, 2):
        sources = samples[a].source, samples[b].source
        if sources[0] == sources[1] and len(session.sources) > 1:
            continue
        is_unequal = samples[a].seed != samples[b].seed
        turns.setdefault(sources, [[], []])[is_unequal].append((a, b))
    for equal, unequal in turns.values():
        rng.shuffle(equal)
        rng.shuffle(unequal)
    queues = [[*equal, *unequal] for _, (equal, unequal) in sorted(turns.items())]
    queues = [*queues[place % len(queues) :], *queues[: place % len(queues)]] if queues else []
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def make_groups(session: Session, numbers: Sequence[int], place: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Return groups of four samples of a prompt, with the sources as equally represented as possible."""
    by_source: dict[int, list[int]] = {}
    for number in rng.sample(list(numbers), len(numbers)):
        by_source.setdefault(session.samples[number].source, []).append(number)
    queues = [by_source[source] for source in sorted(by_source)]
    mixed = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    groups = [mixed[i : i + NUM_CANDIDATES] for i in range(0, len(mixed), NUM_CANDIDATES)]
    return [tuple(sorted(group, key=lambda n: session.samples[n].source)) for group in groups if len(group) > 1]


def make_singles(session: Session, numbers: Sequence[int], place: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Return each sample of a prompt by itself."""
    return [(number,) for number in rng.sample(list(numbers), len(numbers))]


def next_ballots(
    session: Session,
    voter: str,
    count: int = 1,
    strategy: Strategy = "balanced",
    exclude: Collection[tuple[int, ...]] = (),
    *,
    beyond_target: bool = False,
) -> list[Ballot]:
    """Return what a voter is asked next: ballots that the voter has not answered, at most up to the target.

    All voters see the balanced order, so that their agreement can be measured; the random order differs by voter.
    `exclude` holds the keys of ballots that wait on the voter's screen.
    """
    check_name(voter, "voter")
    if session.has_ended:
        return []
    answered = {tuple(sorted(session.numbers.get(s.file, -1) for s in vote.samples)) for vote in session.votes(voter)}
    waiting = {*exclude} - answered
    remaining = len(session.schedule) if beyond_target else session.target
    remaining -= len(answered) + len(waiting)
    keys = [key for key in order_ballots(session, voter, strategy) if tuple(sorted(key)) not in answered | waiting]
    return [make_ballot(session, voter, key) for key in keys[: max(0, min(count, remaining))]]


def next_pair(session: Session, voter: str, strategy: Strategy = "balanced") -> Ballot | None:
    """Return what a voter is asked next; None at the end."""
    return next(iter(next_ballots(session, voter, 1, strategy)), None)


def order_ballots(session: Session, voter: str, strategy: Strategy) -> Sequence[tuple[int, ...]]:
    if strategy == "random":
        keys = list(session.schedule)
        random.Random(f"{session.order_seed} {voter}").shuffle(keys)
        return keys
    if strategy == "balanced":
        return session.schedule
    if strategy == "active":
        return order_actively(session)
    raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r:.40}; choose one [TM1400]")


def make_ballot(session: Session, voter: str, key: Sequence[int]) -> Ballot:
    """Return a ballot with its samples in a random order, which is the same whenever this voter sees it."""
    shown = list(key)
    random.Random(f"{session.order_seed} {voter} {tuple(key)}").shuffle(shown)
    prompt = session.prompts[session.samples[key[0]].prompt]
    return Ballot(new_vote_id(), session.kind, prompt, tuple(shown))


def record_vote(session: Session, voter: str, ballot: Ballot, choice: Choice, seconds: float | None = None) -> Vote:
    """Write the answer to a ballot durably and return it. `choice` is a position on the screen, or tie, both_bad, ...

    The ballot need not be one of `next_ballots` of this process: it is checked here.
    """
    check_name(voter, "voter")
    samples = session.samples
    if session.has_ended:
        raise ConfigError(f"{session.name}: the vote has ended; start a new session to vote again [TM1401]")
    is_known = len({*ballot.samples}) == len(ballot.samples) and all(0 <= n < len(samples) for n in ballot.samples)
    if not is_known or len({samples[n].prompt for n in ballot.samples}) != 1:
        raise ConfigError(
            f"{session.name}: {list(ballot.samples)!r:.60} are not samples of one prompt of this session; reload the "
            "page [TM1402]"
        )
    canonical = sorted(ballot.samples, key=lambda n: (samples[n].source, samples[n].seed, n))
    shown = tuple(canonical.index(number) for number in ballot.samples)
    if isinstance(choice, int) and not isinstance(choice, bool):
        # A position that does not exist stays as it is, and is refused when the vote is checked.
        choice = shown[choice] if 0 <= choice < len(shown) else choice
    voted = tuple(
        VotedSample(each.file, each.sha256, session.sources[each.source].name, each.seed)
        for each in (samples[number] for number in canonical)
    )
    prompt = session.prompts[samples[canonical[0]].prompt]
    vote = Vote(
        ballot.id, now(), voter, session.kind, prompt, voted, choice, shown, seconds=seconds, session=session.name
    )
    session.vote_log.append(vote)
    return vote


def check_name(name: str, what: str) -> None:
    """Refuse an empty, long or unprintable name."""
    if not name.strip() or len(name) > 100 or not name.isprintable():
        raise ConfigError(f"{what}: {name!r:.60} is not a name; use 1 to 100 printable characters [TM1404]")


def write_active_order(session: Session, pairs: Sequence[tuple[int, int]]) -> None:
    """Write the pairs of sample numbers that the strategy `active` shows first."""
    output_paths.write_text_atomically(
        session.directory / ORDER_FILE, json.dumps([list(pair) for pair in pairs]) + "\n"
    )


def choose_strategy(session: Session) -> Strategy:
    """Return `active` once a preference model has ranked the pairs, else `balanced`."""
    return "active" if session.kind == "pair" and (session.directory / ORDER_FILE).is_file() else "balanced"


def order_actively(session: Session) -> Sequence[tuple[int, ...]]:
    """Return the ballots with the largest expected information first, as the session's preference model ranked them."""
    path = session.directory / ORDER_FILE
    if session.kind != "pair" or not path.is_file():
        raise ConfigError(
            f"strategy: active needs pairs and a preference model that ranked them, and {path} does not exist; train "
            "one with the votes so far, or choose balanced [TM1405]"
        )
    known = {tuple(sorted(key)): key for key in session.schedule}
    try:
        pairs = [tuple(sorted(each)) for each in read_json(path)]
        ranked = [key for key in pairs if key in known]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a list of pairs of samples ({error!s:.200}); train a preference model again, or remove the "
            "file [TM1181]"
        ) from error
    return [known[key] for key in dict.fromkeys([*ranked, *known])]


def load_session(folder: Path) -> Session:
    """Read a session; its samples are empty if they are not complete."""
    path = folder / SESSION_FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: there is no voting session; create one with `tastemaker vote create` [TM1406]")
    try:
        data = read_json(path)
        sources = tuple(parse_saved_source(each) for each in data["sources"])
        names = {name: data[name] for name in ("name", "kind", "blind", "target", "created")} | {
            "order_seed": data.get("order_seed", 0)
        }
        rows = read_json(folder / SAMPLES_FILE) if (folder / SAMPLES_FILE).is_file() else []
        samples = tuple(SessionSample(**row) for row in rows)
        return Session(
            folder, sources=sources, prompts=(*data["prompts"],), seeds=(*data["seeds"],), samples=samples, **names
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a voting session ({error!s:.200}); create it again [TM1407]") from error


def parse_saved_source(data: Mapping[str, Any]) -> SessionSource:
    return SessionSource(data["label"], data["model"], data.get("checkpoint"), tuple(data.get("overrides", ())))


def write_session(session: Session) -> None:
    """Write the settings of a session."""
    data = asdict(session)
    del data["directory"], data["samples"]
    output_paths.write_text_atomically(
        session.directory / SESSION_FILE, json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    )


def parse_source(text: str) -> SessionSource:
    """Return the source of MODEL, RUN@CHECKPOINT, or LABEL=MODEL."""
    label, equals, model = text.partition("=")
    if not equals or "/" in label:
        label, model = "", text
    model, at, checkpoint = model.rpartition("@") if "@" in model else (model, "", "")
    if not model or (at and not checkpoint):
        raise ConfigError(
            f"--source: expected a recipe, a run, RUN@step-000100 or a folder of pictures, got {text!r:.80}; write "
            "for example --source runs/a@step-000100, or --source new=runs/a [TM1408]"
        )
    return SessionSource(label, model, checkpoint or None)


def declare_session(
    directory: str | Path,
    sources: Sequence[str | SessionSource],
    prompts: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    kind: Kind = "pair",
    *,
    blind: bool = True,
    target: int | None = None,
    name: str = "",
) -> Session:
    """Check the settings of a session and write them; the samples come later. An equal session is opened again."""
    directory = Path(directory)
    given = tuple(parse_source(each) if isinstance(each, str) else each for each in sources)
    names = [source.name for source in given]
    if not given or len({*names}) != len(names):
        raise ConfigError(
            f"--source: expected one or more different sources, got {names!r:.200}; name each once, or give equal ones "
            "labels, as LABEL=MODEL [TM1409]"
        )
    if kind not in KINDS or (target is not None and target < 1):
        raise ConfigError(
            f"--kind: expected one of {', '.join(KINDS)} and a --target of at least 1, got {kind!r:.40} and {target}; "
            "correct them [TM1410]"
        )
    if not seeds or len({*seeds}) != len(seeds) or min(seeds) < 0 or (kind == "pair" and len(given) * len(seeds) < 2):
        raise ConfigError(
            f"--seeds: {list(seeds)!r:.80} do not do; give different numbers from 0, at least two for pairs of one "
            "source [TM1411]"
        )
    texts = tuple(dict.fromkeys(prompt.strip() for prompt in prompts))
    seed = random.SystemRandom().getrandbits(48)
    target = target or (len(texts) * len(seeds) if texts and kind == "pair" else DEFAULT_TARGET)
    session = Session(directory, name or directory.name, now(), kind, blind, given, texts, (*seeds,), target, seed)
    if (directory / SESSION_FILE).is_file():
        previous = load_session(directory)
        same = ("kind", "sources", "seeds", "blind")
        is_same = all(getattr(previous, each) == getattr(session, each) for each in same)
        if not is_same or (texts and texts != previous.prompts):
            raise ConfigError(
                f"--out: {directory} holds another voting session; choose another folder, or give the same sources, "
                "prompts, seeds and kind to complete it [TM1412]"
            )
        return previous
    output_paths.check_output_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_session(session)
    return session


def create_session(
    directory: str | Path,
    sources: Sequence[str | SessionSource],
    prompts: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    kind: Kind = "pair",
    *,
    blind: bool = True,
    target: int | None = None,
    name: str = "",
    tiny: bool = False,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Session:
    """Create a voting session with its samples; what an interrupted call left is completed.

    Args:
        directory: folder of the session, such as runs/.studio/votes/NAME, where the studio finds it.
        sources: recipes, runs, RUN@step-000100, RUN@reference (the weights before training), or folders of pictures.
        prompts: by default those of the folders of pictures, else the first of the first recipe's data.
        seeds: one sample of each prompt and source is generated with each seed.
        kind: pair, best_of (four samples) or like.
        blind: whether sources are hidden until the end.
        target: votes that are asked of each voter; by default one for each prompt and seed.
        overrides: settings for the recipes, such as engine.device=cpu.
    """
    from .session_samples import complete_samples  # imports torch, which the pages of the studio do not need

    session = declare_session(directory, sources, prompts, seeds, kind, blind=blind, target=target, name=name)
    return session if session.is_ready else complete_samples(session, overrides, tiny=tiny, console=console)


def complete_session(
    directory: str | Path, overrides: Sequence[str] = (), *, tiny: bool = False, console: Console | None = None
) -> Session:
    """Generate the missing samples of a session that was declared before."""
    from .session_samples import complete_samples

    session = load_session(Path(directory))
    return session if session.is_ready else complete_samples(session, overrides, tiny=tiny, console=console)


def list_sessions(folder: Path) -> list[Session]:
    """Return the sessions in a folder, the newest first; folders that hold none are left out."""
    sessions = []
    for path in folder.glob(f"*/{SESSION_FILE}"):
        try:
            sessions.append(load_session(path.parent))
        except ConfigError:
            continue
    return sorted(sessions, key=lambda session: session.created, reverse=True)


def count_wins(session: Session) -> tuple[float, int]:
    """Return in how many pairs the second source was preferred to the first, ties counting half, and of how many."""
    first, second = (source.name for source in session.sources[:2])
    comparison = compare_sources(session.votes(), second, first)
    return comparison.wins, comparison.pairs


def describe_result(session: Session, name: str = "the new model", opponent: str = "the old one") -> str:
    """Return the win rate of the second source with its interval and the stopping rule's verdict, as a sentence."""
    first, second = (source.name for source in session.sources[:2])
    comparison = compare_sources(session.votes(), second, first)
    if not comparison.pairs:
        return f"no votes yet; vote on {session.voter_target} pairs of {session.directory}"
    return f"{comparison.describe(name)}; {comparison.verdict().describe(name, opponent)}"
