"""Weights & Biases: metrics and samples; offline unless WANDB_MODE is set."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...core.registry import ConfigError
from ...core.text_layout import truncate_text
from ...data.image_io import make_contact_sheet, save_image, to_uint8, video_suffix
from ..events import Event, GuardChecked, SamplesGenerated, TrainingStarted
from .logger import logged_metrics

MAX_CAPTION_CHARACTERS = 2000


class WandbLogger:
    """Logs metrics and samples to a project; a resumed run keeps its id."""

    def __init__(self, project: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            advice = "run `pip install wandb`, or remove wandb from loggers"
            raise ConfigError(f"loggers: the package wandb is missing ({error}); {advice} [TM277]") from error
        self._project, self._config = project, dict(config or {})
        self._run: Any = None

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self._start(event.directory)
            return
        values: dict[str, Any] = dict(logged_metrics(event))
        if isinstance(event, SamplesGenerated) and event.pixels.shape[1] > 1:
            self._log_clips(event, values)
            return
        if isinstance(event, SamplesGenerated):
            values["samples"] = self._wandb.Image(
                to_uint8(make_contact_sheet(event.pixels_with_sources(), event.prompts))
            )
        if isinstance(event, GuardChecked) and event.warning:
            values["guard/warning"] = event.warning
        if values:
            self._run.log({**values, "step": event.step})

    def _log_clips(self, event: SamplesGenerated, values: Mapping[str, Any]) -> None:
        """Log each video with its prompt. From files, because wandb encodes arrays with the package moviepy only."""
        suffix = "mp4" if video_suffix() == "mp4" else "gif"
        with TemporaryDirectory() as folder:
            clips = []
            for index, (pixels, prompt) in enumerate(zip(event.pixels, event.prompts, strict=True)):
                path = Path(folder) / f"{index:03d}.{suffix}"
                save_image(pixels, path)
                caption = truncate_text(prompt, MAX_CAPTION_CHARACTERS)
                clips.append(self._wandb.Video(str(path), caption=caption, format=suffix))
            self._run.log({**values, "samples": clips, "step": event.step})  # copies the files

    def close(self) -> None:
        if self._run:
            self._run.finish()
        self._run = None

    def _start(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=self._project,
            name=directory.name,
            id=_run_id(directory / "wandb-id"),
            resume="allow",
            dir=str(directory),
            config=self._config,
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=self._wandb.Settings(console="off"),  # or it records every frame of the progress display
        )
        # Plotted over our own step: wandb's rejects the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")


def _run_id(path: Path) -> str:
    """Return the id in a file, or write a new one."""
    if not path.exists() or not path.read_text():  # a kill can leave it empty
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
