"""Check how well the documentation reads: long sentences, long pages, and the Flesch-Kincaid grade of each page.

    python tools/text_check.py                       # README.md and docs/, one row for each page
    python tools/text_check.py docs/scale.md --list  # the long sentences of a page, with their lines
    python tools/text_check.py --revision v0.1       # the pages as they were at a commit

Code blocks, tables, headings and pictures do not count. The exit status is 1 if a page has more than 250 lines or a
sentence more than 35 words.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 35  # of a sentence
MAX_LINES = 250  # of a page
# A dot that ends no sentence: after these, and between digits.
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|cf|vs|Fig|Eq|Sec|No|al)\.")
SENTENCE_END = re.compile(r"(?<=[.!?:])[\")\]*_]*\s+(?=[\"(\[*_`]*[A-Z0-9`*\[(])|\n")
SKIPPED = re.compile(r"\s*(\||#|!\[|<|\{|---|===)")  # table rows, headings, pictures, HTML
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")


@dataclass
class PageText:
    """The prose of a page: its length in lines and its sentences with the line on which each starts."""

    name: str
    lines: int
    sentences: list[tuple[int, str]] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [word for _, sentence in self.sentences for word in sentence_words(sentence)]

    @property
    def long_sentences(self) -> list[tuple[int, int, str]]:
        """Line, number of words and text of each sentence over the limit."""
        counts = [(line, len(sentence_words(text)), text) for line, text in self.sentences]
        return [each for each in counts if each[1] > MAX_WORDS]

    @property
    def grade(self) -> float:
        """The Flesch-Kincaid grade: years of school that a reader needs."""
        words = self.words
        if not words:
            return 0.0
        syllables = sum(map(count_syllables, words))
        return 0.39 * len(words) / len(self.sentences) + 11.8 * syllables / len(words) - 15.59


def count_syllables(word: str) -> int:
    """Count groups of vowels, without a silent e at the end. At least one."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    groups = len(re.findall(r"[aeiouy]+", letters))
    if letters.endswith("e") and not letters.endswith(("le", "ee")) and groups > 1:
        groups -= 1
    return max(groups, 1)


def sentence_words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


def plain_text(markdown: str) -> str:
    """Remove Markdown's marks: links keep their label, inline code counts as one word."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", markdown)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", lambda match: re.sub(r"\s+", "_", match[0]), text)


def split_paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Each paragraph or list item outside code blocks, tables and headings, with the line on which it starts."""
    paragraph: list[str] = []
    start, in_code = 0, False
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = ""
        elif in_code:
            continue
        line = re.sub(r"^\s*(!!!|\?\?\?)\s*\w+\s*", "", line)
        item = LIST_ITEM.match(line)
        if not line.strip() or SKIPPED.match(line) or item:
            if paragraph:
                yield start, " ".join(paragraph)
            paragraph = []
            line = "" if SKIPPED.match(line) else line[item.end() :] if item else line
        if line.strip():
            start = start if paragraph else number
            paragraph.append(line.strip())


def read_page(name: str, markdown: str) -> PageText:
    page = PageText(name, len(markdown.splitlines()))
    for line, paragraph in split_paragraphs(markdown):
        text = ABBREVIATIONS.sub(lambda match: match[0].replace(".", ""), plain_text(paragraph))
        page.sentences += [(line, part.strip()) for part in SENTENCE_END.split(text) if sentence_words(part)]
    return page


def read_pages(paths: list[Path]) -> list[PageText]:
    files = [file for path in paths for file in (sorted(path.glob("**/*.md")) if path.is_dir() else [path])]
    return [read_page(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files]


def read_revision(revision: str) -> list[PageText]:
    """README.md and docs/ of a commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", revision, "README.md", "docs").split()
    return [read_page(name, git("show", f"{revision}:{name}")) for name in names if name.endswith(".md")]


def find_faults(pages: list[PageText]) -> list[str]:
    """Pages and sentences over the limits, as lines for a reader."""
    faults = [f"{page.name}: {page.lines} lines" for page in pages if page.lines > MAX_LINES]
    for page in pages:
        faults += [f"{page.name}:{line}: {count} words: {text}" for line, count, text in page.long_sentences]
    return faults


def print_table(pages: list[PageText]) -> None:
    print(f"{'page':34} {'lines':>5} {'words':>6} {'sentences':>9} {'words/sentence':>14} {'over 35':>7} {'grade':>5}")
    total = PageText("all", sum(page.lines for page in pages), [each for page in pages for each in page.sentences])
    for page in [*pages, total]:
        count = max(len(page.sentences), 1)
        row = f"{page.name:34} {page.lines:5} {len(page.words):6} {len(page.sentences):9}"
        print(f"{row} {len(page.words) / count:14.1f} {len(page.long_sentences):7} {page.grade:5.1f}")
    share = len(total.long_sentences) / max(len(total.sentences), 1)
    long_pages = sum(page.lines > MAX_LINES for page in pages)
    print(f"sentences over {MAX_WORDS} words: {share:.1%}; pages over {MAX_LINES} lines: {long_pages}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="pages or folders; README.md and docs/ if none is given")
    parser.add_argument("--list", action="store_true", help="print the long sentences and pages")
    parser.add_argument("--revision", help="check the pages of a commit instead")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.paths] or [ROOT / "README.md", ROOT / "docs"]
    pages = read_revision(options.revision) if options.revision else read_pages(paths)
    faults = find_faults(pages)
    if options.list:
        print("\n".join(faults))
    else:
        print_table(pages)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
