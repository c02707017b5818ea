"""Which way imports point, how long things may get, and words that do not belong here: all read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tastemaker

PACKAGE = Path(tastemaker.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

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


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports anywhere in it; ours without the package's name, as '.types'."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


def ours(path: Path) -> set[str]:
    return {module[1:] for module in imports(path) if module.startswith(".") and module != "."}


def foreign(path: Path) -> set[str]:
    return {module for module in imports(path) if not module.startswith(".")}


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def allowed(module: str, other: str) -> bool:
    return any(within(module, a) and within(other, b) for a, b in ALLOWED)


MODULES = [pytest.param(path, id=name_of(path) or "tastemaker") for path in FILES]


@pytest.mark.parametrize("path", [p for p in MODULES if p.id != "tastemaker"])
def test_imports_point_downwards(path: Path) -> None:
    module = name_of(path)
    for other in ours(path):
        below = LEVEL[home(other)] < LEVEL[home(module)]
        neighbour = other.split(".")[0] == module.split(".")[0] and LEVEL[home(other)] <= LEVEL[home(module)]
        assert below or neighbour or allowed(module, other), (
            f"tastemaker.{module} imports {other}, which is not below it"
        )


@pytest.mark.parametrize("path", MODULES)
def test_what_each_part_never_imports(path: Path) -> None:
    module, known = name_of(path), ours(path)
    if within(module, "models"):
        assert not [m for m in known if within(m, "objectives", "rewards", "train", "search", "data", "config")]
    if within(module, "objectives", "search"):
        assert not [m for m in known if within(m, "models", "rewards", "train", "data", "config")]
    if within(module, "rewards"):
        assert not [m for m in known if within(m, "models", "objectives", "processes", "train", "config")]
    if within(module, "train"):
        assert not [m for m in known if within(m, "config") and m != "config.run"]
        assert not [m for m in known if within(m, "models", "rewards", "objectives", "search")]
    if within(module, "observe"):
        assert not [m for m in known if within(m, "train", "config") and m != "train.events"]
    if not within(module, "cli", "commands", "observe"):
        assert not [m for m in known if within(m, "observe")]


@pytest.mark.parametrize("path", MODULES)
def test_heavy_packages_are_imported_in_one_place_each(path: Path) -> None:
    module, found = name_of(path), foreign(path)
    if not within(module, *DISTRIBUTED):
        assert not [m for m in found if m.startswith("torch.distributed")]
    for place, package in ONLY_IN.items():
        assert module == place or not [m for m in found if m.split(".")[0] == package]
    if not within(module, "cli", "commands", "observe"):
        assert not [m for m in found if m.split(".")[0] in ("typer", "rich", "wandb", "tensorboard")]


@pytest.mark.parametrize("path", MODULES)
def test_files_and_functions_stay_short(path: Path) -> None:
    module, text = name_of(path), path.read_text(encoding="utf-8")
    parts = module.split(".")
    limit = LONGER.get(module, LINES.get(".".join(parts[:2]), LINES.get(parts[0], 300)))
    assert len(text.splitlines()) <= limit, f"tastemaker.{module} is longer than {limit} lines; split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 45, f"tastemaker.{module}: {node.name} has {length} lines; split it"


@pytest.mark.parametrize("path", MODULES)
def test_words_that_do_not_belong_here(path: Path) -> None:
    module = name_of(path)
    assert not re.search(r"(^|\.)(utils?|helpers?|misc|common)$", module), "say what is in it"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", f"tastemaker.{module}: hasattr asks what a type should say"
            if not within(module, "cli", "commands", "observe"):
                assert node.func.id != "print", f"tastemaker.{module}: only the command line prints"
        if isinstance(node, ast.ClassDef):
            assert not re.search(r"(Manager|Handler|Helper|Utils?)$|^Base", node.name), node.name
