"""Scores of a batch: complete, or still computed in threads; and which values of a reward are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import RewardError
from .interruption import POLL_SECONDS, Interrupted, current_stop
from .reward_inputs import quote_prompts
from .types import Prompts


@dataclass(frozen=True)
class Scores:
    """Scores of a batch by a rubric."""

    total: Tensor  # [B] weighted sum
    rewards: dict[str, Tensor]  # [B] of each reward, unweighted
    pool: dict[str, Tensor] = field(default_factory=dict)  # [B] metrics of the pool that samples were selected from


@dataclass(frozen=True)
class PendingScores:
    """Scores of a batch, of which rewards in threads may still compute some."""

    names: tuple[str, ...]  # of all rewards, in the order of the rubric
    num_prompt_sets: int
    done: Mapping[str, list[Tensor]]  # by reward, for each list of prompts: [B]
    futures: Mapping[str, Future[list[Tensor]]]  # of the other rewards
    combine: Callable[[Mapping[str, Tensor]], Scores]  # the weighted sum of the rewards

    def wait(self) -> list[Scores]:
        """The scores for each list of prompts. A failure of a reward in a thread is raised here."""
        rewards = {
            name: _wait_for(self.futures[name]) if name in self.futures else self.done[name] for name in self.names
        }
        return [
            self.combine({name: scores[i] for name, scores in rewards.items()}) for i in range(self.num_prompt_sets)
        ]

    def cancel(self) -> None:
        """Give up what no thread has begun."""
        for future in self.futures.values():
            future.cancel()


def _wait_for(scores: Future[list[Tensor]]) -> list[Tensor]:
    """The scores of a reward in a thread. A thread that hangs after a stop request is left behind."""
    stop, start = current_stop(), time.monotonic()
    while True:
        try:
            return scores.result(POLL_SECONDS if stop.is_set() else 1.0)
        except FutureTimeoutError:
            if scores.done():
                return scores.result()
            if stop.is_expired(start):
                raise Interrupted from None


def score_checked(
    name: str,
    call: Callable[[], list[Tensor]],
    pixels: Tensor,
    prompt_sets: Sequence[Prompts],
    *,
    needs_gradient: bool,
) -> list[Tensor]:
    """Scores of one call of a reward, checked; failures become a RewardError."""
    try:
        values = call()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # a reward that calls sys.exit would end the run as if it were done
        kind, prompts = type(error).__name__, quote_prompts(prompt_sets[0])
        raise RewardError(
            f"reward '{name}' failed on {prompts} ({kind}: {error}); fix the cause, or remove rewards.{name} [TM115]"
        ) from error
    if not isinstance(values, (list, tuple)) or len(values) != len(prompt_sets):
        found = f"{len(values)} tensors" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
        raise RewardError(
            f"reward '{name}' returned {found} for {len(prompt_sets)} lists of prompts, of which the first begins with "
            f"{quote_prompts(prompt_sets[0])}; return a list with one tensor for each of them from score_prompts "
            "[TM1183]"
        )
    return [
        _check_scores(name, value, pixels, prompts, needs_gradient)
        for prompts, value in zip(prompt_sets, values, strict=True)
    ]


def _check_scores(name: str, value: object, pixels: Tensor, prompts: Prompts, needs_gradient: bool) -> Tensor:
    """Refuse scores of the wrong shape, values that are no real, finite numbers, and missing gradients."""
    if not isinstance(value, Tensor) or value.shape != (len(pixels),):
        result = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise RewardError(
            f"reward '{name}' returned {result} for {len(pixels)} samples {quote_prompts(prompts)}; return a tensor "
            "with one score per sample [TM116]"
        )
    if value.is_meta or value.is_complex() or value.layout != torch.strided:
        kind = "a meta tensor, which has no values" if value.is_meta else f"complex numbers ({value.dtype})"
        kind = f"a {value.layout} tensor" if value.layout != torch.strided else kind
        raise RewardError(
            f"reward '{name}' returned {kind} for {quote_prompts(prompts)}; return a dense tensor of real "
            "numbers [TM1163]"
        )
    finite = torch.isfinite(value.detach())
    if not bool(finite.all()):
        bad = quote_prompts([prompts[i] for i in (~finite).nonzero().flatten().tolist()])
        raise RewardError(
            f"reward '{name}' returned NaN or infinity for {bad}; fix the reward, or remove rewards.{name} [TM117]"
        )
    if needs_gradient and torch.is_grad_enabled() and pixels.requires_grad and not value.requires_grad:
        raise RewardError(
            f"reward '{name}' is declared differentiable, but its scores of {quote_prompts(prompts)} have no gradient; "
            "compute the scores without detach or no_grad, or declare differentiable = False [TM118]"
        )
    return value.float()
