"""CCA: the negative condition of a sample is the condition of the next one, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import toys

from tastemaker.core.objective import SingleProcess
from tastemaker.core.types import select_rows
from tastemaker.objectives.cca import CCA


@dataclass(frozen=True)
class KnownOtherRanks(SingleProcess):
    """One of several ranks; the prompts of all ranks are known in advance."""

    all_prompts: tuple[str, ...] = ()

    def gather_objects(self, items: Sequence[Any]) -> list[Any]:
        first = self.rank * len(items)
        assert tuple(items) == self.all_prompts[first : first + len(items)]
        return list(self.all_prompts)


def test_negatives_do_not_depend_on_the_number_of_ranks() -> None:
    policy = toys.policy("causal", snapshots=("reference",))
    objective, ctx, images = CCA(prompt_dropout=0.3), toys.context(policy, 8), toys.image_batch(8, 1, 0)
    batch = replace(images, prompts=tuple(f"{color} {i}" for i in range(2) for color in toys.PROMPTS))
    expected = objective.collect(ctx, batch)
    assert expected.negative.prompts == batch.prompts[1:] + batch.prompts[:1]
    for world_size in (2, 4):
        for rank, rows in enumerate(torch.arange(8).chunk(world_size)):
            comm = KnownOtherRanks(rank, world_size, batch.prompts)
            own_batch, own_rng = select_rows((batch, ctx.rng), rows)
            pairs = objective.collect(replace(ctx, rng=own_rng, comm=comm), own_batch)
            own = slice(int(rows[0]), int(rows[-1]) + 1)
            assert pairs.negative.prompts == expected.negative.prompts[own]
            assert pairs.positive.prompts == expected.positive.prompts[own]
            assert pairs.has_no_negative.equal(expected.has_no_negative[own]) and pairs.x.equal(expected.x[own])
