"""CLIP's tokenizer of a generator's folder, reused for rewards that would otherwise need a download of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ..core.reward import RewardSpec
from ..core.safe_files import read_json_object
from ..models.pretrained import find_cached
from ..rewards.backbones.tokenizers import CLIP_TOKENIZER, has_tokenizer
from .schema import RunConfig


def share_clip_tokenizer(config: RunConfig) -> RunConfig:
    """The configuration with CLIP's tokenizer of the generator's local folder as that of rewards which have none."""
    folder = find_clip_tokenizer(config.model.weights)
    if folder is None or find_cached(CLIP_TOKENIZER) is not None:
        return config
    rewards = {
        name: reward if reward.servers else replace(reward, spec=_with_tokenizer(reward.spec, folder))
        for name, reward in config.rewards.items()
    }
    return replace(config, rewards=rewards)


def find_clip_tokenizer(weights: Any) -> Path | None:
    """The folder of CLIP's tokenizer in a local pipeline, such as FLUX or Stable Diffusion."""
    if not isinstance(weights, str) or not (folder := Path(weights).expanduser() / "tokenizer").is_dir():
        return None
    try:
        settings = read_json_object(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return None
    is_clip = str(settings.get("tokenizer_class", "")).startswith("CLIPTokenizer")
    return folder if is_clip and has_tokenizer(folder) else None


def _with_tokenizer(spec: Any, folder: Path) -> Any:
    """The reward, and rewards inside it, with this tokenizer where CLIP's own would be needed."""

    def choose(reward: Any) -> dict[str, Any]:
        names = [field.name for field in fields(reward)]
        needs = "tokenizer" in names and reward.tokenizer is None and CLIP_TOKENIZER in reward.sources
        return {"tokenizer": str(folder)} if needs else {}

    return change_rewards(spec, choose)


def change_rewards(spec: Any, choose: Callable[[Any], dict[str, Any]]) -> Any:
    """A reward with the settings that `choose` returns for it, and likewise the rewards inside it."""
    if not is_dataclass(spec):
        return spec
    settings: Any = spec  # a reward, which mypy takes for a class
    changes = choose(settings)
    for field in fields(settings):
        value = getattr(spec, field.name)
        if isinstance(value, RewardSpec):
            changes[field.name] = change_rewards(value, choose)
        elif isinstance(value, tuple) and any(isinstance(each, RewardSpec) for each in value):
            changes[field.name] = tuple(change_rewards(each, choose) for each in value)
    return replace(settings, **changes) if changes else spec
