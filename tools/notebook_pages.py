"""MkDocs hook: make a page of every notebook, with its text, code, outputs and pictures, and offer it for download.

`make docs` runs it after docs_pages.py; nothing that it generates is committed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
FOLDER = "notebooks"  # of the pages on the site
PICTURES = {"image/png": "png", "image/jpeg": "jpg"}
MAX_OUTPUT_LINES = 60


def make_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown of a notebook, and its pictures by file name."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(adapt_links(source))
        elif cell["cell_type"] == "code" and source:
            parts.append(f"```python\n{source}\n```")
            for output in cell.get("outputs", ()):
                parts += render_output(output, path.stem, pictures)
    download = (
        f"This page is a notebook that was executed. [Download it]({path.name}){{ download }} to run it yourself."
    )
    return "\n\n".join([parts[0], download, *parts[1:]]) + "\n", pictures


def render_output(output: Mapping[str, Any], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """Yield one output of a cell as Markdown: a picture, HTML or text. Pictures are added to `pictures`."""
    if output["output_type"] == "stream":
        yield render_text("".join(output["text"]))
        return
    if output["output_type"] == "error":
        raise ValueError(f"{name}.ipynb contains an error ({output['ename']}: {output['evalue']}); execute it again")
    data = output["data"]
    for kind, suffix in PICTURES.items():
        if kind in data:
            file = f"{name}-{len(pictures) + 1}.{suffix}"
            pictures[file] = base64.b64decode("".join(data[kind]))
            text = "".join(data.get("text/plain", "output"))
            yield f"![{escape(' '.join(text.split())).replace('[', '(').replace(']', ')')}]({file})"
            return
    if "text/html" in data:
        yield "".join(data["text/html"]).replace("\n", " ")  # one block for Markdown
    elif "text/markdown" in data:
        yield "".join(data["text/markdown"])
    elif "text/plain" in data:
        yield render_text("".join(data["text/plain"]))


def render_text(text: str) -> str:
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    if len(lines) > MAX_OUTPUT_LINES:
        lines = [*lines[:MAX_OUTPUT_LINES], f"... {len(lines) - MAX_OUTPUT_LINES} more lines"]
    content = "\n".join(lines)
    return f"```text\n{content}\n```" if content else ""


def adapt_links(text: str) -> str:
    """Rewrite links for the page: ../docs/guard.md is ../guard.md there, and other.ipynb is other.md."""
    text = re.sub(r"\]\(\.\./docs/([\w/.-]+\.md)", r"](../\1", text)
    return re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    files: dict[str, bytes] = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = make_page(path)
        config.extra["generated_pages"][f"{FOLDER}/{path.stem}.md"] = text
        files |= {f"{FOLDER}/{name}": content for name, content in pictures.items()}
        files[f"{FOLDER}/{path.name}"] = path.read_bytes()
    config.extra["notebook_files"] = files
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, content in config.extra["notebook_files"].items():
        files.append(File.generated(config, path, content=content))
    return files
