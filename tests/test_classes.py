"""A prompt names a class by its number, by any of its names, or as a photo of it."""

from __future__ import annotations

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.data.class_labels import ClassLabels, imagenet_labels, make_class_labels, wordnet_class_ids


@pytest.mark.parametrize(
    "prompt", ["207", " 207 ", "golden retriever", "Golden  Retriever", "a photo of a golden retriever"]
)
def test_a_class_is_named_in_many_ways(prompt: str) -> None:
    assert imagenet_labels().number(prompt) == 207


def test_every_class_answers_to_its_usual_name_its_number_and_a_photo_of_it() -> None:
    classes = imagenet_labels()
    for number in range(classes.count):
        name = classes.name(number)
        assert classes.number(name) == classes.number(f"a photo of an {name}") == classes.number(str(number)) == number


def test_folders_of_imagenet_are_known_by_their_ids() -> None:
    assert len(wordnet_class_ids()) == 1000 and wordnet_class_ids()["n02099601"] == 207
    assert list(wordnet_class_ids()) == sorted(wordnet_class_ids())  # so that sorted folders are numbered alike


def test_an_unknown_class_is_one_sentence_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="there is no class 'golden retreiver'; did you mean 'golden retriever'"):
        imagenet_labels().number("golden retreiver")
    with pytest.raises(ConfigError, match="there is no class 1000; expected a number from 0 to 999"):
        imagenet_labels().number("1000")
    with pytest.raises(ConfigError, match=r"'dog' is no class; expected a number from 0 to 9, .* set data.say=number"):
        make_class_labels(10).number("dog")


def test_a_name_that_two_classes_have_asks_for_a_number() -> None:
    with pytest.raises(ConfigError, match="'crane' is what the classes 134, 517 are called; give the number of one"):
        imagenet_labels().number("crane")
    assert imagenet_labels().number("crayfish") == 124  # the usual name of one, another of the spiny lobster


def test_own_names_count_as_given() -> None:
    assert make_class_labels(2, ("cat", "dog")) == ClassLabels(2, (("cat",), ("dog",)))
    assert make_class_labels(2, ("cat", "dog")).number("a picture of the dog") == 1
    with pytest.raises(ValueError, match="'names' has 1 and there are 2 classes"):
        make_class_labels(2, ("cat",))
