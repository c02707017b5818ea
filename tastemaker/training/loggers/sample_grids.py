"""Grids of samples: samples/step-000050.png, or .mp4 for videos if PyAV is installed, with a JSON description.

Sources of edits stand to the left of their sample.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from ...data.image_io import grid_boxes, grid_upscale, make_grid, save_image, video_suffix
from ..events import Event, SamplesGenerated, TrainingStarted


class SampleGridLogger:
    """Writes the samples of a step into one image or video, each above its prompt."""

    def __init__(self, video_format: Literal["mp4", "gif", "png"] | None = None) -> None:
        self._clips = video_format or video_suffix()
        self._directory = Path()

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self._directory = event.directory / "samples"
        elif isinstance(event, SamplesGenerated):
            suffix = "png" if event.pixels.shape[1] == 1 else self._clips
            path = self._directory / f"step-{event.step:06d}.{suffix}"
            save_image(make_grid(event.pixels_with_sources(), captions=event.prompts), path)
            path.with_suffix(".json").write_text(
                json.dumps(_grid_metadata(event, path.name), indent=1), encoding="utf-8"
            )

    def close(self) -> None:
        return None


def _grid_metadata(event: SamplesGenerated, file: str) -> dict[str, Any]:
    """Return the prompts and scores of a grid, and the boxes of each sample and of its sources in it."""
    count, frames, _, height, width = event.pixels.shape
    num_sources = 0 if event.sources is None else event.sources.shape[1]
    scale = grid_upscale(height, width * (num_sources + 1))
    cells = [
        [(left + i * width * scale, top, left + (i + 1) * width * scale, bottom) for i in range(num_sources + 1)]
        for left, top, _, bottom in grid_boxes(count, height, width * (num_sources + 1))
    ]
    return {
        "step": event.step,
        "file": file,
        "prompts": event.prompts,
        "scores": {name: score if math.isfinite(score) else None for name, score in event.scores.items()},
        "frames": frames,
        "size": [width, height],
        "enlarged": scale,
        "boxes": [boxes[-1] for boxes in cells],
        **({"source_boxes": [boxes[:-1] for boxes in cells]} if num_sources else {}),
    }
