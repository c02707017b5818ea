"""The guard speaks where a reward is gamed, is silent where it is earned, and changes nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import finish, launch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.train import checkpoint, folders
from tastemaker.train.events import Event, Finished, Guarded, Saved
from tastemaker.train.evidence import History, Look
from tastemaker.train.guard import features, judge, likeness, movement
from tastemaker.train.loop import train

QUICK = ["sample.every=0", "guard.every=10"]
GAMED = ["rewards.color.weight=0", "rewards.bright.type=brightness"]
SMALL = ["sample.every=0", "steps=4", "batch.prompts=4", "guard.every=2", "guard.prompts=4", "guard.per_prompt=2"]
Course = Callable[[float], float]  # of a value, from the start at 0 to the end at 1


def told(
    reward: Course, held: Course, diversity: Course, variety: Course, seed: int = 0, looks: int = 30
) -> list[bool]:
    """Whether a fabricated run was suspected, look by look: 16 prompts, each look with fresh noise of its own."""
    chance, history, suspected = random.Random(seed), History(["held"]), []
    prompts = [chance.gauss(0, 1) for _ in range(16)]

    def rows(path: Course, t: float, noise: float, differ: float = 0.0) -> list[float]:
        return [path(t) + differ * prompt + chance.gauss(0, noise) for prompt in prompts]

    for i in range(looks):
        t = i / (looks - 1)
        values = {
            "reward": rows(reward, t, 0.5, 0.7),
            "reward/held": rows(held, t, 0.5, 0.7),  # four samples a prompt, each with noise of one
            "diversity": rows(diversity, t, 0.02),
            "variety": rows(variety, t, 0.02),
            **{name: [0.5] * 16 for name in ("entropy", "edges", "saturation", "dark")},
        }
        history.add(Look(50 * i, values, {"reward/held": 1.2}))
        suspected.append(history.suspicion() is not None)
    return suspected


def rising(t: float) -> float:
    return 3 * t


def flat(t: float) -> float:
    return 0.4


@pytest.mark.parametrize(
    ("held", "diversity", "variety"),
    [
        pytest.param(lambda t: -2 * t, flat, flat, id="the held-out reward falls"),
        pytest.param(lambda t: 2 * t if t < 0.5 else 2 - 3 * t, flat, flat, id="it rises, then falls"),
        pytest.param(flat, lambda t: 0.4 - 0.3 * t, lambda t: 0.5 - 0.3 * t, id="all pictures grow alike"),
        pytest.param(flat, lambda t: 0.4 - 0.36 * min(1, 2 * t), flat, id="samples of a prompt become the same"),
    ],
)
def test_a_gamed_reward_is_suspected_and_stays_so(held: Course, diversity: Course, variety: Course) -> None:
    for seed in range(20):
        suspected = told(rising, held, diversity, variety, seed)
        assert all(suspected[-5:]) and not any(suspected[:2])


@pytest.mark.parametrize(
    ("reward", "held", "diversity", "variety"),
    [
        pytest.param(rising, rising, flat, flat, id="everything rises"),
        pytest.param(rising, flat, flat, flat, id="noise alone"),
        pytest.param(rising, rising, lambda t: 0.4 - 0.3 * t, lambda t: 0.4 + 0.3 * t, id="prompts are told apart"),
        pytest.param(rising, rising, lambda t: 0.4 - 0.2 * t, flat, id="prompts are met better"),
        pytest.param(flat, lambda t: -2 * t, flat, flat, id="nothing is gained"),
        pytest.param(
            lambda t: 3 * t if t < 0.5 else 3 - 3 * t, lambda t: t if t < 0.5 else 1 - t, flat, flat, id="fails"
        ),
    ],
)
def test_an_honest_run_is_not_suspected(reward: Course, held: Course, diversity: Course, variety: Course) -> None:
    # Noise that is fresh at every look is the hardest case: one run in twenty may be suspected by chance.
    assert sum(any(told(reward, held, diversity, variety, seed)) for seed in range(20)) <= 1


def verdicts(shares: list[float], seed: int, prompts: int = 64) -> list[bool]:
    """Whether a run was suspected whose held-out reward is a verdict, right of so many pictures at each look."""
    chance, history, suspected = random.Random(seed), History(["strict"]), []
    skill = [chance.betavariate(1, 2) * 1.5 for _ in range(prompts)]  # some prompts are far easier than others
    others = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation", "dark"), [0.5] * prompts)
    for i, share in enumerate(shares):
        reward = [min(i, 2) + chance.gauss(0, 0.5) for _ in skill]
        right = [sum(chance.random() < min(1, 2 * share * each) for _ in range(4)) / 4 for each in skill]
        spread = math.sqrt(share * (1 - share))
        history.add(Look(20 * i, {"reward": reward, "reward/strict": right, **others}, {"reward/strict": spread}))
        suspected.append(history.suspicion() is not None)
    return suspected


def test_a_verdict_that_was_seldom_right_and_then_hardly_ever_is_a_fall() -> None:
    # What four copies of everything do to a strict verdict; half a standard deviation is more than there is to lose.
    gamed = [verdicts([0.26, 0.23, 0.12, 0.09, 0.09, 0.1, 0.09], seed) for seed in range(20)]
    assert sum(any(each) for each in gamed) >= 17
    honest = [verdicts([0.26, 0.28, 0.27, 0.3, 0.28, 0.29, 0.27], seed) for seed in range(40)]
    assert sum(any(each) for each in honest) <= 1


def test_the_warning_names_what_fell_and_what_it_was_traded_for() -> None:
    history = History(["taste"], patience=1)
    same = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation"), [0.5] * 4)
    history.add(Look(0, {"reward": [0.1] * 4, "reward/taste": [0.9] * 4, "dark": [0.1] * 4, **same}, {}))
    history.add(Look(50, {"reward": [0.8] * 4, "reward/taste": [0.2] * 4, "dark": [0.9] * 4, **same}, {}))
    assert history.suspicion() == (
        "probable reward hacking: the training reward rose from 0.1 to 0.8 since step 0, while the held-out reward "
        "'taste' fell from 0.9 to 0.2 since step 0 (the pictures changed too: dark 0.1 -> 0.9)"
    )


def test_a_look_at_other_prompts_begins_anew() -> None:
    history = History([])
    history.add(Look(0, {"reward": [0.0] * 4}, {}))
    history.add(Look(5, {"reward": [0.0] * 8}, {}))
    assert [look.step for look in history.looks] == [5]


def test_features_are_what_they_say() -> None:
    black, white = torch.zeros(1, 2, 3, 8, 8), torch.ones(1, 2, 3, 8, 8)
    board = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).float().expand(1, 1, 3, 8, 8)
    red = torch.tensor([1.0, 0, 0]).view(1, 1, 3, 1, 1).expand(1, 1, 3, 8, 8)
    assert features(black)["dark"] == 1 and features(white)["dark"] == 0
    assert features(black)["entropy"] == 0 and features(board)["entropy"] == 1  # one bit: black or white
    assert features(board)["edges"] == 1 and features(red)["edges"] == 0
    assert features(red)["saturation"] == 1 and features(board)["saturation"] == 0


def test_likeness_is_the_mean_distance_within_and_between_prompts() -> None:
    pictures = torch.tensor([[[0.0], [1.0]], [[5.0], [5.0]], [[0.0], [1.0]]])  # [P, K, D], two texts of three prompts
    found = likeness(pictures, ("a", "b", "a"))
    assert found["diversity"].tolist() == [1, 0, 1]
    assert found["variety"].tolist() == [4.5, 4.5, 4.5]
    assert "variety" not in likeness(pictures, ("a", "a", "a"))


def clip(speed: int, frames: int = 6) -> torch.Tensor:
    """A bright bar that moves so many pixels a frame: [1, F, 3, 32, 32]."""
    pixels = torch.zeros(1, frames, 3, 32, 32)
    for k in range(frames):
        pixels[:, k, :, 8:24, 4 + k * speed : 10 + k * speed] = 1
    return pixels


def test_movement_tells_a_moving_clip_from_a_frozen_and_a_flickering_one() -> None:
    moving, frozen = movement(clip(2)), movement(clip(0))
    light = torch.tensor([1.0, 0.2] * 3).view(1, 6, 1, 1, 1)
    flickering = movement(clip(0) * light)
    assert frozen["motion"] < 0.05 < moving["motion"] and frozen["frames"] == 0 < moving["frames"]
    assert flickering["flicker"] > 5 * moving["flicker"] and frozen["flicker"] < 1e-4
    assert movement(clip(0, frames=1)) == {} and "flicker" not in movement(clip(1, frames=2))


def rested(motion: Course, frames: Course) -> list[str]:
    """What is said of a fabricated run whose clips move and differ so much."""
    chance, history, said = random.Random(0), History([]), []
    others = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation", "dark", "flicker"), [0.01] * 16)
    for i in range(12):
        courses = {"reward": rising, "motion": motion, "frames": frames}
        noisy = {name: [path(i / 11) + chance.gauss(0, 0.05) for _ in range(16)] for name, path in courses.items()}
        history.add(Look(10 * i, {**noisy, **others}, {}))
        said.append(history.suspicion() or "")
    return said


def test_clips_that_come_to_rest_while_the_reward_rises_are_suspected() -> None:
    told = rested(lambda t: 2 - 1.6 * t, lambda t: 1 - 0.8 * t)
    assert "the clips came to rest: their motion fell from 2" in told[-1] and not any(told[:4])


@pytest.mark.parametrize(
    ("motion", "frames"),
    [
        pytest.param(lambda t: 2 - 0.6 * t, lambda t: 1 - 0.3 * t, id="a little calmer"),
        pytest.param(lambda t: 2 - 1.6 * t, lambda t: 1.0, id="noise went, frames still differ"),
        pytest.param(lambda t: 2 + t, lambda t: 1 + t, id="livelier"),
    ],
)
def test_clips_that_go_on_moving_are_not(motion: Course, frames: Course) -> None:
    assert not any(rested(motion, frames))


def test_a_real_run_paid_for_its_pictures_alone_freezes_its_clips_and_is_suspected(tmp_path: Path) -> None:
    paid = [*GAMED, "rewards.still.weight=0", "steps=30", "optim.lr=5e-3"]
    told = warnings(watched("reward-gradient-toy-video", tmp_path, *QUICK, *paid))
    assert told and "the clips came to rest: their motion fell from" in told[-1]


def watched(recipe: str, place: Path, *overrides: str) -> list[Event]:
    run = build(load(recipe, list(overrides)), place)
    return list(train(run))


def warnings(events: list[Event]) -> list[str]:
    return [event.warning for event in events if isinstance(event, Guarded) and event.warning]


@pytest.mark.parametrize("recipe", ["grpo-toy-flow", "grpo-toy-causal", "grpo-toy-masked", "reward-gradient-toy-video"])
def test_every_family_is_guarded(recipe: str, tmp_path: Path) -> None:
    looks = [event for event in watched(recipe, tmp_path, *SMALL) if isinstance(event, Guarded)]
    assert [look.step for look in looks] == [0, 2, 4]
    wanted = {"reward", "diversity", "variety", "entropy", "edges", "saturation", "dark"}
    assert wanted <= set(looks[0].metrics) and all(math.isfinite(x) for look in looks for x in look.metrics.values())


@pytest.mark.parametrize("recipe", ["grpo-toy-flow", "grpo-toy-causal", "ddpo-toy-causal", "nft-toy-flow"])
def test_the_guard_changes_no_bit_of_the_weights(recipe: str, tmp_path: Path) -> None:
    found = []
    for every in (0, 1):
        run = build(load(recipe, [*SMALL, "ema=0.9", "sample.use=ema", f"guard.every={every}"]), tmp_path / str(every))
        list(train(run))
        found.append({key: p.detach().clone() for key, p in run.policy.weights.trainable().items()})
    assert all(found[0][key].equal(found[1][key]) for key in found[0])


def test_the_same_weights_are_judged_alike_in_any_chunks(tmp_path: Path) -> None:
    looks = []
    for rows in ("null", "3"):
        looks.append(judge(build(load("grpo-toy-causal", [*SMALL, f"batch.rollout={rows}"]), tmp_path), 0).metrics)
    assert looks[0] == pytest.approx(looks[1], abs=1e-5)


def test_without_rewards_there_is_nothing_to_guard(tmp_path: Path) -> None:
    assert not any(isinstance(event, Guarded) for event in watched("likelihood-toy-flow", tmp_path, *SMALL))


@pytest.mark.parametrize("recipe", ["draft-toy-flow", "grpo-toy-masked"])
def test_a_real_run_whose_reward_is_gamed_is_suspected(recipe: str, tmp_path: Path) -> None:
    told = warnings(watched(recipe, tmp_path, *QUICK, *GAMED, "steps=40"))
    assert told and "held-out reward 'color' fell" in told[-1]


@pytest.mark.parametrize("recipe", ["draft-toy-flow", "grpo-toy-causal"])
def test_a_real_run_that_learns_what_was_meant_is_not(recipe: str, tmp_path: Path) -> None:
    assert not warnings(watched(recipe, tmp_path, *QUICK, "steps=60"))


def test_a_run_that_narrows_because_it_was_taught_well_before_is_not_suspected(tmp_path: Path) -> None:
    watched("likelihood-toy-flow", tmp_path / "base", "sample.every=0", "steps=300")
    run = build(load("draft-toy-flow", [*QUICK, "steps=60"]), tmp_path / "more", init_from=tmp_path / "base")
    assert not warnings(list(train(run)))


def test_the_guard_stops_a_run_if_asked(tmp_path: Path) -> None:
    events = watched("draft-toy-flow", tmp_path, *QUICK, *GAMED, "steps=100", "guard.stop=true")
    end, saved = events[-1], events[-2]
    assert isinstance(end, Finished) and end.step < 100 and isinstance(saved, Saved) and saved.step == end.step
    assert end.reason.startswith(f"stopped by the guard after step {end.step}: probable reward hacking")


def test_a_better_held_out_score_is_saved_and_named(tmp_path: Path) -> None:
    twin = "rewards={color: {type: color}, twin: {type: color, weight: 0}}"
    events = watched("draft-toy-flow", tmp_path, *QUICK, twin, "steps=30", "checkpoint.every=100")
    assert [event.step for event in events if isinstance(event, Saved)] == [10, 20, 30]
    assert (tmp_path / "checkpoints/best").resolve() == folders.named(tmp_path, 30).resolve()
    again = build(load("draft-toy-flow", [*QUICK, twin]), tmp_path / "b", init_from=tmp_path / "checkpoints/best")
    assert again.policy.weights.trainable()


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    run = build(load("draft-toy-flow", [*QUICK, *GAMED, "checkpoint.keep=1"]), tmp_path)
    kept = []
    for step, score in ((0, 0.5), (2, 0.9), (4, 0.6), (6, 0.4), (8, 1.0), (10, 0.3)):
        run.history.add(Look(step, {"reward": [score] * 4, "reward/color": [score] * 4}, {}))
        if step:
            run.save(step)
            kept.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")))
    two, four, six, eight, ten = (f"step-{step:06d}" for step in (2, 4, 6, 8, 10))
    assert kept == [[two], [two, four], [two, six], [eight], [eight, ten]]
    assert (tmp_path / "checkpoints/best").resolve().name == eight
    assert checkpoint.latest(tmp_path) == folders.named(tmp_path, 10)


def test_a_resumed_run_remembers_what_it_saw(tmp_path: Path) -> None:
    whole = build(load("grpo-toy-flow", [*SMALL, "steps=6"]), tmp_path / "whole")
    list(train(whole))
    list(train(build(load("grpo-toy-flow", [*SMALL, "steps=4"]), tmp_path / "parts")))
    later = build(load("grpo-toy-flow", [*SMALL, "steps=6"]), tmp_path / "parts")
    found = checkpoint.latest(tmp_path / "parts")
    assert found is not None
    later.resume(found)
    assert [look.step for look in later.history.looks] == [0, 2, 4]
    list(train(later))
    assert later.history.state() == whole.history.state()


@pytest.mark.slow
@pytest.mark.ranks
def test_several_ranks_see_what_one_sees(tmp_path: Path) -> None:
    # Fifteen samples do not divide among two ranks: one is made twice, and counted once.
    settings = ("steps=2", "guard.every=1", "guard.prompts=5", "guard.per_prompt=3", "engine.strategy=fsdp")
    looks = []
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        finish(launch("grpo-toy-causal", place, *(settings if ranks > 1 else settings[:-1]), ranks=ranks))
        looks.append(json.loads((place / "checkpoints/step-000002/state.json").read_text())["extra"]["guard"])
    assert len(looks[0]) == 3
    for one, two in zip(*looks, strict=True):
        assert {n: pytest.approx(rows, abs=1e-4) for n, rows in one["rows"].items()} == two["rows"]
