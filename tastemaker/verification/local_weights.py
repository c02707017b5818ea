"""Published weights in a folder of the user's: settings that name them on the hub are replaced by paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..core.cards import WeightsSource
from ..core.registry import ConfigError
from ..models.pretrained import find_cached

S = TypeVar("S")


def with_local_weights(spec: S, folder: str) -> S:
    """A copy of a spec whose weights come from FOLDER/owner/name or FOLDER/name, where one of these exists."""
    if not folder:
        return spec
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"--weights: the folder '{folder:.200}' does not exist; give a folder with weights as OWNER/NAME, or "
            "leave it out to use the hub's cache [TM2253]"
        )
    settings: Any = spec
    hubs = {source.hub for source in settings.sources}
    found: dict[str, Any] = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, str) and value in hubs and (path := find_folder(root, value)):
            found[each.name] = str(path)
        elif is_dataclass(value) and not isinstance(value, type) and "sources" in dir(value):
            found[each.name] = with_local_weights(value, folder)
    result: S = replace(settings, **found)
    return result


def find_folder(root: Path, hub: str) -> Path | None:
    """Where weights of this name lie below a folder."""
    places = (root / hub, root / hub.rpartition("/")[2])
    return next((place for place in places if place.exists()), None)


def missing_sources(sources: Sequence[WeightsSource]) -> list[WeightsSource]:
    """Those of the published weights that were not downloaded."""
    return [source for source in sources if find_cached(source) is None]
