"""The distributed package: import cost, file encodings, pinned dependencies, and an installed wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import tastemaker

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch",
    "numpy",
    "pydantic",
    "yaml",
    "peft",
    "PIL",
    "av",
    "typer",
    "rich",
    "transformers",
    "safetensors",
    "tensorboard",
    "wandb",
    "starlette",
    "uvicorn",
)


def run_command(command: list[str], folder: Path, **settings: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**inherited, "OMP_NUM_THREADS": "1", **settings}
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


IMPORTED = f"""
import sys
import tastemaker; print([name for name in {HEAVY!r} if name in sys.modules])
import tastemaker.config.load; print([name for name in sys.modules if "tastemaker.rewards." in name])
import tastemaker.training.trainer; print([name for name in ("peft", "transformers") if name in sys.modules])
"""


def test_imports_load_no_heavy_packages(tmp_path: Path) -> None:
    output = run_command([sys.executable, "-c", IMPORTED], tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert output == ["[]", "[]", "[]"]  # heavy modules loaded after each of the three imports


def test_public_names_exist() -> None:
    assert len(set(tastemaker.__all__)) == len(tastemaker.__all__)
    for name in tastemaker.__all__:
        assert getattr(tastemaker, name) is not None


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tastemaker.trian


def text_files() -> list[Path]:
    roots = [ROOT / "tastemaker", ROOT / "tests", ROOT / "docs"]
    kinds = (".py", ".md", ".yaml", ".json", ".toml", ".txt")
    nested = [path for part in roots for path in part.rglob("*") if path.suffix in kinds]
    return [*nested, *(path for path in ROOT.iterdir() if path.suffix in kinds), ROOT / "Makefile", ROOT / ".ci/run"]


def test_text_files_are_utf_8_with_unix_line_ends() -> None:
    for path in text_files():
        content = path.read_bytes()
        content.decode("utf-8")
        assert b"\r" not in content, path
        assert not content or content.endswith(b"\n") or "fixtures" in path.parts, path


def test_version_matches_pyproject() -> None:
    assert f'\nversion = "{tastemaker.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_all_dependencies_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[^\w-]", name)[0].lower() for name in requirements} - {"tastemaker"}
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    # trackio needs pillow below 13, so it cannot be installed beside the pinned packages.
    assert names - {"trackio"} <= pinned


def test_ci_runs_the_readme_command() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for file in (ROOT / ".ci/run", ROOT / "README.md"):
        assert "make test" in file.read_text().splitlines()


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the built wheel installed; dependencies come from the current environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run_command(command, folder)
    (wheel,) = folder.glob("tastemaker-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    run_command([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    # Appended after the environment's own packages, and without the .pth file of an editable install.
    path_hook = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    site = run_command([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    Path(site, "dependencies.pth").write_text(path_hook)
    return folder


@pytest.mark.slow
def test_installed_wheel_is_imported(installed_wheel: Path) -> None:
    program = "import tastemaker; print(tastemaker.__file__)"
    package_file = Path(run_command([str(installed_wheel / "venv/bin/python"), "-c", program], installed_wheel).strip())
    assert package_file.is_relative_to(installed_wheel)
    assert (package_file.parent / "py.typed").is_file()
    assert (package_file.parent / "recipes/schema.json").is_file()


@pytest.mark.slow
def test_wheel_lists_its_components(installed_wheel: Path) -> None:
    (wheel,) = installed_wheel.glob("tastemaker-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
        document = json.loads(archive.read(name))
    assert document["bomFormat"] == "CycloneDX" and document["metadata"]["component"]["name"] == "tastemaker"
    assert "torch" in {component["name"] for component in document["components"]}


@pytest.mark.slow
def test_installed_wheel_prints_help_and_lists(installed_wheel: Path) -> None:
    command = str(installed_wheel / "venv/bin/tastemaker")
    assert "train" in run_command([command, "--help"], installed_wheel)
    assert "grpo-toy-flow" in run_command([command, "list", "recipes"], installed_wheel, COLUMNS="200")


@pytest.mark.slow
def test_installed_command_imports_nothing_from_the_working_directory(installed_wheel: Path, tmp_path: Path) -> None:
    for name in ("html", "sympy", "typing", "json", "sitecustomize", "torch", "typer", "types", "functools"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('EXECUTED')\n")
    command = str(installed_wheel / "venv/bin/tastemaker")
    for safe_path in ("", "1"):
        arguments = [command, "list", "recipes"]
        assert "grpo-toy-flow" in run_command(arguments, tmp_path, PYTHONSAFEPATH=safe_path, COLUMNS="200")


@pytest.mark.slow
def test_installed_wheel_trains_two_steps(installed_wheel: Path) -> None:
    command = str(installed_wheel / "venv/bin/tastemaker")
    run_command(
        [command, "train", "grpo-lora-toy-flow", "steps=2", "name=wheel", "--tiny", "--device", "cpu"], installed_wheel
    )
    assert len((installed_wheel / "runs/wheel/metrics.jsonl").read_text().splitlines()) >= 2
    assert (installed_wheel / "runs/wheel/checkpoints/step-000002").is_dir()


@pytest.mark.slow
def test_installed_wheel_runs_as_a_module(installed_wheel: Path) -> None:
    command = [str(installed_wheel / "venv/bin/python"), "-m", "tastemaker", "check", "grpo-toy-flow"]
    assert "no problems" in run_command(command, installed_wheel)
