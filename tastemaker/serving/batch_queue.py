"""Batch scoring requests of the same image size in one worker thread."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from ..core.reward import RewardError, Rubric
from .protocol import ScoreRequest

ScoreList = list[float]


@dataclass(frozen=True, eq=False)
class PendingRequest:
    question: ScoreRequest
    answer: Future[ScoreList] = field(default_factory=Future)


class BatchQueue:
    """Scores questions in the order they come, as many at a time as the reward can bear."""

    def __init__(self, rubric: Rubric, device: torch.device) -> None:
        self.rubric, self.device = rubric, device
        self.rows = max(graded.spec.batch_size for graded in rubric.rewards.values())
        self._line: deque[PendingRequest] = deque()
        self._changed, self._closed = threading.Condition(), False
        self._worker = threading.Thread(target=self._work, name="desk", daemon=True)
        self._worker.start()

    def ask(self, question: ScoreRequest) -> Future[ScoreList]:
        waiting = PendingRequest(question)
        with self._changed:
            self._line.append(waiting)
            self._changed.notify()
        return waiting.answer

    def waiting(self) -> int:
        return len(self._line)

    def close(self) -> None:
        """Answer what waits, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()

    def _work(self) -> None:
        while batch := self._next():
            try:
                answers = self._scored([waiting.question for waiting in batch])
            except Exception as error:
                self._fall_back(batch, error)
                continue
            for waiting, answer in zip(batch, answers, strict=True):
                waiting.answer.set_result(answer)

    def _next(self) -> list[PendingRequest]:
        """The first in the line with those of the same size behind it; nothing once all is done and closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closed)
            batch: list[PendingRequest] = []
            rows = 0
            for waiting in list(self._line):
                alike = not batch or waiting.question.pixels.shape[1:] == batch[0].question.pixels.shape[1:]
                if alike and (not batch or rows + len(waiting.question) <= self.rows):
                    batch.append(waiting)
                    rows += len(waiting.question)
                    self._line.remove(waiting)
            return batch

    @torch.no_grad()
    def _scored(self, questions: list[ScoreRequest]) -> list[ScoreList]:
        pixels = torch.cat([question.pixels for question in questions]).to(self.device)
        prompts = [prompt for question in questions for prompt in question.prompts]
        facts = [fact for question in questions for fact in question.facts]
        scores = self.rubric.score(pixels, prompts, facts).total.cpu()
        return [part.tolist() for part in torch.split(scores, [len(question) for question in questions])]

    def _fall_back(self, batch: list[PendingRequest], error: Exception) -> None:
        """One bad request must not fail those it happened to be scored with."""
        for waiting in batch:
            try:
                if len(batch) == 1:
                    raise error
                waiting.answer.set_result(self._scored([waiting.question])[0])
            except Exception as own:
                waiting.answer.set_exception(own if isinstance(own, RewardError) else RewardError(describe_error(own)))


def describe_error(error: Exception) -> str:
    """An error that is no sentence yet, as one."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the server is out of device memory; send fewer rows at a time, or serve with a smaller batch_size"
    return f"the server failed ({type(error).__name__}: {error!s:.300}); its console may say more"
