"""`tastemaker init` writes recipes that pass `check`, and overwrites nothing unasked."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cli_runner import run_cli

from tastemaker.cli import EXIT_USAGE
from tastemaker.config.check import find_problems
from tastemaker.config.init import GOALS, MODELS, make_starter_files
from tastemaker.config.load import load
from tastemaker.config.recipes import list_trainable_recipes

ALL_STARTS = [
    (hardware, model, goal)
    for model, choice in MODELS.items()
    for hardware, starts in choice.starts.items()
    for goal in starts
]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(("hardware", "model", "goal"), ALL_STARTS, ids="-".join)
def test_every_answer_gives_a_recipe_without_problems(hardware: str, model: str, goal: str) -> None:
    path = Path(f"{hardware}-{model}-{goal}.yaml")
    made = make_starter_files(hardware, model, goal, path)
    made.write()
    start = MODELS[model].starts[hardware][goal]
    assert start.recipe in list_trainable_recipes() and goal in GOALS
    config, base = load(path), load(start.recipe)
    assert find_problems(config, 8 if hardware == "cluster" else 1) == []
    assert config.name == path.stem and config.steps == base.steps and config.model == base.model
    trained = {name for name, reward in config.rewards.items() if reward.weight}
    assert trained == ({"own"} if goal == "own" else {name for name, each in base.rewards.items() if each.weight})
    if not start.settings and goal != "own":
        assert (config.optim, config.batch, config.objective) == (base.optim, base.batch, base.objective)
    assert f"tastemaker check {path}" in made.next_commands and str(path) in made.next_commands[-1]


def test_questions_are_asked_and_files_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("laptop\nnothing\n4\n"))  # the model is the only one for a laptop
    assert run_cli("init") == 0
    output = capsys.readouterr()
    assert "Expected a number" in output.out and "my_recipe_reward.py" in output.err
    recipe = Path("my-recipe.yaml")
    assert "extends: [nft-playground]" in recipe.read_text() and "# data: {type: prompt_file" in recipe.read_text()
    assert run_cli("check", "my-recipe.yaml") == 0
    assert "no problems found" in capsys.readouterr().out

    recipe.write_text("kept")
    answers = ["--hardware", "laptop", "--model", "playground", "--goal", "prompt"]
    assert run_cli("init", *answers) == EXIT_USAGE
    assert "--force" in capsys.readouterr().err and recipe.read_text() == "kept"
    monkeypatch.setattr("sys.stdin", io.StringIO("1\nn\n"))
    assert run_cli("init", *answers[:4]) != 0
    assert recipe.read_text() == "kept"
    assert run_cli("init", *answers, "--force") == 0
    assert recipe.read_text() != "kept"


@pytest.mark.parametrize(
    ("answers", "fragments"),
    [
        (("toaster", "playground", "prompt"), ("--hardware", "laptop")),
        (("laptop", "flux", "preference"), ("--model", "without a GPU")),
        (("gpu", "sdxl", "motion"), ("--goal", "preference")),
    ],
)
def test_impossible_answers_are_refused(
    answers: tuple[str, str, str], fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for pair in zip(("--hardware", "--model", "--goal"), answers, strict=True) for word in pair]
    assert run_cli("init", *options) == EXIT_USAGE
    error = capsys.readouterr().err
    assert all(fragment in error for fragment in fragments)
    assert not Path("my-recipe.yaml").exists()
