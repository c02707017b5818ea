"""The studio in a real Chromium: live updates, keys, comparison, hostile texts and hostile pages."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_evaluation, write_fake_run

from tastemaker.studio.server import StudioServerOptions, serve_studio

BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium"),
]
TIMEOUT = 120_000  # milliseconds, for a machine that does something else as well
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=options)
        yield browser
        browser.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for name, held in (("one", 0.3), ("sweep/two", -0.3)):
        write_evaluation(write_fake_run(root / name, held), "after", 0.8, benchmark="playeval")
    return root


@pytest.fixture
def address(runs: Path) -> Iterator[str]:
    with serve_studio(StudioServerOptions(runs, port=0)) as url:
        yield url


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that reaches this machine only, and fails on any error of its scripts."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    context.set_default_timeout(TIMEOUT)
    context.route(lambda url: "//127.0.0.1:" not in url, lambda route: route.abort())
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.problems = problems
    yield page
    context.close()


def write_grid(run: Path, step: int, prompt: str = "a red car") -> None:
    """Write samples of a later step, as a run does: first the image, then its description."""
    grid = json.loads((run / "samples/step-000060.json").read_text())
    grid |= {"step": step, "file": f"step-{step:06d}.png", "prompts": [prompt, *grid["prompts"][1:]]}
    shutil.copy(run / "samples/step-000060.png", run / "samples" / grid["file"])
    (run / f"samples/step-{step:06d}.json").write_text(json.dumps(grid))


def wait_for_value(page: Any, expression: str, expected: object) -> None:
    """Wait for the value of an expression: browsers handle some events a little later than they are sent."""
    deadline = time.monotonic() + TIMEOUT / 1000
    while (value := page.evaluate(expression)) != expected:
        assert time.monotonic() < deadline, f"{expression} is {value!r}, not {expected!r}"
        page.wait_for_timeout(20)


def test_run_page_follows_the_run(page: Any, address: str, runs: Path) -> None:
    page.goto(f"{address}runs")
    page.get_by_role("link", name="one").click()
    page.wait_for_selector("#rows tr >> nth=3")
    reward = page.locator(".chart").filter(has_text="training reward").first
    reward.locator("polyline").first.wait_for(state="attached")
    with (runs / "one/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 80, "reward/mean": 7.25}) + "\n")
    reward.locator(".value", has_text="7.25").wait_for()
    page.locator("#steps", has_text="step 80").wait_for()  # arrives after the curves
    assert page.locator("#steps").inner_text() == "step 80"
    write_grid(runs / "one", 80, HOSTILE)
    row = page.locator('#rows tr[data-step="80"]')
    row.wait_for()
    assert row.locator(".cell").first.get_attribute("data-prompt") == HOSTILE
    assert page.locator("#rows tr").first.get_attribute("data-step") == "80" and "hacked" not in page.title()
    assert page.problems == []


def test_samples_are_browsed_with_keys(page: Any, address: str) -> None:
    page.goto(f"{address}runs/one")
    page.locator(".cell").first.focus()
    place = "[document.activeElement.dataset.step, document.activeElement.dataset.index].join()"
    for key, expected in (
        ("ArrowRight", "60,1"), ("ArrowDown", "40,1"), ("ArrowDown", "20,1"), ("ArrowLeft", "20,0"),
        ("ArrowLeft", "20,0"), ("End", "20,3"), ("PageUp", "60,3"), ("Home", "60,0"),
    ):  # fmt: skip
        page.keyboard.press(key)
        wait_for_value(page, place, expected)
    page.keyboard.press("Enter")
    page.locator("#zoom").wait_for()
    assert page.locator("#zoom-title").inner_text() == "step 60"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("b")
    page.locator("#stage .before").wait_for()
    assert page.locator("#stage img").count() == 2 and "step=0" in page.locator("#stage .before").get_attribute("src")
    page.locator("#slider").fill("25")
    assert "75%" in page.locator("#stage .before").evaluate("each => each.style.clipPath")
    page.keyboard.press("Escape")
    page.locator("#zoom").wait_for(state="hidden")
    wait_for_value(page, place, "60,1")
    assert page.problems == []


def test_runs_are_compared(page: Any, address: str) -> None:
    page.goto(f"{address}runs")
    for name in ("one", "sweep/two"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare").click()
    page.locator("#rows tr").first.wait_for()
    page.wait_for_load_state()
    assert page.locator("#rows tr").first.locator(".cell").count() == 2
    chart = page.locator(".chart").filter(has_text="training reward").first
    chart.scroll_into_view_if_needed()
    chart.locator("polyline.run-2").first.wait_for(state="attached")
    assert page.locator(".scores", has_text="sweep/two: after").locator("td", has_text="0.75 to 0.85").count() == 2
    page.goto(f"{address}compare?item=one&item=sweep/two")
    page.locator("#steps select").first.select_option("one@20")
    page.locator("th", has_text="one, step 20").wait_for()
    assert page.problems == []


def test_pages_fit_a_phone_and_follow_the_color_scheme(browser: Any, address: str, runs: Path) -> None:
    write_grid(runs / "one", 80, HOSTILE)
    colors = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme=scheme)
        context.set_default_timeout(TIMEOUT)
        page = context.new_page()
        for path in ("runs", "runs/one", "compare?item=one&item=sweep/two"):
            page.goto(address + path)
            page.wait_for_selector("h1")
            assert page.evaluate(OVERFLOW) <= 0, path
            assert "hacked" not in page.title()
        colors[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        context.close()
    assert colors["light"] != colors["dark"]


def test_a_page_of_another_origin_can_neither_change_nor_read(page: Any, address: str, tmp_path: Path) -> None:
    hostile = f"""<title>hostile</title><form method="post" action="{address}runs"><button>go</button></form>
        <img src="{address}static/icon.svg"><iframe src="{address}runs"></iframe>"""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/index.html").write_text(hostile)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "evil"))

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        assert page.evaluate("document.querySelector('img').naturalWidth") == 0
        read = "url => fetch(url).then(answer => answer.text(), () => 'refused')"
        assert page.evaluate(read, f"{address}runs") == "refused"
        send = "url => fetch(url, {method: 'POST', mode: 'no-cors', body: 'a=1'}).then(() => 'sent', () => 'refused')"
        assert page.evaluate(send, f"{address}runs") == "refused"
        with page.expect_navigation() as navigation:
            page.get_by_role("button", name="go").click()
        assert navigation.value.status == 403
    finally:
        server.shutdown()
        server.server_close()
