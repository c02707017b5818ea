"""What the command line imports: torch only where a command computes, and large libraries only where they are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from cli_runner import run_cli

from tastemaker.cli import app
from tastemaker.cli.plain_help import move_imports_first
from tastemaker.config import catalog, registries
from tastemaker.config.static_source import NotStatic, StaticClass
from tastemaker.core.registry import IMPORTED_MODULES, Registry

ROOT = Path(__file__).parent.parent.parent
LARGE = {"datasets", "diffusers", "pandas", "peft", "scipy", "sklearn", "sympy", "transformers", "torch._dynamo"}
COMPUTING = {"torch", "numpy", "PIL", "safetensors"}
KINDS = [registries.MODELS, registries.AUTOENCODERS, registries.OBJECTIVES, registries.DATA, registries.SEARCHES]

# Runs commands one after the other in one process, and reports for each its exit code and all modules imported so far.
REPORT = """
import contextlib, io, json, sys
from tastemaker.cli import main
for arguments in json.loads(sys.argv[1]):
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([arguments, code, output.getvalue(), sorted(sys.modules)]))
"""


def run_and_list_modules(folder: Path, *commands: Sequence[str]) -> list[tuple[list[str], int, str, set[str]]]:
    """For each command: its arguments, exit code, output, and the modules that are imported after it."""
    process = subprocess.run(
        [sys.executable, "-c", REPORT, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [(a, code, text, set(names)) for a, code, text, names in map(json.loads, process.stdout.splitlines())]


def test_help_list_and_mistyped_commands_import_no_torch(tmp_path: Path) -> None:
    kinds = ["models", "autoencoders", "rewards", "objectives", "recipes", "data", "searches", "prompts"]
    lists = [["list", kind] for kind in kinds]
    group = typer.main.get_command(app)
    helps = [["--help"], *([name, "--help"] for name in group.list_commands(typer.Context(group)))]
    assert ["train", "--help"] in helps
    wrong = [["trian"], ["list", "nothing"], ["train"]]
    for arguments, code, text, modules in run_and_list_modules(
        tmp_path, *helps, *lists, ["list", "rewards", "--json"], *wrong
    ):
        assert modules & (LARGE | COMPUTING) == set(), arguments
        assert code == (2 if arguments in wrong else 0), (arguments, text)
        assert text and "Traceback" not in text


def test_check_imports_torch_but_no_large_library(tmp_path: Path) -> None:
    wrong = ["check", "grpo-toy-flow", "optim.lr=high"]
    for arguments, code, text, modules in run_and_list_modules(tmp_path, ["check", "grpo-toy-flow"], wrong):
        assert "torch" in modules and modules & LARGE == set(), arguments
        assert code == (2 if arguments == wrong else 0), text


@pytest.mark.parametrize("name", list(registries.REWARDS))
def test_reward_properties_in_the_source_are_those_of_the_class(name: str) -> None:
    source = StaticClass(registries.REWARDS.locate(name))
    static = catalog.reward_properties(None if source.has_required_fields else source.defaults())
    assert static == catalog.reward_properties(catalog.default_spec(name))
    assert source.docstring == registries.REWARDS.find(name).__doc__


@pytest.mark.parametrize("registry", KINDS, ids=lambda registry: registry.kind)
def test_docstrings_in_the_source_are_those_of_the_classes(registry: Registry) -> None:
    for name in registry:
        assert StaticClass(registry.locate(name)).docstring == registry.find(name).__doc__, name


@pytest.mark.parametrize(
    "location", ["no_such_module:Class", "tastemaker.core.reward:Missing", "math:Class", "__main__:Class"]
)
def test_class_with_no_source_is_not_static(location: str) -> None:
    with pytest.raises(NotStatic):
        StaticClass(location)


def test_values_that_need_an_import_are_not_static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import torch", "WIDTH = torch.tensor(3)", "class Own(Base):", "    width = WIDTH", "    height = 2 * 3"]
    (tmp_path / "own_reward.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    own = StaticClass("own_reward:Own")
    assert own.defaults().height == 6
    for read in (lambda: own.docstring, lambda: own.defaults().width, lambda: own.defaults().inherited):
        with pytest.raises(NotStatic):
            read()


MODULE = """
from dataclasses import dataclass

import tastemaker as tm
from tastemaker.models.vae import VaeSpec


@tm.register_model("my_vae")
@dataclass(frozen=True)
class MySpec(VaeSpec):
    pass
"""


def test_import_option_makes_registered_names_usable(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """The module is imported only if the option names it, before or behind the command."""
    request.addfinalizer(IMPORTED_MODULES.clear)  # other tests start processes that import what is in it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registries.AUTOENCODERS, "_names", dict(vars(registries.AUTOENCODERS)["_names"]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "registers_my_vae.py").write_text(MODULE)
    small = ["autoencoder.width=8", "steps=1", "batch_size=2", "validation.every=0", "engine.device=cpu"]
    command = ["check", "playground-vae", "autoencoder.type=my_vae", *small]
    assert run_cli(*command) == 2 and "registers_my_vae" not in sys.modules
    error = capsys.readouterr().err
    assert "'my_vae'" in error and "--import" in error and "TM107" in error
    assert run_cli(*command, "--import", "registers_my_vae") == 0
    assert "type: my_vae" in capsys.readouterr().out
    assert run_cli("--import=registers_my_vae", *command) == 0
    assert IMPORTED_MODULES.count("registers_my_vae") == 1
    IMPORTED_MODULES.remove("registers_my_vae")
    assert run_cli("list", "autoencoders", "--import=registers_my_vae") == 0
    assert "my_vae" in capsys.readouterr().out
    assert run_cli(*command, "--import", "no_such_module") == 2
    assert "TM848" in capsys.readouterr().err
    assert move_imports_first(["a", "--import", "b", "--", "--import", "c"]) == [
        "--import",
        "b",
        "a",
        "--",
        "--import",
        "c",
    ]
