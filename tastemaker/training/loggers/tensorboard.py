"""TensorBoard: metrics and samples; videos are animated."""

from __future__ import annotations

import importlib
from typing import Any

from ...core.registry import ConfigError
from ...data.image_io import encode_gif, make_contact_sheet, make_grid
from ..events import Event, GuardChecked, SamplesGenerated, TrainingStarted
from .logger import logged_metrics


class TensorBoardLogger:
    """Writes into the directory of the run; a resumed run replaces the steps that it repeats."""

    def __init__(self) -> None:
        try:
            self._open = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            advice = "run `pip install tensorboard`, or remove tensorboard from loggers"
            raise ConfigError(f"loggers: the package tensorboard is missing ({error}); {advice} [TM275]") from error
        self._writer: Any = None

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self.close()
            self._writer = self._open(str(event.directory / "tensorboard"), purge_step=event.step + 1)
        for name, value in logged_metrics(event).items():
            self._writer.add_scalar(name, value, event.step)
        if isinstance(event, SamplesGenerated) and event.pixels.shape[1] > 1:
            self._add_clips(event)
        elif isinstance(event, SamplesGenerated):
            self._writer.add_image(
                "samples", make_contact_sheet(event.pixels_with_sources(), event.prompts).numpy(), event.step
            )
        if isinstance(event, GuardChecked) and event.warning:
            self._writer.add_text("guard/warning", event.warning, event.step)

    def _add_clips(self, event: SamplesGenerated) -> None:
        """Add a grid of videos as an animated GIF; `add_video` would need the package moviepy for the same."""
        schema = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        grid = make_grid(event.pixels_with_sources(), captions=event.prompts)
        image = schema.Summary.Image(
            height=grid.shape[-2], width=grid.shape[-1], colorspace=3, encoded_image_string=encode_gif(grid)
        )
        summary = schema.Summary(value=[schema.Summary.Value(tag="samples", image=image)])
        self._writer.file_writer.add_summary(summary, event.step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
        self._writer = None
