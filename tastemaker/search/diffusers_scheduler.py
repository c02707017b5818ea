"""Sampling with the schedulers of diffusers; rollouts for training always use our own processes."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from ..core.guidance import count_forward_passes
from ..core.policy import Policy, Process
from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from ..core.reward import Verifier
from ..core.types import PromptBatch
from ..processes.gaussian import GaussianProcess
from ..processes.paths import KarrasPath, NoisePath, RectifiedFlow, VariancePreserving, karras_timestep
from .base import Search, SearchCost, SearchResult

STEP_ARGUMENTS = ("model_output", "timestep", "sample")  # that a scheduler's `step` requires
FLOW_TIMESTEPS = 1000  # num_train_timesteps of flow schedulers


@dataclass(frozen=True)
class DiffusersSchedulerSearch(Search):
    """One sample per prompt with a scheduler of diffusers on the model's noise path; the verifier is not asked."""

    uses_verifier: ClassVar[bool] = False

    scheduler: str = "DPMSolverMultistepScheduler"  # the name of its class
    num_steps: PositiveInt | None = None  # by default those of the process
    settings: dict[str, bool | int | float | str] = field(default_factory=dict)  # such as use_karras_sigmas: true

    @torch.no_grad()
    def run(self, policy: Policy[Any], verifier: Verifier, batch: PromptBatch, rng: Randomness) -> SearchResult:
        process, cond = require_gaussian(policy.process), policy.embed(batch.prompts, batch.metadata)
        scheduler, path = make_scheduler(self.scheduler, process.path, self.settings), process.path
        with scheduler_errors(self.scheduler):
            set_timesteps(scheduler, path, self.num_steps or process.num_steps, rng.rows.device)
        x, generators = rng.normal(Purpose.INITIAL_NOISE, *policy.model.shape), make_generators(scheduler, rng)
        is_flow, calls = isinstance(path, RectifiedFlow), 0
        if not is_flow:
            x = x * scheduler.init_noise_sigma / input_scale(path, timestep_to_level(scheduler.timesteps[0], path))
        for timestep in scheduler.timesteps:
            # Flow models need no input scaling, and flow schedulers have no scale_model_input.
            scaled = x if is_flow else scheduler.scale_model_input(x, timestep)
            t = timestep_to_level(timestep, path).to(x.device)
            output = policy.model.predict(scaled * input_scale(path, t), t.expand(len(x)), cond).float()
            calls += len(x) * count_forward_passes(policy.model, t)
            with scheduler_errors(self.scheduler):
                x = scheduler.step(output, timestep, x, **generators).prev_sample
        score = torch.full((len(batch),), torch.nan, device=x.device)
        final = x * input_scale(path, path.timesteps(process.num_steps)[-1]).to(x.device)
        return SearchResult(final, score, SearchCost(calls))


def require_gaussian(process: Process) -> GaussianProcess:
    if not isinstance(process, GaussianProcess):
        raise ConfigError(
            "--scheduler: this model samples tokens, and the schedulers of diffusers do not support tokens; "
            "remove --scheduler [TM558]"
        )
    return process


def make_scheduler(name: str, path: NoisePath, settings: Mapping[str, Any]) -> Any:
    """The scheduler of that name, with the timesteps of the path and the prediction type of the model."""
    import diffusers

    known = [n for n in dir(diffusers) if n.endswith("Scheduler") and not n.startswith("Flax")]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1) or ["DPMSolverMultistepScheduler"]
        raise ConfigError(f"--scheduler: diffusers does not have '{name:.60}'; did you mean '{near[0]}'? [TM559]")
    scheduler_class = getattr(diffusers, name)
    validate_scheduler(scheduler_class, name)
    parameters = set(inspect.signature(scheduler_class.__init__).parameters)
    unknown = sorted(set(settings) - parameters)
    if unknown:
        raise ConfigError(
            f"--scheduler: {name} does not have the setting '{unknown[0]:.60}'; use some of {sorted(parameters)} "
            "[TM560]"
        )
    config = scheduler_config(path, name, parameters)
    with scheduler_errors(name):
        return scheduler_class(**{k: v for k, v in config.items() if k in parameters} | dict(settings))


def validate_scheduler(scheduler_class: Any, name: str) -> None:
    """Refuse schedulers whose packages are not installed, and those that do not sample from predictions."""
    missing = [package for package in getattr(scheduler_class, "_backends", ()) if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"--scheduler: {name} needs {missing[0]}, which is not installed; run `pip install {missing[0]}` [TM561]"
        )
    has_step = "step" in dir(scheduler_class)
    _, *arguments = inspect.signature(scheduler_class.step).parameters.values() if has_step else (None,)
    required = tuple(a.name for a in arguments if a.default is a.empty and a.kind is not a.VAR_KEYWORD)
    if required != STEP_ARGUMENTS or "Inverse" in name:
        raise ConfigError(
            f"--scheduler: {name} cannot be used to sample here; choose another scheduler, such as "
            "DPMSolverMultistepScheduler [TM562]"
        )


@contextmanager
def scheduler_errors(name: str) -> Iterator[None]:
    """Turn the exceptions of a scheduler about its settings or timesteps into a ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, for the authors of schedulers
            yield
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"--scheduler: {name} does not accept these settings ({error!s:.200}); change the settings, or choose "
            "another scheduler [TM563]"
        ) from error


def scheduler_config(path: NoisePath, name: str, parameters: set[str]) -> dict[str, Any]:
    """The config of diffusers for a noise path."""
    if isinstance(path, RectifiedFlow):
        return rectified_flow_config(path, name, parameters)
    if isinstance(path, KarrasPath):
        return karras_config(path, name, parameters)
    if isinstance(path, VariancePreserving):
        return variance_preserving_config(path, name, parameters)
    raise ConfigError(
        f"--scheduler: diffusers does not have a scheduler for the path {type(path).__name__}; remove --scheduler "
        "[TM564]"
    )


def rectified_flow_config(path: RectifiedFlow, name: str, parameters: set[str]) -> dict[str, Any]:
    """The config for a rectified flow; a scheduler that takes our sigmas gets them already shifted."""
    if name.startswith("FlowMatch"):
        return {
            "num_train_timesteps": FLOW_TIMESTEPS,
            "shift": 1.0 if name.endswith("EulerDiscreteScheduler") else path.shift,
        }
    if "use_flow_sigmas" not in parameters:
        raise ConfigError(
            f"--scheduler: {name} does not support flow models such as this one; choose for example "
            "FlowMatchEulerDiscreteScheduler or DPMSolverMultistepScheduler [TM565]"
        )
    return {"use_flow_sigmas": True, "flow_shift": path.shift, "prediction_type": "flow_prediction"}


def karras_config(path: KarrasPath, name: str, parameters: set[str]) -> dict[str, Any]:
    """The config for continuous noise levels, as those of Stable Video Diffusion."""
    if "timestep_type" not in parameters:
        raise ConfigError(
            f"--scheduler: {name} does not support the continuous noise levels of this model; choose "
            "EulerDiscreteScheduler [TM566]"
        )
    config = {"timestep_type": "continuous", "timestep_spacing": "leading", "use_karras_sigmas": True}
    return {**config, "sigma_min": path.sigma_min, "sigma_max": path.sigma_max, "prediction_type": "v_prediction"}


def variance_preserving_config(path: VariancePreserving, name: str, parameters: set[str]) -> dict[str, Any]:
    if not {"trained_betas", "beta_schedule"} <= parameters:  # IPNDM ignores betas
        raise ConfigError(
            f"--scheduler: {name} does not support the discrete noise levels of this model; choose DDIMScheduler "
            "or DPMSolverMultistepScheduler [TM567]"
        )
    return {
        "num_train_timesteps": path.num_train_timesteps,
        "trained_betas": compute_betas(path),
        "prediction_type": path.prediction_type,
        "timestep_spacing": path.timestep_spacing,
        "steps_offset": path.steps_offset if path.timestep_spacing == "leading" else 0,
        "set_alpha_to_one": path.set_alpha_to_one,
        "clip_sample": False,
        "snr_shift_scale": 1.0,  # CogVideoX's shift is already part of the betas
        "final_sigmas_type": "zero" if path.set_alpha_to_one else "sigma_min",
    }


def compute_betas(path: VariancePreserving) -> list[float]:
    """The betas of the path's signal-to-noise ratios: [num_train_timesteps]."""
    levels = torch.arange(path.num_train_timesteps + 1, dtype=torch.float64) / path.num_train_timesteps
    log_alphas_cumprod = 2 * (path.alpha(levels).double() / input_scale(path, levels)).log()
    return (-torch.expm1(log_alphas_cumprod.diff())).clamp(max=0.999999).tolist()


def set_timesteps(scheduler: Any, path: NoisePath, steps: int, device: torch.device) -> None:
    """Set the timesteps of a scheduler; a flow scheduler gets the sigmas of the path."""
    parameters = inspect.signature(scheduler.set_timesteps).parameters
    takes_sigmas = "sigmas" in parameters and "use_flow_sigmas" not in scheduler.config
    if isinstance(path, RectifiedFlow) and takes_sigmas:
        scheduler.set_timesteps(sigmas=path.timesteps(steps)[:-1].tolist(), device=device)
    else:
        scheduler.set_timesteps(steps, device=device)


def input_scale(path: NoisePath, t: Tensor) -> Tensor:
    """The factor from a scheduler's samples to the model's: VideoCrafter scales the signal down: same shape as t."""
    if not isinstance(path, VariancePreserving) or path.final_signal_scale == 1:
        return torch.ones_like(t)
    return (path.alpha(t) ** 2 + path.sigma(t) ** 2).sqrt()


def timestep_to_level(timestep: Tensor | float, path: NoisePath) -> Tensor:
    """A scheduler's timestep as noise level t in [0, 1]."""
    value = torch.as_tensor(timestep).float()
    if isinstance(path, KarrasPath):
        return karras_timestep((4 * value).exp())  # its timestep is log(sigma) / 4
    if isinstance(path, VariancePreserving):
        return (value + 1) / path.num_train_timesteps
    return value / FLOW_TIMESTEPS


def make_generators(scheduler: Any, rng: Randomness) -> dict[str, Any]:
    """A random generator per sample, if the scheduler is stochastic, so that samples do not depend on the batch."""
    if "generator" not in inspect.signature(scheduler.step).parameters:
        return {}
    seeds = rng.words(Purpose.SCHEDULER, 1).flatten().tolist()
    return {"generator": [torch.Generator().manual_seed(seed) for seed in seeds]}
