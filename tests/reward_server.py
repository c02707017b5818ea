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
from tastemaker.serving.app import RewardService, ServedReward
from tastemaker.serving.batch_queue import BatchQueue
from tastemaker.serving.http_server import RewardServer, bind
from tastemaker.serving.limits import ServiceLimits
from tastemaker.serving.server import describe_reward

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


def create_service(spec: Any, token: str = "", **limits: Any) -> RewardService:
    queue = BatchQueue(Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))}), CPU)
    is_function = isinstance(spec, FunctionReward)
    description = {"modality": spec.modality} if is_function else describe_reward("it", spec)
    return RewardService({"it": ServedReward(queue, description)}, token, ServiceLimits(**limits))


@contextmanager
def run_service(service: RewardService, port: int = 0) -> Iterator[str]:
    listener, server = bind("127.0.0.1", port), RewardServer(service)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()
        service.close()


@contextmanager
def serve_on_free_port(spec: Any, port: int = 0, token: str = "", **limits: Any) -> Iterator[str]:
    with run_service(create_service(spec, token, **limits), port) as url:
        yield url
