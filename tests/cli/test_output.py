"""Output of commands: plain text in pipes, narrow terminals, progress with rate and remaining time, next steps."""

from __future__ import annotations

import inspect
import io
import json
import re
from pathlib import Path

import pytest
from cli_runner import run_cli
from rich.console import Console
from typer.main import get_command

import tastemaker
from tastemaker.cli import app
from tastemaker.config.catalog import RECIPE_FAMILIES
from tastemaker.console import (
    BYTES,
    PIPE_COLUMNS,
    ProgressBar,
    Table,
    describe_progress,
    make_console,
    print_next_steps,
    show_status,
    track,
)

COMMANDS = {
    name: each
    for group, command in vars(get_command(app))["commands"].items()
    for name, each in {
        group: command,
        **{f"{group} {n}": c for n, c in vars(command).get("commands", {}).items()},
    }.items()
    if each.callback is not None
}
NOT_PLAIN = re.compile(r"[\u2500-\u257f\u2026\x1b]")  # box-drawing characters, an ellipsis and escape sequences


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def terminal(columns: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=columns, color_system=None, _environ={})


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def make_table() -> Table:
    table = Table("per GPU", "GiB", title="[bold]plan[/]", caption="1 GPU")
    table.add_row("weights " + "and more " * 12, "4.2")
    table.add_row("peak", "[red]43.5[/]")
    return table


def test_tables_are_plain_and_whole_in_pipes(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    assert console.width == PIPE_COLUMNS
    console.print(make_table())
    title, header, first, last, caption = capsys.readouterr().out.splitlines()
    assert (title, caption) == ("plan", "1 GPU") and not NOT_PLAIN.search(first)
    assert first.count("and more") == 12 and first.endswith("  4.2")
    assert header.index("GiB") == first.index("4.2") == last.index("43.5") and last.endswith("43.5")


@pytest.mark.parametrize("columns", [60, 120])
def test_tables_and_bars_fit_terminals(columns: int) -> None:
    console = terminal(columns)
    console.print(make_table())
    with ProgressBar(console) as bar:
        bar.start("extracting features", 1000, unit="images")
        bar.update(990)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text_of(console)).replace("\r", "\n").splitlines()
    assert "43.5" in text_of(console) and max(map(len, lines)) <= columns
    assert any("990/1000" in line for line in lines)


def test_results_are_printed_above_the_bar_or_to_the_pipe() -> None:
    bar_console, screen, pipe = terminal(60), terminal(60), Console(file=io.StringIO(), width=200)
    with ProgressBar(bar_console) as bar:
        bar.start("checking", 2)
        for console in (screen, pipe):
            bar.print_above("[green]pass[/]  ratio", console)
    assert text_of(pipe) == "pass  ratio\n" and text_of(screen) == ""
    assert re.search(r"\x1b\[2Kpass  ratio", text_of(bar_console))  # after the line of the bar is cleared


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_in_pipes_is_a_line_with_rate_and_remaining_time_every_30_seconds() -> None:
    console, clock = Console(file=io.StringIO(), width=200), Clock()
    with ProgressBar(console, clock) as bar:
        bar.start("scoring", 100, completed=40, unit="images")
        for done in range(41, 101):
            clock.now += 10.0
            bar.update(done)
        bar.start("report", 1)
        bar.update(1)
    lines = text_of(console).splitlines()
    assert len(lines) == 19 and lines[0] == "scoring  43/100  0.1 images/s  0:09:30 left"


def test_rates_are_readable_and_a_note_replaces_the_remaining_time() -> None:
    assert describe_progress(1, 4, "images", 1 / 60, 180) == "1/4  1 images/min  0:03:00 left"
    assert describe_progress(2e6, 3e9, BYTES, 5e6, 600) == "2.0 MB/3.0 GB  5.0 MB/s  0:10:00 left"
    assert describe_progress(1, 4, "", 2.0, 5, "about 3 min left") == "1/4  2/s  about 3 min left"
    assert describe_progress(3, None, "samples", None, None) == "3"


def test_progress_and_next_steps_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with show_status("measuring", make_console(stderr=True)):
        assert list(track(range(3), "counting", make_console(stderr=True))) == [0, 1, 2]
    print_next_steps("tastemaker demo")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "measuring ...\nnext:\n  tastemaker demo\n"
    monkeypatch.setenv("RANK", "1")
    print_next_steps("tastemaker demo")
    assert capsys.readouterr().err == ""


def test_json_is_unchanged_by_progress_and_next_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("list", "recipes", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) > 100


def test_check_is_plain_in_a_pipe_and_says_what_is_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("check", "grpo-toy-flow", "data.prompts=[a red, a blue]") == 0
    out, err = capsys.readouterr()
    assert not NOT_PLAIN.search(out + err) and "samples per step                   64" in out
    assert "tastemaker train grpo-toy-flow 'data.prompts=[a red, a blue]'" in err and "next:" not in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_is_next(name: str) -> None:
    source = inspect.getsource(COMMANDS[name].callback)
    # The first two serve until they are stopped; the others print it themselves, or are read by a program.
    elsewhere = {
        "serve-reward": "run_reward_server",
        "studio": "run_studio",
        "demo": "run_demo",
        "align": "print_alignment(",
    }
    elsewhere |= {"vote export": "export_votes", "vote stats": "summarize_session"}
    assert elsewhere.get(name, "print_next_steps(") in source


def test_one_module_makes_consoles_tables_and_bars() -> None:
    package = Path(tastemaker.__file__).parent
    made = re.compile(r"(?<![\w.])Console\(|from rich\.(progress|table) import|console\.status\(")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if made.search(path.read_text())}
    assert found == {"console.py", "training/loggers/progress.py"}  # the second one draws the display of a run


def test_recipes_fit_80_columns_without_being_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_cli("list", "recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    recipes = [line for line in lines if line.startswith("  ")]
    assert len(recipes) > 100 and all(re.fullmatch(r"  \S+  +\S.*\.", line) for line in recipes)
    assert max(map(len, lines)) <= 80 and not any("..." in line or "…" in line for line in lines)
    assert sum(line in RECIPE_FAMILIES.values() for line in lines) == len(RECIPE_FAMILIES)
