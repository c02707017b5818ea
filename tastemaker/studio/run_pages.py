"""The list of runs, and the page of a run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..core.errors import ConfigError
from ..report.charts import format_number
from .run_index import RunSummary
from .run_view import RunView, make_score_tables
from .sample_pages import read_number

if TYPE_CHECKING:
    from .app import Studio

NAVIGATION = ("Runs", "/runs")
PAGE_SIZE = 200
STATES = ("running", "finished", "stopped", "failed", "stale")
SPARKLINE_WIDTH, SPARKLINE_HEIGHT = 150, 40


def routes(studio: Studio) -> list[Route]:
    studio.environment.filters.update(sparkline=sparkline_points, age=format_age, short=format_number)

    def render_runs(request: Request) -> Response:
        context = list_runs(studio.index.summaries(), request)
        template = "runs_list.html" if "fragment" in request.query_params else "runs.html"
        response = studio.render(request, template, {"root": studio.options.runs, "states": STATES, **context})
        # A page that asks again every few seconds gets nothing if nothing has changed.
        tag = response.headers["ETag"] = f'"{hashlib.sha1(bytes(response.body), usedforsecurity=False).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return response

    async def show_runs(request: Request) -> Response:
        return await run_in_threadpool(render_runs, request)

    def render_run(request: Request) -> Response:
        view = RunView(studio, request.path_params["run"])
        context: dict[str, Any] = {"newest_sample": view.newest_sample()}  # what is written from now on is sent again
        rows = view.sample_rows()
        context |= {
            "run": view.summary,
            "config_text": view.config_text,
            "environment": view.environment,
            "rows": rows,
            "columns": rows[-1].cells if rows else (),
            "tables": make_score_tables(view.evaluations()),
        }
        return studio.render(request, "run.html", context)

    async def show_run(request: Request) -> Response:
        return await run_in_threadpool(render_run, request)

    def render_rows(request: Request) -> Response:
        view = RunView(studio, request.path_params["run"])
        rows = view.sample_rows([read_number(request, "step")])
        if not rows:
            raise HTTPException(404, "this run has no samples of this step [TM1378]")
        return studio.render(request, "sample_row.html", {"row": rows[0]})

    async def show_rows(request: Request) -> Response:
        return await run_in_threadpool(render_rows, request)

    def render_difference(request: Request) -> Response:
        config = RunView(studio, request.path_params["run"]).config
        try:
            difference, problem = studio.recipes.compare(config), ""
        except (ConfigError, OSError) as error:
            difference, problem = None, str(error)
        return studio.render(request, "recipe_difference.html", {"difference": difference, "problem": problem})

    async def show_difference(request: Request) -> Response:
        return await run_in_threadpool(render_difference, request)

    return [
        Route("/runs", show_runs),
        Route("/runs/{run:path}", show_run),
        Route("/sample-rows/{run:path}", show_rows),
        Route("/recipe-difference/{run:path}", show_difference),
    ]


def list_runs(runs: Sequence[RunSummary], request: Request) -> dict[str, Any]:
    """Return the runs that match the search, one page of them, and how many there are of each state."""
    text, state = request.query_params.get("q", "").strip().lower(), request.query_params.get("state", "")
    counts = {each: sum(run.state == each for run in runs) for each in STATES}
    matching = [run for run in runs if text in run.id.lower() and state in ("", run.state)]
    number = read_number(request, "page") if "page" in request.query_params else 0
    page = matching[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
    pages = -(-len(matching) // PAGE_SIZE)
    return {
        "runs": page,
        "total": len(runs),
        "matching": len(matching),
        "counts": counts,
        "search": text,
        "state": state,
        "page": number,
        "pages": pages,
    }


def sparkline_points(points: Sequence[tuple[int, float]]) -> str:
    """Return the points of an SVG polyline that fills a sparkline."""
    if len(points) < 2:
        return ""
    (first, last), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, high = min(values), max(values)
    x_scale, y_scale = SPARKLINE_WIDTH / max(1, last - first), SPARKLINE_HEIGHT / ((high - low) or 1.0)
    return " ".join(f"{(step - first) * x_scale:.1f},{(high - value) * y_scale:.1f}" for step, value in points)


def format_age(moment: float) -> str:
    """Format how long ago something was, coarsely, so that the page does not change every second."""
    seconds = max(0.0, time.time() - moment)
    if not moment:
        return ""
    for limit, size, unit in ((3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < 60:
            return "just now"
        if seconds < limit:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds // 86400)} days ago"


def run_address(id: str) -> str:
    """Address of the page of a run."""
    return f"/runs/{quote(id)}"
