"""What an examination found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, the number, and pass or what to do."""

    checked: str
    number: str
    verdict: Literal["pass", "fail", "skip"]
    advice: str = ""


def passed(checked: str, number: str) -> Finding:
    return Finding(checked, number, "pass")


def failed(checked: str, number: str, advice: str) -> Finding:
    return Finding(checked, number, "fail", advice)


def skipped(checked: str, why: str) -> Finding:
    return Finding(checked, "-", "skip", why)
