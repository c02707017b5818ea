"""The scoreboard from synthetic results: rows, targets, tables, figures and the page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.cli import main
from tastemaker.core.registry import ConfigError
from tastemaker.evaluation.scoreboard.page import (
    BEGIN_MARK,
    END_MARK,
    format_count,
    format_motion_table,
    format_score,
    format_section,
    replace_section,
)
from tastemaker.evaluation.scoreboard.plan import CellTarget, ScoreboardPlan, list_jobs, load_plan
from tastemaker.evaluation.scoreboard.results import (
    Result,
    ScoreboardRow,
    bootstrap_interval_over_seeds,
    build_rows,
    first_and_last,
    load_results,
)
from tastemaker.evaluation.scoreboard.svg_charts import cost_chart, curve_charts, overview_chart, spread_labels
from tastemaker.playground.captions import TASKS

ROOT = Path(__file__).parent.parent.parent
BASES = {"flow": 0.48, "flow16": 0.34, "causal": 0.55, "masked": 0.63, "epsilon": 0.5, "video": 0.4}
GAINS = {
    "GRPO": 0.4,
    "reward gradient": 0.44,
    "NFT": 0.3,
    "SRPO": 0.01,
    "online DPO": 0.15,
    "DDPO": 0.2,
    "Direct-Align": 0.2,
}


def random_scores(level: float, seed: int, prompts: int = 84) -> dict[str, list[float]]:
    """Scores of prompts that are correct with a probability."""
    generator = torch.Generator().manual_seed(seed)
    return {tag: (torch.rand(prompts, generator=generator) < level).double().tolist() for tag in TASKS}


def evaluation(level: float, seed: int, calls: float = 10.0, diversity: float = 0.2) -> dict[str, Any]:
    rows = random_scores(level, seed)
    means = {tag: {"mean": sum(values) / len(values)} for tag, values in rows.items()}
    means["overall"] = {"mean": sum(mean["mean"] for mean in means.values()) / len(means)}
    header = {"benchmark": "playeval", "prompts": 240, "images": 480, "calls": calls}
    return {
        **header,
        "scores": {"strict": means},
        "rows": {"strict": rows},
        "frechet": 1 - level,
        "diversity": diversity,
    }


def synthetic_results() -> list[Result]:
    """Return made-up results of every cell of the playground plan."""
    results: list[Result] = json.loads(synthetic_results_json())
    return results


@cache
def synthetic_results_json() -> str:
    """Return the results as JSON, so that each test can change its copy."""
    plan, results = load_plan("playground"), []
    for number, job in enumerate(list_jobs(plan, list(plan.cells), (0, 1, 2), (0,))):
        cell = plan.cells[job.cell]
        base, gain = BASES.get(cell.family, 0.5), GAINS.get(cell.objective, 0.0)
        gain = 0.0 if job.kind == "control" else 0.05 * (job.num_candidates or 1) ** 0.5 if job.num_candidates else gain
        about = {"objective": cell.objective, "family": cell.family, "reward": cell.reward}
        calls = 10.0 * (job.num_candidates or 1) * (0.7 if cell.search and cell.search.type == "parm" else 1)
        result = {"key": job.key, "cell": job.cell, "kind": job.kind, "seed": job.seed, "n": job.num_candidates}
        result |= {"about": {**about, **({"search": cell.search.type} if cell.search else {})}, "fingerprint": "x"}
        result |= {
            "before": evaluation(base, list(BASES).index(cell.family)),
            "after": evaluation(min(base + gain, 0.97), number, calls),
        }
        result["environment"] = {"device": "synthetic", "precision": "bf16", "torch": "0"}
        if not cell.search:
            curve = [[step, 0.5 + gain * step / 200 + 0.02 * ((step * 7) % 5)] for step in range(1, 200, 4)]
            warned = [{"step": 150, "warning": "probable reward hacking: synthetic"}] if "lenient" in job.cell else []
            costs = {"steps": 200, "samples": 38_000 if "nft" in job.cell else 115_200, "seconds": 40.0, "calls": 9e6}
            rewards = {"reward": [0.5, 0.5 + gain], "guard": {}, "warnings": warned, "curves": {"reward/mean": curve}}
            result["training"] = {**costs, **rewards, "best": None}
        results.append(result)
    return json.dumps(results)


@pytest.fixture(scope="module")
def playground() -> ScoreboardPlan:
    return load_plan("playground")


@pytest.fixture(scope="module")
def rows(playground: ScoreboardPlan) -> list[ScoreboardRow]:
    return build_rows(synthetic_results(), playground)


def find_row(rows: list[ScoreboardRow], key: str) -> ScoreboardRow:
    return next(row for row in rows if row.key == key)


def missed_target(rows: list[ScoreboardRow], key: str) -> str:
    """The only missed target of a row."""
    (message,) = find_row(rows, key).missed_targets or ()
    return message


def test_row_is_the_mean_over_seeds_with_its_control(rows: list[ScoreboardRow]) -> None:
    grpo = find_row(rows, "grpo-flow")
    assert grpo.seeds == 3
    assert 0.3 < grpo.change.low < grpo.change.mean < grpo.change.high < 0.5
    assert grpo.control_change is not None and grpo.control_change.low < 0 < grpo.control_change.high + 0.1
    assert grpo.change.mean == pytest.approx(grpo.after.mean - grpo.before, abs=1e-9)


def test_interval_of_one_seed_is_over_prompts() -> None:
    values = torch.rand(1, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    interval, error = bootstrap_interval_over_seeds([values]), values.std() / 400**0.5
    assert interval.mean == pytest.approx(values.mean().item())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error.item(), rel=0.1)


def test_variation_over_seeds_widens_the_interval() -> None:
    equal_seeds = torch.full((3, 100), 0.5, dtype=torch.float64)
    varied_seeds = equal_seeds + torch.tensor([[-0.2], [0.0], [0.2]])
    assert bootstrap_interval_over_seeds([equal_seeds]).high == pytest.approx(0.5)
    assert bootstrap_interval_over_seeds([varied_seeds]).high > 0.55


def test_missed_targets_are_listed(rows: list[ScoreboardRow]) -> None:
    assert find_row(rows, "reward-gradient-flow").missed_targets == ()
    assert missed_target(rows, "grpo-flow").startswith("strict") and "0.9" in missed_target(rows, "grpo-flow")
    assert "below grpo-flow" in str(find_row(rows, "nft-flow").missed_targets)
    assert find_row(rows, "reward-gradient-flow16-lenient").missed_targets == ()
    assert find_row(rows, "best-of-flow-20").missed_targets is None


def test_rising_control_and_falling_score_miss_their_targets(playground: ScoreboardPlan) -> None:
    results = [each for each in synthetic_results() if each["cell"] in ("dpo-causal", "srpo-flow")]
    for result in results:
        result["after"] = evaluation(0.2 if result["cell"] == "srpo-flow" else 0.9, 7)
    rows = build_rows(results, playground)
    assert "control" in missed_target(rows, "dpo-causal")
    assert "strict falls" in str(find_row(rows, "srpo-flow").missed_targets)


def test_published_rows_are_reached_only_beyond_interval_and_control(playground: ScoreboardPlan) -> None:
    results: list[Result] = json.loads((ROOT / "docs/scoreboard/results.json").read_text())["results"]
    rows = [row for row in build_rows(results, playground) if row.missed_targets is not None]
    hacked = {cell for cell, settings in playground.cells.items() if settings.target and settings.target.guard_warns}
    reached = [row for row in rows if not row.missed_targets and row.cell not in hacked]
    assert len(reached) > 15 and all(row.change.low > 0 for row in reached)
    assert all(row.change.mean > row.control_change.mean for row in reached if row.control_change)
    assert missed_target(rows, "srpo-flow") == "its control rises as much"
    assert "interval" in missed_target(rows, "grpo-video") and "interval" in missed_target(rows, "ddpo-video")
    page = (ROOT / "docs/scoreboard.md").read_text()
    assert all(f"- {row.key}: " in page for row in rows if row.missed_targets)


def test_targets_of_the_plan_are_not_empty(playground: ScoreboardPlan) -> None:
    targets = [cell.target for cell in playground.cells.values() if cell.target]
    assert targets and all(target != CellTarget() for target in targets)


def test_figures_are_valid_svg_with_titles(playground: ScoreboardPlan, rows: list[ScoreboardRow]) -> None:
    figures = [overview_chart(rows, {"grpo-flow": 0.9}), cost_chart(rows), curve_charts(rows, synthetic_results())]
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert "nan" not in figure and "prefers-color-scheme: dark" in figure


def test_overview_shows_searches_with_most_candidates(rows: list[ScoreboardRow]) -> None:
    figure = overview_chart(rows, {})
    assert "best of 20" in figure and "best of 4" not in figure


def test_page_describes_measurements_and_missed_targets(playground: ScoreboardPlan, rows: list[ScoreboardRow]) -> None:
    text = format_section(rows, synthetic_results(), "scoreboard")
    assert "synthetic" in text and "240 prompts" in text
    assert f"- grpo-flow: {missed_target(rows, 'grpo-flow')}" in text
    assert "| reward-gradient-flow16-lenient | 150 | probable reward hacking: synthetic |" in text
    widths = {row.count("|") for row in text.split("Warnings of the guard")[0].splitlines() if row.startswith("|")}
    assert len(widths) == 1


def test_motion_table_compares_videos_at_equal_time(playground: ScoreboardPlan) -> None:
    results = [each for each in synthetic_results() if each["about"]["family"] in ("video", "flow16")]
    assert format_motion_table(results) is None
    for result in results:
        if result["cell"] in ("reward-gradient-video", "grpo-video") and result["kind"] == "after":
            is_slow = result["cell"] == "grpo-video"
            training: dict[str, Any] = result["training"]
            training["steps"], training["seconds"] = 100, 50.0 if is_slow else 25.0
            training["guard"] = {
                "reward/mean": [0.0, 1.0],
                "rewards/taste": [0.5, 0.4],
                "motion": [2.0, 1.0],
                "diversity": [0.3, 0.2],
            }
            training["curves"]["guard/reward/mean"] = [[0, 0.0], [50, 0.5], [100, 1.0]]
    table = format_motion_table(results)
    assert table is not None
    fast, slow_row = table.splitlines()[2:]
    assert "| reward gradient |" in fast and "| 1 |" in fast and "motion" in table.splitlines()[0]
    assert (
        "| GRPO |" in slow_row
        and "| 0.5 |" in slow_row
        and "2.000 -> 1.000" in slow_row
        and "taste .500 -> .400" in fast
    )
    assert "after 25 s" in table.splitlines()[0]
    assert "### Videos" in format_section(build_rows(results, playground), results, "scoreboard", table)


def test_only_the_marked_section_of_a_page_changes() -> None:
    page = f"# before\n\n{BEGIN_MARK}\nold\n{END_MARK}\n\nafter\n"
    updated = replace_section(page, "new", "page.md")
    assert updated == f"# before\n\n{BEGIN_MARK}\n\nnew\n\n{END_MARK}\n\nafter\n"
    assert replace_section(updated, "new", "page.md") == updated
    with pytest.raises(ConfigError, match=r"page\.md.*TM647"):
        replace_section("# nothing", "new", "page.md")


def test_summary_from_merged_results(tmp_path: Path) -> None:
    results = [each for each in synthetic_results() if each["about"]["family"] == "flow"]
    (tmp_path / "results.json").write_text(json.dumps({"format": 1, "results": results}))
    page = tmp_path / "page.md"
    page.write_text(f"# a page\n{BEGIN_MARK}\n{END_MARK}\nits end\n")
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "playground", "--summary", str(tmp_path / "results.json"), "--page", str(page)])
    assert exit_info.value.code == 0
    assert "page/overview.svg" in page.read_text() and page.read_text().endswith("its end\n")
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"overview.svg", "curves.svg", "costs.svg"}
    assert len(load_results(tmp_path)) == len(results)


def test_summary_of_no_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "playground", "--summary", str(tmp_path)])
    assert exit_info.value.code == 2 and "TM645" in capsys.readouterr().err


def test_number_formats() -> None:
    assert [format_score(x) for x in (0.4834, -0.02, 1.0, 0.9999, 12.5)] == [
        ".483",
        "-.020",
        "1.000",
        "1.000",
        "12.500",
    ]
    assert [format_count(x) for x in (12, 115_200, 8_960_000)] == ["12", "115 k", "8.96 M"]


def test_first_and_last_are_means_over_a_few_steps() -> None:
    assert first_and_last([(i, float(i)) for i in range(40)]) == [2.0, 37.0]
    assert first_and_last([(0, 1.0), (50, 2.0)]) == [1.0, 2.0] and first_and_last([]) == []


def test_missing_costs_are_not_averaged_as_zero(playground: ScoreboardPlan) -> None:
    results = [each for each in synthetic_results() if each["cell"] == "best-of-masked" and each["n"] == 20]
    for each in results[1:]:
        each["after"] |= {"verifier_calls": 20.0, "flops": 1e9}
    (row,) = build_rows(results, playground)
    assert (row.seeds, row.judge_calls, row.flops) == (3, 20, 1e9)


def test_baseline_target_of_a_search_limits_network_calls(playground: ScoreboardPlan) -> None:
    results = [each for each in synthetic_results() if each["cell"] in ("best-of-masked", "parm-late-masked")]
    late = [each for each in results if each["cell"] == "parm-late-masked"]
    for calls, fragment in ((140.0, "0.70"), (120.0, "")):
        for each in late:
            each["after"] |= {"calls": calls, "rows": {"strict": random_scores(1.0, 0)}}
        row = find_row(build_rows(results, playground), "parm-late-masked-14")
        assert len(row.missed_targets or ()) == bool(fragment) and fragment in "".join(row.missed_targets or ())
    assert "best-of-masked-20" in missed_target(build_rows(late, playground), "parm-late-masked-14")


def test_labels_do_not_overlap() -> None:
    names = [(100.0, 80.0, "one search", "middle"), (110.0, 74.0, "another", "middle"), (400.0, 78.0, "far", "start")]
    placed = {text: (x, y) for x, y, text, _ in spread_labels(names)}
    assert placed["one search"] == (100, 80) and placed["far"] == (400, 78)
    assert placed["another"] == (110, 66)
