"""Grids of samples: samples/step-000050.png, or .mp4 for videos if PyAV is installed, with a JSON description.

Sources of edits stand to the left of their sample.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ...data.image_io import grid_boxes, grid_upscale, make_grid, save_image, video_suffix
from ..events import Event, SamplesGenerated, TrainingFinished, TrainingStarted


class SampleGridLogger:
    """Writes the samples of a step into one image or video, each above its prompt.

    A thread encodes and writes them, so that training goes on. Everything is written before the run ends, and at most
    one grid waits. A failure is raised by a later call.
    """

    def __init__(self, video_format: Literal["mp4", "gif", "png"] | None = None) -> None:
        self._clips = video_format or video_suffix()
        self._directory = Path()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sample-grids")
        self._writing: Future[None] | None = None

    def log(self, event: Event) -> None:
        if isinstance(event, (SamplesGenerated, TrainingFinished)) or (self._writing and self._writing.done()):
            self._finish()
        if isinstance(event, TrainingStarted):
            self._directory = event.directory / "samples"
        elif isinstance(event, SamplesGenerated):
            self._writing = self._thread.submit(self._write, event, self._directory)

    def close(self) -> None:
        try:
            self._finish()
        finally:
            self._thread.shutdown()

    def _finish(self) -> None:
        """Wait until the last grid is written; raise if that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, event: SamplesGenerated, directory: Path) -> None:
        suffix = "png" if event.pixels.shape[1] == 1 else self._clips
        path = directory / f"step-{event.step:06d}.{suffix}"
        save_image(make_grid(event.pixels_with_sources(), captions=event.prompts), path)
        path.with_suffix(".json").write_text(json.dumps(_grid_metadata(event, path.name), indent=1), encoding="utf-8")


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
