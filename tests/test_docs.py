"""The documentation is correct: examples run, linked files and commands exist, and the table of objectives holds."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from docs_pages import BLOCK, FILE_NAME, PAGES, ROOT, code_blocks, console_lines, write_named_blocks
from torch.distributed.run import get_args_parser
from typer.main import get_command

from tastemaker import build, load
from tastemaker.cli import app
from tastemaker.config.load import list_recipes, list_trainable_recipes, load_any_config
from tastemaker.config.recipes import recipe_paths
from tastemaker.config.registries import OBJECTIVES
from tastemaker.config.schema import RunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

UNPLANNED = {name for name, path in recipe_paths().items() if path.parent.name in ("playground", "toys")}
COMMANDS = vars(get_command(app))["commands"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def train_and_collect_rewards(config: RunConfig, folder: Path) -> list[float]:
    run = build(config, folder)
    mean_rewards = [event.metrics["reward/mean"] for event in train(run) if isinstance(event, StepCompleted)]
    run.engine.close()
    return mean_rewards


@pytest.mark.parametrize(
    "page", ["add-a-reward.md", "add-an-objective.md", pytest.param("add-a-model.md", marks=pytest.mark.slow)]
)
def test_guide_examples_learn(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_named_blocks(ROOT / "docs" / page, tmp_path)
    (recipe,) = [path for path in files if path.suffix == ".yaml"]
    assert any(path.suffix == ".py" for path in files)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(recipe, ["sample.every=0", "engine.device=cpu"])
    mean_rewards = train_and_collect_rewards(config, tmp_path / "run")
    assert sum(mean_rewards[-5:]) / 5 > sum(mean_rewards[:5]) / 5 + 0.05


@pytest.mark.parametrize("family", ["toy-flow", "toy-masked"])
def test_guide_objective_trains_other_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, recipe = write_named_blocks(ROOT / "docs/add-an-objective.md", tmp_path)
    recipe.write_text(recipe.read_text().replace("models/toy-causal", f"models/{family}"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    assert (
        len(
            train_and_collect_rewards(
                load(recipe, ["steps=2", "sample.every=0", "engine.device=cpu"]), tmp_path / "run"
            )
        )
        == 2
    )


@pytest.mark.parametrize("objective", ["reward_gradient", "nft", "srpo"])
def test_guide_model_trains_with_other_objectives(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recipe = write_named_blocks(ROOT / "docs/add-a-model.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [f"objective={{type: {objective}}}", "steps=2", "sample.every=0", "engine.device=cpu"]
    run = build(load(recipe, [*overrides, "tuning={type: lora, target_modules: [first, last]}"]), tmp_path / "run")
    assert sum(isinstance(event, StepCompleted) for event in train(run)) == 2


def run_python(arguments: list[str], folder: Path) -> str:
    paths = os.pathsep.join([str(ROOT), str(folder)])
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], list[str]]:
    """A function that runs a script on the CPU in this process and returns its output lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(path: Path) -> list[str]:
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_library_examples_run_in_order(tmp_path: Path, run_script: Callable[[Path], list[str]]) -> None:
    first, pictures, loop, resume, inspect, small = write_named_blocks(ROOT / "docs/library.md", tmp_path)
    assert re.fullmatch(r"reward [\d.]+, 2 images", run_script(first)[-1])
    assert "color" in run_script(pictures)[-1] and (tmp_path / "before-after.png").is_file()
    assert len(run_script(loop)) == 20
    assert run_script(resume) == ["resumed at step 20, ended at step 30"]
    assert "color" in run_script(inspect)[0]
    assert (tmp_path / "red.png").is_file()
    assert run_script(small) == ["True"]


def test_readme_example_runs(tmp_path: Path, run_script: Callable[[Path], list[str]]) -> None:
    (example,) = write_named_blocks(ROOT / "README.md", tmp_path)
    assert len(example.read_text().splitlines()) <= 11
    assert "2 images" in run_script(example)[-1]


@pytest.mark.slow
@pytest.mark.ranks
def test_library_example_runs_on_two_ranks(tmp_path: Path) -> None:
    _, _, loop, *_ = write_named_blocks(ROOT / "docs/library.md", tmp_path)
    single_process_output = run_python([loop.name], tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", loop.name]
    (tmp_path / "two").mkdir()
    loop.rename(tmp_path / "two" / loop.name)
    assert run_python(launch, tmp_path / "two") == single_process_output


def test_linked_files_exist() -> None:
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


def find_mistakes(line: str, local_files: set[str]) -> Iterator[str]:
    """The mistakes in one command line: an unknown recipe, command, option, make target or setting."""
    match = re.search(r"\btastemaker (?:train|check|doctor) (?:runs/)?([\w./-]+)", line)
    if match and match[1] not in {*list_recipes(), *local_files}:
        yield f"no recipe {match[1]}"
    if (match := re.search(r"\btastemaker plan ([\w-]+)", line)) and match[1] in UNPLANNED:
        yield f"plan refuses the small model of {match[1]}"
    if match := re.search(r"\btastemaker ([a-z-]+)(.*)", line):
        if match[1] not in COMMANDS:
            yield f"no command {match[1]}"
            return
        command = COMMANDS[match[1]]
        # The options of `vote learn` are those of its second word.
        command = vars(command).get("commands", {}).get(next(iter(match[2].split()), ""), command)
        known = {option for parameter in command.params for option in parameter.opts}
        yield from (f"no option {option}" for option in re.findall(r"--[\w-]+", match[2]) if option not in known)
    if (match := re.match(r"make ([\w-]+)", line)) and not re.search(rf"^{match[1]}:", MAKEFILE, re.MULTILINE):
        yield f"no target {match[1]}"
    recipe = next((word for word in line.split() if word in list_trainable_recipes()), "grpo-toy-flow")
    for override in re.findall(r"\s([a-z]+(?:\.[a-z]+)*=[\w./-]+)", line):
        try:
            load_any_config(recipe, [override])
        except ConfigError as error:
            yield str(error)


def test_tests_of_promises_exist() -> None:
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, function in named:
        assert f"def {function}(" in (ROOT / file).read_text("utf-8") if function else (ROOT / file).is_file()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`tests/" in line]
    promises = text[text.index("## What we promise") : text.index("## What we do not promise")]
    assert len(rows) == sum(line.startswith("| ") and line != "| promise | test |" for line in promises.splitlines())


def test_documented_commands_are_valid() -> None:
    wrong = []
    for page in PAGES:
        local_files = {path.name for path in page.parent.glob("*")} | set(
            FILE_NAME.findall(page.read_text(encoding="utf-8"))
        )
        wrong += [
            f"{page.name}: {line}: {mistake}"
            for line in console_lines(page)
            for mistake in find_mistakes(line, local_files)
        ]
    assert not wrong


def test_documented_recipes_load(tmp_path: Path) -> None:
    for page in PAGES:
        folder = tmp_path / page.stem
        folder.mkdir()
        files = write_named_blocks(page, folder)
        scripts = [path for path in files if path.suffix == ".py"]
        for path in scripts:
            compile(path.read_text(encoding="utf-8"), str(path), "exec")
        for path in files if not scripts else ():  # other recipes need the classes of their page
            if "runs/" not in path.read_text(encoding="utf-8"):  # nor is there a run to continue
                assert load_any_config(path).name == path.stem


def test_recipe_of_the_concepts_page_trains(tmp_path: Path) -> None:
    (recipe,) = write_named_blocks(ROOT / "docs/concepts.md", tmp_path)
    config = load(recipe, ["steps=2", "sample.every=0", "engine.device=cpu"])
    assert len(train_and_collect_rewards(config, tmp_path / "run")) == 2


def test_shell_scripts_parse() -> None:
    scripts = [text for page in PAGES for text in code_blocks(page, "bash")]
    assert any("#SBATCH" in script for script in scripts)
    for script in scripts:
        process = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert process.returncode == 0, process.stderr


def test_kubernetes_and_slurm_examples_start_the_server() -> None:
    page = ROOT / "docs/reward-server.md"
    (text,) = (text for text in code_blocks(page, "yaml") if "apiVersion" in text)
    service, replicas = yaml.safe_load_all(text)
    assert [each["kind"] for each in (service, replicas)] == ["Service", "StatefulSet"]
    spec, pod = replicas["spec"], replicas["spec"]["template"]
    labels = [service["spec"]["selector"], spec["selector"]["matchLabels"], pod["metadata"]["labels"]]
    assert spec["serviceName"] == service["metadata"]["name"] and labels[0] == labels[1] == labels[2]
    (container,) = pod["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    assert container["ports"] == [{"containerPort": port["port"]}]
    probes = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
    assert probes == [{"path": "/health", "port": port["port"]}] * 3
    args = container["args"]
    assert args[args.index("--token-env") + 1] == container["env"][0]["name"]
    urls = re.findall(r"http://([\w.-]+):(\d+)", page.read_text("utf-8").split("kind: StatefulSet")[1].split("##")[0])
    name = replicas["metadata"]["name"]
    hosts = [f"{name}-{i}.{service['metadata']['name']}" for i in range(spec["replicas"])]
    assert urls == [(host, str(port["port"])) for host in hosts]
    scripts = "".join(code_blocks(page, "bash")).replace("\\\n", " ")
    lines = [" ".join(args), *re.findall(r"tastemaker serve-reward [^;]*", scripts), *re.findall(r"-m (.*)", scripts)]
    assert len(lines) == 3 and [mistake for line in lines for mistake in find_mistakes(line, set())] == []


def test_torchrun_options_exist() -> None:
    documented = {
        o for text in BLOCK.findall((ROOT / "docs/scale.md").read_text()) for o in re.findall(r"--[\w-]+", text[1])
    }
    known = get_args_parser().format_help()
    other_options = {
        "--device",
        "--job-name",
        "--nodes",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--cpus-per-task",
        "--time",
    }
    for option in documented - other_options - {"--requeue", "--signal", "--open-mode"}:
        assert option in known, option


def test_readme_table_matches_supported_processes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| objective |") :].partition("\n\n")[0]
    header, _, *rows = re.findall(r"^\|(.*)\|$", table, re.MULTILINE)
    families = [cell.strip().replace("autoregressive", "causal") for cell in header.split("|")][1:]
    documented = {}
    for row in rows:
        names, *cells = (cell.strip() for cell in row.split("|"))
        for name in re.findall(r"`(\w+)`", names):
            documented[name] = dict(zip(families, cells, strict=True))
    processes = {
        family: load(f"grpo-toy-{family}" if family != "epsilon" else "ddpo-toy-epsilon").process for family in families
    }
    for name in OBJECTIVES:
        needs = OBJECTIVES.find(name).needs
        supported = {family: "yes" if isinstance(process, needs) else "-" for family, process in processes.items()}
        assert documented.pop(name) == supported, name
    assert not documented
