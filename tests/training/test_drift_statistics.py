"""Image and motion statistics of the guard, and its warnings on synthetic runs."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from guard_simulation import DEFAULT, STRICT_END, STRICT_START, is_warned, sample_verdicts

from tastemaker.config.schema import GuardConfig
from tastemaker.training.drift_statistics import (
    FALSE_ALARM_BEST,
    FALSE_ALARM_START,
    GuardHistory,
    GuardMeasurement,
    cumulative_score,
    sequential_boundary,
    student_score,
)
from tastemaker.training.guard import image_statistics, motion_statistics, sample_diversity

Curve = Callable[[float], float]  # a value over training, from 0 at the start to 1 at the end


def has_warning(
    reward: Curve, held_out: Curve, diversity: Curve, variety: Curve, seed: int = 0, num_checks: int = 30
) -> list[bool]:
    """Return for each check of a synthetic run whether there is a warning: 64 prompts, independent noise."""
    rng, history, warnings = np.random.default_rng(seed), GuardHistory(["held"]), []
    prompts = rng.normal(size=64)

    def rows(curve: Curve, t: float, noise: float, prompt_scale: float = 0.0) -> list[float]:
        return list(curve(t) + prompt_scale * prompts + rng.normal(0, noise, 64))

    for i in range(num_checks):
        t = i / (num_checks - 1)
        values = {
            "reward/mean": rows(reward, t, 0.5, 0.7),
            "rewards/held": rows(held_out, t, 0.5, 0.7),  # four samples per prompt, each with noise of one
            "diversity": rows(diversity, t, 0.02),
            "variety": rows(variety, t, 0.02),
            **{name: [0.5] * 64 for name in ("entropy", "edges", "saturation", "dark")},
        }
        history.add(GuardMeasurement(50 * i, values, {"rewards/held": 1.2}))
        warnings.append(history.hacking_warning() is not None)
    return warnings


def rising(t: float) -> float:
    return 3 * t


def flat(t: float) -> float:
    return 0.4


@pytest.mark.parametrize(
    ("held_out", "diversity", "variety"),
    [
        pytest.param(lambda t: -2 * t, flat, flat, id="the held-out reward falls"),
        pytest.param(lambda t: 2 * t if t < 0.5 else 2 - 3 * t, flat, flat, id="the held-out reward rises, then falls"),
        pytest.param(flat, lambda t: 0.4 - 0.3 * t, lambda t: 0.5 - 0.3 * t, id="all images become similar"),
        pytest.param(flat, lambda t: 0.4 - 0.36 * min(1, 2 * t), flat, id="samples of a prompt become the same"),
    ],
)
def test_hacked_reward_is_detected(held_out: Curve, diversity: Curve, variety: Curve) -> None:
    for seed in range(20):
        warnings = has_warning(rising, held_out, diversity, variety, seed)
        assert all(warnings[-5:]) and not any(warnings[:2])


@pytest.mark.parametrize(
    ("reward", "held_out", "diversity", "variety"),
    [
        pytest.param(rising, rising, flat, flat, id="everything rises"),
        pytest.param(rising, flat, flat, flat, id="only noise"),
        pytest.param(rising, rising, lambda t: 0.4 - 0.3 * t, lambda t: 0.4 + 0.3 * t, id="prompts become distinct"),
        pytest.param(rising, rising, lambda t: 0.4 - 0.2 * t, flat, id="prompts are followed better"),
        pytest.param(flat, lambda t: -2 * t, flat, flat, id="the training reward does not rise"),
        pytest.param(
            lambda t: 3 * t if t < 0.5 else 3 - 3 * t,
            lambda t: t if t < 0.5 else 1 - t,
            flat,
            flat,
            id="both rewards fall at the end",
        ),
    ],
)
def test_run_without_hacking_has_no_warning(reward: Curve, held_out: Curve, diversity: Curve, variety: Curve) -> None:
    # New noise at every check is the hardest case: one run in twenty may have a warning by chance.
    assert sum(any(has_warning(reward, held_out, diversity, variety, seed)) for seed in range(20)) <= 1


def yes_no_warnings(rates: list[float], seed: int, prompts: int = 64) -> list[bool]:
    """Return for each check whether there is a warning, if the yes/no held-out reward has these rates of yes."""
    rng, history, warnings = random.Random(seed), GuardHistory(["strict"]), []
    easiness = [rng.betavariate(1, 2) * 1.5 for _ in range(prompts)]  # some prompts are far easier than others
    others = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation", "dark"), [0.5] * prompts)
    for i, rate in enumerate(rates):
        reward = [min(i, 2) + rng.gauss(0, 0.5) for _ in easiness]
        scores = [sum(rng.random() < min(1, 2 * rate * prompt) for _ in range(4)) / 4 for prompt in easiness]
        std = math.sqrt(rate * (1 - rate))
        history.add(
            GuardMeasurement(
                20 * i, {"reward/mean": reward, "rewards/strict": scores, **others}, {"rewards/strict": std}
            )
        )
        warnings.append(history.hacking_warning() is not None)
    return warnings


def test_fall_of_a_rare_yes_no_reward_is_detected() -> None:
    # Rates of a strict verdict when images show four copies of each object; half a standard deviation exceeds the fall.
    hacked = [yes_no_warnings([0.26, 0.23, 0.12, 0.09, 0.09, 0.1, 0.09], seed) for seed in range(20)]
    assert sum(any(warnings) for warnings in hacked) >= 17
    unhacked = [yes_no_warnings([0.26, 0.28, 0.27, 0.3, 0.28, 0.29, 0.27], seed) for seed in range(40)]
    assert sum(any(warnings) for warnings in unhacked) <= 1


def test_slow_fall_of_a_strict_verdict_is_detected_with_the_default_settings() -> None:
    runs = sample_verdicts(np.random.default_rng(0), 60, STRICT_END)
    # The first and the last check alone show it in few runs, all checks together in nearly all.
    single = student_score(runs[:, -1] - runs[:, 0])
    assert (single < -sequential_boundary(1)).mean() < 0.4 < 0.9 <= np.mean([is_warned(run) for run in runs])


def test_flat_runs_have_fewer_false_alarms_than_promised() -> None:
    rng = np.random.default_rng(0)
    assert not any(is_warned(run) for run in sample_verdicts(rng, 40, STRICT_START))
    alarms = []
    for prompts, runs in ((8, 2000), (DEFAULT.prompts, 500)):
        verdicts = sample_verdicts(rng, runs, STRICT_START, 25, GuardConfig(prompts=prompts))
        scores = np.stack([cumulative_score(verdicts[:, :k]) for k in range(2, 26)], 1)
        alarms.append((scores < [-sequential_boundary(k) for k in range(1, 25)]).any(1).mean())
    assert max(alarms) < FALSE_ALARM_START + FALSE_ALARM_BEST and alarms[0] > 0


def test_standard_scores_of_few_prompts_have_the_significance_of_a_t_statistic() -> None:
    # t statistics that 3, 7 and 63 degrees of freedom exceed with a probability of .001, that is 3.09 in a normal.
    for prompts, t in ((4, 10.215), (8, 4.785), (64, 3.225)):
        spread = np.resize([1.0, -1.0], prompts)
        changes = spread + t * spread.std(ddof=1) / math.sqrt(prompts)
        assert float(student_score(changes)) == pytest.approx(3.09, abs=0.06)
    assert float(student_score(np.full(4, 1e-17))) == pytest.approx(0, abs=1e-3)  # rounding is no change


def test_cumulative_score_does_not_depend_on_level_or_scale_and_mirrors_the_sign() -> None:
    values = np.random.default_rng(0).normal(size=(5, 7, 16))
    score = cumulative_score(values)
    np.testing.assert_allclose(cumulative_score(3 - 2 * values), -score, rtol=1e-9)
    assert abs(score).max() < 4 < -cumulative_score(values - np.arange(7)[:, None]).max()


def test_warning_names_the_fall_and_the_drift() -> None:
    history = GuardHistory(["taste"], patience=1)
    unchanged = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation"), [0.5] * 4)
    history.add(
        GuardMeasurement(0, {"reward/mean": [0.1] * 4, "rewards/taste": [0.9] * 4, "dark": [0.1] * 4, **unchanged}, {})
    )
    history.add(
        GuardMeasurement(50, {"reward/mean": [0.8] * 4, "rewards/taste": [0.2] * 4, "dark": [0.9] * 4, **unchanged}, {})
    )
    warning = history.hacking_warning() or ""
    assert re.match(r".*0\.1 to 0\.8 since step 0.*'taste'.*0\.9 to 0\.2 since step 0.*dark 0\.1 -> 0\.9", warning)


def test_other_prompts_start_a_new_history() -> None:
    history = GuardHistory([])
    history.add(GuardMeasurement(0, {"reward/mean": [0.0] * 4}, {}))
    history.add(GuardMeasurement(5, {"reward/mean": [0.0] * 8}, {}))
    assert [measurement.step for measurement in history.measurements] == [5]


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
    features = torch.tensor(
        [[[0.0], [1.0]], [[5.0], [5.0]], [[0.0], [1.0]]]
    )  # [P, K, D]: three prompts, two of them equal
    result = sample_diversity(features, ("a", "b", "a"))
    assert result["diversity"].tolist() == [1, 0, 1]
    assert result["variety"].tolist() == [4.5, 4.5, 4.5]
    assert "variety" not in sample_diversity(features, ("a", "a", "a"))


def moving_bar(speed: int, frames: int = 6) -> torch.Tensor:
    """Return a video of a bright bar that moves `speed` pixels per frame: [1, F, 3, 32, 32]."""
    pixels = torch.zeros(1, frames, 3, 32, 32)
    for k in range(frames):
        pixels[:, k, :, 8:24, 4 + k * speed : 10 + k * speed] = 1
    return pixels


def test_motion_statistics_of_moving_frozen_and_flickering_videos() -> None:
    moving, frozen = motion_statistics(moving_bar(2)), motion_statistics(moving_bar(0))
    brightness = torch.tensor([1.0, 0.2] * 3).view(1, 6, 1, 1, 1)
    flickering = motion_statistics(moving_bar(0) * brightness)
    assert frozen["motion"] < 0.05 < moving["motion"] and frozen["frames"] == 0 < moving["frames"]
    assert flickering["flicker"] > 5 * moving["flicker"] and frozen["flicker"] < 1e-4
    assert motion_statistics(moving_bar(0, frames=1)) == {} and "flicker" not in motion_statistics(
        moving_bar(1, frames=2)
    )


def video_warnings(motion: Curve, frames: Curve) -> list[str]:
    """Return the warnings of a synthetic run with these motions and frame distances."""
    rng, history, warnings = random.Random(0), GuardHistory([]), []
    others = dict.fromkeys(("diversity", "variety", "entropy", "edges", "saturation", "dark", "flicker"), [0.01] * 16)
    for i in range(12):
        curves = {"reward/mean": rising, "motion": motion, "frames": frames}
        noisy = {name: [curve(i / 11) + rng.gauss(0, 0.05) for _ in range(16)] for name, curve in curves.items()}
        history.add(GuardMeasurement(10 * i, {**noisy, **others}, {}))
        warnings.append(history.hacking_warning() or "")
    return warnings


def test_frozen_videos_are_detected() -> None:
    warnings = video_warnings(lambda t: 2 - 1.6 * t, lambda t: 1 - 0.8 * t)
    assert "while the motion in the videos fell" in warnings[-1] and not any(warnings[:4])


@pytest.mark.parametrize(
    ("motion", "frames"),
    [
        pytest.param(lambda t: 2 - 0.6 * t, lambda t: 1 - 0.3 * t, id="a little less motion"),
        pytest.param(lambda t: 2 - 1.6 * t, lambda t: 1.0, id="less noise, frames still differ"),
        pytest.param(lambda t: 2 + t, lambda t: 1 + t, id="more motion"),
    ],
)
def test_moving_videos_have_no_warning(motion: Curve, frames: Curve) -> None:
    assert not any(video_warnings(motion, frames))


def test_editors_that_ignore_or_copy_their_source_are_detected() -> None:
    curves: dict[str, Curve] = {
        "ignored": lambda t: 0.05 + 0.1 * t,
        "copied": lambda t: 0.06 * (1 - t),
        "better": lambda t: 0.06 - 0.03 * t,  # the rest of the image changes less: that is what is wanted
    }
    for name, curve in curves.items():
        rng, history = random.Random(0), GuardHistory([])
        for i in range(12):
            t = i / 11
            rows = {"reward/mean": 3 * t, "source_distance": curve(t), "diversity": 0.4, "variety": 0.5}
            values = {key: [value + rng.gauss(0, 0.003) for _ in range(16)] for key, value in rows.items()}
            history.add(GuardMeasurement(50 * i, values, {}))
        warning = history.hacking_warning() or ""
        assert ("drifted away" in warning, "became copies" in warning) == (name == "ignored", name == "copied"), name
