"""The page is whole, speaks the truth, and survives whatever it finds."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from io import BytesIO, StringIO
from pathlib import Path

import pytest
import torch
from fake_runs import evaluate, events, fabricate, remember
from PIL import Image
from rich.console import Console

from tastemaker.cli import EXIT_USAGE, main
from tastemaker.report.charts import nice_axis, smooth_curve
from tastemaker.report.embedded_images import embed_samples
from tastemaker.report.evaluation_bars import ScoreInterval, collect_evaluations
from tastemaker.report.findings import collect_findings
from tastemaker.report.page import write_report
from tastemaker.report.run_record import read_run
from tastemaker.training.loggers.html_report import HtmlReportLogger
from tastemaker.training.loggers.jsonl import JsonlLogger
from tastemaker.training.loggers.logger import LoggerCollection
from tastemaker.training.loggers.sample_grids import SampleGridLogger

VOID = {"meta", "img", "br", "line", "circle", "polyline", "hr", "input", "link"}


class Checker(HTMLParser):
    """Refuses tags that do not balance, and notes what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.identities: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"an attribute of <{tag}> is given twice"
        self.tags.append(tag)
        self.identities += [found["id"] or ""] if "id" in found else []
        self.targets += [(found["href"] or "")[1:]] if "href" in found else []
        self.fetched += [str(found[key]) for key in ("src", "srcset", "poster", "data") if key in found]
        if tag == "img":
            self.images.append(found)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(path: Path) -> tuple[str, Checker]:
    text, checker = path.read_text(encoding="utf-8"), Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return text, checker


@pytest.mark.parametrize("frames", [1, 5])
def test_a_page_is_balanced_and_asks_the_network_for_nothing(tmp_path: Path, frames: int) -> None:
    runs = [fabricate(tmp_path / name, held, frames=frames) for name, held in (("one", -0.3), ("two", 0.3))]
    evaluate(runs[0], "before", 0.4)
    text, checker = checked(write_report(runs, tmp_path / "both.html"))
    assert checker.fetched and all(source.startswith("data:") for source in checker.fetched)
    assert not {"script", "link", "iframe", "object"} & set(checker.tags)
    assert not re.search(r"https?://|url\(|@import", re.sub(r'src="data:[^"]*"', "", text))
    assert len(checker.identities) == len(set(checker.identities))
    assert set(checker.targets) <= set(checker.identities)


def test_every_picture_has_words_and_every_prompt_a_before_and_an_after(tmp_path: Path) -> None:
    text, checker = checked(write_report([fabricate(tmp_path / "run", 0.1)]))
    kinds = [str(image["class"]).split()[0] for image in checker.images]
    assert kinds.count("before") == kinds.count("after") == 4
    assert all(image["alt"] for image in checker.images)
    assert "<b>bold</b>" not in text and "&lt;b&gt;bold" in text and "the empty prompt" in text


def test_a_sample_in_the_page_is_the_sample(tmp_path: Path) -> None:
    record = read_run(fabricate(tmp_path / "run", 0.1))
    drawn = next(e for e in events(tmp_path, 0.1) if type(e).__name__ == "SamplesGenerated")
    source = embed_samples(record.sheets[0], 2)[1].source
    image = Image.open(BytesIO(base64.b64decode(source.partition(",")[2])))
    assert image.size == (16, 16)
    wanted = (drawn.pixels[1, 0] * 255).round().permute(1, 2, 0).flatten()
    assert list(image.convert("RGB").tobytes()) == wanted.to(torch.int64).tolist()


def test_clips_are_strips_of_frames_and_move(tmp_path: Path) -> None:
    text, _ = checked(write_report([fabricate(tmp_path / "run", 0.1, frames=5)]))
    assert text.count("<video ") == 2 and "loop" in text and "data:video/mp4" in text
    assert (
        embed_samples(read_run(tmp_path / "run").sheets[0], 1)[0].width == 4 * 16 + 3
    )  # four of five frames, and gaps


def test_clips_without_a_movie_move_as_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tastemaker.training.loggers.sample_grids.video_suffix", lambda: "png")
    text, _ = checked(write_report([fabricate(tmp_path / "run", 0.1, frames=5)]))
    sources = re.findall(r'<figure class="card"><img src="data:image/png;base64,([^"]+)"', text)
    assert [Image.open(BytesIO(base64.b64decode(source))).n_frames for source in sources] == [5, 5]
    assert "<video " not in text


def test_a_hacked_run_is_called_so_and_a_healthy_one_is_not(tmp_path: Path) -> None:
    hacked, _ = checked(write_report([fabricate(tmp_path / "hacked", -0.3)]))
    healthy, _ = checked(write_report([fabricate(tmp_path / "healthy", 0.3)]))
    assert 'class="finding warning"' in hacked and "probable reward hacking: fell from 0.5 to 0.2" in hacked
    assert 'class="finding warning"' not in healthy and "No sign of reward hacking in 4 looks" in healthy


def test_without_a_guard_the_steps_themselves_tell(tmp_path: Path) -> None:
    hacked = collect_findings(read_run(fabricate(tmp_path / "hacked", -0.3, guard=False)))
    healthy = collect_findings(read_run(fabricate(tmp_path / "healthy", 0.0, guard=False)))
    assert [each.kind for each in hacked] == ["warning"] and "held-out reward 'color' fell" in hacked[0].text
    assert [each.kind for each in healthy] == ["note"] and "guard was off" in healthy[0].text


def flatten_rewards(place: Path) -> None:
    """Let the reward of the steps be noise, as where all of the learning was done in the first of them."""
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "reward": 0.5 + 0.1 * (row["step"] % 2)} if "reward" in row else row for row in rows]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(None, "did not rise beyond its noise", id="nothing but the curve"),
        pytest.param([0.1, 0.2, 0.15, 0.1], None, id="every prompt earns more"),
        pytest.param([-0.1, 0.2, -0.15, 0.1], "did not rise beyond its noise (from 0.5 to 0.512", id="some earn more"),
        pytest.param([-0.1, -0.2, -0.1, -0.2], "fell (from 0.5 to 0.35 since step 0)", id="every prompt earns less"),
    ],
)
def test_a_rise_is_told_by_the_same_prompts_before_and_after(
    tmp_path: Path, changes: list[float] | None, said: str | None
) -> None:
    place = fabricate(tmp_path / "run", 0.3)
    flatten_rewards(place)
    if changes:
        remember(place, 60, changes)
    told = " ".join(each.text for each in collect_findings(read_run(place)))
    assert (said in told) if said else ("The training reward" not in told and "No sign of reward hacking" in told)


def test_a_rise_of_the_steps_alone_counts_too(tmp_path: Path) -> None:
    place = fabricate(tmp_path / "run", 0.3)
    remember(place, 60, [-0.1, 0.2, -0.15, 0.1])  # too few prompts to tell
    assert "The training reward" not in " ".join(each.text for each in collect_findings(read_run(place)))


def test_a_run_that_learns_nothing_is_told_so(tmp_path: Path) -> None:
    place = fabricate(tmp_path / "run", 0.0)
    rows = (place / "metrics.jsonl").read_text()
    rows = re.sub(r'"flat_groups": [\d.]+', '"flat_groups": 0.99', rows)
    (place / "metrics.jsonl").write_text(re.sub(r'"grad_norm": [\d.]+', '"grad_norm": 0.0', rows))
    told = " ".join(each.text for each in collect_findings(read_run(place)) if each.kind == "warning")
    assert "No gradient reached the weights in 60 of 60 steps" in told and "99% of the groups" in told


def test_the_page_holds_the_configuration_the_environment_and_the_tasks(tmp_path: Path) -> None:
    place = fabricate(tmp_path / "run", 0.1)
    evaluate(place, "held-out prompts", 0.625)
    text, _ = checked(write_report([place]))
    assert "type: brightness" in text and "abacus" in text and "9.9.9" in text
    assert "counting" in text and "0.625" in text and "0.57 to 0.68" in text and "held-out prompts" in text


def test_reports_by_score_are_read_as_well_as_reports_by_task(tmp_path: Path) -> None:
    place = fabricate(tmp_path / "run", 0.1)
    whole, task = {"mean": 0.5, "low": 0.4, "high": 0.6}, {"mean": 0.25, "low": 0.2, "high": 0.3}
    told = {"benchmark": "playeval", "scores": {"strict": {"counting": task, "overall": whole}}, "frechet": 1.75}
    (place / "evaluations/last").mkdir(parents=True)
    (place / "evaluations/last/report.json").write_text(json.dumps(told))
    (found,) = collect_evaluations([read_run(place)])
    assert {metric: list(scores) for metric, scores in found.scores.items()} == {
        "strict": ["overall", "counting"],
        "frechet": ["overall"],
    }
    assert (
        found.scores["strict"]["counting"] == ScoreInterval(0.25, 0.2, 0.3)
        and found.scores["frechet"]["overall"].mean == 1.75
    )


def test_runs_are_told_apart_and_their_settings_compared(tmp_path: Path) -> None:
    runs = [fabricate(tmp_path / name, 0.1) for name in ("one", "two")]
    settings = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(settings.replace("group: 8", "group: 16"))
    text, _ = checked(write_report(runs, tmp_path / "both.html"))
    assert '<th scope="row">objective.group</th><td>8</td><td>16</td>' in text
    assert 'class="run-1" points' in text and 'class="run-2" points' in text


def test_what_is_missing_or_torn_is_left_out(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    checked(write_report([bare]))
    torn = fabricate(tmp_path / "torn", 0.1)
    (torn / "samples/step-000000.json").write_text("{")
    (torn / "samples/step-000060.png").write_bytes(b"no picture")
    (torn / "config.yaml").write_text("a: [")
    (torn / "environment.json").write_text("[]")
    (torn / "checkpoints/step-000060").mkdir(parents=True)
    (torn / "checkpoints/step-000060/state.json").write_text('{"format": 1, "step": 60')
    (torn / "eval/x").mkdir(parents=True)
    (torn / "eval/x/report.json").write_text('{"means": 3, "by_tag": {"a": 1, "b": {"c": {"low": 0}}}}')
    checked(write_report([torn]))


def test_samples_of_an_earlier_longer_run_are_not_shown(tmp_path: Path) -> None:
    place = fabricate(tmp_path / "run", 0.1)
    rows = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(row for row in rows if int(re.findall(r'"step": (\d+)', row)[0]) < 45))
    assert [sheet.step for sheet in read_run(place).sheets] == [0, 20, 40]


def test_a_place_without_a_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == EXIT_USAGE and "is no run" in capsys.readouterr().err


def test_training_ends_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["steps=2", "sample.every=1", "batch.prompts=4", "guard.prompts=4", "guard.per_prompt=2"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "grpo-toy-flow", *small])
    assert not ended.value.code and "the report is runs/grpo-toy-flow/report.html" in capsys.readouterr().err
    text, _ = checked(Path("runs/grpo-toy-flow/report.html"))
    assert "before, step 0" in text and "after, step 2" in text and torch.__version__ in text


def test_a_report_that_cannot_be_written_hurts_nobody(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()  # in the way
    out = StringIO()
    watchers = LoggerCollection([JsonlLogger(), SampleGridLogger(), HtmlReportLogger()], Console(file=out, width=300))
    for event in events(tmp_path, 0.1):
        watchers.see(event)
    watchers.close()
    assert "HtmlReportLogger watches no longer" in out.getvalue() and (tmp_path / "metrics.jsonl").is_file()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.5, 0.5), (3e-7, 9e-7), (5, 5), (0, 0), (-1e6, 2e6), (0.9, 0.91)])
def test_axes_have_a_few_round_ticks_around_the_values(low: float, high: float) -> None:
    found = nice_axis(low, high)
    assert 2 <= len(found.ticks) <= 8 and found.low <= low and found.high >= high
    assert len({found.label(tick) for tick in found.ticks}) == len(found.ticks)


def test_smoothing_leaves_a_line_a_line_and_the_start_where_it_is() -> None:
    line = [(i, float(i)) for i in range(100)]
    assert smooth_curve(line)[:90] == line[:90]
    assert smooth_curve([(i, float(i == 0)) for i in range(100)])[0] == (0, 1.0)
