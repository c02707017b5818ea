"""Results of voting sessions: win rates, the stopping rule, and agreement between voters and with rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..core.errors import ConfigError
from ..core.safe_files import read_json_object
from .sessions import Session
from .statistics import (
    Share,
    SourceComparison,
    VoterAgreement,
    compare_sources,
    compute_reward_agreement,
    compute_voter_agreement,
    count_likes,
)
from .votes import UNDECIDED

SCORES_FILE = "scores.json"


@dataclass(frozen=True)
class SessionResult:
    """What the votes of a session say."""

    comparisons: tuple[SourceComparison, ...]  # of each two sources, the later one against the earlier one
    likes: tuple[Share, ...]
    voters: Mapping[str, int]
    agreement: VoterAgreement
    rewards: tuple[Share, ...]  # agreement with each reward
    undecided: int  # votes that preferred no sample

    def sentences(self) -> list[str]:
        """Return the result in words."""
        subject = "you" if len(self.voters) < 2 else f"{len(self.voters)} voters"
        lines = []
        for each in self.comparisons:
            lines.append(each.describe(subject=subject) + f"; against {each.opponent}")
            lines.append(each.verdict().describe(each.source, each.opponent))
        for share in self.likes:
            low, high = share.interval
            interval = f"95 % interval {100 * low:.0f} to {100 * high:.0f} %"
            lines.append(
                f"{subject} liked {share.share * 100:.0f} % of {share.count} samples of {share.name}; {interval}"
            )
        if self.agreement.total.count:
            alpha = f"; Krippendorff's alpha {self.agreement.alpha:.2f}" if self.agreement.alpha is not None else ""
            share = self.agreement.total
            lines.append(f"two voters agree on {share.share * 100:.0f} % of {share.count} common votes{alpha}")
        for share in self.rewards:
            low, high = share.interval
            interval = f"95 % interval {100 * low:.0f} to {100 * high:.0f} %"
            lines.append(f"{share.name} ranks {share.share * 100:.0f} % of {share.count} votes alike; {interval}")
        return lines


def summarize_session(session: Session, voter: str = "") -> SessionResult:
    """Return the result of a session, for all voters or one."""
    votes = session.votes(voter)
    names = [source.name for source in session.sources]
    comparisons = [compare_sources(votes, b, a) for a, b in combinations(names, 2)] if session.kind != "like" else []
    rewards = read_scores(session)
    return SessionResult(
        tuple(comparisons),
        tuple(count_likes(votes, names)) if session.kind == "like" else (),
        dict(Counter(vote.voter for vote in votes)),
        compute_voter_agreement(votes),
        tuple(compute_reward_agreement(votes, scores, name) for name, scores in rewards.items()),
        sum(vote.choice in UNDECIDED for vote in votes if isinstance(vote.choice, str)),
    )


def read_scores(session: Session) -> dict[str, dict[str, float]]:
    """Return the scores of samples by hash, for each reward that scored the session."""
    path = session.directory / SCORES_FILE
    scores = read_json_object(path) if path.is_file() else {}
    for name, by_hash in scores.items():
        values = by_hash.values() if isinstance(by_hash, dict) else [by_hash]
        if not all(isinstance(value, (int, float)) for value in values):
            raise ConfigError(
                f"{path}: the scores of '{name:.40}' are no numbers by sample; score the session again [TM1182]"
            )
    return scores


def describe_progress(session: Session, voter: str = "") -> dict[str, Any]:
    """Return the number of votes, the target, and whether the stopping rule has decided between two sources."""
    counts = session.voters()
    result = summarize_session(session)
    decided = len(session.sources) == 2 and all(each.verdict().is_final for each in result.comparisons)
    return {
        "votes": counts.get(voter, 0),
        "target": session.voter_target,
        "decided": decided and session.kind != "like",
    }
