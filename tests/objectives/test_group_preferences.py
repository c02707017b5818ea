"""DGPO and CRD: recorded values, closed forms, whole groups, levels, guided references and schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from golden_cases import GoldenCase, assert_golden, load_cases
from torch import Tensor

from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.policy import Guidance
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import select_rows
from tastemaker.objectives.crd import CRD
from tastemaker.objectives.dgpo import DGPO
from tastemaker.objectives.sample_groups import draw_levels

DGPO_CASES, CRD_CASES = load_cases("dgpo"), load_cases("crd")


def predicted_clean(case: GoldenCase, velocity: Tensor) -> Tensor:
    """The clean sample that a velocity predicts from the noisy sample."""
    t = case.inputs["t"].view(-1, 1, 1, 1)
    return (1 - t) * case.inputs["x0"] + t * case.inputs["noise"] - t * velocity


def case_losses(objective: DGPO | CRD, case: GoldenCase, group_size: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Losses of the samples of a recorded case, metrics, and the velocity that they depend on."""
    x, velocity = case.inputs, case.inputs["v"].clone().requires_grad_()
    reference, old = (predicted_clean(case, x[key]) for key in ("v_ref", "v_old"))
    advantage = x["advantage"].view(-1, group_size)
    prediction = predicted_clean(case, velocity)
    needs_reference = "reference" in objective.snapshots()
    losses, metrics = objective.sample_losses(
        prediction, x["x0"], x["t"], reference if needs_reference else None, old, advantage
    )
    return losses, metrics, velocity


@pytest.mark.parametrize("name", DGPO_CASES)
def test_dgpo_matches_recorded_values(name: str) -> None:
    case = DGPO_CASES[name]
    config, out = case.config, case.outputs
    objective = DGPO(
        group_size=config["group"],
        beta=config["beta_dpo"],
        kl_coef=config["kl_coef"],
        clip_range=config["clip_range"],
        preference_reference=config["reference"],
    )
    losses, metrics, velocity = case_losses(objective, case, config["group"])
    assert_golden(metrics["group_weight"], out["weight"])
    assert_golden(losses.flatten().detach(), out["rows"])
    assert_golden(losses.mean().detach(), out["loss"])
    (gradient,) = torch.autograd.grad(losses.mean(), velocity)
    assert_golden(gradient, out["grad_v"])
    if "ratio" in out:
        assert_golden(metrics["ratio"].flatten(), out["ratio"])
        assert metrics["clip_fraction"].flatten().tolist() == [float(x) for x in out["clipped"]]


@pytest.mark.parametrize("name", CRD_CASES)
def test_crd_matches_recorded_values(name: str) -> None:
    case = CRD_CASES[name]
    config, out = dict(case.config), case.outputs
    config["loss_type"], config["advantage_clip"] = config.pop("loss"), config.pop("adv_clip")
    losses, metrics, velocity = case_losses(CRD(**config), case, len(case.inputs["x0"]))
    assert_golden(metrics["implicit_reward"].flatten(), out["implicit_reward"])
    assert_golden(losses.mean().detach(), out["loss"])
    without_kl, _, _ = case_losses(CRD(**{**config, "kl_coef": 0.0}), case, len(case.inputs["x0"]))
    assert_golden(without_kl.mean().detach(), out["policy_loss"])
    (gradient,) = torch.autograd.grad(losses.mean(), velocity)
    assert_golden(gradient, out["grad_v"])


def random_groups(groups: int = 3, group_size: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Predictions of live, reference and old weights, clean samples [P * G, 5], levels and advantages [P, G]."""
    generator = torch.Generator().manual_seed(0)
    live, reference, old, clean = torch.randn(4, groups * group_size, 5, generator=generator, dtype=torch.float64)
    advantage = torch.randn(groups, group_size, generator=generator, dtype=torch.float64)
    level = torch.rand(groups * group_size, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    return live, reference, old, clean, level, advantage - advantage.mean(1, keepdim=True)


def test_dgpo_gradient_is_that_of_bradley_terry_between_the_halves_of_a_group() -> None:
    """-log sigmoid(-S), written down and differentiated, is beta / G times DGPO's loss, summed over a group."""
    live, reference, old, clean, level, advantage = random_groups()
    objective = DGPO(group_size=4, beta=3.0, kl_coef=0.0, clip_range=0.0)
    prediction = live.clone().requires_grad_()
    losses, _ = objective.sample_losses(prediction, clean, level, reference, old, advantage)
    (gradient,) = torch.autograd.grad(losses.sum(), prediction)

    def errors(x: Tensor) -> Tensor:
        return (((x - clean) / level[:, None]) ** 2).mean(1).view(3, 4)

    total = (3.0 * advantage * (errors(prediction) - errors(reference))).sum(1) / 4
    (expected,) = torch.autograd.grad(-F.logsigmoid(-total).sum(), prediction)
    torch.testing.assert_close(3.0 / 4 * gradient, expected, rtol=1e-10, atol=1e-12)


def test_crd_minimum_has_the_centered_reward_as_implicit_reward() -> None:
    """Gradient descent on the predictions reaches a loss of zero, where beta rho and R differ by a constant."""
    _, _, old, clean, level, advantage = random_groups(groups=2, group_size=3)
    objective = CRD(group_size=3, beta=2.0, kl_coef=0.0, adaptive=False)
    prediction = old.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([prediction], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def closure() -> Tensor:
        optimizer.zero_grad()
        # The center has no gradient; with equal weights the residuals of a group sum to zero, so it would cancel.
        loss = objective.sample_losses(prediction, clean, level, None, old, advantage)[0].sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    losses, metrics = objective.sample_losses(prediction.detach(), clean, level, None, old, advantage)
    assert float(losses.max()) < 1e-8
    reward = (advantage / 10 + 0.5).clamp(0, 1)
    difference = 2.0 * metrics["implicit_reward"] - reward
    torch.testing.assert_close(difference, difference.mean(1, keepdim=True).expand_as(difference), rtol=0, atol=1e-4)


@pytest.mark.parametrize("objective", [DGPO(group_size=4, beta=3.0), CRD(group_size=4, temperature=0.2)])
def test_groups_do_not_depend_on_each_other_nor_on_the_order_of_samples(objective: Any) -> None:
    live, reference, old, clean, level, advantage = random_groups()
    full = objective.sample_losses(live, clean, level, reference, old, advantage)[0]
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat([8 + order, order])  # the third group, then the first
    shuffled = [x[rows] for x in (live, clean, level, reference, old)]
    losses = objective.sample_losses(*shuffled, advantage[[2, 0]][:, order])[0]
    torch.testing.assert_close(losses, full[[2, 0]][:, order], rtol=1e-12, atol=0)


OBJECTIVES: list[Any] = [
    DGPO(group_size=4, timestep_pool=7),
    DGPO(group_size=4, preference_reference="old", kl_coef=0.0, clip_range=0.0),
    CRD(group_size=4, num_timesteps=3),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_rewards_have_no_gradient_at_the_start(objective: Any) -> None:
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    assert experience.advantage.abs().max() > 0.1
    equal = replace(experience, advantage=torch.zeros_like(experience.advantage))
    for part in objective.parts(experience):
        assert not toys.gradient(policy, objective.loss(ctx, equal, part).rows.sum()).any()
    assert toys.gradient(policy, objective.loss(ctx, experience, 0).rows.sum()).any()


def test_first_dgpo_ratio_is_exactly_one() -> None:
    objective = DGPO(group_size=4)
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx = toys.context(policy, 4)
    metrics = objective.loss(ctx, objective.collect(ctx, toys.prompts(4)), 0).metrics
    assert (metrics["ratio"] == 1).all() and (metrics["group_weight"] == 0.5).all()
    assert not metrics["clip_fraction"].any() and not metrics["kl"].any()


def record_noisy(objective: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Levels and noise [P, G, ...] of all parts of two epochs."""
    policy = toys.policy("flow", snapshots=objective.snapshots())
    ctx, recorded = toys.context(policy, 4), []
    experience = objective.collect(ctx, toys.prompts(4))
    original = type(experience).corrupt

    def corrupt(groups: Any, *arguments: Any) -> Any:
        cond, noisy = original(groups, *arguments)
        recorded.append((noisy.t, noisy.noise.view_as(experience.samples)))
        return cond, noisy

    monkeypatch.setattr(type(experience), "corrupt", corrupt)
    for epoch in (0, 1):
        for part in objective.parts(experience):
            objective.loss(replace(ctx, epoch=epoch), experience, part)
    return recorded


def test_dgpo_levels_differ_and_noise_is_shared_in_the_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record_noisy(DGPO(group_size=4, num_timesteps=4, timestep_pool=5), monkeypatch)
    visited = torch.linspace(1, 0, 9)[:5]
    for epoch in (recorded[:4], recorded[4:]):
        levels = torch.stack([t.unique() for t, _ in epoch]).flatten()
        assert len(levels.unique()) == 4 and torch.isin(levels, visited).all()
    noise = torch.stack([x for _, x in recorded])  # [parts, P, G, ...]
    assert noise.eq(noise[:, :, :1]).all()
    assert len({float(x) for x in noise[:, :, 0].flatten(2)[..., 0].flatten()}) == 8 * 4


def test_crd_trains_all_levels_but_the_last_with_noise_of_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record_noisy(CRD(group_size=4), monkeypatch)
    assert len(recorded) == 14
    levels = torch.stack([t[0] for t, _ in recorded[:7]]).sort(descending=True).values
    torch.testing.assert_close(levels, torch.linspace(1, 0, 9)[:7])
    noise = torch.stack([x for _, x in recorded]).flatten(3)[..., 0]
    assert len(noise.unique()) == noise.numel()


def test_levels_are_the_same_on_all_ranks() -> None:
    process = toys.policy("flow").process
    one, other = (toys.context(toys.policy("flow"), 4, step=3).rng for _ in range(2))
    other = replace(other, rows=other.rows + 4)
    assert draw_levels(process, one, 4, 7, 0) == draw_levels(process, other, 4, 7, 0)


@pytest.mark.parametrize("objective", [DGPO(group_size=4, timestep_pool=7), CRD(group_size=4, num_timesteps=1)])
def test_reference_is_guided_and_the_live_network_is_not(objective: Any) -> None:
    guided = replace(objective, reference_guidance_scale=4.5)
    policy = toys.policy("flow", snapshots=objective.snapshots(), guidance=Guidance(2.0, rollouts_only=True))
    ctx = toys.context(policy, 4)
    experience = objective.collect(ctx, toys.prompts(4))
    calls: list[tuple[int, bool]] = []
    policy.model.net.register_forward_hook(
        lambda net, inputs, output: calls.append((len(output), output.requires_grad))
    )
    distances = [each.loss(ctx, experience, 0).metrics["kl"] for each in (objective, guided)]
    assert calls == [(16, False)] * 2 + [(16, True)] + [(16, False), (32, False), (16, True)]
    assert not distances[0].any() and distances[1].gt(0).all()
    plain = toys.policy("flow", snapshots=objective.snapshots())
    ctx = toys.context(plain, 4)
    with pytest.raises(ConfigError, match=r"reference_guidance_scale.*TM1563"):
        guided.loss(ctx, guided.collect(ctx, toys.prompts(4)), 0)


def test_old_policy_samples_after_the_switch() -> None:
    objective = DGPO(group_size=4, sample_with_old_after=2)
    policy = toys.policy("flow", snapshots=objective.snapshots())
    samples = {}
    for step in (1, 2):
        before = objective.collect(toys.context(policy, 4, step=step), toys.prompts(4)).samples
        toys.perturb(policy, 0.1)
        samples[step] = before.equal(objective.collect(toys.context(policy, 4, step=step), toys.prompts(4)).samples)
        policy.weights.update_snapshot("old")
    assert samples == {1: False, 2: True}


def test_crd_snapshots_follow_the_published_schedules() -> None:
    objective = CRD()
    policy = toys.policy("flow", snapshots=objective.snapshots())
    start = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
    toys.perturb(policy, 0.01)
    live = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
    for step, old, sampling in ((0, 0.25, 0.0), (75, 0.625, 0.0), (135, 0.925, 0.45), (1000, 0.999, 0.999)):
        for snapshot in policy.weights.snapshot_tensors().values():
            for key, x in snapshot.items():
                x.copy_(start[key])
        objective.after_update(toys.context(policy, 8, step=step))
        for name, decay in (("old", old), ("sampling", sampling), ("reference", 1.0)):
            for key, x in policy.weights.snapshot_tensors()[name].items():
                torch.testing.assert_close(x, decay * start[key] + (1 - decay) * live[key], rtol=1e-5, atol=1e-6)


def test_minibatches_and_micro_batches_count_whole_groups() -> None:
    counts = compute_step_counts(load("dgpo-toy-flow", ["batch.prompts=8", "batch.micro_batch_size=2"]))
    size = load("dgpo-toy-flow").objective.group_size
    assert (counts.samples, counts.minibatch_size, counts.micro_batch_size) == (8 * size, 8 * size, 2 * size)
    (problem,) = find_problems(load("dgpo-toy-flow", ["batch.prompts=2", "batch.minibatches=4"]), world_size=1)
    assert "TM794" in problem


@pytest.mark.parametrize(
    ("setting", "key", "code"),
    [
        ("process.num_steps=3", "objective.num_timesteps", "TM1562"),
        ("objective.reference_guidance_scale=4.5", "objective.reference_guidance_scale", "TM1567"),
        ("tuning={type: lora, dropout: 0.1}", "tuning.dropout", "TM792"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: str, key: str, code: str) -> None:
    (problem,) = find_problems(load("dgpo-toy-flow", [setting]), world_size=1)
    assert key in problem and code in problem


def test_settings_without_meaning_are_refused() -> None:
    for settings in ({"temperature": 0.0}, {"timestep_fraction": 0.0}, {"beta": 0.0}):
        with pytest.raises(ValueError, match="TM088"):
            CRD(**settings)
    with pytest.raises(ValueError, match="TM088"):
        DGPO(num_timesteps=4, timestep_pool=3)
    for objective, code in ((DGPO, "TM1565"), (CRD, "TM1566")):
        with pytest.raises(ValueError, match=code):
            objective(group_size=1)


def test_loss_of_a_group_is_the_mean_over_its_samples() -> None:
    for objective in OBJECTIVES:
        ctx, experience = toys.policy_with_experience(objective, "flow")
        with torch.no_grad():
            full = toys.total_loss(objective, ctx, experience)
            one = toys.total_loss(objective, ctx, select_rows(experience, torch.tensor([3])))
        assert full.shape == (8,)
        torch.testing.assert_close(one, full[3:4], rtol=1e-4, atol=1e-6)
