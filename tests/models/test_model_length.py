"""Models from diffusers stay short: what several of them need belongs into the shared files."""

from __future__ import annotations

import ast
import inspect
import io
import statistics
import tokenize
from pathlib import Path

from tastemaker.config.registries import MODELS
from tastemaker.models.pipeline_components import PublishedSpec

LAYOUT_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_code_lines(source: str) -> int:
    """Count lines without comments, docstrings, blank lines and the values assigned at the level of the module."""
    tree, left_out = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            left_out |= lines_of(node.body[0])
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            left_out |= lines_of(node)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({line for each in tokens if each.type not in LAYOUT_TOKENS for line in rows(each)} - left_out)


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def rows(token: tokenize.TokenInfo) -> range:
    return range(token.start[0], token.end[0] + 1)


def test_lines_of_code_are_counted() -> None:
    source = '''"""About."""\n\nimport math  # used below\n\nSIZES = {\n    "a": 1,\n}\n# why\n\n
def area(r: float) -> float:
    """Area."""
    text = """two
lines"""
    return math.pi * r**2 * len(text)
'''
    assert count_code_lines(source) == 5


def test_median_model_from_diffusers_is_short() -> None:
    specs = (MODELS.find(name, "model") for name in MODELS)
    files = {Path(inspect.getfile(spec)) for spec in specs if issubclass(spec, PublishedSpec)}
    counts = {path.stem: count_code_lines(path.read_text(encoding="utf-8")) for path in files}
    assert len(counts) > 20 and statistics.median(counts.values()) < 120, counts
    page = (Path(__file__).parents[2] / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    assert f"`z_image.py` has {counts['z_image']}." in page
