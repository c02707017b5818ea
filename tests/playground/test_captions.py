"""Captions of the playground: sentences, parsing, metadata, sampling, splits and tokens."""

from dataclasses import fields

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import concatenate, select_rows
from tastemaker.playground import captions as world
from tastemaker.playground.art import CLASSES
from tastemaker.playground.captions import (
    MOTIONS,
    POSITION,
    TASKS,
    VOCABULARY,
    WEIGHTS,
    SceneCaptions,
    Split,
    parse_captions,
    sample_captions,
    sample_split_captions,
    tokenize,
)


def rng(count: int, seed: int = 0, start: int = 0) -> Randomness:
    return Randomness(seed, 0, torch.arange(start, start + count))


def captions_equal(one: SceneCaptions, other: SceneCaptions) -> bool:
    return all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(SceneCaptions))


def test_sentences_match_geneval() -> None:
    texts = [
        "a photo of a car",
        "a photo of an umbrella and an elephant",
        "a photo of three clocks",
        "a photo of an orange car",
        "a photo of a dog left of a cat",
        "a photo of a red cake and a blue book",
        "a photo of a wine glass above a teddy bear",
    ]
    assert parse_captions(texts).texts() == tuple(texts)
    assert parse_captions(texts).task.tolist() == [0, 1, 2, 3, 4, 5, 4]


@pytest.mark.parametrize(
    ("singular", "plural"),
    [
        *(("sheep", "sheep"), ("bus", "buses"), ("couch", "couches"), ("person", "people"), ("scissors", "scissors")),
        *(("wine glass", "wine glasses"), ("sports ball", "sports balls"), ("vase", "vases"), ("tv", "tvs")),
    ],
)
def test_plurals_are_parsed_and_written(singular: str, plural: str) -> None:
    caption = parse_captions([f"a photo of two {plural}"])
    assert CLASSES[int(caption.first)] == singular and caption.texts() == (f"a photo of two {plural}",)


def test_captions_round_trip_through_text() -> None:
    captions = sample_captions(rng(10_000))
    assert captions_equal(parse_captions(captions.texts()), captions)


def test_motion_suffix_is_ignored_when_parsing() -> None:
    captions = sample_captions(rng(60))
    moving = [f"{text} {MOTIONS[i % len(MOTIONS)]}" for i, text in enumerate(captions.texts())]
    assert captions_equal(parse_captions(moving), captions)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a photo of", "a photo of a unicorn", "a photo of five dogs", "a photo of two dog", "a photo of a dogs"),
        *("a photo of a dog and a dog", "a photo of a red dog and a cat", "a photo of a red dog left of a blue cat"),
        *("a photo of a dog under a cat", "a photo of a dog.", "a photo of an orange", "a photo of a red dog and"),
    ],
)
def test_invalid_caption_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_captions([text])
    assert str(error.value).startswith(f"'{text}'") and "caption of the playground" in str(error.value)


def test_metadata_matches_geneval() -> None:
    expected = {
        "a photo of a car": {"tag": "single_object", "include": [{"class": "car", "count": 1}]},
        "a photo of a car and a cup": {
            "tag": "two_object",
            "include": [{"class": "car", "count": 1}, {"class": "cup", "count": 1}],
        },
        "a photo of three clocks": {
            "tag": "counting",
            "include": [{"class": "clock", "count": 3}],
            "exclude": [{"class": "clock", "count": 4}],
        },
        "a photo of a red car": {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "red"}]},
        "a photo of a dog left of a cat": {
            "tag": "position",
            "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
        },
        "a photo of a red cake and a blue book": {
            "tag": "color_attr",
            "include": [{"class": "cake", "count": 1, "color": "red"}, {"class": "book", "count": 1, "color": "blue"}],
        },
    }
    assert parse_captions(list(expected)).metadata() == tuple({**row, "prompt": text} for text, row in expected.items())


def test_tasks_follow_their_weights() -> None:
    frequencies = torch.bincount(sample_captions(rng(20_000)).task, minlength=6) / 20_000
    # Four standard errors of a frequency of one fifth among 20,000.
    assert (frequencies - torch.tensor(WEIGHTS)).abs().max() < 4 * (0.2 * 0.8 / 20_000) ** 0.5
    for task in range(6):
        only = sample_captions(rng(500), [float(task == k) for k in range(6)])
        assert (only.task == task).all()


@pytest.mark.parametrize("weights", [(1, 1), (0,) * 6, (1, 1, 1, 1, 1, -1)])
def test_invalid_task_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"weights of the tasks.*TM755"):
        sample_captions(rng(1), weights)


def test_two_objects_and_two_colors_always_differ() -> None:
    captions = sample_captions(rng(20_000))
    pair = captions.has_two_objects()
    assert (captions.first != captions.second)[pair].all() and (captions.first == captions.second)[~pair].all()
    assert (captions.first_color != captions.second_color)[captions.task == 5].all()


def test_one_fifth_of_every_task_but_the_first_is_held_out() -> None:
    for task in range(6):
        held_out = sample_captions(rng(20_000), [float(task == k) for k in range(6)]).held_out().float().mean()
        assert held_out == 0 if task == 0 else 0.18 < held_out < 0.22


def swap_objects(captions: SceneCaptions) -> SceneCaptions:
    """The captions with their two objects in the opposite order; captions of one object stay as they are."""
    relation = torch.where(captions.task == POSITION, captions.relation ^ 1, captions.relation)
    objects = (captions.second, captions.first, captions.second_color, captions.first_color)
    other = SceneCaptions(captions.task, *objects, captions.count, relation)
    indices = torch.arange(len(captions)) + len(captions) * captions.has_two_objects()
    return select_rows(concatenate([captions, other]), indices)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_split_ignores_the_order_of_objects(split: Split) -> None:
    captions = sample_split_captions(rng(8_000), split)
    not_single = captions.task != 0
    for variant in (captions, swap_objects(captions)):
        assert (variant.held_out() == (split == "held_out"))[not_single].all()
    assert torch.equal(captions.task, sample_captions(rng(8_000)).task)  # the split changes no task


def test_splits_share_no_caption() -> None:
    task_weights = (0, *WEIGHTS[1:])
    train, held_out = (sample_split_captions(rng(8_000), split, task_weights) for split in ("train", "held_out"))
    assert not {*train.texts(), *swap_objects(train).texts()} & {*held_out.texts(), *swap_objects(held_out).texts()}


def test_captions_do_not_depend_on_the_batch() -> None:
    batched = sample_split_captions(rng(64), "held_out")
    single = concatenate([sample_split_captions(rng(1, start=row), "held_out") for row in range(64)])
    assert captions_equal(batched, single) and captions_equal(batched, sample_split_captions(rng(64), "held_out"))
    assert not captions_equal(batched, sample_split_captions(rng(64, seed=1), "held_out"))
    assert captions_equal(
        sample_split_captions(rng(10), "train"), select_rows(sample_split_captions(rng(64), "train"), torch.arange(10))
    )
    assert len(sample_split_captions(rng(0), "train")) == 0


def test_every_caption_has_a_unique_tokenization() -> None:
    captions = sample_captions(rng(10_000))
    moving = [f"{text} {MOTIONS[i % len(MOTIONS)]}" for i, text in enumerate(captions.texts())]
    ids = tokenize(moving)
    assert ids.shape == (10_000, 16) and ids.max() < len(VOCABULARY) and not (ids == 1).any()
    assert len(set(map(tuple, ids.tolist()))) == len(set(moving))  # tokens lose nothing


def test_tokens_are_phrases() -> None:
    text = "a photo of an orange teddy bear and a blue wine glass turning"
    tokens = [VOCABULARY[token_id] for token_id in tokenize([text])[0].tolist() if token_id]
    assert tokens == ["a photo of", "a", "orange", "teddy bear", "and", "a", "blue", "wine glass", "turning"]
    assert torch.equal(tokenize(["a photo of two buses"])[0, 2], tokenize(["a photo of a bus"])[0, 2])


def test_quoted_word_is_tokenized_by_letter() -> None:
    tokens = [VOCABULARY[token_id] for token_id in tokenize(['a sign that says "HELLO"'])[0].tolist() if token_id]
    assert tokens == ["a sign that says", "H", "E", "L", "L", "O"]


def test_empty_prompt_is_one_null_token() -> None:
    assert tokenize([""], 4).tolist() == [[1, 0, 0, 0]] and VOCABULARY[:2] == ("<pad>", "<null>")
    assert tokenize([], 4).shape == (0, 4)


def test_unknown_words_and_long_texts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'giraff'.*'giraffe'.*TM753"):
        tokenize(["a photo of a giraff"])
    with pytest.raises(ValueError, match=r"has 4 tokens.*TM754"):
        tokenize(["a photo of a red car"], 3)


def test_vocabulary_has_no_duplicates() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) and world.TASKS == TASKS
