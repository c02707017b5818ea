"""Plant each fault of tests/mutations.yaml in a copy of the repository and see whether the tests notice.

python tools/mutation_check.py --out runs/mutations --jobs 4 --marks "not slow"
python tools/mutation_check.py --only kl-penalty-sign dpo-pair-swapped
python tools/mutation_check.py --contexts coverage-map.json.xz --durations durations.json

Tests that execute the changed line come first with a coverage map (tools/coverage_map.py). Without one, the test files
that import the changed module come, the closest first. A fault counts as caught if a test fails that passes on the
unmodified copy. The working tree is never edited. Results are mutations.json and mutations.md in the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import yaml
from mutation_selection import CoverageMap, ImportGraph, changed_lines

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "wandb", "wheels", "build", "dist", "shared", "venv")
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*(?:\[.*?\](?= - |$))?)", re.MULTILINE)
RETRIES = 5  # failing tests of one fault that also fail without it, before it is given up
CLOSEST = (5, 20)  # test files run by themselves before those that are further away
GRACE = 10.0  # seconds an interrupted pytest has to end what it started


@dataclass(frozen=True)
class Fault:
    """A change of the source that the tests should notice; `find` occurs exactly once in `file`."""

    name: str
    area: str
    file: str
    find: str
    replace: str
    breaks: str


@dataclass(frozen=True)
class Outcome:
    name: str
    area: str
    file: str
    status: str  # caught, survived, timeout, unreached, outdated or broken
    test: str  # that failed
    seconds: float
    breaks: str


def read_faults(path: Path, only: Sequence[str]) -> list[Fault]:
    faults = [Fault(**fault) for fault in yaml.safe_load(path.read_text(encoding="utf-8"))]
    unknown = set(only) - {fault.name for fault in faults}
    if unknown:
        sys.exit(f"--only: {path} has no fault named {', '.join(sorted(unknown))}")
    return [fault for fault in faults if not only or fault.name in only]


def copy_tree(target: Path) -> Path:
    return Path(shutil.copytree(ROOT, target, ignore=LEFT_OUT))


def run_pytest(tree: Path, arguments: Iterable[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None after a timeout, and the output of pytest on a copy of the repository."""
    base = [
        "-q",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        f"--basetemp={tree}.tmp.{threading.get_ident()}",
    ]
    settings = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    paths = [str(tree), *filter(None, [settings.get("PYTHONPATH")])]
    settings |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *base, *arguments],
        cwd=tree, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=max(1.0, seconds))[0]
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # Interrupted first, so that tests end the processes they started; then the whole session is killed.
        os.killpg(process.pid, signal.SIGINT)
        try:
            output = process.communicate(timeout=GRACE)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0]
        return None, output


class Checker:
    """Runs the tests of each fault in a copy of its own, beside one copy without faults."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.pristine = copy_tree(work / "pristine")
        self.graph = ImportGraph(self.pristine, options.tests)
        self.marks = ["-m", options.marks] if options.marks else []
        known = options.known_failures.read_text(encoding="utf-8").split("\n") if options.known_failures else []
        self.known = {line.strip() for line in known if line.strip() and not line.startswith("#")}
        self.contexts = CoverageMap.read(options.contexts) if options.contexts else None
        self.durations: dict[str, float] = json.loads(options.durations.read_text()) if options.durations else {}
        self.sound: dict[str, bool] = {}  # whether a test passes without any fault

    def collect(self, faults: Sequence[Fault]) -> None:
        """Find which tests of the coverage map still exist, because pytest refuses to run if one does not."""
        self.existing: set[str] = set()
        if self.contexts is None:
            return
        covering = {test for fault in faults for test in self._covering(fault)}
        files = sorted({file for test in covering if (self.pristine / (file := test.partition("::")[0])).is_file()})
        output = run_pytest(self.pristine, ["--collect-only", *self.marks, *files], 3600)[1] if files else ""
        self.existing = covering & set(output.splitlines())

    def _covering(self, fault: Fault) -> set[str]:
        source = self._source(fault)
        if self.contexts is None or source is None:
            return set()
        return self.contexts.covering(fault.file, changed_lines(source, fault.find))

    def _source(self, fault: Fault) -> str | None:
        """The source a fault is planted in; None if the file or the text is gone since the fault was written down."""
        path = self.pristine / fault.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        return source if source.count(fault.find) == 1 else None

    def stages(self, fault: Fault) -> list[list[str]]:
        """Return the arguments of pytest, one run after the other."""
        files = self.graph.select(fault.file, fault.area)
        covering = self._covering(fault) & self.existing if self.contexts else set()
        if not covering:  # the closest files first, for pytest imports all that it is given before it runs any
            cuts = [0, *(cut for cut in CLOSEST if cut < len(files)), len(files)]
            return [files[low:high] for low, high in pairwise(cuts) if low < high]
        near = {file: rank for rank, file in enumerate(files)}
        order = sorted(covering, key=lambda t: (self.durations.get(t, 1.0), near.get(t.partition("::")[0], len(near))))
        others = [file for file in files if self.graph.starts_processes(file)]
        return [order, others] if others else [order]

    def check(self, fault: Fault) -> Outcome:
        start, tree = time.monotonic(), self.work / fault.name
        status, test = "outdated", ""
        if source := self._source(fault):
            copy_tree(tree)
            (tree / fault.file).write_text(source.replace(fault.find, fault.replace), encoding="utf-8")
            status, test = self._run(fault, tree, start + self.options.timeout)
            for leftover in (tree, *self.work.glob(f"{fault.name}.tmp.*")):
                shutil.rmtree(leftover, ignore_errors=True)
        seconds = round(time.monotonic() - start, 1)
        return Outcome(fault.name, fault.area, fault.file, status, test, seconds, fault.breaks)

    def _run(self, fault: Fault, tree: Path, deadline: float) -> tuple[str, str]:
        status, skipped = "unreached", set(self.known)
        stages = self.stages(fault)
        while stages:
            deselected = [argument for test in sorted(skipped) for argument in ("--deselect", test)]
            arguments = ["-x", *self.marks, *deselected, *(each for each in stages[0] if each not in skipped)]
            code, output = run_pytest(tree, arguments, deadline - time.monotonic())
            failed = FAILURE.findall(output)
            if code is None:
                return "timeout", ""
            if code in (1, 2) and failed:
                if self._passes_unmodified(failed[0], deadline):
                    return "caught", failed[0]
                skipped.add(failed[0])
                if len(skipped) - len(self.known) > RETRIES:
                    return "broken", failed[0]
                continue
            if code not in (0, 5):  # neither passed nor left without tests
                (self.options.out / f"{fault.name}.txt").write_text(output, encoding="utf-8")
                return "broken", ""
            status = "survived" if code == 0 else status
            stages.pop(0)
        return status, ""

    def _passes_unmodified(self, test: str, deadline: float) -> bool:
        if test not in self.sound:
            only = [] if "::" in test else ["--collect-only"]  # a file that could not be imported
            code, _ = run_pytest(self.pristine, [*only, test], max(120.0, deadline - time.monotonic()))
            self.sound[test] = code == 0
        return self.sound[test]


def write_results(outcomes: Sequence[Outcome], out: Path) -> str:
    """Write both tables and return the count of each status."""
    counts = {status: sum(o.status == status for o in outcomes) for status in dict.fromkeys(o.status for o in outcomes)}
    summary = f"{len(outcomes)} faults: " + ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = [f"| {o.name} | {o.area} | {o.status} | {o.test.replace('|', '/')} | {o.seconds} |" for o in outcomes]
    missed = [f"- **{o.name}** ({o.status}, `{o.file}`): {o.breaks}" for o in outcomes if o.status != "caught"]
    lines = ["# Mutation check", "", summary, "", "| fault | area | result | caught by | seconds |"]
    lines += ["|---|---|---|---|---|", *rows, *(["", "## Not caught", "", *missed] if missed else [])]
    (out / "mutations.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "mutations.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n", encoding="utf-8")
    return summary


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant faults in copies of the repository and run their tests.")
    parser.add_argument("--faults", type=Path, default=ROOT / "tests/mutations.yaml")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at the same time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each fault")
    parser.add_argument("--marks", default="", help="which tests to run, as in `pytest -m`")
    parser.add_argument("--tests", default="tests", help="folder of tests, within the repository")
    parser.add_argument("--contexts", type=Path, help="coverage map of tools/coverage_map.py")
    parser.add_argument("--durations", type=Path, help="JSON of seconds by test id; cheap tests run first")
    parser.add_argument("--known-failures", type=Path, help="ids of tests that fail anyway, one per line")
    parser.add_argument("--out", type=Path, default=Path("runs/mutations"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    faults, outcomes = read_faults(options.faults, options.only), list[Outcome]()
    summary = "no faults"
    with tempfile.TemporaryDirectory(prefix="mutations-") as work, ThreadPoolExecutor(options.jobs) as pool:
        checker = Checker(options, Path(work))
        checker.collect(faults)
        for outcome in pool.map(checker.check, faults):
            outcomes.append(outcome)
            # After each fault, so that an interrupted check leaves its results.
            summary = write_results(outcomes, options.out)
            sys.stdout.write(f"{outcome.status:9} {outcome.seconds:7.1f} s  {outcome.name}  {outcome.test}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{summary}; see {options.out / 'mutations.md'}\n")


if __name__ == "__main__":
    main()
