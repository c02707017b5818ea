"""Choose the tests that reach a changed line: by a coverage map, or by what test files import.

Used by tools/mutation_check.py. The import graph is read from the source, so nothing is imported for it. Imports within
functions count, and so do names of modules in strings, which is how the registries name classes.
"""

from __future__ import annotations

import ast
import json
import lzma
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "tastemaker"
MODULE = re.compile(r"\.?[A-Za-z_]\w*(\.\w+)*(:\w+)?")
PROCESSES = {"subprocess", "multiprocessing", "torch.multiprocessing"}  # coverage does not see what these start


class ImportGraph:
    """Which files of the package and of the tests import which others."""

    def __init__(self, root: Path, tests: str = "tests") -> None:
        self.root = root
        package = sorted((root / PACKAGE).rglob("*.py"))
        self.tests = sorted(path for path in (root / tests).rglob("*.py") if path.name.startswith("test_"))
        helpers = [path for path in (root / tests).rglob("*.py") if path not in set(self.tests)]
        # Tests share helpers by their bare names, and start some of them as scripts.
        self.files = {path.stem: path for path in helpers} | {f"{path.stem}.py": path for path in helpers}
        self.files |= {self._name(path): path for path in package}
        self.edges: dict[Path, set[Path]] = {}
        self.foreign: dict[Path, set[str]] = {}
        for path in {*package, *self.tests, *helpers}:
            names = set(self._names(path))
            self.edges[path] = {self.files[name] for name in names if name in self.files} - {path}
            self.foreign[path] = names & PROCESSES

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _names(self, path: Path) -> Iterator[str]:
        """Every module that a file may mean: imports, and strings that look like a module of the package."""
        parts = path.relative_to(self.root).parent.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = parts[: len(parts) - node.level + 1] if node.level else ()
                base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
                # A name in a module, or a module in a package: what does not exist is left out later.
                inner = [f"{base}.{alias.name}" for alias in node.names]
                yield from (name if name in self.files else base for name in inner)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
                yield from self._named_in_text(node.value, parts)

    def _named_in_text(self, text: str, parts: Sequence[str]) -> Iterator[str]:
        name = text.partition(":")[0]
        if name == PACKAGE:
            yield f"{PACKAGE}.__main__"  # as in `python -m tastemaker`
        elif name.startswith(f"{PACKAGE}.") or name.endswith(".py"):
            yield name
        elif name.startswith("."):
            yield ".".join(parts) + name

    def distances(self, file: str) -> dict[Path, int]:
        """The test files that reach a file, each with the number of imports between them."""
        backwards: dict[Path, list[Path]] = {}
        for path, others in self.edges.items():
            for other in others:
                backwards.setdefault(other, []).append(path)
        start = self.root / file
        distances, pending = {start: 0}, deque([start])
        while pending:
            current = pending.popleft()
            for path in backwards.get(current, ()):
                if path not in distances:
                    distances[path] = distances[current] + 1
                    pending.append(path)
        return {path: distances[path] for path in self.tests if path in distances}

    def select(self, file: str, area: str) -> list[str]:
        """Test files that reach a file, the closest first; those of its folder or its name count as one closer."""
        source = Path(file)
        folders = {area, *source.parent.parts[1:]}

        def closeness(item: tuple[Path, int]) -> tuple[int, str]:
            path, hops = item
            near = bool(folders & {*path.relative_to(self.root).parent.parts}) + (source.stem in path.stem)
            return hops - near, str(path)

        ordered = sorted(self.distances(file).items(), key=closeness)
        return [path.relative_to(self.root).as_posix() for path, _ in ordered]

    def starts_processes(self, test: str) -> bool:
        """Whether a test file, or a helper it imports, starts other processes."""
        path = self.root / test
        helpers = [other for other in self.edges[path] if PACKAGE not in other.relative_to(self.root).parts]
        return any(self.foreign[each] for each in (path, *helpers))


@dataclass(frozen=True)
class CoverageMap:
    """Which tests execute which lines, as tools/coverage_map.py writes it."""

    tests: Sequence[str]
    groups: Sequence[Sequence[int]]
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> CoverageMap:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            data = json.load(file)
        return cls(data["tests"], data.get("groups", ()), data["files"])

    def covering(self, file: str, lines: Sequence[int]) -> set[str]:
        """The tests that execute any of the lines."""
        groups = self.files.get(file, {})
        covering = [groups[str(line)] for line in lines if str(line) in groups]
        return {self.tests[i] for each in covering for i in (self.groups[each] if isinstance(each, int) else each)}


def changed_lines(source: str, find: str) -> list[int]:
    """The lines of the innermost statement that holds a text; none where it runs at import, which no test owns."""
    first = source[: source.index(find)].count("\n") + 1
    last = first + find.rstrip("\n").count("\n")
    within: list[ast.stmt] = []
    inside = False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= first and (node.end_lineno or 0) >= last:
            within.append(node)
            inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno <= first
    if not inside:
        return []
    statement = min(within, key=lambda node: (node.end_lineno or 0) - node.lineno)
    body: Sequence[ast.stmt] = getattr(statement, "body", ())
    end = body[0].lineno - 1 if body else statement.end_lineno or last  # of a loop or a block, its header
    return list(range(statement.lineno, max(end, last) + 1))
