"""Render the model card of exported weights: base model, recipe, scores, license and credits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ..models.pretrained import HUB, WeightsSource
from ..report.run_record import RunRecord

HUB_LICENSES = ("apache-2.0", "mit")  # licences that need no page of their own
REPORTED_METRICS = ("reward", "guard/")  # how the names of metrics begin that tell how good it is


@dataclass(frozen=True)
class ModelCardData:
    """Everything a model card states."""

    record: RunRecord
    base: str  # a name on the hub, or a folder
    source: WeightsSource | None  # what is known of it
    method: str  # one sentence
    rewards: Mapping[str, tuple[WeightsSource, ...]]  # what the weights of each come from
    step: str
    weights: str
    use: str  # how, in Markdown
    adapters: bool
    frames: int = 1  # of what the model makes


def render_model_card(subject: ModelCardData) -> str:
    """Markdown, headed as the hub reads it."""
    name = subject.record.name
    return "\n".join(
        [
            "---",
            yaml.safe_dump(_head(subject), sort_keys=False).rstrip(),
            "---",
            f"# {name}",
            "",
            f"{'Adapters for' if subject.adapters else 'Trained from'} {_linked(subject.base)} by preference, with the "
            f"recipe below: the {subject.weights} weights of {subject.step.replace('-', ' ')}.",
            "",
            "## Use",
            subject.use,
            "",
            "## Scores",
            *_scores(subject.record),
            "",
            "## Method and credits",
            *_credits(subject),
            "",
            "## Recipe",
            "```yaml",
            subject.record.text.rstrip(),
            "```",
            "",
        ]
    )


def _head(subject: ModelCardData) -> dict[str, Any]:
    known = {"base_model": subject.base} if HUB.fullmatch(subject.base) else {}
    relation = {"base_model_relation": "adapter" if subject.adapters else "finetune"} if known else {}
    tags = ["tastemaker", *(["lora"] if subject.adapters else [])]
    return {
        **known,
        **relation,
        **_licence(subject),
        "pipeline_tag": _task(subject),
        "library_name": "diffusers",
        "tags": tags,
    }


def _task(subject: ModelCardData) -> str:
    """What the weights do, as the hub calls it; a model that is told of an `image` goes on from it."""
    if subject.frames == 1:
        return "text-to-image"
    return "image-to-video" if "image" in (subject.record.config.get("model") or {}) else "text-to-video"


def _licence(subject: ModelCardData) -> dict[str, str]:
    """By the names the hub has for licences, and otherwise by its own."""
    told = _terms(subject).lower()
    return (
        {"license": told}
        if told in HUB_LICENSES
        else {"license": "other", "license_name": re.sub(r"[^\w.]+", "-", told)}
    )


def _terms(subject: ModelCardData) -> str:
    return subject.source.licence.removeprefix("under ") if subject.source else "that of the base model"


def _linked(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})" if HUB.fullmatch(name) else "a model of one's own"


def _scores(record: RunRecord) -> list[str]:
    rows = [(name, record.curve(name)) for name in record.metrics() if name.startswith(REPORTED_METRICS)]
    table = [f"| {name} | {curve[0][1]:.4g} | {curve[-1][1]:.4g} |" for name, curve in rows if len(curve) > 1]
    told = [
        f"- {name}: " + ", ".join(f"{key} {value:.4g} ({low:.4g} to {high:.4g})" for key, value, low, high in found)
        for name, report in record.evaluations.items()
        if (found := _overall(report))
    ]
    if not table and not told:
        return ["None were measured while it was trained."]
    head = ["| of the run's own samples | at first | at last |", "|---|---|---|"] if table else []
    return [*head, *table, *([""] if table and told else []), *told]


def _overall(report: Mapping[str, Any]) -> Sequence[tuple[str, float, float, float]]:
    """Each score of an evaluation over all its tags, with the bounds of its interval."""
    found = {name: table.get("overall", {}) for name, table in report.get("scores", {}).items()}
    return [(name, x["mean"], x["low"], x["high"]) for name, x in found.items() if {"mean", "low", "high"} <= x.keys()]


def _credits(subject: ModelCardData) -> list[str]:
    rewards = [
        f"- reward `{name}`" + "".join(f", of {_linked(source.hub)} ({source.licence})" for source in sources)
        for name, sources in subject.rewards.items()
    ]
    base = f"- base weights: {_linked(subject.base)}; licence: {_terms(subject)}, which holds for these weights too"
    return [f"- method: {subject.method}", base, *rewards, "- trained with tastemaker"]
