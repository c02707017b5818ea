"""One run as its page shows it: configuration, environment, samples in a table, and scores of evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.exceptions import HTTPException

from ..core.errors import ConfigError
from ..core.safe_files import parse_json
from ..report.charts import OVERALL, ScoreInterval, parse_scores
from ..report.metric_names import name_benchmark, name_score, name_task
from ..report.run_record import EVALUATION_FOLDERS, read_evaluations
from .access import resolve_inside
from .run_index import RunSummary
from .sample_files import GridFile

if TYPE_CHECKING:
    from .app import Studio

MAX_TEXT_BYTES = 2**20
MAX_ROWS = 200  # of the sample browser; older steps are left out
PIXELATED_SIDE = 128  # smaller samples are enlarged without smoothing


@dataclass(frozen=True)
class SampleCell:
    """One sample in the browser of samples."""

    run: str
    file: GridFile
    index: int

    @property
    def prompt(self) -> str:
        prompts = self.file.grid.prompts
        return prompts[self.index] if self.index < len(prompts) else ""

    @property
    def thumbnail(self) -> str:
        return f"/samples/{quote(self.run)}?step={self.file.grid.step}&index={self.index}&v={self.file.version}"

    @property
    def full(self) -> str:
        return f"{self.thumbnail}&part=full"

    @property
    def source(self) -> str:
        """Address of the images that the prompt is about; empty if there are none."""
        return f"{self.thumbnail}&part=source" if self.file.grid.source_boxes else ""

    @property
    def video(self) -> str:
        """Address of the video of the whole grid; empty if the sample is an image that browsers animate themselves."""
        if not self.file.is_video_file:
            return ""
        return f"/grids/{quote(self.run)}?step={self.file.grid.step}&v={self.file.version}"

    @property
    def box(self) -> str:
        return ",".join(map(str, self.file.grid.boxes[self.index]))

    @property
    def is_small(self) -> bool:
        return max(self.file.grid.sample_size) < PIXELATED_SIDE


@dataclass(frozen=True)
class SampleRow:
    """The samples of one step."""

    step: int
    cells: tuple[SampleCell, ...]
    scores: Mapping[str, float]
    frames: int


@dataclass(frozen=True)
class ScoreTable:
    """Scores of one metric: tasks from top to bottom, evaluations from left to right."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ScoreInterval | None, ...]], ...]


class RunView:
    """Reads the files of a run for its pages. No file outside of the run's directory is read, also through links."""

    def __init__(self, studio: Studio, id: str) -> None:
        self.studio, self.id = studio, id
        self.directory = studio.index.find(id).directory

    @property
    def summary(self) -> RunSummary:
        return self.studio.index.find(self.id)

    @cached_property
    def config_text(self) -> str:
        return self._read_text("config.yaml")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.studio.parse_config(self.config_text)

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        return read_json_text(self._read_text("environment.json"))

    def newest_sample(self) -> int:
        """Return the version of the samples that were written last; 0 if there are none."""
        return max((file.version for file in self.studio.index.samples(self.id).grids.values()), default=0)

    def sample_rows(self, steps: Sequence[int] | None = None) -> list[SampleRow]:
        """Return the samples of all steps, or of some, the oldest first."""
        grids = self.studio.index.samples(self.id).grids
        chosen = sorted(grids if steps is None else (step for step in steps if step in grids))[-MAX_ROWS:]
        return [self.sample_row(grids[step]) for step in chosen]

    def sample_row(self, file: GridFile) -> SampleRow:
        cells = tuple(SampleCell(self.id, file, index) for index in range(len(file.grid.boxes)))
        return SampleRow(file.grid.step, cells, file.grid.scores, file.grid.frames)

    def evaluations(self) -> dict[str, Mapping[str, Any]]:
        """Return the reports of evaluations by name, the oldest first."""
        root = self.directory.resolve()
        paths = [path for folder in EVALUATION_FOLDERS for path in self.directory.glob(f"{folder}/*/report.json")]
        if not all(path.resolve().is_relative_to(root) for path in paths):
            return {}
        return dict(read_evaluations(self.directory))

    def _read_text(self, name: str) -> str:
        try:
            path = resolve_inside(self.directory, name)
            with path.open("rb") as file:
                return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
        except (HTTPException, OSError):
            return ""


def read_json_text(text: str) -> Mapping[str, Any]:
    try:
        data = parse_json(text, "file")
    except ConfigError:
        return {}
    return data if isinstance(data, dict) else {}


def make_score_tables(reports: Mapping[str, Mapping[str, Any]]) -> list[ScoreTable]:
    """Return a table for each benchmark and metric, with a column for each evaluation by its label."""
    benchmarks = dict.fromkeys(str(report.get("benchmark", "")) for report in reports.values())
    tables = []
    for benchmark in benchmarks:
        columns = {
            label: parse_scores(report)
            for label, report in reports.items()
            if str(report.get("benchmark", "")) == benchmark
        }
        metrics = dict.fromkeys(metric for scores in columns.values() for metric in scores)
        for metric in metrics:
            found = dict.fromkeys(task for scores in columns.values() for task in scores.get(metric, {}))
            tasks = sorted(found, key=lambda task: task != OVERALL)
            rows = [
                (name_task(task), tuple(scores.get(metric, {}).get(task) for scores in columns.values()))
                for task in tasks
            ]
            name = name_score(metric)
            title = f"{name_benchmark(benchmark)}: {name.title}" if benchmark else name.title
            note = "; ".join(text for text in (name.better, name.explanation) if text)
            tables.append(ScoreTable(title, note, tuple(columns), tuple(rows)))
    return tables
