"""PlayEval-Edit: held-out edits whose sources reach the model, the scorer and the files of the evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tastemaker.core.output_paths import SOURCE_FILE
from tastemaker.core.safe_files import read_json
from tastemaker.core.types import PromptBatch
from tastemaker.data.image_io import read_image
from tastemaker.evaluation.benchmark_run import load_benchmark
from tastemaker.evaluation.evaluate import REPORT, evaluate
from tastemaker.evaluation.playeval_edit import load_playeval_edit_scorer, sample_benchmark_edits
from tastemaker.playground.scenes import Painter
from tastemaker.search.base import SearchCost


def test_targets_are_right_sources_are_wrong_and_prefixes_are_smaller_benchmarks(tmp_path: Path) -> None:
    benchmark = load_benchmark("playeval-edit", 12, 1)
    assert benchmark.prompts == load_benchmark("playeval-edit", 30, 1).prompts[:12]
    assert benchmark.fingerprint() != load_benchmark("playeval-edit", 12, 2).fingerprint()
    edits, rng = sample_benchmark_edits(torch.arange(12))
    targets = edits.paint(Painter(), rng)[1]

    def copy_source(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        return torch.stack([entry["image"] for entry in batch.metadata]), SearchCost(1)

    def paint_target(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
        return targets[indices], SearchCost(1)

    for name, sample, expected in (("right", paint_target, 1.0), ("copied", copy_source, 0.0)):
        list(evaluate(benchmark, sample, load_playeval_edit_scorer(), tmp_path / name, batch_size=5))
        report = read_json(tmp_path / name / REPORT)
        assert report["scores"]["strict"]["overall"]["mean"] == pytest.approx(expected, abs=0.1), name
        source = read_image(tmp_path / name / "samples/00007" / SOURCE_FILE)
        assert torch.allclose(source, benchmark.batch([7]).metadata[0]["image"], atol=1 / 255)
