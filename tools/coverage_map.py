"""Write which tests execute which lines, for tools/mutation_check.py.

python -m pytest --cov=tastemaker --cov-context=test
python tools/coverage_map.py .coverage coverage-map.json.xz

The map is {"tests": [ids], "groups": [[indexes into tests]], "files": {"tastemaker/x.py": {"12": index into groups}}}.
Lines that the same tests execute share a group, which keeps the map of a whole suite small.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PHASES = ("|setup", "|run", "|teardown")


def parse_context(context: str) -> str:
    """The id of the test in a context of pytest-cov; empty for code that ran outside of any test."""
    phase = next((phase for phase in PHASES if context.endswith(phase)), "")
    test = context.removesuffix(phase)
    return test if "::" in test else ""


def build_map(files: Mapping[str, Mapping[int, Iterable[str]]]) -> dict[str, Any]:
    """The map of the contexts of every line, by file."""
    tests: dict[str, int] = {}
    groups: dict[tuple[int, ...], int] = {}
    by_file: dict[str, dict[str, int]] = {}
    for file, lines in sorted(files.items()):
        for line, contexts in sorted(lines.items()):
            names = sorted({name for context in contexts if (name := parse_context(context))})
            if names:
                group = tuple(sorted(tests.setdefault(name, len(tests)) for name in names))
                by_file.setdefault(file, {})[str(line)] = groups.setdefault(group, len(groups))
    return {"tests": list(tests), "groups": [list(group) for group in groups], "files": by_file}


def read_coverage(path: Path, root: Path) -> dict[str, dict[int, list[str]]]:
    """The contexts of every line that a coverage file has, by path within the repository."""
    from coverage import CoverageData

    data = CoverageData(basename=str(path.absolute()))
    data.read()
    contexts = {}
    for file in data.measured_files():
        source = Path(file)
        if not source.is_absolute() or source.is_relative_to(root):
            name = source.relative_to(root) if source.is_absolute() else source
            contexts[name.as_posix()] = data.contexts_by_lineno(file)
    return contexts


def write_map(data: Mapping[str, Any], path: Path) -> None:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        json.dump(data, file, separators=(",", ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write which tests execute which lines, as compressed JSON.")
    parser.add_argument("coverage", type=Path, nargs="?", default=Path(".coverage"), help="data file of coverage.py")
    parser.add_argument("out", type=Path, nargs="?", default=Path("coverage-map.json.xz"))
    parser.add_argument("--root", type=Path, default=Path(), help="the repository as it was when coverage ran")
    options = parser.parse_args()
    if not options.coverage.is_file():
        sys.exit(f"{options.coverage} does not exist; record it with `python -m pytest --cov --cov-context=test`")
    data = build_map(read_coverage(options.coverage, options.root.absolute()))
    if not data["tests"]:
        sys.exit(f"{options.coverage} has no tests as contexts; record it with --cov-context=test")
    write_map(data, options.out)
    counts = f"{len(data['tests'])} tests, {len(data['files'])} files, {len(data['groups'])} groups of tests"
    sys.stdout.write(f"{options.out}: {counts}, {options.out.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
