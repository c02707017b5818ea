"""How many of something there are, in words."""

from __future__ import annotations


def pluralize(count: int, word: str = "picture") -> str:
    """A number and what is counted, one or several."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
