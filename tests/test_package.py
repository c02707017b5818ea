"""The package as others get it: what an import costs, what a wheel holds, and that it runs far from its clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
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
)


def run(command: list[str], folder: Path, **settings: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**inherited, "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


IMPORTED = f"""
import sys
import tastemaker; print([name for name in {HEAVY!r} if name in sys.modules])
import tastemaker.config.load; print([name for name in sys.modules if "tastemaker.rewards." in name])
import tastemaker.training.trainer; print([name for name in ("peft", "transformers") if name in sys.modules])
"""


def test_imports_of_the_package_of_recipes_and_of_training_load_nothing_heavy(tmp_path: Path) -> None:
    told = run([sys.executable, "-c", IMPORTED], tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert told == ["[]", "[]", "[]"]  # after each of the three imports, the heavy modules that came with it


def test_every_public_name_is_there() -> None:
    assert len(set(tastemaker.__all__)) == len(tastemaker.__all__)
    for name in tastemaker.__all__:
        assert getattr(tastemaker, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tastemaker.trian


def sources() -> list[Path]:
    parts = [ROOT / "tastemaker", ROOT / "tests", ROOT / "docs"]
    kinds = (".py", ".md", ".yaml", ".json", ".toml", ".txt")
    below = [path for part in parts for path in part.rglob("*") if path.suffix in kinds]
    return [*below, *(path for path in ROOT.iterdir() if path.suffix in kinds), ROOT / "Makefile", ROOT / ".ci/run"]


def test_every_file_is_utf_8_with_plain_line_ends() -> None:
    for path in sources():
        content = path.read_bytes()
        content.decode("utf-8")
        assert b"\r" not in content, path
        assert not content or content.endswith(b"\n") or "fixtures" in path.parts, path


def test_the_version_is_said_once_and_alike() -> None:
    assert f'\nversion = "{tastemaker.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_everything_asked_for_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    names = {re.split(r"[^\w-]", name)[0].lower() for name in asked} - {"tastemaker"}
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert names <= pinned


def test_the_pipeline_runs_the_command_of_the_readme() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for place in (ROOT / ".ci/run", ROOT / "README.md"):
        assert "make test" in place.read_text().splitlines()


@pytest.fixture(scope="module")
def far_away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the built wheel in it; torch and the like are borrowed from this one."""
    folder = tmp_path_factory.mktemp("far")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(command, folder)
    (wheel,) = folder.glob("tastemaker-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    # Behind the environment's own packages, and without the .pth by which an editable clone would come along.
    borrowed = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    Path(site, "borrowed.pth").write_text(borrowed)
    return folder


@pytest.mark.slow
def test_an_installed_wheel_is_what_runs(far_away: Path) -> None:
    asked = "import tastemaker; print(tastemaker.__file__)"
    found = Path(run([str(far_away / "venv/bin/python"), "-c", asked], far_away).strip())
    assert found.is_relative_to(far_away)
    assert (found.parent / "py.typed").is_file()
    assert (found.parent / "recipes/schema.json").is_file()


@pytest.mark.slow
def test_an_installed_wheel_helps_and_lists(far_away: Path) -> None:
    command = str(far_away / "venv/bin/tastemaker")
    assert "train" in run([command, "--help"], far_away)
    assert "grpo-toy-flow" in run([command, "list", "recipes"], far_away, COLUMNS="200")


@pytest.mark.slow
def test_an_installed_wheel_trains_two_steps(far_away: Path) -> None:
    command = str(far_away / "venv/bin/tastemaker")
    run([command, "train", "grpo-lora-toy-flow", "steps=2", "name=far", "--tiny", "--device", "cpu"], far_away)
    assert len((far_away / "runs/far/metrics.jsonl").read_text().splitlines()) >= 2
    assert (far_away / "runs/far/checkpoints/step-000002").is_dir()


@pytest.mark.slow
def test_an_installed_wheel_starts_as_a_module(far_away: Path) -> None:
    command = [str(far_away / "venv/bin/python"), "-m", "tastemaker", "check", "grpo-toy-flow"]
    assert "no problems" in run(command, far_away)
