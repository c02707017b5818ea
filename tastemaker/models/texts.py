"""What reads the prompts of a published generator, and how it is told from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..embeddings import digest
from .published import Kit
from .readers import Read, Remembered


def remembered(
    kit: Kit,
    load: Callable[[], Read],
    parts: Sequence[str],
    settings: Mapping[str, object],
    embeddings: Path | None,
) -> Remembered:
    """Prompts read by those that `load` gives, made of the kit's `parts`; `settings` are all else that counts."""
    found = {part: told for part in parts if (told := encoder(kit, part))}
    made_by = {**{name: str(value) for name, value in settings.items()}, **found}
    return Remembered(load, kit.placement, made_by, embeddings)


def encoder(kit: Kit, part: str) -> str:
    """A digest of an encoder's weights; nothing where they are not here."""
    if kit.path is None:
        settings = json.dumps([kit.config(part), kit.seed], sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]
    # Of the same weights in half precision, model.fp16.safetensors, only some folders have a copy.
    files = sorted(file for file in (kit.path / part).glob("*.safetensors") if file.name.count(".") == 1)
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()[:16] if files else ""
