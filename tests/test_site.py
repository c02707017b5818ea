"""The documentation site: it builds strictly, its links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tastemaker.config.recipes import list_trainable_recipes

ROOT = Path(__file__).parent.parent
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PAGES_IN_BROWSER = ("", "concepts/", "recipes/grpo-playground-flow/", "components/objectives/", "api/policy/")


class Page(HTMLParser):
    """Collects the anchors, links and resources of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.resources.append(values["href"])
        if tag in ("script", "img", "iframe", "source", "video", "audio") and "src" in values:
            self.resources.append(values["src"])


def build_site(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def find_recipes_without_page(site: Path) -> list[str]:
    missing = []
    for name in list_trainable_recipes():
        page = site / "recipes" / name / "index.html"
        text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")) if page.is_file() else ""
        missing += [] if f"tastemaker train {name}" in text else [name]
    return missing


def find_target(page: Path, link: str, site: Path) -> Path:
    """The file to which a link of a page leads."""
    path = unquote(urlsplit(link).path)
    target = (site / path.lstrip("/") if path.startswith("/") else page.parent / path) if path else page
    return (target / "index.html" if target.is_dir() else target).resolve()


def find_dead_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Local links to files or anchors that do not exist."""
    dead = []
    for path, page in pages.items():
        for link in {*page.links, *page.resources}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = find_target(path, link, site)
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in pages[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def find_foreign_resources(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Scripts, styles, fonts and images of other hosts."""
    foreign = [(path, link) for path, page in pages.items() for link in page.resources if urlsplit(link).netloc]
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        foreign += [(path, link) for link in re.findall(r"(?:url\(|@import\s*)[\"']?(https?:[^)\"']+)", text)]
    return [f"{path.relative_to(site)}: {link}" for path, link in foreign]


@contextmanager
def serve(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def find_browser_errors(address: str, folder: Path) -> list[str]:
    """What the browser's console says about pages, and what they request from other hosts."""
    network_log = folder / "network.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={folder}", f"--log-net-log={network_log}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    errors = []
    for page in PAGES_IN_BROWSER:
        command = [str(BROWSER), *options, "--virtual-time-budget=3000", "--dump-dom", f"{address}/{page}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert "md-content" in done.stdout, page
        errors += [f"{page}: {line}" for line in done.stderr.splitlines() if "CONSOLE" in line]
        # The browser itself requests updates; requests of the page have its address as initiator.
        requests = re.findall(r'"initiator":"([^"]*)"[^\n]*?"url":"([^"]*)"', network_log.read_text(encoding="utf-8"))
        errors += [f"{page}: {url}" for origin, url in requests if origin == address and not url.startswith(address)]
    return errors


@pytest.mark.slow
def test_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path.resolve() / "site"
    build_site(site)
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}  # its links are absolute
    assert len(pages) > 150
    assert not find_recipes_without_page(site)
    assert not find_dead_links(site, pages)
    assert not find_foreign_resources(site, pages)
    if BROWSER:
        with serve(site) as address:
            assert not find_browser_errors(address, tmp_path)
