"""Teaches image and video generators what people want.

`load` a recipe, `build` a run of it, and iterate over `tastemaker.train.loop.train`; everything else here is what a
model, a reward or an objective of your own is written with. Importing the package imports none of it; a name
is imported when first used, and then needs torch, PyYAML and pydantic alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands.scripting import VAETrainer, build_model, list_models, load_config, register_model
    from .config.build import build
    from .config.load import load
    from .config.run import RunConfig
    from .distributions import Categorical, Distribution, Gaussian
    from .objective import Alone, Comm, Context, Memory, Nothing, Objective, Rated, rate
    from .policy import Backbone, CausalBackbone, Guidance, ModelSpec, Policy, Process, Rollout
    from .processes.autoregressive import Autoregressive
    from .processes.gaussian import GaussianProcess
    from .processes.masked import Masked
    from .randomness import Randomness
    from .registry import ConfigError
    from .reward import About, Graded, Reward, RewardError, RewardSpec, Rubric, Scores, Verdict, Verifier
    from .train.run import Run
    from .types import (
        HIDDEN,
        Condition,
        Corrupted,
        Facts,
        Loss,
        Pairs,
        Pictures,
        Placement,
        PromptBatch,
        Prompts,
        Segment,
        Trajectory,
        index,
    )
    from .weights import Full, Tuning, Twin, Weights

__version__ = "0.1.0"

__all__ = [
    "HIDDEN",
    "About",
    "Alone",
    "Autoregressive",
    "Backbone",
    "Categorical",
    "CausalBackbone",
    "Comm",
    "Condition",
    "ConfigError",
    "Context",
    "Corrupted",
    "Distribution",
    "Facts",
    "Full",
    "Gaussian",
    "GaussianProcess",
    "Graded",
    "Guidance",
    "Loss",
    "Masked",
    "Memory",
    "ModelSpec",
    "Nothing",
    "Objective",
    "Pairs",
    "Pictures",
    "Placement",
    "Policy",
    "Process",
    "PromptBatch",
    "Prompts",
    "Randomness",
    "Rated",
    "Reward",
    "RewardError",
    "RewardSpec",
    "Rollout",
    "Rubric",
    "Run",
    "RunConfig",
    "Scores",
    "Segment",
    "Trajectory",
    "Tuning",
    "Twin",
    "VAETrainer",
    "Verdict",
    "Verifier",
    "Weights",
    "build",
    "build_model",
    "index",
    "list_models",
    "load",
    "load_config",
    "rate",
    "register_model",
]

# Imported when first asked for: most of them import torch, which `tastemaker --help` does without. `train` is not among
# them: the name is taken by the package it lives in.
_NAMES = {
    ".commands.scripting": ("VAETrainer", "build_model", "list_models", "load_config", "register_model"),
    ".config.build": ("build",),
    ".config.load": ("load",),
    ".config.run": ("RunConfig",),
    ".distributions": ("Categorical", "Distribution", "Gaussian"),
    ".objective": ("Alone", "Comm", "Context", "Memory", "Nothing", "Objective", "Rated", "rate"),
    ".policy": ("Backbone", "CausalBackbone", "Guidance", "ModelSpec", "Policy", "Process", "Rollout"),
    ".processes.autoregressive": ("Autoregressive",),
    ".processes.gaussian": ("GaussianProcess",),
    ".processes.masked": ("Masked",),
    ".randomness": ("Randomness",),
    ".registry": ("ConfigError",),
    ".reward": ("About", "Graded", "Reward", "RewardError", "RewardSpec", "Rubric", "Scores", "Verdict", "Verifier"),
    ".train.run": ("Run",),
    ".types": (
        "Condition",
        "Corrupted",
        "Facts",
        "HIDDEN",
        "Loss",
        "Pairs",
        "Pictures",
        "Placement",
        "PromptBatch",
        "Prompts",
        "Segment",
        "Trajectory",
        "index",
    ),
    ".weights": ("Full", "Tuning", "Twin", "Weights"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = globals()[name] = vars(importlib.import_module(_MODULES[name], __name__))[name]
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
