"""Save a checkpoint when a run fails between two steps, for example if a reward server does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..core.registry import ConfigError
from .engine import Engine, TrainingError
from .events import CheckpointSaved, Event, StepCompleted


class ResumableRun(Protocol):
    """A run that can be saved between two steps."""

    engine: Engine
    start: int
    whole: bool  # whether its weights are those after a step, with nothing of the next one in them

    def save(self, step: int) -> Path: ...


def save_on_failure(run: ResumableRun, events: Iterator[Event]) -> Iterator[Event]:
    """Pass events through; if an exception occurs between two steps, save a checkpoint before raising it.

    Not of one rank among several: the others do not know of it, and a checkpoint may take all of them.
    """
    done = saved = run.start
    try:
        for event in events:
            done = event.step if isinstance(event, StepCompleted) else done
            saved = event.step if isinstance(event, CheckpointSaved) else saved
            yield event
    except TrainingError:  # the update itself went wrong
        raise
    except Exception as error:
        if done == saved or not run.whole or run.engine.comm.world > 1:
            raise
        yield CheckpointSaved(done, run.save(done))
        if isinstance(error, ConfigError):
            told = f"step {done} is saved, from which the same command goes on once that is mended"
            raise ConfigError(f"{error}; {told}") from error
        raise
