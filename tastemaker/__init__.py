"""Teaches image and video generators what people want.

`load` a recipe, `build` a run of it, and iterate over `tastemaker.training.loop.train`; everything else here is what a
model, a reward or an objective of your own is written with. Importing the package imports none of it; a name
is imported when first used, and then needs torch, PyYAML and pydantic alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import VAETrainer, build_model, list_models, load_config, register_model
    from .config.build import build
    from .config.load import load
    from .config.schema import RunConfig
    from .core.distributions import Categorical, Distribution, Gaussian
    from .core.objective import (
        Comm,
        Context,
        NoState,
        Objective,
        ObjectiveState,
        ScoredRollout,
        SingleProcess,
        rollout_and_score,
    )
    from .core.policy import Backbone, CausalBackbone, Guidance, ModelSpec, Policy, Process, Rollout
    from .core.randomness import Randomness
    from .core.registry import ConfigError
    from .core.reward import (
        Reward,
        RewardCard,
        RewardError,
        RewardSpec,
        Rubric,
        Scores,
        Verdict,
        Verifier,
        WeightedReward,
    )
    from .core.types import (
        MASK_TOKEN_ID,
        Condition,
        Corrupted,
        ImageBatch,
        Loss,
        Metadata,
        Placement,
        PreferenceBatch,
        PromptBatch,
        Prompts,
        Segment,
        Trajectory,
        select_rows,
    )
    from .core.weights import FrozenCopyFinetuning, FullFinetuning, Tuning, Weights
    from .processes.autoregressive import AutoregressiveProcess
    from .processes.gaussian import GaussianProcess
    from .processes.masked import MaskedProcess
    from .training.run import Run

__version__ = "0.1.0"

__all__ = [
    "MASK_TOKEN_ID",
    "AutoregressiveProcess",
    "Backbone",
    "Categorical",
    "CausalBackbone",
    "Comm",
    "Condition",
    "ConfigError",
    "Context",
    "Corrupted",
    "Distribution",
    "FrozenCopyFinetuning",
    "FullFinetuning",
    "Gaussian",
    "GaussianProcess",
    "Guidance",
    "ImageBatch",
    "Loss",
    "MaskedProcess",
    "Metadata",
    "ModelSpec",
    "NoState",
    "Objective",
    "ObjectiveState",
    "Placement",
    "Policy",
    "PreferenceBatch",
    "Process",
    "PromptBatch",
    "Prompts",
    "Randomness",
    "Reward",
    "RewardCard",
    "RewardError",
    "RewardSpec",
    "Rollout",
    "Rubric",
    "Run",
    "RunConfig",
    "ScoredRollout",
    "Scores",
    "Segment",
    "SingleProcess",
    "Trajectory",
    "Tuning",
    "VAETrainer",
    "Verdict",
    "Verifier",
    "WeightedReward",
    "Weights",
    "build",
    "build_model",
    "list_models",
    "load",
    "load_config",
    "register_model",
    "rollout_and_score",
    "select_rows",
]

# Imported when first asked for: most of them import torch, which `tastemaker --help` does without. `train` is not among
# them: the name is taken by the package it lives in.
_NAMES = {
    ".api": ("VAETrainer", "build_model", "list_models", "load_config", "register_model"),
    ".config.build": ("build",),
    ".config.load": ("load",),
    ".config.schema": ("RunConfig",),
    ".core.distributions": ("Categorical", "Distribution", "Gaussian"),
    ".core.objective": (
        "SingleProcess",
        "Comm",
        "Context",
        "ObjectiveState",
        "NoState",
        "Objective",
        "ScoredRollout",
        "rollout_and_score",
    ),
    ".core.policy": ("Backbone", "CausalBackbone", "Guidance", "ModelSpec", "Policy", "Process", "Rollout"),
    ".processes.autoregressive": ("AutoregressiveProcess",),
    ".processes.gaussian": ("GaussianProcess",),
    ".processes.masked": ("MaskedProcess",),
    ".core.randomness": ("Randomness",),
    ".core.registry": ("ConfigError",),
    ".core.reward": (
        "RewardCard",
        "WeightedReward",
        "Reward",
        "RewardError",
        "RewardSpec",
        "Rubric",
        "Scores",
        "Verdict",
        "Verifier",
    ),
    ".training.run": ("Run",),
    ".core.types": (
        "Condition",
        "Corrupted",
        "Metadata",
        "MASK_TOKEN_ID",
        "Loss",
        "PreferenceBatch",
        "ImageBatch",
        "Placement",
        "PromptBatch",
        "Prompts",
        "Segment",
        "Trajectory",
        "select_rows",
    ),
    ".core.weights": ("FullFinetuning", "Tuning", "FrozenCopyFinetuning", "Weights"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = globals()[name] = vars(importlib.import_module(_MODULES[name], __name__))[name]
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
