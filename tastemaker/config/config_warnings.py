"""Warnings about valid but unusual configurations, emitted once when a run is built."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..core.policy import HasTimestepShift
from ..objectives.forced_grpo import TeacherForcedGRPO
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from ..training.device_precision import describe_emulation
from .schema import AnyConfig, RunConfig

if TYPE_CHECKING:  # its import takes half a second, which `check` does without
    from ..training.engine import Engine

FAULTS = {
    "sampled_context": "what was drawn by reading the picture is scored by reading the sample",
    "dropout": "what was drawn by the whole network is scored by one with parts left out",
}


CLOSE = 0.01  # of a shift, as a share of it


def collect_warnings(config: AnyConfig) -> list[str]:
    """Every fault of published trainers that is switched on, and levels that were made for clips of another size."""
    return [*faults(config), *unguided(config), *levels(config)] if isinstance(config, RunConfig) else []


def faults(config: RunConfig) -> list[str]:
    objective = config.objective
    if not isinstance(objective, TeacherForcedGRPO):
        return []
    why = "so the ratio does not begin at 1; meant to compare with, not to train by"
    return [f"objective.faults: {fault} is on: {FAULTS[fault]}, {why}" for fault in objective.faults]


def unguided(config: RunConfig) -> list[str]:
    """Teacher-forced samples are drawn by what scores them, so that none of it is about them."""
    guidance, objective = config.guidance, config.objective
    drawn = objective.needs_chance and not isinstance(objective, TeacherForcedGRPO)
    if guidance is None or not guidance.rollouts_only or guidance.scale == 1 or not drawn:
        return []
    why = "samples are drawn under guidance and scored without it, so that what learns is not what drew"
    return [f"guidance.rollouts_only: {why}, as AR-GRPO has it; set it to false to score them as they were drawn"]


def levels(config: RunConfig) -> list[str]:
    wanted = config.model.shift if isinstance(config.model, HasTimestepShift) else None
    path = config.process.path if isinstance(config.process, GaussianProcess) else None
    if wanted is None or not isinstance(path, RectifiedFlow) or abs(path.shift - wanted) <= CLOSE * wanted:
        return []
    meant = f"set process.path.shift={wanted:.4f}, unless another is meant"
    return [f"process.path.shift: {path.shift:g} is for clips of another size or length than the model's; {meant}"]


def emit_config_warnings(config: RunConfig) -> None:
    for caution in collect_warnings(config):
        warnings.warn(caution, stacklevel=2)


def warn_bf16_emulation(engine: Engine) -> None:
    """Warn on rank 0, with the measured factor, where the engine computes in a bf16 that its device emulates."""
    found = describe_emulation(engine.config, engine.device) if engine.comm.rank == 0 else None
    if found:
        warnings.warn(found, stacklevel=3)
