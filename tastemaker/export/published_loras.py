"""Adapters that others have published: by what VADER calls its own, or by their ids on the hub."""

from __future__ import annotations

from pathlib import Path

from ..core.registry import ConfigError
from ..models.pretrained import HUB, PICKLED, WeightsSource, find_cached, find_weights

VADER_PREFIX = "zheyangqin/VADER_VideoCrafter_"
PUBLISHED_LORAS = {
    "huggingface-pickscore": WeightsSource(
        f"{VADER_PREFIX}PickScore", "vader_videocrafter_pickscore.pt", "20 MB", "MIT"
    ),
    "huggingface-hps-aesthetic": WeightsSource(
        f"{VADER_PREFIX}HPS_Aesthetic", "vader_videocrafter_hps_aesthetic.pt", "10 MB", "MIT"
    ),
}


def find_published_lora(name: str) -> WeightsSource | None:
    """Published adapters of that name, or of that id on the hub."""
    return next((source for short, source in PUBLISHED_LORAS.items() if name in (short, source.hub, str(source))), None)


def resolve_lora_path(path: Path) -> Path:
    """The file behind such a name, if it was fetched before; a path stays as it is."""
    name = path.as_posix()
    source = find_published_lora(name)
    if path.exists() or not (source or HUB.fullmatch(name)):
        return path
    if source is not None:
        return find_weights(source.hub, source)
    folder = find_cached(WeightsSource(name))
    return path if folder is None else _only(folder, name)


def _only(folder: Path, name: str) -> Path:
    files = sorted(path for path in folder.iterdir() if path.suffix in (*PICKLED, ".safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"'{name:.200}' should hold one file of adapters and holds {found:.200}; give its path")
    return files[0]
