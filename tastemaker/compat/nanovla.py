"""Configurations of nanoVLA-RL, its newer and its older ones, by our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.registry import ConfigError
from . import nanovla_dit, nanovla_vae
from .nanovla_vae import OLDER, Settings, known

STAGES = {"vae": nanovla_vae.convert_old_config, "dit": nanovla_dit.convert_old_config}


def is_two_stage_config(data: Mapping[str, Any]) -> bool:
    """Whether it is one of the older files, which say both stages at once."""
    return "autoencoder_params" in data and "train_params" in data


def convert_nanovla_config(data: Mapping[str, Any]) -> Settings:
    """The same run by our names, if it is one of nanoVLA-RL's; anything else as it is."""
    model = data.get("model")
    if is_two_stage_config(data):
        known(data, {*OLDER, "stage"}, "config")
        stage = data.get("stage", "vae")
        if stage not in STAGES:
            raise ConfigError(f"stage is {stage!r:.60}; expected vae, the first, or dit, the second")
        return STAGES[stage](data)
    if isinstance(model, Mapping) and "name" in model and "type" not in model:
        newer = nanovla_dit.convert_new_config if model["name"] == "dit" else nanovla_vae.convert_new_config
        return newer(data, model)
    return dict(data)
