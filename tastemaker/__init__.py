"""Teaches image and video generators what people want.

`load` a recipe, `build` a run of it, and iterate over `tastemaker.train.loop.train`; everything else here is what a
model, a reward or an objective of your own is written with. Importing this needs torch, PyYAML and pydantic alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .distributions import Categorical, Distribution, Gaussian
from .objective import Alone, Comm, Context, Memory, Nothing, Objective, Rated, rate
from .policy import Backbone, CausalBackbone, Guidance, ModelSpec, Policy, Process, Rollout
from .processes.autoregressive import Autoregressive
from .processes.gaussian import GaussianProcess
from .processes.masked import Masked
from .randomness import Randomness
from .registry import ConfigError
from .reward import About, Graded, Reward, RewardError, RewardSpec, Rubric, Scores, Verdict, Verifier
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

if TYPE_CHECKING:
    from .commands.scripting import VAETrainer, build_model, list_models, load_config, register_model
    from .config.build import build
    from .config.load import load
    from .config.run import RunConfig
    from .train.run import Run

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

# Found when first asked for: they reach everything, and a model or reward of one's own needs none of it. `train` is
# not among them: the name is taken by the package it lives in.
_SMALL = ("VAETrainer", "build_model", "list_models", "load_config", "register_model")
_LATER = {
    "build": ".config.build",
    "load": ".config.load",
    "Run": ".train.run",
    "RunConfig": ".config.run",
    **dict.fromkeys(_SMALL, ".commands.scripting"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return vars(importlib.import_module(_LATER[name], __name__))[name]
