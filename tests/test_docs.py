"""What the documentation says is so: its examples run, its files exist, its table is true."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

from tastemaker import build, load
from tastemaker.cli import app
from tastemaker.config.load import list_recipes, list_trainable_recipes, load_any_config
from tastemaker.config.registries import OBJECTIVES
from tastemaker.config.schema import RunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = vars(get_command(app))["commands"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def unpack(page: Path, folder: Path) -> list[Path]:
    """Write every block that begins with a file's name to that file."""
    found = []
    for _, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name := NAMED.match(text):
            path = folder / name[1]
            path.write_text(text, encoding="utf-8")
            found.append(path)
    return found


def commands(page: Path) -> Iterator[str]:
    """Every line of every console block, continued lines joined."""
    for text in blocks(page, "console"):
        yield from text.replace("\\\n", " ").splitlines()


def rewards(config: RunConfig, folder: Path) -> list[float]:
    run = build(config, folder)
    earned = [event.metrics["reward/mean"] for event in train(run) if isinstance(event, StepCompleted)]
    run.engine.close()
    return earned


@pytest.mark.parametrize(
    "page", ["add-a-reward.md", "add-an-objective.md", pytest.param("add-a-model.md", marks=pytest.mark.slow)]
)
def test_the_examples_of_the_guides_learn(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = unpack(ROOT / "docs" / page, tmp_path)
    (recipe,) = [path for path in files if path.suffix == ".yaml"]
    assert any(path.suffix == ".py" for path in files)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(recipe, ["sample.every=0", "engine.device=cpu"])
    earned = rewards(config, tmp_path / "run")
    assert sum(earned[-5:]) / 5 > sum(earned[:5]) / 5 + 0.05


@pytest.mark.parametrize("family", ["toy-flow", "toy-masked"])
def test_the_objective_of_the_guide_trains_the_other_families(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, recipe = unpack(ROOT / "docs/add-an-objective.md", tmp_path)
    recipe.write_text(recipe.read_text().replace("models/toy-causal", f"models/{family}"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    assert len(rewards(load(recipe, ["steps=2", "sample.every=0", "engine.device=cpu"]), tmp_path / "run")) == 2


@pytest.mark.parametrize("objective", ["reward_gradient", "nft", "srpo"])
def test_the_model_of_the_guide_is_trained_by_other_objectives(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recipe = unpack(ROOT / "docs/add-a-model.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = [f"objective={{type: {objective}}}", "steps=2", "sample.every=0", "engine.device=cpu"]
    run = build(load(recipe, [*chosen, "tuning={type: lora, target_modules: [first, last]}"]), tmp_path / "run")
    assert sum(isinstance(event, StepCompleted) for event in train(run)) == 2


def python(arguments: list[str], folder: Path) -> str:
    paths = os.pathsep.join([str(ROOT), str(folder)])
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], list[str]]:
    """Runs a program on the CPU in this process and returns the lines that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(path: Path) -> list[str]:
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_the_library_examples_run_one_after_the_other(tmp_path: Path, printed: Callable[[Path], list[str]]) -> None:
    first, loop, again, look, small = unpack(ROOT / "docs/library.md", tmp_path)
    assert re.fullmatch(r"reward [\d.]+, 2 images", printed(first)[-1])
    assert len(printed(loop)) == 20
    assert printed(again) == ["resumed at step 20, ended at step 30"]
    assert "color" in printed(look)[0]
    assert (tmp_path / "red.png").is_file()
    assert printed(small) == ["True"]


def test_the_example_of_the_readme_runs(tmp_path: Path, printed: Callable[[Path], list[str]]) -> None:
    (example,) = unpack(ROOT / "README.md", tmp_path)
    assert len(example.read_text().splitlines()) <= 11
    assert "2 images" in printed(example)[-1]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_library_example_runs_on_two_ranks(tmp_path: Path) -> None:
    _, loop, *_ = unpack(ROOT / "docs/library.md", tmp_path)
    alone = python([loop.name], tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", loop.name]
    (tmp_path / "two").mkdir()
    loop.rename(tmp_path / "two" / loop.name)
    assert python(launch, tmp_path / "two") == alone


def test_links_and_files_named_in_the_pages_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prose = BLOCK.sub("", text)
        files = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        files += [ROOT / name for name in re.findall(r"`((?:tastemaker|tests|docs)/[\w/.-]+)`", prose)]
        if page.stem == "papers":
            files += [ROOT / "tastemaker" / name for name in re.findall(r"`([\w/]+\.py)`", prose)]
        missing += [f"{page.name}: {file}" for file in files if not file.exists()]
    assert not missing


def mistakes(line: str, own: set[str]) -> Iterator[str]:
    """What is wrong with one command: an unknown recipe, option, target or setting."""
    if (match := re.search(r"\btastemaker (train|check|doctor) ([\w./-]+)", line)) and match[2] not in {
        *list_recipes(),
        *own,
    }:
        yield f"no recipe {match[2]}"
    if match := re.search(r"\btastemaker ([a-z-]+)(.*)", line):
        if match[1] not in COMMANDS:
            yield f"no command {match[1]}"
            return
        known = {option for parameter in COMMANDS[match[1]].params for option in parameter.opts}
        yield from (f"no option {option}" for option in re.findall(r"--[\w-]+", match[2]) if option not in known)
    if (match := re.match(r"make ([\w-]+)", line)) and not re.search(rf"^{match[1]}:", MAKEFILE, re.MULTILINE):
        yield f"no target {match[1]}"
    recipe = next((word for word in line.split() if word in list_trainable_recipes()), "grpo-toy-flow")
    for override in re.findall(r"\s([a-z]+(?:\.[a-z]+)*=[\w./-]+)", line):
        try:
            load_any_config(recipe, [override])
        except ConfigError as error:
            yield str(error)


def test_commands_named_in_the_pages_are_right() -> None:
    wrong = []
    for page in PAGES:
        own = {path.name for path in page.parent.glob("*")} | set(NAMED.findall(page.read_text(encoding="utf-8")))
        wrong += [f"{page.name}: {line}: {told}" for line in commands(page) for told in mistakes(line, own)]
    assert not wrong


def test_shell_scripts_in_the_pages_parse() -> None:
    scripts = [text for page in PAGES for text in blocks(page, "bash")]
    assert any("#SBATCH" in script for script in scripts)
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_torchrun_knows_the_options_shown() -> None:
    shown = {
        o for text in BLOCK.findall((ROOT / "docs/scale.md").read_text()) for o in re.findall(r"--[\w-]+", text[1])
    }
    known = get_args_parser().format_help()
    ours = {"--device", "--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time"}
    for option in shown - ours - {"--requeue", "--signal", "--open-mode"}:
        assert option in known, option


def test_the_table_of_what_runs_is_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    header, _, *rows = re.findall(r"^\|(.*)\|$", text[text.index("| objective |") :], re.MULTILINE)
    families = [cell.strip() for cell in header.split("|")][1:]
    said = {}
    for row in rows:
        name, *cells = (cell.strip() for cell in row.split("|"))
        said[name.strip("`")] = dict(zip(families, cells, strict=True))
    processes = {
        family: load(f"grpo-toy-{family}" if family != "epsilon" else "ddpo-toy-epsilon").process for family in families
    }
    for name in OBJECTIVES:
        needs = OBJECTIVES.find(name).needs
        true = {family: "yes" if isinstance(process, needs) else "-" for family, process in processes.items()}
        assert said.pop(name) == true, name
    assert not said
