"""Fixtures that several tests of vision-language models share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of small random chat models, one of each family; tests only read them."""
    from vlm_stubs import CheckpointDirectories

    return CheckpointDirectories(tmp_path_factory.mktemp)
