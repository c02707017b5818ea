"""The checks of `tastemaker doctor`, one function each: ways in which runs fail silently."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.guidance import unwrap_guidance
from ..core.policy import Backbone, Policy
from ..core.weights import HasUnusedParameters
from ..training.loop import train_step
from ..training.run import Run
from . import doctor_probe
from .check_result import CheckResult, fail_result, pass_result, skip_result

NUM_SAMPLES = 8  # samples looked at


def check_importance_ratio(run: Run, precision: str) -> CheckResult:
    """Scoring must give back the log-probabilities that sampling recorded."""
    checked = f"importance ratio before the first update ({precision})"
    if not run.policy.process.chance:
        return skip_result(checked, "the sampler is deterministic, so no ratio is asked for")
    worst = _max_ratio_error(run, run.policy, precision)
    if worst < 1e-5:
        return pass_result(checked, f"1 within {worst:.1e}")
    advice = "sampling and scoring disagree: look for dropout or noise of the model's own, or what the state leaves out"
    return fail_result(checked, f"off by up to {worst:.1e}", advice)


def check_kv_cache(run: Run) -> CheckResult:
    """Where log-probabilities are scored once more, sampling itself must still have followed them."""
    checked = "sampling follows the distribution that is trained"
    process = run.policy.process.as_sampled()
    if process == run.policy.process:
        return skip_result(checked, "log-probabilities are recorded while sampling, so the ratio says it")
    worst = _max_ratio_error(run, replace(run.policy, process=process, model=_guided(run.policy)), "fp32")
    if worst < 1e-3:
        return pass_result(checked, f"ratio 1 within {worst:.1e}")
    return fail_result(
        checked,
        f"off by up to {worst:.1e}",
        "the cache disagrees with the full call: compare begin/extend with predict",
    )


def _guided(policy: Policy[Any]) -> Backbone:
    """The model guided where it is scored too: what was recorded while sampling is of the guided one."""
    model, guidance = unwrap_guidance(policy.model)
    return policy.process.guide(model, replace(guidance, rollouts_only=False)) if guidance else model


def _max_ratio_error(run: Run, policy: Policy[Any], precision: str) -> float:
    """How far from 1 the ratio of any decision is."""
    casting = torch.autocast(run.engine.device.type, torch.bfloat16, enabled=precision == "bf16")
    with torch.no_grad(), casting:
        made = doctor_probe.sample_with_policy(run, NUM_SAMPLES, policy)
        ratios = [(policy.decide(made.cond, s).log_prob(s.action) - s.log_prob).exp() for s in made.segments]
    off = [((r - 1).abs() * s.mask).max().item() for r, s in zip(ratios, made.segments, strict=True)]
    return max(off, default=math.nan)


def check_gradients(run: Run) -> CheckResult:
    """A tensor without gradient is a tensor that will not learn."""
    checked = "gradient of every trainable tensor"
    with doctor_probe.perturb_weights(run, 1e-2):
        ctx, experience = doctor_probe.collect_experience(run)
        found = doctor_probe.compute_gradients(run, run.objective, ctx, experience)
    net = run.policy.weights.net
    idle = net.idle if isinstance(net, HasUnusedParameters) else ()
    dead = [key for key, grad in found.items() if not key.startswith(idle) and not bool((grad != 0).any())]
    if not dead:
        return pass_result(checked, f"all {len(found)} non-zero")
    advice = f"these never learn: {', '.join(dead[:3])}; connect them, or leave them out of tuning"
    return fail_result(checked, f"{len(dead)} of {len(found)} zero", advice)


def check_weights_change_samples(run: Run) -> CheckResult:
    """What trains must change what is sampled."""
    checked = "trained weights change the sample"
    before = doctor_probe.sample_fixed_prompts(run, NUM_SAMPLES).final
    with doctor_probe.perturb_weights(run, 3e-2):
        after = doctor_probe.sample_fixed_prompts(run, NUM_SAMPLES).final
    change = (before.float() - after.float()).abs().mean().item()
    if change > 0:
        return pass_result(checked, f"mean change {change:.1e}")
    return fail_result(
        checked, "no change", "sampling does not use the trained weights: check tuning.targets and model.net"
    )


def check_kl_gradient(run: Run) -> CheckResult:
    """A penalty for leaving the reference that is computed without a graph looks healthy and does nothing."""
    checked = "the penalty for leaving the reference has a gradient"
    loose = run.objective.untied()
    if loose is None:
        return skip_result(checked, "the objective has no such penalty")
    ctx, experience = doctor_probe.collect_experience(run)
    with doctor_probe.perturb_weights(run, 3e-2):
        tied = doctor_probe.compute_gradients(run, run.objective, ctx, experience)
        free = doctor_probe.compute_gradients(run, loose, ctx, experience)
    share = _distance(tied, free) / max(_norm(tied), 1e-30)
    if share > 0:
        return pass_result(checked, f"{share:.1e} of the whole")
    return fail_result(
        checked, "none", "the penalty does not depend on the live weights: compute it with gradients enabled"
    )


def check_reward_spread(run: Run) -> CheckResult:
    """Rewards must be finite, and differ between samples of one prompt."""
    checked = "rewards finite and different within a prompt"
    if not run.rubric.rewards:
        return skip_result(checked, "there are no rewards")
    first = run.asked(2)
    ctx = doctor_probe.first_context(run)
    cond = run.policy.embed(first.prompts, first.facts).repeat(NUM_SAMPLES)
    rng = type(ctx.rng)(run.seed, doctor_probe.STEP, torch.arange(len(cond), device=run.engine.device))
    with torch.no_grad(), run.engine.computing():
        scores = run.rubric.score(run.policy.decode(run.policy.sample(cond, rng).final), cond.prompts, cond.facts)
    spread = scores.total.view(len(first), NUM_SAMPLES).std(1)
    numbers = f"mean {scores.total.mean().item():.3g}, spread within a prompt {spread.mean().item():.1e}"
    if bool((spread > 0).all()):
        return pass_result(checked, numbers)
    return fail_result(
        checked, numbers, "every sample earns the same, so there is nothing to learn from; change the reward"
    )


def check_pixel_range(run: Run, *, trained: bool = True) -> CheckResult:
    """Pixels are in [0, 1] on both sides of the codec: a forgotten scale spoils every reward in silence."""
    checked = "pixel range through the codec"
    frames, channels, height, width = run.policy.model.pixels
    ramp = torch.linspace(0, 1, height, device=run.engine.device).view(1, 1, 1, height, 1)
    ramp = ramp.expand(1, frames, channels, height, width).contiguous()
    with torch.no_grad(), run.engine.computing():
        back = run.policy.decode(run.policy.encode(ramp)).float()
        made = run.policy.decode(doctor_probe.sample_fixed_prompts(run, NUM_SAMPLES).final).float()
    error = (back - ramp).abs().mean().item()
    low, high = min(back.min().item(), made.min().item()), max(back.max().item(), made.max().item())
    numbers = f"ramp off by {error:.2f}, values {low:.2f} to {high:.2f}"
    if error < 0.2 and low > -0.1 and high < 1.1:
        return pass_result(checked, numbers)
    if not trained and low > -0.1 and high < 1.1:
        return skip_result(checked, "the codec is random at tiny size, so it gives nothing back")
    return fail_result(
        checked, numbers, "encode and decode must take and give [0, 1]: check scale and shift of the latents"
    )


def check_resume(run: Run) -> CheckResult:
    """Going on from a checkpoint must give the very losses that going on without one gives."""
    checked = "resume reproduces the next losses bit for bit"
    train_step(run, 0)
    path = run.save(1)
    straight = [_loss_and_grad_norm(run, step) for step in (1, 2)]
    run.resume(path)
    resumed = [_loss_and_grad_norm(run, step) for step in (1, 2)]
    if straight == resumed:
        return pass_result(checked, f"loss {straight[1][0]:.6g} both times")
    advice = "something that shapes the run is not in the checkpoint: give it to Objective.memory or the weights"
    return fail_result(checked, f"loss {straight[1][0]:.9g} against {resumed[1][0]:.9g}", advice)


def _loss_and_grad_norm(run: Run, step: int) -> tuple[float, float]:
    metrics = train_step(run, step).metrics
    return metrics["loss"], metrics["grad_norm"]


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(x.float().square().sum().item() for x in tensors.values()))


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return _norm({key: x - other[key] for key, x in one.items()})
