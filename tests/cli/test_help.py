"""Help texts: groups, examples, narrow terminals, --version and suggestions for mistakes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from cli_runner import run_cli
from typer.main import get_command

from tastemaker import __version__
from tastemaker.cli import EXIT_USAGE, app
from tastemaker.cli.components import fit_recipe
from tastemaker.cli.options import PANELS
from tastemaker.config.recipes import list_recipes, list_trainable_recipes
from tastemaker.data.prompts import PromptFile

COMMANDS = vars(get_command(app))["commands"]
BOX = re.compile(r"[\u2500-\u257f\x1b]")  # box characters and escape sequences


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--version") == 0
    assert capsys.readouterr().out == f"tastemaker {__version__}\n"


@pytest.mark.parametrize("columns", [60, 120])
def test_piped_help_and_lists_are_plain_and_narrow(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lists = [["list", kind] for kind in ("recipes", "models", "objectives", "prompts")]
    for arguments in (["--help"], *lists, *([name, "--help"] for name in COMMANDS)):
        assert run_cli(*arguments) == 0
        output = capsys.readouterr().out
        assert not BOX.search(output), arguments
        wide = [line for line in output.splitlines() if len(line) > columns and not re.fullmatch(r"\s+\S+", line)]
        assert wide == [], arguments
    assert run_cli("--help") == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n{panel}:\n") for panel in PANELS]
    assert places == sorted(places)
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_starts_with_a_sentence_and_ends_with_an_example(name: str) -> None:
    command = COMMANDS[name]
    assert command.rich_help_panel in PANELS
    assert re.match(r"[A-Z][^.]+", command.help) and len(command.help.split("\n\n")[0]) < 200
    prefix, first, *arguments = shlex.split(command.epilog)
    assert (prefix, first, arguments[0]) == ("Example:", "tastemaker", name) and "\n" not in command.epilog
    command.make_context(name, arguments[1:])  # raises if an option or a value is wrong
    if name in ("train", "sweep", "check", "plan", "doctor"):
        assert arguments[1] in list_trainable_recipes()


def test_recipes_are_grouped_and_filtered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def list_names(*filters: str) -> list[str]:
        assert run_cli("list", "recipes", *filters) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 80 for line in lines)
        return [line.split()[0] for line in lines if line.startswith("  ")]

    assert sorted(list_names()) == sorted(list_trainable_recipes())
    flux = list_names("--objective", "grpo", "--model", "flux")
    assert "dancegrpo-flux" in flux and "mixgrpo-flux" in flux and "srpo-flux-hps" not in flux
    on_cpu = list_names("--device", "cpu")
    assert "grpo-toy-flow" in on_cpu and "nft-playground" in on_cpu and not any("flux" in name for name in on_cpu)
    assert all(not name.startswith("ddpo") for name in list_names("--objective", "dpo"))
    assert run_cli("list", "recipes", "--model", "flux", "--json") == 0
    assert {"name", "family", "description"} == set(json.loads(capsys.readouterr().out)[0])
    assert run_cli("list", "recipes", "--model", "nothing") == EXIT_USAGE
    assert run_cli("list", "models", "--model", "flux") == EXIT_USAGE
    assert fit_recipe("VADER on Wan with LoRA. Reward: HPS v2.1.", 30) == "VADER. Reward: HPS v2.1."


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["check", "grpo-toy-flow", "lr=1e-3"], "did you mean 'optim.lr'?"),
        (["check", "grpo-toy-flow", "noise_level=1"], "did you mean 'process.dynamics.noise_level'?"),
        (["check", "grpo-toy-flow", "prompts=4"], "'data.prompts' or 'batch.prompts'"),
        (["train", "runs/grpo-toy-flow"], "run directory runs/grpo-toy-flow does not exist"),
        (["train", "empty"], "empty is not a run directory"),
        (["train", "models/flxu"], "did you mean 'models/flux'?"),
        (["train", "flux-grpo"], "dancegrpo-flux"),
    ],
)
def test_mistakes_have_useful_suggestions(
    arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert run_cli(*arguments) == EXIT_USAGE
    error = " ".join(capsys.readouterr().err.split())
    assert fragment in error
    named = [name for name in list_recipes() if re.search(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", error)]
    assert len(named) <= 5
    if "run directory" in fragment:
        assert "did you mean" not in error and "nearest" not in error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"caption": "a red", "id": 3}\n{"caption": "a blue"}\n'),
        ("p.csv", "id,caption\n3,a red\n4,a blue\n"),
    ],
)
def test_prompt_file_takes_captions(name: str, text: str) -> None:
    Path(name).write_text(text)
    data = PromptFile(Path(name)).load(0)
    assert data.prompts == ("a red", "a blue") and set(data.metadata[0]) == {"id"}
