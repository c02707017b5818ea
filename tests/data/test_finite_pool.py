"""A finite pool of samples from an endless dataset."""

from __future__ import annotations

import torch

from tastemaker.data.dataset import FinitePool
from tastemaker.data.playground import PlaygroundScenes


def load_pool(count: int = 10) -> FinitePool:
    data = PlaygroundScenes(pool_size=count, device="cpu").load(3)
    assert isinstance(data, FinitePool)
    return data


def test_first_epoch_of_a_pool_equals_its_source() -> None:
    endless = PlaygroundScenes(device="cpu").load(3)
    ours, theirs = load_pool().batch(1, 4, 0, 1), endless.batch(1, 4, 0, 1)
    assert ours.prompts == theirs.prompts and ours.pixels.equal(theirs.pixels) and ours.image_ids is None


def test_later_epochs_visit_every_sample_once() -> None:
    data = load_pool()
    batches = [data.batch(step, 5, 0, 1) for step in (2, 3, 4, 5)]
    numbers = [torch.cat([a.image_ids, b.image_ids]) for a, b in (batches[:2], batches[2:]) if a.image_ids is not None]
    assert all(sorted(each.tolist()) == list(range(10)) for each in numbers)
    assert not numbers[0].equal(numbers[1])


def test_image_id_identifies_an_image() -> None:
    data = load_pool()
    endless = PlaygroundScenes(device="cpu").load(3).batch(0, 10, 0, 1)
    batch = data.batch(1, 10, 0, 1)
    assert batch.image_ids is not None
    assert batch.prompts == tuple(endless.prompts[i] for i in batch.image_ids.tolist())
    assert (batch.pixels - endless.pixels[batch.image_ids]).abs().max() <= 0.5 / 255 + 1e-6


def test_rank_shards_cover_a_step_across_epochs() -> None:
    data = load_pool()
    whole = data.batch(2, 8, 0, 1)
    parts = [data.batch(2, 8, rank, 2) for rank in (0, 1)]
    assert parts[0].prompts + parts[1].prompts == whole.prompts
    assert torch.cat([part.pixels for part in parts]).equal(whole.pixels)
