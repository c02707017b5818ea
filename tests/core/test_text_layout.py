"""Text of any length and script: where it is cut, what is removed, and names of files."""

from __future__ import annotations

import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tastemaker.core.text_layout import clean_text, slugify, truncate_text, wrap_text

FAMILY, FLAG = "👨\u200d👩\u200d👧\u200d👦", "🇩🇪"


def test_text_is_cut_at_words_and_marked() -> None:
    assert wrap_text("a red cube on a green table", 12, 2, len) == ["a red cube", "on a gree..."]
    assert wrap_text("a red cube", 12, 2, len) == ["a red cube"]
    assert truncate_text("a red, blue and green cube", 12) == "a red..."
    assert truncate_text("incomprehensibilities", 10) == "incompr..."  # no word ends near
    assert wrap_text("一只红色的猫坐在桌子上", 5, 2, len) == ["一只红色的", "猫坐..."]
    assert truncate_text("קובייה אדומה על שולחן", 17) == "קובייה אדומה..."  # in reading order


def test_graphemes_stay_whole() -> None:
    assert truncate_text(FAMILY * 3, 2 * len(FAMILY) + 3 - 1) == f"{FAMILY}..."
    assert wrap_text(FLAG * 3, 3, 2, len) == [FLAG]  # a second line has no room for a flag and the ellipsis
    assert truncate_text("e\u0301" * 10, 8) == "e\u0301e\u0301..."


def test_control_characters_and_surrogates_are_removed() -> None:
    assert clean_text(" a\n\tb\x00c \x1b[31m\u2028d\r\n", 100) == ("a b c [31m d", True)
    assert clean_text("a\ud800b", 100) == ("a\ufffdb", True)
    assert clean_text("\u202egnp.exe\u2066 \u202c x", 100) == ("gnp.exe x", True)  # no reordering
    assert truncate_text("", 10) == truncate_text("\n\x00", 10) == truncate_text("abcdef", 2) == ""


@settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.text(st.characters(), max_size=80), st.integers(-3, 30), st.integers(1, 3))
def test_any_text_fits_its_lines(text: str, width: int, lines: int) -> None:
    wrapped = wrap_text(text, width, lines, len)
    assert len(wrapped) <= lines and all(0 < len(line) <= width for line in wrapped)
    "".join(wrapped).encode()
    assert not regex.search(r"\p{Cc}", "".join(wrapped))


def test_file_names_keep_letters_of_any_script_and_fit_file_systems() -> None:
    assert slugify("A red cat, twice!") == "a-red-cat-twice"
    assert slugify("一只红色的猫!") == "一只红色的猫"
    assert slugify("हिन्दी में") == "हिन्दी-में"
    assert slugify("a very long prompt about a red cube on a table") == "a-very-long-prompt-about-a-red-cube-on-a"
    assert slugify("...") == slugify("\ud800") == slugify("") == "empty"
    assert slugify("../../etc/passwd\x00") == "etc-passwd"
    for text in ("w" * 1_000_000, "\U0001d518" * 100_000, "e\u0301\u0302" * 1000, "ﷺ" * 1000):
        assert 0 < len(slugify(text).encode()) <= 120
