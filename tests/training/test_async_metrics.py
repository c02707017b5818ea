"""Steps are told of one later where a device computes on its own, and nothing else changes."""

from functools import partial

import pytest
import torch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.training.async_metrics import AsyncMetrics, PendingMetrics, copy_to_host_async
from tastemaker.training.engine import Engine
from tastemaker.training.events import CheckpointSaved, Event, StepCompleted, TrainingFinished
from tastemaker.training.loop import launch_train_step, train

QUICK, SLOW = 0.001, 5.0


def step(number: int, seconds: float = QUICK) -> PendingMetrics:
    return lambda: StepCompleted(number, {"loss": float(number)}, seconds, 4)


def told(lead: AsyncMetrics, number: int, seconds: float = QUICK, *, now: bool = False) -> list[int]:
    return [event.step for event in lead.told(partial(step, number, seconds), now=now)]


def test_the_first_step_is_told_at_once_and_later_ones_when_the_next_was_begun():
    lead = AsyncMetrics(leads=True)
    assert [told(lead, number) for number in (1, 2, 3, 4)] == [[1], [], [2], [3]]
    assert [event.step for event in lead.rest()] == [4]
    assert not list(lead.rest())


def test_a_step_that_is_wanted_now_is_told_after_the_one_before_it():
    lead = AsyncMetrics(leads=True)
    assert [told(lead, 1), told(lead, 2), told(lead, 3, now=True), told(lead, 4)] == [[1], [], [2, 3], []]


def test_long_steps_are_told_at_once():
    lead = AsyncMetrics(leads=True)
    assert [told(lead, number, SLOW) for number in (1, 2)] == [[1], [2]]


def test_where_the_host_computes_itself_nothing_is_held_back():
    lead = AsyncMetrics(leads=False)
    assert [told(lead, number) for number in (1, 2, 3)] == [[1], [2], [3]]


def test_a_step_that_cannot_begin_loses_nothing_of_the_one_before_it():
    def fails() -> PendingMetrics:
        raise RuntimeError("out of memory")

    lead = AsyncMetrics(leads=True)
    told(lead, 1)
    told(lead, 2)
    events = lead.told(fails, now=False)
    assert next(events).step == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        next(events)


def test_no_second_is_counted_twice():
    lead = AsyncMetrics(leads=True)
    told(lead, 1)
    list(lead.told(partial(step, 2, 0.9), now=False))
    (event,) = lead.rest()
    assert event.seconds < 0.9  # it was begun 0.9 s ago by its own clock, but the first was told just now


def events(place, recipe: str, *overrides: str) -> list[Event]:
    return list(train(build(load(recipe, ["steps=5", "sample.every=0", "batch.prompts=4", *overrides]), place)))


@pytest.mark.parametrize("recipe", ["likelihood-toy-flow", "grpo-toy-flow"])
def test_a_run_tells_the_same_in_the_same_order(recipe, tmp_path, monkeypatch):
    often = ["checkpoint.every=2"]
    plain = events(tmp_path / "a", recipe, *often)
    monkeypatch.setattr(Engine, "leads", True)
    ahead = events(tmp_path / "b", recipe, *often)
    assert [(type(event), event.step) for event in ahead] == [(type(event), event.step) for event in plain]
    assert [e.metrics for e in ahead if isinstance(e, StepCompleted)] == [
        e.metrics for e in plain if isinstance(e, StepCompleted)
    ]
    assert isinstance(ahead[-1], TrainingFinished) and isinstance(ahead[-2], CheckpointSaved)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="what a GPU has begun, it goes on with by itself")


def test_numbers_come_as_they_were():
    assert copy_to_host_async(torch.tensor([1.5, -2.0]))() == [1.5, -2.0]


@gpu
def test_what_is_begun_later_is_not_waited_for():
    values = torch.ones(2, device="cuda")
    numbers = copy_to_host_async(values * 3)
    torch.cuda._sleep(2_000_000_000)  # about a second
    assert numbers() == [3.0, 3.0]
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_of_likelihood_waits_for_nothing(tmp_path):
    run = build(load("likelihood-toy-flow", ["steps=5", "sample.every=0", "batch.prompts=4"]), tmp_path)
    launch_train_step(run, 0)()
    launch_train_step(run, 1)()
    try:
        torch.cuda.set_sync_debug_mode("error")
        telling = launch_train_step(run, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert telling().step == 3
