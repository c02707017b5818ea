"""Write the scoreboard of a bench from its results: a Markdown page with tables and figures."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...core.registry import ConfigError
from .aggregate import ScoreboardRow, build_rows
from .markdown_tables import BEGIN_MARK, END_MARK, format_interval, format_section, replace_section
from .motion_table import format_motion_table
from .plan import ScoreboardPlan
from .results import Result, load_results
from .svg_charts import cost_chart, curve_charts, overview_chart

SCOREBOARD_FILE = "scoreboard.md"


def write_scoreboard(plan: ScoreboardPlan, source: Path, write: Path | None, console: Console) -> None:
    """Write the page beside the results, and into the page asked for."""
    results = load_results(source)
    found = build_rows(results, plan)
    if not found:
        raise ConfigError(f"{source} holds no result of a cell of {plan.name} yet; run the bench first")
    own = (source if source.is_dir() else source.parent) / SCOREBOARD_FILE
    pages = {own: f"# {plan.name}\n\n{BEGIN_MARK}\n{END_MARK}\n"}
    if write is not None:
        if not write.is_file():
            raise ConfigError(
                f"--write: there is no page {write}; expected one with the lines '{BEGIN_MARK}' and '{END_MARK}'"
            )
        pages[write] = write.read_text(encoding="utf-8")
    for page, text in pages.items():
        folder = page.with_suffix("")
        page.write_text(
            replace_section(text, format_section(found, results, folder.name, format_motion_table(results)), str(page)),
            encoding="utf-8",
        )
        draw_figures(found, results, plan, folder)
    console.print(table(found))
    told = " and ".join(str(page) for page in pages)
    console.print(f"the scoreboard is {told}", highlight=False, markup=False, soft_wrap=True)


def draw_figures(found: list[ScoreboardRow], results: list[Result], plan: ScoreboardPlan, folder: Path) -> None:
    """The pictures of a page."""
    aims = {name: cell.aim.score for name, cell in plan.cells.items() if cell.aim and cell.aim.score}
    pictures = {"overview": overview_chart(found, aims)}
    if any(line.samples for line in found):
        pictures["curves"] = curve_charts(found, results)
    if any(line.searched for line in found):
        pictures["prices"] = cost_chart(found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


def table(found: list[ScoreboardRow]) -> Table:
    """The least of it."""
    shown = Table("cell", "before", "after", "change", "control", "aim")
    for line in found:
        control = f"{line.control.mean:+.3f}" if line.control else "-"
        aim = "-" if line.missed is None else "[red]not reached[/]" if line.missed else "[green]reached[/]"
        change = format_interval(line.change, signed=True)
        shown.add_row(line.key, f"{line.before:.3f}", f"{line.after.mean:.3f}", change, control, aim)
    return shown
