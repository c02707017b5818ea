"""Signs of the playground: words, rendering, data sets and their splits."""

from string import ascii_uppercase
from typing import Any

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import LikeBatch, PreferenceBatch, PromptBatch, concatenate
from tastemaker.data.dataset import DataSpec
from tastemaker.data.playground import PlaygroundPrompts, PlaygroundScenes, PlaygroundSignPrompts, PlaygroundSigns
from tastemaker.data.playground_preferences import PlaygroundLikes, PlaygroundPairs
from tastemaker.playground import signs as sign_module
from tastemaker.playground.captions import Split, parse_captions, tokenize
from tastemaker.playground.signs import WORDS, SignPainter


def rng(count: int, start: int = 0) -> Randomness:
    return Randomness(0, 0, torch.arange(start, start + count))


@pytest.fixture(scope="module")
def painter() -> SignPainter:
    return SignPainter()


def test_word_list_has_about_400_short_words() -> None:
    assert 380 <= len(set(WORDS)) == len(WORDS) <= 450
    assert all(word.isascii() and word.isalpha() and word.isupper() and 3 <= len(word) <= 6 for word in WORDS)


def test_one_fifth_of_the_words_is_held_out() -> None:
    assert 0.15 < sign_module.held_out_words().float().mean() < 0.25
    train, held_out = (set(sign_module.sample_words(rng(5000), split).tolist()) for split in ("train", "held_out"))
    assert not train & held_out and len(train | held_out) == len(WORDS)


def test_sign_prompts_have_text_metadata() -> None:
    word_ids = sign_module.sample_words(rng(50), "train")
    prompts, metadata = sign_module.sign_captions(word_ids), sign_module.sign_metadata(word_ids)
    assert prompts[0] == f'a sign that says "{metadata[0]["text"]}"'
    assert sign_module.requested_words(prompts) == tuple(entry["text"] for entry in metadata)
    assert tokenize(prompts).shape == (50, 16)
    with pytest.raises(ValueError, match=r"'a sign'.*HELLO.*TM761"):
        sign_module.requested_words(["a sign"])


def test_words_fit_on_their_sign() -> None:
    ink, spans = sign_module.render_words()
    assert len(ink) == len(WORDS) * len(sign_module.FONTS) == len(spans)
    assert (spans[:, 0] <= sign_module.WIDE).all() and (spans[:, 1] <= sign_module.HIGH).all()
    assert spans[:, 1].min() >= 8  # the height of letters in pixels; smaller ones are unreadable
    rim = torch.cat([ink[..., 0, :], ink[..., -1, :]], 2).amax(2)
    assert (rim < 128).float().mean() > 0.9


def test_signs_do_not_depend_on_the_batch(painter: SignPainter) -> None:
    word_ids = sign_module.sample_words(rng(20), "train")
    pixels = painter.paint(word_ids, rng(20))
    assert pixels.shape == (20, 1, 3, 64, 64) and pixels.min() >= 0 and pixels.max() <= 1
    assert torch.equal(pixels, torch.cat([painter.paint(word_ids[row : row + 1], rng(1, row)) for row in range(20)]))
    assert painter.paint(word_ids[:0], rng(0)).shape == (0, 1, 3, 64, 64)


def test_signs_stay_inside_the_image(painter: SignPainter) -> None:
    layout = painter.arrange(sign_module.sample_words(rng(4000), "train"), rng(4000))
    centers = torch.stack([layout.x, layout.y], 1)
    assert (centers - layout.half >= 0.5).all() and (centers + layout.half <= 63.5).all()


def test_different_words_look_different(painter: SignPainter) -> None:
    word_ids = sign_module.sample_words(rng(64), "train")
    other = sign_module.corrupt_words(word_ids, 1.0, rng(64), "train")
    assert (other != word_ids).float().mean() > 0.9 and not sign_module.held_out_words()[other].any()
    assert torch.equal(sign_module.corrupt_words(word_ids, 0.0, rng(64), "train"), word_ids)
    difference = (painter.paint(word_ids, rng(64)) - painter.paint(other, rng(64))).abs().amax((1, 2))
    assert ((difference > 0.2).flatten(1).sum(1) > 20)[other != word_ids].all()


def test_pseudowords_are_no_words() -> None:
    pseudowords = sign_module.load_lexicon()[len(WORDS) :]
    assert len(set(pseudowords)) == sign_module.NUM_PSEUDOWORDS and not set(pseudowords) & set(WORDS)
    assert {len(word) for word in pseudowords} == {3, 4, 5, 6} and set("".join(pseudowords)) == set(ascii_uppercase)
    word_ids = sign_module.sample_words(rng(4000), "held_out", pseudoword_ratio=0.5)
    assert 0.45 < (word_ids >= len(WORDS)).float().mean() < 0.55 and word_ids.max() < len(sign_module.load_lexicon())
    assert sign_module.held_out_words()[word_ids[word_ids < len(WORDS)]].all()
    painted = PlaygroundSigns(pseudoword_ratio=1.0, device="cpu").load(0).batch(0, 4, 0, 1)
    assert painted.pixels.shape == (4, 1, 3, 64, 64) and set(sign_module.requested_words(painted.prompts)) <= set(
        pseudowords
    )


def test_pseudoword_rendering_keeps_known_words(painter: SignPainter) -> None:
    word_ids = sign_module.sample_words(rng(20), "train")
    with_pseudowords = SignPainter(pseudowords=True)
    assert torch.equal(with_pseudowords.paint(word_ids, rng(20)), painter.paint(word_ids, rng(20)))
    last = with_pseudowords.arrange(torch.tensor([len(WORDS), len(sign_module.load_lexicon()) - 1]), rng(2)).ink
    assert last.tolist() == [len(WORDS) * len(sign_module.FONTS), len(with_pseudowords.ink) - 1]


SPECS: list[DataSpec] = [
    PlaygroundScenes(caption_noise=0.2, device="cpu"),
    PlaygroundScenes(split="held_out", motion=True, style="twemoji", device="cpu"),
    PlaygroundPrompts(num_prompts=64),
    PlaygroundPrompts(split="held_out", motion=True),
    PlaygroundSigns(device="cpu"),
    PlaygroundSigns(caption_noise=0.3, pool_size=30, device="cpu"),
    PlaygroundSignPrompts(),
    PlaygroundPairs(device="cpu"),
    PlaygroundLikes(split="held_out", snap_probability=0.5, device="cpu"),
]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, PromptBatch):
        return bool(one == other)
    values, others = (vars(each).values() for each in (one, other))
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(values, others, strict=True)
    )


@pytest.mark.parametrize(("spec", "world_size"), [(SPECS[0], 2), *((spec, 3) for spec in SPECS)])
def test_rank_shards_concatenate_to_the_batch(spec: DataSpec, world_size: int) -> None:
    data = spec.load(5)
    for step in (0, 2):
        batch = data.batch(step, 7, 0, 1)
        assert isinstance(batch, spec.batch_type) and len(batch) == 7
        assert equal(concatenate([data.batch(step, 7, rank, world_size) for rank in range(world_size)]), batch)
    assert not equal(data.batch(0, 7, 0, 1), data.batch(1, 7, 0, 1))
    assert equal(spec.load(5).batch(2, 7, 0, 1), data.batch(2, 7, 0, 1))


def test_pairs_and_likes_are_scenes_with_and_without_a_contradiction() -> None:
    right, wrong = (PlaygroundScenes(caption_noise=noise, device="cpu").load(5).batch(1, 6, 0, 1) for noise in (0, 1))
    pairs = PlaygroundPairs(device="cpu").load(5).batch(1, 6, 0, 1)
    assert isinstance(pairs, PreferenceBatch) and pairs.prompts == right.prompts
    assert torch.equal(pairs.chosen, right.pixels) and torch.equal(pairs.rejected, wrong.pixels)
    assert (pairs.chosen - pairs.rejected).abs().flatten(1).amax(1).min() > 0.1
    likes = PlaygroundLikes(device="cpu").load(5).batch(1, 6, 0, 1)
    assert isinstance(likes, LikeBatch) and likes.prompts == right.prompts
    assert likes.liked.tolist() == [True, False] * 3
    assert torch.equal(likes.pixels, right.pixels.where(likes.liked.view(-1, 1, 1, 1, 1), wrong.pixels))


def test_wrong_labels_swap_the_scenes_of_likes_and_pairs() -> None:
    pairs, wrong = (PlaygroundPairs(device="cpu", label_noise=noise).load(5).batch(1, 6, 0, 1) for noise in (0, 1))
    assert isinstance(pairs, PreferenceBatch) and isinstance(wrong, PreferenceBatch)
    assert torch.equal(wrong.chosen, pairs.rejected) and torch.equal(wrong.rejected, pairs.chosen)
    likes, half = (PlaygroundLikes(device="cpu", label_noise=noise).load(5).batch(1, 32, 0, 1) for noise in (0, 0.5))
    assert isinstance(likes, LikeBatch) and isinstance(half, LikeBatch) and torch.equal(likes.liked, half.liked)
    changed = (likes.pixels != half.pixels).flatten(1).any(1)
    assert 4 < changed[likes.liked].sum() < 12 and 4 < changed[~likes.liked].sum() < 12


@pytest.mark.parametrize("spec", SPECS)
def test_first_prompts_are_deterministic(spec: DataSpec) -> None:
    first = spec.load(5).first_prompts(8)
    assert (
        isinstance(first, PromptBatch)
        and first == spec.load(5).first_prompts(8)
        and len(first.metadata) == len(first) == 8
    )
    assert len(spec.load(5)) > 0


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_data_belongs_to_its_split(split: Split) -> None:
    for spec in (PlaygroundScenes(split=split, device="cpu"), PlaygroundPrompts(split=split)):
        captions = parse_captions(spec.load(0).batch(0, 150, 0, 1).prompts)
        assert (captions.held_out() == (split == "held_out"))[captions.task != 0].all()


def test_prompts_have_geneval_metadata_and_motion() -> None:
    still = PlaygroundPrompts().load(0).batch(0, 20, 0, 1)
    assert parse_captions(still.prompts).metadata() == still.metadata
    moving = PlaygroundPrompts(motion=True).load(0).batch(0, 20, 0, 1)
    for prompt, metadata in zip(moving.prompts, moving.metadata, strict=True):
        assert prompt == metadata["prompt"] and prompt.endswith(metadata["motion"])


def test_videos_have_eight_frames_and_images_one() -> None:
    assert PlaygroundScenes(device="cpu").load(0).batch(0, 3, 0, 1).pixels.shape == (3, 1, 3, 64, 64)
    assert PlaygroundScenes(motion=True, device="cpu").load(0).batch(0, 3, 0, 1).pixels.shape == (3, 8, 3, 64, 64)


@pytest.mark.parametrize(
    ("spec", "settings", "pattern"),
    [
        (PlaygroundScenes, {"caption_noise": 1.5}, r"'caption_noise'.* got 1.5"),
        (PlaygroundScenes, {"snap_probability": -1.0}, r"'snap_probability'.* got -1.0"),
        (PlaygroundPairs, {"snap_probability": -1.0}, r"'snap_probability'.* got -1.0"),
        (PlaygroundLikes, {"task_weights": (0.0,) * 6}, "'task_weights'.* single_object"),
        (PlaygroundScenes, {"task_weights": (0.0,) * 6}, "'task_weights'.* single_object"),
        (PlaygroundPrompts, {"task_weights": (-1.0, 1, 1, 1, 1, 1)}, "'task_weights'.* single_object"),
        (PlaygroundPrompts, {"num_prompts": 0}, "num_prompts"),
        (PlaygroundSigns, {"caption_noise": -0.1}, r"'caption_noise'.* got -0.1"),
        (PlaygroundSigns, {"pseudoword_ratio": 2.0}, r"'pseudoword_ratio'.* got 2.0"),
    ],
)
def test_invalid_settings_are_refused(spec: Any, settings: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        spec(**settings)
