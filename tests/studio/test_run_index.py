"""The index of runs: which directories are runs, in which state, and how much is read of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_runs import write_fake_run
from starlette.exceptions import HTTPException

from tastemaker.studio import metric_history, run_index
from tastemaker.studio.app import Studio, StudioOptions
from tastemaker.studio.metric_history import MAX_POINTS, DownsampledCurve, MetricHistory
from tastemaker.studio.run_index import RunIndex
from tastemaker.training.run_status import RunStatus, write_status


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("fake") / "run", -0.3)


def write_metrics(directory: Path, steps: int, age: float = 0.0, plan: int = 0) -> Path:
    """Write the metrics of a run that has done some steps, `age` seconds ago, of `plan`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"step": step, "reward/mean": step / 100}) + "\n" for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(rows))
    if plan:
        (directory / "config.yaml").write_text(f"objective:\n  type: grpo\nsteps: {plan}\n")
    moment = time.time() - age
    os.utime(directory / "metrics.jsonl", (moment, moment))
    return directory


def read_states(root: Path) -> dict[str, str]:
    return {run.id: run.state for run in RunIndex(root).summaries()}


def test_states_follow_steps_status_and_age(tmp_path: Path) -> None:
    write_metrics(tmp_path / "done", 10, 9999, plan=10)
    write_metrics(tmp_path / "fresh", 4, plan=10)
    write_metrics(tmp_path / "quiet", 4, 9999, plan=10)
    write_status(write_metrics(tmp_path / "broken", 4, plan=10), RunStatus("failed", 4, 10, "RewardError: no <answer>"))
    write_status(write_metrics(tmp_path / "asked", 4, plan=10), RunStatus("stopped", 4, 10, "asked to stop"))
    states = read_states(tmp_path)
    assert states == {"done": "finished", "fresh": "running", "quiet": "stale", "broken": "failed", "asked": "stopped"}
    assert RunIndex(tmp_path).find("broken").reason == "RewardError: no <answer>"


def test_summary_has_progress_sparkline_sample_and_warning(fake_run: Path) -> None:
    (run,) = RunIndex(fake_run.parent).summaries()
    assert (run.id, run.step, run.kind, run.num_grids) == ("run", 60, "grpo", 4)
    assert run.sample is not None and run.sample.step == 60
    assert "reward hacking" in run.warning and run.warning_step == 60
    assert run.sparkline[-1][1] > 0.7 > run.sparkline[0][1]


def test_runs_are_found_in_folders_but_not_through_links_or_in_hidden_ones(tmp_path: Path, fake_run: Path) -> None:
    root = tmp_path / "runs"
    for name in ("a", "sweeps/lr/b", ".studio/c", "a/samples/d"):
        shutil.copytree(fake_run, root / name, dirs_exist_ok=True)
    (root / "outside").symlink_to(fake_run)
    index = RunIndex(root)
    assert set(index.directories()) == {"a", "sweeps/lr/b"}
    for id in ("outside", "../fake/run", ".studio/c", "/etc", "a/../a", ""):
        with pytest.raises(HTTPException) as caught:
            index.find(id)
        assert caught.value.status_code == 404 and "TM1350" in caught.value.detail


def test_one_run_can_be_served_alone(tmp_path: Path) -> None:
    write_metrics(tmp_path / "one", 3)
    write_metrics(tmp_path / "two", 3)
    studio = Studio(StudioOptions(tmp_path / "one"))
    assert set(studio.index.directories()) == {"one"}
    assert studio.resolve("one/metrics.jsonl").is_file()
    with pytest.raises(HTTPException, match="TM1380"):
        studio.resolve("two/metrics.jsonl")


@pytest.mark.skipif(find_spec("tastemaker.training.run_lock") is None, reason="this version has no run lock")
def test_state_follows_the_owner_of_the_run_lock(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 4, age=9999, plan=10)
    lock = "from tastemaker.training.run_lock import RunLock; lock = RunLock(Path(sys.argv[1])); lock.acquire()"
    program = f"import sys; from pathlib import Path; {lock}; print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        assert read_states(tmp_path) == {"run": "running"}
        process.kill()
    run = RunIndex(tmp_path).find("run")
    assert run.state == "stale" and str(process.pid) in run.reason


def test_summary_of_a_long_run_reads_a_bounded_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_metrics(tmp_path / "long", 20_000, plan=40_000) / "metrics.jsonl"
    read, opened = [], Path.open

    class CountingFile:
        def __init__(self, file: object) -> None:
            self.file = file

        def __enter__(self) -> CountingFile:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def read(self, size: int) -> bytes:
            read.append(size)
            return self.file.read(size)  # type: ignore[attr-defined, no-any-return]

    def open_counted(self: Path, *args: str, **kwargs: str) -> object:
        file = opened(self, *args, **kwargs)  # type: ignore[arg-type]
        return CountingFile(file) if self == path else file

    monkeypatch.setattr(Path, "open", open_counted)
    run = RunIndex(tmp_path).find("long")
    assert run.step == 20_000 and 0 < sum(read) <= run_index.TAIL_BYTES + 41 * run_index.ROW_BYTES < path.stat().st_size
    assert [step for step, _ in run.sparkline] == sorted(step for step, _ in run.sparkline)
    assert run.sparkline[0][0] == 1 and run.sparkline[-1][0] == 20_000
    assert all(value == step / 100 for step, value in run.sparkline)


def test_history_reads_only_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_metrics(tmp_path / "run", 300)
    parsed = []
    monkeypatch.setattr(metric_history, "parse_row", lambda line: parsed.append(line) or json.loads(line))
    history = MetricHistory(directory / "metrics.jsonl")
    assert history.update() and len(parsed) == 300 and not history.update()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 301, "reward/mean": 5}\n{"step": 302, "rew')
        file.flush()
        assert history.update() and len(parsed) == 301 and history.step == 301
        file.write('ard/mean": 6}\n')
        file.flush()
        assert history.update() and history.step == 302
    assert history.curves["reward/mean"].points()[-1] == (302, 6)


def test_history_starts_again_when_a_resumed_run_replaces_the_file(tmp_path: Path) -> None:
    directory = write_metrics(tmp_path / "run", 50)
    history = MetricHistory(directory / "metrics.jsonl")
    history.update()
    shorter = write_metrics(tmp_path / "other", 30)
    (shorter / "metrics.jsonl").replace(directory / "metrics.jsonl")
    generation = history.generation
    assert history.update() and history.generation > generation
    assert history.step == 30 and len(history.curves["reward/mean"].points()) == 30


def test_history_survives_damaged_rows(tmp_path: Path) -> None:
    rows = [
        b'{"step": 1, "reward/mean": 1}', b"\xff\xfe", b"[1, 2]", b'{"step": "x"}', b'{"step": true, "a": 1}',
        b"{" * 9000, b'{"step": 2, "reward/mean": NaN, "kl": null, "lr": "high", "warning": 7}',
        b'{"step": 3, "reward/mean": 3}',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    history = MetricHistory(tmp_path / "metrics.jsonl")
    assert history.update() and history.step == 3
    assert {name: curve.points() for name, curve in history.curves.items()} == {"reward/mean": [(1, 1), (3, 3)]}


def test_curves_stay_bounded_and_keep_their_mean(tmp_path: Path) -> None:
    curve = DownsampledCurve()
    for step in range(1, 10_001):
        curve.add(step, step % 7)
    points = curve.points()
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS + 1 and points[-1][0] == 10_000
    assert sum(value for _, value in points) / len(points) == pytest.approx(3, abs=0.05)
