"""The doctor: run all checks on a configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ..config.build import build, make_tiny
from ..config.schema import RunConfig
from ..core.registry import ConfigError
from ..core.reward import RewardError
from ..training.errors import TrainingError
from ..training.run import Run
from . import doctor_checks, two_rank_check
from .check_result import CheckResult, fail_result

CHECKS: dict[str, Callable[[Run], CheckResult]] = {
    "importance ratio (fp32)": lambda run: doctor_checks.check_importance_ratio(run, "fp32"),
    "importance ratio (bf16)": lambda run: doctor_checks.check_importance_ratio(run, "bf16"),
    "cache": doctor_checks.check_kv_cache,
    "gradients": doctor_checks.check_gradients,
    "weights": doctor_checks.check_weights_change_samples,
    "reference": doctor_checks.check_kl_gradient,
    "rewards": doctor_checks.check_reward_spread,
    "pixels": doctor_checks.check_pixel_range,
    "resume": doctor_checks.check_resume,
}


def run_doctor(config: RunConfig, *, tiny: bool = False) -> Iterator[CheckResult]:
    """Prove on the real configuration that it can learn; what cannot be proved says what to do."""
    config = make_tiny(config) if tiny else config
    quiet = replace(config, sample=replace(config.sample, every=0), checkpoint=replace(config.checkpoint, keep=0))
    with tempfile.TemporaryDirectory() as folder:
        run = build(quiet, Path(folder) / "run")
        quiet = replace(quiet, engine=run.engine.config)  # two ranks are compared in the same precision
        parameters = sum(p.numel() for p in run.policy.weights.net.parameters())
        run.save(0)
        start = Path(folder) / "run" / "checkpoints" / "step-000000"
        for name, check in {
            **CHECKS,
            "pixels": lambda run: doctor_checks.check_pixel_range(run, trained=not tiny),
        }.items():
            yield run_check(name, check, run)
        run.resume(start)
        yield run_check(
            "ranks",
            lambda patient: two_rank_check.check_two_ranks(
                quiet, two_rank_check.first_step_metrics(patient), parameters
            ),
            run,
        )
        run.engine.close()


def run_check(name: str, check: Callable[[Run], CheckResult], run: Run) -> CheckResult:
    """A check that cannot be done is a finding too."""
    try:
        return check(run)
    except (RewardError, TrainingError, ConfigError) as error:
        return fail_result(name, "could not be checked", str(error))
