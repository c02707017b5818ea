"""`tastemaker report`: one self-contained HTML page about one or several runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from .charts import collect_evaluations, color_class, format_number, render_bars, render_curves
from .findings import collect_findings
from .run_record import RunRecord, read_run
from .samples import render_before_and_after, render_filmstrip

STYLE = Path(__file__).with_name("style.css")
REWARD_LABEL = "training reward"
FINDING_LABELS = {"warning": "Warning", "note": "Note", "good": "Good"}
IGNORED_SETTINGS = ("name", "output_dir")  # differ between any two runs


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of some runs atomically, to `report.html` in the first run's directory by default."""
    if not directories:
        raise ConfigError("a report needs at least one run; give the directory of one, as in runs/demo")
    path = out or directories[0] / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(render_page([read_run(directory) for directory in directories]), encoding="utf-8")
    os.replace(partial, path)
    return path


def render_page(records: Sequence[RunRecord]) -> str:
    """Render the HTML document. Styles, charts and images are inline, so that it needs no network."""
    *others, last = [record.name for record in records]
    title = f"{', '.join(others)} and {last}" if others else last
    sections = {
        "found": ("Findings", _findings(records)),
        "samples": ("Before and after", _per_run(records, render_before_and_after)),
        "film": ("During training", _per_run(records, render_filmstrip)),
        "tasks": ("Task by task", _evaluations(records)),
        "curves": ("Curves", _legend(records) + render_curves(records)),
        "config": ("Configuration", _configuration(records)),
        "environment": ("Environment", _per_run(records, _environment)),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in sections.items())
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{content}</section>'
        for name, (heading, content) in sections.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - Tastemaker</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the report</a><header><h1>{escape(title)}</h1>'
        f'<p class="quiet">{_subtitle(records)}</p><nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{_key_numbers(records)}{body}</main>'
        "<footer><p>Written by Tastemaker. This file contains all of its images and needs no network.</p></footer>"
        "</body></html>\n"
    )


def _subtitle(records: Sequence[RunRecord]) -> str:
    texts = []
    for record in records:
        components = [record.config.get(key) for key in ("objective", "model")]
        names = [str(each["type"]) for each in components if isinstance(each, Mapping) and "type" in each]
        rewards = record.config.get("rewards")
        goal = f" for {', '.join(map(str, rewards))}" if isinstance(rewards, Mapping) and rewards else ""
        texts.append(f"{' on '.join(names)}{goal}, {record.steps} steps")
    return escape("; ".join(dict.fromkeys(texts)))


def _per_run(records: Sequence[RunRecord], render: Callable[[RunRecord], str]) -> str:
    """Render a section for each run, under the run's name if there are several."""
    if len(records) == 1:
        return render(records[0])
    contents = [(run, record.name, render(record)) for run, record in enumerate(records)]
    return "".join(f"<h3>{_color_key(run)}{escape(name)}</h3>{content}" for run, name, content in contents if content)


def _color_key(run: int) -> str:
    return f'<span class="key {color_class(run)}"></span>'


def _key_numbers(records: Sequence[RunRecord]) -> str:
    """Render the first and last values of the most important metrics, as a table if there are several runs."""
    if len(records) == 1:
        items = _key_numbers_of_run(records[0]).items()
        cells = "".join(f"<div><dt>{escape(label)}</dt><dd>{value}</dd></div>" for label, value in items)
        return f'<dl class="numbers">{cells}</dl>'
    numbers = [_key_numbers_of_run(record) for record in records]
    labels = dict.fromkeys(label for each in numbers for label in each)
    columns = sorted(labels, key=lambda label: (label != REWARD_LABEL, "held out" not in label))
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in columns)
    rows = "".join(
        f'<tr><th scope="row">{_color_key(run)}{escape(record.name)}</th>'
        + "".join(f"<td>{each.get(label, '')}</td>" for label in columns)
        + "</tr>"
        for run, (record, each) in enumerate(zip(records, numbers, strict=True))
    )
    return _scrollable_table(f'<thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{rows}</tbody>', "The runs")


def _key_numbers_of_run(record: RunRecord) -> dict[str, str]:
    guarded = bool(record.curve("guard/reward/mean"))
    metrics = {REWARD_LABEL: "guard/reward/mean" if guarded else "reward/mean"}
    metrics |= {f"{name}, held out": f"guard/rewards/{name}" for name in record.held_out}
    metrics |= {"diversity": "guard/diversity"} if guarded else {}
    metrics |= {} if record.curve("reward/mean") else {"loss": "loss"}
    numbers = {}
    for label, metric in metrics.items():
        if curve := record.curve(metric):
            numbers[label] = f"<i>{format_number(curve[0][1])} &rarr;</i> {format_number(curve[-1][1])}"
    numbers["steps"] = f"{record.steps:,}"
    if samples := record.total("samples"):
        numbers["samples"] = f"{samples:,.0f}"
    if seconds := record.total("time/step"):
        numbers["training time"] = str(timedelta(seconds=round(seconds)))
    return numbers


def _findings(records: Sequence[RunRecord]) -> str:
    def render(record: RunRecord) -> str:
        return "".join(
            f'<div class="finding {finding.kind}"><b>{FINDING_LABELS[finding.kind]}</b>'
            f"<p>{escape(finding.text)}</p></div>"
            for finding in collect_findings(record)
        )

    return _per_run(records, render)


def _legend(records: Sequence[RunRecord]) -> str:
    if len(records) == 1:
        return ""
    items = "".join(f"<li>{_color_key(run)}{escape(record.name)}</li>" for run, record in enumerate(records))
    return f'<ul class="legend">{items}</ul>'


def _evaluations(records: Sequence[RunRecord]) -> str:
    evaluations = collect_evaluations(records)
    return f'<div class="cards tasks">{render_bars(evaluations)}</div>' if evaluations else ""


def _configuration(records: Sequence[RunRecord]) -> str:
    files = [
        f"<details><summary>{escape(record.name)}</summary>"
        f"<pre tabindex='0'>{escape(record.config_text)}</pre></details>"
        for record in records
        if record.config_text
    ]
    return _config_differences(records) + "".join(files)


def _config_differences(records: Sequence[RunRecord]) -> str:
    configs = [_flatten(record.config) for record in records]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if len({str(config.get(key)) for config in configs}) > 1 and key not in IGNORED_SETTINGS
    ]
    if len(records) == 1 or not keys:
        return ""
    head = "".join(f'<th scope="col">{_color_key(run)}{escape(record.name)}</th>' for run, record in enumerate(records))
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


def _environment(record: RunRecord) -> str:
    rows = [
        f'<tr><th scope="row">{escape(str(key).replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in {"directory": record.directory, **record.environment}.items()
    ]
    return _scrollable_table(f"<tbody>{''.join(rows)}</tbody>", f"Environment of {record.name}")


def _scrollable_table(table: str, label: str, css_class: str = "plain") -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">'
        f'<table class="{css_class}">{table}</table></div>'
    )
