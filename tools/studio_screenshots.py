"""Make the pictures of docs/studio.md: run the studio on small synthetic runs, and photograph its pages in Chromium.

python tools/studio_screenshots.py --out docs/pictures/studio
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from torch import Tensor

from tastemaker.config.dump import config_to_yaml
from tastemaker.config.load import load_any_config
from tastemaker.core.randomness import Randomness
from tastemaker.data.image_io import save_image
from tastemaker.playground.captions import parse_captions, sample_captions
from tastemaker.playground.corruptions import blur
from tastemaker.playground.scenes import Painter, corrupt_captions, sample_scenes
from tastemaker.preferences.session_taste import record_preference_model
from tastemaker.preferences.sessions import Session, create_session, next_ballots, record_vote
from tastemaker.preferences.statistics import describe_share, wilson_interval
from tastemaker.preferences.votes import Choice, Kind
from tastemaker.studio.job_queue import JobQueue
from tastemaker.studio.server import StudioServerOptions, serve_studio
from tastemaker.training.events import (
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loggers.jsonl import JsonlLogger
from tastemaker.training.loggers.sample_grids import SampleGridLogger
from tastemaker.training.loggers.status import StatusLogger

PROMPTS = tuple(sample_captions(Randomness(11, 0, torch.arange(8))).texts())
HACKED = "probable reward hacking: 'taste', held out, fell from 0.52 to 0.31 while the training reward rose"
MAX_BYTES = 150_000
IMAGES_LOADED = """[...document.querySelectorAll("video")].every(each => each.readyState > 2)
  && [...document.images].every(each => each.complete
  || each.getBoundingClientRect().top > innerHeight || each.getBoundingClientRect().bottom < 0)"""
DESKTOP, PHONE = (1280, 860), (390, 844)


@dataclass(frozen=True)
class DemoRun:
    """A synthetic run: how far it got, and how it ended."""

    name: str
    steps: int = 400
    done: int = 400
    speed: float = 1.0
    held_out: float = 0.2  # change of the held-out reward
    frames: int = 1
    end: str = "finished"  # running, failed or stopped
    age: float = 3600.0  # seconds since its last step
    overrides: tuple[str, ...] = ()


RUNS = (
    DemoRun("grpo-playground-flow", age=7200.0),
    DemoRun("grpo-larger-groups", done=290, speed=1.6, end="running", age=2.0, overrides=("objective.group_size=16",)),
    DemoRun("sweep/lr-1e-3", done=310, speed=2.6, held_out=-0.25, end="stopped", age=9e3, overrides=("optim.lr=1e-3",)),
    DemoRun("sweep/lr-1e-5", speed=0.3, held_out=0.05, age=9400.0, overrides=("optim.lr=1e-5",)),
    DemoRun("clips", done=400, frames=6, speed=1.2, age=86400.0),
    DemoRun("failed-on-the-server", done=130, speed=0.9, end="failed", age=20000.0),
)


def paint_samples(prompts: Sequence[str], progress: float, frames: int, hacking: float, seed: int = 7) -> Tensor:
    """Paint what a model might draw: [B, F, 3, 64, 64]. The same noise, sharper and more often right with progress."""
    rng = Randomness(seed, 0, torch.arange(len(prompts)))
    captions = parse_captions(prompts)
    scenes = sample_scenes(corrupt_captions(captions, max(0.0, 0.9 - 1.1 * progress), rng), rng)
    pixels = Painter().paint(scenes, rng).flatten(0, 1)
    soft = blur(pixels, torch.full((len(prompts),), max(0.0, 0.9 - progress)))
    grain = 0.03 * max(0.0, 0.8 - progress) * torch.randn(soft.shape, generator=torch.Generator().manual_seed(3))
    contrast = 1 + max(0.0, hacking) * 1.2 * progress
    images = ((soft + grain - 0.5) * contrast + 0.5).clamp(0, 1)
    shifts = [round(4 * math.sin(2 * math.pi * frame / frames)) for frame in range(frames)]
    return torch.stack([images.roll(shift, -1) for shift in shifts], 1)


def make_events(run: DemoRun, directory: Path) -> Iterator[Event]:
    rng = random.Random(run.name)
    yield TrainingStarted(0, run.steps, directory, 1_000_000)
    for step in range(run.done + 1):
        t = 1 - math.exp(-3 * run.speed * step / run.steps)
        reward, quality = 0.18 + 0.62 * t, 0.5 + run.held_out * t
        noise = lambda size: rng.gauss(0, size)
        if step:
            metrics = {
                "reward/mean": reward + noise(0.03),
                "rewards/verdict": reward + noise(0.04),
                "rewards/aesthetic": 0.4 + 0.2 * t + noise(0.02),
                "kl": 0.02 * run.speed * step / run.steps + abs(noise(0.0006)),
                "grad_norm": 0.35 * math.exp(-t) + abs(noise(0.04)),
                "loss/policy": noise(0.01),
                "zero_std_groups": 0.05 + 0.3 * t + abs(noise(0.02)),
                "clip_fraction": 0.04 + abs(noise(0.01)),
                "lr": 1e-4 * min(1.0, step / 20),
            }
            timings = {"time/rollout": 1.1 + noise(0.05), "time/reward": 0.25 + noise(0.01), "time/update": 0.8}
            yield StepCompleted(step, metrics, 2.2 + noise(0.04), 64, timings)
        if step % 40 == 0:
            yield SamplesGenerated(
                step,
                PROMPTS,
                paint_samples(
                    PROMPTS, min(0.3 + 0.6 * run.speed, 1.0) * step / run.steps, run.frames, -4 * run.held_out
                ),
                {"verdict": reward},
            )
        if step % 50 == 0:
            values = {"reward/mean": reward, "rewards/taste": quality, "diversity": 0.42 - 0.1 * t, "variety": 0.5}
            warning = HACKED if run.held_out < 0 and step >= 150 else None
            yield GuardChecked(step, {**values, "entropy": 5.1, "edges": 0.2 + 0.05 * t}, warning)
    if run.end == "finished":
        yield TrainingFinished(run.steps, f"all {run.steps} steps done")
    elif run.end == "stopped":
        yield TrainingFinished(run.done, f"stopped by the guard after step {run.done}: {HACKED}")


def write_demo_run(run: DemoRun, root: Path) -> None:
    """Write the directory of a run as training does."""
    directory = root / run.name
    directory.mkdir(parents=True)
    status = StatusLogger()
    loggers = (JsonlLogger(), SampleGridLogger(), status)
    for event in make_events(run, directory):
        for logger in loggers:
            logger.log(event)
    for logger in loggers:
        logger.close()
    if run.end == "failed":
        status.fail(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB"))
    overrides = [f"steps={run.steps}", *run.overrides]
    config = config_to_yaml(load_any_config("grpo-playground-flow", overrides))
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    environment = '{"started": "2026-11-18T02:10:00+00:00", "tastemaker": "0.1.0", "torch": "2.13.0", "device": "cpu"}'
    (directory / "environment.json").write_text(environment, encoding="utf-8")
    write_reports(run, directory)
    moment = time.time() - run.age
    for path in directory.rglob("*"):
        os.utime(path, (moment, moment))


def write_reports(run: DemoRun, directory: Path) -> None:

    if run.end != "finished":
        return
    after = 0.3 + 0.45 * (1 - math.exp(-3 * run.speed))
    for name, mean in (("before", 0.3), (f"playeval-single-step-{run.done:06d}", after)):
        folder = directory / "evaluations" / name
        folder.mkdir(parents=True)
        tasks = {"counting": -0.12, "colors": 0.08, "position": -0.2, "overall": 0.0}
        scores = {
            task: {"mean": mean + shift, "low": mean + shift - 0.04, "high": mean + shift + 0.04}
            for task, shift in tasks.items()
        }
        report = {"benchmark": "playeval", "prompts": 504, "images": 1008, "scores": {"strict": scores}}
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


def write_demo_runs(root: Path) -> None:
    for run in RUNS:
        write_demo_run(run, root)
    write_demo_votes(root)
    write_demo_alignment(root)
    write_demo_jobs(root)


# Votes, an alignment and jobs


def make_demo_session(directory: Path, pictures: Path, labels: Sequence[str], kind: Kind = "pair") -> Session:
    """Create a session of painted pictures; later sources are better."""
    seeds = range(4)
    for place, label in enumerate(labels):
        (pictures / label).mkdir(parents=True)
        rows = []
        for seed in seeds:
            progress = (0.95, 0.5)[place == 0 and len(labels) > 1]
            for k, image in enumerate(paint_samples(PROMPTS, progress, 1, 0.0, 20 + seed)):
                file = pictures / label / f"{k}-{seed}.png"
                save_image(image, file)
                rows.append(json.dumps({"file": file.name, "prompt": PROMPTS[k]}))
        (pictures / label / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    sources = [f"{label}={pictures / label}" for label in labels]
    return create_session(directory, sources, seeds=seeds, kind=kind, console=Console(quiet=True))


def vote_at_random(session: Session, voter: str, count: int, share: float) -> None:
    """Vote for the later source with a probability of `share`."""
    rng = random.Random(voter)
    for ballot in next_ballots(session, voter, count):
        later = max(range(len(ballot.samples)), key=lambda place: session.samples[ballot.samples[place]].source)
        choice: Choice = later if rng.random() < share else "tie" if rng.random() < 0.2 else 1 - later
        record_vote(session, voter, ballot, rng.random() < share if session.kind == "like" else choice, 1.4)


def write_demo_votes(root: Path) -> None:
    votes, pictures = root / ".studio/votes", root.parent / "pictures"
    make_demo_session(votes / "pairs", pictures / "pairs", ("old", "new"))
    make_demo_session(votes / "best-of-four", pictures / "four", ("old", "new"), "best_of")
    likes = make_demo_session(votes / "likes", pictures / "likes", ("old", "new"), "like")
    vote_at_random(likes, "anna", 30, 0.6)
    result = make_demo_session(votes / "groups-8-or-16", pictures / "result", ("groups of 8", "groups of 16"))
    for voter, count in (("anna", 32), ("ben", 32)):
        vote_at_random(result, voter, count, 0.75)
    result.end()
    run = root / "preference-groups-8-or-16"
    write_demo_preference(run, ".studio/votes/groups-8-or-16/votes.jsonl")
    record_preference_model(result, run)


def write_demo_preference(run: Path, votes: str) -> None:
    """Write the directory of a preference model."""
    run.mkdir(parents=True)
    counts = ((20, 0.56), (24, 0.59), (29, 0.61), (35, 0.66), (42, 0.69), (51, 0.73))
    curve = []
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step, (count, accuracy) in enumerate(counts, 1):
            low, high = wilson_interval(accuracy * 64, 64)
            curve.append({"votes": count, "accuracy": accuracy, "accuracy_low": low, "accuracy_high": high})
            file.write(json.dumps({"step": step, "validation/accuracy": accuracy, "loss": 1 - accuracy}) + "\n")
    words = ", ".join(f"{100 * accuracy:.0f} % with {count} votes" for count, accuracy in counts)
    summary = (
        f"with 51 votes it predicts {describe_share(0.73 * 64, 64)} votes on prompts that it has not seen; "
        f"calibration error 6 %. Learning curve: {words}; more votes still help"
    )
    (run / "preference.json").write_text(json.dumps({"summary": summary, "learning_curve": curve}), encoding="utf-8")
    text = f"preference:\n  tower: {{type: playground_match}}\ndata: {{type: votes, path: {votes}}}\nsteps: 6\n"
    (run / "config.yaml").write_text(text, encoding="utf-8")


def write_demo_alignment(root: Path) -> None:
    """Write two alignments: one with its result, and one that waits for the blind vote."""
    votes = root / ".studio/votes/groups-8-or-16/votes.jsonl"
    for name, method in (("my-taste", "reward_gradient"), ("my-taste-grpo", "grpo")):
        write_demo_preference(root / name / "preference", str(votes))
        write_demo_run(DemoRun(f"{name}/model", steps=80, done=80, speed=1.2, age=1800.0), root)
        state = {"votes": str(votes), "model": "grpo-playground-flow", "method": method, "count": 64}
        (root / name / "alignment.json").write_text(json.dumps(state), encoding="utf-8")
        pictures = root.parent / "pictures" / name
        session = make_demo_session(root / name / "evaluation", pictures, ("before", "after"))
        if name == "my-taste":
            vote_at_random(session, "anna", 32, 0.75)
            session.end()


def write_demo_jobs(root: Path) -> None:
    """Write jobs in all states; nothing of it runs."""
    queue, now = JobQueue(root), time.time()
    log = "step 250/400  reward 0.7125  loss -0.0031  grad norm 0.21  lr 0.0001  29.1 images/s  0:05:30 left\n"
    for kind, name, state, changes in (
        ("train", "grpo-larger-groups", "running", {"started": now - 640}),
        ("train", "sweep/lr-3e-5", "queued", {}),
        ("align", "my-taste-dpo", "queued", {}),
        ("align", "my-taste", "done", {"started": now - 9000, "ended": now - 7100, "exit_code": 0}),
        ("train", "failed-on-the-server", "failed", {"started": now - 9e4, "ended": now - 8e4, "exit_code": 1}),
    ):
        id = queue.submit(kind, ["train", "grpo-playground-flow", f"name={name}", "optim.lr=3e-5"], root / name, "cpu")
        title = f"align grpo-playground-flow to groups-8-or-16 ({name})" if kind == "align" else name
        reason = "CUDA out of memory. Tried to allocate 2.50 GiB" if state == "failed" else ""
        path = queue.folder / f"{id}.json"
        record = {**json.loads(path.read_text()), "title": title, "state": state, "reason": reason, **changes}
        path.write_text(json.dumps(record), encoding="utf-8")
        if state == "running":
            queue.log_file(id).write_text(
                log.replace("250", "270") + log.replace("250", "280") + log.replace("250", "290"), encoding="utf-8"
            )


# Pictures


@contextmanager
def open_browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def save_picture(content: bytes, path: Path) -> None:
    """Save a screenshot with a palette, or as JPEG if that is too large."""
    with Image.open(BytesIO(content)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path.with_suffix(".png"), optimize=True)
        if path.with_suffix(".png").stat().st_size > MAX_BYTES:
            path.with_suffix(".png").unlink()
            image.convert("RGB").save(path.with_suffix(".jpg"), quality=80, optimize=True)


def show_runs(page: Page, url: str) -> None:
    page.goto(f"{url}runs")
    page.wait_for_selector(".run img")


def show_run(page: Page, url: str) -> None:
    page.goto(f"{url}runs/grpo-larger-groups")
    page.wait_for_selector(".chart", state="attached")


def show_curves(page: Page, url: str) -> None:
    show_run(page, url)
    page.evaluate("document.getElementById('curves-title').scrollIntoView(); scrollBy(0, -60)")


def show_settings(page: Page, url: str) -> None:
    page.goto(f"{url}runs/sweep/lr-1e-5")
    page.wait_for_selector(".chart", state="attached")
    page.evaluate("document.getElementById('evaluations-title').scrollIntoView(); scrollBy(0, -80)")
    page.wait_for_selector("#difference table, #difference code", timeout=120_000)


def show_zoom(page: Page, url: str) -> None:
    page.goto(f"{url}runs/grpo-playground-flow")
    page.locator(".cell").nth(3).click()
    page.keyboard.press("b")


def show_video(page: Page, url: str) -> None:
    page.goto(f"{url}runs/clips")
    page.locator(".cell").nth(1).click()


def show_comparison(page: Page, url: str) -> None:
    page.goto(f"{url}compare?item=grpo-playground-flow&item=grpo-larger-groups&item=sweep/lr-1e-3")
    page.wait_for_selector(".chart", state="attached")


def show_overlay(page: Page, url: str) -> None:
    show_comparison(page, url)
    page.evaluate("document.getElementById('curves-title').scrollIntoView(); scrollBy(0, -60)")


def show_scores(page: Page, url: str) -> None:
    page.goto(f"{url}compare?item=grpo-playground-flow&item=sweep/lr-1e-5&item=sweep/lr-1e-5@0")
    page.wait_for_selector(".chart", state="attached")
    page.evaluate("document.getElementById('scores-title').scrollIntoView(); scrollBy(0, -60)")


def show_recipes(page: Page, url: str) -> None:
    page.goto(f"{url}jobs/new")
    page.wait_for_selector("#recipe-filter")
    page.fill("#recipe-filter", "playground")


def show_form(page: Page, url: str) -> None:
    page.goto(f"{url}jobs/new?recipe=grpo-playground-flow")
    page.fill("#field-optim-lr", "3e-4")
    page.wait_for_selector("#check-state.good, #check-state.wrong", timeout=240_000)
    page.evaluate("scrollTo(0, 0)")


def show_jobs(page: Page, url: str) -> None:
    page.goto(f"{url}jobs")
    page.wait_for_selector(".job")


def show_job(page: Page, url: str) -> None:
    show_jobs(page, url)
    page.locator(".job a.name").first.click()
    page.wait_for_selector("#log")


def show_votes(page: Page, url: str) -> None:
    page.goto(f"{url}votes")


def open_ballot(page: Page, url: str, name: str) -> None:
    page.goto(f"{url}votes/{name}")
    page.fill("#voter", "carla")
    page.click("#start")
    page.wait_for_selector("#stage img")


def show_pair(page: Page, url: str) -> None:
    open_ballot(page, url, "pairs")


def show_four(page: Page, url: str) -> None:
    open_ballot(page, url, "best-of-four")


def show_like(page: Page, url: str) -> None:
    open_ballot(page, url, "likes")


def show_result(page: Page, url: str) -> None:
    page.goto(f"{url}votes/groups-8-or-16/result")


def show_taste(page: Page, url: str) -> None:
    page.goto(f"{url}votes/groups-8-or-16/taste")
    page.wait_for_selector(".learned")


def show_alignment(page: Page, url: str) -> None:
    page.goto(f"{url}alignments/my-taste")
    page.wait_for_selector("#win-rate")


def show_blind(page: Page, url: str) -> None:
    page.goto(f"{url}alignments/my-taste-grpo")
    page.wait_for_selector("#vote-blind")


PICTURES = {
    "runs": show_runs,
    "run": show_run,
    "curves": show_curves,
    "settings": show_settings,
    "zoom": show_zoom,
    "video": show_video,
    "compare": show_comparison,
    "overlay": show_overlay,
    "scores": show_scores,
    "recipes": show_recipes,
    "form": show_form,
    "jobs": show_jobs,
    "job": show_job,
    "votes": show_votes,
    "pair": show_pair,
    "four": show_four,
    "like": show_like,
    "result": show_result,
    "taste": show_taste,
    "alignment": show_alignment,
    "blind": show_blind,
}


def take_pictures(url: str, out: Path, names: Sequence[str]) -> None:
    """Photograph pages on a desktop and a phone, light and dark."""
    out.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        for name in names:
            page_name, _, rest = name.partition("-")
            device, scheme = rest.split("-")
            width, height = PHONE if device == "phone" else DESKTOP
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                device_scale_factor=1.5 if device == "phone" else 1,
            )
            page = context.new_page()
            page.set_default_timeout(240_000)
            problems: list[str] = []
            page.on("console", lambda message, seen=problems: seen.append(message.text))
            page.on("pageerror", lambda error, seen=problems: seen.append(str(error)))
            PICTURES[page_name](page, url)
            page.wait_for_timeout(900)
            # `wait_for_function` would be refused by the studio's Content-Security-Policy.
            while not page.evaluate(IMAGES_LOADED):
                page.wait_for_timeout(200)
            save_picture(page.screenshot(), out / name)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            print(name, f"wider than the screen by {wide}" if wide > 0 else "", *problems, flush=True)
            context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/studio"))
    parser.add_argument("--runs", type=Path, help="keep the synthetic runs here, and use them if they exist")
    kinds = [f"{device}-{scheme}" for device in ("desktop", "phone") for scheme in ("light", "dark")]
    parser.add_argument("names", nargs="*", help="such as runs-desktop-light; default: all")
    options = parser.parse_args()
    out = options.out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        root = (options.runs or Path(folder) / "runs").absolute()
        if not root.exists():
            write_demo_runs(root)
        os.utime(root / "grpo-larger-groups" / "metrics.jsonl")  # it is running
        JobQueue.start_thread = lambda self: None  # type: ignore[method-assign]  # nothing of the queue runs
        os.chdir(root.parent)  # the list shows the directory as the user gave it
        with serve_studio(StudioServerOptions(Path(root.name), port=0)) as url:
            take_pictures(url, out, options.names or [f"{name}-{kind}" for name in PICTURES for kind in kinds])


if __name__ == "__main__":
    main()
