"""Statistics of votes against closed forms, and the stopping rule's error rate by simulation."""

from __future__ import annotations

import math
import random

import pytest

from tastemaker.preferences.statistics import (
    SequentialTest,
    apply_stopping_rule,
    compare_sources,
    compute_reward_agreement,
    compute_voter_agreement,
    count_likes,
    describe_win_rate,
    krippendorff_alpha,
    wilson_interval,
)
from tastemaker.preferences.votes import Choice, Kind, Vote, VotedSample, new_vote_id


def make_vote(choice: Choice, unit: int = 0, voter: str = "anna", sources: str = "ab", kind: Kind = "pair") -> Vote:
    samples = tuple(VotedSample(f"{unit}{place}{name}.png", source=name) for place, name in enumerate(sources))
    return Vote(new_vote_id(), "", voter, kind, f"prompt {unit}", samples, choice)


def test_wilson_interval_is_that_of_the_closed_form() -> None:
    low, high = wilson_interval(41, 60)
    z = 1.959964
    for bound in (low, high):  # the bounds are the shares whose z statistic is at its limit
        assert abs(41 / 60 - bound) / math.sqrt(bound * (1 - bound) / 60) == pytest.approx(z, rel=1e-5)
    assert wilson_interval(0, 0) == (0, 1) and wilson_interval(0, 10)[0] == 0 and wilson_interval(10, 10)[1] == 1
    assert describe_win_rate(41, 60) == ("you preferred the new model in 68 % of 60 pairs; 95 % interval 56 to 79 %")
    assert "no vote" in describe_win_rate(0, 0)


def test_evidence_of_decided_votes_is_the_beta_binomial_mixture() -> None:
    test = SequentialTest()
    for score in (1, 1, 0, 1, 0.5, 1, 1, 0, 1, 1):  # 7 wins, 2 losses, and a tie, which changes nothing
        test.update(score)
    expected = 9 * math.log(2) + math.lgamma(8) + math.lgamma(3) - math.lgamma(11)
    assert test.log_evidence == pytest.approx(expected, rel=1e-9)


def test_stopping_rule_keeps_its_error_rate_when_asked_after_every_vote() -> None:
    rng = random.Random(7)

    def stops(share: float, ties: float, votes: int) -> bool:
        test = SequentialTest()
        return any(test.update(0.5 if rng.random() < ties else float(rng.random() < share)) for _ in range(votes))

    runs = 200
    for ties in (0.0, 0.3):
        assert sum(stops(0.5, ties, 100) for _ in range(runs)) / runs <= 0.05
    assert sum(stops(0.75, 0.0, 120) for _ in range(40)) / 40 > 0.9  # and it does detect a preference


def test_fixed_interval_asked_after_every_vote_would_not_keep_it() -> None:
    rng = random.Random(7)

    def stops() -> bool:
        wins = 0
        for n in range(1, 151):
            wins += rng.random() < 0.5
            low, high = wilson_interval(wins, n)
            if n >= 5 and not low <= 0.5 <= high:
                return True
        return False

    assert sum(stops() for _ in range(300)) / 300 > 0.15


def test_verdicts_are_in_words() -> None:
    preferred = apply_stopping_rule([1.0] * 15)
    assert preferred.outcome == "preferred" and preferred.low > 0.5
    assert "the new model is preferred to the old one" in preferred.describe()
    rejected = apply_stopping_rule([0.0] * 15)
    assert rejected.outcome == "rejected" and "the old one is preferred to the new model" in rejected.describe()
    few = apply_stopping_rule([1.0, 0.0, 1.0])
    assert few.outcome == "undecided" and not few.is_final and "more votes" in few.describe()
    assert apply_stopping_rule([0.5] * 400).outcome == "equal"
    none = apply_stopping_rule([])
    assert none.outcome == "undecided" and (none.low, none.high) == (0, 1)


def test_pairs_count_once_and_ties_half() -> None:
    votes = [
        make_vote(0, 1),
        make_vote(0, 1, "ben"),
        make_vote(1, 2),
        make_vote(0, 2, "ben"),  # anna and ben disagree on pair 2
        make_vote("tie", 3),
        make_vote("both_bad", 4),
        make_vote(0, 5, sources="ac"),
    ]
    result = compare_sources(votes, "a", "b")
    assert (result.wins, result.pairs, result.votes) == (2.5, 4, 6)
    assert compare_sources(votes, "b", "a").wins == 1.5
    assert result.describe(subject="anna") == "anna preferred a in 62 % of 4 pairs; 95 % interval 22 to 91 %"
    assert compare_sources([make_vote(2, 1, sources="aabb", kind="best_of")], "b", "a").wins == 1


def test_agreement_between_voters() -> None:
    votes = []
    for unit in range(10):
        votes += [make_vote(unit % 2, unit), make_vote(unit % 2 if unit < 8 else 1 - unit % 2, unit, "ben")]
    agreement = compute_voter_agreement(votes)
    assert (agreement.total.successes, agreement.total.count) == (8, 10)
    assert [share.name for share in agreement.shares] == ["anna and ben"]
    assert agreement.alpha is not None and 0.5 < agreement.alpha < 0.8
    assert compute_voter_agreement(votes[::2]).total.count == 0


def test_krippendorff_alpha_of_published_example() -> None:
    # Krippendorff, Computing Krippendorff's alpha-reliability (2011), section C: four observers, nominal, 0.743.
    rows = ["1 2 3 3 2 1 4 1 2 . . .", "1 2 3 3 2 2 4 1 2 5 . 3", ". 3 3 3 2 3 4 2 2 5 1 .", "1 2 3 3 2 4 4 1 2 5 1 ."]
    columns = zip(*(row.split() for row in rows), strict=True)
    assert krippendorff_alpha([[x for x in column if x != "."] for column in columns]) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha([["a", "a"], ["a", "a"]]) is None


def test_agreement_with_a_reward() -> None:
    votes = [make_vote(0, 1), make_vote(1, 2), make_vote(0, 3), make_vote("tie", 4)]
    scores = {"10a.png": 2.0, "11b.png": 1.0, "20a.png": 2.0, "21b.png": 1.0, "30a.png": 1.0, "31b.png": 1.0}
    share = compute_reward_agreement(votes, scores, "jpeg")
    assert (share.successes, share.count) == (1.5, 3)
    liked = [
        make_vote(True, 1, sources="a", kind="like"),
        Vote("x", "", "anna", "like", "prompt 1", (VotedSample("11b.png", source="b"),), False),
    ]
    assert compute_reward_agreement(liked, scores).successes == 1
    assert [(each.name, each.share, each.count) for each in count_likes(liked, ["a", "b"])] == [
        ("a", 1, 1),
        ("b", 0, 1),
    ]
