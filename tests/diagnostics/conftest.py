"""Fork the two ranks of the doctor: the imports of two new interpreters take longer than its checks."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from fork_server import PRELOADED, ForkedProcess

from tastemaker.diagnostics import two_ranks


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import the libraries of published networks once, if many of them will be checked."""
    if sum("test_doctor_passes_every_recipe" in item.name for item in session.items) > 8:
        PRELOADED.extend(["diffusers.models.autoencoders", "diffusers.models.transformers", "diffusers.models.unets"])


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("fresh_interpreters") is None:
        names = {"Popen": ForkedProcess, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
        monkeypatch.setattr(two_ranks, "subprocess", SimpleNamespace(**names))


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of plans for each test, because tests plan with small networks in place of published ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
