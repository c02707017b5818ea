"""The doctor: check on the real configuration that training can work.

Each check is for a way in which runs fail silently.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..config.build import build, make_tiny
from ..config.schema import RunConfig
from ..core.errors import TrainingError, pluralize
from ..core.objective import Context
from ..core.policy import Backbone, Policy
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import Reward, RewardError, Rubric
from ..core.reward_inputs import copy_metadata, metadata_equal
from ..core.types import Metadata, Prompts, Trajectory
from ..training.loop import train_step
from ..training.run import AnyObjective, Run
from . import two_ranks
from .activation_budget import choose_activation_memory

STEP = 0  # whose batch and random draws are used
NUM_SAMPLES = 8
MAX_TWO_RANK_PARAMETERS = 200_000_000  # two copies must fit into host memory


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check: its name, the measured number, the verdict, and advice unless it passed."""

    name: str
    number: str
    verdict: Literal["pass", "fail", "skip"]
    advice: str = ""


def pass_check(name: str, number: str) -> CheckResult:
    return CheckResult(name, number, "pass")


def fail_check(name: str, number: str, advice: str) -> CheckResult:
    return CheckResult(name, number, "fail", advice)


def skip_check(name: str, reason: str) -> CheckResult:
    return CheckResult(name, "-", "skip", reason)


def count_checks() -> int:
    """The number of results of `run_doctor`."""
    return len(CHECKS) + 1  # two ranks


def run_doctor(config: RunConfig, *, tiny: bool = False, ranks: bool = True) -> Iterator[CheckResult]:
    """Run all checks on a configuration and yield their results; `ranks` starts two more processes."""
    config = make_tiny(config) if tiny else config
    config = replace(config, sample=replace(config.sample, every=0), checkpoint=replace(config.checkpoint, keep_last=0))
    with tempfile.TemporaryDirectory() as folder:
        run = build(config, Path(folder) / "run", choose_memory=partial(choose_activation_memory, config))
        config = replace(config, engine=run.engine.config)  # two ranks are compared in the same precision
        run.save(0)
        checks = {**CHECKS, "pixels": lambda run: check_pixel_range(run, trained=not tiny)}
        for name, check in checks.items():
            yield run_check(name, check, run)
        if ranks:
            run.resume(Path(folder) / "run" / "checkpoints" / "step-000000")
            yield run_check("ranks", lambda run: check_two_ranks(config, run), run)
        run.engine.close()


def run_check(name: str, check: Callable[[Run], CheckResult], run: Run) -> CheckResult:
    """Run one check; an error of the run is a failure of the check."""
    try:
        return check(run)
    except (RewardError, TrainingError, ConfigError) as error:
        return fail_check(name, "could not be checked", str(error))


def check_importance_ratio(run: Run, precision: str) -> CheckResult:
    """Scoring must reproduce the log-probabilities that sampling recorded."""
    name = f"importance ratio before the first update ({precision})"
    if not run.policy.process.stochastic:
        return skip_check(name, "the sampler is deterministic, so importance ratios do not exist")
    error = _max_ratio_error(run, run.policy, precision)
    if error < 1e-5:
        return pass_check(name, f"1 within {error:.1e}")
    advice = (
        "sampling and scoring disagree; remove dropout and unseeded random numbers from the model, and check "
        "that a segment's state contains everything that scoring needs"
    )
    return fail_check(name, f"off by up to {error:.1e}", advice)


def check_kv_cache(run: Run) -> CheckResult:
    """If log-probabilities are recomputed after sampling, sampling itself must agree with them too."""
    name = "sampling follows the distribution that is trained"
    process = run.policy.process.with_sampled_log_probs()
    if process == run.policy.process:
        return skip_check(
            name, "log-probabilities are recorded during sampling, so the importance ratio already checks this"
        )
    policy = replace(run.policy, process=process, model=_with_guidance(run.policy))
    error, guidance = _max_ratio_error(run, policy, "fp32"), run.policy.model.guidance
    # Guided logits are (1 - scale) * unconditional + scale * conditional, with the rounding errors of both.
    amplification = 2 * guidance.scale - 1 if guidance and guidance.scale > 1 else 1.0
    if error < 1e-3 * amplification:
        return pass_check(name, f"ratio 1 within {error:.1e}")
    advice = "the KV cache disagrees with the full forward pass; compare init_cache and decode_step with predict"
    return fail_check(name, f"off by up to {error:.1e}", advice)


def _with_guidance(policy: Policy[Any]) -> Backbone:
    """The model with guidance in scoring too, since the recorded log-probabilities are guided."""
    model, guidance = policy.model.unguided, policy.model.guidance
    return policy.process.wrap_guidance(model, replace(guidance, rollouts_only=False)) if guidance else model


def _max_ratio_error(run: Run, policy: Policy[Any], precision: str) -> float:
    """The largest distance of an importance ratio from 1."""
    autocast = torch.autocast(run.engine.device.type, torch.bfloat16, enabled=precision == "bf16")
    with torch.no_grad(), autocast:
        trajectory = sample_with_policy(run, NUM_SAMPLES, policy)
        errors = []
        for segment in trajectory.segments:
            with torch.enable_grad():  # as an update scores
                log_prob = policy.action_distribution(trajectory.cond, segment).log_prob(segment.action).detach()
            ratio = (log_prob - segment.log_prob).exp()
            errors.append(((ratio - 1).abs() * segment.mask).max().item())
    return max(errors, default=math.nan)


def check_gradients(run: Run) -> CheckResult:
    """Every trainable tensor must get a gradient."""
    name = "gradient of every trainable tensor"
    with perturb_weights(run, 1e-2):
        ctx, experience = collect_experience(run)
        gradients = compute_gradients(run, run.objective, ctx, experience)
    unused = run.policy.weights.traits.unused_parameters
    zero = [key for key, grad in gradients.items() if not key.startswith(unused) and not bool((grad != 0).any())]
    if not zero:
        return pass_check(name, f"all {len(gradients)} non-zero")
    advice = (
        f"these tensors get no gradient: {', '.join(zero[:3])}; use them in the forward pass, or exclude them "
        "from tuning"
    )
    return fail_check(name, f"{len(zero)} of {len(gradients)} zero", advice)


def check_weights_change_samples(run: Run) -> CheckResult:
    """The weights that train must be those that sample."""
    name = "trained weights change the sample"
    before = sample_fixed_prompts(run, NUM_SAMPLES).final
    with perturb_weights(run, 3e-2):
        after = sample_fixed_prompts(run, NUM_SAMPLES).final
    change = (before.float() - after.float()).abs().mean().item()
    if change > 0:
        return pass_check(name, f"mean change {change:.1e}")
    advice = (
        "sampling does not use the trained weights; check tuning.target_modules, and that the model samples with "
        "its `net`"
    )
    return fail_check(name, "no change", advice)


def check_kl_gradient(run: Run) -> CheckResult:
    """The KL penalty must have a gradient: computed without a graph, it would be logged and do nothing."""
    name = "the KL penalty has a gradient"
    unpenalized = run.objective.without_kl()
    if unpenalized is None:
        return skip_check(name, "the objective has no KL penalty")
    ctx, experience = collect_experience(run)
    with perturb_weights(run, 3e-2):
        gradients = compute_gradients(run, run.objective, ctx, experience)
        others = compute_gradients(run, unpenalized, ctx, experience)
    share = _norm({key: x - others[key] for key, x in gradients.items()}) / max(_norm(gradients), 1e-30)
    if share > 0:
        return pass_check(name, f"{share:.1e} of the total")
    advice = "the KL penalty does not depend on the live weights; compute the penalty with gradients enabled"
    return fail_check(name, "none", advice)


def check_reward_spread(run: Run) -> CheckResult:
    """Rewards must be finite, and differ between samples of one prompt."""
    name = "rewards finite and different within a prompt"
    if not run.rubric.rewards:
        return skip_check(name, "the configuration has no rewards")
    if not any(weighted.weight for weighted in run.rubric.rewards.values()):
        return skip_check(name, "all rewards have weight 0, so the objective does not train on them")
    first = run.fixed_prompts(2)
    cond = run.policy.embed(first.prompts, first.metadata).repeat(NUM_SAMPLES)
    rng = Randomness(run.seed, STEP, torch.arange(len(cond), device=run.engine.device))
    with torch.no_grad(), run.engine.autocast():
        pixels = run.policy.decode(run.policy.sample(cond, rng).final)
        scores = run.rubric.score(pixels, cond.prompts, cond.metadata, NUM_SAMPLES)
    spread = scores.total.view(len(first), NUM_SAMPLES).std(1)
    number = f"mean {scores.total.mean().item():.3g}, spread within a prompt {spread.mean().item():.1e}"
    if bool((spread > 0).all()):
        return pass_check(name, number)
    return fail_check(
        name,
        number,
        "all samples of a prompt have the same reward, so the advantages are 0; use a finer reward, or "
        "prompts that are neither too easy nor too hard",
    )


class WriteProbe(Reward):
    """A reward that notices when another one writes into its pixels or metadata: through torch or through numpy."""

    def __init__(self, inner: Reward) -> None:
        self.inner, self.wrote = inner, False

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        pixels = pixels.clone()
        before, version = pixels.clone(), pixels._version
        entries = copy_metadata(metadata)
        scores = self.inner.score(pixels, prompts, entries)
        self.wrote |= pixels._version != version or not torch.equal(pixels, before)
        self.wrote |= not metadata_equal([dict(entry) for entry in metadata], entries)
        return scores


def check_reward_inputs(run: Run) -> CheckResult:
    """No reward may write into its pixels or metadata: other code would see, show and save what it wrote."""
    name = "rewards leave their pixels as they are"
    if not run.rubric.rewards:
        return skip_check(name, "the configuration has no rewards")
    first = run.fixed_prompts(2)
    cond = run.policy.embed(first.prompts, first.metadata).repeat(2)
    rng = Randomness(run.seed, STEP, torch.arange(len(cond), device=run.engine.device))
    probes = {key: WriteProbe(weighted.reward) for key, weighted in run.rubric.rewards.items()}
    with torch.no_grad(), run.engine.autocast():
        pixels = run.policy.decode(run.policy.sample(cond, rng).final)
        rewards = {key: replace(run.rubric.rewards[key], reward=probe) for key, probe in probes.items()}
        Rubric(rewards).score(pixels, cond.prompts, cond.metadata, 2)
    writing = [key for key, probe in probes.items() if probe.wrote]
    if not writing:
        return pass_check(name, pluralize(len(probes), "reward"))
    advice = (
        f"{', '.join(writing)} writes into its pixels, also if the values stay the same, or into its metadata; use "
        "operations without a trailing underscore, or work on copies such as pixels.clone()"
    )
    return fail_check(name, f"{len(writing)} of {len(probes)} write", advice)


def check_pixel_range(run: Run, *, trained: bool = True) -> CheckResult:
    """Pixels must be in [0, 1] on both sides of the autoencoder: a wrong scale spoils every reward."""
    name = "pixel range through the autoencoder"
    frames, channels, height, width = run.policy.model.pixels
    ramp = torch.linspace(0, 1, height, device=run.engine.device).view(1, 1, 1, height, 1)
    ramp = ramp.expand(1, frames, channels, height, width).contiguous()
    with torch.no_grad(), run.engine.autocast():
        decoded = run.policy.decode(run.policy.encode(ramp)).float()
        samples = run.policy.decode(sample_fixed_prompts(run, NUM_SAMPLES).final).float()
    error = (decoded - ramp).abs().mean().item()
    low, high = (
        min(decoded.min().item(), samples.min().item()),
        max(decoded.max().item(), samples.max().item()),
    )
    number = f"ramp off by {error:.2f}, values {low:.2f} to {high:.2f}"
    in_range = low > -0.1 and high < 1.1
    if error < 0.2 and in_range:
        return pass_check(name, number)
    if not trained and in_range:
        return skip_check(name, "the autoencoder of a tiny model has random weights and cannot reconstruct images")
    advice = (
        "encode must accept and decode must return pixels in [0, 1]; check the scaling factor and the shift of "
        "the latents"
    )
    return fail_check(name, number, advice)


def check_resume(run: Run) -> CheckResult:
    """Training from a checkpoint must give exactly the losses of training without interruption."""
    name = "resume reproduces the next losses bit for bit"
    train_step(run, 0).to_event()
    path = run.save(1)
    expected = [two_ranks.step_metrics(run, step) for step in (1, 2)]
    run.resume(path)
    resumed = [two_ranks.step_metrics(run, step) for step in (1, 2)]
    if expected == resumed:
        return pass_check(name, f"loss {expected[1][0]:.6g} both times")
    advice = "some state is not in the checkpoint; add this state to Objective.make_state or to the weights"
    return fail_check(name, f"loss {expected[1][0]:.9g} against {resumed[1][0]:.9g}", advice)


def check_two_ranks(config: RunConfig, run: Run) -> CheckResult:
    """The first step on two ranks must have the loss and gradient norm of the step on one."""
    name, batch = "two ranks give the gradient of one", config.batch
    parameters = sum(p.numel() for p in run.policy.weights.net.parameters())
    if parameters > MAX_TWO_RANK_PARAMETERS:
        return skip_check(
            name, f"{parameters / 1e6:.0f} M parameters are too many to run two copies; run doctor with --tiny"
        )
    if batch.prompts % (2 * batch.minibatches):
        return skip_check(
            name,
            f"{batch.prompts} prompts per step cannot be divided over two ranks; set batch.prompts to a "
            f"multiple of {2 * batch.minibatches} to compare",
        )
    if batch.minibatches > 1 or batch.epochs > 1:
        return skip_check(
            name,
            "each rank shuffles its own samples into minibatches; set batch.minibatches=1 and batch.epochs=1 "
            "to compare",
        )
    one = two_ranks.step_metrics(run, 0)
    two, problem = two_ranks.run_first_step(config)
    if two is None:
        return fail_check(name, "two ranks did not run", problem)
    # Losses of relative advantages are near zero, so that they are compared on the scale of the gradient.
    error = max(abs(one[0] - two[0]), abs(one[1] - two[1])) / max(abs(one[0]), one[1], 1e-12)
    number = f"loss {one[0]:.6g} and {two[0]:.6g}, gradient norm {one[1]:.6g} and {two[1]:.6g}"
    if error < 1e-3:
        return pass_check(name, number)
    return fail_check(
        name,
        number,
        "the result depends on the rank; check the data order, the random numbers, and means that are "
        "computed per rank",
    )


CHECKS: dict[str, Callable[[Run], CheckResult]] = {
    "importance ratio (fp32)": lambda run: check_importance_ratio(run, "fp32"),
    "importance ratio (bf16)": lambda run: check_importance_ratio(run, "bf16"),
    "cache": check_kv_cache,
    "gradients": check_gradients,
    "weights": check_weights_change_samples,
    "reference": check_kl_gradient,
    "rewards": check_reward_spread,
    "reward inputs": check_reward_inputs,
    "pixels": check_pixel_range,
    "resume": check_resume,
}


def collect_experience(run: Run) -> tuple[Context[Any], Any]:
    """Collect the experience of the first step."""
    ranks = run.engine.data_parallel
    ctx = run.context(STEP, run.batch.prompts // ranks.world_size)
    with run.engine.autocast():
        batch = run.data.batch(STEP, run.batch.prompts, ranks.rank, ranks.world_size)
        return ctx, run.objective.collect(ctx, batch)


def compute_gradients(run: Run, objective: AnyObjective, ctx: Context[Any], experience: Any) -> dict[str, Tensor]:
    """The gradient of the loss for every trainable tensor, on this rank."""
    parameters = run.policy.weights.trainable()
    for part in objective.parts(experience):
        with run.engine.autocast(), run.engine.offload_activations():
            loss = objective.loss(ctx, experience, part)
        if loss.rows.requires_grad:
            torch.autograd.backward(loss.rows.sum() / len(experience))
    gradients = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    return gradients


@contextmanager
def perturb_weights(run: Run, scale: float) -> Iterator[None]:
    """Add noise to the trainable weights within the block: fresh LoRA weights are zero, and equal to the reference."""
    parameters = run.policy.weights.trainable()
    before = {key: p.detach().clone() for key, p in parameters.items()}
    with torch.no_grad():
        for key, p in parameters.items():
            rng = Randomness(run.seed, STEP, torch.zeros(1, dtype=torch.int64, device=p.device))
            p.add_(scale * rng.normal(f"nudge {key}", *p.shape)[0].to(p.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for key, p in parameters.items():
                p.copy_(before[key])


def sample_fixed_prompts(run: Run, count: int) -> Trajectory:
    """Sample the first prompts, always from the same noise."""
    with run.engine.autocast():
        return sample_with_policy(run, count, run.policy)


def sample_with_policy(run: Run, count: int, policy: Policy[Any]) -> Trajectory:
    """Sample the first prompts with any policy, in the caller's precision."""
    first = run.data.first_prompts(count)
    rng = Randomness(run.seed, STEP, torch.arange(len(first), device=run.engine.device))
    return policy.sample(policy.embed(first.prompts, first.metadata), rng)


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(x.float().square().sum().item() for x in tensors.values()))
