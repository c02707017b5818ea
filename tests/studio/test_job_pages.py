"""Pages of jobs: the form of a new run, buttons of jobs and runs, samples, and what a browser may not do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import reserve_port
from starlette.testclient import TestClient
from studio_process import end_all, start_studio

from tastemaker.studio.app import Studio, StudioOptions, create_app
from tastemaker.studio.config_worker import answer
from tastemaker.studio.job_events import JobFeed
from tastemaker.studio.job_queue import JobQueue

ADDRESS = "http://127.0.0.1"
OWN_CODE = "objective: {type: my.module:Mine}\nsteps: 5\n"


class InlineWorker:
    """Checks in this process, which has imported torch already."""

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        return answer(request)

    def warm_up(self) -> None:
        pass


class HangingWorker:
    """Never answers in time."""

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        raise TimeoutError


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A studio whose queue does not advance, so that nothing is started."""
    monkeypatch.setattr(JobQueue, "start_thread", lambda self: None)
    app = create_app(StudioOptions(tmp_path))
    studio: Studio = app.state.studio
    monkeypatch.setattr(studio, "config_worker", InlineWorker())
    monkeypatch.setattr(studio, "plan_worker", HangingWorker())
    with TestClient(app, base_url=ADDRESS, headers={"Origin": ADDRESS}) as client:
        yield client


def studio_of(client: TestClient) -> Studio:
    studio: Studio = client.app.state.studio  # type: ignore[attr-defined]
    return studio


def make_run(root: Path, name: str = "old", config: str = "objective: {type: grpo}\nsteps: 5\n") -> Path:
    run = root / name
    (run / "checkpoints/step-000003").mkdir(parents=True)
    (run / "config.yaml").write_text(config)
    (run / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n')
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    return run


def new_run(**settings: str) -> dict[str, str]:
    return {"recipe": "grpo-toy-flow", "name": "a", "device": "cpu", **{f"set.{k}": v for k, v in settings.items()}}


def test_recipes_are_listed_and_a_form_starts_a_run(client: TestClient, tmp_path: Path) -> None:
    assert client.get("/jobs").status_code == 200
    page = client.get("/jobs/new?q=grpo+toy").text
    assert "/jobs/new?recipe=grpo-toy-flow" in page
    assert "srpo-flux-hps" not in page
    page = client.get("/jobs/new?recipe=grpo-toy-flow").text
    assert 'name="set.optim.lr"' in page
    assert "optimizer updates per pass" in page
    assert client.get("/jobs/new?recipe=nothing").status_code == 404
    response = client.post("/jobs/new", data=new_run(steps="12"), follow_redirects=False)
    assert response.status_code == 303
    (job,) = studio_of(client).jobs.jobs()
    assert response.headers["location"] == f"/jobs/{job.id}"
    assert job.arguments == ("train", "grpo-toy-flow", f"output_dir={tmp_path}", "name=a", "steps=12")
    assert (job.device, job.directory, job.allow_code) == ("cpu", str(tmp_path / "a"), False)
    assert "grpo-toy-flow" in client.get(f"/jobs/{job.id}").text
    again = client.post("/jobs/new", data=new_run())
    assert again.status_code == 400
    assert "TM1434" in again.text


def test_problems_are_shown_beside_their_fields_and_nothing_starts(client: TestClient, tmp_path: Path) -> None:
    form = {**new_run(**{"optim.lr": "fast", "steps": "5"}), "extra": "nonsense=1\nsteps"}
    response = client.post("/jobs/new", data=form)
    assert response.status_code == 400
    assert re.search(r'id="field-extra-problem" role="alert">[^<]*TM1447', response.text)
    response = client.post("/jobs/new", data={**form, "extra": "model.weights=/x"})
    assert re.search(r'id="field-optim-lr-problem" role="alert">[^<]*optim.lr', response.text)
    assert 'value="fast"' in response.text  # what was entered stays
    checked = client.post("/jobs/new/check", data={**form, "extra": "data.prompts=[a/b]"}).json()
    assert set(checked["problems"]) == {"optim.lr"}
    assert checked["overrides"] == ["optim.lr=fast", "steps=5", "data.prompts=[a/b]"]
    make_run(tmp_path)
    for name in ("../up", "a/b", ".hidden", "old", "", "x" * 200):
        checked = client.post("/jobs/new/check", data={**new_run(), "name": name}).json()
        assert re.search("TM145[45]", checked["problems"]["name"]), name
    plan = client.post("/jobs/new/plan", data=new_run()).json()
    assert "took longer" in plan["reason"]  # the form does not wait for it
    assert studio_of(client).jobs.jobs() == []


def test_user_code_is_not_started_from_the_browser(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path, config=OWN_CODE)
    for extra in ("objective.type=os:system", "rewards.x={type: function, function: os:system}"):
        response = client.post("/jobs/new", data={**new_run(), "extra": extra})
        assert response.status_code == 400
        assert "TM1450" in response.text
    response = client.post("/jobs/new", data={**new_run(), "recipe": "run:old"})
    assert "TM1450" in response.text
    for action, more in (
        ("resume", {}),
        ("extend", {"steps": "9"}),
        ("sample", {"prompt": "a", "seed": "0", "count": "1"}),
    ):
        response = client.post(f"/run-actions/{action}", data={"run": "old", "device": "cpu", **more})
        assert response.status_code == 400
        assert "TM1450" in response.text
    assert "--allow-code" in client.get("/jobs/new?recipe=run:old").text
    assert studio_of(client).jobs.jobs() == []


def test_runs_are_resumed_extended_and_sampled(client: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    jobs = studio_of(client).jobs
    response = client.post("/run-actions/resume", data={"run": "old", "device": "cpu"}, follow_redirects=False)
    assert response.headers["location"] == "/runs/old"
    (job,) = jobs.jobs()
    assert job.arguments == ("train", str(run))
    client.post(f"/jobs/{job.id}/stop")
    assert jobs.find(job.id).state == "stopped"
    assert "TM1457" in client.post("/run-actions/extend", data={"run": "old", "steps": "5"}).text
    client.post("/run-actions/extend", data={"run": "old", "steps": "9", "device": "cpu"})
    assert jobs.jobs()[-1].arguments == ("train", str(run), "steps=9")
    sample = {"run": "old", "prompt": "--import=os <script>", "seed": "4", "count": "2", "checkpoint": "step-000003"}
    json_header = {"Accept": "application/json"}
    page = client.post("/run-actions/sample", data={**sample, "device": "cpu"}, headers=json_header).json()["page"]
    job = jobs.find(page.rpartition("/")[2])
    assert job.arguments[:3] == ("generate", str(run / "checkpoints/step-000003"), "--prompt=--import=os <script>")
    assert job.beside
    shown = client.get("/jobs").text + client.get(page).text
    assert "<script>" not in re.sub(r'<script src="/static[^>]*>', "", shown)
    for wrong, code in (({"checkpoint": "../x"}, "TM1460"), ({"count": "99"}, "TM1461"), ({"prompt": " "}, "TM1459")):
        assert code in client.post("/run-actions/sample", data={**sample, **wrong}).text
    folder = Path(job.directory)
    folder.mkdir(parents=True)
    (folder / "000-0.png").write_bytes(b"picture")
    (folder / "metadata.jsonl").write_text("{}")
    events = dict(JobFeed(jobs, job.id, 0, lambda directory: "").collect())
    assert events["files"] == [f"{page}/files/000-0.png"]
    assert client.get(events["files"][0]).content == b"picture"
    for name in ("metadata.jsonl", "..%2f..%2fjobs%2fx.png", "missing.png"):
        assert client.get(f"{page}/files/{name}").status_code == 404
    client.post(f"/jobs/{job.id}/remove")
    assert not folder.exists()


def test_pages_of_other_origins_cannot_start_or_stop_anything(client: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path)
    jobs = studio_of(client).jobs
    id = jobs.submit("train", ["train", "x"], tmp_path / "b", "cpu")
    requests = {
        "/jobs/new": new_run(),
        f"/jobs/{id}/stop": {},
        f"/jobs/{id}/remove": {},
        "/run-actions/resume": {"run": "old"},
    }
    for address, form in requests.items():
        for origin in ("http://evil.example", "null", "http://127.0.0.1:9"):
            assert client.post(address, data=form, headers={"Origin": origin}).status_code == 403
        assert client.get(address, follow_redirects=False).status_code in (200, 404, 405)
    assert [(job.id, job.state) for job in jobs.jobs()] == [(id, "queued")]


@pytest.mark.slow
def test_in_a_browser_a_run_is_configured_started_and_stopped_after_kill_9_of_the_studio(tmp_path: Path) -> None:
    """Also: a recipe is chosen by the filter, and a wrong value has its problem beside it."""
    browsers = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'tastemaker[test]'")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("needs /usr/bin/chromium")
    port = reserve_port()
    process = start_studio(tmp_path, port)
    address, patience = f"http://127.0.0.1:{port}", 300_000
    expect = browsers.expect
    expect.set_options(timeout=patience)
    try:
        with browsers.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(patience)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.route(re.compile(rf"^(?!{re.escape(address)}/)"), lambda route: route.abort())
            page.goto(f"{address}/jobs/new")
            page.fill("#recipe-filter", "grpo toy flow penalty")
            page.click("a:text-is('grpo-toy-flow')")
            page.fill("#field-optim-lr", "fast")
            expect(page.locator("#field-optim-lr-problem")).to_contain_text("optim.lr", timeout=patience)
            page.fill("#field-optim-lr", "1e-3")
            page.fill("#field-steps", "100000")
            page.fill("#field-sample-every", "0")
            page.fill("#field-name", "mine")
            expect(page.locator("#check-state.good")).to_be_visible(timeout=patience)
            expect(page.locator("#changes")).to_contain_text("steps=100000")
            page.click("#start")
            expect(page.locator("#job-state")).to_have_text("running", timeout=patience)
            expect(page.locator("#log")).to_contain_text("step ", timeout=patience)
            process.kill()
            process.wait()
            process = start_studio(tmp_path, port)
            page.goto(f"{address}/jobs")
            expect(page.locator(".state.running")).to_be_visible(timeout=patience)
            page.click("button:text-is('Stop')")
            expect(page.locator(".state.stopped")).to_be_visible(timeout=patience)
            expect(page.locator(".job")).to_contain_text("saved")
            assert not errors
            browser.close()
        assert list((tmp_path / "mine/checkpoints").glob("step-*"))
        (record,) = (tmp_path / ".studio/jobs").glob("*.json")
        assert json.loads(record.read_text())["exit_code"] == 130
    finally:
        end_all(tmp_path, process)
