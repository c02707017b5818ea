"""LoggerCollection, sample grids, TensorBoard, Weights & Biases and Trackio on a stream of events."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from io import BytesIO, StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from PIL import Image
from rich.console import Console

from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load
from tastemaker.config.schema import LoggerConfig
from tastemaker.core.registry import ConfigError
from tastemaker.data.image_io import read_image
from tastemaker.training.events import (
    CheckpointSaved,
    Event,
    GuardChecked,
    SamplesGenerated,
    StepCompleted,
    TrainingFinished,
    TrainingStarted,
)
from tastemaker.training.loggers.jsonl import JsonlLogger
from tastemaker.training.loggers.logger import Logger, LoggerCollection
from tastemaker.training.loggers.sample_grids import SampleGridLogger
from tastemaker.training.loggers.tensorboard import TensorBoardLogger
from tastemaker.training.loggers.trackio import TrackioLogger
from tastemaker.training.loggers.wandb import WandbLogger
from tastemaker.training.trainer import build_loggers


class FailingLogger:
    """A logger that fails at every event."""

    def __init__(self) -> None:
        self.num_events = 0

    def log(self, event: Event) -> None:
        self.num_events += 1
        raise OSError("[disk] full")

    def close(self) -> None:
        raise OSError("closing fails too")


def make_events(directory: Path, frames: int = 1, first: int = 0, last: int = 3) -> list[Event]:
    pixels = torch.rand(3, frames, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sampled = SamplesGenerated(last, ("a red cat", "a dog", "a very long prompt " * 9), pixels, {"color": 0.75})
    updates: list[Event] = [
        StepCompleted(step, {"loss": 1 / step, "reward/mean": 0.5}, 0.5, 4) for step in range(first + 1, last + 1)
    ]
    updates.append(GuardChecked(last, {"diversity": 0.5}, "suspicious"))
    saved, finished = CheckpointSaved(last, directory / "checkpoints"), TrainingFinished(last, "finished")
    return [TrainingStarted(first, last, directory, 7), *updates, sampled, saved, finished]


def log_events(loggers: list[Logger], events: list[Event]) -> str:
    out = StringIO()
    collection = LoggerCollection(loggers, Console(file=out, width=80))
    for event in events:
        collection.log(event)
    collection.close()
    return out.getvalue()


def test_failing_logger_is_reported_once_and_removed(tmp_path: Path) -> None:
    failing = FailingLogger()
    output = log_events([failing, JsonlLogger(), SampleGridLogger()], make_events(tmp_path))
    assert output.startswith("warning FailingLogger") and "(OSError: [disk] full)" in output and output.count("\n") == 1
    assert failing.num_events == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "samples" / "step-000003.png").exists()


def test_logger_that_fails_to_close_does_not_stop_the_others(tmp_path: Path) -> None:
    class FailsToClose:
        def log(self, event: Event) -> None:
            return None

        def close(self) -> None:
            raise OSError("stuck")

    assert log_events([FailsToClose(), JsonlLogger()], make_events(tmp_path)).count("stuck") == 1


def test_keyboard_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    class Interrupted:
        def log(self, event: Event) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            return None

    with pytest.raises(KeyboardInterrupt):
        log_events([Interrupted()], make_events(tmp_path))


def test_images_are_written_as_png_with_a_description(tmp_path: Path) -> None:
    log_events([SampleGridLogger()], make_events(tmp_path))
    description = json.loads((tmp_path / "samples" / "step-000003.json").read_text())
    assert description["prompts"][:2] == ["a red cat", "a dog"] and description["scores"] == {"color": 0.75}
    assert len(description["boxes"]) == 3 and description["size"] == [8, 8]
    assert read_image(tmp_path / "samples" / "step-000003.png").shape[0] == 1


def test_images_are_complete_when_a_run_ends_and_failures_are_reported(tmp_path: Path) -> None:
    events = make_events(tmp_path)
    logger = SampleGridLogger()
    for event in events:
        logger.log(event)
    assert isinstance(events[-1], TrainingFinished)  # before the report, which reads the images
    assert (tmp_path / "samples" / "step-000003.json").exists()
    logger.close()
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "samples").write_text("no folder")
    output = log_events([SampleGridLogger(), JsonlLogger()], make_events(tmp_path / "blocked"))
    assert output.startswith("warning SampleGridLogger failed") and output.count("warning") == 1
    assert len((tmp_path / "blocked" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("format", ["mp4", "gif", "png"])
def test_videos_are_written_as_video(tmp_path: Path, format: Literal["mp4", "gif", "png"]) -> None:
    log_events([SampleGridLogger(format)], make_events(tmp_path, frames=4))
    assert read_image(tmp_path / "samples" / f"step-000003.{format}").shape[0] == 4


@pytest.mark.parametrize("frames", [1, 6])
def test_tensorboard_logs_metrics_and_samples_and_replaces_repeated_steps(tmp_path: Path, frames: int) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_events([TensorBoardLogger()], make_events(tmp_path, frames))
    log_events([TensorBoardLogger()], make_events(tmp_path, frames, first=1, last=4))
    log = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in log.Scalars("loss")] == [1, 2, 3, 4]
    assert {"loss", "reward/mean", "samples_per_second", "samples/color", "guard/diversity"} <= set(
        log.Tags()["scalars"]
    )
    last = log.Images("samples")[-1]
    assert last.step == 4
    with Image.open(BytesIO(last.encoded_image_string)) as image:
        assert (getattr(image, "n_frames", 1), image.size) == (frames, (last.width, last.height))


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("wandb", lambda: WandbLogger("demo")),
        ("trackio", lambda: TrackioLogger("demo")),
        ("torch.utils.tensorboard", TensorBoardLogger),
    ],
)
def test_missing_logger_package_is_refused(
    module: str, make: type[TensorBoardLogger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"loggers: .*pip install"):
        make()


@pytest.mark.parametrize("frames", [1, 6])
def test_wandb_is_offline_by_default(tmp_path: Path, frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for _ in range(2):
        assert log_events([WandbLogger("demo", {"lr": 1e-5})], make_events(tmp_path, frames)) == ""
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert all((tmp_path / "wandb-id").read_text() in path.name for path in runs)


class FakeWandb(ModuleType):
    """Records what a run logs; a video is its caption and the number of frames in its file when it is logged."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[Mapping[str, Any]] = []

    def init(self, **settings: Any) -> FakeWandb:
        return self

    def Settings(self, **settings: Any) -> None:
        return None

    def define_metric(self, name: str, step_metric: str) -> None:
        return None

    def log(self, values: Mapping[str, Any]) -> None:
        self.logged.append({key: [read() for read in x] if isinstance(x, list) else x for key, x in values.items()})

    def finish(self) -> None:
        return None

    def Video(self, path: str, caption: str, format: str) -> Any:
        return lambda: (caption, format, len(read_image(Path(path))))


@pytest.mark.parametrize("format", ["mp4", "gif"])
def test_wandb_logs_clips_with_their_prompts(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("tastemaker.training.loggers.wandb.video_suffix", lambda: format.replace("gif", "png"))
    assert log_events([WandbLogger("demo")], make_events(tmp_path, frames=6)) == ""
    logged = next(values for values in wandb.logged if "samples" in values)
    assert logged["samples"][:2] == [("a red cat", format, 6), ("a dog", format, 6)] and len(logged["samples"]) == 3
    assert (logged["samples/color"], logged["step"]) == (0.75, 3)


class FakeTrackio(ModuleType):
    """Records the calls of Trackio's functions."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: list[dict[str, Any]] = []
        self.logged: list[tuple[int, Mapping[str, Any]]] = []
        self.num_finished = 0

    def init(self, **settings: Any) -> None:
        self.runs.append(settings)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.num_finished += 1

    def Image(self, value: Any) -> tuple[str, tuple[int, ...]]:
        return str(value.dtype), value.shape


@pytest.mark.parametrize("frames", [1, 6])
def test_trackio_logs_the_metrics_of_the_other_loggers(
    tmp_path: Path, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    events = make_events(tmp_path / "run", frames)
    assert log_events([TrackioLogger("demo", {"lr": 1e-5})], events) == ""
    assert trackio.runs == [{"project": "demo", "name": "run", "config": {"lr": 1e-5}, "resume": "allow"}]
    assert [step for step, _ in trackio.logged] == [1, 2, 3, 3, 3] and trackio.num_finished == 1
    assert {name for _, metrics in trackio.logged for name in metrics} == {
        *("loss", "reward/mean", "samples_per_second", "time/step"),
        *("samples", "samples/color", "guard/diversity", "guard/warning"),
    }
    (dtype, shape) = trackio.logged[-1][1]["samples"]
    assert dtype == "uint8" and len(shape) == 3 and shape[-1] == 3


def test_loggers_are_a_list_of_names_or_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("trackio", "wandb", "torch.utils.tensorboard")}
    modules["torch.utils.tensorboard"].__dict__["SummaryWriter"] = object
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    config = load("grpo-toy-flow", ["loggers=[tensorboard, {type: wandb, project: mine}, trackio]"])
    assert config.loggers == (LoggerConfig("tensorboard"), LoggerConfig("wandb", "mine"), LoggerConfig("trackio"))
    assert config_to_dict(config)["loggers"][1] == {"type": "wandb", "project": "mine"}
    loggers = vars(build_loggers(config, Console(quiet=True)))["_loggers"]
    chosen = [each for each in loggers if isinstance(each, TensorBoardLogger | WandbLogger | TrackioLogger)]
    assert [type(each) for each in chosen] == [TensorBoardLogger, WandbLogger, TrackioLogger]
    assert [vars(each)["_project"] for each in chosen[1:]] == ["mine", "tastemaker"]
