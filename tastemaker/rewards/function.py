"""A plain function as a reward, as in TRL: `def reward(images, prompts, **metadata)` returns a score per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.registry import ConfigError, import_user_module
from ..core.reward import BatchSize, Modality, PairwiseReward, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts

ScoringFunction = Callable[..., Any]

_registered: dict[str, ScoringFunction] = {}  # functions passed from Python, which may be impossible to import


@dataclass(frozen=True)
class FunctionReward(RewardSpec):
    """A function of yours, `module:function`: called with images, prompts and metadata, it returns the scores.

    `images` is [B, 3, H, W] in [0, 1], or [B, F, 3, H, W] with `modality: video`. `prompts` is a list of B strings.
    Every key of the metadata is passed as a list of B values, None where a prompt has no such key.

    With `receives: group` each call gets all samples of one prompt. With `receives: pair` it is called with two batches
    of images instead of one, returns the probability that the first of each pair is better, and works in `win_rate`.
    """

    function: str
    modality: Modality = "image"
    differentiable: bool = False  # whether scores have a gradient with respect to the images
    runs_on: Literal["device", "host"] = "device"  # host: called in a thread, with tensors on the CPU
    receives: Literal["batch", "group", "pair"] = "batch"  # what each call compares
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(range="yours", failure_modes="whatever your function does not look at")

    def load(self, placement: Placement) -> Reward:
        function = find_function(self.function)
        return PairFunction(function, self.modality) if self.compares_pairs else FunctionScorer(function, self.modality)

    @property
    def needs_group(self) -> bool:
        return self.receives == "group"

    @property
    def compares_pairs(self) -> bool:
        return self.receives == "pair"


class FunctionScorer(Reward):
    """Calls a function and returns its scores as a tensor."""

    def __init__(self, function: ScoringFunction, modality: Modality) -> None:
        self.function, self.modality = function, modality

    @property
    def needs_copy(self) -> bool:
        return True  # the function is the user's

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        if self.modality == "video" or pixels.shape[1] == 1:
            return call_function(self.function, self.modality, [pixels], prompts, metadata)
        # Groups come with all frames; batches of image rewards have one frame.
        frames = torch.split(pixels, 1, 1)
        return torch.stack([self.score(frame, prompts, metadata) for frame in frames]).mean(0)


class PairFunction(PairwiseReward):
    """Calls a function with two batches of images, which returns how likely the first of each pair is better."""

    def __init__(self, function: ScoringFunction, modality: Modality) -> None:
        self.function, self.modality = function, modality

    @property
    def needs_copy(self) -> bool:
        return True  # the function is the user's

    def compare(self, first: Tensor, second: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return call_function(self.function, self.modality, [first, second], prompts, metadata)


def call_function(
    function: ScoringFunction,
    modality: Modality,
    batches: Sequence[Tensor],
    prompts: Prompts,
    metadata: Sequence[Metadata],
) -> Tensor:
    """What a function returns for one or two batches of samples [B, F, 3, H, W], as a tensor."""
    images = [pixels if modality == "video" else pixels[:, 0] for pixels in batches]
    keys = dict.fromkeys(key for entry in metadata for key in entry)
    columns = {key: [entry.get(key) for entry in metadata] for key in keys}
    result = function(*images, list(prompts), **columns)
    return result if isinstance(result, Tensor) else torch.tensor(result, dtype=torch.float32, device=images[0].device)


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
