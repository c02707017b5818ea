"""The whole story in a real Chromium: start a run, watch it, compare, vote, learn the taste, align, and prove it.

The voter is a simulated person, whose rule no reward knows, and who sees what the page shows: the picture files are
fetched from the studio, and the votes are cast by pressing keys.
"""

from __future__ import annotations

import io
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from free_ports import reserve_port
from PIL import Image
from studio_process import BROWSER, end_all, open_browser, start_studio

from tastemaker.core.randomness import Randomness
from tastemaker.playground.captions import sample_split_captions
from tastemaker.playground.simulated_people import PEOPLE
from tastemaker.preferences.sessions import load_session
from tastemaker.preferences.statistics import describe_win_rate
from tastemaker.preferences.votes import read_votes
from tastemaker.studio.job_queue import ENDED, JobQueue

playwright_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium"),
]
PERSON = PEOPLE["large_and_warm"]
RECIPE = "reward-gradient-playground"
PATIENCE = 300_000  # milliseconds, for a machine that does something else as well
NUM_VOTES, NUM_PROMPTS, NUM_SAMPLES = 60, 20, 3
FAST = "\n".join(("batch.prompts=16", "guard.prompts=4", "sample.every=0", "optim.lr=3e-4"))


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    root = tmp_path / "runs"
    root.mkdir()
    port = reserve_port()
    process = start_studio(root, port)
    yield root, f"http://127.0.0.1:{port}"
    end_all(root, process)


class Story:
    """A page of the studio, and what a person does there."""

    def __init__(self, page: Any, address: str, root: Path) -> None:
        self.page, self.address, self.root = page, address, root
        self.expect = playwright_api.expect
        self.expect.set_options(timeout=PATIENCE)
        self.rates: dict[str, float] = {}

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE / 1000
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.page.inner_text('main')[:600]}"
            self.page.wait_for_timeout(25)

    def wait_for_jobs(self) -> None:
        self.wait(lambda: all(job.state in ENDED for job in JobQueue(self.root).jobs()), "the end of the jobs")

    def start_run(self) -> None:
        page = self.page
        page.goto(f"{self.address}/jobs/new")
        page.fill("#recipe-filter", RECIPE)
        page.click(f"a:text-is('{RECIPE}')")
        for key, value in (("steps", "4"), ("sample-every", "2"), ("checkpoint-every", "2"), ("guard-every", "4")):
            field = page.locator(f"#field-{key}")
            if not field.is_visible():
                page.locator("details.group", has=field).locator("summary").click()
            field.fill(value)
        page.fill("#field-name", "first")
        page.fill("#field-extra", "batch.prompts=8\nguard.prompts=4\nsample.count=4")
        self.expect(page.locator("#check-state.good")).to_be_visible(timeout=PATIENCE)
        page.click("#start")
        self.expect(page.locator("#open-run")).to_be_visible(timeout=PATIENCE)
        page.click("#open-run")

    def watch_run(self) -> None:
        """Wait for samples and curves that were not there when the page was opened."""
        page = self.page
        page.wait_for_selector('#rows tr[data-step="4"]')
        reward = page.locator(".chart").filter(has_text="training reward").first
        reward.scroll_into_view_if_needed()
        reward.locator("polyline").first.wait_for(state="attached")
        self.expect(page.locator("#steps")).to_contain_text("step 4")
        points = reward.locator("polyline").last.get_attribute("points")
        assert len(points.split()) >= 3
        page.locator(".cell").first.focus()
        place = "[document.activeElement.dataset.step, document.activeElement.dataset.index].join()"
        for key, expected in (("ArrowDown", "2,0"), ("ArrowRight", "2,1"), ("ArrowDown", "0,1"), ("PageUp", "4,1")):
            page.keyboard.press(key)
            self.wait(lambda expected=expected: page.evaluate(place) == expected, f"{key} to {expected}")
        page.keyboard.press("Enter")
        page.locator("#zoom").wait_for()
        page.keyboard.press("Escape")

    def compare_runs(self) -> None:
        page = self.page
        page.goto(f"{self.address}/runs")
        for name in ("first", "second"):
            page.get_by_label(f"Compare {name}", exact=True).check()
        page.get_by_role("button", name="Compare").click()
        page.locator("#rows tr").first.wait_for()
        page.wait_for_load_state()
        assert page.locator("#rows tr").first.locator(".cell").count() == 2
        page.locator(".chart polyline.run-2").first.wait_for(state="attached")

    def make_vote(self, prompts: list[str]) -> None:
        page = self.page
        page.goto(f"{self.address}/votes")
        page.fill("#name", "taste")
        page.fill("#sources", RECIPE)
        page.fill("#prompts", "\n".join(prompts))
        page.fill("#seeds", str(NUM_SAMPLES))
        page.fill("#target", str(NUM_VOTES))
        page.click("text=Make the samples")
        page.wait_for_selector("#voter")
        page.keyboard.type(PERSON.name)
        page.keyboard.press("Enter")

    def rate(self, source: str, prompt: str) -> float:
        """Rate a picture by the file that the page shows."""
        if source not in self.rates:
            with (
                urllib.request.urlopen(self.address + source) as answer,
                Image.open(io.BytesIO(answer.read())) as image,
            ):
                pixels = torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)[None, None] / 255
            self.rates[source] = float(PERSON.rate(pixels, [prompt])[0])
        return self.rates[source]

    def vote(self, count: int) -> None:
        """Vote on pairs with the keys of the page."""
        page, saved = self.page, ""
        images = "[...document.querySelectorAll('#ballot:not([hidden]) #stage img')]"
        loaded = f"{images}.filter(each => each.complete && each.naturalWidth).length"
        shown = f"{images}.map(each => new URL(each.src).pathname)"
        for number in range(count):
            self.wait(lambda: page.evaluate(loaded) == 2, f"pair {number}")
            sources, prompt = page.evaluate(shown), page.inner_text("#prompt")
            assert sources != saved  # the next pair is there at once
            left, right = (self.rate(each, prompt) for each in sources)
            key = "t" if abs(left - right) < PERSON.indifference else "ArrowLeft" if left > right else "ArrowRight"
            page.keyboard.press(key)
            saved = sources
            state = f"document.getElementById('count').textContent.startsWith('{number + 1} of')"
            self.wait(lambda state=state: page.evaluate(state), f"vote {number + 1}")
        self.wait(lambda: page.inner_text("#saved") == "saved", "the last vote")

    def learn(self) -> None:
        page = self.page
        page.click("text=Learn this taste")
        page.check("input[name=active]")
        page.click("#train-preference")
        self.expect(page.locator(".learned")).to_contain_text("votes it predicts", timeout=PATIENCE)
        self.expect(page.locator(".learned")).to_contain_text("95 % interval")

    def align(self) -> None:
        page = self.page
        page.goto(f"{self.address}/votes/taste/taste")
        assert page.locator("#model").input_value() == RECIPE  # what the session samples
        page.select_option("#method", "reward_gradient")
        page.fill("#name", "aligned")
        page.fill("#steps", "8")
        page.fill("#prompts", "10")
        page.locator("summary", has_text="Other settings").click()
        page.fill("#extra", FAST)
        page.click("#start-alignment")
        page.wait_for_url("**/alignments/aligned")
        self.expect(page.locator(".stages")).to_contain_text("of 8", timeout=PATIENCE)  # the progress is shown
        self.expect(page.locator("#vote-blind")).to_be_visible(timeout=PATIENCE)

    def prove(self) -> None:
        page = self.page
        page.click("#vote-blind")  # the page remembers the voter
        self.vote(20)
        with page.expect_navigation():
            page.click("text=Show the result")
        session = load_session(self.root / "aligned/evaluation")
        votes = read_votes(session.directory)
        wins = sum(0.5 if isinstance(each.choice, str) else float(each.choice or 0) for each in votes)
        assert len(votes) == 20 and wins > 10  # the person likes the new model better
        sentence = describe_win_rate(wins, 20)
        assert sentence[1:] in page.inner_text("main") and "valid after any number of votes" in page.inner_text("main")
        page.click("text=The alignment")
        self.expect(page.locator("#win-rate")).to_contain_text(sentence[1:])
        self.expect(page.locator("#stopping-rule")).to_contain_text(re.compile("decided", re.IGNORECASE))
        assert re.search(r"ou preferred the new model in \d+ % of 20 pairs; 95 % interval \d+ to \d+ %", sentence)


def test_a_person_teaches_a_model_their_taste_in_the_browser(studio: tuple[Path, str]) -> None:
    root, address = studio
    captions = sample_split_captions(Randomness(5, 0, torch.arange(2 * NUM_PROMPTS)), "train").texts()
    with open_browser() as context:
        context.set_default_timeout(PATIENCE)
        page, problems = context.new_page(), list[str]()
        page.on("pageerror", lambda error: problems.append(str(error)))
        story = Story(page, address, root)
        times = {}
        for name, act in (
            ("start", story.start_run),
            ("watch", story.watch_run),
            ("end", story.wait_for_jobs),
            ("copy", lambda: shutil.copytree(root / "first", root / "second")),
            ("compare", story.compare_runs),
            ("samples", lambda: story.make_vote(list(dict.fromkeys(captions))[:NUM_PROMPTS])),
            ("vote", lambda: story.vote(NUM_VOTES)),
            ("learn", story.learn),
            ("align", story.align),
            ("prove", story.prove),
        ):
            started = time.monotonic()
            act()
            times[name] = round(time.monotonic() - started, 1)
        print(times)
        assert not context.refused and not problems
        # The blind vote opens as soon as its samples are there; the process that made them ends a little later.
        story.wait_for_jobs()
    assert len(read_votes(root / ".studio/votes/taste")) == NUM_VOTES
    assert {job.state for job in JobQueue(root).jobs()} == {"done"}
