"""The type of a configuration's field, and the registry in which the `type:` of its value is looked up."""

from __future__ import annotations

from ..codec import CodecSpec
from ..data.spec import DataSpec
from ..objective import Objective
from ..policy import ModelSpec, Process
from ..processes.dynamics import Dynamics
from ..processes.paths import Path
from ..registry import Registry
from ..reward import RewardSpec
from ..search.search import Search
from ..weights import Tuning
from .registries import CODECS, DATA, DYNAMICS, MODELS, OBJECTIVES, PATHS, PROCESSES, REWARDS, SEARCHES, TUNINGS

KINDS: dict[type, Registry] = {
    ModelSpec: MODELS,
    CodecSpec: CODECS,
    Process: PROCESSES,
    Path: PATHS,
    Dynamics: DYNAMICS,
    Objective: OBJECTIVES,
    RewardSpec: REWARDS,
    Tuning: TUNINGS,
    DataSpec: DATA,
    Search: SEARCHES,
}
