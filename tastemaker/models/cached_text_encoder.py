"""Build the cached text encoder of a published generator, and identify it by a digest of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..data.embedding_store import fingerprint_file
from .pipeline_components import PipelineComponents
from .text_encoders import CachedTextEncoder, EncodePrompts


def build_cached_text_encoder(
    kit: PipelineComponents,
    load: Callable[[], EncodePrompts],
    parts: Sequence[str],
    settings: Mapping[str, object],
    embeddings: Path | None,
) -> CachedTextEncoder:
    """Build a cached text encoder; its identity is the digest of the components `parts` plus `settings`."""
    found = {part: told for part in parts if (told := text_encoder_digest(kit, part))}
    made_by = {**{name: str(value) for name, value in settings.items()}, **found}
    return CachedTextEncoder(load, kit.placement, made_by, embeddings)


def text_encoder_digest(kit: PipelineComponents, part: str) -> str:
    """Return a digest of a text encoder's weights, or '' if they are not on disk."""
    if kit.path is None:
        settings = json.dumps([kit.config(part), kit.seed], sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]
    # Of the same weights in half precision, model.fp16.safetensors, only some folders have a copy.
    files = sorted(file for file in (kit.path / part).glob("*.safetensors") if file.name.count(".") == 1)
    return hashlib.sha256("".join(map(fingerprint_file, files)).encode()).hexdigest()[:16] if files else ""
