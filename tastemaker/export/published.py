"""Adapters that others have published: by what VADER calls its own, or by their ids on the hub."""

from __future__ import annotations

from pathlib import Path

from ..pretrained import HUB, PICKLED, Source, held, locate
from ..registry import ConfigError

VADER = "zheyangqin/VADER_VideoCrafter_"
PUBLISHED = {
    "huggingface-pickscore": Source(f"{VADER}PickScore", "vader_videocrafter_pickscore.pt", "20 MB", "MIT"),
    "huggingface-hps-aesthetic": Source(f"{VADER}HPS_Aesthetic", "vader_videocrafter_hps_aesthetic.pt", "10 MB", "MIT"),
}


def known(name: str) -> Source | None:
    """Published adapters of that name, or of that id on the hub."""
    return next((source for short, source in PUBLISHED.items() if name in (short, source.hub, str(source))), None)


def fetched(path: Path) -> Path:
    """The file behind such a name, if it was fetched before; a path stays as it is."""
    name = path.as_posix()
    source = known(name)
    if path.exists() or not (source or HUB.fullmatch(name)):
        return path
    if source is not None:
        return locate(source.hub, source)
    folder = held(Source(name))
    return path if folder is None else _only(folder, name)


def _only(folder: Path, name: str) -> Path:
    files = sorted(path for path in folder.iterdir() if path.suffix in (*PICKLED, ".safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"'{name:.200}' should hold one file of adapters and holds {found:.200}; give its path")
    return files[0]
