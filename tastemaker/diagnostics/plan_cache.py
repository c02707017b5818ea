"""A cache of `tastemaker plan`: what was measured for a configuration is kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.dump import config_to_yaml
from ..config.schema import AutoencoderRunConfig, RunConfig
from ..core.output_paths import user_cache_directory, write_text_atomically
from ..core.safe_files import read_json
from . import plan

PACKAGE_ROOT = Path(__file__).parent.parent
CACHE_FILE = "plans.json"
MAX_ENTRIES = 500  # the oldest are dropped
OWN_COMPONENT = re.compile(r"type: '?[\w.]+:\w")  # of the user's own file, which may change

PlannedConfig = RunConfig | AutoencoderRunConfig


@dataclass
class PlanCache:
    """Estimates by configuration, number of GPUs, and state of the package and PyTorch.

    A damaged file counts as empty. Autoencoders, whose estimate depends on the data, and components of the user's own
    are measured every time.
    """

    enabled: bool = True

    def estimate(self, config: PlannedConfig, world_size: int = 1) -> plan.ResourceEstimate:
        """The estimate of a run, measured unless it is known."""
        key = self._key(config, world_size) if self.enabled else None
        known = _read_entries() if key else {}
        if key and (estimate := _parse_estimate(known.get(key))) is not None:
            return estimate
        estimate = plan.estimate_any(config, world_size)
        if key:
            _write_entries({**_read_entries(), key: asdict(estimate)})
        return estimate

    def knows(self, config: PlannedConfig, world_size: int = 1) -> bool:
        key = self._key(config, world_size) if self.enabled else None
        return key is not None and _parse_estimate(_read_entries().get(key)) is not None

    def _key(self, config: PlannedConfig, world_size: int) -> str | None:
        from .. import __version__

        settings = config_to_yaml(config)
        if isinstance(config, AutoencoderRunConfig) or OWN_COMPONENT.search(settings):
            return None
        identity = (settings, world_size, __version__, torch.__version__, _last_change())
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def _last_change() -> int:
    """When the package's code was last changed, since the version of a checkout stays the same."""
    return max(path.stat().st_mtime_ns for path in PACKAGE_ROOT.rglob("*.py"))


def _read_entries() -> dict[str, Any]:
    try:
        entries = read_json(user_cache_directory() / CACHE_FILE)
    except (OSError, RuntimeError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write_entries(entries: dict[str, Any]) -> None:
    recent = dict(list(entries.items())[-MAX_ENTRIES:])
    try:
        write_text_atomically(user_cache_directory() / CACHE_FILE, json.dumps(recent))
    except (OSError, RuntimeError):
        return  # without a cache, every plan measures


def _parse_estimate(entry: Any) -> plan.ResourceEstimate | None:
    try:
        estimate = plan.ResourceEstimate(**entry)
        return estimate if estimate.total > 0 else None
    except TypeError:
        return None
