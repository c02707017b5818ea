"""Attack Tastemaker from outside and print what survived: attack, tries, survived, lost.

python tools/redteam.py --out redteam.md             # all attacks, about 15 minutes on two idle slow cores
python tools/redteam.py --quick                      # one or two tries of the most important ones, some minutes
python tools/redteam.py --only kill-one-process --only byte-flips

Every attacked process has a bound on its memory. The exit code is 1 if a promise was broken. Attacks that need to mount
a small file system (full and read-only disks) use what a user may do where mounting is not allowed.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attacks import checkpoints, client, code, files, rewards, runs, server  # noqa: F401  # registers their attacks
from attacks.lab import ATTACKS, Attack, Lab

ROOT = Path(__file__).resolve().parent.parent
PRINTING = threading.Lock()


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    attack: Attack
    tries: int
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def show(text: str) -> None:
    with PRINTING:
        print(text, file=sys.stderr, flush=True)


def run_attack(attack: Attack, folder: Path, tree: Path = ROOT, *, quick: bool, seed: int) -> Row:
    """Carry out one attack in a folder of its own."""
    lab = Lab(folder / attack.name, folder / "shared", tree, quick, seed, lambda text: show(f"{text} ({attack.name})"))
    lab.folder.mkdir(parents=True)
    started = time.monotonic()
    try:
        attack.function(lab)
    except Exception as error:
        lab.tries += 1
        lab.losses.append(f"the attack could not be carried out: {type(error).__name__}: {error}")
    for process in lab.processes:
        process.kill()
    seconds = time.monotonic() - started
    shutil.rmtree(lab.folder, ignore_errors=True)
    show(f"{attack.name}: {lab.tries - len(lab.losses)} of {lab.tries} survived, {seconds:.0f} s")
    return Row(attack, lab.tries, tuple(lab.losses), tuple(lab.notes), seconds)


def format_table(rows: list[Row]) -> str:
    """Return the table as markdown, with what was lost below it."""
    lines = ["| attack | survives if | tries | survived | lost |", "|---|---|---|---|---|"]
    for row in rows:
        measured = f" ({'; '.join(row.notes)})" if row.notes else ""
        lost = len(row.losses)
        lines.append(
            f"| {row.attack.name} | {row.attack.promise}{measured} | {row.tries} | {row.tries - lost} | {lost} |"
        )
    tries, lost = sum(row.tries for row in rows), sum(len(row.losses) for row in rows)
    lines.append(f"| **all** | | **{tries}** | **{tries - lost}** | **{lost}** |")
    details = [f"- {row.attack.name}: {loss}" for row in rows for loss in row.losses]
    return "\n".join([*lines, *(["", "Lost:", "", *details] if details else [])]) + "\n"


def describe_machine() -> str:
    """Return cores, architecture and versions, without dates and names of hosts."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}"


def prepare_process() -> None:
    """Let attacked processes start with default signals, and allow many connections to them."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # nohup and background jobs ignore some
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # exec resets it; what is ignored would stay ignored
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if 0 < most < 8192 else 8192, most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    parser.add_argument("--quick", action="store_true", help="the most important attacks, with few tries")
    parser.add_argument("--only", action="append", metavar="NAME", choices=sorted(ATTACKS), help="repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="attacks at a time; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="of random times and bytes; default: 0")
    parser.add_argument("--tree", type=Path, default=ROOT, help="copy of the repository to attack; default: this one")
    options = parser.parse_args()
    prepare_process()
    chosen = [a for a in ATTACKS.values() if (a.name in options.only if options.only else a.quick or not options.quick)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="redteam-") as temporary:
        folder = Path(temporary)
        with ThreadPoolExecutor(options.jobs) as pool:
            settings = {"quick": options.quick, "seed": options.seed}
            futures = [pool.submit(run_attack, a, folder, options.tree.resolve(), **settings) for a in chosen]
            rows = [future.result() for future in futures]
    table = format_table(rows)
    minutes = (time.monotonic() - started) / 60
    text = f"{table}\n{len(rows)} attacks in {minutes:.1f} minutes on {describe_machine()}.\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 1 if any(row.losses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
