"""The documentation reads well, and answers to common questions are at most two clicks from the README."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from docs_pages import BLOCK, PAGES, ROOT, code_blocks, find_links, heading_anchors

from tastemaker.config.load import load_any_config
from tastemaker.config.schema import RunConfig

README = ROOT / "README.md"
# Question: the words of its row in the README, the page that answers it, the heading there, words of the answer.
QUESTIONS = {
    "Which recipe for my 24 GB card?": ("docs/first-gpu-run.md", "which-recipe-fits", "| 24 GiB |"),
    "How do I add my reward?": ("docs/add-a-reward.md", "add-a-reward", "def redness(images, prompts, **metadata)"),
    "How do I know that it learns?": ("docs/get-started.md", "how-you-know-that-it-learns", "`reward/mean` rises"),
    "How do I resume?": ("docs/get-started.md", "resume", "Run the same command again"),
    "Where are my samples?": ("docs/get-started.md", "where-things-are", "`runs/NAME/samples`"),
    "How do I use my LoRA in ComfyUI?": ("docs/export.md", "your-lora-in-comfyui", "`models/loras`"),
    "What does `clip_range` do?": ("docs/choose-an-objective.md", "settings", "clipped to 1 ± `clip_range`"),
    "Which objective needs the fewest samples?": ("docs/choose-an-objective.md", "fewest-samples", "| `nft` | 15 k |"),
    "How do I run on 2 nodes?": ("docs/scale.md", "several-machines", "torchrun --nnodes"),
    "What is not verified?": ("docs/verification.md", "what-is-verified", "Published weights have not been loaded"),
}


@pytest.fixture(scope="module")
def text_check() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("text_check", ROOT / "tools/text_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["text_check"] = module  # its dataclass looks it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["text_check"]


def test_sentences_and_pages_are_short(text_check: ModuleType) -> None:
    pages = [text_check.read_page(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    assert sum(len(page.sentences) for page in pages) > 1000
    assert not text_check.find_faults(pages)


def test_text_check_finds_long_sentences_and_pages(text_check: ModuleType) -> None:
    long_sentence = " ".join(["Word"] * 36)
    for text in (f"{long_sentence}.", f"Short. {long_sentence}. Short.", f"- {long_sentence}\n- another item"):
        (fault,) = text_check.find_faults([text_check.read_page("page.md", text)])
        assert fault.startswith("page.md:1: 36 words")
    for text in (f"| {long_sentence} |", f"```\n{long_sentence}\n```", f"# {long_sentence}", "- item\n" * 40):
        assert not text_check.find_faults([text_check.read_page("page.md", text)])
    assert text_check.find_faults([text_check.read_page("page.md", "a\n\n" * 126)]) == ["page.md: 252 lines"]


@pytest.mark.parametrize(("word", "syllables"), [("take", 1), ("table", 2), ("reward", 2), ("objective", 3), ("4", 1)])
def test_syllables_are_counted(text_check: ModuleType, word: str, syllables: int) -> None:
    assert text_check.count_syllables(word) == syllables


def test_readme_fits_its_limit_of_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_linked_headings_exist() -> None:
    missing = []
    for page in PAGES:
        for path, anchor in find_links(page):
            if anchor and path.suffix == ".md" and anchor not in heading_anchors(path):
                missing.append(f"{page.name}: {path.name}#{anchor}")
    assert not missing


@pytest.mark.parametrize("question", QUESTIONS)
def test_question_is_answered_within_two_clicks(question: str) -> None:
    name, anchor, answer = QUESTIONS[question]
    (row,) = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {question} |")]
    link = f"({name}#{anchor})" if f"#{anchor})" in row else f"({name})"
    assert link in row
    page = (ROOT / name).read_text(encoding="utf-8")
    assert anchor in heading_anchors(ROOT / name)
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("#") and anchor in heading_slug(line))
    end = next((i for i, line in enumerate(lines[start + 1 :], start + 1) if line.startswith("## ")), len(lines))
    assert answer in "\n".join(lines[start : len(lines) if lines[start].startswith("# ") else end])


def heading_slug(line: str) -> str:
    return line.lstrip("# ").lower().replace(" ", "-")


def test_json_blocks_parse() -> None:
    for page in PAGES:
        for text in code_blocks(page, "json"):
            for line in text.splitlines():
                assert json.loads(line), page


def is_part_of_a_recipe(text: str) -> bool:
    return not text.startswith("# ") and set(yaml.safe_load(text)) <= set(RunConfig.__dataclass_fields__)


def test_parts_of_recipes_load(tmp_path: Path) -> None:
    """YAML blocks without a file name are sections of a recipe: they load as changes of one."""
    parts = [(page, text) for page in PAGES for text in code_blocks(page, "yaml") if is_part_of_a_recipe(text)]
    assert len(parts) >= 5
    for number, (_, text) in enumerate(parts):
        recipe = tmp_path / f"part{number}.yaml"
        recipe.write_text(f"extends: [grpo-toy-flow]\n{text}", encoding="utf-8")
        assert load_any_config(recipe).name == recipe.stem


def test_pages_begin_with_prose() -> None:
    """The first thing after the title says what the reader gets."""
    for page in PAGES:
        first = BLOCK.sub("```", page.read_text(encoding="utf-8")).split("\n\n")[1].strip()
        assert not first.startswith(("#", "|", "```", "-")), page.name
