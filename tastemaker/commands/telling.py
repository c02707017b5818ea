"""What a bench found, from its results alone: a page with tables and pictures, and the marked part of another."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..bench.aggregate import Line, lines
from ..bench.cells import Plan
from ..bench.clips import clips
from ..bench.pictures import curves, overview, prices
from ..bench.results import Result, gathered
from ..bench.table import BEGIN, END, marked, section, spread
from ..registry import ConfigError

PAGE = "scoreboard.md"


def tell(plan: Plan, source: Path, write: Path | None, console: Console) -> None:
    """Write the page beside the results, and into the page asked for."""
    results = gathered(source)
    found = lines(results, plan)
    if not found:
        raise ConfigError(f"{source} holds no result of a cell of {plan.name} yet; run the bench first")
    own = (source if source.is_dir() else source.parent) / PAGE
    pages = {own: f"# {plan.name}\n\n{BEGIN}\n{END}\n"}
    if write is not None:
        if not write.is_file():
            raise ConfigError(f"--write: there is no page {write}; expected one with the lines '{BEGIN}' and '{END}'")
        pages[write] = write.read_text(encoding="utf-8")
    for page, text in pages.items():
        folder = page.with_suffix("")
        page.write_text(marked(text, section(found, results, folder.name, clips(results)), str(page)), encoding="utf-8")
        draw(found, results, plan, folder)
    console.print(table(found))
    told = " and ".join(str(page) for page in pages)
    console.print(f"the scoreboard is {told}", highlight=False, markup=False, soft_wrap=True)


def draw(found: list[Line], results: list[Result], plan: Plan, folder: Path) -> None:
    """The pictures of a page."""
    aims = {name: cell.aim.score for name, cell in plan.cells.items() if cell.aim and cell.aim.score}
    pictures = {"overview": overview(found, aims)}
    if any(line.samples for line in found):
        pictures["curves"] = curves(found, results)
    if any(line.searched for line in found):
        pictures["prices"] = prices(found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


def table(found: list[Line]) -> Table:
    """The least of it."""
    shown = Table("cell", "before", "after", "change", "control", "aim")
    for line in found:
        control = f"{line.control.mean:+.3f}" if line.control else "-"
        aim = "-" if line.missed is None else "[red]not reached[/]" if line.missed else "[green]reached[/]"
        change = spread(line.change, signed=True)
        shown.add_row(line.key, f"{line.before:.3f}", f"{line.after.mean:.3f}", change, control, aim)
    return shown
