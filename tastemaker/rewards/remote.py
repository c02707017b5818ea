"""A reward that another process or machine computes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self
from urllib.parse import quote, urlsplit

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Modality, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..serving.client import RewardClient, RewardServiceError
from ..serving.protocol import ScoreRequest, encode_request
from ..serving.replicas import ReplicaClient, describe_rewards, refuse_other_version
from .color import BrightnessReward

URL = re.compile(r"https?://[^/\s]+")
TINY = "http://tiny"  # computed in this process
TOKEN_VARIABLE = "REWARD_TOKEN"  # environment variable with the token of servers that `device` names
MAX_SCORE = torch.finfo(torch.float32).max

ChooseReward = Callable[[str, Mapping[str, Any]], tuple[str, Mapping[str, Any]]]  # of a URL and its /version


@dataclass(frozen=True)
class RemoteReward(RewardSpec):
    """The reward that `tastemaker serve-reward` serves at a URL: the same scores, computed elsewhere."""

    url: str | tuple[str, ...] = "http://127.0.0.1:8800"  # several: servers of the same reward, least loaded first
    token_env: str = ""  # name of the environment variable that holds the access token
    modality: Modality = "image"  # of the served reward
    served_reward: str = ""  # its name, such as hps; needed if the server has several rewards
    encoding: Literal["npz", "png"] = "npz"  # exact pixels, or a quarter of the bytes and rounded to 256 levels
    timeout: PositiveFloat = 600.0  # seconds for a whole answer
    max_retries: NonNegativeInt = 8  # after connection errors, cut-off answers and status 408, 429, 500, 502, 503, 504
    retry_delay: NonNegativeFloat = 0.5  # seconds before the first retry, doubled each time up to 30, with jitter
    retry_budget: NonNegativeFloat = 300.0  # seconds from the first failure of a request to its last retry
    batch_size: BatchSize = 16  # samples per request
    concurrency: PositiveInt = 1  # requests at a time to each server
    card: ClassVar[RewardCard] = RewardCard(range="the served reward's", failure_modes="those of the served reward")
    runs_on: ClassVar[Literal["remote"]] = "remote"

    def __post_init__(self) -> None:
        for url in self.urls or ("",):
            if not URL.match(url) or not urlsplit(url).hostname or urlsplit(url).port == 0:
                raise ValueError(
                    f"'url': expected an address such as http://127.0.0.1:8800, got {url!r:.60}; correct 'url' [TM402]"
                )

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def samples_per_call(self) -> int:
        return self.batch_size * self.concurrency * len(self.urls)

    def load(self, placement: Placement) -> Reward:
        return BrightnessReward() if TINY in self.urls else self.connect(self._choose_reward)

    def connect(self, choose: ChooseReward) -> Reward:
        """The scorer of the reward that `choose` finds at every server, also at those that start again later."""
        token = os.environ.get(self.token_env, "")
        if self.token_env and not token:
            raise ConfigError(
                f"'token_env': the environment variable {self.token_env} is empty; set it to the token of the "
                "server [TM403]"
            )
        settings = (token, self.timeout, self.max_retries, self.retry_delay, self.retry_budget)
        client = ReplicaClient([RewardClient(url, *settings) for url in self.urls])
        info = client.request("/version")
        name, description = choose(client.url, info)
        version = f"{description.get('version', ''):.200}"

        def check(url: str, info: Mapping[str, Any]) -> None:
            found = f"{choose(url, info)[1].get('version', ''):.200}"
            if found != version:
                raise refuse_other_version(url, found, version)

        client.check = check
        if len(self.urls) > 1:
            client.check_all()
        else:
            client.replicas[0].checked = True
        limit, path = info.get("limit"), f"/rewards/{quote(name, safe='')}/score" if "rewards" in info else "/score"
        return RemoteScorer(self, client, path, version, limit if type(limit) is int else 2**63)

    def _choose_reward(self, url: str, info: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Name and description of the reward at a server, if it is the one that is meant."""
        rewards = describe_rewards(info)
        if not self.served_reward and len(rewards) != 1:
            raise ConfigError(
                f"'served_reward': the server at {url} has the rewards {', '.join(rewards)!s:.300}; set served_reward "
                "to one of them [TM2054]"
            )
        if self.served_reward and self.served_reward not in rewards:
            raise ConfigError(
                f"the reward at {url} is '{', '.join(rewards)!s:.300}', but 'served_reward' is "
                f"'{self.served_reward:.60}'; start a server of that reward, or name its URL"
                " [TM892]"
            )
        name = self.served_reward or next(iter(rewards))
        modality = rewards[name].get("modality")
        if modality != self.modality:
            raise ConfigError(
                f"'modality': the reward at {url} has modality {modality}, but 'modality' is "
                f"{self.modality}; set modality: {modality} [TM404]"
            )
        return name, rewards[name]

    def tiny(self) -> Self:
        return replace(self, url=TINY)


@dataclass(frozen=True)
class RewardOnServer(RewardSpec):
    """A reward that servers compute with the settings that it has here: what `device: http://...` makes of it."""

    key: str  # of the setting that names the servers, for messages
    spec: RewardSpec
    urls: tuple[str, ...]
    settings: str  # of the reward with its type, as JSON
    runs_on: ClassVar[Literal["remote"]] = "remote"

    def __post_init__(self) -> None:
        self.remote()  # checks the addresses

    @property
    def card(self) -> RewardCard:
        return replace(self.spec.card, memory="the server's")

    @property
    def batch_size(self) -> int:
        return self.spec.batch_size

    @property
    def samples_per_call(self) -> int:
        return self.remote().samples_per_call

    @property
    def modality(self) -> Modality:
        return self.spec.modality

    def remote(self) -> RemoteReward:
        """The connection, with the token of the environment variable REWARD_TOKEN if there is one."""
        token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else ""
        return RemoteReward(self.urls, token_env, self.modality, batch_size=self.batch_size)

    def load(self, placement: Placement) -> Reward:
        return self.remote().connect(self._choose_reward)

    def tiny(self) -> RewardSpec:
        return self.spec.tiny()

    def _choose_reward(self, url: str, info: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Name and description of the reward with the same settings at a server."""
        rewards, expected = describe_rewards(info), _score_settings(json.loads(self.settings))
        problem, kind = "", expected["type"]
        for name, description in rewards.items():
            found = _score_settings(description.get("reward"))
            if found == expected:
                return name, description
            if isinstance(found, dict) and found.get("type") == kind:
                problem = _describe_differences(found, expected)
        if problem:
            raise ConfigError(
                f"{self.key}: the reward '{kind}' at {url} has other settings ({problem:.400}), and so other scores; "
                "start the server with the settings of the recipe, or change the recipe [TM2055]"
            )
        raise ConfigError(
            f"{self.key}: the server at {url} has the rewards {', '.join(rewards)!s:.200}, but not '{kind}'; start "
            f"`tastemaker serve-reward {kind}` there, or name another address [TM2056]"
        )


def _score_settings(value: Any) -> Any:
    """Settings without those that no score depends on."""
    if isinstance(value, dict):
        return {name: _score_settings(each) for name, each in value.items() if name != "batch_size"}
    return [_score_settings(each) for each in value] if isinstance(value, list) else value


def _describe_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What differs between the settings of a server and those of a recipe."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return "; ".join(f"{name} is {found.get(name)!r} there and {expected.get(name)!r} here" for name in names)


@dataclass(frozen=True)
class RemoteScorer(Reward):
    spec: RemoteReward
    client: ReplicaClient
    path: str = "/score"
    version: str = ""
    limit: int = 2**63  # bytes of a request

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Scores [B], from requests of `batch_size` samples of which several may be under way."""
        size = self.spec.batch_size
        parts = [slice(i, i + size) for i in range(0, len(pixels), size)]
        if len(parts) <= 1:
            return self._request_scores(pixels, prompts, metadata)
        threads = ThreadPoolExecutor(min(len(parts), self.spec.samples_per_call // size), "reward-requests")
        try:
            futures = [threads.submit(self._request_scores, pixels[k], prompts[k], metadata[k]) for k in parts]
            return torch.cat([future.result() for future in futures])
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # a failure is not held up by the other requests

    def _request_scores(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        request = ScoreRequest(pixels, tuple(prompts), tuple(metadata))
        content_type, body = encode_request(request, self.spec.encoding)
        if len(body) > self.limit:
            raise RewardServiceError(
                f"a request with {len(pixels)} samples has {len(body)} bytes, but the limit of the server is "
                f"{self.limit}; lower batch_size [TM405]"
            )
        response = self.client.request(self.path, content_type, body)
        if (version := f"{response.get('version', self.version):.200}") != self.version:  # of a server that restarted
            raise refuse_other_version(self.client.url, version, self.version)
        scores = response.get("scores")
        if not isinstance(scores, list) or len(scores) != len(pixels) or not all(map(_is_finite, scores)):
            expected = f"{len(pixels)} finite numbers"
            raise RewardServiceError(
                f"{self.client.url} returned {scores!s:.80}; expected {expected}, so check the reward on the server "
                "[TM406]"
            )
        return torch.tensor(scores, dtype=torch.float32, device=pixels.device)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_SCORE  # false for NaN
