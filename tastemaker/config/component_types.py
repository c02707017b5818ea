"""The type of a configuration's field, and the registry in which the `type:` of its value is looked up."""

from __future__ import annotations

from ..core.autoencoder import AutoencoderSpec
from ..core.objective import Objective
from ..core.policy import ModelSpec, Process
from ..core.registry import Registry
from ..core.reward import RewardSpec
from ..core.weights import Tuning
from ..data.spec import DataSpec
from ..processes.dynamics import SamplerDynamics
from ..processes.paths import NoisePath
from ..search.base import Search
from .registries import AUTOENCODERS, DATA, DYNAMICS, MODELS, OBJECTIVES, PATHS, PROCESSES, REWARDS, SEARCHES, TUNINGS

COMPONENT_REGISTRIES: dict[type, Registry] = {
    ModelSpec: MODELS,
    AutoencoderSpec: AUTOENCODERS,
    Process: PROCESSES,
    NoisePath: PATHS,
    SamplerDynamics: DYNAMICS,
    Objective: OBJECTIVES,
    RewardSpec: REWARDS,
    Tuning: TUNINGS,
    DataSpec: DATA,
    Search: SEARCHES,
}
