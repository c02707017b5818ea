"""Pages of jobs: the queue, a job with its log, the form of a new run, and the buttons on the page of a run."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ..config.catalog import recipe_rows
from ..core.errors import ConfigError
from ..core.safe_files import parse_yaml_mapping, read_text
from .access import read_form, resolve_inside
from .config_forms import MAX_VALUE_LENGTH, build_form, find_user_code, read_source, refuse_user_code
from .devices import list_devices
from .job_events import MAX_LOG_BYTES, MEDIA_SUFFIXES, FragmentFeed, JobFeed, list_media, stream
from .job_queue import ENDED, Job, read_tail
from .new_run import FIELD_PREFIX, RUN_PREFIX, describe_root, estimate_needs, find_source, read_new_run, suggest_name

if TYPE_CHECKING:
    from .app import Studio
    from .run_index import RunSummary

NAVIGATION = ("Jobs", "/jobs")
MAX_SHOWN = 60  # of the jobs that have ended
MAX_SAMPLES = 16  # of one request
CHECKPOINT = re.compile(r"step-\d{1,12}")


@dataclass(frozen=True)
class JobView:
    """A job with what its run says."""

    job: Job
    run: str  # id of the run; empty if it has none yet
    step: int = 0
    steps: int = 0
    last_line: str = ""
    page: str = ""  # of what it makes: a run, a vote or an alignment


def find_run_id(studio: Studio, directory: Path) -> str:
    """Return the id of the run in a directory; empty if there is none yet."""
    id = directory.relative_to(studio.root).as_posix() if directory.is_relative_to(studio.root) else ""
    return id if id in studio.index.directories() else ""


def find_result_page(studio: Studio, directory: Path) -> str:
    """Return the page of what a job writes: a run, an alignment or a voting session; empty if there is none yet."""
    if (directory / "alignment.json").is_file() and directory.is_relative_to(studio.root):
        return f"/alignments/{quote(directory.relative_to(studio.root).as_posix().replace('/', '~'))}"
    if directory.parent == studio.data_folder / "votes":
        return f"/votes/{quote(directory.name)}"
    id = find_run_id(studio, directory)
    return f"/runs/{quote(id)}" if id else ""


def view_job(studio: Studio, job: Job) -> JobView:
    directory, step, steps, line = Path(job.directory), 0, 0, ""
    # The run of an alignment is inside of its directory: the preference model first, then the aligned model.
    folders = [directory / "model", directory / "preference"] if job.kind == "align" else [directory]
    run = next((id for folder in folders if (id := find_run_id(studio, folder))), "")
    if job.state not in ENDED:
        lines = read_tail(studio.jobs.log_file(job.id), 4096)[0].strip().splitlines()
        line = lines[-1][:200] if lines else ""
        if run:
            summary = studio.index.find(run)
            step, steps = summary.step, summary.steps
    return JobView(job, run, step, steps, line, find_result_page(studio, directory))


def list_views(studio: Studio) -> dict[str, list[JobView]]:
    """Return the jobs that run, those that wait, and those that ended last."""
    jobs = studio.jobs.jobs()
    ended = sorted((job for job in jobs if job.state in ENDED), key=lambda job: -job.ended)
    groups = {
        "running": [job for job in jobs if job.state in ("running", "stopping")],
        "waiting": [job for job in jobs if job.state == "queued"],
        "ended": ended[:MAX_SHOWN],
    }
    return {name: [view_job(studio, job) for job in members] for name, members in groups.items()}


def render_jobs(studio: Studio) -> str:
    return studio.environment.get_template("jobs_list.html").render(groups=list_views(studio))


@dataclass(frozen=True)
class RunActions:
    """What can be done with a run now."""

    run: RunSummary
    job: Job | None  # that trains it, or waits to
    checkpoints: list[str]
    devices: list[str]
    user_code: list[str]  # that keeps it from being started here


def find_actions(studio: Studio, id: str) -> RunActions:
    summary = studio.index.find(id)
    code = [] if studio.options.allow_code else find_run_code(summary.directory)
    job = studio.jobs.find_active(summary.directory)
    return RunActions(summary, job, list_checkpoints(summary.directory), list_devices(), code)


def render_buttons(studio: Studio, id: str) -> str:
    return studio.environment.get_template("run_buttons.html").render(actions=find_actions(studio, id))


def list_checkpoints(directory: Path) -> list[str]:
    """List the names of a run's checkpoints, the newest first."""
    try:
        found = [path.name for path in (directory / "checkpoints").iterdir() if CHECKPOINT.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, reverse=True)


def find_run_code(directory: Path) -> list[str]:
    """Return what the configuration of a run names of the user's own code; a damaged one names none."""
    try:
        return find_user_code(parse_yaml_mapping(read_text(directory / "config.yaml", 1_000_000), "config.yaml"))
    except ConfigError:
        return []


# Changes


def change_job(studio: Studio, id: str, action: str) -> str:
    """Do what a button of a job asks for, and return the page to show."""
    jobs = studio.jobs
    if action == "stop":
        jobs.stop(id)
    elif action == "kill":
        jobs.kill(id)
    elif action == "remove":
        jobs.remove(id)
    elif action in ("up", "down"):
        jobs.move(id, -1 if action == "up" else 1)
    else:
        raise HTTPException(404, "there is no such action [TM1456]")
    return "/jobs"


def change_run(studio: Studio, action: str, values: dict[str, str]) -> str:
    """Do what a button of a run asks for, and return the page to show."""
    summary = studio.index.find(values.get("run", ""))
    device = values.get("device", "auto")
    if action == "stop":
        studio.jobs.stop_run(summary.directory)
        return f"/runs/{quote(summary.id)}"
    if not studio.options.allow_code:
        refuse_user_code(find_run_code(summary.directory))
    if action == "resume":
        studio.jobs.resume(summary.directory, device)
    elif action == "extend":
        steps = read_number(values, "steps", 1, 10**9)
        if steps <= max(summary.step, summary.steps):
            raise ConfigError(
                f"steps: the run has {max(summary.step, summary.steps)} steps already; give a larger number [TM1457]"
            )
        studio.jobs.resume(summary.directory, device, steps)
    elif action == "sample":
        return f"/jobs/{sample_now(studio, summary, values)}"
    else:
        raise HTTPException(404, "there is no such action for a run [TM1458]")
    return f"/runs/{quote(summary.id)}"


def sample_now(studio: Studio, summary: RunSummary, values: dict[str, str]) -> str:
    """Queue `generate` for a prompt, a seed and a checkpoint of a run; return the id of the job."""
    prompt, checkpoint = values.get("prompt", "").strip(), values.get("checkpoint", "")
    if not prompt or len(prompt) > MAX_VALUE_LENGTH:
        raise ConfigError("prompt: write what the picture shows, in at most 20000 characters [TM1459]")
    known = list_checkpoints(summary.directory)
    if not known or (checkpoint and checkpoint not in known):
        raise ConfigError(
            f"checkpoint: the run has no checkpoint {checkpoint:.40}; it saves one every checkpoint.every steps and "
            "keeps the last checkpoint.keep_last; choose another, or wait [TM1460]"
        )
    count, seed = read_number(values, "count", 1, MAX_SAMPLES), read_number(values, "seed", 0, 2**31 - 1)
    source = summary.directory / "checkpoints" / checkpoint if checkpoint else summary.directory
    folder = studio.jobs.sample_folder / secrets.token_hex(8)
    arguments = ["generate", str(source), f"--prompt={prompt}", f"--count={count}", f"--seed={seed}", f"--out={folder}"]
    title = f"{summary.id}, {checkpoint or 'latest checkpoint'}: {prompt}"[:200]
    beside = True if values.get("beside") == "yes" else None
    return studio.jobs.submit("sample", arguments, folder, values.get("device", "auto"), title=title, beside=beside)


def read_number(values: dict[str, str], name: str, low: int, high: int) -> int:
    text = values.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise ConfigError(f"{name}: expected a number from {low} to {high}, got '{text:.20}' [TM1461]")
    return int(text)


def start_new_run(studio: Studio, values: dict[str, str]) -> tuple[str, Any]:
    """Start the run of a form; return the job's id, or "" and what is wrong."""
    run = read_new_run(studio, values)
    if run.has_problems:
        return "", run
    recipe = f"like {Path(run.source).parent.name}" if run.source.endswith(".yaml") else run.source
    title = run.name if run.name == recipe else f"{run.name} ({recipe})"
    try:
        id = studio.jobs.submit(
            "train", run.arguments, studio.root / run.name, values.get("device", "auto"), title=title
        )
    except ConfigError as error:
        run.others.append(str(error))
        return "", run
    return id, run


# Routes


def routes(studio: Studio) -> list[Route]:
    """Pages of jobs. The queue advances from now on."""
    studio.jobs.start_thread()
    studio.environment.globals.update(run_actions=partial(find_actions, studio))
    studio.environment.filters.update(duration=format_duration)

    async def show_jobs(request: Request) -> Response:
        groups = await run_in_threadpool(list_views, studio)
        return studio.render(request, "jobs.html", {"groups": groups})

    async def show_job(request: Request) -> Response:
        return await run_in_threadpool(_show_job, studio, request)

    async def show_file(request: Request) -> Response:
        return await run_in_threadpool(_show_file, studio, request)

    async def show_form(request: Request) -> Response:
        return await run_in_threadpool(_show_form, studio, request, None, None)

    async def submit_form(request: Request) -> Response:
        values = await read_form(request)
        id, run = await answer_errors(start_new_run, studio, values)
        if id:
            return RedirectResponse(f"/jobs/{id}", 303)
        return await run_in_threadpool(_show_form, studio, request, values, run)

    async def check_form(request: Request) -> Response:
        run = await answer_errors(read_new_run, studio, await read_form(request))
        return JSONResponse(run.to_json())

    async def plan_form(request: Request) -> Response:
        return JSONResponse(await answer_errors(estimate_needs, studio, await read_form(request)))

    async def post_job(request: Request) -> Response:
        page = await answer_errors(change_job, studio, request.path_params["id"], request.path_params["action"])
        return RedirectResponse(page, 303)

    async def post_run(request: Request) -> Response:
        values = await read_form(request)
        page = await answer_errors(change_run, studio, request.path_params["action"], values)
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse({"page": page})
        return RedirectResponse(page, 303)

    return [
        *event_routes(studio),
        Route("/jobs", show_jobs),
        Route("/jobs/new", show_form),
        Route("/jobs/new", submit_form, methods=["POST"]),
        Route("/jobs/new/check", check_form, methods=["POST"]),
        Route("/jobs/new/plan", plan_form, methods=["POST"]),
        Route("/jobs/{id}", show_job),
        Route("/jobs/{id}/files/{name}", show_file),
        Route("/jobs/{id}/{action}", post_job, methods=["POST"]),
        Route("/run-actions/{action}", post_run, methods=["POST"]),
    ]


def event_routes(studio: Studio) -> list[Route]:
    """Streams of events: the queue, the buttons of a run, and a job with its log."""

    async def stream_jobs(request: Request) -> Response:
        return stream(FragmentFeed(lambda: render_jobs(studio)).collect)

    async def stream_buttons(request: Request) -> Response:
        id = request.query_params.get("run", "")
        await run_in_threadpool(studio.index.find, id)
        return stream(FragmentFeed(lambda: render_buttons(studio, id)).collect)

    async def stream_job(request: Request) -> Response:
        id, offset = request.path_params["id"], request.query_params.get("offset", "0")
        await answer_errors(studio.jobs.find, id)
        start = int(offset) if offset.isdecimal() and len(offset) < 16 else 0
        return stream(JobFeed(studio.jobs, id, start, partial(find_result_page, studio)).collect)

    return [
        Route("/jobs/events", stream_jobs),
        Route("/jobs/{id}/events", stream_job),
        Route("/run-actions/events", stream_buttons),
    ]


async def answer_errors(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread; a mistake of the user's becomes an answer with its message."""
    try:
        return await run_in_threadpool(function, *arguments)
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error


def _show_job(studio: Studio, request: Request) -> Response:
    try:
        job = studio.jobs.find(request.path_params["id"])
    except ConfigError as error:
        raise HTTPException(404, str(error)) from error
    text, offset = read_tail(studio.jobs.log_file(job.id), MAX_LOG_BYTES)
    files = list_media(Path(job.directory)) if job.kind == "sample" else []
    view = view_job(studio, job)
    command = shlex.join(["tastemaker", *job.arguments])
    run = studio.index.find(view.run) if view.run and job.kind == "train" else None
    context = {"view": view, "job": job, "run": run, "log": text, "offset": offset, "files": files, "command": command}
    context["directory"] = describe_root(Path(job.directory))
    return studio.render(request, "job.html", context)


def _show_file(studio: Studio, request: Request) -> Response:
    """Serve a picture or video of a sample job, from its own folder only."""
    try:
        job = studio.jobs.find(request.path_params["id"])
    except ConfigError as error:
        raise HTTPException(404, str(error)) from error
    name, folder = request.path_params["name"], Path(job.directory)
    if job.kind != "sample" or folder.parent != studio.jobs.sample_folder or not name.endswith(MEDIA_SUFFIXES):
        raise HTTPException(404, "there is no such sample [TM1462]")
    return FileResponse(resolve_inside(folder, name))


def _show_form(studio: Studio, request: Request, values: dict[str, str] | None, run: Any) -> Response:
    """Show the recipes to choose from, or the form of one, with what the user entered and what is wrong with it."""
    chosen = (values or {}).get("recipe") or request.query_params.get("recipe", "")
    if not chosen:
        search = request.query_params.get("q", "").lower()
        words = search.split()
        rows = [
            row for row in recipe_rows() if all(word in f"{row['name']} {row['description']}".lower() for word in words)
        ]
        return studio.render(request, "choose_recipe.html", {"rows": rows, "search": search})
    try:
        source = find_source(studio, chosen)
        form = build_form(source)
    except ConfigError as error:
        raise HTTPException(404, str(error)) from error
    studio.config_worker.warm_up()
    row = next((row for row in recipe_rows() if row["name"] == chosen), {"description": ""})
    context = {
        "recipe": chosen,
        "is_run": chosen.startswith(RUN_PREFIX),
        "description": row["description"],
        "form": form,
        "prefix": FIELD_PREFIX,
        "values": values or {},
        "name": (values or {}).get("name") or suggest_name(studio, source),
        "devices": list_devices(),
        "root": describe_root(studio.root),
        "run": run,
        "user_code": [] if studio.options.allow_code else find_user_code(read_source(source)),
    }
    return studio.render(request, "new_run.html", context, 400 if run is not None else 200)


def format_duration(seconds: float) -> str:
    """Return a time as 5 s, 3 min or 2.1 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
