"""What an examination found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """One line: what was checked, the number, and pass or what to do."""

    checked: str
    number: str
    verdict: Literal["pass", "fail", "skip"]
    advice: str = ""


def pass_result(checked: str, number: str) -> CheckResult:
    return CheckResult(checked, number, "pass")


def fail_result(checked: str, number: str, advice: str) -> CheckResult:
    return CheckResult(checked, number, "fail", advice)


def skip_result(checked: str, why: str) -> CheckResult:
    return CheckResult(checked, "-", "skip", why)
