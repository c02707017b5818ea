"""The page: one HTML file that holds everything and asks the network for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from .charts import format_number
from .curves import render_curves
from .evaluation_bars import collect_evaluations, render_bars
from .findings import collect_findings
from .run_record import RunRecord, read_run
from .samples import render_before_and_after, render_filmstrip

STYLE = Path(__file__).with_name("style.css")
REWARD_LABEL = "training reward"
FINDING_LABELS = {"warning": "Warning", "note": "Note", "good": "Good"}


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of some runs, beside the first if no place is given; it appears whole or not at all."""
    if not directories:
        raise ConfigError("a report needs at least one run; give the directory of one, as in runs/demo")
    path = out or directories[0] / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(render_page([read_run(directory) for directory in directories]), encoding="utf-8")
    os.replace(partial, path)
    return path


def render_page(records: Sequence[RunRecord]) -> str:
    """The whole document."""
    *others, last = [record.name for record in records]
    title = f"{', '.join(others)} and {last}" if others else last
    parts = {
        "found": ("What was found", _findings(records)),
        "samples": ("Before and after", _each(records, render_before_and_after)),
        "film": ("Through training", _each(records, render_filmstrip)),
        "tasks": ("Task by task", _tasks(records)),
        "curves": ("Curves", _legend(records) + render_curves(records)),
        "config": ("Configuration", _configuration(records)),
        "environment": ("Environment", _environment(records)),
    }
    shown = {name: part for name, part in parts.items() if part[1]}
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in shown.items())
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{content}</section>'
        for name, (heading, content) in shown.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - Tastemaker</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the report</a><header><h1>{escape(title)}</h1>'
        f'<p class="quiet">{_subtitle(records)}</p><nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{_numbers(records)}{body}</main>'
        "<footer><p>Written by Tastemaker. This file holds all of its pictures and needs no network.</p></footer>"
        "</body></html>\n"
    )


def _subtitle(records: Sequence[RunRecord]) -> str:
    told = []
    for record in records:
        kinds = [record.config.get(key) for key in ("objective", "model")]
        names = [str(kind["type"]) for kind in kinds if isinstance(kind, Mapping) and "type" in kind]
        rewards = record.config.get("rewards")
        for_what = f" for {', '.join(map(str, rewards))}" if isinstance(rewards, Mapping) and rewards else ""
        told.append(f"{' on '.join(names)}{for_what}, {record.steps} steps")
    return escape("; ".join(dict.fromkeys(told)))


def _each(records: Sequence[RunRecord], render: Any) -> str:
    """The same of every run, under its name if there are several."""
    if len(records) == 1:
        return str(render(records[0]))
    found = [(i, record.name, render(record)) for i, record in enumerate(records)]
    return "".join(f"<h3>{_key(i)}{escape(name)}</h3>{content}" for i, name, content in found if content)


def _key(run: int) -> str:
    return f'<span class="key run-{run % 6 + 1}"></span>'


def _numbers(records: Sequence[RunRecord]) -> str:
    """The first and last of what matters most; for several runs, a table."""
    if len(records) == 1:
        cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{v}</dd></div>" for k, v in _key_numbers(records[0]).items())
        return f'<dl class="numbers">{cells}</dl>'
    facts = [_key_numbers(record) for record in records]
    every = dict.fromkeys(name for fact in facts for name in fact)
    names = sorted(every, key=lambda name: (name != REWARD_LABEL, "held out" not in name))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{_key(i)}{escape(record.name)}</th>'
        + "".join(f"<td>{fact.get(name, '')}</td>" for name in names)
        + "</tr>"
        for i, (record, fact) in enumerate(zip(records, facts, strict=True))
    )
    return _scrolled(f'<thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{rows}</tbody>', "The runs")


def _key_numbers(record: RunRecord) -> dict[str, str]:
    fixed = "guard/reward" if record.curve("guard/reward") else "reward"
    wanted = {REWARD_LABEL: fixed}
    wanted |= {f"{name}, held out": f"guard/reward/{name}" for name in record.held_out}
    wanted |= {"diversity": "guard/diversity", "loss": "loss"} if record.curve("guard/reward") else {"loss": "loss"}
    if record.curve("reward"):
        del wanted["loss"]
    facts = {}
    for label, metric in wanted.items():
        if curve := record.curve(metric):
            facts[label] = f"<i>{format_number(curve[0][1])} &rarr;</i> {format_number(curve[-1][1])}"
    facts["steps"] = f"{record.steps:,}"
    if samples := record.total("samples"):
        facts["samples made"] = f"{samples:,.0f}"
    if seconds := record.total("seconds"):
        facts["time learning"] = str(timedelta(seconds=round(seconds)))
    return facts


def _findings(records: Sequence[RunRecord]) -> str:
    def one(record: RunRecord) -> str:
        return "".join(
            f'<div class="finding {each.kind}"><b>{FINDING_LABELS[each.kind]}</b><p>{escape(each.text)}</p></div>'
            for each in collect_findings(record)
        )

    return _each(records, one)


def _legend(records: Sequence[RunRecord]) -> str:
    if len(records) == 1:
        return ""
    items = "".join(f"<li>{_key(i)}{escape(record.name)}</li>" for i, record in enumerate(records))
    return f'<ul class="legend">{items}</ul>'


def _tasks(records: Sequence[RunRecord]) -> str:
    found = collect_evaluations(records)
    return f'<div class="cards tasks">{render_bars(found)}</div>' if found else ""


def _configuration(records: Sequence[RunRecord]) -> str:
    texts = [
        f"<details><summary>{escape(record.name)}</summary><pre tabindex='0'>{escape(record.text)}</pre></details>"
        for record in records
        if record.text
    ]
    return _differences(records) + "".join(texts)


def _differences(records: Sequence[RunRecord]) -> str:
    flats = [_flat(record.config) for record in records]
    names = [n for n in dict.fromkeys(k for flat in flats for k in flat) if len({str(f.get(n)) for f in flats}) > 1]
    names = [name for name in names if name not in ("name", "output")]
    if len(records) == 1 or not names:
        return ""
    head = "".join(f'<th scope="col">{_key(i)}{escape(record.name)}</th>' for i, record in enumerate(records))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(str(flat.get(name, 'absent')))}</td>" for flat in flats)
        + "</tr>"
        for name in names
    )
    told = "<p>What differs between the runs:</p>"
    table = f'<thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>{rows}</tbody>'
    return told + _scrolled(table, "Settings that differ", "settings")


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {f"{above}{key}": value}
    return found


def _environment(records: Sequence[RunRecord]) -> str:
    def one(record: RunRecord) -> str:
        rows = [
            f'<tr><th scope="row">{escape(str(k).replace("_", " "))}</th><td>{escape(str(v))}</td></tr>'
            for k, v in {"directory": record.directory, **record.environment}.items()
        ]
        return _scrolled(f"<tbody>{''.join(rows)}</tbody>", f"Environment of {record.name}")

    return _each(records, one)


def _scrolled(table: str, label: str, kind: str = "plain") -> str:
    name = escape(label, quote=True)
    inner = f'<table class="{kind}">{table}</table>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{inner}</div>'
