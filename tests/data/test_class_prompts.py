"""Prompts by classes: each says its class, and nothing else."""

from __future__ import annotations

import pytest

from tastemaker.data.captioned_images import PictureFolder
from tastemaker.data.class_labels import imagenet_labels
from tastemaker.data.class_prompts import ClassPrompts


def test_every_prompt_means_its_class() -> None:
    rows = ClassPrompts().load(0)
    assert len(rows) > 990
    told = rows.first(len(rows))
    assert [imagenet_labels().number(prompt) for prompt in told.prompts] == [fact["label"] for fact in told.facts]
    assert told.prompts[1] == "a photo of a goldfish"


def test_names_that_two_classes_share_are_left_out() -> None:
    rows = ClassPrompts(classes=3, names=("crane", "dog", "crane")).load(0)
    assert rows.prompts == ("a photo of a dog",)


def test_a_template_must_name_the_class() -> None:
    with pytest.raises(ValueError, match=r"expected \{name\} and plain text"):
        ClassPrompts(template="a photo of {class}")


def test_the_pictures_to_try_recipes_with_are_of_classes_that_imagenet_has() -> None:
    rows = PictureFolder(size=32).load(0)
    batch = rows.batch(0, 3, 0, 1)
    assert sorted(batch.prompts) == ["airliner", "mountain bike", "pizza"]
    assert batch.pixels.shape == (3, 1, 3, 32, 32)
    assert all(imagenet_labels().number(prompt) for prompt in batch.prompts)
