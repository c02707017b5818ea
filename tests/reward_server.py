"""A reward made of a function, any reward served on a real port, and what it says of some pictures without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tastemaker.core.reward import Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.serving.batch_queue import BatchQueue
from tastemaker.serving.launcher import describe_reward
from tastemaker.serving.server import RewardService

CPU = torch.device("cpu")
PIXELS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey", "a yellow bird")


@dataclass(frozen=True)
class FunctionReward:
    """A reward made of a function."""

    function: Callable[[Tensor, Prompts, Sequence[Metadata]], Tensor]
    batch_size: int = 8
    differentiable: bool = False
    reads: Literal["frames", "clip"] = "frames"
    runs_on: Literal["device"] = "device"

    def load(self, placement: Placement) -> FunctionReward:
        return self

    def tiny(self) -> FunctionReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.function(pixels, prompts, facts)


def score_locally(spec: Any, pixels: Tensor = PIXELS, facts: Sequence[Metadata] = ()) -> Tensor:
    return (
        Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))})
        .score(pixels, PROMPTS[: len(pixels)], facts)
        .total
    )


@contextmanager
def serve_on_free_port(spec: Any, port: int = 0, **terms: Any) -> Iterator[str]:
    desk = BatchQueue(Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}), CPU)
    server = RewardService(
        desk, describe_reward("it", spec) if not isinstance(spec, FunctionReward) else {"reads": spec.reads}, **terms
    ).server("127.0.0.1", port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        desk.close()
