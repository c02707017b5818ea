"""The proofs, one function each, on the real configuration: every one answers a way in which runs fail in silence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..guidance import unguided
from ..policy import Backbone, Policy
from ..train.loop import learn
from ..train.run import Run
from ..weights import Idle
from . import patient
from .finding import Finding, failed, passed, skipped

ROWS = 8  # samples looked at


def ratio(run: Run, precision: str) -> Finding:
    """Scoring must give back the log-probabilities that sampling recorded."""
    checked = f"importance ratio before the first update ({precision})"
    if not run.policy.process.chance:
        return skipped(checked, "the sampler is deterministic, so no ratio is asked for")
    worst = _off(run, run.policy, precision)
    if worst < 1e-5:
        return passed(checked, f"1 within {worst:.1e}")
    advice = "sampling and scoring disagree: look for dropout or noise of the model's own, or what the state leaves out"
    return failed(checked, f"off by up to {worst:.1e}", advice)


def cache(run: Run) -> Finding:
    """Where log-probabilities are scored once more, sampling itself must still have followed them."""
    checked = "sampling follows the distribution that is trained"
    process = run.policy.process.as_sampled()
    if process == run.policy.process:
        return skipped(checked, "log-probabilities are recorded while sampling, so the ratio says it")
    worst = _off(run, replace(run.policy, process=process, model=_guided(run.policy)), "fp32")
    if worst < 1e-3:
        return passed(checked, f"ratio 1 within {worst:.1e}")
    return failed(
        checked,
        f"off by up to {worst:.1e}",
        "the cache disagrees with the full call: compare begin/extend with predict",
    )


def _guided(policy: Policy[Any]) -> Backbone:
    """The model guided where it is scored too: what was recorded while sampling is of the guided one."""
    model, guidance = unguided(policy.model)
    return policy.process.guide(model, replace(guidance, rollouts_only=False)) if guidance else model


def _off(run: Run, policy: Policy[Any], precision: str) -> float:
    """How far from 1 the ratio of any decision is."""
    casting = torch.autocast(run.engine.device.type, torch.bfloat16, enabled=precision == "bf16")
    with torch.no_grad(), casting:
        made = patient.drawn(run, ROWS, policy)
        ratios = [(policy.decide(made.cond, s).log_prob(s.action) - s.log_prob).exp() for s in made.segments]
    off = [((r - 1).abs() * s.mask).max().item() for r, s in zip(ratios, made.segments, strict=True)]
    return max(off, default=math.nan)


def every_gradient(run: Run) -> Finding:
    """A tensor without gradient is a tensor that will not learn."""
    checked = "gradient of every trainable tensor"
    with patient.nudged(run, 1e-2):
        ctx, experience = patient.gather(run)
        found = patient.gradients(run, run.objective, ctx, experience)
    net = run.policy.weights.net
    idle = net.idle if isinstance(net, Idle) else ()
    dead = [key for key, grad in found.items() if not key.startswith(idle) and not bool((grad != 0).any())]
    if not dead:
        return passed(checked, f"all {len(found)} non-zero")
    advice = f"these never learn: {', '.join(dead[:3])}; connect them, or leave them out of tuning"
    return failed(checked, f"{len(dead)} of {len(found)} zero", advice)


def weights_matter(run: Run) -> Finding:
    """What trains must change what is sampled."""
    checked = "trained weights change the sample"
    before = patient.sample(run, ROWS).final
    with patient.nudged(run, 3e-2):
        after = patient.sample(run, ROWS).final
    change = (before.float() - after.float()).abs().mean().item()
    if change > 0:
        return passed(checked, f"mean change {change:.1e}")
    return failed(checked, "no change", "sampling does not use the trained weights: check tuning.targets and model.net")


def tie_has_a_graph(run: Run) -> Finding:
    """A penalty for leaving the reference that is computed without a graph looks healthy and does nothing."""
    checked = "the penalty for leaving the reference has a gradient"
    loose = run.objective.untied()
    if loose is None:
        return skipped(checked, "the objective has no such penalty")
    ctx, experience = patient.gather(run)
    with patient.nudged(run, 3e-2):
        tied = patient.gradients(run, run.objective, ctx, experience)
        free = patient.gradients(run, loose, ctx, experience)
    share = _distance(tied, free) / max(_norm(tied), 1e-30)
    if share > 0:
        return passed(checked, f"{share:.1e} of the whole")
    return failed(checked, "none", "the penalty does not depend on the live weights: compute it with gradients enabled")


def rewards_speak(run: Run) -> Finding:
    """Rewards must be finite, and differ between samples of one prompt."""
    checked = "rewards finite and different within a prompt"
    if not run.rubric.rewards:
        return skipped(checked, "there are no rewards")
    first = run.asked(2)
    ctx = patient.context(run)
    cond = run.policy.embed(first.prompts, first.facts).repeat(ROWS)
    rng = type(ctx.rng)(run.seed, patient.STEP, torch.arange(len(cond), device=run.engine.device))
    with torch.no_grad(), run.engine.computing():
        scores = run.rubric.score(run.policy.decode(run.policy.sample(cond, rng).final), cond.prompts, cond.facts)
    spread = scores.total.view(len(first), ROWS).std(1)
    numbers = f"mean {scores.total.mean().item():.3g}, spread within a prompt {spread.mean().item():.1e}"
    if bool((spread > 0).all()):
        return passed(checked, numbers)
    return failed(checked, numbers, "every sample earns the same, so there is nothing to learn from; change the reward")


def pixel_range(run: Run, *, trained: bool = True) -> Finding:
    """Pixels are in [0, 1] on both sides of the codec: a forgotten scale spoils every reward in silence."""
    checked = "pixel range through the codec"
    frames, channels, height, width = run.policy.model.pixels
    ramp = torch.linspace(0, 1, height, device=run.engine.device).view(1, 1, 1, height, 1)
    ramp = ramp.expand(1, frames, channels, height, width).contiguous()
    with torch.no_grad(), run.engine.computing():
        back = run.policy.decode(run.policy.encode(ramp)).float()
        made = run.policy.decode(patient.sample(run, ROWS).final).float()
    error = (back - ramp).abs().mean().item()
    low, high = min(back.min().item(), made.min().item()), max(back.max().item(), made.max().item())
    numbers = f"ramp off by {error:.2f}, values {low:.2f} to {high:.2f}"
    if error < 0.2 and low > -0.1 and high < 1.1:
        return passed(checked, numbers)
    if not trained and low > -0.1 and high < 1.1:
        return skipped(checked, "the codec is random at tiny size, so it gives nothing back")
    return failed(checked, numbers, "encode and decode must take and give [0, 1]: check scale and shift of the latents")


def resume(run: Run) -> Finding:
    """Going on from a checkpoint must give the very losses that going on without one gives."""
    checked = "resume reproduces the next losses bit for bit"
    learn(run, 0)
    path = run.save(1)
    straight = [_told(run, step) for step in (1, 2)]
    run.resume(path)
    resumed = [_told(run, step) for step in (1, 2)]
    if straight == resumed:
        return passed(checked, f"loss {straight[1][0]:.6g} both times")
    advice = "something that shapes the run is not in the checkpoint: give it to Objective.memory or the weights"
    return failed(checked, f"loss {straight[1][0]:.9g} against {resumed[1][0]:.9g}", advice)


def _told(run: Run, step: int) -> tuple[float, float]:
    metrics = learn(run, step).metrics
    return metrics["loss"], metrics["grad_norm"]


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(x.float().square().sum().item() for x in tensors.values()))


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return _norm({key: x - other[key] for key, x in one.items()})
