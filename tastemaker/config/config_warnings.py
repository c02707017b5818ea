"""Warnings about settings that are valid but unusual, shown by `check` and at the start of a run."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from ..objectives.teacher_forced_grpo import TeacherForcedGRPO
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from ..training.device_precision import describe_emulation
from .schema import AnyConfig, AutoencoderRunConfig, PreferenceRunConfig, RunConfig
from .step_counts import compute_step_counts

if TYPE_CHECKING:  # its import takes half a second, which `tastemaker check` does without
    from ..training.engine import Engine

SHIFT_TOLERANCE = 0.01  # relative
# LoRA of this package's sources: 1e-4 to 3e-4, and 1e-5 over 1000 steps for VideoX-Fun's rewards, which is the least.
LORA_LR, MIN_LORA_LR, MIN_LORA_CHANGE = 1e-4, 1e-5, 1e-2


def collect_warnings(config: AnyConfig) -> list[str]:
    """Return warnings about settings that are valid but unusual."""
    if not isinstance(config, RunConfig):
        return []
    return [
        *_warn_emulated_bugs(config),
        *_warn_unguided_updates(config),
        *_warn_timestep_shift(config),
        *_warn_distilled_sampling(config),
    ]


EMULATED_BUGS = {
    "sampled_context": "tokens are sampled given the image, but scored given the sample",
    "dropout": "tokens are sampled without dropout, but scored with it",
}


def _warn_emulated_bugs(config: RunConfig) -> list[str]:
    objective = config.objective
    if not isinstance(objective, TeacherForcedGRPO):
        return []
    why = "so importance ratios do not start at 1; use this setting for comparisons only"
    return [
        f"objective.emulate_bugs: '{bug}' is on: {EMULATED_BUGS[bug]}, {why} [TM805]" for bug in objective.emulate_bugs
    ]


def _warn_unguided_updates(config: RunConfig) -> list[str]:
    guidance, objective = config.guidance, config.objective
    # Teacher-forced tokens are sampled by the call that scores them, without guidance.
    sampled = objective.needs_stochastic and not isinstance(objective, TeacherForcedGRPO)
    if guidance is None or not guidance.rollouts_only or guidance.scale == 1 or not sampled:
        return []
    return [
        (
            "guidance.rollouts_only: samples are drawn with guidance and scored without guidance, as in AR-GRPO, so "
            "the trained distribution differs from the sampled one; set guidance.rollouts_only=false to score with "
            "guidance [TM806]"
        )
    ]


def _warn_timestep_shift(config: RunConfig) -> list[str]:
    shift = config.model.timestep_shift
    path = config.process.path if isinstance(config.process, GaussianProcess) else None
    if shift is None or not isinstance(path, RectifiedFlow) or abs(path.shift - shift) <= SHIFT_TOLERANCE * shift:
        return []
    return [
        (
            f"process.path.shift: {path.shift:g} is not the shift that the weights were trained with at this size and "
            f"length; set process.path.shift={shift:.4f}, unless you chose {path.shift:g} on purpose [TM807]"
        )
    ]


def _warn_distilled_sampling(config: RunConfig) -> list[str]:
    """Warn about guidance, and about many steps, with weights that were distilled to few steps with their guidance."""
    steps, process, guidance = config.model.distilled_steps, config.process, config.guidance
    if steps is None or not isinstance(process, GaussianProcess):
        return []
    found, name = [], config.model.weights
    if process.num_steps > 2 * steps:
        found.append(
            f"process.num_steps: {process.num_steps}, but {name} is distilled to {steps} steps and does not improve "
            f"with many more; set process.num_steps={steps} [TM2460]"
        )
    if guidance is not None and guidance.scale != 1:
        found.append(
            f"guidance.scale: {guidance.scale:g}, but {name} is distilled with its guidance, so that more doubles the "
            "cost and oversaturates samples; set guidance.scale=1 [TM2461]"
        )
    return found


def warn_small_lora_updates(config: AnyConfig) -> list[str]:
    """Warn if LoRA is trained at a learning rate for all weights, with which the adapters hardly change.

    An AdamW update moves a weight by at most about the learning rate, and `lora_up` starts at zero.
    """
    if isinstance(config, AutoencoderRunConfig | PreferenceRunConfig) or not config.tuning.is_adapter:
        return []
    lr, updates = config.optim.lr, compute_step_counts(config).total_updates
    if lr >= MIN_LORA_LR and lr * updates >= MIN_LORA_CHANGE:
        return []
    needed = max(updates, math.ceil(MIN_LORA_CHANGE / LORA_LR))
    advice = f"set optim.lr={LORA_LR:g} (at most 3e-4)" + (
        f" and train for at least {needed} updates" if needed > updates else ""
    )
    return [
        (
            f"optim.lr: {lr:g} over {updates} updates is too small for LoRA. The LoRA weights change by at most "
            f"{lr * updates:.2g}, so the samples hardly change; {advice} [TM808]"
        )
    ]


def emit_config_warnings(config: RunConfig) -> None:
    for message in collect_warnings(config):
        warnings.warn(message, stacklevel=2)


def warn_bf16_emulation(engine: Engine) -> None:
    """Warn on rank 0 if the device emulates bf16, with the measured slowdown."""
    message = describe_emulation(engine.config, engine.device) if engine.comm.rank == 0 else None
    if message:
        warnings.warn(message, stacklevel=4)
