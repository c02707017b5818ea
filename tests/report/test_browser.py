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
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return process.stdout


def write_frame(page: Path, width: int) -> Path:
    """Embed the page in a frame, because desktop browsers limit the width of their windows."""
    path = page.with_name(f"frame-{width}.html")
    inner = html.escape(page.read_text(encoding="utf-8"), quote=True)
    path.write_text(f'<body><iframe style="border:0;width:{width}px;height:900px" srcdoc="{inner}"></iframe>{PROBE}')
    return path


def probe(page: Path, width: int, *options: str) -> list[str]:
    dumped = browse(write_frame(page, width), "--dump-dom", "--virtual-time-budget=5000", *options)
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
