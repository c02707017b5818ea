"""Post-train image and video generators with rewards.

`load` a recipe, `build` a run, `train` it, `evaluate` it and `generate` from it; the other names are what you write
models, rewards and objectives of your own with. `import tastemaker` imports nothing heavy: each name is imported from
its module when it is first used.
"""

import os
import sys

# `python -m tastemaker` puts the working directory first on the path, where a file html.py would replace Python's own.
# This stands before all imports that read a file, among them `from __future__`; os and sys are loaded at startup.
# The name may be glued to the option, as in `-mtastemaker`. The `-m` of another package keeps its directory.
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and any(
        name == "tastemaker" or (name.startswith("-") and name.endswith("mtastemaker"))
        for name in (word.split(".")[0] for word in sys.orig_argv)
    )
):
    _directory = sys.path.pop(0)
    if os.path.join(_directory, "tastemaker") == os.path.dirname(__file__):  # a checkout that is not installed
        sys.path.append(_directory)

import importlib
from typing import TYPE_CHECKING, Any

from . import compat

if TYPE_CHECKING:
    from .api import VAETrainer, build, build_model, evaluate, generate, list_models, load, register_model, train
    from .config.schema import RunConfig
    from .core.autoencoder import AutoencoderNet, AutoencoderSpec
    from .core.distributions import Categorical, Distribution, Gaussian
    from .core.model_spec import ModelSpec
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
    from .core.policy import Backbone, Guidance, Policy, Process, Rollout
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
        LikeBatch,
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
    from .preferences.alignment import align
    from .processes.autoregressive import AutoregressiveProcess
    from .processes.gaussian import GaussianProcess
    from .processes.masked import MaskedProcess
    from .report.display import compare, show
    from .report.figure import Figure
    from .training.run import Run
    from .training.trainer import training_events

__version__ = "0.1.0"

compat.install()

__all__ = [
    "MASK_TOKEN_ID",
    "AutoencoderNet",
    "AutoencoderSpec",
    "AutoregressiveProcess",
    "Backbone",
    "Categorical",
    "Comm",
    "Condition",
    "ConfigError",
    "Context",
    "Corrupted",
    "Distribution",
    "Figure",
    "FrozenCopyFinetuning",
    "FullFinetuning",
    "Gaussian",
    "GaussianProcess",
    "Guidance",
    "ImageBatch",
    "LikeBatch",
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
    "align",
    "build",
    "build_model",
    "compare",
    "evaluate",
    "generate",
    "list_models",
    "load",
    "register_model",
    "rollout_and_score",
    "select_rows",
    "show",
    "train",
    "training_events",
]

# Imported on first use: most of them import torch, which `tastemaker --help` does without.
_NAMES = {
    ".api": "VAETrainer build build_model evaluate generate list_models load register_model train",
    ".config.schema": "RunConfig",
    ".core.distributions": "Categorical Distribution Gaussian",
    ".core.objective": "Comm Context NoState Objective ObjectiveState ScoredRollout SingleProcess rollout_and_score",
    ".core.autoencoder": "AutoencoderNet AutoencoderSpec",
    ".core.model_spec": "ModelSpec",
    ".core.policy": "Backbone Guidance Policy Process Rollout",
    ".preferences.alignment": "align",
    ".processes.autoregressive": "AutoregressiveProcess",
    ".processes.gaussian": "GaussianProcess",
    ".processes.masked": "MaskedProcess",
    ".core.randomness": "Randomness",
    ".core.registry": "ConfigError",
    ".core.reward": "Reward RewardCard RewardError RewardSpec Rubric Scores Verdict Verifier WeightedReward",
    ".report.display": "compare show",
    ".report.figure": "Figure",
    ".training.run": "Run",
    ".training.trainer": "training_events",
    ".core.types": "Condition Corrupted ImageBatch LikeBatch Loss MASK_TOKEN_ID Metadata "
    "Placement PreferenceBatch PromptBatch Prompts Segment Trajectory select_rows",
    ".core.weights": "FrozenCopyFinetuning FullFinetuning Tuning Weights",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = vars(importlib.import_module(_MODULES[name], __name__))[name]
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
