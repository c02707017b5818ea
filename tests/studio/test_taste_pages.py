"""Learning a taste in the browser: what the buttons start, what they refuse, and what the pages say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from starlette.testclient import TestClient
from voting_pictures import make_session

from tastemaker.preferences.alignment import Method
from tastemaker.preferences.session_taste import record_preference_model
from tastemaker.preferences.sessions import Session, load_session, next_ballots, record_vote, write_active_order
from tastemaker.studio.app import Studio, StudioOptions, create_app
from tastemaker.studio.job_queue import JobQueue
from tastemaker.studio.taste_pages import METHODS

ADDRESS = "http://127.0.0.1"
OWN_CODE = "objective: {type: my.module:Mine}\nsteps: 5\n"
ALIGN = {"model": "grpo-toy-flow", "method": "grpo", "name": "mine", "prompts": "4", "steps": "3"}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    made = make_session(tmp_path)
    (tmp_path / "runs/.studio/votes").mkdir(parents=True)
    made.directory.rename(tmp_path / "runs/.studio/votes/taste")
    return load_session(tmp_path / "runs/.studio/votes/taste")


@pytest.fixture
def client(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A studio whose queue does not advance, so that nothing is started."""
    monkeypatch.setattr(JobQueue, "start_thread", lambda self: None)
    app = create_app(StudioOptions(tmp_path / "runs"))
    with TestClient(app, base_url=ADDRESS, headers={"Origin": ADDRESS}) as client:
        yield client


def jobs_of(client: TestClient) -> JobQueue:
    studio: Studio = client.app.state.studio  # type: ignore[attr-defined]
    return studio.jobs


def vote(session: Session, count: int) -> None:
    for ballot in next_ballots(session, "anna", count):
        brighter = int(session.samples[ballot.samples[1]].source == 1)
        record_vote(session, "anna", ballot, brighter)


def write_model(session: Session, run: Path) -> None:
    run.mkdir()
    curve = [{"votes": 10, "accuracy": 0.6, "accuracy_low": 0.4, "accuracy_high": 0.8}]
    report = {"summary": "with 12 votes it predicts 74 % <b>", "learning_curve": curve}
    (run / "preference.json").write_text(json.dumps(report))
    record_preference_model(session, run)


def test_buttons_queue_the_commands_of_the_terminal(client: TestClient, session: Session, tmp_path: Path) -> None:
    runs, jobs = tmp_path / "runs", jobs_of(client)
    assert client.post("/votes/taste/learn", data={"recipe": ""}).status_code == 400  # no votes yet
    assert jobs.jobs() == []
    vote(session, 12)
    form = {"recipe": "preference-playground", "active": "on"}
    answer = client.post("/votes/taste/learn", data=form, follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/votes/taste/taste"
    (job,) = jobs.jobs()
    out = runs / "preference-taste"
    words = ("vote", "learn", str(session.directory), f"--out={out}", "--recipe=preference-playground", "--active")
    assert (job.kind, job.arguments, job.allow_code) == ("preference", words, False)
    assert "learn the taste of taste" in client.get("/votes/taste/taste").text
    answer = client.post("/votes/taste/align", data=ALIGN | {"extra": "optim.lr=1e-4"}, follow_redirects=False)
    assert answer.headers["location"] == "/alignments/mine"
    job = jobs.jobs()[-1]
    log = session.directory / "votes.jsonl"
    words = ("align", f"--votes={log}", "--model=grpo-toy-flow", "--method=grpo", f"--out={runs / 'mine'}")
    assert job.arguments == (*words, "--num-prompts=4", "steps=3", "optim.lr=1e-4")
    page = client.get("/alignments/mine").text  # before its process has written anything
    assert "waits for cpu" in page and f"/jobs/{job.id}" in page


def test_every_method_of_align_can_be_chosen_and_likes_suggest_kto(tmp_path: Path) -> None:
    assert list(METHODS) == list(get_args(Method))
    made = make_session(tmp_path, kind="like")
    (tmp_path / "runs/.studio/votes").mkdir(parents=True)
    made.directory.rename(tmp_path / "runs/.studio/votes/likes")
    with TestClient(create_app(StudioOptions(tmp_path / "runs")), base_url=ADDRESS) as client:
        page = client.get("/votes/likes/taste").text
    assert '<option value="kto" selected>' in page


def test_wrong_forms_and_other_origins_start_nothing(client: TestClient, session: Session, tmp_path: Path) -> None:
    vote(session, 12)
    run = tmp_path / "runs/mine-too"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(OWN_CODE)
    (run / "metrics.jsonl").write_text("{}\n")
    for change, code in (
        ({"method": "magic"}, "TM1505"),
        ({"model": "../outside"}, "TM1506"),
        ({"model": str(tmp_path)}, "TM1506"),
        ({"model": "mine-too"}, "TM1450"),
        ({"extra": "objective.type=os:system"}, "TM1450"),
        ({"extra": "--tiny"}, "TM1447"),
        ({"extra": "output_dir=/tmp"}, "TM1448"),
        ({"name": "../x"}, "TM1454"),
        ({"name": "mine-too"}, "TM1455"),
        ({"prompts": "0"}, "TM1461"),
        ({"voter": "ben"}, "TM1511"),
    ):
        answer = client.post("/votes/taste/align", data=ALIGN | change)
        assert answer.status_code == 400 and code in answer.text, change
    assert "TM1504" in client.post("/votes/taste/learn", data={"recipe": "grpo-toy-flow"}).text
    assert "TM1510" in client.post("/votes/taste/order", data={"order": "active"}).text
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9"):
        for action, form in (("learn", {}), ("align", ALIGN), ("order", {"order": "active"})):
            answer = client.post(f"/votes/taste/{action}", data=form, headers={"Origin": origin})
            assert answer.status_code == 403
        assert client.post("/alignments/mine/resume", data={}, headers={"Origin": origin}).status_code == 403
    assert client.get("/alignments/..%2f..").status_code == 404
    assert jobs_of(client).jobs() == []


def test_pairs_are_ordered_once_there_is_a_model_but_not_those_of_an_evaluation(
    client: TestClient, session: Session, tmp_path: Path
) -> None:
    vote(session, 12)
    page = client.get("/votes/taste/taste").text
    assert 'id="order-active"' not in page and "secretafter" not in page  # still blind
    write_model(session, tmp_path / "runs/preference-taste")
    page = client.get("/votes/taste/taste").text
    assert "With 12 votes it predicts 74 % &lt;b&gt;" in page and "40 % to 80 %" in page and 'id="order-active"' in page
    client.post("/votes/taste/order", data={"order": "active"})
    (job,) = jobs_of(client).jobs()
    assert job.arguments == ("vote", "order", str(session.directory))
    a, b = session.schedule[-1]
    write_active_order(session, [(a, b)])  # as that job does
    shown = client.get("/votes/taste/next?voter=ben&count=1").json()["ballots"][0]["samples"]
    assert sorted(shown) == sorted((a, b))
    client.post("/votes/taste/end", data={"end": "1"})
    assert "holds for them only" in client.get("/votes/taste/result").text
    client.post("/votes/taste/order", data={"order": "balanced"})
    assert "holds for them only" not in client.get("/votes/taste/result").text
    shutil.copytree(session.directory, tmp_path / "runs/mine/evaluation")
    (tmp_path / "runs/mine/alignment.json").write_text("{}")
    answer = client.post("/votes/mine~evaluation/order", data={"order": "active"})
    assert answer.status_code == 400 and "TM1509" in answer.text


def test_alignment_page_follows_the_stages_and_states_the_win_rate_at_the_end(
    client: TestClient, session: Session, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/mine"
    for name, steps in (("preference", 0), ("model", 3)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.yaml").write_text("objective: {type: grpo}\nsteps: 6\n")
        (folder / name / "metrics.jsonl").write_text(json.dumps({"step": steps}) + "\n")
    state = {"votes": str(session.directory / "votes.jsonl"), "model": "<script>alert(1)", "method": "grpo"}
    (folder / "alignment.json").write_text(json.dumps({**state, "count": 12}))
    (folder / "preference/preference.json").write_text(json.dumps({"summary": "it predicts 80 %"}))
    page = client.get("/alignments/mine").text
    assert "It predicts 80 %" in page and "step 3 of 6" in page and "vote-blind" not in page
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    shutil.copytree(session.directory, folder / "evaluation", dirs_exist_ok=True)
    text = (folder / "evaluation/session.json").read_text()
    text = text.replace("secretbefore", "before").replace("secretafter", "after")
    (folder / "evaluation/session.json").write_text(text)
    page = client.get("/alignments/mine").text
    assert 'href="/votes/mine~evaluation"' in page and "win-rate" not in page
    assert "mine" in client.get("/votes/taste/taste").text and "ready for the blind vote" in client.get("/votes").text
    evaluation = load_session(folder / "evaluation")
    vote(evaluation, 12)
    assert "win-rate" not in client.get("/alignments/mine").text  # of 36 pairs: blind until the end
    evaluation.end()
    sentence = "ou preferred the new model in 100 % of 12 pairs; 95 % interval 76 to 100 %"
    page = client.get("/alignments/mine").text
    assert f'id="win-rate">Y{sentence}.' in page and "Decided: the new model is preferred to the old model" in page
    page = client.get("/votes/mine~evaluation/result").text
    assert sentence in page and "ecided: the new model is preferred to the old model" in page
    assert "Wilson" in page and "stopping rule" in page and 'href="/alignments/mine"' in page
