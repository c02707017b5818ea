"""The whole examination, finding by finding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ..config.build import build, shrunk
from ..config.run import RunConfig
from ..registry import ConfigError
from ..reward import RewardError
from ..train.failures import TrainingError
from ..train.run import Run
from . import checks, ranks
from .finding import Finding, failed

CHECKS: dict[str, Callable[[Run], Finding]] = {
    "importance ratio (fp32)": lambda run: checks.ratio(run, "fp32"),
    "importance ratio (bf16)": lambda run: checks.ratio(run, "bf16"),
    "cache": checks.cache,
    "gradients": checks.every_gradient,
    "weights": checks.weights_matter,
    "reference": checks.tie_has_a_graph,
    "rewards": checks.rewards_speak,
    "pixels": checks.pixel_range,
    "resume": checks.resume,
}


def examine(config: RunConfig, *, tiny: bool = False) -> Iterator[Finding]:
    """Prove on the real configuration that it can learn; what cannot be proved says what to do."""
    config = shrunk(config) if tiny else config
    quiet = replace(config, sample=replace(config.sample, every=0), checkpoint=replace(config.checkpoint, keep=0))
    with tempfile.TemporaryDirectory() as folder:
        run = build(quiet, Path(folder) / "run")
        quiet = replace(quiet, engine=run.engine.config)  # two ranks are compared in the same precision
        parameters = sum(p.numel() for p in run.policy.weights.net.parameters())
        run.save(0)
        start = Path(folder) / "run" / "checkpoints" / "step-000000"
        for name, check in {**CHECKS, "pixels": lambda run: checks.pixel_range(run, trained=not tiny)}.items():
            yield attempt(name, check, run)
        run.resume(start)
        yield attempt("ranks", lambda patient: ranks.two_ranks(quiet, ranks.told(patient), parameters), run)
        run.engine.close()


def attempt(name: str, check: Callable[[Run], Finding], run: Run) -> Finding:
    """A check that cannot be done is a finding too."""
    try:
        return check(run)
    except (RewardError, TrainingError, ConfigError) as error:
        return failed(name, "could not be checked", str(error))
