"""What was learned is not lost when a run cannot go on, for a picture cannot be read or a reward does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..registry import ConfigError
from .engine import Engine, TrainingError
from .events import Event, Saved, Updated


class Saving(Protocol):
    """A run that can be saved between two steps."""

    engine: Engine
    start: int
    whole: bool  # whether its weights are those after a step, with nothing of the next one in them

    def save(self, step: int) -> Path: ...


def rescued(run: Saving, events: Iterator[Event]) -> Iterator[Event]:
    """The same events; of a failure between two steps, one more: that the run was saved.

    Not of one rank among several: the others do not know of it, and a checkpoint may take all of them.
    """
    done = saved = run.start
    try:
        for event in events:
            done = event.step if isinstance(event, Updated) else done
            saved = event.step if isinstance(event, Saved) else saved
            yield event
    except TrainingError:  # the update itself went wrong
        raise
    except Exception as error:
        if done == saved or not run.whole or run.engine.comm.world > 1:
            raise
        yield Saved(done, run.save(done))
        if isinstance(error, ConfigError):
            told = f"step {done} is saved, from which the same command goes on once that is mended"
            raise ConfigError(f"{error}; {told}") from error
        raise
