"""GCPO: which tokens are critical, how they are weighted, and that training on them alone learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.nn.functional as F

from tastemaker.config.build import build
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.core.distributions import Categorical, ChunkedCategorical
from tastemaker.objectives.critical_tokens import (
    confidence_weights,
    critical_token_mask,
    entropy_gradient,
    group_similarity,
)
from tastemaker.objectives.grpo import GRPO
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train


def entropy_gradient_by_cells(entropy: torch.Tensor) -> torch.Tensor:
    side = round(len(entropy) ** 0.5)
    cells, smooth = entropy.view(side, side), torch.zeros(side, side)
    for i in range(side):
        for j in range(side):
            near = [(i, j), (i, j - 1), (i - 1, j - 1), (i - 1, j), (i - 1, j + 1)]
            smooth[i, j] = torch.stack([cells[a, b] for a, b in near if a >= 0 and 0 <= b < side]).mean()
    out = torch.zeros(side, side)
    for i in range(side):
        for j in range(side):
            rows, columns = (max(i - 1, 0), min(i + 1, side - 1)), (max(j - 1, 0), min(j + 1, side - 1))
            dy = (smooth[rows[1], j] - smooth[rows[0], j]) / (rows[1] - rows[0])
            dx = (smooth[i, columns[1]] - smooth[i, columns[0]]) / (columns[1] - columns[0])
            out[i, j] = (dx**2 + dy**2).sqrt()
    return out.flatten()


def test_entropy_gradient_equals_a_loop_over_cells() -> None:
    entropy = torch.rand(3, 36, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([entropy_gradient_by_cells(row) for row in entropy])
    torch.testing.assert_close(entropy_gradient(entropy), expected)


def test_group_similarity_is_the_mean_cosine_of_pairs() -> None:
    embeddings = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
    first = embeddings[:3]
    cosines = F.cosine_similarity(first[:, None], first[None], dim=-1)  # [G, G, K]
    expected = cosines[~torch.eye(3, dtype=torch.bool)].mean(0)
    torch.testing.assert_close(group_similarity(embeddings, 3)[:3], expected.expand(3, -1))


def test_critical_tokens_are_three_sets_without_overlap() -> None:
    generator = torch.Generator().manual_seed(2)
    entropy, similarity = torch.rand(4, 100, generator=generator), torch.rand(4, 100, generator=generator)
    mask = critical_token_mask(entropy, similarity, 0.1)
    assert mask.sum(1).tolist() == [30.0] * 4 and mask[:, :10].all()
    gradient = entropy_gradient(entropy)
    gradient[:, :10], gradient[:, 90:] = -1, -1
    steep = gradient.argsort(1, descending=True)[:, :10]
    assert mask.gather(1, steep).all()
    rest = similarity.clone()
    rest[:, :10] = 2
    rest = rest.scatter(1, steep, 2.0)
    assert mask.gather(1, rest.argsort(1)[:, :10]).all()


def test_confidence_weights_are_running_means_of_clipped_ratios() -> None:
    log_prob = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
    weights = confidence_weights(log_prob, torch.tensor([[-0.2, -1.0, 3.0]]), 0.5)
    ratios = torch.tensor([0.2, 0.0, -0.5]).exp()
    torch.testing.assert_close(weights[0], ratios.cumsum(0) / torch.tensor([1.0, 2.0, 3.0]))
    assert not weights.requires_grad


def test_entropy_in_chunks_equals_that_of_all_logits() -> None:
    states, weight = torch.randn(3, 4, 8), torch.randn(16, 8)
    logits = states @ weight.T / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(Categorical(logits).entropy(), expected)
    torch.testing.assert_close(ChunkedCategorical(states, weight, 0.7).entropy(), expected)


def test_loss_reads_critical_tokens_only(tmp_path: Path) -> None:
    """Other log-probabilities of tokens that are not critical change no loss; those of critical ones do."""
    run = build(load("gcpo-toy-causal", ["batch.prompts=2", "sample.every=0", "objective.confidence_clip=0"]), tmp_path)
    context = run.context(0, 2)
    experience = run.objective.collect(context, run.data.batch(0, 2, 0, 1))
    (segment,) = experience.trajectory.segments
    assert segment.mask.sum(1).tolist() == [12.0] * len(experience)

    def loss(shift: torch.Tensor) -> torch.Tensor:
        moved = replace(segment, log_prob=segment.log_prob + 0.1 * shift)
        trajectory = replace(experience.trajectory, segments=(moved,))
        return run.objective.loss(context, replace(experience, trajectory=trajectory), 0).rows.detach()

    plain = loss(torch.zeros_like(segment.mask))
    assert loss(1 - segment.mask).equal(plain)
    assert not loss(segment.mask).isclose(plain).all()


def test_gcpo_learns(tmp_path: Path) -> None:
    run = build(load("gcpo-toy-causal", ["steps=60", "sample.every=0", "guard.every=0"]), tmp_path)
    values = [event.metrics["reward/mean"] for event in train(run) if isinstance(event, StepCompleted)]
    assert mean(values[-5:]) > mean(values[:5]) + 0.08


def test_unusable_critical_tokens_are_refused() -> None:
    (problem,) = find_problems(load("grpo-toy-flow", ["objective.critical_tokens=0.1"]), world_size=1)
    assert "objective.critical_tokens" in problem and "TM864" in problem
    (problem,) = find_problems(load("grpo-toy-causal", ["objective.critical_tokens=0.01"]), world_size=1)
    assert "objective.critical_tokens" in problem and "TM865" in problem
    with pytest.raises(ValueError, match=r"critical_tokens.*TM863"):
        GRPO(group_size=1, advantage="tracker", critical_tokens=0.1)
    with pytest.raises(ValueError, match=r"critical_tokens 0\.4.*TM088"):
        GRPO(critical_tokens=0.4)
