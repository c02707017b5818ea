"""Trackio: metrics and samples in a local database, or in a Hugging Face Space if TRACKIO_SPACE_ID is set."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ...core.registry import ConfigError
from ...data.image_io import make_contact_sheet, to_uint8
from ..events import Event, GuardChecked, SamplesGenerated, TrainingStarted
from .logger import logged_metrics


class TrackioLogger:
    """Logs metrics and samples to a project, under the name of the run's directory; a resumed run continues there."""

    def __init__(self, project: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            self._trackio = importlib.import_module("trackio")
        except ImportError as error:
            advice = "run `pip install trackio`, or remove trackio from loggers"
            raise ConfigError(f"loggers: the package trackio is missing ({error}); {advice} [TM276]") from error
        self._project, self._config = project, dict(config or {})
        self._started = False

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self.close()
            self._trackio.init(project=self._project, name=event.directory.name, config=self._config, resume="allow")
            self._started = True
            return
        values: dict[str, Any] = dict(logged_metrics(event))
        if isinstance(event, SamplesGenerated):
            values["samples"] = self._trackio.Image(to_uint8(make_contact_sheet(event.pixels, event.prompts)))
        if isinstance(event, GuardChecked) and event.warning:
            values["guard/warning"] = event.warning
        if values:
            self._trackio.log(values, step=event.step)

    def close(self) -> None:
        if self._started:
            self._trackio.finish()
        self._started = False
