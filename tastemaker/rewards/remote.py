"""A reward that another process or machine computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Modality, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..serving.client import RewardClient, RewardServiceError
from ..serving.protocol import ScoreRequest, encode_request
from .color import BrightnessReward

TINY = "http://tiny"  # computed in this process
MAX_SCORE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RemoteReward(RewardSpec):
    """The reward that `tastemaker serve-reward` serves at a URL: the same scores, computed elsewhere."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] = "http://127.0.0.1:8800"
    token_env: str = ""  # name of the environment variable that holds the access token
    modality: Modality = "image"  # of the served reward
    served_reward: str = ""  # its name, such as hps; a server of another reward is refused
    encoding: Literal["npz", "png"] = "npz"  # exact pixels, or a quarter of the bytes and rounded to 256 levels
    timeout: PositiveFloat = 600.0  # seconds for a whole answer
    max_retries: NonNegativeInt = 8  # after connection errors, cut-off answers and status 408, 429, 500, 502, 503, 504
    retry_delay: NonNegativeFloat = 0.5  # seconds before the first retry, doubled each time up to 30, with jitter
    retry_budget: NonNegativeFloat = 300.0  # seconds from the first failure of a request to its last retry
    batch_size: BatchSize = 16
    card: ClassVar[RewardCard] = RewardCard(range="the served reward's", failure_modes="those of the served reward")
    runs_on: ClassVar[Literal["remote"]] = "remote"

    def __post_init__(self) -> None:
        if not urlsplit(self.url).hostname or urlsplit(self.url).port == 0:
            raise ValueError(
                f"'url': expected an address such as http://127.0.0.1:8800, got {self.url!r:.60}; correct 'url' [TM402]"
            )

    def load(self, placement: Placement) -> Reward:
        if self.url == TINY:
            return BrightnessReward()
        token = os.environ.get(self.token_env, "")
        if self.token_env and not token:
            raise ConfigError(
                f"'token_env': the environment variable {self.token_env} is empty; set it to the token of the "
                "server [TM403]"
            )
        client = RewardClient(self.url, token, self.timeout, self.max_retries, self.retry_delay, self.retry_budget)
        info = client.request("/version")
        if info.get("modality") != self.modality:
            raise ConfigError(
                f"'modality': the reward at {self.url} has modality {info.get('modality')}, but 'modality' is "
                f"{self.modality}; set modality: {info.get('modality')} [TM404]"
            )
        if self.served_reward and info.get("name") != self.served_reward:
            raise ConfigError(
                f"the reward at {self.url} is '{info.get('name')!s:.60}', but 'served_reward' is "
                f"'{self.served_reward:.60}'; start a server of that reward, or name its URL"
                " [TM892]"
            )
        limit = info.get("limit")
        return RemoteScorer(self, client, f"{info.get('version', ''):.200}", limit if type(limit) is int else 2**63)

    def tiny(self) -> Self:
        return replace(self, url=TINY)


@dataclass(frozen=True)
class RemoteScorer(Reward):
    spec: RemoteReward
    client: RewardClient
    version: str = ""
    limit: int = 2**63  # bytes of a request

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        request = ScoreRequest(pixels, tuple(prompts), tuple(metadata))
        content_type, body = encode_request(request, self.spec.encoding)
        if len(body) > self.limit:
            raise RewardServiceError(
                f"a request with {len(pixels)} samples has {len(body)} bytes, but the limit of the server is "
                f"{self.limit}; lower batch_size [TM405]"
            )
        scores = self.client.request("/score", content_type, body).get("scores")
        if not isinstance(scores, list) or len(scores) != len(pixels) or not all(map(_is_finite, scores)):
            expected = f"{len(pixels)} finite numbers"
            raise RewardServiceError(
                f"{self.spec.url} returned {scores!s:.80}; expected {expected}, so check the reward on the server "
                "[TM406]"
            )
        return torch.tensor(scores, dtype=torch.float32, device=pixels.device)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_SCORE  # false for NaN
