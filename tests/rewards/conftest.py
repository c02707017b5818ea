"""What several tests of rewards look at."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random chat models, one of each family; nobody writes into their folders."""
    from vlm_stubs import CheckpointDirectories

    return CheckpointDirectories(tmp_path_factory.mktemp)
