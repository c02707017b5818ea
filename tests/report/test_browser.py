"""The report in a real browser, at several widths and in dark mode."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_runs import write_evaluation, write_fake_run
from PIL import Image

from tastemaker.report.page import write_report

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
BROWSER_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
PROBE = """<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(each => { each.open = true; });
  const inside = each => each.closest(".scroll, pre, svg, .skip");
  const wide = [...page.querySelectorAll("body *")].filter(
    each => !inside(each) && each.getBoundingClientRect().right > root.clientWidth + 0.5);
  const broken = [...page.images].filter(each => each.loading != "lazy" && !each.naturalWidth).length;
  const result = [root.clientWidth, root.scrollWidth, broken, getComputedStyle(page.body).backgroundColor,
    wide.slice(0, 3).map(each => each.tagName + "." + each.className).join(" ")];
  document.body.dataset.result = result.join("|");
});
</script>"""

USE = """<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
  const press = (target, key) => target.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
  const result = [], note = value => result.push(value);
  const first = page.querySelector("img.before"), toggle = page.querySelector("button.view");
  const pair = first.closest(".two"), range = pair.querySelector("input");
  const shown = () => getComputedStyle(range).display != "none";
  note(shown());
  toggle.click();
  range.value = 80;
  range.dispatchEvent(new view.Event("input"));
  note(shown() + " " + getComputedStyle(pair.querySelector("img.after")).clipPath);
  const box = page.querySelector("dialog");
  press(first, "Enter");
  const picture = box.querySelector("img");
  note(box.open + " " + (picture.src == first.src));
  press(box, "ArrowRight");
  note(picture.src == pair.querySelector("img.after").src);
  press(box, "ArrowLeft");
  press(box, "ArrowLeft");
  note(picture.alt.includes("step"));
  press(box, "Escape");
  note(box.open);
  first.click();
  note(box.open);
  document.body.dataset.result = result.join("|");
});
</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    names = {"a-run-with-quite-a-long-name-indeed": -0.3, "two": 0.3}
    runs = [write_fake_run(folder / name, held) for name, held in names.items()]
    write_evaluation(runs[0], "before", 0.4)
    write_evaluation(runs[0], "after", 0.8)
    return write_report(runs, folder / "report.html")


def browse(path: Path, *options: str) -> str:
    assert BROWSER
    profile = path.parent / "profile"
    command = [BROWSER, *BROWSER_OPTIONS, f"--user-data-dir={profile}", *options, path.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return process.stdout


def write_frame(page: Path, width: int, script: str) -> Path:
    """Embed the page in a frame, because desktop browsers limit the width of their windows."""
    path = page.with_name(f"frame-{width}.html")
    inner = html.escape(page.read_text(encoding="utf-8"), quote=True)
    path.write_text(f'<body><iframe style="border:0;width:{width}px;height:900px" srcdoc="{inner}"></iframe>{script}')
    return path


def probe(page: Path, width: int, *options: str, script: str = PROBE) -> list[str]:
    dumped = browse(write_frame(page, width, script), "--dump-dom", "--virtual-time-budget=5000", *options)
    match = re.search(r'data-result="([^"]*)"', dumped)
    assert match, "the probe did not run"
    return html.unescape(match[1]).split("|")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_fits_the_screen(page: Path, width: int) -> None:
    shown, needed, broken, _, wide = probe(page, width)
    assert int(shown) == width and int(needed) <= width and wide == "" and broken == "0"


def test_page_follows_the_color_scheme(page: Path) -> None:
    day, night = (probe(page, 360, f"--blink-settings=preferredColorScheme={scheme}")[3] for scheme in (1, 0))
    assert min(map(int, re.findall(r"\d+", day))) > 200 and max(map(int, re.findall(r"\d+", night))) < 60


def test_page_renders(page: Path) -> None:
    picture = page.with_suffix(".png")
    browse(page, f"--screenshot={picture}", "--window-size=1280,2400")
    with Image.open(picture) as image:
        assert image.size == (1280, 2400) and len(image.convert("RGB").getcolors(2**24) or []) > 200


@pytest.mark.parametrize(("width", "slider_first"), [(1280, "false"), (360, "true")], ids=["desktop", "phone"])
def test_slider_and_lightbox_work(page: Path, width: int, slider_first: str) -> None:
    before, moved, opened, stepped, wrapped, closed, clicked = probe(page, width, script=USE)
    assert before == slider_first
    if width > 520:  # the button showed the sliders, and on a phone it hid them
        assert moved == "true inset(0px 0px 0px 80%)"
    assert (opened, stepped, wrapped, closed, clicked) == ("true true", "true", "true", "false", "true")
