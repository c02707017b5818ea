"""From results that somebody made up to a table, pictures and a page."""

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
from tastemaker.evaluation.scoreboard.aggregate import ScoreboardRow, bootstrap_interval_over_seeds, build_rows
from tastemaker.evaluation.scoreboard.markdown_tables import (
    BEGIN_MARK,
    END_MARK,
    format_count,
    format_score,
    format_section,
    replace_section,
)
from tastemaker.evaluation.scoreboard.motion_table import format_motion_table
from tastemaker.evaluation.scoreboard.plan import CellTarget, ScoreboardPlan, list_jobs, load_plan
from tastemaker.evaluation.scoreboard.results import Result, first_and_last, load_results
from tastemaker.evaluation.scoreboard.svg_charts import cost_chart, curve_charts, overview_chart, spread_labels
from tastemaker.playground.captions import TASKS

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


def marks(level: float, seed: int, prompts: int = 84) -> dict[str, list[float]]:
    """Scores of prompts that are right so often."""
    chance = torch.Generator().manual_seed(seed)
    return {tag: (torch.rand(prompts, generator=chance) < level).double().tolist() for tag in TASKS}


def side(level: float, seed: int, calls: float = 10.0, spread: float = 0.2) -> dict[str, Any]:
    rows = marks(level, seed)
    means = {tag: {"mean": sum(values) / len(values)} for tag, values in rows.items()}
    means["overall"] = {"mean": sum(mean["mean"] for mean in means.values()) / len(means)}
    told = {"benchmark": "playeval", "prompts": 240, "pictures": 480, "calls": calls}
    return {**told, "scores": {"strict": means}, "rows": {"strict": rows}, "frechet": 1 - level, "diversity": spread}


def made_up() -> list[Result]:
    """Of every cell of the playground what might have come of it; nobody has measured any of this."""
    results: list[Result] = json.loads(written())
    return results


@cache
def written() -> str:
    """These results as JSON, so that a test may change its copy."""
    found, told = load_plan("playground"), []
    for place, job in enumerate(list_jobs(found, list(found.cells), (0, 1, 2), (0,))):
        cell = found.cells[job.cell]
        base, gain = BASES.get(cell.family, 0.5), GAINS.get(cell.objective, 0.0)
        gain = 0.0 if job.kind == "control" else 0.05 * (job.n or 1) ** 0.5 if job.n else gain
        about = {"objective": cell.objective, "family": cell.family, "reward": cell.reward}
        calls = 10.0 * (job.n or 1) * (0.7 if cell.search and cell.search.type == "parm" else 1)
        result = {"key": job.key, "cell": job.cell, "kind": job.kind, "seed": job.seed, "n": job.n}
        result |= {"about": {**about, **({"search": cell.search.type} if cell.search else {})}, "fingerprint": "x"}
        result |= {
            "before": side(base, list(BASES).index(cell.family)),
            "after": side(min(base + gain, 0.97), place, calls),
        }
        result["environment"] = {"device": "nothing (made up)", "precision": "bf16", "torch": "0"}
        if not cell.search:
            curve = [[step, 0.5 + gain * step / 200 + 0.02 * ((step * 7) % 5)] for step in range(1, 200, 4)]
            warned = [{"step": 150, "warning": "probable reward hacking: made up"}] if "lenient" in job.cell else []
            paid = {"steps": 200, "samples": 38_000 if "nft" in job.cell else 115_200, "seconds": 40.0, "calls": 9e6}
            told_of = {"reward": [0.5, 0.5 + gain], "guard": {}, "warnings": warned, "curves": {"reward": curve}}
            result["training"] = {**paid, **told_of, "best": None}
        told.append(result)
    return json.dumps(told)


@pytest.fixture(scope="module")
def playground() -> ScoreboardPlan:
    return load_plan("playground")


@pytest.fixture(scope="module")
def found(playground: ScoreboardPlan) -> list[ScoreboardRow]:
    return build_rows(made_up(), playground)


def line(found: list[ScoreboardRow], key: str) -> ScoreboardRow:
    return next(each for each in found if each.key == key)


def test_a_cell_is_the_mean_of_its_seeds_with_its_control_beside_it(found: list[ScoreboardRow]) -> None:
    grpo = line(found, "grpo-flow")
    assert grpo.seeds == 3
    assert 0.3 < grpo.change.low < grpo.change.mean < grpo.change.high < 0.5
    assert grpo.control is not None and grpo.control.low < 0 < grpo.control.high + 0.1
    assert grpo.change.mean == pytest.approx(grpo.after.mean - grpo.before, abs=1e-9)


def test_an_interval_of_one_seed_is_that_of_its_prompts() -> None:
    values = torch.rand(1, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    told, error = bootstrap_interval_over_seeds([values]), values.std() / 400**0.5
    assert told.mean == pytest.approx(values.mean().item())
    assert told.high - told.low == pytest.approx(2 * 1.96 * error.item(), rel=0.1)


def test_seeds_that_differ_widen_the_interval() -> None:
    alike = torch.full((3, 100), 0.5, dtype=torch.float64)
    apart = alike + torch.tensor([[-0.2], [0.0], [0.2]])
    assert bootstrap_interval_over_seeds([alike]).high == pytest.approx(0.5)
    assert bootstrap_interval_over_seeds([apart]).high > 0.55


def test_aims_are_held_against_what_was_measured(found: list[ScoreboardRow]) -> None:
    assert line(found, "reward-gradient-flow").missed == ()
    assert line(found, "grpo-flow").missed == ("strict 0.9 was aimed at",)
    assert line(found, "nft-flow").missed is not None and "below" in str(line(found, "nft-flow").missed)
    assert line(found, "reward-gradient-flow16-lenient").missed == ()
    assert line(found, "best-of-flow-20").missed is None


def test_a_rising_control_and_a_falling_score_miss_their_aims(playground: ScoreboardPlan) -> None:
    results = [each for each in made_up() if each["cell"] in ("dpo-causal", "srpo-flow")]
    for result in results:
        result["after"] = side(0.2 if result["cell"] == "srpo-flow" else 0.9, 7)
    told = build_rows(results, playground)
    assert line(told, "dpo-causal").missed == ("its control rises as much",)
    assert line(told, "srpo-flow").missed is not None and "strict falls" in str(line(told, "srpo-flow").missed)


def test_every_aim_of_the_plan_is_one_that_can_be_missed(playground: ScoreboardPlan) -> None:
    asked = [cell.aim for cell in playground.cells.values() if cell.aim]
    assert asked and all(aim != CellTarget() for aim in asked)


def test_the_pictures_are_whole_and_in_words_too(playground: ScoreboardPlan, found: list[ScoreboardRow]) -> None:
    for picture in (overview_chart(found, {"grpo-flow": 0.9}), cost_chart(found), curve_charts(found, made_up())):
        root = ElementTree.fromstring(picture)
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert "nan" not in picture and "prefers-color-scheme: dark" in picture


def test_the_overview_shows_of_a_search_the_largest(found: list[ScoreboardRow]) -> None:
    shown = overview_chart(found, {})
    assert "best of 20" in shown and "best of 4" not in shown


def test_the_page_says_what_was_measured_and_what_was_not_reached(
    playground: ScoreboardPlan, found: list[ScoreboardRow]
) -> None:
    text = format_section(found, made_up(), "scoreboard")
    assert "nothing (made up)" in text and "240 prompts" in text
    assert "- grpo-flow: strict 0.9 was aimed at" in text
    assert "- reward-gradient-flow16-lenient, step 150: probable reward hacking" in text
    widths = {row.count("|") for row in text.split("### Task by task")[0].splitlines() if row.startswith("|")}
    assert len(widths) == 1


def test_clips_have_a_table_of_their_motion_at_equal_time(playground: ScoreboardPlan) -> None:
    results = [each for each in made_up() if each["about"]["family"] in ("video", "flow16")]
    assert format_motion_table(results) is None
    for result in results:
        if result["cell"] in ("reward-gradient-video", "grpo-video") and result["kind"] == "after":
            slow = result["cell"] == "grpo-video"
            told: dict[str, Any] = result["training"]
            told["steps"], told["seconds"] = 100, 50.0 if slow else 25.0
            told["guard"] = {
                "reward": [0.0, 1.0],
                "reward/taste": [0.5, 0.4],
                "motion": [2.0, 1.0],
                "diversity": [0.3, 0.2],
            }
            told["curves"]["guard/reward"] = [[0, 0.0], [50, 0.5], [100, 1.0]]
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
    assert "### Clips" in format_section(build_rows(results, playground), results, "scoreboard", table)


def test_only_the_marked_part_of_a_page_changes() -> None:
    page = f"# before\n\n{BEGIN_MARK}\nold\n{END_MARK}\n\nafter\n"
    once = replace_section(page, "new", "page.md")
    assert once == f"# before\n\n{BEGIN_MARK}\n\nnew\n\n{END_MARK}\n\nafter\n"
    assert replace_section(once, "new", "page.md") == once
    with pytest.raises(ConfigError, match="no place for the results"):
        replace_section("# nothing", "new", "page.md")


def test_one_file_of_results_tells_everything_elsewhere(tmp_path: Path) -> None:
    results = [each for each in made_up() if each["about"]["family"] == "flow"]
    (tmp_path / "results.json").write_text(json.dumps({"format": 1, "results": results}))
    page = tmp_path / "page.md"
    page.write_text(f"# a page\n{BEGIN_MARK}\n{END_MARK}\nits end\n")
    with pytest.raises(SystemExit) as left:
        main(["bench", "playground", "--summary", str(tmp_path / "results.json"), "--write", str(page)])
    assert left.value.code == 0
    assert "page/overview.svg" in page.read_text() and page.read_text().endswith("its end\n")
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"overview.svg", "curves.svg", "prices.svg"}
    assert len(load_results(tmp_path)) == len(results)


def test_nothing_measured_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "playground", "--summary", str(tmp_path)])
    assert left.value.code == 2 and "run the bench first" in capsys.readouterr().err


def test_numbers_are_short() -> None:
    assert [format_score(x) for x in (0.4834, -0.02, 1.0, 0.9999, 12.5)] == [
        ".483",
        "-.020",
        "1.000",
        "1.000",
        "12.500",
    ]
    assert [format_count(x) for x in (12, 115_200, 8_960_000)] == ["12", "115 k", "8.96 M"]


def test_the_ends_of_a_curve_are_means_of_a_few_steps() -> None:
    assert first_and_last([(i, float(i)) for i in range(40)]) == [2.0, 37.0]
    assert first_and_last([(0, 1.0), (50, 2.0)]) == [1.0, 2.0] and first_and_last([]) == []


def test_what_older_measurements_do_not_say_is_no_zero_in_the_mean(playground: ScoreboardPlan) -> None:
    results = [each for each in made_up() if each["cell"] == "best-of-masked" and each["n"] == 20]
    for each in results[1:]:
        each["after"] |= {"judged": 20.0, "flops": 1e9}
    (told,) = build_rows(results, playground)
    assert (told.seeds, told.judged, told.flops) == (3, 20, 1e9)


def test_a_search_that_aims_at_anothers_score_is_held_to_a_share_of_its_calls(playground: ScoreboardPlan) -> None:
    results = [each for each in made_up() if each["cell"] in ("best-of-masked", "parm-late-masked")]
    late = [each for each in results if each["cell"] == "parm-late-masked"]
    for calls, missed in ((140.0, "with 0.70 of its calls"), (120.0, "")):
        for each in late:
            each["after"] |= {"calls": calls, "rows": {"strict": marks(1.0, 0)}}
        told = line(build_rows(results, playground), "parm-late-masked-14")
        assert told.missed == ((missed,) if missed else ())
    assert line(build_rows(late, playground), "parm-late-masked-14").missed == ("best-of-masked-20 is not measured",)


def test_names_that_would_cover_one_another_stand_apart() -> None:
    names = [(100.0, 80.0, "one search", "middle"), (110.0, 74.0, "another", "middle"), (400.0, 78.0, "far", "start")]
    placed = {words: (x, y) for x, y, words, _ in spread_labels(names)}
    assert placed["one search"] == (100, 80) and placed["far"] == (400, 78)
    assert placed["another"] == (110, 66)
