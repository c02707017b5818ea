"""A reward that calls a function, and a reward server on a free port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tastemaker.core.reward import Reward, RewardCard, RewardSpec, Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.serving.server import BatchQueue, RewardService, describe_reward

CPU = torch.device("cpu")
PIXELS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey", "a yellow bird")


@dataclass(frozen=True)
class FunctionReward(RewardSpec, Reward):
    """A reward that calls a function."""

    function: Callable[[Tensor, Prompts, Sequence[Metadata]], Tensor]
    batch_size: int = 8
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: bool = False
    modality: Literal["image", "video"] = "image"
    runs_on: Literal["device"] = "device"

    def load(self, placement: Placement) -> FunctionReward:
        return self

    def tiny(self) -> FunctionReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.function(pixels, prompts, metadata)


def score_locally(spec: Any, pixels: Tensor = PIXELS, metadata: Sequence[Metadata] = ()) -> Tensor:
    return (
        Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))})
        .score(pixels, PROMPTS[: len(pixels)], metadata)
        .total
    )


@contextmanager
def serve_on_free_port(spec: Any, port: int = 0, **options: Any) -> Iterator[str]:
    queue = BatchQueue(Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}), CPU)
    is_function = isinstance(spec, FunctionReward)
    description = {"modality": spec.modality} if is_function else describe_reward("it", spec)
    server = RewardService(queue, description, **options).create_server("127.0.0.1", port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        queue.close()
