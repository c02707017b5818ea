"""The HTML report: valid, self-contained, correct, and robust against damaged files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from io import BytesIO, StringIO
from pathlib import Path
from statistics import stdev

import pytest
import torch
from fake_runs import events, write_evaluated_samples, write_evaluation, write_fake_run, write_guard_checkpoint
from PIL import Image
from rich.console import Console

from tastemaker.cli import EXIT_USAGE, main
from tastemaker.core.output_paths import SOURCE_FILE
from tastemaker.report.charts import ScoreInterval, collect_evaluations, nice_axis, smooth_curve
from tastemaker.report.findings import collect_findings
from tastemaker.report.groups import group_runs
from tastemaker.report.headline import find_evaluation_pair, format_score, make_headline
from tastemaker.report.page import write_report
from tastemaker.report.run_record import read_evaluated_samples, read_run
from tastemaker.report.sample_sets import collect_samples
from tastemaker.report.samples import embed_samples
from tastemaker.training.loggers.html_report import HtmlReportLogger
from tastemaker.training.loggers.jsonl import JsonlLogger
from tastemaker.training.loggers.logger import LoggerCollection
from tastemaker.training.loggers.sample_grids import SampleGridLogger

VOID = {"meta", "img", "br", "line", "circle", "polyline", "hr", "input", "link"}


class PageChecker(HTMLParser):
    """Checks that tags are balanced, and collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.identities: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"an attribute of <{tag}> is given twice"
        self.tags.append(tag)
        self.identities += [attributes["id"] or ""] if "id" in attributes else []
        self.targets += [(attributes["href"] or "")[1:]] if "href" in attributes else []
        self.fetched += [str(attributes[key]) for key in ("src", "srcset", "poster", "data") if key in attributes]
        if tag == "img":
            self.images.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(path: Path) -> tuple[str, PageChecker]:
    text, checker = path.read_text(encoding="utf-8"), PageChecker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return text, checker


@pytest.mark.parametrize("frames", [1, 5])
def test_page_is_balanced_and_self_contained(tmp_path: Path, frames: int) -> None:
    runs = [write_fake_run(tmp_path / name, held, frames=frames) for name, held in (("one", -0.3), ("two", 0.3))]
    write_evaluation(runs[0], "before", 0.4)
    text, checker = check_page(write_report(runs, tmp_path / "both.html"))
    assert checker.fetched and all(source.startswith("data:") for source in checker.fetched)
    assert not {"link", "iframe", "object", "form", "base"} & set(checker.tags)
    assert checker.tags.count("script") == 1 and "<script>" in text  # inline
    digest = base64.b64encode(hashlib.sha256(text.split("<script>")[1].split("</script>")[0].encode()).digest())
    assert "default-src 'none'" in text and f"script-src 'sha256-{digest.decode()}'" in text
    assert not re.search(r"https?://|url\(|@import", re.sub(r'src="data:[^"]*"', "", text))
    assert len(checker.identities) == len(set(checker.identities))
    assert set(checker.targets) <= set(checker.identities)


def test_images_have_alt_texts_and_prompts_have_pairs(tmp_path: Path) -> None:
    text, checker = check_page(write_report([write_fake_run(tmp_path / "run", 0.1)]))
    kinds = [str(image["class"]).split()[0] for image in checker.images]
    assert kinds.count("before") == kinds.count("after") == 4
    assert all(image["alt"] for image in checker.images)
    assert "<b>bold</b>" not in text and "&lt;b&gt;bold" in text and "the empty prompt" in text


def test_embedded_sample_has_the_exact_pixels(tmp_path: Path) -> None:
    record = read_run(write_fake_run(tmp_path / "run", 0.1))
    drawn = next(e for e in events(tmp_path, 0.1) if type(e).__name__ == "SamplesGenerated")
    source = embed_samples(record.sample_grids[0], 2)[1].source
    image = Image.open(BytesIO(base64.b64decode(source.partition(",")[2])))
    assert image.size == (16, 16)
    wanted = (drawn.pixels[1, 0] * 255).round().permute(1, 2, 0).flatten()
    assert list(image.convert("RGB").tobytes()) == wanted.to(torch.int64).tolist()


def test_edits_show_their_sources_before_and_after(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "run", 0.1, sources=2)
    text, checker = check_page(write_report([run]))
    kinds = [str(image["class"]).split()[0] for image in checker.images]
    assert kinds.count("source") == kinds.count("before") == kinds.count("after") == 4
    assert (
        kinds.index("source") < kinds.index("before") < kinds.index("after") and '<th scope="col">source</th>' in text
    )
    shown = next(image for image in checker.images if str(image["class"]).startswith("source"))
    image = Image.open(BytesIO(base64.b64decode(str(shown["src"]).partition(",")[2]))).convert("RGB")
    assert image.getpixel((0, 0)) == (255, 0, 0) and image.getpixel((image.width - 1, 0)) == (0, 0, 255)
    # The samples themselves are where they were, also for what reads one sample of the grid.
    drawn = next(e for e in events(tmp_path, 0.1) if type(e).__name__ == "SamplesGenerated")
    pixels = collect_samples(run, count=4, step=0).pixels[3]
    assert torch.allclose(pixels[0], drawn.pixels[3, 0], atol=1 / 255)
    alone = write_fake_run(tmp_path / "evaluated", 0.1)
    folder = write_evaluation(alone, "before", 0.4)
    write_evaluated_samples(folder, ["x"], [1.0])
    Image.new("RGB", (16, 16), "red").save(folder / SOURCE_FILE)
    sample = read_evaluated_samples(read_run(alone), "before")[0, 0]
    assert sample.source == folder / SOURCE_FILE


def test_videos_are_embedded_with_strips_of_frames(tmp_path: Path) -> None:
    text, _ = check_page(write_report([write_fake_run(tmp_path / "run", 0.1, frames=5)]))
    assert text.count("<video ") == 2 and "loop" in text and "data:video/mp4" in text
    assert (
        embed_samples(read_run(tmp_path / "run").sample_grids[0], 1)[0].width == 4 * 16 + 3
    )  # four of five frames, and gaps between them


def test_videos_without_mp4_are_animated_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tastemaker.training.loggers.sample_grids.video_suffix", lambda: "png")
    text, _ = check_page(write_report([write_fake_run(tmp_path / "run", 0.1, frames=5)]))
    sources = re.findall(r'<figure class="card"><img src="data:image/png;base64,([^"]+)"', text)
    assert [Image.open(BytesIO(base64.b64decode(source))).n_frames for source in sources] == [5, 5]
    assert "<video " not in text


def test_reward_hacking_is_reported(tmp_path: Path) -> None:
    hacked, _ = check_page(write_report([write_fake_run(tmp_path / "hacked", -0.3)]))
    healthy, _ = check_page(write_report([write_fake_run(tmp_path / "healthy", 0.3)]))
    assert 'class="finding warning"' in hacked and "probable reward hacking: fell from 0.5 to 0.2" in hacked
    assert 'class="finding warning"' not in healthy and "No sign of reward hacking in 4 checks" in healthy


def test_reward_hacking_is_reported_without_a_guard(tmp_path: Path) -> None:
    hacked = collect_findings(read_run(write_fake_run(tmp_path / "hacked", -0.3, guard=False)))
    healthy = collect_findings(read_run(write_fake_run(tmp_path / "healthy", 0.0, guard=False)))
    assert [each.kind for each in hacked] == ["warning"] and "held-out reward 'color' fell" in hacked[0].text
    assert [each.kind for each in healthy] == ["note"] and "guard was off" in healthy[0].text


def flatten_rewards(run_dir: Path) -> None:
    """Replace the training reward by noise, as if all learning had happened in the first steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "reward/mean": 0.5 + 0.1 * (row["step"] % 2)} if "reward/mean" in row else row for row in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(None, "did not rise beyond its noise", id="curve only"),
        pytest.param([0.1, 0.2, 0.15, 0.1], None, id="all rise"),
        pytest.param([-0.1, 0.2, -0.15, 0.1], "did not rise beyond its noise (from 0.5 to 0.512", id="some rise"),
        pytest.param([-0.1, -0.2, -0.1, -0.2], "fell (from 0.5 to 0.35 since step 0)", id="all fall"),
    ],
)
def test_reward_change_uses_the_guards_prompts(
    tmp_path: Path, changes: list[float] | None, message: str | None
) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.3)
    flatten_rewards(run_dir)
    if changes:
        write_guard_checkpoint(run_dir, 60, changes)
    text = " ".join(each.text for each in collect_findings(read_run(run_dir)))
    assert (message in text) if message else ("The training reward" not in text and "No sign of reward hacking" in text)


def test_rise_of_the_training_curve_counts_too(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.3)
    write_guard_checkpoint(run_dir, 60, [-0.1, 0.2, -0.15, 0.1])  # too few prompts for a significant change
    assert "The training reward" not in " ".join(each.text for each in collect_findings(read_run(run_dir)))


def test_run_without_gradients_is_reported(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.0)
    rows = (run_dir / "metrics.jsonl").read_text()
    rows = re.sub(r'"zero_std_groups": [\d.]+', '"zero_std_groups": 0.99', rows)
    (run_dir / "metrics.jsonl").write_text(re.sub(r'"grad_norm": [\d.]+', '"grad_norm": 0.0', rows))
    warnings = " ".join(each.text for each in collect_findings(read_run(run_dir)) if each.kind == "warning")
    assert "No gradient reached the weights in 60 of 60 steps" in warnings and "99% of the groups" in warnings


def test_page_shows_configuration_environment_and_evaluations(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    write_evaluation(run_dir, "held-out prompts", 0.625)
    text, _ = check_page(write_report([run_dir]))
    assert "type: brightness" in text and "abacus" in text and "9.9.9" in text
    assert "counting" in text and "0.625" in text and "0.57 to 0.68" in text and "held-out prompts" in text


def test_evaluation_reports_by_score_or_by_task(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    overall, task = {"mean": 0.5, "low": 0.4, "high": 0.6}, {"mean": 0.25, "low": 0.2, "high": 0.3}
    report = {"benchmark": "playeval", "scores": {"strict": {"counting": task, "overall": overall}}, "frechet": 1.75}
    (run_dir / "evaluations/last").mkdir(parents=True)
    (run_dir / "evaluations/last/report.json").write_text(json.dumps(report))
    (evaluation,) = collect_evaluations(group_runs([read_run(run_dir)]))
    assert {metric: list(scores) for metric, scores in evaluation.scores.items()} == {
        "strict": ["overall", "counting"],
        "frechet": ["overall"],
    }
    assert (
        evaluation.scores["strict"]["counting"] == ScoreInterval(0.25, 0.2, 0.3)
        and evaluation.scores["frechet"]["overall"].mean == 1.75
    )


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [write_fake_run(tmp_path / name, 0.1) for name in ("one", "two")]
    settings = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(settings.replace("group_size: 8", "group_size: 16"))
    text, _ = check_page(write_report(runs, tmp_path / "both.html"))
    assert '<th scope="row">objective.group_size</th><td>8</td><td>16</td>' in text
    assert 'class="run-1" points' in text and 'class="run-2" points' in text


def test_headline_is_the_held_out_evaluation_and_pictures_follow(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    write_evaluation(run_dir, "before", 0.3, benchmark="playeval")
    write_evaluation(run_dir, "after", 0.612, benchmark="playeval")
    text, _ = check_page(write_report([run_dir]))
    places = [text.index(part) for part in ("<h1>Strict PlayEval .30 to .61</h1>", "Higher is better", "<img ")]
    assert places == sorted(places)
    headings = re.findall(r'<h2 id="(\w+)"', text)
    assert headings == ["samples", "film", "curves", "found", "tasks", "config", "environment"]


def test_headline_without_an_evaluation_is_the_training_reward(tmp_path: Path) -> None:
    record = read_run(write_fake_run(tmp_path / "run", 0.1))
    headline = make_headline(group_runs([record])[0])
    curve = record.curve("guard/reward/mean")
    assert headline and (headline.before, headline.after) == (curve[0][1], curve[-1][1])
    text, _ = check_page(write_report([record.directory]))
    value = f"{format_score(curve[0][1])} to {format_score(curve[-1][1])}"
    assert f"<h1>Training reward {value}</h1>" in text and "no held-out score" in text


def test_headline_of_an_autoencoder_is_its_reconstruction(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "reconstruction.json").write_text('{"images": 9, "psnr": 21.5}')
    headline = make_headline(group_runs([read_run(tmp_path)])[0])
    assert headline and headline.text == "reconstruction PSNR 21.5" and "9 held-out images" in headline.source


@pytest.mark.parametrize(
    ("first", "pair"),
    [
        ("run, untrained, live, SingleSample(), seed 0, settings a", ("start", "end")),
        ("run, untrained, live, BestOfN(n=4), seed 0, settings a", (None, "end")),
        ("run, untrained, live, SingleSample(), seed 1, settings a", (None, "end")),
        ("run, step-000020, live, SingleSample(), seed 0, settings a", (None, "end")),
    ],
    ids=["same settings", "another search", "another seed", "trained"],
)
def test_only_comparable_evaluations_are_before_and_after(
    tmp_path: Path, first: str, pair: tuple[str | None, str]
) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    second = "run, step-000060, ema, SingleSample(), seed 0, settings b"
    for name, model in (("end", second), ("start", first)):
        write_evaluation(run_dir, name, 0.5, benchmark="playeval", model=model)
    found = find_evaluation_pair(read_run(run_dir))
    assert found and (found.before, found.after) == pair and found.step == 60


def test_samples_of_evaluations_are_marked_right_or_wrong(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    prompts = ("a red car", "two <script>alert(1)</script> cups", "a dog")
    for name, verdicts in (("before", (0.0, 0.0, 1.0)), ("after", (1.0, 0.0, 1.0))):
        folder = write_evaluation(run_dir, name, 0.5, benchmark="playeval")
        write_evaluated_samples(folder, prompts, verdicts)
    text, checker = check_page(write_report([run_dir]))
    assert re.findall(r'<figure class="(right|wrong|unmarked)"', text) == [
        "wrong",
        "right",
        "wrong",
        "wrong",
        "right",
        "right",
    ]
    assert text.count("&#10003; right") == 3 and text.count("&#10007; wrong") == 3
    assert "Right: 1 of 3 before and 2 of 3 after training" in text and "first 3 prompts of PlayEval" in text
    alts = [str(image["alt"]) for image in checker.images]
    assert alts[2].endswith(
        "two <script>alert(1)</script> cups; wrong (expected <b>two <script>alert(1)</script> cups</b>, found nothing)"
    )
    assert "<script>alert" not in text and checker.tags.count("script") == 1


def test_samples_without_verdicts_are_unmarked(tmp_path: Path) -> None:
    text, _ = check_page(write_report([write_fake_run(tmp_path / "run", 0.1)]))
    assert 'class="unmarked"' in text and 'class="mark' not in text


def test_script_in_names_and_prompts_is_escaped(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "<script>alert(1)<", 0.1)
    grid = run_dir / "samples/step-000060.json"
    data = json.loads(grid.read_text())
    data["prompts"][0] = '"><script>alert(2)</script>'
    grid.write_text(json.dumps(data))
    text, checker = check_page(write_report([run_dir]))
    assert "<script>alert" not in text and checker.tags.count("script") == 1
    assert any("<script>alert(2)</script>" in str(image["alt"]) for image in checker.images)


def test_page_shows_the_beginning_of_long_prompts(tmp_path: Path) -> None:
    plain = write_fake_run(tmp_path / "plain", 0.1)
    run_dir = write_fake_run(tmp_path / "long", 0.1)
    for grid in (run_dir / "samples").glob("*.json"):
        data = json.loads(grid.read_text())
        data["prompts"][0] = "a bell\a rings and " + "goes on " * 100_000
        grid.write_text(json.dumps(data))
    long, checker = check_page(write_report([run_dir]))
    assert len(long) < len(check_page(write_report([plain]))[0]) + 20_000
    assert any("a bell rings" in str(image["alt"]) for image in checker.images)


def test_runs_that_differ_only_in_seed_are_grouped(tmp_path: Path) -> None:
    runs = [write_fake_run(tmp_path / f"grpo-seed{seed}", 0.1 * seed, seed=seed) for seed in range(3)]
    for run_dir, score in zip(runs, (0.5, 0.6, 0.7), strict=True):
        write_evaluation(run_dir, "before", 0.3, benchmark="playeval")
        write_evaluation(run_dir, "after", score, benchmark="playeval")
    other = write_fake_run(tmp_path / "other", 0.1, seed=0)
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("group_size: 8", "group_size: 16"))
    groups = group_runs([read_run(run_dir) for run_dir in (*runs, other)])
    assert [(group.name, len(group.records)) for group in groups] == [("grpo", 3), ("other", 1)]
    text, _ = check_page(write_report([*runs, other], tmp_path / "all.html"))
    assert "grpo (3 seeds: 0, 1, 2)</b>: strict PlayEval .30 to .60 ± .10" in text
    assert (
        'class="band run-1"' in text and 'class="band run-2"' not in text and "run-3" not in text.split("</style>")[1]
    )
    low, high = groups[0].band("rewards/color") or ([], [])
    values = [dict(record.curve("rewards/color"))[60] for record in groups[0].records]
    assert high[-1][1] - low[-1][1] == pytest.approx(2 * stdev(values))
    (average,) = [each for each in collect_evaluations(groups) if each.name.endswith("after")]
    assert average.scores["strict"]["overall"] == ScoreInterval(*(pytest.approx(each) for each in (0.6, 0.5, 0.7)))


def test_runs_with_equal_seeds_are_not_grouped(tmp_path: Path) -> None:
    runs = [write_fake_run(tmp_path / name, 0.1, seed=0) for name in ("one", "two")]
    assert len(group_runs([read_run(run_dir) for run_dir in runs])) == 2


def test_equal_findings_of_runs_are_shown_once(tmp_path: Path) -> None:
    held = {"one": 0.3, "two": 0.2, "hacked": -0.3}
    runs = [write_fake_run(tmp_path / name, change) for name, change in held.items()]
    text, _ = check_page(write_report(runs, tmp_path / "all.html"))
    assert text.count("No sign of reward hacking in 4 checks") == 1 and "<small>one, two</small>" in text
    assert text.count("probable reward hacking") == 1 and "<small>hacked</small>" in text
    assert text.count("abacus") == 1  # one environment for all


def test_guard_without_a_held_out_reward_is_not_good(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.3)
    (run_dir / "config.yaml").write_text("rewards: {bright: {type: brightness, weight: 1.0}}")
    findings = collect_findings(read_run(run_dir))
    assert {each.kind for each in findings} == {"note"} and "No reward is held out" in findings[-1].text


def test_metrics_have_names_and_directions(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    config = (run_dir / "config.yaml").read_text().replace("weight: 0}", "weight: -1.0}")
    (run_dir / "config.yaml").write_text(config)
    text, _ = check_page(write_report([run_dir]))
    cards = re.findall(r"<figure class=\"card curve\">.*?<h3>(.*?)</h3>.*?</svg>(?:<p>(.*?)</p>)?</figure>", text)
    notes = dict(cards)
    assert notes["training reward"].startswith("<b>higher is better</b>") and "groups without a gradient" in notes
    assert notes["reward: color"] == notes["color, fixed prompts"] == "<b>lower is better</b>"
    assert "better" not in notes["KL to the reference"]


def test_share_image_is_written_beside_the_report(tmp_path: Path) -> None:
    runs = [write_fake_run(tmp_path / name, 0.1, frames=frames) for name, frames in (("a", 1), ("b", 5))]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    for run_dir in (*runs, bare):
        text, _ = check_page(write_report([run_dir]))
        assert '<meta property="og:image" content="report-share.png">' in text
        with Image.open(run_dir / "report-share.png") as image:
            assert image.size == (1200, 630) and image.format == "PNG"
    write_report(runs, tmp_path / "both.html")
    assert (tmp_path / "both-share.png").is_file() and not list(tmp_path.rglob("*.partial"))


def test_missing_and_damaged_files_are_skipped(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    check_page(write_report([bare]))
    torn = write_fake_run(tmp_path / "torn", 0.1)
    (torn / "samples/step-000000.json").write_text("{")
    (torn / "samples/step-000060.png").write_bytes(b"no picture")
    (torn / "config.yaml").write_text("a: [")
    (torn / "environment.json").write_text("[]")
    (torn / "checkpoints/step-000060").mkdir(parents=True)
    (torn / "checkpoints/step-000060/state.json").write_text('{"format": 1, "step": 60')
    (torn / "eval/x").mkdir(parents=True)
    (torn / "eval/x/report.json").write_text('{"means": 3, "by_tag": {"a": 1, "b": {"c": {"low": 0}}}}')
    check_page(write_report([torn]))


def test_samples_of_an_earlier_run_are_not_shown(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run", 0.1)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if json.loads(row)["step"] < 45]
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    assert [grid.step for grid in read_run(run_dir).sample_grids] == [0, 20, 40]


def test_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(tmp_path)])
    assert exit_info.value.code == EXIT_USAGE and "TM779" in capsys.readouterr().err


def test_training_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["steps=2", "sample.every=1", "batch.prompts=4", "guard.prompts=4", "guard.samples_per_prompt=2"]
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "grpo-toy-flow", *small])
    assert not exit_info.value.code and "the report is runs/grpo-toy-flow/report.html" in capsys.readouterr().err
    text, _ = check_page(Path("runs/grpo-toy-flow/report.html"))
    assert "before, step 0" in text and "after, step 2" in text and torch.__version__ in text


def test_failing_report_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()  # blocks the file
    out = StringIO()
    watchers = LoggerCollection([JsonlLogger(), SampleGridLogger(), HtmlReportLogger()], Console(file=out, width=300))
    for event in events(tmp_path, 0.1):
        watchers.log(event)
    watchers.close()
    assert "HtmlReportLogger failed" in out.getvalue() and (tmp_path / "metrics.jsonl").is_file()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.5, 0.5), (3e-7, 9e-7), (5, 5), (0, 0), (-1e6, 2e6), (0.9, 0.91)])
def test_axes_have_a_few_round_ticks(low: float, high: float) -> None:
    axis = nice_axis(low, high)
    assert 2 <= len(axis.ticks) <= 8 and axis.low <= low and axis.high >= high
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


def test_smoothing_keeps_lines_and_the_start() -> None:
    line = [(i, float(i)) for i in range(100)]
    assert smooth_curve(line)[:90] == line[:90]
    assert smooth_curve([(i, float(i == 0)) for i in range(100)])[0] == (0, 1.0)
