"""A run of two ranks with a remote reward, and faults that are injected while it trains."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fork_server import ForkedProcess
from free_ports import reserve_port
from launch_ranks import HERE, environments

PATIENCE = 300.0  # seconds for anything else that is awaited
RENDEZVOUS = "15"  # seconds within which the ranks join; a fault may hit one of them before
LONGEST_RUN = 7200.0  # seconds of a run that nothing disturbs
POLL_SECONDS = 0.05
TAIL_BYTES = 8192  # of metrics.jsonl, which hold its last rows
RESTARTS = ("reward", "kill", "disk", "terminate")  # faults that end the run; the same command resumes it
FAULTS = ("stop", "server", *RESTARTS)


@dataclass
class RewardServer:
    """`tastemaker serve-reward` on a port that survives its restarts."""

    folder: Path
    port: int = field(default_factory=reserve_port)
    process: ForkedProcess | None = None

    def start(self) -> None:
        command = ["-m", "tastemaker", "serve-reward", "color", "--port", str(self.port)]
        self.process = ForkedProcess([sys.executable, *command], env=environments(1)[0], cwd=self.folder)
        wait_until(self._accepts)

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate(PATIENCE)
            self.process = None


@dataclass
class SoakedRun:
    """Two ranks that train, and the faults that they suffer."""

    directory: Path
    server: RewardServer | None  # None: the same scores are computed by the ranks
    settings: Sequence[str]
    slow_disk: float = 0.0  # seconds that a write takes at most, except for one in 500
    long_stop: float = 0.0  # seconds of the first SIGSTOP; 0: as short as the others
    seed: int = 0
    ranks: list[ForkedProcess] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # of injected faults
    seconds: dict[str, float] = field(default_factory=dict)  # that each kind took, until the resumed run has started
    metrics_before: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.faults = self.directory.parent / f"{self.directory.name}-faults"
        self.faults.mkdir(parents=True)

    def start(self) -> None:
        """Run the command that starts the run and that resumes it."""
        color = "{type: color}"
        if self.server is not None:
            color = f"{{type: remote, url: 'http://127.0.0.1:{self.server.port}', retry_delay: 0.1, max_retries: 12}}"
        rewards = (
            f"rewards.color={color}",
            'rewards.bright={type: "soak_faults:brightness", weight: 0.1}',
        )
        where = (f"output_dir={self.directory.parent}", f"name={self.directory.name}")
        command = ["--import", "soak_faults", "train", "grpo-toy-flow", *where, *rewards, *self.settings]
        more = {"SOAK_FAULTS": str(self.faults), "SOAK_SLOW_DISK": str(self.slow_disk)}
        more["TASTEMAKER_RENDEZVOUS_SECONDS"] = RENDEZVOUS
        self.metrics_before = self._stat_metrics()
        self.ranks = [
            ForkedProcess(
                [sys.executable, "-m", "tastemaker", *command],
                env={**env, **more, "PYTHONPATH": os.pathsep.join([str(HERE), env["PYTHONPATH"]])},
                cwd=self.directory.parent,
            )
            for env in environments(2)
        ]

    def _stat_metrics(self) -> tuple[int, int]:
        path = self.directory / "metrics.jsonl"
        return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)

    def has_joined(self) -> bool:
        """Whether the ranks have joined since the last start: then they resume, which changes metrics.jsonl."""
        return self._stat_metrics() != self.metrics_before

    def step(self) -> int:
        """Return the last step in metrics.jsonl; until a resumed run has joined, that of the run before."""
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
        complete = [line for line in lines[-2:] if line.endswith(b"\n")]
        return int(json.loads(complete[-1])["step"]) if complete else 0

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            ended = [rank for rank in self.ranks if rank.returncode is not None]
            if ended and self.step() < step:
                raise AssertionError(f"ended before step {step}: {[rank.communicate(PATIENCE) for rank in self.ranks]}")
            return self.step() >= step

        wait_until(reached)

    def wait_for_end(self) -> list[int]:
        """Return the exit codes of all ranks; if one does not end, fail with the stacks of its threads."""
        end = time.monotonic() + PATIENCE
        while running := [rank for rank in self.ranks if rank.returncode is None]:
            if time.monotonic() > end:
                for rank in running:
                    rank.send_signal(signal.SIGUSR1)
                time.sleep(2)
                raise AssertionError("\n".join(Path(rank.errors.name).read_text()[-8000:] for rank in running))
            time.sleep(POLL_SECONDS)
        for rank in self.ranks:
            rank.communicate(PATIENCE)
        return [int(rank.returncode or 0) for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def finish(self) -> None:
        messages = [rank.communicate(LONGEST_RUN)[1] for rank in self.ranks]
        assert [rank.returncode for rank in self.ranks] == [0, 0], messages

    def inject(self, fault: str) -> None:
        """Inject a fault; if it ends the run, resume it by the same command."""
        started = time.monotonic()
        self.counts[fault] = self.counts.get(fault, 0) + 1
        self._inject(fault)
        self.seconds[fault] = self.seconds.get(fault, 0.0) + time.monotonic() - started

    def _inject(self, fault: str) -> None:
        rank, joined = self.rng.choice(self.ranks), self.has_joined()
        if fault == "stop":
            is_long = self.long_stop > 0 and self.counts[fault] == 1
            if is_long:  # before, the other rank would end
                wait_until(self.has_joined)
            rank.send_signal(signal.SIGSTOP)
            time.sleep(self.long_stop if is_long else self.rng.uniform(0.1, 1.0))
            rank.send_signal(signal.SIGCONT)
        elif fault == "server" and self.server is not None:
            self.server.kill()
            time.sleep(self.rng.uniform(0.0, 0.5))
            self.server.start()
        elif fault in ("kill", "terminate"):
            time.sleep(self.rng.uniform(0.0, 0.1))
            rank.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        else:
            (self.faults / fault).touch()
        if fault in RESTARTS:
            codes = self.wait_for_end()
            # Ranks that have joined agree to stop and save; before, the other one misses its peer.
            if fault == "terminate":
                expected = codes == [130, 130] if joined else 0 not in codes
            else:
                expected = any(codes) and 130 not in codes
            assert expected, f"exit codes {codes} after the fault '{fault}'"
            self.start()


def wait_until(happened: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "what was awaited did not happen"
        time.sleep(POLL_SECONDS)


def schedule_faults(count: int, steps: int, seed: int) -> list[tuple[int, str]]:
    """Return so many faults at random steps in order; every kind occurs if there are enough."""
    rng = random.Random(seed)
    kinds = [FAULTS[i % len(FAULTS)] for i in range(count)]
    rng.shuffle(kinds)
    return sorted(zip(sorted(rng.sample(range(2, steps - 5), count)), kinds, strict=True))


def read_curve(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step, without times."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in row.items() if not k.startswith("time/") and "per_second" not in k} for row in rows]


def read_final_files(directory: Path, step: int) -> dict[str, bytes]:
    checkpoint = directory / f"checkpoints/step-{step:06d}"
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*.safetensors")}
