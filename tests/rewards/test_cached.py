"""Cached rewards: each sample is scored once, scores are shared on disk, and keys cover every input of a score."""

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
class CountingReward(RewardSpec, Reward):
    """The mean of the pixels; records the prompt of every sample it scores."""

    scored_prompts: list[str] = field(default_factory=list, repr=False)
    weights: str = ""
    batch_size: int = 64
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: bool = True
    modality: Literal["image", "video"] = "image"
    runs_on: Literal["device", "host", "remote"] = "device"

    def load(self, placement: Placement) -> CountingReward:
        return self

    def tiny(self) -> CountingReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.scored_prompts.extend(prompts)
        return pixels.mean((1, 2, 3, 4))


def compute_scores(
    spec: Any, pixels: Tensor = PIXELS, prompts: Prompts = PROMPTS, metadata: Sequence[Metadata] = ()
) -> Tensor:
    return Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, prompts, metadata).total


def test_repeated_samples_are_scored_once_and_equal() -> None:
    counting = CountingReward()
    reward = CachedReward(counting).load(Placement())
    rubric = Rubric({"it": WeightedReward(CachedReward(counting), reward)})
    first, second = (rubric.score(PIXELS, PROMPTS).total for _ in range(2))
    assert counting.scored_prompts == list(PROMPTS)
    assert first.equal(second) and first.equal(PIXELS.mean((1, 2, 3, 4)))


def test_duplicate_samples_in_a_batch_are_scored_once() -> None:
    counting = CountingReward()
    scores = compute_scores(CachedReward(counting), PIXELS[[0, 1, 0, 0]], ["a", "b", "a", "a"])
    assert sorted(counting.scored_prompts) == ["a", "b"]
    assert scores.equal(PIXELS[[0, 1, 0, 0]].mean((1, 2, 3, 4)))


def test_cache_key_depends_on_pixels_prompt_metadata_and_settings() -> None:
    sample = PIXELS[0]
    changed = sample.clone()
    changed[0, 0, 0, 0] += 1e-7
    keys = [
        score_key("one", sample, "a", {}),
        score_key("two", sample, "a", {}),
        score_key("one", changed, "a", {}),
        score_key("one", sample.view(1, 3, 2, 8), "a", {}),
        score_key("one", sample, "b", {}),
        score_key("one", sample, "a", {"frame": 1}),
        score_key("one", sample, "a", {"target": sample}),
        score_key("one", sample, "a", {"target": changed}),
    ]
    assert len(set(keys)) == len(keys)
    assert score_key("one", sample, "a", {"x": 1, "y": 2}) == score_key("one", sample.clone(), "a", {"y": 2, "x": 1})
    assert reward_fingerprint(BrightnessReward()) != reward_fingerprint(BrightnessReward(0.5))
    assert reward_fingerprint(ClippedReward(BrightnessReward(), 0.0)) != reward_fingerprint(
        ClippedReward(BrightnessReward(0.5), 0.0)
    )


def test_changed_weights_file_changes_the_reward_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "head.pt").write_bytes(b"one")
    spec = CountingReward(weights=str(tmp_path / "head.pt"))
    before = reward_fingerprint(spec)
    assert reward_fingerprint(spec) == before
    (tmp_path / "head.pt").write_bytes(b"other")
    assert reward_fingerprint(spec) != before
    folder = CountingReward(weights=str(tmp_path))
    before = reward_fingerprint(folder)
    os.utime(tmp_path / "head.pt", (1, 1))
    assert reward_fingerprint(folder) != before


def test_metadata_that_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(RewardError, match=r"metadata holds a object.*TM375"):
        compute_scores(CachedReward(CountingReward()), metadata=[{"thing": object()}] * 4)


def test_scores_on_disk_are_reused_by_the_next_run(tmp_path: Path) -> None:
    first, second = CountingReward(), CountingReward()
    one, two = (compute_scores(CachedReward(counting, tmp_path / "deep")) for counting in (first, second))
    assert first.scored_prompts == list(PROMPTS) and second.scored_prompts == []
    assert one.equal(two)


def test_gradients_bypass_the_cache(tmp_path: Path) -> None:
    counting = CountingReward()
    reward = CachedReward(counting).load(Placement())
    rubric, pixels = Rubric({"it": WeightedReward(CachedReward(counting), reward)}), PIXELS.clone().requires_grad_()
    rubric.score(PIXELS, PROMPTS)
    (gradient,) = torch.autograd.grad(rubric.score(pixels, PROMPTS).total.sum(), pixels)
    torch.testing.assert_close(gradient, torch.full_like(PIXELS, 1 / PIXELS[0].numel()))
    assert len(counting.scored_prompts) == 8


def test_oldest_scores_are_evicted_beyond_max_entries(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "scores.sqlite", 10)
    keys = [bytes([i]) for i in range(25)]
    for key in keys:
        cache.put({key: float(key[0])})
    assert cache.get(keys) == {key: float(key[0]) for key in keys[15:]}
    assert len(ScoreCache(None, 3).get(keys)) == 0


def test_lookup_of_more_keys_than_one_query_holds() -> None:
    cache = ScoreCache(None, 10_000)
    scores = {i.to_bytes(4, "big"): i / 7 for i in range(3000)}
    cache.put(scores)
    assert cache.get(list(scores)) == scores


def write_scores(path: Path, start: int) -> None:
    cache = ScoreCache(path, 10_000)
    for i in range(start, start + 50):
        cache.put({i.to_bytes(4, "big"): float(i), (10**6).to_bytes(4, "big"): 1.0})


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path, spawn = tmp_path / "scores.sqlite", multiprocessing.get_context("fork")
    workers = [spawn.Process(target=write_scores, args=(path, 100 * k)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        assert worker.exitcode == 0
    expected = {i.to_bytes(4, "big"): float(i) for k in range(3) for i in range(100 * k, 100 * k + 50)}
    assert ScoreCache(path, 10_000).get(list(expected)) == expected


def test_corrupt_cache_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scores.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"score cache .*scores\.sqlite.*TM374"):
        CachedReward(CountingReward(), tmp_path).load(Placement())


def test_nan_score_is_refused_and_not_cached(tmp_path: Path) -> None:
    @dataclass(frozen=True, eq=False)
    class NanReward(CountingReward):
        def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
            return torch.full((len(pixels),), float("nan"))

    with pytest.raises(RewardError, match=r"NaN.*TM117"):
        compute_scores(CachedReward(NanReward(), tmp_path))
    with pytest.raises(RewardError, match=r"NaN.*TM117"):
        compute_scores(CachedReward(NanReward(), tmp_path))


def test_cached_reward_takes_traits_of_inner_reward() -> None:
    spec = CachedReward(BrightnessReward(batch_size=3), Path("somewhere"))
    assert (spec.differentiable, spec.modality, spec.runs_on, spec.batch_size) == (True, "image", "device", 3)
    assert spec.tiny().directory is None
    assert hash(spec) == hash(CachedReward(BrightnessReward(batch_size=3), Path("somewhere")))
