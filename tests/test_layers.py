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

# What the command line calls: these put parts of the whole package together, each in the package of its subject.
WORKFLOWS = (
    "api",
    "data.embedding_precompute",
    "data.image_encoding",
    "data.preference_labels",
    "evaluation.benchmark_run",
    "evaluation.geneval",
    "evaluation.image_sets",
    "evaluation.reconstruction",
    "evaluation.scoreboard.measurement",
    "evaluation.scoreboard.page",
    "evaluation.scoreboard.runner",
    "export.diffusers_pipeline",
    "export.generator",
    "export.llamagen",
    "export.weights",
    "models.downloads",
    "playground.demo",
    "rewards.folder_scorer",
    "search.flops",
    "search.generation",
    "search.settings",
    "serving.server",
    "training.run_directory",
    "training.trainer",
    "vlm.annotations",
    "vlm.captioning",
    "vlm.question_answering",
)

# From the ground up. A module imports what lies below it, and its own neighbours within one package.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "core.cards",
        "core.errors",
        "core.philox_triton",
    ),
    (
        "core",
        "data.video_io",
        "rewards.backbones.optical_flow",
    ),
    (
        "core.distributions",
        "core.weights",
        "data.image_io",
        "evaluation.geneval_rules",
        "models.pretrained",
        "models.safe_unpickling",
        "rewards.backbones.preprocessing",
    ),
    ("core.dropout",),
    (
        "data.class_labels",
        "models.weight_files",
    ),
    ("playground",),  # a world of its own, which knows nothing of who learns in it
    (
        "autoencoders.lpips",
        "autoencoders.patchgan",
        "core.autoencoder",
        "core.lora",
        "core.policy",
    ),
    (
        "core.guidance",
        "core.model_spec",
        "core.reward",
    ),
    ("data.embedding_store",),
    ("core.trainable_text_encoder",),
    (
        "core.objective",
        "data.dataset",
        "processes",
        "serving",
    ),
    ("config.schema",),  # the sections of a run, which are data
    ("rewards.backbones",),
    ("vlm",),
    (
        "data",
        "models",
        "objectives",
        "rewards",
        "search",
    ),
    (
        "autoencoders",
        "evaluation",
        "training",
        "vlm.finetuning",
    ),
    ("config",),
    (
        "diagnostics",
        "report",
    ),
    ("export",),
    (
        "diagnostics.doctor",
        "diagnostics.two_ranks",
        "evaluation.scoreboard",
        "training.loggers",
    ),
    WORKFLOWS,
    ("compat",),  # formats of other projects; the package root registers it, and nothing else imports it
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Modules of one level that may import one another though they are in several packages: loops on the same engine.
PEERS = (("training", "autoencoders", "vlm.finetuning"), WORKFLOWS)

# What else may be imported across or upwards, and why.
ALLOWED = {
    ("data.toy", "models.toy"): "images of the toys' own world, at their size",
}

# The last two name classes in files.
DISTRIBUTED = ("training.engine", "training.distributed", "training.context_parallel", "export.llamagen")
LINES, FUNCTION = 500, 60  # of a file and of a function
ONLY_IN = {
    "data.hf_datasets": "datasets",
    "core.lora": "peft",
    "data.video_io": "av",
    "rewards.ocr": "rapidocr",
}


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
            level = LEVEL[home(other)] == LEVEL[home(module)]
            peers = level and any(within(module, *group) and within(other, *group) for group in PEERS)
            neighbour = peers or (other.split(".")[0] == module.split(".")[0] and (below or level))
            if not (below or neighbour or allowed(module, other)):
                wrong.append(f"tastemaker.{module} imports {other}, which is not below it")
    assert not wrong, "\n".join(wrong)


# Modules that lie below all packages of the list that follows, wherever their subject puts them.
BELOW = tuple(name for names in LAYERS[:9] for name in names)

# What modules of some packages never import, and the modules excepted from that.
NEVER: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("models",), ("objectives", "rewards", "training", "search", "data", "config"), BELOW),
    (("objectives", "search"), ("models", "rewards", "training", "data", "config"), BELOW),
    (("rewards",), ("models", "objectives", "processes", "training", "config"), BELOW),
    (("training",), ("config", "models", "rewards", "objectives", "search"), ("config.schema", *BELOW)),
    (("training.loggers",), ("training", "config"), ("training.events", "training.loggers", *BELOW)),
)


def test_nothing_but_the_package_root_imports_compat(modules: list[Module]) -> None:
    importers = {each.name for each in modules if any(within(other, "compat") for other in each.ours)}
    assert {name for name in importers if not within(name, "compat")} == {""}


def test_what_each_part_never_imports(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        for packages, others, excepted in NEVER:
            if within(module.name, *packages) and not within(module.name, *WORKFLOWS):
                wrong += [(module.name, m) for m in module.ours if within(m, *others) and not within(m, *excepted)]
        if not within(module.name, "cli", "training.loggers", *WORKFLOWS):
            wrong += [(module.name, m) for m in module.ours if within(m, "training.loggers")]
    assert not wrong


def test_heavy_packages_are_imported_in_one_place_each(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        refused = {package for place, package in ONLY_IN.items() if module.name != place}
        if not within(module.name, "cli", "training.loggers", *WORKFLOWS):
            refused |= {"typer", "rich", "wandb", "tensorboard"}
        wrong += [(module.name, m) for m in module.foreign if m.split(".")[0] in refused]
        if not within(module.name, *DISTRIBUTED):
            wrong += [(module.name, m) for m in module.foreign if m.startswith("torch.distributed")]
    assert not wrong


def test_files_and_functions_stay_readable(modules: list[Module]) -> None:
    wrong = [f"tastemaker.{module.name} has {module.lines} lines" for module in modules if module.lines > LINES]
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION:
                    wrong.append(f"tastemaker.{module.name}: {node.name} has {length} lines")
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
                if node.func.id == "print" and not within(module.name, "cli", "training.loggers", *WORKFLOWS):
                    wrong.append(f"tastemaker.{module.name}: only the command line prints")
            if isinstance(node, ast.Name) and node.id == "runtime_checkable":
                wrong.append(f"tastemaker.{module.name}: abilities are methods with defaults, not protocols to probe")
            if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Utils?)$|^Base", node.name):
                wrong.append(f"tastemaker.{module.name}: a class is called {node.name}")
    assert not wrong
