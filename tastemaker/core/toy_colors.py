"""RGB values of the color names that toy models, toy data and the color reward use."""

from __future__ import annotations

TOY_COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.9, 0.1),
    "blue": (0.1, 0.1, 0.9),
    "grey": (0.5, 0.5, 0.5),
    "yellow": (0.9, 0.9, 0.1),
    "black": (0.1, 0.1, 0.1),
    "white": (0.9, 0.9, 0.9),
    "purple": (0.6, 0.1, 0.8),
}
