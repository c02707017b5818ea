"""Formats and names of the projects that Tastemaker grew out of: YAML files of nanoVLA-RL and Show-o, names of rewards.

The rest of the package does not import this one: `install` registers it with `config` when `tastemaker` is imported.
"""

from __future__ import annotations

from typing import Any

from ..config.registries import CONFIG_FORMATS, DATASET_FORMATS, REWARDS, VALUE_HINTS

# The sum is (aesthetic + 15 hps) / 2, both of images stretched to a square.
VADER_REWARDS: dict[str, dict[str, Any]] = {
    "pick_score": {"type": "pickscore"},
    "objectDetection": {"type": "detection", "expect": "absent"},
    "rainy": {"type": "weather", "kind": "rainy"},
    "snowy": {"type": "weather", "kind": "snowy"},
    "aesthetic_hps": {
        "type": "sum",
        "rewards": [{"type": "aesthetic"}, {"type": "hps", "resize_mode": "stretch"}],
        "weights": [0.5, 7.5],
    },
}
# Image-Generation-CoT's `--reward_model`.
COT_JUDGES: dict[str, dict[str, Any]] = {
    "orm_zs": {"type": "vlm"},
    "orm_ft": {"type": "vlm", "weights": "orm_ft"},
    "parm": {"type": "vlm", "weights": "parm"},
}


def install() -> None:
    """Register the converters and aliases. Imports none of the converters."""
    CONFIG_FORMATS.extend(("tastemaker.compat.nanovla:convert_config", "tastemaker.compat.showo:convert_config"))
    DATASET_FORMATS["image_folder"] = "tastemaker.compat.nanovla:convert_image_folder"
    VALUE_HINTS["gradient_mode", "last"] = "VADER's 'last' is 'last_steps' with last_steps: 1"
    for name, settings in {**VADER_REWARDS, **COT_JUDGES}.items():
        REWARDS.add_alias(name, settings)
