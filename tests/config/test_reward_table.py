"""The reward page of the documentation: its table covers every reward, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tastemaker.config.catalog import replace_reward_table
from tastemaker.config.registries import REWARDS
from tastemaker.config.validate import RewardReader, reader_adapter
from tastemaker.config.yaml_io import parse_yaml

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_reward_table_is_up_to_date() -> None:
    assert replace_reward_table(TEXT) == TEXT, "run: make schema"


def test_every_reward_has_a_table_row() -> None:
    for name in REWARDS:
        assert re.search(rf"^\| `{name}`", TEXT, re.MULTILINE), name


@pytest.mark.parametrize("example", re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
def test_yaml_examples_are_valid_rewards(example: str) -> None:
    for data in parse_yaml(example, "docs/rewards.md")["rewards"].values():
        reader_adapter(RewardReader()).validate_python(data)
