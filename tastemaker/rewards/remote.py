"""A reward that another process or machine computes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..serving.client import RewardClient, RewardServiceError
from ..serving.protocol import ScoreRequest, encode_request
from .color import Brightness

TINY = "http://tiny"  # answered here


@dataclass(frozen=True)
class Remote:
    """What `tastemaker serve-reward` answers at a URL: the same numbers, computed elsewhere."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] = "http://127.0.0.1:8800"
    token: str = ""  # the name of the environment variable that holds it
    reads: Literal["frames", "clip"] = "frames"  # as the served reward does
    form: Literal["npz", "png"] = "npz"  # exact numbers, or a quarter of the bytes and rounded to 256 levels
    timeout: PositiveFloat = 600.0  # seconds for an answer
    retries: NonNegativeInt = 5  # after connection errors, and no others
    pause: NonNegativeFloat = 0.5  # seconds before the first of them, doubled each time
    batch_size: BatchSize = 16
    about: ClassVar[RewardCard] = RewardCard(range="the served reward's", hacked_by="what hacks the served reward")
    differentiable: ClassVar[bool] = False
    runs_on: ClassVar[Literal["remote"]] = "remote"

    def __post_init__(self) -> None:
        if not urlsplit(self.url).hostname or urlsplit(self.url).port == 0:
            raise ValueError(f"'url' is {self.url!r:.60}; expected one such as http://127.0.0.1:8800")

    def load(self, placement: Placement) -> Reward:
        if self.url == TINY:
            return Brightness()
        if self.token and not os.environ.get(self.token):
            raise ConfigError(f"the environment variable {self.token}, which 'token' names, is empty; set it")
        client = RewardClient(self.url, os.environ.get(self.token, ""), self.timeout, self.retries, self.pause)
        told = client.ask("/version")
        if told.get("reads") != self.reads:
            found = f"{told.get('reads')}, but 'reads' is {self.reads}"
            raise ConfigError(f"the reward at {self.url} reads {found}; set it to what the served reward reads")
        return RemoteScorer(self, client, str(told.get("version", "")), int(told.get("limit", 2**63)))

    def tiny(self) -> Self:
        return replace(self, url=TINY)


@dataclass(frozen=True)
class RemoteScorer:
    spec: Remote
    client: RewardClient
    version: str
    limit: int  # bytes of a request

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        kind, body = encode_request(ScoreRequest(pixels, tuple(prompts), tuple(facts)), self.spec.form)
        if len(body) > self.limit:
            raise RewardServiceError(
                f"{len(pixels)} rows have {len(body)} bytes, above the server's limit; lower batch_size"
            )
        found = self.client.ask("/score", kind, body).get("scores")
        if not isinstance(found, list) or len(found) != len(pixels) or not all(map(_number, found)):
            raise RewardServiceError(
                f"{self.spec.url} answered {found!s:.80} for {len(pixels)} rows; expected a number each"
            )
        return torch.tensor(found, device=pixels.device)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
