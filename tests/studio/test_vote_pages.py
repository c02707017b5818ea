"""Voting in the browser: blindness, durability of what was acknowledged, refusals, and a vote by keyboard."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient
from voting_pictures import PROMPTS, make_session, write_pictures

from tastemaker.preferences.sessions import Session, load_session
from tastemaker.preferences.votes import new_vote_id, read_votes
from tastemaker.serving.closing_server import ClosingServer
from tastemaker.studio import vote_pages
from tastemaker.studio.app import StudioOptions, create_app

OWN = {"Origin": "http://localhost"}
BROWSER = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


def make_runs(folder: Path, **settings: Any) -> tuple[Path, Session]:
    """Make a directory of runs with a voting session of the name taste."""
    session = make_session(folder, **settings)
    runs = folder / "runs"
    (runs / ".studio" / "votes").mkdir(parents=True)
    session.directory.rename(runs / ".studio" / "votes" / "taste")
    return runs, load_session(runs / ".studio" / "votes" / "taste")


def open_client(runs: Path) -> TestClient:
    return TestClient(create_app(StudioOptions(runs)), base_url="http://localhost", headers=OWN)


def send_vote(
    client: TestClient, ballot: dict[str, Any], choice: object, voter: str = "anna", /, **changes: Any
) -> Any:
    body = {"id": new_vote_id(), "voter": voter, "samples": ballot["samples"], "choice": choice, "seconds": 1.25}
    return client.post("/votes/taste/vote", json={**body, **changes})


def test_blind_session_tells_nothing_about_its_sources_before_the_end(tmp_path: Path) -> None:
    runs, session = make_runs(tmp_path)
    client = open_client(runs)

    def collect() -> str:
        pages = [
            client.get(f"/votes{path}") for path in ("", "/taste", "/taste/result", "/taste/next?voter=anna&count=8")
        ]
        assert [page.status_code for page in pages] == [200] * 4
        sample = client.get("/votes/taste/samples/0")
        assert sample.status_code == 200 and sample.content == session.sample_path(0).read_bytes()
        pages.append(send_vote(client, client.get("/votes/taste/next?voter=anna").json()["ballots"][0], 0))
        headers = str(sample.headers) + "".join(str(page.headers) for page in pages)
        assert "last-modified" not in sample.headers and "etag" not in sample.headers
        return "".join(page.text for page in pages) + headers

    text = collect()
    folders = {Path(sample.file).parent.name for sample in session.samples}
    hidden = [*folders, "secretbefore", "secretafter", str(tmp_path), *(sample.sha256 for sample in session.samples)]
    assert not [each for each in hidden if each in text]
    assert "%" not in re.sub(r"<[^>]*>", "", client.get("/votes/taste/result").text).replace("100%", "")
    assert client.post(
        "/votes/taste/end", content="", headers={"Content-Type": "application/x-www-form-urlencoded"}
    ).url.path.endswith("/result")
    result = client.get("/votes/taste/result").text
    assert "secretafter against secretbefore" in result and "95 % interval" in result and "ot decided yet" in result
    assert send_vote(client, {"samples": [0, 1]}, 0).status_code == 400  # nobody votes after the sources are known


def test_acknowledged_votes_are_in_the_log_and_undo_takes_them_back(tmp_path: Path) -> None:
    runs, session = make_runs(tmp_path)
    client, vote_id = open_client(runs), new_vote_id()
    first, second = client.get("/votes/taste/next?voter=anna&count=2").json()["ballots"]
    for _ in range(2):  # the answer was lost, and the page sends it again
        assert send_vote(client, first, 1, id=vote_id).json()["progress"]["votes"] == 1
    (vote,) = read_votes(session.directory)
    assert vote.id == vote_id and vote.voter == "anna" and vote.seconds == 1.25
    assert session.samples[first["samples"][1]].file == vote.samples[int(vote.choice or 0)].file
    assert send_vote(client, second, "tie", "ben").json()["progress"]["votes"] == 1
    assert client.post("/votes/taste/undo", json={"id": vote_id, "voter": "ben"}).status_code == 400
    assert client.post("/votes/taste/undo", json={"id": vote_id, "voter": "anna"}).json()["progress"]["votes"] == 0
    assert [vote.voter for vote in read_votes(session.directory)] == ["ben"]
    again = client.get("/votes/taste/next?voter=anna&count=1").json()["ballots"][0]
    assert again == first  # in the same order on the screen
    key = "-".join(map(str, sorted(first["samples"])))
    assert client.get(f"/votes/taste/next?voter=anna&count=1&exclude={key}").json()["ballots"][0] != first


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    runs, session = make_runs(tmp_path, per_prompt=1)
    (tmp_path / "secret.txt").write_text("the secret")
    client = open_client(runs)
    ballot = client.get("/votes/taste/next?voter=anna").json()["ballots"][0]
    changes = [
        {"id": "x"},
        {"samples": [0, 0]},
        {"samples": [0, 999]},
        {"samples": "0"},
        {"choice": 7},
        {"choice": None},
    ]
    changes += [{"voter": ""}, {"voter": "a\nb"}, {"seconds": "long"}, {"samples": [True, 1]}, {"choice": True}]
    for change in changes:
        answer = send_vote(client, ballot, 0, **change)
        assert answer.status_code == 400 and "[TM" in answer.json()["error"], change
    assert client.post("/votes/taste/vote", content=b"[").status_code == 400
    assert client.post("/votes/taste/vote", content=b"x" * 20_000).status_code == 413
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": ""}):
        assert client.post("/votes/taste/vote", json={}, headers=headers).status_code == 403
        assert client.post("/votes/taste/end", headers=headers).status_code == 403
    for path in ("nothing", "%2e%2e", "taste/samples/999", "taste/samples/-1", "taste/samples/..%2f..%2fsession.json"):
        assert client.get(f"/votes/{path}").status_code == 404, path
    assert client.get("/votes/taste/next?voter=").status_code == 400
    assert not (session.directory / "votes.jsonl").exists() and not session.has_ended


def test_session_is_created_by_the_form_with_sources_inside_the_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    for name, level in (("old <b>", 10), ("new", 200)):
        write_pictures(runs / name, level)
    write_pictures(tmp_path / "outside", 10)
    started: list[list[str]] = []
    monkeypatch.setattr(vote_pages, "start_job", lambda studio, arguments, session, title: started.append(arguments))
    client = open_client(runs)
    form = {"name": "mine", "sources": "old <b>\nnew", "seeds": "1", "kind": "pair", "blind": "on", "prompts": ""}
    for change in (
        {"sources": "../outside\nnew"},
        {"sources": f"{tmp_path}/outside"},
        {"name": "../x"},
        {"seeds": "0"},
    ):
        answer = client.post("/votes", data={**form, **change})
        assert answer.status_code == 400 and "[TM" in answer.text, change
    assert not started and not (runs / ".studio").exists()
    assert client.post("/votes", data=form, follow_redirects=False).headers["location"] == "/votes/mine"
    assert started == [["vote", "create", str(runs / ".studio" / "votes" / "mine")]]
    assert "the samples are made" in client.get("/votes/mine").text
    assert client.post("/votes", data=form).status_code == 400  # the name is taken
    assert "mine" in client.get("/votes").text and "<b>" not in client.get("/votes/mine/result").text


def test_prompts_and_names_are_shown_as_text(tmp_path: Path) -> None:
    runs, _ = make_runs(tmp_path, per_prompt=1, blind=False)
    client = open_client(runs)
    for _ in range(4):
        ballot = client.get("/votes/taste/next?voter=<i>x</i>").json()["ballots"][0]
        assert set(ballot["sources"]) == {"secretbefore", "secretafter"}  # this session is not blind
        send_vote(client, ballot, 0, "<i>x</i>")
    page = client.get("/votes/taste/result").text + client.get("/votes").text
    assert "&lt;b&gt;blue" in page and "<b>" not in page and "<i>" not in page
    assert client.get("/votes/taste/next?voter=<i>x</i>").json()["ballots"] == []


@contextmanager
def serve(runs: Path) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ClosingServer(uvicorn.Config(create_app(StudioOptions(runs)), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@pytest.mark.slow
def test_twelve_votes_by_keyboard_with_undo_and_a_lost_connection(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    runs, session = make_runs(tmp_path)
    red = [Image.open(session.sample_path(k)).getpixel((0, 0)) for k in range(len(session.samples))]
    with serve(runs) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Security" in message.text else None)
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(f"{address}/votes/taste")
        page.keyboard.type("anna")  # the name field has the focus
        page.keyboard.press("Enter")

        def wait(expression: str) -> None:  # wait_for_function needs eval, which the pages forbid
            for _ in range(2400):
                if page.evaluate(expression):
                    return
                time.sleep(0.05)
            raise AssertionError(f"waited in vain for {expression}; {page.inner_text('main')}")

        def samples() -> list[int]:
            # Without a next ballot the stage is hidden, and holds the images of the one before.
            shown = "#ballot:not([hidden]) #stage img"
            wait(f"(all => all.length == 2 && all.every(e => e.complete))([...document.querySelectorAll('{shown}')])")
            return [int(each.get_attribute("src").rpartition("/")[2]) for each in page.query_selector_all(shown)]

        def count(votes: int) -> None:
            wait(f"document.getElementById('count').textContent.startsWith('{votes} of')")
            wait("document.getElementById('saved').textContent == 'saved'")

        for k in range(12):
            left, right = samples()
            page.keyboard.press("ArrowLeft" if red[left] > red[right] else "ArrowRight")
            if k == 5:  # a wrong vote, taken back
                count(6)
                wrong = samples()
                page.keyboard.press("ArrowLeft" if red[wrong[0]] < red[wrong[1]] else "ArrowRight")
                count(7)
                page.keyboard.press("z")
                assert samples() == wrong
                count(6)
            if k == 8:  # the connection is lost: the vote waits on the page
                count(9)
                left, right = samples()
                page.context.set_offline(True)
                page.keyboard.press("1" if red[left] > red[right] else "2")
                wait("document.getElementById('saved').textContent.startsWith('No connection')")
                assert len(read_votes(session.directory)) == 9
                page.context.set_offline(False)
                count(10)
        count(13)
        assert len(read_votes(session.directory)) == 13
        page.goto(f"{address}/votes/taste/result")
        assert "secretafter" not in page.inner_text("main")
        with page.expect_navigation():
            page.click("text=End the vote")
        text = page.inner_text("main")
        assert "preferred secretafter in 100 % of 13 pairs" in text and "you can stop voting" in text
        assert not errors
        browser.close()
    assert {vote.choice for vote in read_votes(session.directory)} == {1} and set(PROMPTS) == set(session.prompts)


def test_damaged_log_is_named_and_hides_no_other_session(tmp_path: Path) -> None:
    runs, session = make_runs(tmp_path, per_prompt=1)
    shutil.copytree(session.directory, session.directory.with_name("other"))
    (session.directory / "votes.jsonl").write_text("oops\n")
    client = open_client(runs)
    page = client.get("/votes")
    assert page.status_code == 200 and "TM1393" in page.text and "/votes/other" in page.text
    assert client.get("/votes/taste/result").status_code == 409
    assert client.get("/votes/other/result").status_code == 200


def test_blind_evaluation_of_an_aligned_model_is_found_in_its_directory(tmp_path: Path) -> None:
    runs, session = make_runs(tmp_path, per_prompt=1)
    (runs / "aligned").mkdir()
    session.directory.rename(runs / "aligned" / "evaluation")
    client = open_client(runs)
    assert "/votes/aligned~evaluation" in client.get("/votes").text
    assert len(client.get("/votes/aligned~evaluation/next?voter=anna").json()["ballots"]) == 3
