"""Classes of your own keep the recipe's settings as far as they have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from tastemaker.config.load import load
from tastemaker.core.errors import ConfigError
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT


@dataclass(frozen=True)
class RankGRPO(GRPO):
    """GRPO with one more setting."""

    rank_weight: float = 0.5
    needs_stochastic: ClassVar[bool] = True


def test_subclass_of_an_objective_keeps_the_settings_of_the_recipe() -> None:
    settings = ["objective.group_size=12", "objective.kl_coef=0.05"]
    custom = load("grpo-toy-flow", [*settings, f"objective.type={__name__}:RankGRPO", "objective.rank_weight=0.7"])
    original = load("grpo-toy-flow", settings).objective
    assert isinstance(original, GRPO) and isinstance(custom.objective, RankGRPO)
    shared = {key: value for key, value in vars(custom.objective).items() if key != "rank_weight"}
    assert shared == vars(original) and (original.group_size, original.kl_coef) == (12, 0.05)
    assert custom.objective.rank_weight == 0.7


def test_settings_that_another_class_lacks_are_named_when_they_are_dropped() -> None:
    location = f"{NFT.__module__}:NFT"
    with pytest.warns(UserWarning, match=r"objective\.clip_range=0\.3"):
        config = load("grpo-toy-flow", ["objective.clip_range=0.3", f"objective.type={location}"])
    assert isinstance(config.objective, NFT)


def test_unknown_class_of_an_objective_names_the_section() -> None:
    with pytest.raises(ConfigError, match=r"objective.*Missing.*TM109"):
        load("grpo-toy-flow", [f"objective.type={__name__}:Missing"])
