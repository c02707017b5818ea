"""Write requirements.lock: what `make setup` installs, with the hashes of all files of each release.

    python tools/lock.py             # after a change of pyproject.toml or constraints.txt; needs a network

The versions are those of constraints.txt. uv, which is installed into a temporary environment, resolves the extra
`dev` for all systems and Python versions at once and asks the package index for the hashes. Two kinds of packages are
left out and installed by version only: torch, which exists in builds for CPUs and for each CUDA version with hashes of
their own, and what only torch needs (CUDA libraries, Triton), which comes with the build that was chosen.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK, CONSTRAINTS = ROOT / "requirements.lock", ROOT / "constraints.txt"
UV = "uv==0.13.8"
UNHASHED = ("torch",)
BUILD_TOOLS = ("editables", "hatchling")  # setup.py installs the package without build isolation
OLDEST_PYTHON = "3.11.5"  # what the pinned documentation tools need
HEADER = """\
# Written by tools/lock.py from pyproject.toml and constraints.txt: do not edit.
# `make setup` installs this with pip's --require-hashes; torch is not here, as docs/supply-chain.md explains.
"""


def normalize(name: str) -> str:
    """Return a package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """Return the versions that a requirements file pins, by normalized name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [match for line in lines if (match := re.match(r"([\w.-]+)==([^\s;\\]+)", line))]
    return {normalize(match[1]): match[2] for match in pins}


def resolve(uv: Path) -> str:
    """Return all that the extra `dev` needs, as a requirements file with markers and hashes."""
    command = [str(uv), "pip", "compile", "pyproject.toml", "-", "--extra", "dev", "--constraint", CONSTRAINTS.name]
    options = ["--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes", "--no-annotate", "--no-header"]
    result = subprocess.run(
        [*command, *options, "--quiet"], input="\n".join(BUILD_TOOLS), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if result.returncode:
        sys.exit("uv could not resolve the packages; its message is above.")
    return result.stdout


def select(resolved: str, pins: dict[str, str]) -> str:
    """Return the entries of packages that are pinned in constraints.txt and have the same files everywhere."""
    entries = re.split(r"\n(?=\S)", resolved.strip())
    names = [normalize(re.split(r"[=\s]", entry, maxsplit=1)[0]) for entry in entries]
    kept = [entry for name, entry in zip(names, entries, strict=True) if name in pins and name not in UNHASHED]
    return HEADER + "\n".join(kept) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        binaries = Path(folder, "bin")
        subprocess.run([binaries / "python", "-m", "pip", "install", "--quiet", UV], check=True)
        resolved = resolve(binaries / "uv")
    pins = read_pins(CONSTRAINTS)
    LOCK.write_text(select(resolved, pins), encoding="utf-8")
    locked = read_pins(LOCK)
    print(f"{LOCK.name}: {len(locked)} packages, {LOCK.read_text(encoding='utf-8').count('--hash=')} hashes")
    extra = sorted(pins.keys() - locked.keys() - set(UNHASHED))
    print(f"without hashes: {', '.join(UNHASHED)}; pinned, but not installed by `make setup`: {', '.join(extra)}")


if __name__ == "__main__":
    main()
