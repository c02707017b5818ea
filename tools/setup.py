"""Set up a virtual environment with the package in it, and show progress: `python3 tools/setup.py .venv`.

Works with pip 23.2 and newer. pip runs in a pseudo-terminal, so that it draws its progress bar; what it prints is
reduced to one line that is rewritten on a terminal, and to one line per large download in a log file.

Every package but torch must have one of the hashes of requirements.lock; tools/lock.py says why torch has none.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

CONSTRAINTS, LOCK = "constraints.txt", "requirements.lock"
LARGE = re.compile(r"\(([\d.]+) (MB|GB)\)")
BAR = re.compile(r"([\d.]+)/([\d.]+) (kB|MB|GB)(?:.*eta ([\d:]+))?")
FILE = re.compile(r"^\s*(Downloading|Processing|Using cached) \S*?([^/\s]+)\.(?:whl|tar\.gz)(?=\s|$)(?!\.metadata)")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LINES_KEPT = 40  # of pip's output, shown if it fails


class Display:
    """One line that shows what pip is doing."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        pinned = Path(CONSTRAINTS).read_text(encoding="utf-8").splitlines()
        self.total = sum("==" in line for line in pinned)  # at most: some are for other systems
        self.packages: list[str] = []

    def update(self, line: str) -> None:
        if match := FILE.match(line):
            name = " ".join(match[2].split("-")[:2])
            if name not in self.packages:
                self.packages.append(name)
            size = LARGE.search(line)
            verb = "downloading" if match[1] == "Downloading" else "found"
            text = f"{verb} {name}{' ' + size[0] if size else ''}"
            self.show(text, log=size is not None and float(size[1]) >= 10)
        elif (bar := BAR.search(line)) and self.packages:
            left = f", {bar[4]} left" if bar[4] else ""
            self.show(f"downloading {self.packages[-1]}: {bar[1]} of {bar[2]} {bar[3]}{left}")
        elif line.startswith("Installing collected packages"):
            self.show(f"installing {line.count(',') + 1} packages", log=True)
        elif line.startswith("Building"):
            self.show(line[:1].lower() + line[1:])

    def show(self, text: str, *, log: bool = False) -> None:
        if self.terminal:
            columns = os.get_terminal_size().columns if os.isatty(1) else 80
            text = f"  package {len(self.packages)} of at most {self.total}: {text}"
            sys.stdout.write(f"\r\x1b[K{text[: columns - 1]}")
        elif log:
            sys.stdout.write(f"  {text}\n")
        sys.stdout.flush()

    def clear(self) -> None:
        if self.terminal:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


def install(python: Path, *arguments: str) -> None:
    """Run `pip install`, reducing its output to the display; its last lines are printed if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    controller, terminal = pty.openpty()
    settings = {**os.environ, "COLUMNS": "200", "TERM": "xterm", "PIP_ROOT_USER_ACTION": "ignore"}
    process = subprocess.Popen([*command, *arguments], stdout=terminal, stderr=terminal, env=settings)
    os.close(terminal)
    display, kept, pending = Display(), [], ""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            break
        if not chunk:
            break
        *lines, pending = re.split(r"[\r\n]+", pending + CONTROL.sub("", chunk.decode("utf-8", "replace")))
        for line in lines:
            display.update(line)
            kept = [*kept, line][-LINES_KEPT:] if line.strip() and not BAR.search(line) else kept
    display.clear()
    os.close(controller)
    if process.wait():
        sys.exit("\n".join([*kept, pending, f"pip failed with exit code {process.returncode}."]))


def main(folder: Path) -> None:
    start = time.monotonic()
    print(f"Setting up {folder}. Most of the time goes into downloading PyTorch.")
    print("1 of 3: create the environment", flush=True)
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin/python"
    # Without --no-deps, pip would ask for the hash of torch too. The build backend is among these packages: the next
    # call uses it without a network of its own.
    print("2 of 3: install the dependencies, which must have the hashes of requirements.lock", flush=True)
    install(python, "--require-hashes", "--no-deps", "--requirement", LOCK)
    print("3 of 3: install PyTorch and the package", flush=True)
    install(python, "--constraint", CONSTRAINTS, "--no-build-isolation", "--editable", ".[dev]")
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"Set up in {minutes} min {seconds} s." if minutes else f"Set up in {seconds} s.")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv"))
    except KeyboardInterrupt:
        sys.exit(130)
