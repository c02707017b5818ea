"""Pages of the studio over HTTP: content, escaping, who may ask, and which files are served."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_runs import write_evaluation, write_fake_run
from PIL import Image
from starlette.testclient import TestClient

from tastemaker.core.errors import ConfigError
from tastemaker.studio import access
from tastemaker.studio.app import StudioOptions, create_app
from tastemaker.studio.events import RunFeed
from tastemaker.studio.run_view import RunView
from tastemaker.studio.server import StudioServerOptions, choose_token, prepare_server, serve_studio

SCRIPT = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
OWN = {"Origin": "http://localhost"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs; one has hostile texts wherever a run can have texts, and links that lead outside."""
    root = tmp_path_factory.mktemp("studio") / "runs"
    for name, held in (("good", 0.3), ("sub/hacked", -0.3)):
        write_evaluation(write_fake_run(root / name, held), "after", 0.8, benchmark="playeval")
    write_fake_run(root / "edits", 0.3, sources=2)
    hostile = root / f"h {SCRIPT.replace('/', '')}"
    shutil.copytree(root / "good", hostile)
    rows = [{"step": 1, "reward/mean": 0.1, f"rewards/{SCRIPT}": 1.0}, {"step": 60, "guard/x": 1, "warning": SCRIPT}]
    (hostile / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in hostile.glob("samples/*.json"):
        grid = json.loads(path.read_text())
        grid["prompts"], grid["scores"] = [SCRIPT] * len(grid["prompts"]), {SCRIPT: 1.0}
        path.write_text(json.dumps(grid))
    (hostile / "config.yaml").write_text(f"objective: {{type: grpo}}\nname: {json.dumps(SCRIPT)}\n")
    (hostile / "environment.json").write_text(json.dumps({SCRIPT: SCRIPT}))
    status = {"state": "failed", "step": 60, "steps": 90, "reason": SCRIPT}
    (hostile / "status.json").write_text(json.dumps(status))
    write_evaluation(hostile, "x", 0.5, benchmark=SCRIPT)
    (root.parent / "secret.txt").write_text("the secret")
    return root


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    with TestClient(create_app(StudioOptions(runs)), base_url="http://localhost") as client:
        yield client


class Elements(HTMLParser):
    """Collects the tags of a page, and the scripts and handlers that a Content-Security-Policy would refuse."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refused: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attributes)
        if tag == "script" and not (values.get("src") or "").startswith("/static/"):
            self.refused.append(tag)
        self.refused += [f"{tag} {name}" for name in values if name.startswith("on") or name == "style"]
        self.addresses += [values[name] or "" for name in ("src", "href") if name in values]


def hostile_run(runs: Path) -> str:
    return next(path.name for path in runs.iterdir() if path.name.startswith("h "))


def test_pages_show_runs_and_comparisons(client: TestClient) -> None:
    page = client.get("/runs").text
    assert "good" in page and "sub/hacked" in page and "probable reward hacking" in page
    page = client.get("/runs/sub/hacked").text
    assert "step 60" in page and "a red car" in page and "abacus" in page and "PlayEval" in page and "0.75" in page
    page = client.get("/compare?item=good&item=sub/hacked@20").text
    assert page.count("a red car") >= 4 and "sub/hacked, step 20" in page and "good: after" in page


def test_hostile_texts_are_text_everywhere(client: TestClient, runs: Path) -> None:
    name = hostile_run(runs)
    pages = [
        "/runs",
        "/runs?fragment=1",
        f"/runs?q={name}",
        f"/compare?item={name}&item=good",
        "/compare",
        "/runs/" + SCRIPT,
    ]
    for address in [*pages, f"/runs/{name}", f"/sample-rows/{name}?step=20", f"/nothing/{SCRIPT}"]:
        response = client.get(address.replace("#", "%23"))
        elements = Elements(response.text)
        assert not elements.refused, (address, elements.refused)
        assert "<script>alert" not in response.text and "x" not in elements.addresses, address
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    assert "&lt;script&gt;alert(1)" in client.get(f"/runs/{name}").text


def test_every_address_on_the_pages_is_local_and_works(client: TestClient) -> None:
    pages = ["/runs", "/runs/good", "/compare?item=good&item=sub/hacked"]
    addresses = {address for page in pages for address in Elements(client.get(page).text).addresses}
    assert len(addresses) > 20 and all(address.startswith(("/", "#")) for address in addresses)
    failed = {each: code for each in addresses if each[0] == "/" and (code := client.get(each).status_code) != 200}
    assert not failed


def test_samples_are_cut_from_their_grid(client: TestClient, runs: Path) -> None:
    grid = json.loads((runs / "good/samples/step-000020.json").read_text())
    with Image.open(runs / "good/samples/step-000020.png") as image:
        expected = image.convert("RGB").crop(grid["boxes"][1]).tobytes()
    response = client.get("/samples/good?step=20&index=1&part=full")
    (runs.parent / "cut.png").write_bytes(response.content)
    with Image.open(runs.parent / "cut.png") as image:
        assert image.convert("RGB").tobytes() == expected
    assert "immutable" in response.headers["cache-control"]
    for address in ("step=20&index=4", "step=21&index=0", "step=x&index=0", "step=20", "step=20&index=-1"):
        assert client.get(f"/samples/good?{address}").status_code in (400, 404)


def test_pages_show_the_sources_of_edits(client: TestClient, runs: Path) -> None:
    for page in ("/runs/edits", "/compare?item=edits"):
        assert client.get(page).text.count("part=source") == 4, page
    assert "part=source" not in client.get("/runs/good").text
    (runs.parent / "source.png").write_bytes(client.get("/samples/edits?step=20&index=1&part=source").content)
    with Image.open(runs.parent / "source.png") as image:
        row = image.convert("RGB")
        assert row.getpixel((0, 0)) == (255, 0, 0) and row.getpixel((row.width - 1, 0)) == (0, 0, 255)
    assert client.get("/samples/good?step=20&index=1&part=source").status_code == 404


def test_files_outside_are_not_served(client: TestClient, runs: Path) -> None:
    for address in (
        "/runs/../secret.txt", "/runs/..%2fsecret.txt", "/static/../app.py", "/static/..%2fapp.py",
        "/samples/..%2f..?step=1",
        "/static/%2e%2e/app.py", "/grids/good%2f..%2f..?step=20", "/runs/%00", "/samples//etc/passwd?step=1",
    ):  # fmt: skip
        response = client.get(address)
        assert response.status_code in (400, 404) and "the secret" not in response.text, address


def test_links_in_a_run_do_not_lead_outside(tmp_path: Path, runs: Path) -> None:
    run = tmp_path / "runs/copied"
    shutil.copytree(runs / "good", run)
    secret = runs.parent / "secret.txt"
    Image.new("RGB", (900, 900), "red").save(tmp_path / "private.png")
    for name, target in (("config.yaml", secret), ("samples/step-000020.png", tmp_path / "private.png")):
        (run / name).unlink()
        (run / name).symlink_to(target)
    client = TestClient(create_app(StudioOptions(tmp_path / "runs")), base_url="http://localhost")
    page = client.get("/runs/copied")
    assert page.status_code == 200 and "the secret" not in page.text
    assert client.get("/samples/copied?step=20&index=0").status_code == 404
    assert client.get("/grids/copied?step=20").status_code == 404
    assert client.get("/samples/copied?step=40&index=0").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9999"}, 200),  # a port forward
        ({"Host": "evil.example"}, 403),  # DNS rebinding
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:81"}, 403),  # a page on another port of this machine
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),  # an image on another site's page
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link on another site
    ],
)
def test_foreign_pages_cannot_read(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/runs", headers=headers).status_code == status


def test_changes_need_the_origin_of_the_studio(client: TestClient) -> None:
    refused = [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}]
    for headers in refused:
        assert client.post("/runs", headers=headers).status_code == 403, headers
    assert client.post("/runs", headers=OWN).status_code == 405  # allowed, but there is nothing to change here
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/runs").status_code == 403


def test_token_is_required_once_and_kept_in_a_cookie(runs: Path) -> None:
    client = TestClient(create_app(StudioOptions(runs, token="T0ken")), base_url="http://localhost")
    for address in ("/runs", "/static/studio.css", "/runs?token=wrong", "/health"):
        assert client.get(address).status_code == 401
    answer = client.get("/runs?q=a&token=T0ken", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/runs?q=a"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert client.get("/runs").status_code == 200
    assert client.post("/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    other = TestClient(create_app(StudioOptions(runs, token="T0ken")), base_url="http://localhost")
    assert other.get("/runs", headers={"Authorization": "Bearer T0ken"}).status_code == 200
    outside = "http://localhost//evil.example?token=T0ken"
    assert other.get(outside, follow_redirects=False).headers["location"] == "/evil.example"


def test_large_requests_are_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(sorted((await access.read_form(request)).items())))

    client.app.router.routes.append(Route("/echo", echo, methods=["POST"]))  # type: ignore[attr-defined]
    kind = {"Content-Type": "application/x-www-form-urlencoded", **OWN}
    assert client.post("/echo", content="a=1&b=x+y", headers=kind).text == "[('a', '1'), ('b', 'x y')]"
    assert client.post("/echo", content=b"a=" + b"x" * 2**20, headers=kind).status_code == 413
    assert client.post("/echo", content=(b"x" * 2**16 for _ in range(64)), headers=kind).status_code == 413
    assert client.post("/echo", content="{}", headers=OWN).status_code == 415


def test_feed_sends_what_is_new(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "good", tmp_path / "good")
    studio = create_app(StudioOptions(tmp_path)).state.studio
    feed = RunFeed(studio, ["good"], RunView(studio, "good").newest_sample())
    first = dict(feed.collect())
    titles = [chart["title"] for chart in first["charts"]]
    assert titles[0] == "training reward" and "color, held out" in titles and "KL to the reference" in titles
    assert len(first["curves"]["0:reward/mean"]["points"]) == 60 and first["state"]["step"] == 60
    assert "samples" not in first and feed.collect() == []
    with (tmp_path / "good/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "reward/mean": 0.9}) + "\n")
    for name in ("step-000060.png", "step-000060.json"):
        content = (tmp_path / "good/samples" / name).read_bytes().replace(b'"step": 60', b'"step": 61')
        (tmp_path / "good/samples" / name.replace("60", "61")).write_bytes(content)
    second = dict(feed.collect())
    assert second["curves"] == {"0:reward/mean": {"from": 60, "points": [(61, 0.9)]}}
    assert second["samples"] == {"run": 0, "steps": [61]} and second["state"]["step"] == 61 and "charts" not in second


def test_samples_are_sent_that_are_written_between_a_page_and_its_stream(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "good", tmp_path / "good")
    app = create_app(StudioOptions(tmp_path))
    with TestClient(app, base_url="http://localhost") as client:
        (newest,) = re.findall(r'data-newest-sample="(\d+)"', client.get("/runs/good").text)
    file = tmp_path / "good/samples/step-000061.json"
    file.write_bytes(file.with_name("step-000060.json").read_bytes().replace(b'"step": 60', b'"step": 61'))
    moment = int(newest) / 1000 + 5
    os.utime(file, (moment, moment))
    feed = RunFeed(app.state.studio, ["good"], int(newest))
    assert dict(feed.collect())["samples"] == {"run": 0, "steps": [61]} and feed.collect() == []
    assert dict(RunFeed(app.state.studio, ["good"]).collect())["samples"]["steps"][-2:] == [60, 61]


def test_events_arrive_over_a_socket_while_a_run_writes(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "good", tmp_path / "good")
    with serve_studio(StudioServerOptions(tmp_path, port=0)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        connection.request("GET", "/events/runs?run=good&samples=0")
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        wait_for(response, b'"step":60')
        with (tmp_path / "good/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 62, "reward/mean": 0.9}) + "\n")
        wait_for(response, b"[62,0.9]")
        connection.close()


def wait_for(response: http.client.HTTPResponse, text: bytes) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if text in response.fp.readline():
            return
    raise AssertionError(f"{text!r} did not arrive")


def test_list_is_sent_again_only_if_it_changed(client: TestClient) -> None:
    first = client.get("/runs?fragment=1")
    headers = {"If-None-Match": first.headers["etag"]}
    assert client.get("/runs?fragment=1", headers=headers).status_code == 304


def test_mistakes_on_the_command_line_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="TM1351"):
        prepare_server(StudioServerOptions(tmp_path / "missing"))
    monkeypatch.setenv("STUDIO_TOKEN", "")
    with pytest.raises(ConfigError, match=r"STUDIO_TOKEN.*TM1353"):
        prepare_server(StudioServerOptions(tmp_path, token_variable="STUDIO_TOKEN"))
    with serve_studio(StudioServerOptions(tmp_path, port=0)) as url, pytest.raises(ConfigError, match="TM1354"):
        prepare_server(StudioServerOptions(tmp_path, port=urlsplit(url).port or 0))
    assert choose_token(StudioServerOptions(tmp_path)) == ""
    assert len(choose_token(StudioServerOptions(tmp_path, host="0.0.0.0"))) >= 32


def test_studio_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tastemaker.studio.app import create_app, StudioOptions; "
        "create_app(StudioOptions(Path('.'))); print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
