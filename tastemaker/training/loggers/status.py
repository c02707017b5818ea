"""status.json: whether a run is running, and why it ended."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import explain_error
from ..events import Event, StepCompleted, TrainingFinished, TrainingStarted
from ..run_status import RunStatus, State, write_status


class StatusLogger:
    """Writes the state when it changes: at the start, at the end, and after a failure with its reason."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._step = self._steps = 0

    def log(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self._directory, self._step, self._steps = event.directory, event.step, event.steps
            write_status(event.directory, RunStatus("running", event.step, event.steps))
        elif isinstance(event, StepCompleted):
            self._step = event.step
        elif isinstance(event, TrainingFinished) and self._directory is not None:
            state: State = "finished" if event.step >= self._steps else "stopped"
            write_status(self._directory, RunStatus(state, event.step, self._steps, event.reason))

    def fail(self, error: BaseException) -> None:
        """Write why training ended early."""
        if self._directory is None:
            return
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            status = RunStatus("stopped", self._step, self._steps, "interrupted")
        else:
            reason = explain_error(error) or str(error) or type(error).__name__
            status = RunStatus("failed", self._step, self._steps, f"{type(error).__name__}: {reason}")
        write_status(self._directory, status)

    def close(self) -> None:
        return None
