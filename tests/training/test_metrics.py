"""Metrics of steps: means over samples, and delayed reports on asynchronous devices."""

import time

import pytest
import torch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.objective import SingleProcess
from tastemaker.core.types import Loss
from tastemaker.training.engine import Engine, LaunchedUpdate, TrainingError
from tastemaker.training.events import CheckpointSaved, Event, StepCompleted, TrainingFinished
from tastemaker.training.loop import train, train_step
from tastemaker.training.metrics import AsyncMetrics, AverageMeter, StepMetrics, StepTimer, copy_to_host_async

SHORT, LONG = 0.001, 5.0


def launched_step(number: int, seconds: float = SHORT, squared_norm: float = 4.0) -> StepMetrics:
    update = LaunchedUpdate(number - 1, 0.1, None, torch.tensor([squared_norm, 0.0]))
    means = {"loss": torch.tensor(float(number))}
    return StepMetrics(number, 4, means, [("grad_norm", update)], 0.1, time.perf_counter() - seconds)


def push(metrics: AsyncMetrics, number: int, seconds: float = SHORT, *, wait: bool = False) -> list[int]:
    return [event.step for event in metrics.push(launched_step(number, seconds), wait=wait)]


def test_first_step_is_reported_at_once_and_later_ones_after_the_next_launch():
    metrics = AsyncMetrics(enabled=True)
    assert [push(metrics, number) for number in (1, 2, 3, 4)] == [[1], [], [2], [3]]
    assert [event.step for event in metrics.flush()] == [4]
    assert not list(metrics.flush())


def test_waiting_reports_the_previous_step_first():
    metrics = AsyncMetrics(enabled=True)
    assert [push(metrics, 1), push(metrics, 2), push(metrics, 3, wait=True), push(metrics, 4)] == [[1], [], [2, 3], []]


def test_long_steps_are_reported_at_once():
    metrics = AsyncMetrics(enabled=True)
    assert [push(metrics, number, LONG) for number in (1, 2)] == [[1], [2]]


def test_synchronous_device_reports_each_step_at_once():
    metrics = AsyncMetrics(enabled=False)
    assert [push(metrics, number) for number in (1, 2, 3)] == [[1], [2], [3]]


def test_seconds_of_steps_do_not_overlap():
    metrics = AsyncMetrics(enabled=True)
    push(metrics, 1)
    push(metrics, 2, 0.9)
    (event,) = metrics.flush()
    assert event.seconds < 0.9  # it was launched 0.9 s ago, but the first step was reported just now


def test_event_has_means_gradient_norm_and_learning_rate():
    event = launched_step(3).to_event()
    assert event.metrics == {"loss": 3.0, "grad_norm": 2.0, "lr": 0.1} and event.samples == 4


def test_refused_update_raises_when_its_metrics_are_read():
    metrics = AsyncMetrics(enabled=True)
    push(metrics, 1)
    assert not list(metrics.push(launched_step(2, squared_norm=float("nan"))))
    with pytest.raises(TrainingError, match=r"step 1 .*TM270"):
        push(metrics, 3)


def test_means_do_not_depend_on_micro_batches():
    rows = torch.arange(6.0)
    full, chunked = AverageMeter(), AverageMeter()
    full.add_loss(Loss(rows, {"kl": rows * 2}), 1)
    for chunk in torch.split(rows, 4):
        chunked.add_loss(Loss(chunk, {"kl": chunk * 2}), 1)
    assert full.compute(SingleProcess()) == chunked.compute(SingleProcess()) == {"kl": 5.0, "loss/policy": 2.5}


class RankMean(SingleProcess):
    """Averages with the values of another rank."""

    def __init__(self, other: AverageMeter) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        sums, counts = self.other.sums.values(), self.other.counts.values()
        return (x + torch.stack([total / count for total, count in zip(sums, counts, strict=True)])) / 2


def test_reward_std_is_over_all_samples_of_all_ranks_and_micro_batches():
    reward = torch.randn(16, generator=torch.Generator().manual_seed(0)) + 20
    first, second = AverageMeter(), AverageMeter()
    for meter, samples in ((first, reward[:8]), (second, reward[8:])):
        for chunk in torch.split(samples, 3):
            meter.add({"reward/mean": chunk}, len(chunk))
    means = first.compute(RankMean(second))
    assert means["reward/mean"] == pytest.approx(reward.mean().item(), rel=1e-6)
    assert means["reward/std"] == pytest.approx(reward.std(correction=0).item(), rel=1e-3)


def test_step_timer_adds_up_blocks_of_a_phase():
    timer = StepTimer(torch.device("cpu"))
    with timer.measure("collect"):
        for _ in range(2):
            with timer.measure("reward"):
                time.sleep(0.01)
    seconds = timer.seconds()
    assert 0.02 <= seconds["reward"] <= seconds["collect"]


def test_step_reports_times_of_rollout_reward_and_update(tmp_path):
    settings = ["steps=1", "sample.every=0", "guard.every=0", "batch.prompts=4"]
    step = train_step(build(load("grpo-toy-flow", settings), tmp_path / "a"), 0).to_event()
    assert set(step.timings) == {"time/rollout", "time/reward", "time/update"} and min(step.timings.values()) > 0
    assert sum(step.timings.values()) <= step.seconds
    assert {"reward/mean", "reward/std"} <= set(step.metrics)
    step = train_step(build(load("likelihood-toy-flow", settings), tmp_path / "b"), 0).to_event()
    assert set(step.timings) == {"time/data", "time/update"}
    assert {"time/step", "samples_per_second"} <= set(step.scalars())


def events(directory, recipe: str, *overrides: str) -> list[Event]:
    return list(train(build(load(recipe, ["steps=5", "sample.every=0", "batch.prompts=4", *overrides]), directory)))


@pytest.mark.parametrize("recipe", ["likelihood-toy-flow", "grpo-toy-flow"])
def test_asynchronous_metrics_change_neither_events_nor_values(recipe, tmp_path, monkeypatch):
    settings = ["checkpoint.every=2"]
    expected = events(tmp_path / "a", recipe, *settings)
    monkeypatch.setattr(Engine, "asynchronous", True)
    delayed = events(tmp_path / "b", recipe, *settings)
    assert [(type(event), event.step) for event in delayed] == [(type(event), event.step) for event in expected]
    assert [e.metrics for e in delayed if isinstance(e, StepCompleted)] == [
        e.metrics for e in expected if isinstance(e, StepCompleted)
    ]
    assert isinstance(delayed[-1], TrainingFinished) and isinstance(delayed[-2], CheckpointSaved)


def test_host_copy_keeps_values():
    assert copy_to_host_async(torch.tensor([1.5, -2.0]))() == [1.5, -2.0]


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that computes asynchronously")


@gpu
def test_host_copy_does_not_wait_for_later_work():
    values = torch.ones(2, device="cuda")
    numbers = copy_to_host_async(values * 3)
    torch.cuda._sleep(2_000_000_000)  # about a second
    assert numbers() == [3.0, 3.0]
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_likelihood_step_has_no_cuda_sync(tmp_path):
    run = build(load("likelihood-toy-flow", ["steps=5", "sample.every=0", "batch.prompts=4"]), tmp_path)
    metrics = AsyncMetrics(enabled=True)
    for step in range(2):
        list(metrics.push(train_step(run, step)))
    list(metrics.flush())
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert not list(metrics.push(train_step(run, 2)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [event.step for event in metrics.flush()] == [3]
