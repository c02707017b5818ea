"""A preference model of a session's votes, and the order of the next pairs by expected information."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from painted_votes import paint_pictures
from rich.console import Console

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import read_image
from tastemaker.playground.simulated_people import PEOPLE
from tastemaker.preferences.pair_selection import expected_information
from tastemaker.preferences.preference_model import fit_preference
from tastemaker.preferences.session_taste import (
    compare_voted,
    encode_session,
    learn_taste,
    list_preference_models,
    order_pairs,
    restore_balanced_order,
)
from tastemaker.preferences.sessions import (
    ORDER_FILE,
    Session,
    choose_strategy,
    create_session,
    next_ballots,
    record_vote,
)

QUIET = Console(quiet=True)


def vote_as(session: Session, person: str, count: int) -> None:
    """Vote as a simulated person, by the files of the samples."""
    for ballot in next_ballots(session, person, count):
        pixels = torch.stack([read_image(session.sample_path(number)) for number in ballot.samples])
        rates = PEOPLE[person].rate(pixels, [ballot.prompt] * 2).tolist()
        record_vote(session, person, ballot, PEOPLE[person].choose(rates, 0.5))


def test_next_pairs_are_ordered_by_expected_information(tmp_path: Path) -> None:
    pictures = paint_pictures(tmp_path / "pictures", prompts=8, samples=3)
    session = create_session(tmp_path / "taste", [str(pictures)], seeds=range(3), console=QUIET)
    with pytest.raises(ConfigError, match="TM1502"):
        order_pairs(session)
    vote_as(session, "large", 14)
    assert learn_taste(session, tmp_path / "model", recipe="preference-playground", console=QUIET)
    assert list_preference_models(session) == [tmp_path / "model"]
    assert choose_strategy(session) == "balanced"  # a model alone changes nothing
    assert order_pairs(session) == len(session.schedule) - 14
    order = [tuple(pair) for pair in json.loads((session.directory / ORDER_FILE).read_text())]
    voted = {tuple(sorted(session.numbers[each.file] for each in vote.samples)) for vote in session.votes()}
    assert not voted & {tuple(sorted(pair)) for pair in order}
    blocks = encode_session(session, tmp_path / "model", Placement())
    fitted = fit_preference(compare_voted(session, blocks))
    features = fitted.features(blocks)
    differences = torch.stack([features[a] - features[b] for a, b in order])
    information = expected_information(*fitted.posterior.predict(differences))
    assert information[0] == information.max() > information.mean()
    ballot = next_ballots(session, "large", 1, choose_strategy(session))[0]
    assert ballot.key == tuple(sorted(order[0]))
    restore_balanced_order(session)
    assert choose_strategy(session) == "balanced"


def test_a_recipe_of_another_kind_and_too_few_votes_are_refused(tmp_path: Path) -> None:
    pictures = paint_pictures(tmp_path / "pictures", prompts=4, samples=2)
    session = create_session(tmp_path / "taste", [str(pictures)], seeds=range(2), console=QUIET)
    vote_as(session, "large", 3)
    with pytest.raises(ConfigError, match="TM1500"):
        learn_taste(session, tmp_path / "model", recipe="grpo-toy-flow", console=QUIET)
    with pytest.raises(ConfigError, match=r"TM13\d\d"):  # 3 votes, of which some may be ties
        learn_taste(session, tmp_path / "model", recipe="preference-playground", console=QUIET)
    assert list_preference_models(session) == []
