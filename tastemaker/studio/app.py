"""The studio as a Starlette application: pages, their templates, and what all of them share."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from .. import __version__
from ..report.run_record import parse_config
from ..serving.access import AccessRules
from .access import StudioAccessMiddleware, resolve_inside
from .config_worker import ConfigWorker
from .job_queue import JobQueue
from .recipe_settings import RecipeSettings
from .run_index import RunIndex
from .sample_files import SampleCutter

FOLDER = Path(__file__).parent

# Modules with pages, in the order of the navigation. Each has `routes(studio) -> list[Route]`; one with an entry in the
# navigation has `NAVIGATION = ("Title", "/path")`.
ROUTE_MODULES = ("run_pages", "sample_pages", "events", "compare_pages", "vote_pages", "taste_pages", "job_pages")


@dataclass(frozen=True)
class StudioOptions:
    """What the studio serves, and to whom."""

    runs: Path = Path("runs")  # the directory of runs, or one run
    token: str = ""  # required from every browser if not empty
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header besides those of this machine
    allow_code: bool = False  # whether a configuration from the browser may name the user's own classes


class Studio:
    """What the pages share: options, the index of runs, templates, and the folder of the studio's own files."""

    def __init__(self, options: StudioOptions) -> None:
        self.options = options
        self.is_closing: Callable[[], bool] = lambda: False  # whether the server is being stopped
        self.index = RunIndex(options.runs)
        self.cutter = SampleCutter()
        self._parse_config = lru_cache(maxsize=64)(parse_config)
        self.recipes = RecipeSettings()
        self.jobs = JobQueue(self.index.root, allow_code=options.allow_code)
        self.config_worker = ConfigWorker(allow_code=options.allow_code)
        self.plan_worker = ConfigWorker(allow_code=options.allow_code)  # of its own: an estimate may take a minute
        self.modules = find_route_modules()
        self.navigation = [module.NAVIGATION for module in self.modules if "NAVIGATION" in vars(module)]
        loader = jinja2.FileSystemLoader(FOLDER / "templates")
        self.environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        self.environment.globals.update(navigation=self.navigation, version=__version__, static=static_url)
        self.environment.filters.update(path=quote)

    @property
    def root(self) -> Path:
        """The directory of runs. Nothing outside of it is served."""
        return self.index.root

    @property
    def data_folder(self) -> Path:
        """Where the studio keeps its own files: jobs and voting sessions."""
        return self.root / ".studio"

    def resolve(self, relative: str) -> Path:
        """Return an existing path in the directory of runs, or refuse the request."""
        path = resolve_inside(self.root, relative)
        if not any(path.is_relative_to(folder) for folder in self.index.served_folders(self.data_folder)):
            raise HTTPException(404, "there is no such file in the served run [TM1380]")
        return path

    def parse_config(self, text: str) -> Mapping[str, Any]:
        """Parse the text of a config.yaml. Results of the last texts are kept."""
        return self._parse_config(text)

    def render(
        self, request: Request, template: str, context: Mapping[str, Any] | None = None, status: int = 200
    ) -> HTMLResponse:
        """Render a template. Everything in the context is escaped."""
        values = {"request": request, "current": request.url.path, **(context or {})}
        return HTMLResponse(self.environment.get_template(template).render(values), status)


def static_url(name: str) -> str:
    """Address of a static file, which changes with its content so that browsers do not keep an old one."""
    return f"/static/{name}?v={int((FOLDER / 'static' / name).stat().st_mtime)}"


def find_route_modules() -> list[ModuleType]:
    """Import the modules with pages."""
    package = __name__.rpartition(".")[0]
    names = [f"{package}.{name}" for name in ROUTE_MODULES]
    return [importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None]


def create_app(options: StudioOptions) -> Starlette:
    """Create the application."""
    studio = Studio(options)

    async def redirect_home(request: Request) -> Response:
        return RedirectResponse("/runs", 303)

    async def answer_health(request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def answer_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        context = {"status": error.status_code, "reason": error.detail}
        return studio.render(request, "error.html", context, error.status_code)

    routes: list[BaseRoute] = [
        Route("/", redirect_home),
        Route("/health", answer_health),
        Mount("/static", StaticFiles(directory=FOLDER / "static")),
    ]
    for module in studio.modules:
        routes += module.routes(studio)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(StudioAccessMiddleware, rules=AccessRules(options.allowed_hosts, options.token))],
        exception_handlers={HTTPException: answer_refusal},
    )
    app.state.studio = studio
    app.router.redirect_slashes = False
    return app
