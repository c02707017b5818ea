"""The header of the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tastemaker.export.model_card import ModelCardData, render_model_card
from tastemaker.report.run_record import RunRecord


def card_header(frames: int, model: dict[str, Any]) -> Any:
    record = RunRecord("run", Path("runs/run"), (), (), {}, {"model": model}, "", {})
    card = ModelCardData(record, "a/b", None, "A method.", {}, "step-000001", "live", "Use it.", True, frames)
    return yaml.safe_load(render_model_card(card).split("---")[1])


@pytest.mark.parametrize(
    ("frames", "model", "task"),
    [
        (1, {"type": "flux"}, "text-to-image"),
        (81, {"type": "wan", "frames": 81}, "text-to-video"),
        (51, {"type": "opensora", "seconds": 2}, "text-to-video"),  # frames follow from the duration
        (25, {"type": "svd", "frames": 25, "image": None}, "image-to-video"),
    ],
)
def test_pipeline_tag_follows_the_modality(frames: int, model: dict[str, Any], task: str) -> None:
    assert card_header(frames, model)["pipeline_tag"] == task
