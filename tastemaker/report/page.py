"""`tastemaker report`: one self-contained HTML page about one or several runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from ..core.output_paths import write_text_atomically
from ..core.registry import ConfigError
from .charts import collect_evaluations, color_class, format_change, render_bars, render_curves
from .findings import ReportFinding, collect_findings
from .groups import IGNORED_SETTINGS, RunGroup, group_runs
from .headline import Headline, format_score, make_headline
from .metric_names import name_metric
from .run_record import RunRecord, read_run
from .samples import NUM_PAIRS, read_before_and_after, render_before_and_after, render_filmstrip
from .share_image import HEIGHT, WIDTH, share_image_path, write_share_image

STYLE = Path(__file__).with_name("style.css")
SCRIPT = Path(__file__).with_name("script.js")
FINDING_LABELS = {"warning": "Warning", "good": "Good", "note": "Note"}
PAIRS_PER_GROUP = 6  # prompts shown before and after training if there are several groups


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of some runs and its share image atomically.

    The default path is `report.html` in the first run's directory. The share image is beside it, as
    `report-share.png`.
    """
    if not directories:
        raise ConfigError("report: no run was given; give at least one run directory, for example runs/demo [TM778]")
    path = out or directories[0] / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = group_runs([read_run(directory) for directory in directories])
    share = share_image_path(path)
    write_text_atomically(path, render_page(groups, share.name))
    samples = next((pairs for group in groups if (pairs := read_before_and_after(group.first))), None)
    write_share_image(share, _page_heading(groups), _share_subtitle(groups), samples.pairs if samples else ())
    return path


def render_page(groups: Sequence[RunGroup], share_image: str) -> str:
    """Render the HTML document. Styles, script, charts and images are inline, so that it needs no network."""
    count = NUM_PAIRS if len(groups) == 1 else PAIRS_PER_GROUP
    sections = {
        "samples": ("Before and after", _per_group(groups, lambda record: render_before_and_after(record, count))),
        "film": ("During training", _per_group(groups, render_filmstrip)),
        "curves": ("Curves", _legend(groups) + render_curves(groups)),
        "found": ("Findings", _findings(groups)),
        "tasks": ("Task by task", _evaluations(groups)),
        "config": ("Settings", _configuration(groups)),
        "environment": ("Environment", _environments(groups)),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in sections.items())
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{content}</section>'
        for name, (heading, content) in sections.items()
    )
    # Numbers follow the pictures, which are the first section.
    first, separator, rest = body.partition("</section>")
    script = SCRIPT.read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{_metadata(groups, share_image, script)}'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the report</a><header>{_header(groups)}'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{first}{_key_numbers(groups)}{separator}{rest}</main>'
        "<footer><p>Written by Tastemaker. This file contains all of its images and needs no network.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _metadata(groups: Sequence[RunGroup], share_image: str, script: str) -> str:
    """Render title, policy and share metadata. The policy allows only this script, and no request at all."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    heading, subtitle = (escape(text, quote=True) for text in (_page_heading(groups), _share_subtitle(groups)))
    image = escape(share_image, quote=True)
    return (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{heading} - {escape(_names(groups))} - Tastemaker</title>"
        f'<meta property="og:type" content="article"><meta property="og:title" content="{heading}">'
        f'<meta property="og:description" content="{subtitle}"><meta property="og:image" content="{image}">'
        f'<meta property="og:image:width" content="{WIDTH}"><meta property="og:image:height" content="{HEIGHT}">'
        '<meta name="twitter:card" content="summary_large_image">'
    )


def _names(groups: Sequence[RunGroup]) -> str:
    *others, last = [group.name for group in groups]
    return f"{', '.join(others)} and {last}" if others else last


def _page_heading(groups: Sequence[RunGroup]) -> str:
    """Return the headline of one group, or the same quantity of several."""
    headlines = [headline for group in groups if (headline := make_headline(group))]
    if len(groups) == 1 and not headlines:
        return groups[0].name
    same = len(headlines) == len(groups) and len({headline.quantity for headline in headlines}) == 1
    if len(groups) == 1:
        text = headlines[0].text
    elif not same:
        text = f"{len(groups)} runs compared"
    elif len(groups) == 2:
        text = f"{headlines[0].quantity} after training: {' and '.join(format_score(each.after) for each in headlines)}"
    else:
        low, high = (format_score(pick(each.after for each in headlines)) for pick in (min, max))
        text = f"{headlines[0].quantity} after training: {low} to {high} in {len(groups)} settings"
    return text[:1].upper() + text[1:]


def _share_subtitle(groups: Sequence[RunGroup]) -> str:
    return f"{_names(groups)}: {_describe_training(groups)}"


def _header(groups: Sequence[RunGroup]) -> str:
    names = f'<p class="names">{escape(groups[0].label)}</p>' if len(groups) == 1 else ""
    heading = f"<h1>{escape(_page_heading(groups))}</h1>"
    headlines = [(index, group, make_headline(group)) for index, group in enumerate(groups)]
    if len(groups) == 1:
        lines = _headline_source(headlines[0][2], detailed=True)
    else:
        items = "".join(
            f"<li>{_color_key(index)}<b>{escape(group.label)}</b>: {escape(headline.text)}</li>"
            for index, group, headline in headlines
            if headline
        )
        sources = dict.fromkeys(_headline_source(headline) for _, _, headline in headlines)
        lines = f'<ul class="headlines">{items}</ul>{"".join(sources)}'
    count = sum(finding.kind == "warning" for finding, _ in _distinct_findings(groups))
    warning = f'<p class="alert"><a href="#found">{count} warning{"s" if count > 1 else ""}</a></p>' if count else ""
    return f'{names}{heading}{lines}{warning}<p class="quiet">{escape(_describe_training(groups))}</p>'


def _headline_source(headline: Headline | None, *, detailed: bool = False) -> str:
    if headline is None:
        return ""
    better = f"<b>{headline.better.capitalize()}.</b> " if headline.better else ""
    text = f"{headline.source} {headline.detail}" if detailed and headline.detail else headline.source
    return f"<p>{better}{escape(text)}</p>"


def _describe_training(groups: Sequence[RunGroup]) -> str:
    texts = []
    for record in (group.first for group in groups):
        components = [record.config.get(key) for key in ("objective", "model")]
        names = [
            str(each["type"]).replace("_", " ") for each in components if isinstance(each, Mapping) and "type" in each
        ]
        rewards = record.config.get("rewards")
        goals = [str(name) for name in rewards if name not in record.held_out] if isinstance(rewards, Mapping) else []
        goal = f" for {', '.join(goals)}" if goals else ""
        texts.append(f"{' on '.join(names)}{goal}, {record.steps} steps")
    return "; ".join(dict.fromkeys(texts))


def _per_group(groups: Sequence[RunGroup], render: Callable[[RunRecord], str]) -> str:
    """Render the first run of each group, under its name if there are several runs."""
    if len(groups) == 1 and len(groups[0].records) == 1:
        return render(groups[0].first)
    html = ""
    for index, group in enumerate(groups):
        if content := render(group.first):
            others = f" (one of {len(group.records)} seeds)" if len(group.records) > 1 else ""
            html += f"<h3>{_color_key(index)}{escape(group.first.name)}{others}</h3>{content}"
    return html


def _color_key(index: int) -> str:
    return f'<span class="key {color_class(index)}"></span>'


def _key_numbers(groups: Sequence[RunGroup]) -> str:
    """Render the first and last values of the most important metrics, as a table if there are several groups."""
    numbers = [_key_numbers_of_group(group) for group in groups]
    if len(groups) == 1:
        cells = ""
        for label, (value, better) in numbers[0].items():
            note = f'<dd class="better">{better}</dd>' if better else ""
            cells += f"<div><dt>{escape(label)}</dt><dd>{value}</dd>{note}</div>"
        return f'<dl class="numbers">{cells}</dl>'
    directions = {label: better for each in numbers for label, (_, better) in each.items()}
    columns = sorted(directions, key=lambda label: (not directions[label], "held out" in label))
    head = "".join(
        f'<th scope="col">{escape(label)}{f"<br><small>{directions[label]}</small>" if directions[label] else ""}</th>'
        for label in columns
    )
    rows = "".join(
        f'<tr><th scope="row">{_color_key(index)}{escape(group.label)}</th>'
        + "".join(f"<td>{each[label][0] if label in each else ''}</td>" for label in columns)
        + "</tr>"
        for index, (group, each) in enumerate(zip(groups, numbers, strict=True))
    )
    return _scrollable_table(f'<thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{rows}</tbody>', "The runs")


def _key_numbers_of_group(group: RunGroup) -> dict[str, tuple[str, str]]:
    """Return the values of a group as HTML, with the direction that is better, by label."""
    record = group.first
    guarded = bool(record.curve("guard/reward/mean"))
    metrics = ["guard/reward/mean" if guarded else "reward/mean"]
    metrics += [f"guard/rewards/{name}" for name in record.held_out]
    metrics += ["guard/diversity"] if guarded else []
    metrics += [] if record.curve("reward/mean") else ["loss"]
    numbers: dict[str, tuple[str, str]] = {}
    for metric in metrics:
        if record.curve(metric):
            name = name_metric(metric, group.records)
            numbers[name.title] = format_change(group, metric), name.better
    numbers["steps"] = f"{record.steps:,}", ""
    total = ", all seeds" if len(group.records) > 1 else ""
    if len(group.records) > 1:
        numbers["seeds"] = str(len(group.records)), ""
    if samples := sum(each.total("samples") for each in group.records):
        numbers[f"samples{total}"] = f"{samples:,.0f}", ""
    if seconds := sum(each.total("time/step") for each in group.records):
        numbers[f"training time{total}"] = str(timedelta(seconds=round(seconds))), ""
    return numbers


def _distinct_findings(groups: Sequence[RunGroup]) -> list[tuple[ReportFinding, list[str]]]:
    """Return every finding once, with the names of the runs that have it, warnings first."""
    names: dict[ReportFinding, list[str]] = {}
    for record in (record for group in groups for record in group.records):
        for finding in dict.fromkeys(collect_findings(record)):
            names.setdefault(finding, []).append(record.name)
    return sorted(names.items(), key=lambda item: list(FINDING_LABELS).index(item[0].kind))


def _findings(groups: Sequence[RunGroup]) -> str:
    total = sum(len(group.records) for group in groups)

    def describe(names: Sequence[str]) -> str:
        if total == 1:
            return ""
        return f"<small>{'all runs' if len(names) == total else escape(', '.join(names))}</small>"

    return "".join(
        f'<div class="finding {finding.kind}"><b>{FINDING_LABELS[finding.kind]}</b>'
        f"<div><p>{escape(finding.text)}</p>{describe(names)}</div></div>"
        for finding, names in _distinct_findings(groups)
    )


def _legend(groups: Sequence[RunGroup]) -> str:
    bands = any(len(group.records) > 1 for group in groups)
    note = '<p class="quiet">Lines are means over seeds, bands one standard deviation.</p>' if bands else ""
    if len(groups) == 1:
        return note
    items = "".join(f"<li>{_color_key(index)}{escape(group.label)}</li>" for index, group in enumerate(groups))
    return f'<ul class="legend">{items}</ul>{note}'


def _evaluations(groups: Sequence[RunGroup]) -> str:
    evaluations = collect_evaluations(groups)
    if not evaluations:
        return ""
    averaged = any(len(group.records) > 1 for group in groups)
    ranges = (
        "95 % intervals; one standard deviation where runs are averaged over seeds" if averaged else "95 % intervals"
    )
    return f'<p class="quiet">Ranges are {ranges}.</p><div class="cards tasks">{render_bars(evaluations)}</div>'


def _configuration(groups: Sequence[RunGroup]) -> str:
    files = [
        f"<details><summary>{escape(group.first.name)}</summary>"
        f"<pre tabindex='0'>{escape(group.first.config_text)}</pre></details>"
        for group in groups
        if group.first.config_text
    ]
    return _config_differences(groups) + "".join(files)


def _config_differences(groups: Sequence[RunGroup]) -> str:
    configs = [_flatten(group.first.config) for group in groups]
    for group, config in zip(groups, configs, strict=True):
        if len(group.records) > 1:
            config["seed"] = ", ".join(str(record.config["seed"]) for record in group.records)
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if len({str(config.get(key)) for config in configs}) > 1 and key not in IGNORED_SETTINGS
    ]
    if len(groups) == 1 or not keys:
        return ""
    head = "".join(
        f'<th scope="col">{_color_key(index)}{escape(group.name)}</th>' for index, group in enumerate(groups)
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th>'
        + "".join(f"<td>{escape(str(config.get(key, 'absent')))}</td>" for config in configs)
        + "</tr>"
        for key in keys
    )
    table = f'<thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>{rows}</tbody>'
    return "<p>Settings that differ between the runs:</p>" + _scrollable_table(
        table, "Settings that differ", "settings"
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _environments(groups: Sequence[RunGroup]) -> str:
    """Render a table for each distinct environment, with the directories of its runs."""
    # Runs on one machine differ in their start.
    members: dict[str, list[RunRecord]] = {}
    for record in (record for group in groups for record in group.records):
        environment = {key: value for key, value in record.environment.items() if key != "started"}
        members.setdefault(str(environment), []).append(record)
    return "".join(_environment(records) for records in members.values())


def _environment(records: Sequence[RunRecord]) -> str:
    directories = {
        "directory" if len(records) == 1 else "directories": ", ".join(str(each.directory) for each in records)
    }
    rows = [
        f'<tr><th scope="row">{escape(str(key).replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in {**directories, **records[0].environment}.items()
    ]
    label = f"Environment of {', '.join(record.name for record in records)}"
    return _scrollable_table(f"<tbody>{''.join(rows)}</tbody>", label, "settings")


def _scrollable_table(table: str, label: str, css_class: str = "plain") -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">'
        f'<table class="{css_class}">{table}</table></div>'
    )
