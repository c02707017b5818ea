import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tastemaker.playground.art import ART, CLASSES, COLORS, SHOWS, Style, atlas, extents, sprites

STYLES: tuple[Style, ...] = ("noto", "twemoji")


def test_there_are_48_things_and_genevals_ten_colours() -> None:
    assert len(set(CLASSES)) == 48
    assert list(COLORS) == ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
    assert not set(CLASSES) & set(COLORS)  # an orange is a fruit elsewhere


@pytest.mark.parametrize("style", STYLES)
def test_every_thing_fills_its_square_in_one_direction(style: Style) -> None:
    pictures = sprites(style)
    assert pictures.shape == (48, 4, 32, 32) and pictures.min() == 0 and pictures.max() == 1
    assert extents(style).amax(1).min() > 0.9 and extents(style).max() <= 1


def test_the_two_styles_are_two() -> None:
    assert (sprites("noto") - sprites("twemoji")).abs().flatten(1).mean(1).min() > 0.02


@pytest.mark.parametrize("style", STYLES)
def test_the_atlas_is_dyed_and_premultiplied(style: Style) -> None:
    pages = atlas(style, "cpu")
    assert pages.shape == (48, 11, 4, 32, 32)
    assert (pages[:, :, :3] <= pages[:, :, 3:] + 1e-6).all()
    assert torch.equal(pages[:, 0, 3], sprites(style)[:, 3]) and torch.equal(pages[:, 5, 3], pages[:, 0, 3])


@pytest.mark.parametrize("style", STYLES)
def test_what_is_dyed_is_nearest_to_its_own_colour(style: Style) -> None:
    """The middle shade of every thing lies nearer to the colour asked for than to any other of the ten."""
    pages, wanted = atlas(style, "cpu"), torch.tensor(list(COLORS.values()))
    right = 0
    for thing in pages:
        shows = thing[0, 3] > SHOWS
        for place, page in enumerate(thing[1:]):
            shade = (page[:3] / page[3:].clamp(min=1e-3))[:, shows].median(1).values
            right += int((wanted - shade).norm(dim=1).argmin()) == place
    assert right == 480


def test_an_unknown_style_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="no drawing style is called 'fluent'; expected one of noto, twemoji"):
        sprites("fluent")  # type: ignore[arg-type]


def test_the_files_are_small_plain_and_credited() -> None:
    credits = (ART / "CREDITS.md").read_text(encoding="utf-8")
    for style in STYLES:
        assert (ART / f"{style}.npz").stat().st_size <= 200_000 and f"{style}.npz" in credits
        with np.load(ART / f"{style}.npz", allow_pickle=False) as file:
            assert file["sprites"].dtype == np.uint8 and tuple(file["names"].tolist()) == CLASSES
    fonts = list((ART / "fonts").glob("*.ttf"))
    assert len(fonts) == 6 and sum(font.stat().st_size for font in fonts) <= 400_000
    for licence in ("Apache-2.0", "OFL-1.1", "Bitstream-Vera"):
        assert f"LICENSE-{licence}.txt" in credits and (ART / f"LICENSE-{licence}.txt").is_file()


def test_no_two_things_are_one_picture() -> None:
    for style in STYLES:
        assert len({hashlib.sha256(picture.numpy().tobytes()).hexdigest() for picture in sprites(style)}) == 48


def test_the_tool_lists_the_same_things() -> None:
    source = (Path(__file__).parents[2] / "tools/make_sprites.py").read_text(encoding="utf-8")
    assert all(f'    "{name}": "' in source for name in CLASSES)
