"""Prompts of classes: each names its class."""

from __future__ import annotations

import pytest

from tastemaker.data.class_labels import imagenet_labels
from tastemaker.data.images import CaptionedFolder
from tastemaker.data.prompts import ClassPrompts


def test_class_prompts_parse_to_their_label() -> None:
    rows = ClassPrompts().load(0)
    assert len(rows) > 990
    batch = rows.first_prompts(len(rows))
    assert [imagenet_labels().find_class(prompt) for prompt in batch.prompts] == [
        metadata["label"] for metadata in batch.metadata
    ]
    assert batch.prompts[1] == "a photo of a goldfish"


def test_ambiguous_class_names_are_left_out() -> None:
    rows = ClassPrompts(num_classes=3, class_names=("crane", "dog", "crane")).load(0)
    assert rows.prompts == ("a photo of a dog",)


def test_template_must_contain_the_class_name() -> None:
    with pytest.raises(ValueError, match=r"TM219"):
        ClassPrompts(template="a photo of {class}")


def test_example_images_show_imagenet_classes() -> None:
    rows = CaptionedFolder(image_size=32).load(0)
    batch = rows.batch(0, 3, 0, 1)
    assert sorted(batch.prompts) == ["airliner", "mountain bike", "pizza"]
    assert batch.pixels.shape == (3, 1, 3, 32, 32)
    assert all(imagenet_labels().find_class(prompt) for prompt in batch.prompts)
