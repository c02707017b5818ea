"""Voting in the browser: the list of sessions, the ballots, and the result.

A blind session tells nothing about its sources before its end: samples are served by their numbers, which are in random
order, and neither names nor paths are sent.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ..config.recipes import list_trainable_recipes
from ..core.errors import ConfigError
from ..core.registry import USER_CODE_VARIABLE, subprocess_path
from ..core.safe_files import parse_json
from ..preferences.session_results import describe_progress, summarize_session
from ..preferences.sessions import (
    KINDS,
    NAME,
    SAMPLES_FILE,
    SESSION_FILE,
    Ballot,
    Session,
    SessionSource,
    choose_strategy,
    declare_session,
    load_session,
    next_ballots,
    parse_source,
    record_vote,
)
from ..preferences.votes import ALPHABET, ID_LENGTH, MAX_NAME_LENGTH
from .access import read_body, read_form, resolve_inside

if TYPE_CHECKING:
    from .app import Studio

NAVIGATION = ("Vote", "/votes")
MAX_VOTE_BYTES, MAX_BALLOTS, MAX_GALLERY = 16 * 2**10, 8, 24
MAX_PROMPTS, MAX_SEEDS, MAX_SOURCES = 500, 64, 8
VOTE_ID = re.compile(f"[{ALPHABET}]{{{ID_LENGTH}}}")
REWARD_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm")
JOB_LOG = "create.log"
Json = dict[str, Any]


class VotingSessions:
    """The sessions of a directory of runs: those of the studio, and the blind evaluations of aligned models."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self._cache: dict[Path, tuple[tuple[float, ...], Session]] = {}

    def directories(self) -> dict[str, Path]:
        """Return the folders of all sessions by id, in which "~" stands for "/"."""
        own = {path.parent.name: path.parent for path in self.folder.glob(f"*/{SESSION_FILE}")}
        for depth in ("*", "*/*"):
            for path in self.studio.root.glob(f"{depth}/evaluation/{SESSION_FILE}"):
                own[str(path.parent.relative_to(self.studio.root)).replace("/", "~")] = path.parent
        return own

    @property
    def folder(self) -> Path:
        return self.studio.data_folder / "votes"

    def list_all(self) -> list[tuple[str, Session]]:
        """Return the sessions with their ids, the newest first; damaged ones are left out."""
        found = []
        for name, directory in self.directories().items():
            try:
                found.append((name, self._load(directory)))
            except ConfigError:
                continue
        return sorted(found, key=lambda each: each[1].created, reverse=True)

    def find(self, name: str) -> Session:
        directory = self.directories().get(name)
        if directory is None:
            raise missing(f"voting session '{name:.80}'")
        return self._load(directory)

    def _load(self, directory: Path) -> Session:
        """Return a session, which keeps what it read of the vote log between requests."""
        files = [directory / SESSION_FILE, directory / SAMPLES_FILE]
        stamp = tuple(file.stat().st_mtime if file.is_file() else 0.0 for file in files)
        cached = self._cache.get(directory)
        if cached is None or cached[0] != stamp:
            cached = self._cache[directory] = stamp, load_session(directory)
        return cached[1]


def missing(what: str) -> HTTPException:
    return HTTPException(404, f"there is no {what} here; open the list of votes again [TM1403]")


def bad_request(what: str) -> HTTPException:
    return HTTPException(400, f"{what}; reload the page and try again [TM1419]")


def bad_form(what: str) -> ConfigError:
    return ConfigError(f"{what}; correct the form [TM1423]")


def parse_object(body: bytes) -> Json:
    try:
        data = parse_json(body.decode(), "request")
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise bad_request("expected a JSON object")
    return data


def routes(studio: Studio) -> list[Route]:
    sessions = VotingSessions(studio)

    def show_list(request: Request, error: str = "", form: Mapping[str, str] | None = None) -> Response:
        rows = [
            (name, session, {**describe_session(session), "title": title_of(session, name)})
            for name, session in sessions.list_all()
        ]
        context = {"rows": rows, "error": error, "form": form or {}, "kinds": KINDS, "suggestions": suggest(studio)}
        return studio.render(request, "votes.html", context, 400 if error else 200)

    async def create(request: Request) -> Response:
        form = await read_form(request)
        try:
            name = await run_in_threadpool(create_from_form, studio, sessions, form)
        except ConfigError as error:
            return await run_in_threadpool(show_list, request, str(error), form)
        return RedirectResponse(f"/votes/{name}", 303)

    def show_ballot(request: Request) -> Response:
        name = request.path_params["name"]
        session = sessions.find(name)
        if not session.is_ready:
            return studio.render(request, "vote_wait.html", describe_waiting(session, name))
        context = {
            "name": name,
            "title": title_of(session, name),
            "session": session,
            "ended": session.has_ended,
            "max_name": MAX_NAME_LENGTH,
        }
        return studio.render(request, "vote.html", context)

    return [
        Route("/votes", show_list),
        Route("/votes", create, methods=["POST"]),
        Route("/votes/{name}", show_ballot),
        *result_routes(studio, sessions),
        *ballot_routes(sessions),
    ]


def result_routes(studio: Studio, sessions: VotingSessions) -> list[Route]:
    """Return the addresses of a session's result: show it, end the session, score its samples with rewards."""

    def show_result(request: Request) -> Response:
        name = request.path_params["name"]
        session = sessions.find(name)
        if not session.is_ready:
            return RedirectResponse(f"/votes/{name}", 303)
        try:
            return studio.render(request, "vote_result.html", describe_result_page(session, name))
        except ConfigError as error:
            raise HTTPException(409, str(error)) from error

    async def end(request: Request) -> Response:
        await read_form(request)
        session = await run_in_threadpool(sessions.find, request.path_params["name"])
        await run_in_threadpool(session.end)
        return RedirectResponse(f"/votes/{request.path_params['name']}/result", 303)

    async def score(request: Request) -> Response:
        form, session = await read_form(request), sessions.find(request.path_params["name"])
        rewards = form.get("rewards", "").replace(",", " ").split()
        if not rewards or not all(map(REWARD_NAME.fullmatch, rewards)):
            raise bad_request(f"rewards: expected names such as jpeg, got '{' '.join(rewards):.80}'")
        options = [f"--reward={each}" for each in rewards]
        await run_in_threadpool(
            start_job, studio, ["vote", "stats", str(session.directory), *options], session, "score"
        )
        return RedirectResponse(f"/votes/{request.path_params['name']}/result?scoring=1", 303)

    return [
        Route("/votes/{name}/result", show_result),
        Route("/votes/{name}/end", end, methods=["POST"]),
        Route("/votes/{name}/rewards", score, methods=["POST"]),
    ]


def ballot_routes(sessions: VotingSessions) -> list[Route]:
    """Return the addresses that the script of the voting page uses."""

    def send_ballots(request: Request) -> Response:
        session, query = sessions.find(request.path_params["name"]), request.query_params
        exclude = [tuple(map(int, key.split("-"))) for key in re.findall(r"\d+(?:-\d+)*", query.get("exclude", ""))]
        count = min(MAX_BALLOTS, int(query.get("count", "3")) if query.get("count", "3").isdecimal() else 3)
        ballots = next_ballots(
            session,
            query.get("voter", ""),
            count,
            choose_strategy(session),
            exclude,
            beyond_target=query.get("more") == "1",
        )
        progress = describe_progress(session, query.get("voter", ""))
        return JSONResponse({"ballots": [format_ballot(session, each) for each in ballots], "progress": progress})

    def send_sample(request: Request) -> Response:
        session, number = sessions.find(request.path_params["name"]), request.path_params["number"]
        if number >= len(session.samples):
            raise missing(f"sample {number}")
        path = resolve_inside(session.directory, session.samples[number].file)
        response = FileResponse(path, stat_result=path.stat())
        for header in ("last-modified", "etag"):  # times of files would tell which source was sampled first
            del response.headers[header]
        response.headers["Cache-Control"] = "private, max-age=86400, immutable"
        return response

    def save(action: Callable[[Session, Json], Json]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                data = parse_object(await read_body(request, MAX_VOTE_BYTES))
                session = await run_in_threadpool(sessions.find, request.path_params["name"])
                return JSONResponse({"progress": await run_in_threadpool(action, session, data)})
            except (ConfigError, HTTPException) as error:
                status = error.status_code if isinstance(error, HTTPException) else 400
                return JSONResponse({"error": error.detail if isinstance(error, HTTPException) else str(error)}, status)

        return endpoint

    return [
        Route("/votes/{name}/next", answer_errors(send_ballots)),
        Route("/votes/{name}/samples/{number:int}", send_sample),
        Route("/votes/{name}/vote", save(save_vote), methods=["POST"]),
        Route("/votes/{name}/undo", save(save_undo), methods=["POST"]),
    ]


def save_vote(session: Session, data: Json) -> Json:
    """Write the vote of a request; what is returned is sent once it is on the disk."""
    voter, vote_id, samples = str(data.get("voter", "")), str(data.get("id", "")), data.get("samples")
    choice, seconds = data.get("choice"), data.get("seconds")
    is_list = isinstance(samples, list) and all(type(number) is int for number in samples)
    is_time = seconds is None or (isinstance(seconds, int | float) and 0 <= seconds < 1e6)
    if not (VOTE_ID.fullmatch(vote_id) and is_list and is_time and isinstance(choice, int | str | bool)):
        raise bad_request("a vote needs an id, samples, a choice and a time")
    ballot = Ballot(vote_id, session.kind, "", tuple(samples or ()))
    record_vote(session, voter, ballot, choice, round(seconds, 2) if seconds else None)
    return describe_progress(session, voter)


def save_undo(session: Session, data: Json) -> Json:
    """Take back a vote of a voter, unless the session has ended."""
    voter, vote_id = str(data.get("voter", "")), str(data.get("id", ""))
    if not session.has_ended:
        session.vote_log.undo(vote_id, voter)
    return describe_progress(session, voter)


def answer_errors(endpoint: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return an endpoint that answers mistakes as JSON."""

    def answer(request: Request) -> Response:
        try:
            return endpoint(request)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)

    return answer


def format_ballot(session: Session, ballot: Ballot) -> Json:
    """Return what the page may know about a ballot."""
    samples = [session.samples[number] for number in ballot.samples]
    data: Json = {"prompt": ballot.prompt, "samples": list(ballot.samples)}
    data["videos"] = [Path(sample.file).suffix in VIDEO_SUFFIXES for sample in samples]
    if not session.blind:
        data["sources"] = [session.sources[sample.source].name for sample in samples]
    return data


def title_of(session: Session, name: str) -> str:
    """Return what a session is called on the pages; a blind evaluation has the name of its alignment."""
    alignment = name.removesuffix("~evaluation")
    return session.name if alignment == name else f"{alignment}: before and after"


def describe_session(session: Session) -> Json:
    """Return the numbers of a session for the list."""
    try:
        voters = session.voters() if session.is_ready else {}
    except ConfigError as error:  # a damaged vote log must not hide the other sessions
        return {"votes": 0, "voters": [], "state": "damaged", "problem": str(error)}
    state = "preparing" if not session.is_ready else "finished" if session.is_over else "open"
    return {"votes": sum(voters.values()), "voters": list(voters), "state": state}


def describe_waiting(session: Session, name: str) -> Json:
    """Return how far the samples of a session are."""
    made = sum(1 for _ in (session.directory / "samples").glob("*/*.*")) if session.directory.is_dir() else 0
    log = session.directory / JOB_LOG
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:] if log.is_file() else []
    total = len(session.sources) * len(session.prompts) * len(session.seeds)
    title = title_of(session, name)
    return {"name": name, "title": title, "session": session, "made": made, "total": total, "lines": lines}


def describe_result_page(session: Session, name: str) -> Json:
    """Return what the page of a result shows; nothing about sources unless they are revealed."""
    result, voters = summarize_session(session), session.voters()
    revealed, alignment = session.is_revealed, name.removesuffix("~evaluation")
    is_evaluation = alignment != name
    subject = "you" if len(voters) < 2 else f"{len(voters)} voters"
    names = {"before": "the old model", "after": "the new model"} if is_evaluation else {}
    comparisons = [
        {
            "title": f"{each.source} against {each.opponent}",
            "sentence": each.describe(names.get(each.source, each.source), subject),
            "verdict": each.verdict(),
            "words": each.verdict().describe(*(names.get(side, side) for side in (each.source, each.opponent))),
            "share": each.share,
            "interval": each.interval,
            "pairs": each.pairs,
            "votes": each.votes,
        }
        for each in (result.comparisons if revealed else ())
    ]
    return {
        "name": name,
        "title": title_of(session, name),
        "alignment": alignment if is_evaluation else "",
        "is_chosen": choose_strategy(session) == "active",
        "session": session,
        "revealed": revealed,
        "result": result,
        "comparisons": comparisons,
        "likes": result.likes if revealed else (),
        "decided": all(each.verdict().is_final for each in result.comparisons) and bool(result.comparisons),
        "progress": [(voter, count, session.voter_target) for voter, count in voters.items()],
        "gallery": make_gallery(session) if revealed else [],
        "has_ended": session.has_ended,
    }


def make_gallery(session: Session) -> list[Json]:
    """Return the newest votes with their samples, sources and choice."""
    rows = []
    for vote in reversed(session.votes()[-MAX_GALLERY:]):
        samples = [
            {
                "number": session.numbers[sample.file],
                "source": sample.source,
                "video": Path(sample.file).suffix in VIDEO_SUFFIXES,
                "chosen": vote.choice is True or (vote.choice is not False and vote.choice == place),
            }
            for place, sample in enumerate(vote.samples)
            if sample.file in session.numbers
        ]
        words = {"tie": "tie", "both_bad": "both bad"}.get(str(vote.choice), "")
        rows.append({"prompt": vote.prompt, "voter": vote.voter, "samples": samples, "words": words})
    return rows


def suggest(studio: Studio) -> list[str]:
    """Return sources to choose from: runs with their checkpoints, then recipes."""
    found = []
    for name, directory in studio.index.directories().items():
        checkpoints = sorted(path.name for path in directory.glob("checkpoints/step-*") if path.suffix != ".partial")
        found += [name, *(f"{name}@{each}" for each in reversed(checkpoints))]
    return [*found, *list_trainable_recipes()]


def resolve_form_source(studio: Studio, text: str) -> SessionSource:
    """Return the source that a form names: something in the directory of runs, or a recipe of the package."""
    source = parse_source(text)
    if "/" not in source.model and source.model in list_trainable_recipes():
        return source
    try:
        path = resolve_inside(studio.root, source.model)
    except HTTPException as error:
        raise bad_form(f"sources: there is no run, folder of pictures or recipe '{source.model:.80}'") from error
    checkpoint = source.checkpoint if source.checkpoint and "/" not in source.checkpoint else None
    return SessionSource(source.label or text, str(path), checkpoint)


def create_from_form(studio: Studio, sessions: VotingSessions, form: Mapping[str, str]) -> str:
    """Write the session of a form, start the generation of its samples, and return its name."""
    name = form.get("name", "").strip()
    texts = [line.strip() for line in form.get("sources", "").splitlines() if line.strip()]
    prompts = [line.strip() for line in form.get("prompts", "").splitlines() if line.strip()]
    seeds, target, kind = form.get("seeds", ""), form.get("target", "").strip(), form.get("kind", "pair")
    is_named = NAME.fullmatch(name) and name not in sessions.directories()
    is_number = seeds.isdecimal() and 1 <= int(seeds) <= MAX_SEEDS and (not target or target.isdecimal())
    if not is_named or not is_number or len(prompts) > MAX_PROMPTS or len(texts) > MAX_SOURCES:
        raise bad_form(
            f"expected a new name of letters, digits, dots and dashes, 1 to {MAX_SEEDS} samples, at most {MAX_SOURCES} "
            f"sources and {MAX_PROMPTS} prompts"
        )
    sources = [resolve_form_source(studio, text) for text in texts]
    blind = form.get("blind") == "on"
    session = declare_session(
        sessions.folder / name,
        sources,
        prompts,
        range(int(seeds)),
        kind,  # type: ignore[arg-type]  # checked there
        blind=blind,
        target=int(target) if target else None,
    )
    start_job(studio, ["vote", "create", str(session.directory)], session, f"samples of the vote {name}")
    return name


def start_job(studio: Studio, arguments: list[str], session: Session, title: str) -> None:
    """Run a command in the queue of jobs; without one, in a process of its own."""
    jobs = getattr(studio, "jobs", None)
    if jobs is not None:
        jobs.submit("sample", arguments, session.directory, title=title)
        return
    environment = {**os.environ, "PYTHONPATH": subprocess_path()}
    if not studio.options.allow_code:
        environment[USER_CODE_VARIABLE] = "refuse"
    with (session.directory / JOB_LOG).open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tastemaker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
