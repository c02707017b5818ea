"""Published LoRA files by name: cached files are resolved, missing ones are refused with the download command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.export.lora import PUBLISHED_LORAS, resolve_lora_path

COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def write_cache(cache: Path, hub: str, *files: str) -> Path:
    """Write files as a download leaves them."""
    repository = cache / f"models--{hub.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    for path, text in [(repository / "refs/main", COMMIT), *((folder / file, "") for file in files)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("name", PUBLISHED_LORAS)
def test_vader_names_are_resolved(name: str, cache: Path) -> None:
    source = PUBLISHED_LORAS[name]
    with pytest.raises(ConfigError, match=f"`tastemaker download {source}`"):
        resolve_lora_path(Path(name))
    folder = write_cache(cache, source.hub, source.file)
    assert resolve_lora_path(Path(name)) == resolve_lora_path(Path(source.hub)) == folder / source.file


def test_hub_id_is_resolved_to_its_only_file(cache: Path) -> None:
    # Missing files are reported when they are read.
    assert resolve_lora_path(Path("someone/lora")) == Path("someone/lora")
    folder = write_cache(cache, "someone/lora", "adapters.safetensors", "README.md")
    assert resolve_lora_path(Path("someone/lora")) == folder / "adapters.safetensors"
    write_cache(cache, "someone/lora", "more.safetensors")
    with pytest.raises(ConfigError, match=r"adapters\.safetensors, more\.safetensors.*TM685"):
        resolve_lora_path(Path("someone/lora"))


def test_path_is_returned_unchanged(cache: Path) -> None:
    file = cache / "lora.pt"
    file.write_text("")
    assert resolve_lora_path(file) == file and resolve_lora_path(Path("runs/gone.pt")) == Path("runs/gone.pt")
