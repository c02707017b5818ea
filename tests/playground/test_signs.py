from string import ascii_uppercase
from typing import Any

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import ImageBatch, PromptBatch, concatenate
from tastemaker.data.dataset import DataSpec
from tastemaker.data.playground import PlaygroundPrompts, PlaygroundScenes, PlaygroundSignPrompts, PlaygroundSigns
from tastemaker.playground import signs as words
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


def test_a_fifth_of_the_words_is_held_out() -> None:
    assert 0.15 < words.held_out_words().float().mean() < 0.25
    train, held = (set(words.sample_words(rng(5000), split).tolist()) for split in ("train", "held_out"))
    assert not train & held and len(train | held) == len(WORDS)


def test_sign_prompts_have_text_metadata() -> None:
    drawn = words.sample_words(rng(50), "train")
    prompts, metadata = words.sign_captions(drawn), words.sign_metadata(drawn)
    assert prompts[0] == f'a sign that says "{metadata[0]["text"]}"'
    assert words.requested_words(prompts) == tuple(fact["text"] for fact in metadata)
    assert tokenize(prompts).shape == (50, 16)
    with pytest.raises(ValueError, match="'a sign' describes no sign; expected 'a sign that says \"HELLO\"'"):
        words.requested_words(["a sign"])


def test_words_fit_on_their_sign() -> None:
    ink, spans = words.render_words()
    assert len(ink) == len(WORDS) * len(words.FONTS) == len(spans)
    assert (spans[:, 0] <= words.WIDE).all() and (spans[:, 1] <= words.HIGH).all()
    assert spans[:, 1].min() >= 8  # pixels a letter is high, less than which nobody reads
    rim = torch.cat([ink[..., 0, :], ink[..., -1, :]], 2).amax(2)
    assert (rim < 128).float().mean() > 0.9


def test_signs_do_not_depend_on_the_batch(painter: SignPainter) -> None:
    drawn = words.sample_words(rng(20), "train")
    pixels = painter.paint(drawn, rng(20))
    assert pixels.shape == (20, 1, 3, 64, 64) and pixels.min() >= 0 and pixels.max() <= 1
    assert torch.equal(pixels, torch.cat([painter.paint(drawn[row : row + 1], rng(1, row)) for row in range(20)]))
    assert painter.paint(drawn[:0], rng(0)).shape == (0, 1, 3, 64, 64)


def test_signs_stay_inside_the_image(painter: SignPainter) -> None:
    signs = painter.arrange(words.sample_words(rng(4000), "train"), rng(4000))
    centres = torch.stack([signs.x, signs.y], 1)
    assert (centres - signs.half >= 0.5).all() and (centres + signs.half <= 63.5).all()


def test_different_words_look_different(painter: SignPainter) -> None:
    drawn = words.sample_words(rng(64), "train")
    other = words.corrupt_words(drawn, 1.0, rng(64), "train")
    assert (other != drawn).float().mean() > 0.9 and not words.held_out_words()[other].any()
    assert torch.equal(words.corrupt_words(drawn, 0.0, rng(64), "train"), drawn)
    difference = (painter.paint(drawn, rng(64)) - painter.paint(other, rng(64))).abs().amax((1, 2))
    assert ((difference > 0.2).flatten(1).sum(1) > 20)[other != drawn].all()


def test_pseudowords_are_no_words() -> None:
    strange = words.load_lexicon()[len(WORDS) :]
    assert len(set(strange)) == words.NUM_PSEUDOWORDS and not set(strange) & set(WORDS)
    assert {len(word) for word in strange} == {3, 4, 5, 6} and set("".join(strange)) == set(ascii_uppercase)
    drawn = words.sample_words(rng(4000), "held_out", pseudoword_ratio=0.5)
    assert 0.45 < (drawn >= len(WORDS)).float().mean() < 0.55 and drawn.max() < len(words.load_lexicon())
    assert words.held_out_words()[drawn[drawn < len(WORDS)]].all()
    painted = PlaygroundSigns(pseudoword_ratio=1.0, device="cpu").load(0).batch(0, 4, 0, 1)
    assert painted.pixels.shape == (4, 1, 3, 64, 64) and set(words.requested_words(painted.prompts)) <= set(strange)


def test_pseudoword_rendering_keeps_known_words(painter: SignPainter) -> None:
    drawn = words.sample_words(rng(20), "train")
    both = SignPainter(pseudowords=True)
    assert torch.equal(both.paint(drawn, rng(20)), painter.paint(drawn, rng(20)))
    last = both.arrange(torch.tensor([len(WORDS), len(words.load_lexicon()) - 1]), rng(2)).ink
    assert last.tolist() == [len(WORDS) * len(words.FONTS), len(both.ink) - 1]


SPECS: list[DataSpec] = [
    PlaygroundScenes(caption_noise=0.2, device="cpu"),
    PlaygroundScenes(split="held_out", motion=True, style="twemoji", device="cpu"),
    PlaygroundPrompts(num_prompts=64),
    PlaygroundPrompts(split="held_out", motion=True),
    PlaygroundSigns(device="cpu"),
    PlaygroundSigns(caption_noise=0.3, pool_size=30, device="cpu"),
    PlaygroundSignPrompts(),
]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, ImageBatch):
        return one.prompts == other.prompts and torch.equal(one.pixels, other.pixels)
    return bool(one == other)


@pytest.mark.parametrize(("spec", "world"), [(SPECS[0], 2), *((spec, 3) for spec in SPECS)])
def test_rank_shards_concatenate_to_the_batch(spec: DataSpec, world: int) -> None:
    data = spec.load(5)
    for step in (0, 2):
        whole = data.batch(step, 7, 0, 1)
        assert isinstance(whole, spec.batch_type) and len(whole) == 7
        assert equal(concatenate([data.batch(step, 7, rank, world) for rank in range(world)]), whole)
    assert not equal(data.batch(0, 7, 0, 1), data.batch(1, 7, 0, 1))
    assert equal(spec.load(5).batch(2, 7, 0, 1), data.batch(2, 7, 0, 1))


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
    for prompt, fact in zip(moving.prompts, moving.metadata, strict=True):
        assert prompt == fact["prompt"] and prompt.endswith(fact["motion"])


def test_videos_have_eight_frames_and_images_one() -> None:
    assert PlaygroundScenes(device="cpu").load(0).batch(0, 3, 0, 1).pixels.shape == (3, 1, 3, 64, 64)
    assert PlaygroundScenes(motion=True, device="cpu").load(0).batch(0, 3, 0, 1).pixels.shape == (3, 8, 3, 64, 64)


@pytest.mark.parametrize(
    ("spec", "settings", "sentence"),
    [
        (PlaygroundScenes, {"caption_noise": 1.5}, "'caption_noise' is 1.5"),
        (PlaygroundScenes, {"snap_probability": -1.0}, "'snap_probability' is -1.0"),
        (PlaygroundScenes, {"task_weights": (0.0,) * 6}, "'task_weights' .* single_object"),
        (PlaygroundPrompts, {"task_weights": (-1.0, 1, 1, 1, 1, 1)}, "'task_weights' .* single_object"),
        (PlaygroundPrompts, {"num_prompts": 0}, "num_prompts"),
        (PlaygroundSigns, {"caption_noise": -0.1}, "'caption_noise' is -0.1"),
        (PlaygroundSigns, {"pseudoword_ratio": 2.0}, "'pseudoword_ratio' is 2.0"),
    ],
)
def test_invalid_settings_are_refused(spec: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        spec(**settings)
