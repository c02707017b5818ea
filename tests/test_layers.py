"""Which way imports point, how long things may get, and words that do not belong here: all read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tastemaker

PACKAGE = Path(tastemaker.__file__).parent

# From the ground up. A module imports what lies below it, and its own neighbours within one package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "cards", "philox"),
    ("types", "randomness", "registry", "movies", "colors", "movement"),
    ("distributions", "weights", "pictures", "models.packing", "pretrained", "preprocessing", "geneval", "scorebook"),
    ("dropout",),
    ("models.files", "classes"),
    ("playground",),  # a world of its own, which knows nothing of who learns in it
    ("policy", "lora", "codec", "ocr", "perceptual", "patchgan", "embeddings"),
    ("reward", "guidance"),
    ("rereading",),
    ("objective", "processes", "data.spec", "serving"),
    ("config.run",),  # the sections of a run, which are data
    ("objectives", "search", "models", "rewards", "data"),
    ("train", "eval"),
    ("config",),
    ("report", "planning"),
    ("export",),
    ("observe", "doctor", "bench"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# What else may be imported across or upwards, and why.
ALLOWED = {
    ("data.pictures", "models.toy"): "pictures of the toys' own world, at their size",
}

DISTRIBUTED = ("train.engine", "train.ranks", "train.context", "export.shards")  # the last names classes in files
LINES = {"models": 250, "objectives": 120, "rewards": 80, "rewards.nets": 250}
LONGER = {
    "objectives.srpo": 165,  # in all its published variants
    "objectives.forced_grpo": 135,  # likewise
    "rewards.combine": 135,  # three rewards made of rewards
}
ONLY_IN = {"data.saved": "datasets", "lora": "peft", "movies": "av", "ocr": "rapidocr"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").replace("__init__", "")


def home(module: str) -> str:
    """The entry of LAYERS a module belongs to: the longest that fits."""
    parts = module.split(".")
    fitting = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in LEVEL]
    assert fitting, f"tastemaker.{module} has no layer; give it one in {Path(__file__).name}"
    return fitting[0]


def imports(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Every module a file imports anywhere in it; ours without the package's name, as '.types'."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield re.sub(r"^tastemaker(?=\.|$)", "", alias.name) or "."
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            yield from own(".".join(part for part in base if part), node)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "tastemaker" or module.startswith("tastemaker."):
                yield from own(module.removeprefix("tastemaker").lstrip("."), node)
            else:
                yield module


def own(base: str, node: ast.ImportFrom) -> Iterator[str]:
    """`from .train import engine` imports a module, `from .train.engine import Engine` a name in one."""
    for alias in node.names:
        inner = f"{base}.{alias.name}".strip(".")
        place = PACKAGE.joinpath(*inner.split("."))
        yield "." + (inner if place.is_dir() or place.with_suffix(".py").is_file() else base)


class Module(NamedTuple):
    """What one file of the package holds."""

    name: str
    lines: int
    nodes: list[ast.AST]
    ours: set[str]  # modules of the package that it imports
    foreign: set[str]  # and modules of others


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Every file of the package, parsed once."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        known = set(imports(path, nodes))
        ours = {module[1:] for module in known if module.startswith(".") and module != "."}
        foreign = {module for module in known if not module.startswith(".")}
        found.append(Module(name_of(path), len(text.splitlines()), nodes, ours, foreign))
    assert len(found) > 300
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def allowed(module: str, other: str) -> bool:
    return any(within(module, a) and within(other, b) for a, b in ALLOWED)


def test_imports_point_downwards(modules: list[Module]) -> None:
    wrong = []
    for module, ours in ((each.name, each.ours) for each in modules if each.name):
        for other in ours:
            below = LEVEL[home(other)] < LEVEL[home(module)]
            neighbour = other.split(".")[0] == module.split(".")[0] and LEVEL[home(other)] <= LEVEL[home(module)]
            if not (below or neighbour or allowed(module, other)):
                wrong.append(f"tastemaker.{module} imports {other}, which is not below it")
    assert not wrong


# What modules of some packages never import, and the modules excepted from that.
NEVER: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("models",), ("objectives", "rewards", "train", "search", "data", "config"), ()),
    (("objectives", "search"), ("models", "rewards", "train", "data", "config"), ()),
    (("rewards",), ("models", "objectives", "processes", "train", "config"), ()),
    (("train",), ("config", "models", "rewards", "objectives", "search"), ("config.run",)),
    (("observe",), ("train", "config"), ("train.events",)),
)


def test_what_each_part_never_imports(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        for packages, others, excepted in NEVER:
            if within(module.name, *packages):
                wrong += [(module.name, m) for m in module.ours if within(m, *others) and m not in excepted]
        if not within(module.name, "cli", "commands", "observe"):
            wrong += [(module.name, m) for m in module.ours if within(m, "observe")]
    assert not wrong


def test_heavy_packages_are_imported_in_one_place_each(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        refused = {package for place, package in ONLY_IN.items() if module.name != place}
        if not within(module.name, "cli", "commands", "observe"):
            refused |= {"typer", "rich", "wandb", "tensorboard"}
        wrong += [(module.name, m) for m in module.foreign if m.split(".")[0] in refused]
        if not within(module.name, *DISTRIBUTED):
            wrong += [(module.name, m) for m in module.foreign if m.startswith("torch.distributed")]
    assert not wrong


def test_files_and_functions_stay_short(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        parts = module.name.split(".")
        limit = LONGER.get(module.name, LINES.get(".".join(parts[:2]), LINES.get(parts[0], 300)))
        if module.lines > limit:
            wrong.append(f"tastemaker.{module.name} is longer than {limit} lines; split it")
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 45:
                    wrong.append(f"tastemaker.{module.name}: {node.name} has {length} lines; split it")
    assert not wrong


def test_words_that_do_not_belong_here(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        if re.search(r"(^|\.)(utils?|helpers?|misc|common)$", module.name):
            wrong.append(f"tastemaker.{module.name}: say what is in it")
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "hasattr":
                    wrong.append(f"tastemaker.{module.name}: hasattr asks what a type should say")
                if node.func.id == "print" and not within(module.name, "cli", "commands", "observe"):
                    wrong.append(f"tastemaker.{module.name}: only the command line prints")
            if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Handler|Helper|Utils?)$|^Base", node.name):
                wrong.append(f"tastemaker.{module.name}: a class is called {node.name}")
    assert not wrong
