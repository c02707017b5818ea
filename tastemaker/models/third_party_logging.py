"""Silence the logging and progress bars of diffusers and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Hide progress bars and log messages of diffusers and transformers within the block."""
    from diffusers.utils import logging as first
    from transformers.utils import logging as second

    libraries: list[Any] = [first, second]
    before = [(told, told.get_verbosity(), told.is_progress_bar_enabled()) for told in libraries]
    for told in libraries:
        told.set_verbosity_error()
        told.disable_progress_bar()
    try:
        yield
    finally:
        for told, verbosity, bars in before:
            told.set_verbosity(verbosity)
            if bars:
                told.enable_progress_bar()
