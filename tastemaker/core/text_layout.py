"""Wrap and cut texts of any length, so that prompts from strangers can be drawn, printed and used in file names.

The work depends on the room, never on the text: at most as many characters are looked at as could fit, and the place
of each cut is found by bisection. Cuts are between grapheme clusters (what a reader sees as one character: an emoji of
five code points, a letter with its accents), at the end of a word if one is near.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence

import regex

Measure = Callable[[str], float]  # width of a text: `font.getlength` for pixels, `len` for characters

ELLIPSIS = "..."  # in every font, unlike the single character
WORD = regex.compile(r"[^\s\p{Cc}]+")
# Embeddings, overrides and isolates reorder the text that follows them, which could then read as something else.
REORDERING = regex.compile(r"[\u202a-\u202e\u2066-\u2069]+")
SURROGATE = regex.compile(r"\p{Cs}")
GRAPHEME = regex.compile(r"\X")
MAX_GRAPHEME_LENGTH = 16  # code points
NOT_IN_SLUGS = regex.compile(r"[^\p{L}\p{M}\p{N}]+")
MAX_SLUG_CHARACTERS, MAX_SLUG_BYTES = 40, 120  # file systems limit the bytes of a name to 255, some to 143


def clean_text(text: str, max_characters: int) -> tuple[str, bool]:
    """Return the beginning of a text on one line, and whether that is the whole text.

    Whitespace and control characters become single spaces, lone surrogates U+FFFD; marks that reorder text are removed.
    """
    words, room = list[str](), max_characters
    for match in WORD.finditer(text):
        if room <= 0:
            return " ".join(words), False
        start, end = match.span()
        word = SURROGATE.sub("\ufffd", REORDERING.sub("", text[start : min(end, start + room)]))
        words += [word] if word else []
        if end - start > room:
            return " ".join(words), False
        room -= end - start + 1
    return " ".join(words), True


def wrap_text(text: str, width: float, lines: int, measure: Measure) -> list[str]:
    """Return a text as at most `lines` lines that fit the width; the last ends in an ellipsis if text is left over."""
    line, is_whole = clean_text(text, max(0, int(width)) * lines + 1)
    remaining, wrapped = _split_graphemes(line), list[str]()
    while remaining:
        count = _count_fitting(remaining, width, measure)
        if count == len(remaining) and is_whole:
            return [*wrapped, "".join(remaining)]
        if len(wrapped) == lines - 1 or count in (0, len(remaining)):
            return [*wrapped, *_cut_line(remaining, width, measure)]
        count = _find_word_end(remaining, count) or count
        wrapped.append("".join(remaining[:count]))
        remaining = remaining[count + 1 if remaining[count] == " " else count :]
    return wrapped


def truncate_text(text: str, width: float, measure: Measure = len) -> str:
    """Return a text as one line that fits the width, by default in characters, with an ellipsis if it was cut."""
    return "".join(wrap_text(text, width, 1, measure))


def slugify(prompt: str) -> str:
    """Return the letters and digits at the beginning of a prompt as part of a file name, in any script."""
    beginning, _ = clean_text(prompt, 4 * MAX_SLUG_CHARACTERS)
    words = NOT_IN_SLUGS.sub(" ", unicodedata.normalize("NFC", beginning.lower()))
    bytes_per_character = MAX_SLUG_BYTES / MAX_SLUG_CHARACTERS
    lines = wrap_text(
        words, MAX_SLUG_CHARACTERS, 2, lambda text: max(len(text), len(text.encode()) / bytes_per_character)
    )
    return lines[0].replace(" ", "-") if lines else "empty"  # the second line is what was too long


def _split_graphemes(text: str) -> list[str]:
    """Return the grapheme clusters of a text; one that no script or emoji needs, such as 1,000 accents, is divided."""
    clusters: list[str] = GRAPHEME.findall(text)
    return [
        cluster[first : first + MAX_GRAPHEME_LENGTH]
        for cluster in clusters
        for first in range(0, len(cluster), MAX_GRAPHEME_LENGTH)
    ]


def _cut_line(graphemes: Sequence[str], width: float, measure: Measure) -> list[str]:
    """Return the beginning of a line and an ellipsis; no line if there is no room for that."""
    count = _count_fitting(graphemes, width, measure, ELLIPSIS)
    word_end = _find_word_end(graphemes, count)
    count = word_end if word_end > count // 2 else count
    return ["".join(graphemes[:count]).rstrip(" ,;:") + ELLIPSIS] if count else []


def _count_fitting(graphemes: Sequence[str], width: float, measure: Measure, end: str = "") -> int:
    """Return how many graphemes fit the width together with `end`, measuring a logarithmic number of times."""
    fits = bisect_right(range(len(graphemes) + 1), width, key=lambda count: measure("".join(graphemes[:count]) + end))
    return max(0, fits - 1)


def _find_word_end(graphemes: Sequence[str], count: int) -> int:
    """Return the last end of a word within the first `count` graphemes; 0 if there is none."""
    return next((i for i in range(min(count, len(graphemes) - 1), 0, -1) if graphemes[i] == " "), 0)
