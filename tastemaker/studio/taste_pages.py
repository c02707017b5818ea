"""Learning a taste in the browser: train a preference model from votes, order the next pairs, and align a model.

Every button starts a command of `tastemaker` in the queue of jobs. The page of an alignment follows its three stages,
and leads to the blind vote between the model before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..config.recipes import list_recipes, list_trainable_recipes
from ..core.errors import ConfigError
from ..core.safe_files import parse_json
from ..preferences.session_taste import (
    MIN_COMPARISONS,
    list_preference_models,
    read_report,
    restore_balanced_order,
)
from ..preferences.sessions import VOTES_FILE, Session, choose_strategy
from ..preferences.statistics import compare_sources
from .access import read_form
from .config_forms import check_overrides, find_user_code_in_overrides, refuse_user_code
from .devices import list_devices
from .job_events import FragmentFeed, stream
from .job_pages import answer_errors, find_run_code, find_run_id, read_number
from .job_queue import ENDED, Job
from .new_run import check_name, suggest_name
from .run_index import RunSummary
from .vote_pages import VotingSessions, describe_waiting, start_job, title_of

if TYPE_CHECKING:
    from .app import Studio

METHODS = {
    "reward_gradient": "reward gradient: fastest, for models that gradients can pass through",
    "grpo": "GRPO: any model and reward",
    "nft": "DiffusionNFT: flow and diffusion models, without a stochastic sampler",
    "dpo": "DPO: on the votes themselves, without a learned reward",
    "kto": "KTO: on likes and dislikes themselves, without a learned reward",
}
# Files and folders of an alignment, as `tastemaker align` writes them.
STATE_FILE, PREFERENCE, MODEL, EVALUATION = "alignment.json", "preference", "model", "evaluation"
MAX_STATE_BYTES = 64 * 2**10
MAX_ALIGNMENT_PROMPTS = 500
Values = Mapping[str, str]


def to_id(root: Path, directory: Path) -> str:
    """Return the id of an alignment or session in addresses, in which "~" stands for "/"."""
    return directory.relative_to(root).as_posix().replace("/", "~")


def find_alignments(root: Path) -> dict[str, Path]:
    """Return the directories of all alignments by id."""
    paths = [path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/{STATE_FILE}")]
    return {to_id(root, path): path for path in paths}


def read_state(directory: Path) -> dict[str, Any]:
    """Return what an alignment aligns to what; empty if the file is damaged."""
    try:
        with (directory / STATE_FILE).open("rb") as file:
            state = parse_json(file.read(MAX_STATE_BYTES).decode(), STATE_FILE)
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


@dataclass(frozen=True)
class AlignmentView:
    """An alignment, and how far it is."""

    id: str
    state: dict[str, Any]  # votes, model, method, count
    job: Job | None  # the newest one that works on it
    summary: str  # of the preference model
    preference: str  # id of its run; empty if there is none
    model: RunSummary | None  # the run that trains the model
    session: Session | None  # the blind evaluation
    made: int = 0  # samples of the evaluation
    total: int = 0
    votes: int = 0
    result: str = ""  # the win rate in words, once the sources may be known
    verdict: str = ""  # of the stopping rule

    @property
    def stage(self) -> int:
        """1 learns the taste, 2 trains the model, 3 generates samples, 4 waits for votes, 5 has a result."""
        if self.session is not None:
            return 3 if not self.session.is_ready else 5 if self.result else 4
        return 2 if self.model is not None or self.state.get("method") == "dpo" else 1

    @property
    def is_active(self) -> bool:
        return self.job is not None and self.job.state not in ENDED

    @property
    def model_name(self) -> str:
        name = str(self.state.get("model", ""))
        return Path(name).name if "/" in name else name


def find_job(studio: Studio, directory: Path) -> Job | None:
    """Return the newest job that writes to a directory."""
    found = [job for job in studio.jobs.jobs() if job.directory == str(directory.resolve())]
    return max(found, key=lambda job: job.created, default=None)


def view_alignment(studio: Studio, sessions: VotingSessions, id: str, directory: Path) -> AlignmentView:
    """Read how far an alignment is from the files that it writes."""
    model_id = find_run_id(studio, directory / MODEL)
    made = total = votes = 0
    result = verdict = ""
    session = None
    session_id = f"{id}~{EVALUATION}"
    if session_id in sessions.directories():
        session = sessions.find(session_id)
        if session.is_ready:
            votes = sum(session.voters().values())
            if votes and session.is_revealed:
                before, after = (source.name for source in session.sources[:2])
                comparison = compare_sources(session.votes(), after, before)
                result = comparison.describe("the new model")
                verdict = comparison.verdict().describe("the new model", "the old model")
        else:
            waiting = describe_waiting(session, session_id)
            made, total = waiting["made"], waiting["total"]
    return AlignmentView(
        id,
        read_state(directory),
        find_job(studio, directory),
        shorten_summary(read_report(directory / PREFERENCE)),
        find_run_id(studio, directory / PREFERENCE),
        studio.index.find(model_id) if model_id else None,
        session,
        made,
        total,
        votes,
        result,
        verdict,
    )


def shorten_summary(report: Mapping[str, Any]) -> str:
    """Return the summary of a preference model without its learning curve, which the page shows as a table."""
    return str(report.get("summary", "")).partition(" Learning curve:")[0].rstrip(".")


@dataclass(frozen=True)
class PreferenceView:
    """A preference model of a session."""

    run: str  # id of its run
    report: dict[str, Any]

    @property
    def summary(self) -> str:
        return shorten_summary(self.report) or "the report cannot be read"

    @property
    def curve(self) -> list[dict[str, float]]:
        rows = self.report.get("learning_curve", [])
        return [row for row in rows if {"votes", "accuracy", "accuracy_low", "accuracy_high"} <= {*row}]


def view_taste(studio: Studio, sessions: VotingSessions, name: str, form: Values | None = None) -> dict[str, Any]:
    """Return what the page of a session's taste shows."""
    session = sessions.find(name)
    votes_file = str(session.directory.resolve() / VOTES_FILE)
    inside = [run for run in list_preference_models(session) if run.is_relative_to(studio.root)]
    models = [PreferenceView(run.relative_to(studio.root).as_posix(), read_report(run)) for run in inside]
    alignments = [
        view_alignment(studio, sessions, id, directory)
        for id, directory in find_alignments(studio.root).items()
        if str(Path(str(read_state(directory).get("votes", ""))).resolve()) == votes_file
    ]
    jobs = [job for job in studio.jobs.jobs() if job.kind == "preference" and str(session.directory) in job.arguments]
    return {
        "name": name,
        "title": title_of(session, name),
        "session": session,
        "votes": sum(session.voters().values()),
        "voters": list(session.voters()),
        "min_votes": MIN_COMPARISONS,
        "models": models,
        "jobs": [job for job in jobs if job.state not in ENDED or job is jobs[-1]],
        "alignments": sorted(alignments, key=lambda each: each.job.created if each.job else 0.0, reverse=True),
        "is_active": choose_strategy(session) == "active",
        "is_evaluation": is_evaluation(session),
        "can_order": session.kind == "pair" and bool(models) and not is_evaluation(session),
        "form": form or {},
    }


def is_evaluation(session: Session) -> bool:
    """Whether a session compares a model before and after its alignment: its pairs must not be chosen."""
    return (session.directory.parent / STATE_FILE).is_file()


def list_models(studio: Studio, session: Session) -> tuple[list[str], list[str], str]:
    """Return the runs and recipes that can be aligned, and the one that the session samples if that may be known."""
    runs = [id for id, path in studio.index.directories().items() if (path / "checkpoints").is_dir()]
    recipes = [name for name in list_trainable_recipes() if not name.startswith("preference-")]
    if session.blind and len(session.sources) > 1 and not session.is_revealed:
        return runs, recipes, ""
    model = session.sources[-1].model
    path = Path(model)
    id = path.relative_to(studio.root).as_posix() if path.is_relative_to(studio.root) else model
    return runs, recipes, id if id in (*runs, *recipes) else ""


# Changes


def start_learning(studio: Studio, sessions: VotingSessions, name: str, form: Values) -> str:
    """Queue the training of a preference model from the votes of a session; return the job's id."""
    session, recipe, voter = sessions.find(name), form.get("recipe", ""), read_voter(sessions, name, form)
    if recipe and recipe not in list_preference_recipes():
        raise ConfigError(f"recipe: '{recipe:.60}' does not train a preference model; choose one of the list [TM1504]")
    require_votes(session)
    run = suggest_name(studio, f"preference-{name.replace('~', '-')}")
    arguments = ["vote", "learn", str(session.directory), f"--out={studio.root / run}", f"--recipe={recipe}"]
    arguments += [f"--voter={voter}"] if voter else []
    if form.get("active") == "on" and session.kind == "pair" and not is_evaluation(session):
        arguments.append("--active")
    title = f"learn the taste of {name}"
    return studio.jobs.submit("preference", arguments, studio.root / run, form.get("device", "auto"), title=title)


def start_alignment(studio: Studio, sessions: VotingSessions, name: str, form: Values) -> str:
    """Queue the alignment of a model to the votes of a session; return the id of the alignment."""
    session, method, model = sessions.find(name), form.get("method", ""), form.get("model", "")
    voter, out = read_voter(sessions, name, form), form.get("name", "").strip()
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got '{method:.40}'; choose one [TM1505]")
    problems = check_name(studio, out)
    extra = [line.strip() for line in form.get("extra", "").splitlines() if line.strip()]
    problems += check_overrides(extra)
    if problems:
        raise ConfigError("\n".join(problems))
    require_votes(session)
    source = find_model(studio, model)
    if not studio.options.allow_code:
        refuse_user_code(find_user_code_in_overrides(extra))
    prompts = read_number(dict(form), "prompts", 1, MAX_ALIGNMENT_PROMPTS)
    steps = [f"steps={read_number(dict(form), 'steps', 1, 10**6)}"] if form.get("steps", "").strip() else []
    arguments = ["align", f"--votes={session.directory / VOTES_FILE}", f"--model={source}", f"--method={method}"]
    arguments += [f"--out={studio.root / out}", f"--num-prompts={prompts}"]
    arguments += [f"--voter={voter}"] if voter else []
    title = f"align {model} to {name} ({method})"
    directory = studio.root / out
    studio.jobs.submit("align", [*arguments, *steps, *extra], directory, form.get("device", "auto"), title=title)
    return out


def find_model(studio: Studio, model: str) -> str:
    """Return what `--model` takes: a recipe, or the directory of a run, whose own code is refused unless allowed."""
    if model in list_trainable_recipes():
        return model
    if model not in studio.index.directories(fresh=True):
        raise ConfigError(f"model: there is no run or recipe '{model:.80}'; choose one of the list [TM1506]")
    directory = studio.index.directories()[model]
    if not studio.options.allow_code:
        refuse_user_code(find_run_code(directory))
    return str(directory)


def resume_alignment(studio: Studio, id: str, directory: Path) -> str:
    """Queue the command of an alignment that stopped or failed again; return its id."""
    job = find_job(studio, directory)
    if job is None:
        raise ConfigError(f"{id}: it was not started here; run the command `tastemaker align` again [TM1507]")
    if job.allow_code and not studio.options.allow_code:
        raise ConfigError(f"{id}: it was started with --allow-code; start the studio with it to continue [TM1508]")
    studio.jobs.submit(job.kind, job.arguments, directory, job.device, title=job.title)
    return id


def change_order(studio: Studio, sessions: VotingSessions, name: str, form: Values) -> None:
    """Order the next pairs by expected information, or go back to the balanced order."""
    session = sessions.find(name)
    if form.get("order") != "active":
        restore_balanced_order(session)
        return
    if is_evaluation(session):
        raise ConfigError(
            f"{name}: the pairs of a blind evaluation cannot be chosen, because the win rate would not hold for "
            "others; vote in the balanced order [TM1509]"
        )
    if not list_preference_models(session):
        raise ConfigError(f"{name}: there is no preference model of these votes yet; train one first [TM1510]")
    start_job(studio, ["vote", "order", str(session.directory)], session, f"order the pairs of {name}")


def list_preference_recipes() -> list[str]:
    return [name for name in list_recipes() if name.startswith("preference-")]


def read_voter(sessions: VotingSessions, name: str, form: Values) -> str:
    voter = form.get("voter", "")
    if voter and voter not in sessions.find(name).voters():
        raise ConfigError(f"voter: nobody of the name '{voter:.60}' has voted here; choose one of the list [TM1511]")
    return voter


def require_votes(session: Session) -> None:
    count = sum(session.voters().values())
    if count < MIN_COMPARISONS:
        raise ConfigError(
            f"{session.name}: {count} votes are too few to learn from; vote on at least {MIN_COMPARISONS} [TM1512]"
        )


# Routes


def routes(studio: Studio) -> list[Route]:
    """Pages of tastes and alignments."""
    sessions = VotingSessions(studio)
    studio.environment.globals.update(alignments=lambda: list_alignments(studio, sessions))

    def show_taste(request: Request, error: str = "", form: Values | None = None) -> Response:
        name = request.path_params["name"]
        context = view_taste(studio, sessions, name, form)
        runs, recipes, suggested = list_models(studio, context["session"])
        context |= {"runs": runs, "recipes": recipes, "suggested": suggested, "methods": METHODS, "error": error}
        context |= {"devices": list_devices(), "preference_recipes": list_preference_recipes()}
        context["default_method"] = "kto" if context["session"].kind == "like" else "reward_gradient"
        context["out"] = suggest_name(studio, f"{name.replace('~', '-')}-aligned")
        return studio.render(request, "taste.html", context, 400 if error else 200)

    def post(action: Callable[[str, Values], str]) -> Callable[[Request], Any]:
        """Return an endpoint that does something with a form and shows a page, or the form with what is wrong."""

        async def endpoint(request: Request) -> Response:
            form = await read_form(request)
            try:
                page = await run_in_threadpool(action, request.path_params["name"], form)
            except ConfigError as error:
                return await run_in_threadpool(show_taste, request, str(error), form)
            return RedirectResponse(page, 303)

        return endpoint

    def learn(name: str, form: Values) -> str:
        start_learning(studio, sessions, name, form)
        return f"/votes/{quote(name)}/taste"

    def order(name: str, form: Values) -> str:
        change_order(studio, sessions, name, form)
        return f"/votes/{quote(name)}/taste"

    def align(name: str, form: Values) -> str:
        return f"/alignments/{quote(start_alignment(studio, sessions, name, form))}"

    def render_taste(name: str) -> str:
        return studio.environment.get_template("taste_state.html").render(view_taste(studio, sessions, name))

    async def follow_taste(request: Request) -> Response:
        name = request.path_params["name"]
        await run_in_threadpool(sessions.find, name)
        return stream(FragmentFeed(lambda: render_taste(name)).collect)

    return [
        Route("/votes/{name}/taste", show_taste),
        Route("/votes/{name}/taste/events", follow_taste),
        Route("/votes/{name}/learn", post(learn), methods=["POST"]),
        Route("/votes/{name}/order", post(order), methods=["POST"]),
        Route("/votes/{name}/align", post(align), methods=["POST"]),
        *alignment_routes(studio, sessions),
    ]


def list_alignments(studio: Studio, sessions: VotingSessions) -> list[AlignmentView]:
    """Return all alignments, those that write now first."""
    found = [view_alignment(studio, sessions, id, path) for id, path in find_alignments(studio.root).items()]
    return sorted(found, key=lambda each: (not each.is_active, each.id))


def alignment_routes(studio: Studio, sessions: VotingSessions) -> list[Route]:
    """Return the pages of alignments."""

    def find_alignment(id: str) -> tuple[Path, AlignmentView]:
        directory = find_alignments(studio.root).get(id) or studio.root / id
        is_queued = "/" not in id and ".." not in id and find_job(studio, directory) is not None
        if not is_queued and not (directory / STATE_FILE).is_file():
            raise HTTPException(404, f"there is no alignment '{id:.80}' here; open the list of votes [TM1513]")
        return directory, view_alignment(studio, sessions, id, directory)

    def show(request: Request) -> Response:
        _, view = find_alignment(request.path_params["id"])
        return studio.render(request, "alignment.html", {"view": view})

    async def follow(request: Request) -> Response:
        id = request.path_params["id"]
        await run_in_threadpool(find_alignment, id)
        template = studio.environment.get_template("alignment_state.html")
        return stream(FragmentFeed(lambda: template.render(view=find_alignment(id)[1])).collect)

    async def resume(request: Request) -> Response:
        await read_form(request)
        id = request.path_params["id"]
        directory, _ = await run_in_threadpool(find_alignment, id)
        await answer_errors(resume_alignment, studio, id, directory)
        return RedirectResponse(f"/alignments/{quote(id)}", 303)

    return [
        Route("/alignments/{id}", show),
        Route("/alignments/{id}/events", follow),
        Route("/alignments/{id}/resume", resume, methods=["POST"]),
    ]
