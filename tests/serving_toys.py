"""A reward made of a function, any reward served on a real port, and what it says of some pictures without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tastemaker.commands.serving import about
from tastemaker.reward import Graded, Rubric, shared
from tastemaker.serving.desk import Desk
from tastemaker.serving.server import Service
from tastemaker.types import Facts, Placement, Prompts

CPU = torch.device("cpu")
PIXELS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey", "a yellow bird")


@dataclass(frozen=True)
class Own:
    """A reward made of a function."""

    function: Callable[[Tensor, Prompts, Sequence[Facts]], Tensor]
    batch_size: int = 8
    differentiable: bool = False
    reads: Literal["frames", "clip"] = "frames"
    runs_on: Literal["device"] = "device"

    def load(self, placement: Placement) -> Own:
        return self

    def tiny(self) -> Own:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        return self.function(pixels, prompts, facts)


def local(spec: Any, pixels: Tensor = PIXELS, facts: Sequence[Facts] = ()) -> Tensor:
    return Rubric({"it": Graded(spec, shared(spec, Placement()))}).score(pixels, PROMPTS[: len(pixels)], facts).total


@contextmanager
def served(spec: Any, port: int = 0, **terms: Any) -> Iterator[str]:
    desk = Desk(Rubric({"it": Graded(spec, shared(spec, Placement()))}), CPU)
    server = Service(desk, about("it", spec) if not isinstance(spec, Own) else {"reads": spec.reads}, **terms).server(
        "127.0.0.1", port
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        desk.close()
