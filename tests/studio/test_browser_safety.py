"""Safety in a real Chromium: hostile pages, hostile texts, and kill -9 while somebody votes."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_fake_run
from free_ports import reserve_port
from studio_process import BROWSER, end_all, open_browser, start_studio
from voting_pictures import write_pictures

from tastemaker.preferences.sessions import Session, create_session, load_session, next_ballots, record_vote
from tastemaker.preferences.votes import new_vote_id, read_votes
from tastemaker.report.page import write_report
from tastemaker.studio.job_queue import JobQueue
from tastemaker.studio.server import StudioServerOptions, serve_studio

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium"),
]
PATIENCE = 120_000  # milliseconds
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
# All ways in which a page sends a request to another origin. Returns when the browser has sent or refused each.
ATTACK = """async targets => {
  for (const [address, body] of targets) {
    const plain = new URLSearchParams(body).toString();
    for (const content of [plain, JSON.stringify(body)])
      for (const type of ["application/x-www-form-urlencoded", "text/plain"])
        for (const mode of ["no-cors", "cors"])
          await fetch(address, {
            method: "POST", mode, credentials: "include", headers: {"Content-Type": type}, body: content,
          }).catch(() => 0);
    navigator.sendBeacon(address, new Blob([JSON.stringify(body)], {type: "text/plain"}));
    navigator.sendBeacon(address, new URLSearchParams(body));
    const frame = document.createElement("iframe"), form = document.createElement("form");
    frame.name = "f" + Math.random();
    document.body.append(frame, form);
    Object.assign(form, {method: "post", action: address, target: frame.name});
    for (const [name, value] of Object.entries(body)) {
      const input = document.createElement("input");
      Object.assign(input, {name, value, type: "hidden"});
      form.append(input);
    }
    form.submit();
    await new Promise(resolve => setTimeout(resolve, 150));
    const image = new Image();
    image.src = `${address}?${plain}`;
  }
  await new Promise(resolve => setTimeout(resolve, 500));
}"""


def make_votes(
    runs: Path, name: str, kind: Any = "pair", prompts: tuple[str, ...] = ("a dog", "a cat", "a sun")
) -> Session:
    """Make a session of two folders of pictures where the studio finds it."""
    folder = runs.parent / "pictures" / name
    sources = [
        f"{label}={write_pictures(folder / label, level, 4, prompts)}"
        for label, level in (("dark", 20), ("bright", 220))
    ]
    return create_session(runs / ".studio/votes" / name, sources, seeds=range(4), kind=kind)


@contextmanager
def serve_page(folder: Path) -> Iterator[int]:
    """Serve a folder at another origin of the same machine."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def wait(page: Any, expression: str) -> None:
    for _ in range(PATIENCE // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"waited in vain for {expression}: {page.inner_text('main')[:500]}")


def test_kill_9_of_the_studio_loses_no_vote(tmp_path: Path) -> None:
    """Votes that the page has shown as saved are in the log; those cast while nothing answers are sent later."""
    runs = tmp_path / "runs"
    session, port = make_votes(runs, "taste"), reserve_port()
    process = start_studio(runs, port)
    images = "[...document.querySelectorAll('#ballot:not([hidden]) #stage img')]"
    loaded = f"{images}.filter(each => each.complete && each.naturalWidth).length == 2"
    fetched = "{}.every(n => performance.getEntriesByType('resource').some(e => e.name.endsWith('/samples/' + n)))"
    counted = "document.getElementById('count').textContent.startsWith('{} of')"
    try:
        with open_browser() as context:
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            page.goto(f"http://127.0.0.1:{port}/votes/taste")
            page.keyboard.type("anna")
            page.keyboard.press("Enter")
            for number in range(10):
                wait(page, loaded)
                if number in (3, 7):
                    if number == 3:  # everything so far was acknowledged
                        wait(page, "document.getElementById('saved').textContent == 'saved'")
                    wait(page, fetched.format(list(session.schedule[number + 1])))  # the next pair needs no studio
                    process.kill()
                    process.wait()
                    assert number == 7 or len(read_votes(session.directory)) == 3
                page.keyboard.press("ArrowLeft")
                wait(page, counted.format(number + 1))
                if number in (4, 8):
                    process = start_studio(runs, port)
                    page.evaluate("dispatchEvent(new Event('online'))")
            wait(page, "document.getElementById('saved').textContent == 'saved'")
            page.reload()
            wait(page, counted.format(10))
            assert not context.refused
    finally:
        end_all(runs, process)
    votes = read_votes(session.directory)
    assert len({vote.id for vote in votes}) == len({tuple(each.file for each in vote.samples) for vote in votes}) == 10


def test_hostile_page_in_the_same_browser_starts_stops_and_votes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    session = make_votes(runs, "taste")
    for ballot in next_ballots(session, "anna", 12):
        vote = record_vote(session, "anna", ballot, 0)
    run = write_fake_run(runs / "mine", 0.3)
    monkeypatch.setattr(JobQueue, "start_thread", lambda self: None)  # what is queued stays queued
    queue = JobQueue(runs)
    job = queue.submit("train", ["train", "grpo-toy-flow"], runs / "waiting", "cpu")
    before = [each.read_bytes() for each in sorted((runs / ".studio/jobs").glob("*.json"))]
    log = (session.directory / "votes.jsonl").read_bytes()
    ballot = {"id": new_vote_id(), "voter": "anna", "samples": [0, 1], "choice": 0}
    align = {"model": "grpo-toy-flow", "method": "grpo", "name": "x", "prompts": "4"}
    targets: dict[str, dict[str, Any]] = {
        "jobs/new": {"recipe": "grpo-toy-flow", "name": "evil", "device": "cpu"},
        f"jobs/{job}/stop": {"a": "1"},
        f"jobs/{job}/remove": {"a": "1"},
        "run-actions/stop": {"run": "mine"},
        "run-actions/extend": {"run": "mine", "steps": "999", "device": "cpu"},
        "votes": {"name": "evil", "sources": "grpo-toy-flow", "seeds": "2", "kind": "pair"},
        "votes/taste/vote": ballot,
        "votes/taste/undo": {"id": vote.id, "voter": "anna"},
        "votes/taste/end": {"a": "1"},
        "votes/taste/learn": {"recipe": "preference-playground"},
        "votes/taste/align": align,
        "alignments/x/resume": {"a": "1"},
    }
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/index.html").write_text("<!doctype html><title>hostile</title><body>")
    with (
        serve_studio(StudioServerOptions(runs, port=0)) as address,
        serve_page(tmp_path / "evil") as port,
        open_browser() as context,
    ):
        own = context.new_page()
        own.goto(f"{address}runs")  # the studio is open in another tab
        statuses: list[tuple[str, int]] = []
        for host in ("127.0.0.1", "localhost"):  # the same site, and another one
            page = context.new_page()
            page.on("response", lambda answer: statuses.append((answer.url, answer.status)))
            page.goto(f"http://{host}:{port}/index.html")
            page.evaluate(ATTACK, [[address + path, body] for path, body in targets.items()])
            page.close()
        posted = [status for url, status in statuses if url.startswith(address)]
        assert posted and set(posted) <= {403, 404, 405}, set(statuses)
        assert own.evaluate("fetch('/runs').then(answer => answer.status)") == 200
        # The same requests from a page of the studio do change something, so that the refusals say something.
        send = "([path, body]) => fetch('/' + path, {method: 'POST', body: JSON.stringify(body)}).then(a => a.status)"
        assert log == (session.directory / "votes.jsonl").read_bytes()
        assert before == [each.read_bytes() for each in sorted((runs / ".studio/jobs").glob("*.json"))]
        assert not session.has_ended and [each.name for each in (runs / ".studio/votes").iterdir()] == ["taste"]
        assert own.evaluate(send, ["votes/taste/undo", targets["votes/taste/undo"]]) == 200
    assert len(read_votes(session.directory)) == 11 and run.is_dir()


def test_hostile_prompts_names_and_voters_are_text_on_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, prompts = tmp_path / "runs", (HOSTILE, "a dog", "a cat")
    monkeypatch.setattr(JobQueue, "start_thread", lambda self: None)
    run = write_fake_run(runs / "mine", 0.3)
    for path in (run / "samples").glob("*.json"):
        grid = json.loads(path.read_text())
        path.write_text(json.dumps({**grid, "prompts": [HOSTILE, *grid["prompts"][1:]]}))
    for name, kind in (("pairs", "pair"), ("four", "best_of"), ("likes", "like")):
        session = make_votes(runs, name, kind, prompts)
        for ballot in next_ballots(session, HOSTILE[:90], 3):
            record_vote(session, HOSTILE[:90], ballot, True if kind == "like" else 0)
    session.end()
    (runs / "aligned").mkdir()
    state = {"votes": str(runs / ".studio/votes/pairs/votes.jsonl"), "model": HOSTILE, "method": HOSTILE, "count": 3}
    (runs / "aligned/alignment.json").write_text(json.dumps(state))
    shutil.copytree(runs / ".studio/votes/pairs", runs / "aligned/evaluation")
    load_session(runs / "aligned/evaluation").end()
    job = JobQueue(runs).submit("train", ["train", HOSTILE], runs / "waiting", "cpu", title=HOSTILE)
    report = write_report([run], tmp_path / "site" / "report.html")
    shown = 0
    with serve_studio(StudioServerOptions(runs, port=0)) as address, serve_page(report.parent) as port:
        pages = [
            "runs",
            "runs/mine",
            "compare?item=mine&item=mine@20",
            "votes",
            "votes/pairs",
            "votes/four",
            "votes/likes",
        ]
        pages += [f"votes/{name}/result" for name in ("pairs", "likes", "aligned~evaluation")]
        pages += ["votes/pairs/taste", "alignments/aligned", "jobs", f"jobs/{job}", "jobs/new?recipe=run:mine"]
        with open_browser() as context:
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            page.on("dialog", lambda dialog: pytest.fail(dialog.message))
            page.goto(f"{address}votes/pairs")
            page.evaluate("localStorage.setItem('tastemaker-voter', 'anna')")
            for path in [*(address + each for each in pages), f"http://127.0.0.1:{port}/report.html"]:
                page.goto(path)
                page.wait_for_timeout(400)
                assert page.evaluate("document.title") != "hacked", path
                assert page.locator("img[src=x]").count() == 0, path
                shown += "<script>document.title" in page.inner_text("body")
            prompts_shown = set()
            page.goto(f"{address}votes/pairs")
            for _ in range(4):
                wait(page, "!document.getElementById('ballot').hidden")
                prompts_shown.add(page.inner_text("#prompt"))
                page.keyboard.press("s")
                page.wait_for_timeout(100)
            assert HOSTILE in prompts_shown and page.evaluate("document.title") != "hacked"
    assert shown >= 6  # as text
