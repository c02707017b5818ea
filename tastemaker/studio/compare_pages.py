"""Runs and checkpoints side by side: samples of the same prompts, curves, settings and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..config.settings_diff import IGNORED_KEYS, flatten_settings
from .events import MAX_RUNS
from .run_index import RunIndex
from .run_view import RunView, SampleCell, make_score_tables
from .sample_files import GridFile

if TYPE_CHECKING:
    from .app import Studio

NAVIGATION = ("Compare", "/compare")
MAX_PROMPTS = 64
MAX_CHOICES = 200
MAX_SETTINGS = 100


@dataclass(frozen=True)
class ComparedItem:
    """A run, or the samples of one of its steps."""

    view: RunView
    step: int | None  # None for the newest
    color: int  # index of the run among those compared

    @property
    def grid(self) -> GridFile | None:
        grids = self.view.studio.index.samples(self.view.id).grids
        return grids.get(max(grids, default=-1) if self.step is None else self.step)

    @property
    def steps(self) -> list[int]:
        """The steps that have samples, the newest first."""
        return sorted(self.view.studio.index.samples(self.view.id).grids, reverse=True)

    @property
    def label(self) -> str:
        grid = self.grid
        return f"{self.view.id}, step {grid.grid.step}" if grid else self.view.id


def routes(studio: Studio) -> list[Route]:
    def render_comparison(request: Request) -> Response:
        items = read_items(studio, request.query_params.getlist("item"))
        views = {item.view.id: item.view for item in items}
        reports = {f"{id}: {name}": report for id, view in views.items() for name, report in view.evaluations().items()}
        seeds = {str(view.config.get("seed", "unknown")) for view in views.values()}
        context = {
            "items": items,
            "runs": list(views),
            "choices": studio.index.summaries()[:MAX_CHOICES],
            "rows": pair_samples(items),
            "tables": make_score_tables(reports),
            "settings": compare_settings(list(views.values())),
            "same_seed": len(seeds) == 1,
        }
        return studio.render(request, "compare.html", context)

    async def show_comparison(request: Request) -> Response:
        return await run_in_threadpool(render_comparison, request)

    return [Route("/compare", show_comparison)]


def read_items(studio: Studio, texts: Sequence[str]) -> list[ComparedItem]:
    """Read what to compare: RUN, or RUN@STEP. At most twelve."""
    if len(texts) > MAX_RUNS:
        raise HTTPException(400, f"at most {MAX_RUNS} runs or checkpoints can be compared at once [TM1379]")
    items: list[ComparedItem] = []
    colors: dict[str, int] = {}
    for text in dict.fromkeys(each for each in texts if each):
        id, step = split_item(studio.index, text)
        color = colors.setdefault(id, len(colors))
        items.append(ComparedItem(RunView(studio, id), step, color))
    return items


def split_item(index: RunIndex, text: str) -> tuple[str, int | None]:
    """Split RUN@STEP. The name of a run may itself contain an @."""
    id, _, step = text.rpartition("@")
    if id and step.isascii() and step.isdigit() and len(step) <= 12 and text not in index.directories():
        return id, int(step)
    return text, None


def pair_samples(items: Sequence[ComparedItem]) -> list[tuple[str, list[SampleCell | None]]]:
    """Return each prompt with its sample in each item. Prompts that more items have come first."""
    found: dict[tuple[str, int], list[SampleCell | None]] = {}
    for number, item in enumerate(items):
        if (file := item.grid) is None:
            continue
        seen: dict[str, int] = {}
        for index in range(len(file.grid.boxes)):
            cell = SampleCell(item.view.id, file, index)
            # A prompt that occurs twice is paired by its occurrence, because each has its own noise.
            seen[cell.prompt] = seen.get(cell.prompt, 0) + 1
            row = found.setdefault((cell.prompt, seen[cell.prompt]), [None] * len(items))
            row[number] = cell
    rows = [(prompt, cells) for (prompt, _), cells in found.items()]
    rows.sort(key=lambda row: -sum(cell is not None for cell in row[1]))
    return rows[:MAX_PROMPTS]


def compare_settings(views: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, by name."""
    if len(views) < 2:
        return []
    settings: list[dict[str, Any]] = [flatten_settings(view.config) for view in views]
    names = sorted({name for each in settings for name in each} - {*IGNORED_KEYS})
    rows = [(name, [str(each.get(name, "absent")) for each in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1][:MAX_SETTINGS]
