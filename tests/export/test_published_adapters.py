"""Published adapters by name: those that were fetched are found, of others it is said how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tastemaker.core.registry import ConfigError
from tastemaker.export.published_loras import PUBLISHED_LORAS, resolve_lora_path

COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, hub: str, *files: str) -> Path:
    """Files as a download leaves them."""
    place = cache / f"models--{hub.replace('/', '--')}"
    folder = place / "snapshots" / COMMIT
    for path, text in [(place / "refs/main", COMMIT), *((folder / file, "") for file in files)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("name", PUBLISHED_LORAS)
def test_the_names_vader_has_for_its_adapters_are_known(name: str, cache: Path) -> None:
    source = PUBLISHED_LORAS[name]
    with pytest.raises(ConfigError, match=f"`tastemaker download {source}` fetches"):
        resolve_lora_path(Path(name))
    folder = put(cache, source.hub, source.file)
    assert resolve_lora_path(Path(name)) == resolve_lora_path(Path(source.hub)) == folder / source.file


def test_an_id_on_the_hub_is_its_one_file(cache: Path) -> None:
    assert resolve_lora_path(Path("someone/theirs")) == Path(
        "someone/theirs"
    )  # which is told to be missing as any path is
    folder = put(cache, "someone/theirs", "adapters.safetensors", "README.md")
    assert resolve_lora_path(Path("someone/theirs")) == folder / "adapters.safetensors"
    put(cache, "someone/theirs", "more.safetensors")
    with pytest.raises(ConfigError, match=r"holds adapters.safetensors, more.safetensors; give its path"):
        resolve_lora_path(Path("someone/theirs"))


def test_a_path_stays_as_it_is(cache: Path) -> None:
    file = cache / "mine.pt"
    file.write_text("")
    assert resolve_lora_path(file) == file and resolve_lora_path(Path("runs/gone.pt")) == Path("runs/gone.pt")
