"""Named sets of prompts, and prompts that `datasets` saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.prompt_sets import (
    article,
    load_prompt_templates,
    set_prompts,
    split_count,
    vader_set_names,
    word_list,
)
from tastemaker.data.prompts import PromptFile, PromptSet
from tastemaker.rewards.actpred import ActionReward


def test_prompt_set_count_matches_vader() -> None:
    assert len(load_prompt_templates()) >= 50


@pytest.mark.parametrize("name", list(load_prompt_templates()))
def test_prompt_sets_have_distinct_prompts_with_metadata(name: str) -> None:
    rows = set_prompts(name)
    assert len({prompt for prompt, _ in rows}) == len(rows) == (load_prompt_templates()[name].count or len(rows))
    for prompt, metadata in rows:
        assert metadata["set"] == name and len(metadata) > 1
        assert not re.search(r"[{}]|  | ,", prompt) and prompt == prompt.strip()
        assert not re.search(r"\ba [aeio]|\ban [bcdfgjklmnpqrstvwxyz]", prompt), prompt


def test_actions_have_kinetics_names() -> None:
    assert {metadata["action"] for _, metadata in set_prompts("actions")} == {
        "playing piano",
        "playing guitar",
        "chopping wood",
        "jogging",
    }
    assert all(metadata["action"] == prompt for prompt, metadata in set_prompts("kinetics_50"))
    piano = next(prompt for prompt, metadata in set_prompts("actions") if metadata["action"] == "playing piano")
    assert "playing the piano" in piano


def test_action_metadata_matches_actpred() -> None:
    reward = ActionReward(log_prob=False).tiny()
    loaded = reward.load(Placement())
    clip = torch.rand(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    bare = ActionReward(weights=reward.weights, log_prob=False).load(Placement())
    names = list(bare.net.labels)[:2]
    from_metadata = bare.score(clip, ["x", "y"], [{"action": name} for name in names])
    from_prompts = bare.score(clip, names, [{}, {}])
    assert from_metadata.equal(from_prompts) and not loaded.score(clip, ["x", "y"], [{}, {}]).equal(from_metadata)


def test_prompt_set_split_is_disjoint() -> None:
    every, train, held = ({*PromptSet("animals", part).load(0).prompts} for part in ("all", "train", "held_out"))
    assert train | held == every and not train & held and len(held) == 9


def test_unknown_prompt_set_is_refused() -> None:
    data = load("grpo-toy-flow", ["data={type: prompt_set, name: actions}"]).data
    assert data == PromptSet("actions")
    with pytest.raises(ConfigError, match=r"'animal'.*'animals'.*TM221"):
        load("grpo-toy-flow", ["data={type: prompt_set, name: animal}"])


def test_vader_names_are_aliases() -> None:
    assert (
        set(vader_set_names().values()) <= load_prompt_templates().keys()
        and not vader_set_names().keys() & load_prompt_templates().keys()
    )
    theirs, ours = (PromptSet(name).load(0).first_prompts(5) for name in ("chatgpt_custom_animal", "animal_scenes"))
    assert theirs == ours
    for name in ("hps_custom", "chatgpt_custom_instruments", "nouns_activities", "kinetics_4rand"):
        assert len(PromptSet(name).load(0).first_prompts(3)) == 3


def test_split_count_is_even_within_limits() -> None:
    assert (
        split_count(50, [440, 16]) == [34, 16] and split_count(69, [60, 48]) == [35, 34] and split_count(4, [4]) == [4]
    )


def test_article_follows_the_sound() -> None:
    assert [article(word) for word in ("owl", "cat", "unicorn", "ukulele", "umbrella")] == [
        "an ",
        "a ",
        "a ",
        "a ",
        "an ",
    ]
    assert ("playing the piano", "playing piano") in word_list("act")


def test_prompts_are_read_from_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"caption": ["a cat", "a dog"], "action": ["sleeping", "running"]})
    table.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "parts"))
    batch = PromptFile(tmp_path / "plain").load(0).first_prompts(2)
    assert batch.prompts == ("a cat", "a dog") and batch.metadata[1] == {"action": "running"}
    assert PromptFile(tmp_path / "parts", split="test").load(0).prompts == ("a cat", "a dog")
    with pytest.raises(ConfigError, match=r"'train'.* test"):
        PromptFile(tmp_path / "parts").load(0)
    datasets.Dataset.from_dict({"a": [1]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="one of prompt, caption, text"):
        PromptFile(tmp_path / "other").load(0)
