"""Generation on several ranks: all ranks read which samples exist before one of them writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tastemaker.config.load import load
from tastemaker.core.objective import SingleProcess
from tastemaker.core.types import PromptBatch
from tastemaker.search.best_of_n import SingleSample
from tastemaker.search.generation import METADATA_FILE, GenerationOptions, SampleDirectory, generate_samples


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ranks_wait_for_each_other_between_reading_and_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{METADATA_FILE}.0").write_text('{"file": "000')  # left by an interrupted rank
    before, history = read_files(tmp_path), []
    existing_prompts = SampleDirectory.existing_prompts

    def read(directory: SampleDirectory) -> dict[int, str]:
        history.append(("read", read_files(tmp_path)))
        return existing_prompts(directory)

    monkeypatch.setattr(SampleDirectory, "existing_prompts", read)
    monkeypatch.setattr(SingleProcess, "barrier", lambda self: history.append(("barrier", read_files(tmp_path))))
    options = GenerationOptions(PromptBatch(("a red",), ({},)), 2, 0, SingleSample(), "live", tmp_path)
    generate_samples(
        load("grpo-toy-flow", ["process.num_steps=2"]), None, options, tiny=False, console=Console(quiet=True)
    )
    assert history[:2] == [("read", before), ("barrier", before)]
    assert history[2:] == [("barrier", read_files(tmp_path))]
    assert len((tmp_path / METADATA_FILE).read_text().splitlines()) == 2
