"""The scripts that count the operations in docs/performance.md."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_operations_of_adapters_are_those_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lora_operations"])
    runpy.run_path(str(ROOT / "tools/lora_operations.py"), run_name="__main__")
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    fp32 = {row[1]: row[3:8] for row in rows if row[2] == "float32"}
    for kind in ("peft", "fused"):
        pairs = zip(fp32[f"{kind}, forward"], fp32[f"{kind}, backward"], strict=True)
        products, others, mebibytes, _, _ = (", ".join(pair) for pair in pairs)
        kept = fp32[f"{kind}, forward"][4]
        assert f"| {kind}: forward, backward | {products} | {others} | {mebibytes} | {kept} |" in PAGE
    rollouts = zip(*(fp32[f"{kind}, rollout"][:3] for kind in ("peft", "fused", "merged")), strict=True)
    assert f"| rollout: peft, fused, merged | {' | '.join(', '.join(cells) for cells in rollouts)} | |" in PAGE


@pytest.mark.slow
def test_prompt_work_of_sana_is_that_of_the_page() -> None:
    tool = runpy.run_path(str(ROOT / "tools/prompt_work.py"))
    tokens, total, prompt = tool["count_prompt_work"]("sana")
    assert f"| Sana, Sana-Sprint | {tokens} | {prompt / total:.2%} |".replace("%", " %") in PAGE
