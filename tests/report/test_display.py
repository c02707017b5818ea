"""`show` and `compare`: which samples they find, what the figure contains, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import tastemaker as tm
from tastemaker.data.image_io import read_image, save_image
from tastemaker.report.figure import BAD, GOOD, MAX_PNG_BYTES
from tastemaker.report.sample_sets import collect_samples
from tastemaker.training.events import SamplesGenerated, TrainingStarted
from tastemaker.training.loggers.sample_grids import SampleGridLogger

QUIET = Console(quiet=True)
COLORS = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])


def plain_images(size: int = 8) -> torch.Tensor:
    """Four images [4, 3, H, W] of one color each."""
    return COLORS[:, :, None, None].expand(-1, -1, size, size)


def count_pixels(figure: tm.Figure, color: tuple[int, ...]) -> int:
    pixels = np.array(figure.image)
    return int((pixels == color).all(-1).sum())


def parse_color(text: str) -> tuple[int, ...]:
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


def write_samples(folder: Path, scores: list[float], prompts: tuple[str, ...] = ("a red", "a green")) -> list[Path]:
    """Images with a metadata.jsonl, as `generate` writes them."""
    rows = []
    for i, (prompt, score) in enumerate(zip(prompts, scores, strict=True)):
        save_image(plain_images()[i][None], folder / f"{i}.png")
        rows.append({"file": f"{i}.png", "index": i, "prompt": prompt, "seed": 3, "score": score})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [folder / row["file"] for row in rows]


def write_run(directory: Path, pixels: torch.Tensor, score: float) -> Path:
    """A run directory with the sample grids of two steps."""
    logger = SampleGridLogger()
    logger.log(TrainingStarted(0, 2, directory, 1))
    for step in (0, 2):
        prompts = tuple(f"color {i}" for i in range(len(pixels)))
        logger.log(SamplesGenerated(step, prompts, pixels[:, None] * (step / 2), {"color": score * step / 2}))
    logger.close()
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2)))
    return directory


def test_show_draws_all_samples_of_a_tensor_with_captions() -> None:
    figure = tm.show(plain_images(), ["red", "green", "blue", "yellow"])
    plain = tm.show(plain_images())
    assert figure.image.width == plain.image.width and figure.image.height > plain.image.height
    for color in COLORS.mul(255).int().tolist():
        assert count_pixels(figure, tuple(color)) == 160 * 160
    assert [len(tm.show(plain_images(), count=n).samples[0]) for n in (1, 3, 9)] == [1, 3, 4]


def test_show_accepts_images_and_lists() -> None:
    image = Image.new("RGB", (8, 8), "red")
    for source in (image, [image], plain_images()[0], [plain_images()[0]], plain_images()[:1, None]):
        assert count_pixels(tm.show(source), (255, 0, 0)) == 160 * 160
    assert len(tm.show([image, Image.new("RGB", (16, 12), "blue")]).samples[0]) == 2  # of different sizes


def test_show_reads_prompts_and_scores_of_generated_files(tmp_path: Path) -> None:
    files = write_samples(tmp_path / "made", [0.25, 0.75])
    for source in (files, tmp_path / "made", [str(file) for file in files]):
        figure = tm.show(source)
        (samples,) = figure.samples
        assert samples.prompts == ("a red", "a green") and samples.seed == 3
        assert figure.scores == {"made": {"score": 0.5}} and "score 0.50" in figure.title


def test_show_reads_the_last_samples_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plain_images(), 0.5)
    (last,) = tm.show(run).samples
    assert torch.equal(torch.stack(last.pixels), plain_images()[:, None])  # exactly as sampled, without captions
    assert last.prompts[1] == "color 1" and last.mean_scores() == {"color": 0.5}
    (first,) = tm.show(run, step=0).samples
    assert not torch.stack(first.pixels).any() and first.mean_scores() == {"color": 0.0}
    with pytest.raises(tm.ConfigError, match="step 1"):
        tm.show(run, step=1)


def test_verdicts_are_drawn_as_borders(tmp_path: Path) -> None:
    write_samples(tmp_path / "made", [0.0, 0.0])
    rows = [{"file": f"{i}.png", "prompt": f"p{i}", "strict": i} for i in (0, 1)]
    (tmp_path / "made/scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = tm.show(tmp_path / "made")
    assert figure.samples[0].verdicts == (False, True) and figure.scores["made"]["right"] == 0.5
    assert count_pixels(figure, parse_color(GOOD)) > 0 and count_pixels(figure, parse_color(BAD)) > 0


def test_figure_displays_itself_and_is_saved(tmp_path: Path) -> None:
    small = tm.show(plain_images())
    png = small._repr_png_()
    assert png is not None and png.startswith(b"\x89PNG") and len(png) <= MAX_PNG_BYTES
    assert small._repr_jpeg_() is None  # one format, so that a notebook does not store both
    noise = tm.show(torch.rand(9, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    jpeg = noise._repr_jpeg_()
    assert noise._repr_png_() is None and jpeg is not None and jpeg.startswith(b"\xff\xd8")
    path = small.save(tmp_path / "grid.png")
    assert torch.equal(read_image(path), small.frames.mul(255).round().div(255))
    assert repr(small).startswith("Figure(")


def test_videos_are_displayed_as_an_animation() -> None:
    figure = tm.show(torch.rand(2, 5, 3, 8, 8))
    png = figure._repr_png_()
    assert len(figure.frames) == 5 and png is not None and b"acTL" in png


def test_compare_pairs_files_and_computes_the_difference(tmp_path: Path) -> None:
    before, after = (write_samples(tmp_path / name, scores) for name, scores in (("a", [0.25, 0.5]), ("b", [0.5, 1])))
    figure = tm.compare(before, after, labels=("before", "after"))
    assert figure.scores == {"before": {"score": 0.375}, "after": {"score": 0.75}, "difference": {"score": 0.375}}
    assert "after: score 0.75 (+0.38)" in figure.title
    assert count_pixels(figure, (255, 0, 0)) == count_pixels(figure, (0, 255, 0)) == 2 * 128 * 128  # two of each
    assert tm.compare(before, after).scores.keys() == {"a", "b", "difference"}


def test_compare_reads_two_run_directories(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, plain_images(), score) for name, score in (("a", 0.25), ("b", 0.75))]
    figure = tm.compare(*runs)
    assert figure.scores["difference"] == {"color": 0.5} and "a, step 2" in figure.scores


def test_compare_prefers_the_evaluations_of_two_runs(tmp_path: Path) -> None:
    for name, verdict in (("a", 0), ("b", 1)):
        run = write_run(tmp_path / name, plain_images(), 0.5)
        folder = run / "eval/playeval-step-000002"
        files = write_samples(folder, [0.0, 0.0])
        rows = [
            {"file": file.name, "index": i, "seed": 0, "prompt": f"p{i}", "strict": verdict}
            for i, file in enumerate(files)
        ]
        (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        report = {"benchmark": "playeval", "prompts": 2, "scores": {"strict": {"overall": {"mean": verdict}}}}
        (folder / "report.json").write_text(json.dumps(report))
    figure = tm.compare(tmp_path / "a", tmp_path / "b")
    assert figure.scores == {"a": {"right": 0.0}, "b": {"right": 1.0}, "difference": {"right": 1.0}}


def test_run_generates_and_scores_the_prompts_of_the_other_side(tmp_path: Path) -> None:
    config = tm.load("grpo-toy-flow", ["sample.every=0", "engine.device=cpu", "batch.prompts=4", "steps=1"])
    run = tm.build(config, tmp_path / "toy")
    before = tm.show(run, count=4)
    (samples,) = before.samples
    assert len(samples) == 4 and set(samples.scores[0]) == set(run.rubric.rewards)
    assert torch.equal(torch.stack(tm.show(run, count=4).samples[0].pixels), torch.stack(samples.pixels))
    assert tm.compare(before, run).scores["difference"] == dict.fromkeys(run.rubric.rewards, 0.0)
    tm.train(run, console=QUIET)
    figure = tm.compare(before, run, labels=("before", "after"))
    left, right = figure.samples
    assert left.prompts == right.prompts and left.seed == right.seed
    assert not torch.equal(torch.stack(left.pixels), torch.stack(right.pixels))
    files = tm.compare(run.policy, run.policy, prompts=["a red", "a blue"], rubric=run.rubric)
    assert len(files.samples[0]) == 2 and set(files.scores["difference"].values()) == {0.0}
    run.engine.close()


def test_rubric_scores_samples_from_anywhere(tmp_path: Path) -> None:
    run = tm.build(tm.load("grpo-toy-flow", ["engine.device=cpu"]), tmp_path / "toy")
    figure = tm.show(plain_images(), ["a red", "a green", "a blue", "a yellow"], rubric=run.rubric)
    assert set(figure.samples[0].scores[0]) == set(run.rubric.rewards)
    run.engine.close()


def test_useless_sources_are_refused(tmp_path: Path) -> None:
    for source, message in (
        ([], "empty list"),
        (3, "a int"),
        ([3], "a list with a int"),
        (torch.rand(2, 8, 8, 8), "shape"),
        (plain_images() * 2 - 1, "0 to 1"),
        (tmp_path, "no run and no images"),
    ):
        with pytest.raises(tm.ConfigError, match=message):
            tm.show(source)
    with pytest.raises(tm.ConfigError, match="prompts differ"):
        tm.compare(write_samples(tmp_path / "a", [0, 0]), write_samples(tmp_path / "b", [0, 0], ("a red", "a yellow")))
    with pytest.raises(tm.ConfigError, match=r"4 and 2.*TM830"):
        tm.compare(plain_images(), plain_images()[:2])
    policy = tm.build_model(tm.load("grpo-toy-flow"), "cpu")
    with pytest.raises(tm.ConfigError, match="prompts"):
        tm.show(policy)
    with pytest.raises(tm.ConfigError, match="prompts"):
        tm.compare(plain_images(), policy)
    figure = tm.compare(plain_images(), plain_images())
    with pytest.raises(tm.ConfigError, match="two sets"):
        tm.compare(figure, figure)


def test_captions_of_unknown_prompts_may_be_fewer_than_the_samples() -> None:
    samples = collect_samples(plain_images(), count=4, prompts=["red"])
    assert samples.prompts == ("red", "", "", "")
