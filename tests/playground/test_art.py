"""Sprites of the playground: classes, colors, styles and license files."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tastemaker.playground.art import ART, CLASSES, COLORS, MIN_ALPHA, Style, build_atlas, load_sprites, sprite_extents

STYLES: tuple[Style, ...] = ("noto", "twemoji")


def test_art_has_48_classes_and_ten_colors() -> None:
    assert len(set(CLASSES)) == 48
    assert list(COLORS) == ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
    assert not set(CLASSES) & set(COLORS)  # orange is a color here, not a fruit


@pytest.mark.parametrize("style", STYLES)
def test_sprites_fill_their_square(style: Style) -> None:
    sprites = load_sprites(style)
    assert sprites.shape == (48, 4, 32, 32) and sprites.min() == 0 and sprites.max() == 1
    assert sprite_extents(style).amax(1).min() > 0.9 and sprite_extents(style).max() <= 1


def test_styles_differ() -> None:
    assert (load_sprites("noto") - load_sprites("twemoji")).abs().flatten(1).mean(1).min() > 0.02


@pytest.mark.parametrize("style", STYLES)
def test_atlas_has_premultiplied_alpha(style: Style) -> None:
    pages = build_atlas(style, "cpu")
    assert pages.shape == (48, 11, 4, 32, 32)
    assert (pages[:, :, :3] <= pages[:, :, 3:] + 1e-6).all()
    assert torch.equal(pages[:, 0, 3], load_sprites(style)[:, 3]) and torch.equal(pages[:, 5, 3], pages[:, 0, 3])


@pytest.mark.parametrize("style", STYLES)
def test_dyed_sprites_are_nearest_to_their_color(style: Style) -> None:
    """The median color of every dyed sprite is nearer to the requested color than to any of the other nine."""
    pages, palette = build_atlas(style, "cpu"), torch.tensor(list(COLORS.values()))
    correct = 0
    for class_pages in pages:
        opaque = class_pages[0, 3] > MIN_ALPHA
        for color, page in enumerate(class_pages[1:]):
            median = (page[:3] / page[3:].clamp(min=1e-3))[:, opaque].median(1).values
            correct += int((palette - median).norm(dim=1).argmin()) == color
    assert correct == 480


def test_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fluent'.*noto, twemoji.*TM751"):
        load_sprites("fluent")  # type: ignore[arg-type]


def test_art_files_are_small_and_credited() -> None:
    credits = (ART / "CREDITS.md").read_text(encoding="utf-8")
    for style in STYLES:
        assert (ART / f"{style}.npz").stat().st_size <= 200_000 and f"{style}.npz" in credits
        with np.load(ART / f"{style}.npz", allow_pickle=False) as file:
            assert file["sprites"].dtype == np.uint8 and tuple(file["names"].tolist()) == CLASSES
    fonts = list((ART / "fonts").glob("*.ttf"))
    assert len(fonts) == 6 and sum(font.stat().st_size for font in fonts) <= 400_000
    for license_name in ("Apache-2.0", "OFL-1.1", "Bitstream-Vera"):
        assert f"LICENSE-{license_name}.txt" in credits and (ART / f"LICENSE-{license_name}.txt").is_file()


def test_sprites_of_classes_differ() -> None:
    for style in STYLES:
        assert len({hashlib.sha256(sprite.numpy().tobytes()).hexdigest() for sprite in load_sprites(style)}) == 48


def test_art_tool_lists_the_same_classes() -> None:
    source = (Path(__file__).parents[2] / "tools/make_sprites.py").read_text(encoding="utf-8")
    assert all(f'    "{name}": "' in source for name in CLASSES)
