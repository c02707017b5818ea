"""samples/step-000050.png, or .mp4 for clips."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..pictures import grid, save_picture
from ..train.events import Event, Sampled, Started


class Grids:
    """Writes the samples of a step side by side, each above its prompt."""

    def __init__(self, clips: Literal["mp4", "gif"] = "mp4") -> None:
        self._clips = clips
        self._directory = Path()

    def see(self, event: Event) -> None:
        if isinstance(event, Started):
            self._directory = event.directory / "samples"
        elif isinstance(event, Sampled):
            suffix = "png" if event.pixels.shape[1] == 1 else self._clips
            path = self._directory / f"step-{event.step:06d}.{suffix}"
            save_picture(grid(event.pixels, captions=event.prompts), path)

    def close(self) -> None:
        return None
