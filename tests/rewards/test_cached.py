"""Scores remembered: asked once, kept for other processes, told apart by all that matters."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Reward, RewardCard, RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.cached import CachedReward, ScoreCache, reward_fingerprint, score_key
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.wrappers import ClippedReward

PIXELS = torch.rand(4, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
PROMPTS = ("a", "b", "c", "")


@dataclass(frozen=True, eq=False)
class Slow(RewardSpec, Reward):
    """The mean, and a note of every row it was asked about."""

    asked: list[str] = field(default_factory=list, repr=False)
    weights: str = ""
    batch_size: int = 64
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: bool = True
    modality: Literal["image", "video"] = "image"
    runs_on: Literal["device", "host", "remote"] = "device"

    def load(self, placement: Placement) -> Slow:
        return self

    def tiny(self) -> Slow:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.asked.extend(prompts)
        return pixels.mean((1, 2, 3, 4))


def scored(spec: Any, pixels: Tensor = PIXELS, prompts: Prompts = PROMPTS, metadata: Sequence[Metadata] = ()) -> Tensor:
    return Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, prompts, metadata).total


def test_the_same_row_is_asked_about_once_and_scores_alike() -> None:
    slow = Slow()
    reward = CachedReward(slow).load(Placement())
    rubric = Rubric({"it": WeightedReward(CachedReward(slow), reward)})
    first, again = (rubric.score(PIXELS, PROMPTS).total for _ in range(2))
    assert slow.asked == list(PROMPTS)
    assert first.equal(again) and first.equal(PIXELS.mean((1, 2, 3, 4)))


def test_equal_rows_of_one_batch_are_asked_about_once() -> None:
    slow = Slow()
    found = scored(CachedReward(slow), PIXELS[[0, 1, 0, 0]], ["a", "b", "a", "a"])
    assert sorted(slow.asked) == ["a", "b"]
    assert found.equal(PIXELS[[0, 1, 0, 0]].mean((1, 2, 3, 4)))


def test_pixels_prompt_metadata_and_settings_tell_scores_apart() -> None:
    row = PIXELS[0]
    changed = row.clone()
    changed[0, 0, 0, 0] += 1e-7
    keys = [
        score_key("one", row, "a", {}),
        score_key("two", row, "a", {}),
        score_key("one", changed, "a", {}),
        score_key("one", row.view(1, 3, 2, 8), "a", {}),
        score_key("one", row, "b", {}),
        score_key("one", row, "a", {"frame": 1}),
        score_key("one", row, "a", {"target": row}),
        score_key("one", row, "a", {"target": changed}),
    ]
    assert len(set(keys)) == len(keys)
    assert score_key("one", row, "a", {"x": 1, "y": 2}) == score_key("one", row.clone(), "a", {"y": 2, "x": 1})
    assert reward_fingerprint(BrightnessReward()) != reward_fingerprint(BrightnessReward(0.5))
    assert reward_fingerprint(ClippedReward(BrightnessReward(), 0.0)) != reward_fingerprint(
        ClippedReward(BrightnessReward(0.5), 0.0)
    )


def test_weights_that_were_written_anew_are_another_reward(tmp_path: Path) -> None:
    (tmp_path / "head.pt").write_bytes(b"one")
    spec = Slow(weights=str(tmp_path / "head.pt"))
    before = reward_fingerprint(spec)
    assert reward_fingerprint(spec) == before
    (tmp_path / "head.pt").write_bytes(b"other")
    assert reward_fingerprint(spec) != before
    folder = Slow(weights=str(tmp_path))
    before = reward_fingerprint(folder)
    os.utime(tmp_path / "head.pt", (1, 1))
    assert reward_fingerprint(folder) != before


def test_metadata_no_key_can_be_made_of_are_a_sentence() -> None:
    with pytest.raises(RewardError, match="metadata holds a object"):
        scored(CachedReward(Slow()), metadata=[{"thing": object()}] * 4)


def test_scores_on_disk_serve_the_next_run(tmp_path: Path) -> None:
    first, second = Slow(), Slow()
    one, two = (scored(CachedReward(slow, tmp_path / "deep")) for slow in (first, second))
    assert first.asked == list(PROMPTS) and second.asked == []
    assert one.equal(two)


def test_where_gradients_flow_the_reward_itself_is_asked(tmp_path: Path) -> None:
    slow = Slow()
    reward = CachedReward(slow).load(Placement())
    rubric, pixels = Rubric({"it": WeightedReward(CachedReward(slow), reward)}), PIXELS.clone().requires_grad_()
    rubric.score(PIXELS, PROMPTS)
    (gradient,) = torch.autograd.grad(rubric.score(pixels, PROMPTS).total.sum(), pixels)
    torch.testing.assert_close(gradient, torch.full_like(PIXELS, 1 / PIXELS[0].numel()))
    assert len(slow.asked) == 8


def test_the_oldest_are_forgotten_beyond_the_bound(tmp_path: Path) -> None:
    book = ScoreCache(tmp_path / "scores.sqlite", 10)
    keys = [bytes([i]) for i in range(25)]
    for each in keys:
        book.put({each: float(each[0])})
    assert book.get(keys) == {each: float(each[0]) for each in keys[15:]}
    assert len(ScoreCache(None, 3).get(keys)) == 0


def test_more_keys_than_a_query_takes_are_found() -> None:
    book = ScoreCache(None, 10_000)
    scores = {i.to_bytes(4, "big"): i / 7 for i in range(3000)}
    book.put(scores)
    assert book.get(list(scores)) == scores


def fill(path: Path, start: int) -> None:
    book = ScoreCache(path, 10_000)
    for i in range(start, start + 50):
        book.put({i.to_bytes(4, "big"): float(i), (10**6).to_bytes(4, "big"): 1.0})


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path, spawn = tmp_path / "scores.sqlite", multiprocessing.get_context("fork")
    others = [spawn.Process(target=fill, args=(path, 100 * k)) for k in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    wanted = {i.to_bytes(4, "big"): float(i) for k in range(3) for i in range(100 * k, 100 * k + 50)}
    assert ScoreCache(path, 10_000).get(list(wanted)) == wanted


def test_a_broken_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "scores.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"score cache .*scores.sqlite cannot be used .*; remove it, or move it"):
        CachedReward(Slow(), tmp_path).load(Placement())


def test_a_score_that_is_not_finite_is_told_and_not_remembered(tmp_path: Path) -> None:
    @dataclass(frozen=True, eq=False)
    class Odd(Slow):
        def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
            return torch.full((len(pixels),), float("nan"))

    with pytest.raises(RewardError, match="returned NaN or infinity"):
        scored(CachedReward(Odd(), tmp_path))
    with pytest.raises(RewardError, match="returned NaN or infinity"):
        scored(CachedReward(Odd(), tmp_path))


def test_it_follows_the_reward_inside() -> None:
    spec = CachedReward(BrightnessReward(batch_size=3), Path("somewhere"))
    assert (spec.differentiable, spec.modality, spec.runs_on, spec.batch_size) == (True, "image", "device", 3)
    assert spec.tiny().directory is None
    assert hash(spec) == hash(CachedReward(BrightnessReward(batch_size=3), Path("somewhere")))
