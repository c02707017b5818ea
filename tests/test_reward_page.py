"""The page of rewards tells of all there are, as they tell of themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tastemaker.config.registries import REWARDS
from tastemaker.config.reward_table import replace_table
from tastemaker.config.validate import RewardReader, entry
from tastemaker.config.yaml_io import parse_yaml

PAGE = Path(__file__).parent.parent / "docs" / "rewards.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_of_rewards_is_up_to_date() -> None:
    assert replace_table(TEXT) == TEXT, "run: make schema"


def test_every_reward_has_a_line() -> None:
    for name in REWARDS:
        assert re.search(rf"^\| `{name}`", TEXT, re.MULTILINE), name


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
def test_the_rewards_shown_can_be_read(block: str) -> None:
    for data in parse_yaml(block, "docs/rewards.md")["rewards"].values():
        entry(RewardReader()).validate_python(data)
