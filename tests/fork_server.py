"""Python processes that start quickly: forks of a server that has already imported PyTorch and the package.

A fresh interpreter spends three to six seconds on imports, several times as long as a tiny run of a few steps.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "peft",
    "tastemaker.cli",
    "tastemaker.training.trainer",
    "tastemaker.config.build",
    "tastemaker.diagnostics.two_ranks",
]
PACKAGE = str(Path(__file__).parents[1])


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use. Standard output is a pipe, standard error a temporary file."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None, **_: Any
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        reader, writer = context.Pipe(duplex=False)
        self.errors = tempfile.NamedTemporaryFile("r", encoding="utf-8")  # noqa: SIM115
        self.stderr = ""
        settings, directory = dict(os.environ if env is None else env), str(cwd or Path.cwd())
        self.process = context.Process(target=_run, args=(command[1:], settings, directory, writer, self.errors.name))
        threads, path = os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTHONPATH")
        os.environ["OMP_NUM_THREADS"], os.environ["PYTHONPATH"] = "1", os.pathsep.join([PACKAGE, path or ""])
        try:
            self.process.start()  # the server too, if this is the first
        finally:
            for name, value in (("OMP_NUM_THREADS", threads), ("PYTHONPATH", path)):
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0)
        if not self.errors.closed:
            self.stderr = self.errors.read()
            self.errors.close()
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)  # the output is short enough to fit into the pipe's buffer
        out = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        return out, self.stderr

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()


def _run(arguments: list[str], env: dict[str, str], directory: str, writer: Connection, errors: str) -> None:
    """Run `-m module …`, `-c program …` or `script.py …` in the forked process, as the interpreter does."""
    import torch

    os.dup2(writer.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", errors="replace") for n in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    torch.set_num_threads(1)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    safe_path = arguments[0] == "-P"
    arguments = arguments[1:] if safe_path else arguments
    kind, rest = arguments[0], arguments[1:]
    if kind in ("-m", "-c") and not safe_path:
        sys.path.insert(0, directory)
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
    sys.stdout.flush()
