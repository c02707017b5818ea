"""Read the pages of the documentation: code blocks, command lines, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")


def code_blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def write_named_blocks(page: Path, folder: Path) -> list[Path]:
    """Write every code block that starts with a file name to that file, and return the files."""
    files = []
    for _, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name := FILE_NAME.match(text):
            path = folder / name[1]
            path.write_text(text, encoding="utf-8")
            files.append(path)
    return files


def console_lines(page: Path) -> Iterator[str]:
    """Every line of every console block, with continuation lines joined."""
    for text in code_blocks(page, "console"):
        yield from text.replace("\\\n", " ").splitlines()


def heading_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs form them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def find_links(page: Path) -> Iterator[tuple[Path, str]]:
    """File and anchor of every link to a file of the repository; the anchor is empty if there is none."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        yield (page.parent / path).resolve() if path else page, anchor
