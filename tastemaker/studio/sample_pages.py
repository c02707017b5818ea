"""Addresses of samples: thumbnails, full images, and the video files of grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from .sample_files import EncodedImage, GridFile

if TYPE_CHECKING:
    from .app import Studio

# An address contains the version of the file, so what it names never changes.
CACHED = {"Cache-Control": "private, max-age=31536000, immutable"}


def routes(studio: Studio) -> list[Route]:
    def find_grid(request: Request) -> GridFile:
        step, folder = read_number(request, "step"), studio.index.samples(request.path_params["run"])
        if step not in folder.grids:
            raise HTTPException(404, f"this run has no samples of step {step} [TM1373]")
        return folder.grids[step]

    def cut(request: Request) -> EncodedImage:
        file, part = find_grid(request), request.query_params.get("part", "")
        if part == "mosaic":
            return studio.cutter.mosaic(file)
        index = read_number(request, "index")
        if part == "source":
            return studio.cutter.source(file, index)
        return studio.cutter.full(file, index) if part == "full" else studio.cutter.thumbnail(file, index)

    async def show_sample(request: Request) -> Response:
        image = await run_in_threadpool(cut, request)
        return Response(image.content, media_type=image.media_type, headers=CACHED)

    async def show_grid(request: Request) -> Response:
        file = await run_in_threadpool(find_grid, request)
        return FileResponse(file.grid.path, headers=CACHED)

    return [Route("/samples/{run:path}", show_sample), Route("/grids/{run:path}", show_grid)]


def read_number(request: Request, name: str) -> int:
    """Read a whole number from the address."""
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise HTTPException(400, f"the address needs a number {name}=... [TM1374]")
    return int(text)
