"""Statistics of votes: shares with intervals, a stopping rule, and agreement between voters and with rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .votes import UNDECIDED, Vote, VotedSample, likes

CONFIDENCE = 0.95
EQUAL_MARGIN = 0.1  # two sources count as equal if the share is surely within 0.5 +- this
NUM_BETS, NUM_MEANS = 64, 400  # resolution of the stopping rule's mixture and of its confidence sequence
Outcome = Literal["preferred", "rejected", "equal", "undecided"]
Array = NDArray[np.float64]
Unit = tuple[str, ...]  # the samples of a vote, by hash


def wilson_interval(successes: float, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson score interval of a share; (0, 1) without trials. A tie may count as half a success."""
    if n <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, scale = successes / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(max(0.0, share * (1 - share)) / n + z * z / (4 * n * n)) / scale
    # Rounding errors must not make a bound of 0 or 1 a number beside it.
    return center - half if successes > 0 else 0.0, center + half if successes < n else 1.0


def describe_share(successes: float, n: int, confidence: float = CONFIDENCE) -> str:
    """Return a share with its interval as a phrase: "68 % of 60 (95 % interval 56 to 79 %)"."""
    low, high = wilson_interval(successes, n, confidence)
    share = successes / n if n else 0.5
    return f"{100 * share:.0f} % of {n} ({100 * confidence:.0f} % interval {100 * low:.0f} to {100 * high:.0f} %)"


def describe_win_rate(wins: float, n: int, name: str = "the new model", subject: str = "you") -> str:
    """Return "you preferred the new model in 68 % of 60 pairs; 95 % interval 56 to 79 %"."""
    if n == 0:
        return f"there is no vote between {name} and the other one yet"
    low, high = wilson_interval(wins, n)
    pairs = "1 pair" if n == 1 else f"{n} pairs"
    return (
        f"{subject} preferred {name} in {100 * wins / n:.0f} % of {pairs}; "
        f"{100 * CONFIDENCE:.0f} % interval {100 * low:.0f} to {100 * high:.0f} %"
    )


class SequentialTest:
    """A test of "the mean is 1/2" for scores in [0, 1] that may be looked at, and stopped, after every score.

    It bets against the hypothesis. A bettor who believes in the mean q has the capital
    prod_i (x_i q / m + (1 - x_i) (1 - q) / (1 - m)), which is a martingale if the mean is m. The test averages bettors
    over q, uniform on [0, 1]; for scores of 0 and 1 that is the beta-binomial mixture. By Ville's inequality the
    average ever exceeds 1 / alpha with a probability of at most alpha, so the error rate holds for every stopping rule.
    A score of 1/2, a tie, changes nothing. The means m that are not rejected are a confidence sequence: valid always.
    (Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, 2024.)
    """

    def __init__(self, alpha: float = 1 - CONFIDENCE) -> None:
        self.alpha, self.scores = alpha, Counter[float]()
        self._q, self._log_weights = make_bets()
        self._log_capital = np.zeros(NUM_BETS)

    def update(self, score: float) -> bool:
        """Add a score; returns whether the mean 1/2 is rejected now."""
        self.scores[score] += 1
        self._log_capital += np.log(2 * (score * self._q + (1 - score) * (1 - self._q)))
        return self.is_rejected

    @property
    def log_evidence(self) -> float:
        """Logarithm of the average capital against the mean 1/2."""
        return log_sum_exp(self._log_weights + self._log_capital)

    @property
    def is_rejected(self) -> bool:
        return self.log_evidence >= -math.log(self.alpha)

    def interval(self) -> tuple[float, float]:
        """Return the confidence sequence at this time, rounded outwards to a grid of means."""
        means = (np.arange(NUM_MEANS) + 0.5) / NUM_MEANS
        log_capital = np.zeros((NUM_MEANS, NUM_BETS))
        for score, count in self.scores.items():
            factor = score * self._q / means[:, None] + (1 - score) * (1 - self._q) / (1 - means[:, None])
            log_capital += count * np.log(factor)
        evidence = np.array([log_sum_exp(self._log_weights + row) for row in log_capital])
        kept = means[evidence < -math.log(self.alpha)]
        if not len(kept):
            return 0.0, 1.0
        return max(0.0, float(kept[0]) - 1 / NUM_MEANS), min(1.0, float(kept[-1]) + 1 / NUM_MEANS)


@cache
def make_bets() -> tuple[Array, Array]:
    """Return means q that bettors believe in, and the logarithms of their weights, by Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(NUM_BETS)
    return (nodes + 1) / 2, np.log(weights / 2)


def log_sum_exp(values: Array) -> float:
    largest = float(values.max())
    return largest + math.log(float(np.exp(values - largest).sum()))


@dataclass(frozen=True)
class StoppingVerdict:
    """What the stopping rule says."""

    outcome: Outcome
    low: float
    high: float

    @property
    def is_final(self) -> bool:
        """Whether more votes are not needed."""
        return self.outcome != "undecided"

    def describe(self, name: str = "the new model", opponent: str = "the old one") -> str:
        """Return the verdict in words."""
        span = f"(valid after any number of votes: {100 * self.low:.0f} to {100 * self.high:.0f} %)"
        better, worse = (name, opponent) if self.outcome == "preferred" else (opponent, name)
        return {
            "undecided": f"not decided yet: more votes are needed {span}",
            "equal": f"decided: {name} and {opponent} are preferred about equally often {span}; you can stop voting",
        }.get(self.outcome, f"decided: {better} is preferred to {worse} {span}; you can stop voting")


def apply_stopping_rule(scores: Iterable[float], alpha: float = 1 - CONFIDENCE) -> StoppingVerdict:
    """Return whether votes decide between two sources. It may be asked after every vote.

    Decided are a preference, if the sequential test rejects 1/2, and equality, if the confidence sequence is within
    EQUAL_MARGIN of 1/2.
    """
    test = SequentialTest(alpha)
    for score in scores:
        test.update(score)
    low, high = test.interval()
    outcome: Outcome = "undecided"
    if test.is_rejected:
        outcome = "preferred" if sum(x * n for x, n in test.scores.items()) > test.scores.total() / 2 else "rejected"
    elif low >= 0.5 - EQUAL_MARGIN and high <= 0.5 + EQUAL_MARGIN:
        outcome = "equal"
    return StoppingVerdict(outcome, low, high)


def sample_key(sample: VotedSample) -> str:
    """Return what identifies a sample: its hash if that is known."""
    return sample.sha256 or sample.file


def vote_unit(vote: Vote) -> Unit:
    """Return the samples of a vote in an order that does not depend on how they were shown."""
    return tuple(sorted(map(sample_key, vote.samples)))


@dataclass(frozen=True)
class SourceComparison:
    """How often one source was preferred to another: a score from 0 to 1 for each pair, averaged over its voters."""

    source: str
    opponent: str
    scores: tuple[float, ...]
    votes: int

    @property
    def wins(self) -> float:
        return sum(self.scores)

    @property
    def pairs(self) -> int:
        return len(self.scores)

    @property
    def share(self) -> float:
        return self.wins / self.pairs if self.pairs else 0.5

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.wins, self.pairs)

    def describe(self, name: str = "", subject: str = "you") -> str:
        return describe_win_rate(self.wins, self.pairs, name or self.source, subject)

    def verdict(self) -> StoppingVerdict:
        return apply_stopping_rule(self.scores)


def compare_sources(votes: Iterable[Vote], source: str, opponent: str) -> SourceComparison:
    """Compare two sources by the votes between their samples; ties count half.

    Votes of several voters on one pair are averaged, because they are not independent: a pair counts once. In a choice
    among four, the chosen sample beats those of the other source; if it is of a third source, the vote says nothing.
    """
    scores: dict[Unit, list[float]] = {}
    count = 0
    for vote in votes:
        sources = [sample.source for sample in vote.samples]
        if vote.kind not in ("pair", "best_of") or not {source, opponent} <= {*sources}:
            continue
        if vote.choice in UNDECIDED:
            score = 0.5
        elif isinstance(vote.choice, int) and sources[vote.choice] in (source, opponent):
            score = float(sources[vote.choice] == source)
        else:
            continue
        scores.setdefault(vote_unit(vote), []).append(score)
        count += 1
    return SourceComparison(source, opponent, tuple(map(fmean, scores.values())), count)


@dataclass(frozen=True)
class Share:
    """A share with its interval, such as that of liked samples."""

    name: str
    successes: float
    count: int

    @property
    def share(self) -> float:
        return self.successes / self.count if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.count)


def count_likes(votes: Iterable[Vote], sources: Sequence[str]) -> list[Share]:
    """Return the share of liked samples of each source; a sample that several voters saw counts once, on average."""
    marks: dict[str, dict[str, list[float]]] = {source: {} for source in sources}
    for samples in likes(votes).values():
        for entries, mark in ((samples.liked, 1.0), (samples.disliked, 0.0)):
            for sample, _ in entries:
                if sample.source in marks:
                    marks[sample.source].setdefault(sample_key(sample), []).append(mark)
    return [Share(source, sum(map(fmean, each.values())), len(each)) for source, each in marks.items()]


@dataclass(frozen=True)
class VoterAgreement:
    """Agreement of voters on what they both voted on."""

    shares: tuple[Share, ...]  # of each two voters, named "anna and ben"
    total: Share
    alpha: float | None  # Krippendorff's, nominal: 1 full agreement, 0 chance; None if it is not defined


def voter_labels(votes: Iterable[Vote]) -> dict[Unit, dict[str, str]]:
    """Return the label that each voter gave to each unit: position of the choice in the unit, "neither", or a like."""
    labels: dict[Unit, dict[str, str]] = {}
    for vote in votes:
        unit = vote_unit(vote)
        if isinstance(vote.choice, bool):
            label = "liked" if vote.choice else "disliked"
        elif isinstance(vote.choice, int):
            label = str(unit.index(sample_key(vote.samples[vote.choice])))
        else:
            label = "neither"
        labels.setdefault(unit, {})[vote.voter] = label
    return labels


def compute_voter_agreement(votes: Iterable[Vote]) -> VoterAgreement:
    """Return how often voters made the same choice on the same samples. Tie and both bad are one choice."""
    labels = voter_labels(votes)
    equal, common = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for by_voter in labels.values():
        for a, b in combinations(sorted(by_voter), 2):
            common[a, b] += 1
            equal[a, b] += by_voter[a] == by_voter[b]
    shares = tuple(Share(f"{a} and {b}", equal[a, b], common[a, b]) for a, b in sorted(common))
    total = Share("all voters", equal.total(), common.total())
    return VoterAgreement(shares, total, krippendorff_alpha([list(each.values()) for each in labels.values()]))


def krippendorff_alpha(units: Sequence[Sequence[str]]) -> float | None:
    """Return Krippendorff's alpha for nominal labels, a list of which each unit has; None if there is no variation."""
    coincidences, totals = Counter[tuple[str, str]](), Counter[str]()
    for labels in units:
        if len(labels) < 2:
            continue
        counts = Counter(labels)
        for a in counts:
            totals[a] += counts[a]
            for b in counts:
                if a != b:
                    coincidences[a, b] += counts[a] * counts[b] / (len(labels) - 1)  # type: ignore[assignment]
    n = totals.total()
    expected = sum(totals[a] * totals[b] for a in totals for b in totals if a != b)
    if n < 2 or not expected:
        return None
    return 1 - (n - 1) * sum(coincidences.values()) / expected


def compute_reward_agreement(votes: Iterable[Vote], scores: Mapping[str, float], name: str = "") -> Share:
    """Return the share of votes that a reward ranks alike, by its scores of samples; equal scores count half.

    A choice among four is as many comparisons as it has losers, of which it counts the mean. Likes are compared within
    a prompt: each liked sample with the disliked ones of its voter.
    """
    votes, results = list(votes), []
    for vote in votes:
        keys = [sample_key(sample) for sample in vote.samples]
        ranked = [compare(scores[keys[a]], scores[keys[b]]) for a, b in vote.pairs() if {keys[a], keys[b]} <= {*scores}]
        if ranked:
            results.append(fmean(ranked))
    for samples in likes(votes).values():
        for sample, voter in samples.liked:
            others = [
                scores[key]
                for each, other in samples.disliked
                if other == voter and (key := sample_key(each)) in scores
            ]
            if others and sample_key(sample) in scores:
                results.append(fmean(compare(scores[sample_key(sample)], other) for other in others))
    return Share(name, sum(results), len(results))


def compare(winner: float, loser: float) -> float:
    """Return 1 if the first score is higher, 0 if it is lower, 0.5 if they are equal."""
    return 0.5 if winner == loser else float(winner > loser)
