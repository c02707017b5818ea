"""Rewards in threads begin when their pixels are ready, and neither they nor the copies make the sampler wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from tastemaker.core import reward as reward_module
from tastemaker.core.cuda_streams import HostCopy, sample_before_scoring, scoring_turn
from tastemaker.core.reward import Reward, RewardCard, RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement, Prompts

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [f"prompt {i}" for i in range(8)]
LONG = 1_000_000_000  # clock cycles of a GPU: about half a second


@dataclass(frozen=True)
class MatrixReward(RewardSpec, Reward):
    """A product of matrices, after a function that a test gives."""

    before: Callable[[], Any]
    runs_on: Literal["device", "host", "remote"] = "device"  # type: ignore[assignment]
    batch_size: int = 4
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="any")

    def load(self, placement: Placement) -> MatrixReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.before()
        matrix = torch.linspace(-1, 1, 96 * 96, device=pixels.device).view(96, 96)
        flat = pixels.flatten(1)[:, :96]
        for _ in range(50):
            flat = (flat @ matrix).tanh()
        return flat.mean(1)


def rubric_of(
    before: Callable[[], Any], device: torch.device | None, runs_on: Literal["device", "host"] = "device"
) -> Rubric:
    spec = MatrixReward(before, runs_on)
    return Rubric({"matrix": WeightedReward(spec, spec, device=device)})


def do_nothing() -> None:
    return None


def test_diverged_samples_are_reported_before_a_reward_in_a_thread_reads_them() -> None:
    calls: list[int] = []
    rubric = rubric_of(lambda: calls.append(1), torch.device("cpu"))
    pixels = torch.rand(8, 1, 3, 8, 8)
    pixels[3, 0, 0, 0, 0] = torch.nan
    pending = rubric.start(pixels, [PROMPTS])  # does not look at the values, for which it would have to wait
    with pytest.raises(RewardError, match=r"sample 3 contain NaN.*prompt 3.*TM114"):
        pending.wait()
    assert not calls


def test_scores_in_a_thread_equal_those_of_the_caller() -> None:
    pixels = torch.rand(8, 1, 3, 8, 8)
    thread, caller = (rubric_of(do_nothing, device) for device in (torch.device("cpu"), None))
    assert thread.start(pixels, [PROMPTS]).futures and not caller.start(pixels, [PROMPTS]).futures
    assert thread.score(pixels, PROMPTS).total.equal(caller.score(pixels, PROMPTS).total)


def test_sampling_has_priority_where_a_reward_in_a_thread_shares_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device | None] = []

    def record(device: torch.device | None) -> Any:
        chosen.append(device)
        return nullcontext()

    monkeypatch.setattr(reward_module, "sample_before_scoring", record)
    sampler = torch.device("cuda", 0)
    for device in (None, torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda"), torch.device("cuda", 0)):
        rubric_of(do_nothing, device).prioritize_sampling(sampler)
    assert chosen == [None, None, None, sampler, sampler]


def test_nothing_happens_without_a_gpu() -> None:
    for device in (None, torch.device("cpu")):
        with sample_before_scoring(device), scoring_turn(device).use():
            assert scoring_turn(device).stream is None
    values = torch.rand(3)
    assert HostCopy(values).wait()[0].equal(values)


def produce_late(device: torch.device) -> Tensor:
    """Pixels that the GPU computes half a second after the call."""
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    return torch.linspace(0, 1, 8 * 3 * 8 * 8, device=device).view(8, 1, 3, 8, 8).sin()


@needs_cuda
@pytest.mark.parametrize("runs_on", ["device", "host"])
def test_the_caller_does_not_wait_for_pixels_that_a_thread_scores(runs_on: Literal["device", "host"]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    own = device if runs_on == "device" else None
    rubric = rubric_of(do_nothing, own, runs_on)
    for _ in range(2):  # pinned memory is allocated at first, which waits for the GPU
        torch.cuda.synchronize()
        pending = rubric.start(produce_late(device), [PROMPTS])
        launched = torch.cuda.current_stream().record_event()
        waited = launched.query()
        overlapped = pending.wait()[0].total
    assert not waited
    pixels = produce_late(device)
    expected = rubric_of(do_nothing, None).score(pixels if runs_on == "device" else pixels.cpu(), PROMPTS).total
    assert overlapped.cpu().equal(expected.cpu())


@needs_cuda
def test_the_sampler_goes_on_while_its_gpu_scores() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rubric = rubric_of(lambda: torch.cuda._sleep(LONG), device)  # type: ignore[no-untyped-call]
    pixels = torch.rand(8, 1, 3, 8, 8, device=device)
    with rubric.prioritize_sampling(device):
        for _ in range(2):
            pending = rubric.start(pixels, [PROMPTS])
            sampled = pixels * 2
            torch.cuda.current_stream().record_event().synchronize()
            done = pending.futures["matrix"].done()
            total = pending.wait()[0].total
    assert not done and sampled.equal(pixels * 2)
    assert total.equal(rubric_of(do_nothing, None).score(pixels, PROMPTS).total)


@needs_cuda
def test_copies_keep_the_memory_layout_that_kernels_depend_on() -> None:
    pixels = torch.rand(4, 8, 8, 3, device="cuda").permute(0, 3, 1, 2)[:, None]  # channels last
    (copy,) = HostCopy(pixels).wait()
    assert copy.stride() == pixels.stride() and copy.equal(pixels.cpu())


@needs_cuda
def test_memory_is_not_used_again_before_it_was_copied() -> None:
    device, rubric = torch.device("cuda", torch.cuda.current_device()), rubric_of(do_nothing, None, "host")
    pending = []
    for i in range(20):
        pixels = torch.full((8, 1, 3, 256, 256), i / 20, device=device)
        pending.append(rubric.start(pixels, [PROMPTS]))
        del pixels  # the next ones get its memory
    reference = rubric_of(do_nothing, None)
    for i, scores in enumerate(pending):
        expected = reference.score(torch.full((8, 1, 3, 256, 256), i / 20, device=device).cpu(), PROMPTS).total
        assert scores.wait()[0].total.cpu().equal(expected)
