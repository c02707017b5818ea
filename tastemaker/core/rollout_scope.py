"""Marks the network calls of rollouts, which may compute in lower precision than the calls that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RolloutScope:
    """Whether a rollout calls the network at the moment."""

    def __init__(self) -> None:
        self.active = False
        self._allowed = True

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Within the block, network calls belong to a rollout."""
        before, self.active = self.active, self._allowed
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Within the block, rollouts use the precision of the training."""
        before, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = before


ROLLOUTS = RolloutScope()  # of this process, which calls its network from one thread
