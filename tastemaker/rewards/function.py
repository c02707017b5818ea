"""A plain function as a reward, as in TRL: `def reward(images, prompts, **metadata)` returns a score per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.registry import ConfigError, import_user_module
from ..core.reward import BatchSize, Modality, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts

ScoringFunction = Callable[..., Any]

_registered: dict[str, ScoringFunction] = {}  # functions passed from Python, which may be impossible to import


@dataclass(frozen=True)
class FunctionReward(RewardSpec):
    """A function of yours, `module:function`: called with images, prompts and metadata, it returns the scores.

    `images` is [B, 3, H, W] in [0, 1], or [B, F, 3, H, W] with `modality: video`. `prompts` is a list of B strings.
    Every key of the metadata is passed as a list of B values, None where a prompt has no such key.
    """

    function: str
    modality: Modality = "image"
    differentiable: bool = False  # whether scores have a gradient with respect to the images
    runs_on: Literal["device", "host"] = "device"  # host: called in a thread, with tensors on the CPU
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="yours", failure_modes="whatever your function does not look at")

    def load(self, placement: Placement) -> FunctionScorer:
        return FunctionScorer(find_function(self.function), self.modality)


class FunctionScorer(Reward):
    """Calls a function and returns its scores as a tensor."""

    def __init__(self, function: ScoringFunction, modality: Modality) -> None:
        self.function, self.modality = function, modality

    @property
    def needs_copy(self) -> bool:
        return True  # the function is the user's

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        images = pixels if self.modality == "video" else pixels[:, 0]
        keys = dict.fromkeys(key for entry in metadata for key in entry)
        columns = {key: [entry.get(key) for entry in metadata] for key in keys}
        scores = self.function(images, list(prompts), **columns)
        return scores if isinstance(scores, Tensor) else torch.tensor(scores, dtype=torch.float32, device=pixels.device)


def register_function(function: ScoringFunction) -> str:
    """Make a function of this process available as `FunctionReward.function`, and return its name for it."""
    base = name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    number = 1
    while _registered.setdefault(name, function) is not function:  # two lambdas of a module have the same name
        number += 1
        name = f"{base}#{number}"
    return name


def find_function(name: str) -> ScoringFunction:
    """Return a registered function, or import "module:function"."""
    if name in _registered:
        return _registered[name]
    module, _, attribute = name.partition(":")
    try:
        function = vars(import_user_module(module)).get(attribute)
    except Exception as error:  # importing the module of a user may raise anything
        raise ConfigError(
            f"reward function '{name:.60}' cannot be imported ({type(error).__name__}: {error!s:.300}); give "
            "'module:function' of a module that can be imported here (a lambda works only in the process that "
            "made it) [TM393]"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"module '{module:.60}' does not define the function '{attribute:.60}'; correct the name after the "
            "colon [TM394]"
        )
    return function  # type: ignore[no-any-return]
