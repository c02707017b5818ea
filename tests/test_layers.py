"""Static rules for the source: import directions, lengths of files and functions, and forbidden names and calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tastemaker

PACKAGE = Path(tastemaker.__file__).parent

# Called by the command line: these combine parts of the whole package, each in the package of its subject.
WORKFLOWS = (
    "api",
    "data.embedding_precompute",
    "data.image_encoding",
    "data.preference_labels",
    "evaluation.benchmark_run",
    "evaluation.geneval",
    "evaluation.image_sets",
    "evaluation.leaderboard",
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
    "preferences.alignment",
    "preferences.interchange",
    "preferences.session_results",
    "preferences.session_samples",
    "preferences.session_taste",
    "preferences.sessions",
    "rewards.folder_scorer",
    "search.flops",
    "search.generation",
    "search.settings",
    "serving.server",
    "training.initialization",
    "training.run_directory",
    "training.sweep",
    "training.trainer",
    "vlm.annotations",
    "vlm.captioning",
    "vlm.question_answering",
)

# From the bottom up. A module imports modules of lower layers, and modules of its own package in the same layer.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "console",  # output of commands, for all that print
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
        "data.metadata_images",
        "evaluation.geneval_rules",
        "models.pretrained",
        "models.protobuf_reader",
        "models.restricted_unpickler",
        "models.sentencepiece_tokenizer",
        "rewards.backbones.preprocessing",
    ),
    ("core.dropout",),
    (
        "data.class_labels",
        "models.weight_files",
    ),
    ("playground",),  # the synthetic task, independent of models and training
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
        "preferences",  # votes and the model of preferences, which data and rewards read
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
        "preferences.training",
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
    ("verification",),
    ("studio",),
    ("compat",),  # formats of other projects; the package root registers it, and nothing else imports it
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Modules of one layer in several packages that may import one another: training loops on the same engine.
PEERS = (("training", "autoencoders", "preferences.training", "vlm.finetuning"), WORKFLOWS)

# Exceptions, with reasons.
ALLOWED = {
    ("data.toy", "models.toy"): "images for the toy models, at their size",
}

# Modules that may import torch.distributed. The last two only name classes that files contain.
DISTRIBUTED = ("training.engine", "training.distributed", "training.context_parallel", "export.llamagen")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
ONLY_IN = {
    "data.hf_datasets": "datasets",
    "core.lora": "peft",
    "data.video_io": "av",
    "rewards.ocr": "rapidocr",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__").replace("__init__", "")


def find_layer(module: str) -> str:
    """The entry of LAYERS that a module belongs to: the longest matching prefix."""
    parts = module.split(".")
    fitting = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in LEVEL]
    assert fitting, f"tastemaker.{module} has no layer; give it one in {Path(__file__).name}"
    return fitting[0]


def imports(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Every module that a file imports; those of the package start with a dot instead of its name, as '.types'."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield re.sub(r"^tastemaker(?=\.|$)", "", alias.name) or "."
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            yield from resolve_names(".".join(part for part in base if part), node)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "tastemaker" or module.startswith("tastemaker."):
                yield from resolve_names(module.removeprefix("tastemaker").lstrip("."), node)
            else:
                yield module


def resolve_names(base: str, node: ast.ImportFrom) -> Iterator[str]:
    """Distinguish `from .train import engine`, a module, from `from .train.engine import Engine`, a name in one."""
    for alias in node.names:
        inner = f"{base}.{alias.name}".strip(".")
        location = PACKAGE.joinpath(*inner.split("."))
        yield "." + (inner if location.is_dir() or location.with_suffix(".py").is_file() else base)


class Module(NamedTuple):
    """A parsed file of the package."""

    name: str
    lines: int
    nodes: list[ast.AST]
    internal: set[str]  # imported modules of the package
    external: set[str]  # imported modules of other packages


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Every file of the package, parsed once."""
    parsed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        imported = set(imports(path, nodes))
        internal = {module[1:] for module in imported if module.startswith(".") and module != "."}
        external = {module for module in imported if not module.startswith(".")}
        parsed.append(Module(module_name(path), len(text.splitlines()), nodes, internal, external))
    assert len(parsed) > 300
    return parsed


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_allowed(module: str, other: str) -> bool:
    return any(is_within(module, a) and is_within(other, b) for a, b in ALLOWED)


def test_imports_point_downwards(modules: list[Module]) -> None:
    wrong = []
    for module, internal in ((each.name, each.internal) for each in modules if each.name):
        for other in internal:
            below = LEVEL[find_layer(other)] < LEVEL[find_layer(module)]
            level = LEVEL[find_layer(other)] == LEVEL[find_layer(module)]
            peers = level and any(is_within(module, *group) and is_within(other, *group) for group in PEERS)
            same_package = peers or (other.split(".")[0] == module.split(".")[0] and (below or level))
            if not (below or same_package or is_allowed(module, other)):
                wrong.append(f"tastemaker.{module} imports {other}, which is not below it")
    assert not wrong, "\n".join(wrong)


# Modules in layers below all packages of the following list.
BELOW = tuple(name for names in LAYERS[:9] for name in names)

# Packages, the packages that they must not import, and exceptions.
FORBIDDEN: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("models",), ("objectives", "rewards", "training", "search", "data", "config"), BELOW),
    (("objectives", "search"), ("models", "rewards", "training", "data", "config"), BELOW),
    (("rewards",), ("models", "objectives", "processes", "training", "config"), BELOW),
    (("training",), ("config", "models", "rewards", "objectives", "search"), ("config.schema", *BELOW)),
    (
        ("training.loggers",),
        ("training", "config"),
        ("training.events", "training.loggers", "training.run_status", *BELOW),
    ),
)


def test_only_the_package_root_imports_compat(modules: list[Module]) -> None:
    importers = {each.name for each in modules if any(is_within(other, "compat") for other in each.internal)}
    assert {name for name in importers if not is_within(name, "compat")} == {""}


def test_forbidden_imports(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        for packages, others, excepted in FORBIDDEN:
            if is_within(module.name, *packages) and not is_within(module.name, *WORKFLOWS):
                wrong += [
                    (module.name, m) for m in module.internal if is_within(m, *others) and not is_within(m, *excepted)
                ]
        if not is_within(module.name, "cli", "training.loggers", *WORKFLOWS):
            wrong += [(module.name, m) for m in module.internal if is_within(m, "training.loggers")]
    assert not wrong


def test_heavy_packages_are_imported_in_one_module(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        refused = {package for location, package in ONLY_IN.items() if module.name != location}
        if not is_within(module.name, "cli", "console", "training.loggers", *WORKFLOWS):
            refused |= {"typer", "rich", "wandb", "tensorboard"}
        wrong += [(module.name, m) for m in module.external if m.split(".")[0] in refused]
        if not is_within(module.name, *DISTRIBUTED):
            wrong += [(module.name, m) for m in module.external if m.startswith("torch.distributed")]
    assert not wrong


def test_files_and_functions_have_bounded_length(modules: list[Module]) -> None:
    wrong = [
        f"tastemaker.{module.name} has {module.lines} lines" for module in modules if module.lines > MAX_FILE_LINES
    ]
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"tastemaker.{module.name}: {node.name} has {length} lines")
    assert not wrong


def test_forbidden_names_and_calls(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        if re.search(r"(^|\.)(utils?|helpers?|misc|common)$", module.name):
            wrong.append(f"tastemaker.{module.name}: name the module after its content")
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "hasattr":
                    wrong.append(f"tastemaker.{module.name}: declare a method with a default instead of hasattr")
                if node.func.id == "print" and not is_within(module.name, "cli", "training.loggers", *WORKFLOWS):
                    wrong.append(f"tastemaker.{module.name}: only the command line prints")
            if isinstance(node, ast.Name) and node.id == "runtime_checkable":
                wrong.append(f"tastemaker.{module.name}: abilities are methods with defaults, not protocols to probe")
            if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Utils?)$|^Base", node.name):
                wrong.append(f"tastemaker.{module.name}: a class is called {node.name}")
    assert not wrong
