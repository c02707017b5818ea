"""A prompt names a class by its number, by any of its names, or as a photo of it."""

from __future__ import annotations

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.data.class_labels import ClassLabels, imagenet_labels, make_class_labels, wordnet_class_ids


@pytest.mark.parametrize(
    "prompt", ["207", " 207 ", "golden retriever", "Golden  Retriever", "a photo of a golden retriever"]
)
def test_class_is_resolved_by_id_name_or_photo_prompt(prompt: str) -> None:
    assert imagenet_labels().find_class(prompt) == 207


def test_every_imagenet_class_is_resolved_by_its_prompts() -> None:
    classes = imagenet_labels()
    for number in range(classes.count):
        name = classes.name(number)
        assert (
            classes.find_class(name)
            == classes.find_class(f"a photo of an {name}")
            == classes.find_class(str(number))
            == number
        )


def test_wordnet_ids_map_to_class_ids() -> None:
    assert len(wordnet_class_ids()) == 1000 and wordnet_class_ids()["n02099601"] == 207
    assert list(wordnet_class_ids()) == sorted(wordnet_class_ids())  # so that sorted folders are numbered alike


def test_unknown_class_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'golden retreiver'.*'golden retriever'.*TM132"):
        imagenet_labels().find_class("golden retreiver")
    with pytest.raises(ConfigError, match=r"1000.* 999.*TM129"):
        imagenet_labels().find_class("1000")
    with pytest.raises(ConfigError, match=r"'dog'.*caption_source=class_id.*TM131"):
        make_class_labels(10).find_class("dog")


def test_ambiguous_class_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'crane'.* 134, 517.*TM130"):
        imagenet_labels().find_class("crane")
    assert imagenet_labels().find_class("crayfish") == 124  # the usual name of one, another of the spiny lobster


def test_class_names_must_match_the_number_of_classes() -> None:
    assert make_class_labels(2, ("cat", "dog")) == ClassLabels(2, (("cat",), ("dog",)))
    assert make_class_labels(2, ("cat", "dog")).find_class("a picture of the dog") == 1
    with pytest.raises(ValueError, match=r"'class_names' has 1 .* 2 classes.*TM133"):
        make_class_labels(2, ("cat",))
