"""How long the rest of the demo takes, computed from the speed measured so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..config.schema import RunConfig
from ..evaluation.evaluate import StageProgress
from ..training.async_metrics import is_due
from ..training.events import CheckpointSaved, Event, GuardChecked, SamplesGenerated, StepCompleted, TrainingStarted

# Ratios of costs, used until the cost itself is measured. They depend on the recipe, hardly on the machine.
TRAINING = 2.0  # one training sample, with its gradient, in evaluation images
SCORING = 0.2  # scoring and summarizing an image, in evaluation images
RECENT = 10  # training steps that are averaged


def format_seconds(seconds: float) -> str:
    """Seconds in words, rounded to what an estimate is worth: '45 s', '3 min 20 s', '1 h 5 min'."""
    if seconds < 60:
        return f"{max(5, 5 * round(seconds / 5))} s" if seconds < 57 else "1 min"
    if seconds < 3600 - 5:
        minutes, rest = divmod(10 * round(seconds / 10), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


class DemoTimer:
    """Estimates the remaining time of evaluation, training and second evaluation.

    In the first evaluation the estimate rests on the images per second after the first batch; the cost of a training
    step is derived from it. From the second training step on, measured seconds per step replace that. The first batch
    and the first step are left out, for they include one-time work. The second evaluation is as long as the first.
    """

    def __init__(
        self, config: RunConfig, images: int, *, evaluation_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._config, self._images, self._clock = config, images, clock
        self.evaluation_seconds = evaluation_seconds  # of the first evaluation, once it is complete
        self._stage = 1
        self._evaluated: StageProgress | None = None
        self._step = self._first_step = 0
        self._seconds_per_image: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds of each
        self._others: dict[type[Event], float] = {}  # seconds of the last sampling, guard check and checkpoint
        self._last = clock()  # time of the last event
        self._remaining: float | None = None

    def start(self, stage: int) -> None:
        """Stage 1 is the first evaluation, 2 the training, 3 the second evaluation, 4 the report."""
        self._stage, self._evaluated = stage, None
        self._update()

    def see_evaluation(self, done: StageProgress) -> None:
        before, seconds = self._evaluated, self._clock() - self._last
        if before is not None and before.stage == done.stage == "samples" and done.count > before.count:
            self._seconds_per_image = seconds / (done.count - before.count)
        self._evaluated = done
        self._update()

    def see(self, event: Event) -> None:
        """Observe the training run."""
        seconds = self._clock() - self._last
        if isinstance(event, TrainingStarted):
            self._first_step = event.step
        elif isinstance(event, StepCompleted):
            if event.step > self._first_step + 1:
                self._steps.append(seconds)
        elif isinstance(event, SamplesGenerated | GuardChecked | CheckpointSaved):
            self._others[type(event)] = seconds
        self._step = event.step
        self._update()

    def close(self) -> None:
        return None

    def remaining(self) -> float | None:
        """Seconds until the demo ends; None before anything is measured."""
        if self._remaining is None:
            return None
        return max(self._remaining - (self._clock() - self._last), 0.0)

    def text(self) -> str:
        """The estimate as a phrase, which says whether training itself has been measured."""
        seconds = self.remaining()
        if seconds is None or (self._stage > 2 and not seconds):
            return ""
        if self._stage == 1 or (self._stage == 2 and not self._steps):
            return f"roughly {format_seconds(seconds)} left in total"
        return f"about {format_seconds(seconds)} left in total (measured)"

    def _update(self) -> None:
        self._last = self._clock()
        training = self._training_left() if self._stage <= 2 else 0.0
        if self._stage == 1:
            parts = [self._evaluation_left(), training, self._evaluation()]
        elif self._stage == 2:
            parts = [training, self._evaluation()]
        else:
            parts = [self._evaluation_left() if self._stage == 3 else 0.0]
        known = [part for part in parts if part is not None]
        self._remaining = sum(known) if len(known) == len(parts) else None

    def _evaluation(self) -> float | None:
        """Seconds of a whole evaluation."""
        if self.evaluation_seconds is not None:
            return self.evaluation_seconds
        return None if self._seconds_per_image is None else self._images * self._seconds_per_image * (1 + SCORING)

    def _evaluation_left(self) -> float | None:
        whole, done = self._evaluation(), self._evaluated
        if whole is None or done is None:
            return whole
        sampling = whole / (1 + SCORING)
        if done.stage == "samples":
            return whole - sampling * done.count / done.total
        return (whole - sampling) * (1 - done.count / done.total / 2) if done.stage == "scores" else 0.0

    def _training_left(self) -> float | None:
        config, left = self._config, range(self._step + 1, self._config.steps + 1)
        per_image = self._seconds_per_image
        if self._steps:
            step = sum(self._steps) / len(self._steps)
        elif per_image is not None:
            step = TRAINING * per_image * config.batch.prompts * config.objective.group
        else:
            return None
        others = (
            (SamplesGenerated, config.sample.every, config.sample.count),
            (GuardChecked, config.guard.every, config.guard.prompts * config.guard.per_prompt),
            (CheckpointSaved, config.checkpoint.every, 0),
        )
        total = len(left) * step
        for kind, every, images in others:
            times = sum(is_due(done, every, config.steps) for done in left)
            times += (
                self._step == 0 and every > 0 and kind is not CheckpointSaved and kind not in self._others
            )  # before step 1
            total += times * self._others.get(kind, images * (per_image or 0.0))
        return total
