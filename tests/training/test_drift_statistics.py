"""Image and motion statistics of the guard, and its warnings on synthetic runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from tastemaker.training.drift_statistics import GuardHistory, GuardMeasurement
from tastemaker.training.guard import image_statistics, motion_statistics, sample_diversity

Course = Callable[[float], float]  # of a value, from the start at 0 to the end at 1


def has_warning(
    reward: Course, held: Course, diversity: Course, variety: Course, seed: int = 0, looks: int = 30
) -> list[bool]:
    """Return for each check of a synthetic run whether there is a warning: 16 prompts, independent noise."""
    chance, history, suspected = random.Random(seed), GuardHistory(["held"]), []
    prompts = [chance.gauss(0, 1) for _ in range(16)]

    def rows(path: Course, t: float, noise: float, differ: float = 0.0) -> list[float]:
        return [path(t) + differ * prompt + chance.gauss(0, noise) for prompt in prompts]

    for i in range(looks):
        t = i / (looks - 1)
        values = {
            "reward/mean": rows(reward, t, 0.5, 0.7),
            "rewards/held": rows(held, t, 0.5, 0.7),  # four samples a prompt, each with noise of one
            "diversity": rows(diversity, t, 0.02),
            "variety": rows(variety, t, 0.02),
            **{name: [0.5] * 16 for name in ("entropy", "edges", "saturation", "dark")},
        }
        history.add(GuardMeasurement(50 * i, values, {"rewards/held": 1.2}))
        suspected.append(history.hacking_warning() is not None)
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
def test_hacked_reward_is_detected(held: Course, diversity: Course, variety: Course) -> None:
    for seed in range(20):
        suspected = has_warning(rising, held, diversity, variety, seed)
        assert all(suspected[-5:]) and not any(suspected[:2])


@pytest.mark.parametrize(
    ("reward", "held", "diversity", "variety"),
    [
        pytest.param(rising, rising, flat, flat, id="everything rises"),
        pytest.param(rising, flat, flat, flat, id="noise alone"),
        pytest.param(rising, rising, lambda t: 0.4 - 0.3 * t, lambda t: 0.4 + 0.3 * t, id="prompts become distinct"),
        pytest.param(rising, rising, lambda t: 0.4 - 0.2 * t, flat, id="prompts are met better"),
        pytest.param(flat, lambda t: -2 * t, flat, flat, id="nothing is gained"),
        pytest.param(
            lambda t: 3 * t if t < 0.5 else 3 - 3 * t, lambda t: t if t < 0.5 else 1 - t, flat, flat, id="fails"
        ),
    ],
)
def test_honest_run_has_no_warning(reward: Course, held: Course, diversity: Course, variety: Course) -> None:
    # Noise that is fresh at every look is the hardest case: one run in twenty may be suspected by chance.
    assert sum(any(has_warning(reward, held, diversity, variety, seed)) for seed in range(20)) <= 1


def verdicts(shares: list[float], seed: int, prompts: int = 64) -> list[bool]:
    """Return whether a run is suspected whose yes/no held-out reward has these shares of yes at each check."""
    chance, history, suspected = random.Random(seed), GuardHistory(["strict"]), []
    skill = [chance.betavariate(1, 2) * 1.5 for _ in range(prompts)]  # some prompts are far easier than others
    others = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation", "dark"), [0.5] * prompts)
    for i, share in enumerate(shares):
        reward = [min(i, 2) + chance.gauss(0, 0.5) for _ in skill]
        right = [sum(chance.random() < min(1, 2 * share * each) for _ in range(4)) / 4 for each in skill]
        spread = math.sqrt(share * (1 - share))
        history.add(
            GuardMeasurement(
                20 * i, {"reward/mean": reward, "rewards/strict": right, **others}, {"rewards/strict": spread}
            )
        )
        suspected.append(history.hacking_warning() is not None)
    return suspected


def test_fall_of_a_rare_yes_no_reward_is_detected() -> None:
    # What four copies of everything do to a strict verdict; half a standard deviation is more than there is to lose.
    gamed = [verdicts([0.26, 0.23, 0.12, 0.09, 0.09, 0.1, 0.09], seed) for seed in range(20)]
    assert sum(any(each) for each in gamed) >= 17
    honest = [verdicts([0.26, 0.28, 0.27, 0.3, 0.28, 0.29, 0.27], seed) for seed in range(40)]
    assert sum(any(each) for each in honest) <= 1


def test_warning_names_the_fall_and_the_drift() -> None:
    history = GuardHistory(["taste"], patience=1)
    same = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation"), [0.5] * 4)
    history.add(
        GuardMeasurement(0, {"reward/mean": [0.1] * 4, "rewards/taste": [0.9] * 4, "dark": [0.1] * 4, **same}, {})
    )
    history.add(
        GuardMeasurement(50, {"reward/mean": [0.8] * 4, "rewards/taste": [0.2] * 4, "dark": [0.9] * 4, **same}, {})
    )
    assert history.hacking_warning() == (
        "probable reward hacking: the training reward rose from 0.1 to 0.8 since step 0, while the held-out reward "
        "'taste' fell from 0.9 to 0.2 since step 0 (image statistics changed too: dark 0.1 -> 0.9)"
    )


def test_other_prompts_start_a_new_history() -> None:
    history = GuardHistory([])
    history.add(GuardMeasurement(0, {"reward/mean": [0.0] * 4}, {}))
    history.add(GuardMeasurement(5, {"reward/mean": [0.0] * 8}, {}))
    assert [look.step for look in history.measurements] == [5]


def test_image_statistics_of_known_images() -> None:
    black, white = torch.zeros(1, 2, 3, 8, 8), torch.ones(1, 2, 3, 8, 8)
    board = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).float().expand(1, 1, 3, 8, 8)
    red = torch.tensor([1.0, 0, 0]).view(1, 1, 3, 1, 1).expand(1, 1, 3, 8, 8)
    assert image_statistics(black)["dark"] == 1 and image_statistics(white)["dark"] == 0
    assert (
        image_statistics(black)["entropy"] == 0 and image_statistics(board)["entropy"] == 1
    )  # one bit: black or white
    assert image_statistics(board)["edges"] == 1 and image_statistics(red)["edges"] == 0
    assert image_statistics(red)["saturation"] == 1 and image_statistics(board)["saturation"] == 0


def test_diversity_and_variety_are_mean_distances() -> None:
    pictures = torch.tensor([[[0.0], [1.0]], [[5.0], [5.0]], [[0.0], [1.0]]])  # [P, K, D], two texts of three prompts
    result = sample_diversity(pictures, ("a", "b", "a"))
    assert result["diversity"].tolist() == [1, 0, 1]
    assert result["variety"].tolist() == [4.5, 4.5, 4.5]
    assert "variety" not in sample_diversity(pictures, ("a", "a", "a"))


def clip(speed: int, frames: int = 6) -> torch.Tensor:
    """Return a video of a bright bar that moves `speed` pixels per frame: [1, F, 3, 32, 32]."""
    pixels = torch.zeros(1, frames, 3, 32, 32)
    for k in range(frames):
        pixels[:, k, :, 8:24, 4 + k * speed : 10 + k * speed] = 1
    return pixels


def test_motion_statistics_of_moving_frozen_and_flickering_videos() -> None:
    moving, frozen = motion_statistics(clip(2)), motion_statistics(clip(0))
    light = torch.tensor([1.0, 0.2] * 3).view(1, 6, 1, 1, 1)
    flickering = motion_statistics(clip(0) * light)
    assert frozen["motion"] < 0.05 < moving["motion"] and frozen["frames"] == 0 < moving["frames"]
    assert flickering["flicker"] > 5 * moving["flicker"] and frozen["flicker"] < 1e-4
    assert motion_statistics(clip(0, frames=1)) == {} and "flicker" not in motion_statistics(clip(1, frames=2))


def rested(motion: Course, frames: Course) -> list[str]:
    """Return the warnings of a synthetic run with these motions and frame distances."""
    chance, history, output = random.Random(0), GuardHistory([]), []
    others = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation", "dark", "flicker"), [0.01] * 16)
    for i in range(12):
        courses = {"reward/mean": rising, "motion": motion, "frames": frames}
        noisy = {name: [path(i / 11) + chance.gauss(0, 0.05) for _ in range(16)] for name, path in courses.items()}
        history.add(GuardMeasurement(10 * i, {**noisy, **others}, {}))
        output.append(history.hacking_warning() or "")
    return output


def test_frozen_videos_are_detected() -> None:
    warnings = rested(lambda t: 2 - 1.6 * t, lambda t: 1 - 0.8 * t)
    assert "motion fell from 2" in warnings[-1] and not any(warnings[:4])


@pytest.mark.parametrize(
    ("motion", "frames"),
    [
        pytest.param(lambda t: 2 - 0.6 * t, lambda t: 1 - 0.3 * t, id="a little calmer"),
        pytest.param(lambda t: 2 - 1.6 * t, lambda t: 1.0, id="noise went, frames still differ"),
        pytest.param(lambda t: 2 + t, lambda t: 1 + t, id="livelier"),
    ],
)
def test_moving_videos_have_no_warning(motion: Course, frames: Course) -> None:
    assert not any(rested(motion, frames))
