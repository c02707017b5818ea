"""Sampling by the schedulers of diffusers; what is recorded and trained on is always made by our own processes."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from ..core.guidance import count_forward_passes
from ..core.policy import Policy, Process
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.types import PromptBatch
from ..processes.gaussian import GaussianProcess
from ..processes.karras import KarrasPath, time_of_noise
from ..processes.paths import NoisePath, RectifiedFlow, VariancePreserving
from .base import Search, SearchCost, SearchResult

PREDICTION_TYPES = {
    "epsilon": "epsilon",
    "velocity": "v_prediction",
    "sample": "sample",
}  # what diffusers calls a prediction
STEP = ("model_output", "timestep", "sample")  # what a sampler goes on from
LEVELS = 1000  # of a straight path, as flow schedulers count them


@dataclass(frozen=True)
class DiffusersSchedulerSearch(Search):
    """One sample a prompt, unjudged, by a scheduler of diffusers on the model's own path."""

    scheduler: str = "DPMSolverMultistepScheduler"  # the name of its class
    steps: PositiveInt | None = None  # as many as the process takes if not given
    settings: dict[str, bool | int | float | str] = field(default_factory=dict)  # such as use_karras_sigmas: true

    @torch.no_grad()
    def find(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        process, cond = require_gaussian(policy.process), policy.embed(batch.prompts, batch.facts)
        made = make_scheduler(self.scheduler, process.path, self.settings)
        with scheduler_errors(self.scheduler):
            set_timesteps(made, process.path, self.steps or process.steps, rng.rows.device)
        path, x, drawn = process.path, rng.normal("start", *policy.model.shape), make_generators(made, rng)
        flow, calls = isinstance(path, RectifiedFlow), 0
        x = x if flow else x * made.init_noise_sigma / input_scale(path, timestep_to_level(made.timesteps[0], path))
        for timestep in made.timesteps:
            seen = x if flow else made.scale_model_input(x, timestep)  # a flow needs no scale, and its own have none
            t = timestep_to_level(timestep, path).to(x.device)
            output = policy.model.predict(seen * input_scale(path, t), t.expand(len(x)), cond).float()
            calls += len(x) * count_forward_passes(policy.model, t)
            with scheduler_errors(self.scheduler):
                x = made.step(output, timestep, x, **drawn).prev_sample
        score = torch.full((len(batch),), torch.nan, device=x.device)
        return SearchResult(x * input_scale(path, path.grid(process.steps)[-1]).to(x.device), score, SearchCost(calls))


def require_gaussian(process: Process) -> GaussianProcess:
    if not isinstance(process, GaussianProcess):
        raise ConfigError(
            "--scheduler: schedulers of diffusers denoise, and this model writes tokens; leave --scheduler out"
        )
    return process


def make_scheduler(name: str, path: NoisePath, settings: Mapping[str, Any]) -> Any:
    """The scheduler of that name, on the same levels as the path and told what the network predicts."""
    import diffusers

    known = [each for each in dir(diffusers) if each.endswith("Scheduler") and not each.startswith("Flax")]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1) or ["DPMSolverMultistepScheduler"]
        raise ConfigError(f"--scheduler: diffusers has no '{name:.60}'; did you mean '{near[0]}'?")
    kind = getattr(diffusers, name)
    validate_scheduler(kind, name)
    taken = set(inspect.signature(kind.__init__).parameters)
    unknown = sorted(set(settings) - taken)
    if unknown:
        raise ConfigError(f"--scheduler: {name} has no setting '{unknown[0]:.60}'; expected some of {sorted(taken)}")
    told = scheduler_config(path, name, taken)
    with scheduler_errors(name):
        return kind(**{key: value for key, value in told.items() if key in taken} | dict(settings))


def validate_scheduler(kind: Any, name: str) -> None:
    """Refuse what stands in for one whose packages are not here, and those that do something else than sample."""
    missing = [package for package in getattr(kind, "_backends", ()) if find_spec(package) is None]
    if missing:
        raise ConfigError(f"--scheduler: {name} needs {missing[0]}, which is not here; run `pip install {missing[0]}`")
    _, *asked = inspect.signature(kind.step).parameters.values() if "step" in dir(kind) else (None,)
    needed = tuple(each.name for each in asked if each.default is each.empty and each.kind is not each.VAR_KEYWORD)
    if needed != STEP or "Inverse" in name:
        raise ConfigError(
            f"--scheduler: {name} makes no samples of predictions alone, or goes the other way; choose another"
        )


@contextmanager
def scheduler_errors(name: str) -> Iterator[None]:
    """Within the block whatever a scheduler has against its settings, or levels, becomes a sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, whose users they are
            yield
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"--scheduler: {name} cannot be used so ({error!s:.200}); set or choose another") from error


def scheduler_config(path: NoisePath, name: str, taken: set[str]) -> dict[str, Any]:
    """A path in the words of diffusers."""
    if isinstance(path, RectifiedFlow):
        return rectified_flow_config(path, name, taken)
    if isinstance(path, KarrasPath):
        return karras_config(path, name, taken)
    if isinstance(path, VariancePreserving):
        return variance_preserving_config(path, name, taken)
    raise ConfigError(
        f"--scheduler: no scheduler of diffusers knows this {type(path).__name__} path; leave --scheduler out"
    )


def rectified_flow_config(path: RectifiedFlow, name: str, taken: set[str]) -> dict[str, Any]:
    """Of a flow; where the scheduler takes our levels, they are shifted already."""
    if name.startswith("FlowMatch"):
        return {"num_train_timesteps": LEVELS, "shift": 1.0 if name.endswith("EulerDiscreteScheduler") else path.shift}
    if "use_flow_sigmas" not in taken:
        raise ConfigError(
            f"--scheduler: {name} is not for flows, as this model's straight path is; choose one such as "
            "FlowMatchEulerDiscreteScheduler or DPMSolverMultistepScheduler"
        )
    return {"use_flow_sigmas": True, "flow_shift": path.shift, "prediction_type": "flow_prediction"}


def karras_config(path: KarrasPath, name: str, taken: set[str]) -> dict[str, Any]:
    """Of levels without steps between them, as Stable Video Diffusion's."""
    if "timestep_type" not in taken:
        raise ConfigError(
            f"--scheduler: {name} is not for levels of any noise, as this model's path has; choose "
            "EulerDiscreteScheduler"
        )
    told = {"timestep_type": "continuous", "timestep_spacing": "leading", "use_karras_sigmas": True}
    return {**told, "sigma_min": path.smallest, "sigma_max": path.largest, "prediction_type": "v_prediction"}


def variance_preserving_config(path: VariancePreserving, name: str, taken: set[str]) -> dict[str, Any]:
    if not {"trained_betas", "beta_schedule"} <= taken:  # IPNDM's levels are its own, whatever it is given
        raise ConfigError(
            f"--scheduler: {name} is not for noise in levels, as this model's path is; choose DDIMScheduler "
            "or DPMSolverMultistepScheduler"
        )
    return {
        "num_train_timesteps": path.levels,
        "trained_betas": betas(path),
        "prediction_type": PREDICTION_TYPES[path.prediction],
        "timestep_spacing": path.spacing,
        "steps_offset": path.offset if path.spacing == "leading" else 0,
        "set_alpha_to_one": path.ends_clean,
        "clip_sample": False,
        "snr_shift_scale": 1.0,  # of CogVideoX's, and in the betas already
        "final_sigmas_type": "zero" if path.ends_clean else "sigma_min",
    }


def betas(path: VariancePreserving) -> list[float]:
    """What each level loses, whatever made the path so."""
    levels = torch.arange(path.levels + 1, dtype=torch.float64) / path.levels
    kept = 2 * (path.alpha(levels).double() / input_scale(path, levels)).log()
    return (-torch.expm1(kept.diff())).clamp(max=0.999999).tolist()


def set_timesteps(made: Any, path: NoisePath, steps: int, device: torch.device) -> None:
    """Set the levels the scheduler visits."""
    takes_ours = "sigmas" in inspect.signature(made.set_timesteps).parameters and "use_flow_sigmas" not in made.config
    if isinstance(path, RectifiedFlow) and takes_ours:
        made.set_timesteps(sigmas=path.grid(steps)[:-1].tolist(), device=device)
    else:
        made.set_timesteps(steps, device=device)


def input_scale(path: NoisePath, t: Tensor) -> Tensor:
    """By what samples are larger than a scheduler has them: VideoCrafter's shrink beside their noise."""
    if not isinstance(path, VariancePreserving) or path.shrinks == 1:
        return torch.ones_like(t)
    return (path.alpha(t) ** 2 + path.sigma(t) ** 2).sqrt()


def timestep_to_level(timestep: Tensor | float, path: NoisePath) -> Tensor:
    """Where a scheduler's step begins, from 0 to 1."""
    place = torch.as_tensor(timestep).float()
    if isinstance(path, KarrasPath):
        return time_of_noise((4 * place).exp())  # it counts a quarter of the logarithm
    return place / LEVELS if isinstance(path, RectifiedFlow) else (place + 1) / getattr(path, "levels", LEVELS)


def make_generators(made: Any, rng: Randomness) -> dict[str, Any]:
    """A stream of chance for each row, if the scheduler takes chances: what is beside a row changes nothing."""
    if "generator" not in inspect.signature(made.step).parameters:
        return {}
    seeds = rng.words("scheduler", 1).flatten().tolist()
    return {"generator": [torch.Generator().manual_seed(seed) for seed in seeds]}
