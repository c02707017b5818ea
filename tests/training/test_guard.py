"""The guard in real runs: it warns of reward hacking only, and does not change training."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from launch_ranks import finish, launch
from rich.console import Console

from tastemaker.config.build import build
from tastemaker.config.load import list_generator_recipes, load
from tastemaker.training import checkpoint, checkpoint_folder
from tastemaker.training.drift_statistics import GuardMeasurement
from tastemaker.training.events import CheckpointSaved, Event, GuardChecked, TrainingFinished, TrainingStarted
from tastemaker.training.guard import run_guard
from tastemaker.training.loggers.progress import ProgressLogger
from tastemaker.training.loop import train

EVERY_TEN_STEPS = ["sample.every=0", "guard.every=10"]
HACKABLE = ["rewards.color.weight=0", "rewards.bright.type=brightness"]
SMALL = [
    "sample.every=0",
    "steps=4",
    "batch.prompts=4",
    "guard.every=2",
    "guard.prompts=4",
    "guard.samples_per_prompt=2",
]


@pytest.mark.slow
def test_real_run_that_freezes_its_videos_is_detected(tmp_path: Path) -> None:
    settings = [*HACKABLE, "rewards.still.weight=0", "steps=30", "optim.lr=5e-3"]
    messages = warnings(train_events("reward-gradient-toy-video", tmp_path, *EVERY_TEN_STEPS, *settings))
    assert messages and "motion in the videos fell" in messages[-1]


def train_events(recipe: str, directory: Path, *overrides: str) -> list[Event]:
    run = build(load(recipe, list(overrides)), directory)
    return list(train(run))


def warnings(events: list[Event]) -> list[str]:
    return [event.warning for event in events if isinstance(event, GuardChecked) and event.warning]


@pytest.mark.parametrize("recipe", ["grpo-toy-flow", "grpo-toy-causal", "grpo-toy-masked", "reward-gradient-toy-video"])
def test_guard_runs_on_every_model_family(recipe: str, tmp_path: Path) -> None:
    checks = [event for event in train_events(recipe, tmp_path, *SMALL) if isinstance(event, GuardChecked)]
    assert [check.step for check in checks] == [0, 2, 4]
    expected = {"reward/mean", "diversity", "variety", "entropy", "edges", "saturation", "dark"}
    assert expected <= set(checks[0].metrics) and all(
        math.isfinite(x) for check in checks for x in check.metrics.values()
    )


@pytest.mark.parametrize("recipe", ["grpo-toy-flow", "grpo-toy-causal", "ddpo-toy-causal", "nft-toy-flow"])
def test_guard_does_not_change_training(recipe: str, tmp_path: Path) -> None:
    weights = []
    for every in (0, 1):
        run = build(
            load(recipe, [*SMALL, "ema_decay=0.9", "sample.weights=ema", f"guard.every={every}"]), tmp_path / str(every)
        )
        list(train(run))
        weights.append({key: p.detach().clone() for key, p in run.policy.weights.trainable().items()})
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])


def test_guard_metrics_do_not_depend_on_chunks(tmp_path: Path) -> None:
    metrics = []
    for rollout_batch_size in ("null", "3"):
        metrics.append(
            run_guard(
                build(load("grpo-toy-causal", [*SMALL, f"batch.rollout_batch_size={rollout_batch_size}"]), tmp_path), 0
            ).metrics
        )
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5)


def test_no_guard_without_rewards(tmp_path: Path) -> None:
    assert not any(isinstance(event, GuardChecked) for event in train_events("likelihood-toy-flow", tmp_path, *SMALL))


@pytest.mark.parametrize("recipe", ["draft-toy-flow", pytest.param("grpo-toy-masked", marks=pytest.mark.slow)])
def test_real_run_with_a_hacked_reward_is_detected(recipe: str, tmp_path: Path) -> None:
    messages = warnings(train_events(recipe, tmp_path, *EVERY_TEN_STEPS, *HACKABLE, "steps=40"))
    assert messages and "held-out reward 'color' fell" in messages[-1]


@pytest.mark.parametrize("recipe", ["draft-toy-flow", pytest.param("grpo-toy-causal", marks=pytest.mark.slow)])
def test_real_run_without_hacking_has_no_warning(recipe: str, tmp_path: Path) -> None:
    assert not warnings(train_events(recipe, tmp_path, *EVERY_TEN_STEPS, "steps=60"))


@pytest.mark.slow
def test_less_diversity_after_good_training_has_no_warning(tmp_path: Path) -> None:
    train_events("likelihood-toy-flow", tmp_path / "base", "sample.every=0", "steps=300")
    run = build(load("draft-toy-flow", [*EVERY_TEN_STEPS, "steps=60"]), tmp_path / "more", init_from=tmp_path / "base")
    assert not warnings(list(train(run)))


def test_guard_stops_the_run_if_configured(tmp_path: Path) -> None:
    events = train_events(
        "draft-toy-flow", tmp_path, *EVERY_TEN_STEPS, *HACKABLE, "steps=100", "guard.stop_on_warning=true"
    )
    finished, saved = events[-1], events[-2]
    assert (
        isinstance(finished, TrainingFinished)
        and finished.step < 100
        and isinstance(saved, CheckpointSaved)
        and saved.step == finished.step
    )
    assert finished.reason.startswith("stopped by the guard") and f"step {finished.step}:" in finished.reason


def test_best_checkpoint_has_the_highest_held_out_score(tmp_path: Path) -> None:
    rewards = "rewards={color: {type: color}, held_out: {type: color, weight: 0}}"
    events = train_events("draft-toy-flow", tmp_path, *EVERY_TEN_STEPS, rewards, "steps=30", "checkpoint.every=100")
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [10, 20, 30]
    assert (tmp_path / "checkpoints/best").resolve() == checkpoint_folder.checkpoint_path(tmp_path, 30).resolve()
    initialized = build(
        load("draft-toy-flow", [*EVERY_TEN_STEPS, rewards]), tmp_path / "b", init_from=tmp_path / "checkpoints/best"
    )
    assert initialized.policy.weights.trainable()


def test_best_checkpoint_is_not_pruned(tmp_path: Path) -> None:
    run = build(load("draft-toy-flow", [*EVERY_TEN_STEPS, *HACKABLE, "checkpoint.keep_last=1"]), tmp_path)
    kept = []
    for step, score in ((0, 0.5), (2, 0.9), (4, 0.6), (6, 0.4), (8, 1.0), (10, 0.3)):
        run.guard_history.add(GuardMeasurement(step, {"reward/mean": [score] * 4, "rewards/color": [score] * 4}, {}))
        if step:
            run.save(step)
            kept.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")))
    two, four, six, eight, ten = (f"step-{step:06d}" for step in (2, 4, 6, 8, 10))
    assert kept == [[two], [two, four], [two, six], [eight], [eight, ten]]
    assert (tmp_path / "checkpoints/best").resolve().name == eight
    assert checkpoint.latest_checkpoint(tmp_path) == checkpoint_folder.checkpoint_path(tmp_path, 10)


def test_guard_history_is_restored_on_resume(tmp_path: Path) -> None:
    uninterrupted = build(load("grpo-toy-flow", [*SMALL, "steps=6"]), tmp_path / "uninterrupted")
    list(train(uninterrupted))
    list(train(build(load("grpo-toy-flow", [*SMALL, "steps=4"]), tmp_path / "resumed")))
    resumed = build(load("grpo-toy-flow", [*SMALL, "steps=6"]), tmp_path / "resumed")
    latest = checkpoint.latest_checkpoint(tmp_path / "resumed")
    assert latest is not None
    resumed.resume(latest)
    assert [measurement.step for measurement in resumed.guard_history.measurements] == [0, 2, 4]
    list(train(resumed))
    assert resumed.guard_history.state_dict() == uninterrupted.guard_history.state_dict()


@pytest.mark.slow
@pytest.mark.ranks
def test_guard_metrics_do_not_depend_on_ranks(tmp_path: Path) -> None:
    # Fifteen samples do not divide among two ranks: one is generated twice and counted once.
    settings = ("steps=2", "guard.every=1", "guard.prompts=5", "guard.samples_per_prompt=3", "engine.strategy=fsdp")
    histories = []
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        finish(launch("grpo-toy-causal", directory, *(settings if ranks > 1 else settings[:-1]), ranks=ranks))
        histories.append(json.loads((directory / "checkpoints/step-000002/state.json").read_text())["extra"]["guard"])
    assert len(histories[0]) == 3
    for one, two in zip(*histories, strict=True):
        assert {n: pytest.approx(rows, abs=1e-4) for n, rows in one["rows"].items()} == two["rows"]


def test_guard_draws_new_noise_at_every_check_and_the_same_at_the_same_step(tmp_path: Path) -> None:
    run = build(load("grpo-toy-flow", ["guard.prompts=4", "guard.samples_per_prompt=2"]), tmp_path)
    first, second = run_guard(run, 10).metrics, run_guard(run, 20).metrics
    assert first == run_guard(run, 10).metrics and first["reward/mean"] != second["reward/mean"]


def test_guard_is_on_in_every_recipe_with_rewards() -> None:
    configs = {name: load(name) for name in list_generator_recipes()}
    rewarded = {name: config for name, config in configs.items() if config.rewards}
    intervals = {name: config.guard.interval(config.steps) for name, config in rewarded.items()}
    assert [name for name, interval in intervals.items() if not interval] == []
    # A warning needs one measurement more than `patience`, counting those at the start and at the end.
    counts = {name: 1 + math.ceil(config.steps / intervals[name]) for name, config in rewarded.items()}
    assert [name for name, config in rewarded.items() if counts[name] <= config.guard.patience] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["guard.every=0"], "the guard is off"),
        ([], "no reward is held out"),
        (["rewards.bright={type: brightness, weight: 0}"], ""),
    ],
)
def test_start_says_what_the_guard_does_not_see(overrides: list[str], words: str, tmp_path: Path) -> None:
    run = build(load("grpo-toy-flow", [*overrides, "sample.every=0", "steps=1"]), tmp_path)
    started = next(train(run))
    run.engine.close()
    assert isinstance(started, TrainingStarted)
    assert len(started.notes) == bool(words) and words in " ".join(started.notes)
    out = StringIO()
    ProgressLogger(Console(file=out, width=80)).log(started)
    assert words in " ".join(out.getvalue().split()) and out.getvalue().count("note:") == bool(words)
