"""A new run from a form: what it would change, its problems, its command, and its start."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError
from .config_forms import (
    ConfigForm,
    build_form,
    check_overrides,
    find_paths,
    find_user_code,
    find_user_code_in_overrides,
    read_source,
    refuse_user_code,
    sort_messages,
)

if TYPE_CHECKING:
    from .app import Studio

RUN_PREFIX = "run:"  # of a source that is the configuration of a run
FIELD_PREFIX = "set."  # of the names of inputs
CHECK_SECONDS, PLAN_SECONDS = 90.0, 60.0
NAME = re.compile(r"[A-Za-z0-9_][\w .+=@-]{0,99}")


@dataclass(frozen=True)
class NewRun:
    """What a form describes, and what is wrong with it."""

    source: str  # recipe, or path of a YAML file
    name: str
    overrides: list[str]  # of the settings
    arguments: list[str]  # of the command
    problems: dict[str, str] = field(default_factory=dict)  # by field
    others: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    summary: str = ""
    is_checked: bool = True

    @property
    def has_problems(self) -> bool:
        return bool(self.problems or self.others)

    def to_json(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "others": self.others,
            "warnings": self.warnings,
            "summary": self.summary,
            "overrides": self.overrides,
            "paths": find_paths(self.overrides),
            "command": shlex.join(["tastemaker", *self.arguments]),
            "is_checked": self.is_checked,
        }


def find_source(studio: Studio, text: str) -> str:
    """Return what `tastemaker train` takes: the name of a recipe, or the configuration file of a run."""
    if not text.startswith(RUN_PREFIX):
        if text.endswith((".yaml", ".yml")):
            raise ConfigError(f"recipe: '{text:.60}' is not the name of a recipe; choose one from the list [TM1453]")
        return text
    return str(studio.index.find(text.removeprefix(RUN_PREFIX)).directory / "config.yaml")


def suggest_name(studio: Studio, source: str) -> str:
    """Return a name that no run has yet."""
    base = Path(source).parent.name if source.endswith(".yaml") else source
    base = re.sub(r"-\d{1,3}$", "", base) if source.endswith(".yaml") else base
    taken = {Path(job.directory) for job in studio.jobs.jobs()}
    numbers = (f"{base}-{number}" if number > 1 else base for number in range(1, 10_000))
    return next(name for name in numbers if not (studio.root / name).exists() and studio.root / name not in taken)


def check_name(studio: Studio, name: str) -> list[str]:
    """Return what is wrong with the name of a new run."""
    if not NAME.fullmatch(name) or name.endswith((" ", ".")):
        return [f"name: '{name:.60}' cannot be the name of a run; use letters, digits, - and _ [TM1454]"]
    if (studio.root / name).exists():
        return [f"name: there is already a run '{name:.60}'; choose another name, or resume that run [TM1455]"]
    return []


def read_new_run(studio: Studio, values: Mapping[str, str], form: ConfigForm | None = None) -> NewRun:
    """Read a form, and check it with the code of `tastemaker check`. Code of the user's is refused unless allowed."""
    source, name = find_source(studio, values.get("recipe", "")), values.get("name", "").strip()
    form = form or build_form(source)
    texts = {key.removeprefix(FIELD_PREFIX): text for key, text in values.items() if key.startswith(FIELD_PREFIX)}
    extra = [line.strip() for line in values.get("extra", "").splitlines() if line.strip()]
    overrides = [*form.read_overrides(texts), *extra]
    arguments = ["train", source, f"output_dir={describe_root(studio.root)}", f"name={name}", *overrides]
    run = NewRun(source, name, overrides, arguments)
    messages = [*check_name(studio, name), *check_overrides(overrides)]
    answer: dict[str, Any] = {}
    is_checked = True
    try:
        if not studio.options.allow_code:
            refuse_user_code([*find_user_code(read_source(source)), *find_user_code_in_overrides(overrides)])
        if not messages:
            answer = studio.config_worker.ask(
                {"task": "check", "source": source, "overrides": overrides}, CHECK_SECONDS
            )
        messages += answer.get("problems", [])
    except ConfigError as error:
        messages += str(error).splitlines()
    except TimeoutError:
        is_checked = False
    problems, others = sort_messages(messages, ["name", "extra", *(f.key for f in form.fields())])
    return NewRun(
        run.source,
        run.name,
        run.overrides,
        run.arguments,
        problems,
        others,
        answer.get("warnings", []),
        answer.get("summary", ""),
        is_checked,
    )


def estimate_needs(studio: Studio, values: Mapping[str, str]) -> dict[str, str]:
    """Estimate memory and time of a form's run; the reason if they cannot be estimated."""
    try:
        source = find_source(studio, values.get("recipe", ""))
        texts = {key.removeprefix(FIELD_PREFIX): text for key, text in values.items() if key.startswith(FIELD_PREFIX)}
        extra = [line.strip() for line in values.get("extra", "").splitlines() if line.strip()]
        overrides = [*build_form(source).read_overrides(texts), *extra]
        if not studio.options.allow_code:
            refuse_user_code([*find_user_code(read_source(source)), *find_user_code_in_overrides(overrides)])
        request = {"task": "plan", "source": source, "overrides": overrides, "device": values.get("device", "")}
        answer = studio.plan_worker.ask(request, PLAN_SECONDS)
    except ConfigError as error:
        return {"reason": str(error).splitlines()[0]}
    except TimeoutError:
        return {"reason": f"the estimate took longer than {PLAN_SECONDS:.0f} s; see `tastemaker plan`"}
    return {key: str(answer[key]) for key in ("memory", "time", "note", "reason") if key in answer}


def describe_root(root: Path) -> str:
    """Return the directory of runs as the user would write it: relative if it is in the working directory."""
    here = Path(os.getcwd()).resolve()
    return str(root.relative_to(here)) if root.is_relative_to(here) else str(root)
