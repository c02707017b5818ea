"""The scoreboard as a Markdown page with tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from ...console import Table
from ...core.registry import ConfigError
from .plan import ScoreboardPlan
from .results import BeforeAfter, ConfidenceInterval, Result, ScoreboardRow, build_rows, load_results, mean_before_after
from .svg_charts import cost_chart, curve_charts, overview_chart

SCOREBOARD_FILE = "scoreboard.md"
BEGIN_MARK, END_MARK = "<!-- bench: written by `tastemaker bench`, do not edit -->", "<!-- bench: end -->"
TASK_LABELS = {
    "single_object": "single",
    "two_object": "two",
    "counting": "counting",
    "colors": "colors",
    "position": "position",
    "color_attr": "attribution",
}
MOTION_LABELS = {"motion": "motion", "frames": "frame difference", "flicker": "flicker", "diversity": "diversity"}


def write_scoreboard(plan: ScoreboardPlan, source: Path, page: Path | None, console: Console) -> None:
    """Write the scoreboard beside the results and, if given, into the marked section of another page."""
    results = load_results(source)
    rows = build_rows(results, plan)
    if not rows:
        raise ConfigError(f"{source} does not contain results of {plan.name} yet; run `tastemaker bench` first [TM645]")
    default_page = (source if source.is_dir() else source.parent) / SCOREBOARD_FILE
    pages = {default_page: f"# {plan.name}\n\n{BEGIN_MARK}\n{END_MARK}\n"}
    if page is not None:
        if not page.is_file():
            raise ConfigError(
                f"--page: the file {page} does not exist; create it with the lines '{BEGIN_MARK}' and "
                f"'{END_MARK}' [TM646]"
            )
        pages[page] = page.read_text(encoding="utf-8")
    for path, text in pages.items():
        folder = path.with_suffix("")
        section = format_section(rows, results, folder.name, format_motion_table(results))
        path.write_text(replace_section(text, section, str(path)), encoding="utf-8")
        draw_figures(rows, results, plan, folder)
    console.print(summary_table(rows))
    paths = " and ".join(str(path) for path in pages)
    console.print(f"the scoreboard is {paths}", highlight=False, markup=False, soft_wrap=True)


def draw_figures(rows: Sequence[ScoreboardRow], results: Sequence[Result], plan: ScoreboardPlan, folder: Path) -> None:
    """Write the figures of a page as SVG files."""
    targets = {
        name: cell.target.min_score for name, cell in plan.cells.items() if cell.target and cell.target.min_score
    }
    figures = {"overview": overview_chart(rows, targets)}
    if any(row.samples for row in rows):
        figures["curves"] = curve_charts(rows, results)
    if any(row.is_search for row in rows):
        figures["costs"] = cost_chart(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_text(figure, encoding="utf-8")


def summary_table(rows: Sequence[ScoreboardRow]) -> Table:
    """Return a table of the main columns for the terminal."""
    table = Table("cell", "before", "after", "change", "control", "target")
    for row in rows:
        control = f"{row.control_change.mean:+.3f}" if row.control_change else "-"
        target = "-" if row.missed_targets is None else "[red]missed[/]" if row.missed_targets else "[green]reached[/]"
        change = format_interval(row.change, signed=True)
        table.add_row(row.key, f"{row.before:.3f}", f"{row.after.mean:.3f}", change, control, target)
    return table


def format_section(
    rows: Sequence[ScoreboardRow], results: Sequence[Result], folder: str, motion_table: str | None = None
) -> str:
    """Return all tables and figures as Markdown, with a description of the measurements."""
    trained, searches = [row for row in rows if not row.is_search], [row for row in rows if row.is_search]
    parts = [describe_measurements(results), f"![every cell, before and after]({folder}/overview.svg)"]
    if trained:
        parts += ["### Training", _training_table(trained), *_format_notes(trained)]
        parts += ["### Task by task, after training", _task_table(trained)]
        parts += ["### Videos: reward, motion and diversity", motion_table] if motion_table else []
        parts.append(f"![training rewards and their controls]({folder}/curves.svg)")
    if searches:
        parts += ["### Search instead of training, and after it", _search_table(searches), *_format_notes(searches)]
        parts.append(f"![score against network calls]({folder}/costs.svg)")
    return "\n\n".join(parts)


def replace_section(text: str, body: str, page: str) -> str:
    """Replace what is between the marks of a page."""
    if text.count(BEGIN_MARK) != 1 or text.count(END_MARK) != 1 or text.index(BEGIN_MARK) > text.index(END_MARK):
        raise ConfigError(
            f"--page: {page} must contain the lines '{BEGIN_MARK}' and '{END_MARK}' once each, in this order; add "
            "them where the results belong [TM647]"
        )
    before, _, rest = text.partition(BEGIN_MARK)
    return f"{before}{BEGIN_MARK}\n\n{body}\n\n{END_MARK}{rest.partition(END_MARK)[2]}"


def describe_measurements(results: Sequence[Result]) -> str:
    environments = sorted({"{device}, {precision}, torch {torch}".format(**r["environment"]) for r in results})
    sizes = sorted({f"{r['after']['prompts']} prompts, {r['after']['images']} samples" for r in results})
    return (
        f"Measured on {'; '.join(environments)}: {len(results)} measurements of {'; '.join(sizes)}. Numbers are means "
        "over seeds; parentheses hold 95 % bootstrap intervals over prompts and seeds. Seconds are the time of the "
        "training steps, while other runs shared the machine; network calls are counted per sample."
    )


def _training_table(rows: Sequence[ScoreboardRow]) -> str:
    head = [
        *("method", "family", "reward", "seeds", "before", "after", "change", "change of the control"),
        *("lenient rule", "diversity", "Frechet distance", "training reward"),
        *("samples", "seconds", "network calls", "guard", "target"),
    ]
    cells = [
        [
            row.objective,
            row.family,
            row.reward,
            str(row.seeds),
            format_score(row.before),
            format_interval(row.after),
            format_interval(row.change, signed=True),
            format_interval(row.control_change, signed=True) if row.control_change else "-",
            format_change(row.lenient, 3),
            format_change(row.set_metrics["diversity"], 3),
            format_change(row.set_metrics["frechet"], 2),
            format_change(row.training_reward, 3),
            format_count(row.samples),
            f"{row.seconds:.0f}",
            format_count(row.training_network_calls),
            "silent" if row.warning_step is None else f"warns at {row.warning_step}",
            format_target(row),
        ]
        for row in rows
    ]
    return format_table(head, cells)


def _task_table(rows: Sequence[ScoreboardRow]) -> str:
    tags = list(dict.fromkeys(tag for row in rows for tag in row.tasks))
    head = ["method", "family", "reward", "score", *(TASK_LABELS.get(tag, tag.replace("_", " ")) for tag in tags)]
    cells = [
        [row.objective, row.family, row.reward, row.score]
        + [format_score(row.tasks[tag]) if tag in row.tasks else "-" for tag in tags]
        for row in rows
    ]
    return format_table(head, cells)


def _search_table(rows: Sequence[ScoreboardRow]) -> str:
    head = ["search", "family", "seeds", "candidates", "network calls per sample", "judge calls", "FLOPs"]
    head += ["before", "after", "change", "diversity", "target"]
    cells = [
        [
            row.objective,
            row.family,
            str(row.seeds),
            str(row.num_candidates),
            f"{row.network_calls:.0f}",
            f"{row.judge_calls:.0f}" if row.judge_calls else "-",
            format_count(row.flops) if row.flops else "-",
            format_score(row.before),
            format_interval(row.after),
            format_interval(row.change, signed=True),
            format_change(row.set_metrics["diversity"], 3),
            format_target(row),
        ]
        for row in rows
    ]
    return format_table(head, cells)


def _format_notes(rows: Sequence[ScoreboardRow]) -> list[str]:
    """List missed targets and the guard's warnings."""
    missed = [f"- {row.key}: {', '.join(row.missed_targets)}" for row in rows if row.missed_targets]
    warnings = [[row.key, str(row.warning_step), row.warning] for row in rows if row.warning_step is not None]
    parts = ["Missed targets:\n\n" + "\n".join(missed)] if missed else []
    if warnings:
        parts.append("Warnings of the guard:\n\n" + format_table(["cell", "step", "warning"], warnings))
    return parts


def format_motion_table(results: Sequence[Result]) -> str | None:
    """Return the table of cells whose guard measured motion, or None: a frozen video may get a high reward.

    The table compares rewards after equal numbers of samples and after equal time, and the motion of the samples.
    """
    measured = [r for r in results if r["kind"] == "after" and "motion" in (r.get("training") or {}).get("guard", {})]
    if not measured:
        return None
    cells = {cell: [r for r in measured if r["cell"] == cell] for cell in dict.fromkeys(r["cell"] for r in measured)}
    shortest = min(_mean_seconds(seeds) for seeds in cells.values())
    head = ["method", "reward", "samples", "seconds", "training reward", f"after {shortest:.0f} s", "each reward"]
    rows = []
    for seeds in cells.values():
        training, labels = [r["training"] for r in seeds], seeds[0]["about"]
        components = [name for name in training[0]["guard"] if name.startswith("rewards/")]
        rewards = ", ".join(
            f"{name.removeprefix('rewards/')} {format_change(_guard_change(training, name), 3)}" for name in components
        )
        rows.append(
            [
                labels["objective"],
                labels["reward"],
                format_count(fmean(each["samples"] for each in training)),
                f"{_mean_seconds(seeds):.0f}",
                format_change(_guard_change(training, "reward/mean"), 3),
                f"{_reward_after(seeds, shortest):.3g}",
                rewards or "-",
                *(format_change(_guard_change(training, name), 3) for name in MOTION_LABELS),
            ]
        )
    return format_table([*head, *MOTION_LABELS.values()], rows)


def _mean_seconds(seeds: Sequence[Result]) -> float:
    return fmean(r["training"]["seconds"] for r in seeds)


def _guard_change(training: Iterable[dict[str, dict[str, list[float]]]], name: str) -> BeforeAfter | None:
    return mean_before_after([each["guard"][name] for each in training if each["guard"].get(name)])


def _reward_after(seeds: Sequence[Result], seconds: float) -> float:
    """Mean reward on the guard's prompts after a training time, assuming that all steps take equally long."""
    rewards = []
    for training in (r["training"] for r in seeds):
        step = training["steps"] * min(1.0, seconds / max(training["seconds"], 1e-9))
        curve = training["curves"]["guard/reward/mean"]
        last = max((point for point in curve if point[0] <= step), key=lambda point: point[0], default=curve[0])
        rewards.append(last[1])
    return fmean(rewards)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def format_score(value: float, digits: int = 3) -> str:
    """Format without the leading zero: .483 instead of 0.483."""
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and not text.lstrip("-").startswith("1") else text


def format_interval(interval: ConfidenceInterval, *, signed: bool = False) -> str:
    sign = "+" if signed and interval.mean >= 0 else ""
    return f"{sign}{format_score(interval.mean)} ({format_score(interval.low)} to {format_score(interval.high)})"


def format_change(ends: BeforeAfter | None, digits: int) -> str:
    return f"{format_score(ends[0], digits)} -> {format_score(ends[1], digits)}" if ends else "-"


def format_count(number: float) -> str:
    """Format with at most three digits: 115 k, 1.2 M."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def format_target(row: ScoreboardRow) -> str:
    if row.missed_targets is None:
        return "-"
    return "**missed**" if row.missed_targets else "reached"
