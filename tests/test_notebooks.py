"""The notebooks: their code runs at tiny size, they were executed, and their outputs are small."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tastemaker as tm

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 400_000
# Values for the names of the cell with the tag "parameters".
TINY = {
    "steps": 2,
    "batch_size": 4,
    "num_samples": 2,
    "num_groups": 2,
    "group_size": 2,
    "num_judged": 4,
    "num_shown": 2,
}


def read_code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)


def test_there_are_three_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"align-the-playground", "compare-objectives", "reward-hacking"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_executed_and_is_small(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    cells = read_code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/jpeg" in output.get("data", {}) for output in outputs) >= 3
    assert "/tmp/" not in path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_at_tiny_size(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("notebook_cells")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    figures = []
    for cell in read_code_cells(path):
        value = run_cell("".join(cell["source"]), namespace)
        if "parameters" in cell["metadata"].get("tags", ()):
            namespace.update({name: value for name, value in TINY.items() if name in namespace})
            assert namespace["steps"] == 2
        if isinstance(value, tm.Figure):
            figures.append(value)
    assert len(figures) >= 3 and all(min(figure.image.size) > 100 for figure in figures)
    assert any((tmp_path / "runs").glob("*/checkpoints/step-000002"))


def test_site_has_a_page_of_a_notebook_with_its_outputs(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("notebook_pages", FOLDER.parent / "tools/notebook_pages.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    picture = {"image/jpeg": base64.b64encode(b"pixels").decode(), "text/plain": "Figure('a [b]', 8x8)"}
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["reward 0.5\n"]},
        {"output_type": "display_data", "data": {"text/html": ["<div>\n", "bar</div>"]}},
        {"output_type": "execute_result", "data": picture},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "[guard](../docs/guard.md), [next](other.ipynb)"]},
        {"cell_type": "code", "source": ["tm.show(run)"], "outputs": outputs},
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, pictures = tool.make_page(path)
    assert text.startswith("# Title\n[guard](../guard.md), [next](other.md)\n")
    assert "```python\ntm.show(run)\n```" in text and "```text\nreward 0.5\n```" in text and "<div> bar</div>" in text
    assert pictures == {"one-1.jpg": b"pixels"} and "(one-1.jpg)" in text and "(one.ipynb)" in text
    cells[1]["outputs"] = [{"output_type": "error", "ename": "ValueError", "evalue": "no"}]
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(ValueError, match="execute it again"):
        tool.make_page(path)
