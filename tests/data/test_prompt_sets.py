"""Named sets of prompts, and prompts that `datasets` saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.prompt_sets import PromptSet
from tastemaker.data.prompt_templates import article, set_prompts, sets, split_count, vader_names, word_list
from tastemaker.data.prompts import PromptFile
from tastemaker.rewards.actpred import Actpred


def test_there_are_as_many_sets_as_the_original_has() -> None:
    assert len(sets()) >= 50


@pytest.mark.parametrize("name", list(sets()))
def test_every_set_has_as_many_different_prompts_as_it_says_and_knows_what_they_are_made_of(name: str) -> None:
    rows = set_prompts(name)
    assert len({prompt for prompt, _ in rows}) == len(rows) == (sets()[name].count or len(rows))
    for prompt, facts in rows:
        assert facts["set"] == name and len(facts) > 1
        assert not re.search(r"[{}]|  | ,", prompt) and prompt == prompt.strip()
        assert not re.search(r"\ba [aeio]|\ban [bcdfgjklmnpqrstvwxyz]", prompt), prompt


def test_actions_are_known_by_the_names_kinetics_gives_them() -> None:
    assert {facts["action"] for _, facts in set_prompts("actions")} == {
        "playing piano",
        "playing guitar",
        "chopping wood",
        "jogging",
    }
    assert all(facts["action"] == prompt for prompt, facts in set_prompts("kinetics_50"))
    piano = next(prompt for prompt, facts in set_prompts("actions") if facts["action"] == "playing piano")
    assert "playing the piano" in piano


def test_the_action_of_a_prompt_is_what_actpred_looks_for() -> None:
    reward = Actpred(logarithm=False).tiny()
    loaded = reward.load(Placement())
    clip = torch.rand(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    bare = Actpred(weights=reward.weights, logarithm=False).load(Placement())
    names = list(bare.net.labels)[:2]
    found = bare.score(clip, ["x", "y"], [{"action": name} for name in names])
    said = bare.score(clip, names, [{}, {}])
    assert found.equal(said) and not loaded.score(clip, ["x", "y"], [{}, {}]).equal(found)


def test_a_part_is_held_out_and_the_rest_is_not() -> None:
    every, train, held = ({*PromptSet("animals", part).load(0).prompts} for part in ("all", "train", "held_out"))
    assert train | held == every and not train & held and len(held) == 9


def test_a_set_is_named_in_a_recipe_and_a_wrong_name_is_a_sentence() -> None:
    data = load("grpo-toy-flow", ["data={type: prompt_set, name: actions}"]).data
    assert data == PromptSet("actions")
    with pytest.raises(ConfigError, match="there is no prompt set 'animal'; did you mean 'animals'"):
        load("grpo-toy-flow", ["data={type: prompt_set, name: animal}"])


def test_what_vader_calls_its_prompts_names_sets_of_the_same_kind() -> None:
    assert set(vader_names().values()) <= sets().keys() and not vader_names().keys() & sets().keys()
    theirs, ours = (PromptSet(name).load(0).first(5) for name in ("chatgpt_custom_animal", "animal_scenes"))
    assert theirs == ours
    for name in ("hps_custom", "chatgpt_custom_instruments", "nouns_activities", "kinetics_4rand"):
        assert len(PromptSet(name).load(0).first(3)) == 3


def test_templates_share_alike_as_far_as_they_reach() -> None:
    assert (
        split_count(50, [440, 16]) == [34, 16] and split_count(69, [60, 48]) == [35, 34] and split_count(4, [4]) == [4]
    )


def test_articles_follow_the_sound() -> None:
    assert [article(word) for word in ("owl", "cat", "unicorn", "ukulele", "umbrella")] == [
        "an ",
        "a ",
        "a ",
        "a ",
        "an ",
    ]
    assert ("playing the piano", "playing piano") in word_list("act")


def test_prompts_are_read_from_what_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"caption": ["a cat", "a dog"], "action": ["sleeping", "running"]})
    table.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "parts"))
    told = PromptFile(tmp_path / "plain").load(0).first(2)
    assert told.prompts == ("a cat", "a dog") and told.facts[1] == {"action": "running"}
    assert PromptFile(tmp_path / "parts", split="test").load(0).prompts == ("a cat", "a dog")
    with pytest.raises(ConfigError, match="has no 'train'; there are test"):
        PromptFile(tmp_path / "parts").load(0)
    datasets.Dataset.from_dict({"a": [1]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="expected one of prompt, caption, text"):
        PromptFile(tmp_path / "other").load(0)
