"""Recorded cases of the objectives of 2026: inputs and results in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures" / "objectives-2026"


@dataclass(frozen=True)
class GoldenCase:
    name: str
    config: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def load_cases(file: str) -> dict[str, GoldenCase]:
    """The cases of a file by name. Numbers become float64 tensors, integers int64."""
    cases = json.loads((FOLDER / f"{file}.json").read_text())["cases"]
    return {
        case["name"]: GoldenCase(case["name"], case["config"], to_tensors(case["in"]), to_tensors(case["out"]))
        for case in cases
    }


def to_tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {key: torch.tensor(value) for key, value in values.items()}
    exact = {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}
    return {key: exact[key] if x.is_floating_point() else x for key, x in tensors.items()}


def assert_golden(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-10 of the largest number."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
