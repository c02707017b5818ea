"""The command lines of the guides run, in order, at tiny size and on the CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from docs_pages import ROOT, code_blocks, console_lines, write_named_blocks
from tiers import fast
from tiny_commands import SMALL_BATCH, make_tiny

from tastemaker.data.image_io import save_image

PAGES = [
    "choose-a-reward.md",
    "choose-an-objective.md",
    "concepts.md",
    "editing.md",
    "few-steps.md",
    "first-gpu-run.md",
    "get-started.md",
    "group-rewards.md",
    "migrate-ddpo.md",
    "migrate-flow-grpo.md",
    "own-prompts.md",
]
# Plans trace networks of billions of weights, and doctor and bench start processes: tests of their own run them.
NOT_RUN = re.compile(r"pip |make |tastemaker (plan|doctor|bench) ")


def write_inputs(page: Path, folder: Path) -> None:
    """The files that a reader of the page has: prompts, images, and the blocks of the page."""
    write_named_blocks(page, folder)
    for name in ("prompts.txt", "dataset/pickscore/train.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a red cat\na blue dog\na green bird\n" * 20, encoding="utf-8")
    images = ["pizza.png", "airplane.png", "airplane-night.png", "liked/a.png", "disliked/b.png"]
    for number, name in enumerate(images):
        (folder / name).parent.mkdir(exist_ok=True)
        save_image(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(number)), folder / name)
    if rows := code_blocks(page, "json"):
        (folder / "edits.jsonl").write_text(rows[0] * 8, encoding="utf-8")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that prepares a folder for a page and enters it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in ("redness", "draw"):
        monkeypatch.delitem(sys.modules, module, raising=False)

    def prepare(page: str) -> Path:
        write_inputs(ROOT / "docs" / page, tmp_path)
        return tmp_path

    return prepare


@pytest.mark.filterwarnings("ignore:--tiny. :UserWarning")
@pytest.mark.parametrize("page", fast(PAGES, "concepts.md"))
def test_commands_of_the_page_run(page: str, in_folder: Callable[[str], Path]) -> None:
    folder = in_folder(page)
    lines = [line for line in console_lines(ROOT / "docs" / page) if not NOT_RUN.match(line)]
    assert lines
    trained: dict[str, int] = {}
    for line in lines:
        steps = 2 + 2 * line.startswith("tastemaker train runs/")
        assert run_cli(*make_tiny(line, steps)) == 0, line
        if match := re.match(r"tastemaker train ([\w-]+)", line):
            trained[match[1]] = steps
    assert not trained or list((folder / "runs").glob("*/config.yaml"))


@pytest.mark.slow
def test_walk_from_a_folder_runs_on_a_cpu(in_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/from-folder-to-aligned.md"
    folder = in_folder(page.name)
    (block,) = [text for text in code_blocks(page, "console") if text.startswith("python draw.py")]
    draw, *commands = block.splitlines()
    monkeypatch.setattr(sys, "argv", [*draw.split()[1:2], "12"])
    exec(compile((folder / "draw.py").read_text(encoding="utf-8"), "draw.py", "exec"), {"__name__": "__main__"})
    for line in commands:
        arguments = make_tiny(line, 2)
        if arguments[0] == "train":  # the recipes are small themselves
            arguments = [word for word in arguments if word not in ("--tiny", "guard.every=0", *SMALL_BATCH)]
            arguments += ["batch_size=4"] if "vae" in line else ["batch.prompts=2"]
        assert run_cli(*arguments) == 0, line
    assert len(list((folder / "cats").glob("0*.png"))) == 4
    assert (folder / "runs/small-aligned/report.html").is_file()
