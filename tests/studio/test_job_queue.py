"""The queue of jobs: one per device, detached, found again after kill -9, stopped, resumed and extended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

from tastemaker.core.errors import ConfigError
from tastemaker.studio import job_queue
from tastemaker.studio.job_queue import Job, JobQueue, submit_command

# Stands in for `python -m tastemaker`, which takes seconds to import torch.
COMMAND = """
import os, signal, sys, time
action, place = sys.argv[1:3]
print("code", os.environ.get("TASTEMAKER_USER_CODE"), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if action == "fail":
    print("step 1", "error: steps: expected an integer [TM1]", sep="\\n")
    sys.exit(2)
if action == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def save(*_):
    open(place, "w").write("saved")
    os._exit(130)
if action == "wait":
    signal.signal(signal.SIGTERM, save)
open(place + ".started", "w").write(str(os.getpid()))
if action in ("wait", "ignore"):
    while True:
        time.sleep(0.02)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    file = tmp_path / "command.py"
    file.write_text(COMMAND)
    command = (sys.executable, "-I", str(file))
    monkeypatch.setattr(job_queue, "COMMAND", command)
    return command


@pytest.fixture
def queue(tmp_path: Path, command: tuple[str, ...]) -> Iterator[JobQueue]:
    queue = JobQueue(tmp_path / "runs")
    yield queue
    end_jobs(queue)


def end_jobs(queue: JobQueue) -> None:
    for job in queue.jobs():
        if job.state in job_queue.ACTIVE and job.pid:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def wait_for(queue: JobQueue, id: str, *states: str, seconds: float = 120) -> Job:
    deadline = time.monotonic() + seconds
    while (job := queue.find(id)).state not in states:
        assert time.monotonic() < deadline, f"{job}\n{queue.log_file(id).read_text()}"
        queue.advance()
        time.sleep(0.02)
    return job


def test_one_job_runs_per_device_and_the_next_starts_when_it_ends(queue: JobQueue, tmp_path: Path) -> None:
    first = queue.submit("train", ["wait", str(tmp_path / "a")], tmp_path / "runs/a", "cpu")
    second = queue.submit("train", ["fail", str(tmp_path / "b")], tmp_path / "runs/b", "cpu")
    third = queue.submit("train", ["done", str(tmp_path / "c")], tmp_path / "runs/c", "cpu")
    sample = queue.submit("sample", ["done", str(tmp_path / "d")], tmp_path / "runs/d", "cpu")
    queue.move(third, -1)
    wait_for(queue, first, "running")
    assert wait_for(queue, sample, "done").beside  # samples do not wait for a run on the CPU
    wait_until((tmp_path / "a.started").exists)
    queue.advance()
    assert [queue.find(id).state for id in (first, second, third)] == ["running", "queued", "queued"]
    queue.stop(first)
    stopped = wait_for(queue, first, "stopped")
    assert stopped.exit_code == 130
    assert (tmp_path / "a").read_text() == "saved"
    failed = wait_for(queue, second, "failed")
    assert (failed.exit_code, failed.reason) == (2, "steps: expected an integer [TM1]")
    done = wait_for(queue, third, "done")
    assert stopped.ended <= done.started <= done.ended <= failed.started  # it was moved before the second
    queue.remove(third)
    with pytest.raises(ConfigError, match="TM1431"):
        queue.find(third)


def test_a_new_queue_finds_running_jobs_and_kills_one_that_does_not_stop(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = queue.submit("train", ["ignore", str(tmp_path / "a")], tmp_path / "runs/a", "cpu")
    wait_for(queue, id, "running")
    wait_until((tmp_path / "a.started").exists)
    again = JobQueue(queue.root)
    again.advance()
    assert again.find(id).state == "running"
    again.stop(id)
    assert wait_for(again, id, "stopping").stop_requested
    with pytest.raises(ConfigError, match="TM1437"):
        again.kill(id)  # it has just been asked
    with pytest.raises(ConfigError, match="TM1441"):
        again.remove(id)
    monkeypatch.setattr(job_queue, "KILL_SECONDS", 0.0)
    again.kill(id)
    job = wait_for(again, id, "stopped")
    assert "killed" in job.reason
    pid = int((tmp_path / "a.started").read_text())
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_kill_9_of_the_process_with_the_queue_loses_no_job(command: tuple[str, ...], tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import time
        from tastemaker.studio import job_queue
        job_queue.COMMAND = {command!r}
        queue = job_queue.JobQueue({str(tmp_path / "runs")!r})
        queue.submit("train", ["wait", {str(tmp_path / "a")!r}], {str(tmp_path / "runs/a")!r}, "cpu")
        queue.submit("train", ["done", {str(tmp_path / "b")!r}], {str(tmp_path / "runs/b")!r}, "cpu")
        queue.start_thread()
        time.sleep(600)
    """)
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until((tmp_path / "a.started").exists)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    queue = JobQueue(tmp_path / "runs")
    try:
        first, second = (job.id for job in queue.jobs())
        queue.advance()
        assert [job.state for job in queue.jobs()] == ["running", "queued"]
        queue.stop(first)
        assert wait_for(queue, first, "stopped").exit_code == 130
        assert wait_for(queue, second, "done").exit_code == 0
        assert (tmp_path / "a").read_text() == "saved"
    finally:
        end_jobs(queue)


def test_a_job_whose_start_was_interrupted_is_started_again(queue: JobQueue, tmp_path: Path) -> None:
    id = queue.submit("train", ["done", str(tmp_path / "a")], tmp_path / "runs/a", "cpu")
    record = queue.folder / f"{id}.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "state": "running", "started": time.time()}))
    queue.advance()
    assert queue.find(id).state == "running"  # its process may still come
    with pytest.raises(ConfigError, match="TM1443"):
        queue.stop(id)
    record.write_text(json.dumps({**values, "state": "running", "started": time.time() - job_queue.START_SECONDS}))
    assert wait_for(queue, id, "done").exit_code == 0


def test_mistakes_are_refused_and_damaged_records_skipped(queue: JobQueue, tmp_path: Path) -> None:
    for arguments, device, code in ((["done", "x"], "cuda:99", "TM1433"), ([], "cpu", "TM1432")):
        with pytest.raises(ConfigError, match=code):
            queue.submit("train", arguments, tmp_path / "runs/a", device)
    id = queue.submit("train", ["done", "x"], tmp_path / "runs/a", "cpu")
    with pytest.raises(ConfigError, match="TM1434"):
        queue.submit("train", ["done", "x"], tmp_path / "runs/a", "cpu")
    (queue.folder / "20260101-000000-abcdef.json").write_text('{"id": "half')
    assert [job.id for job in queue.jobs()] == [id]
    for name in ("../../etc/passwd", id + "x", ""):
        with pytest.raises(ConfigError, match="TM1431"):
            queue.find(name)
    with pytest.raises(ConfigError, match="TM1435"):
        queue.resume(tmp_path / "runs/missing")
    with pytest.raises(ConfigError, match="TM1438"):
        queue.stop_run(tmp_path / "runs/missing")
    assert queue.stop(id).state == "stopped"  # it never started


def test_jobs_see_their_device_only_and_no_user_code_unless_allowed(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    queue = JobQueue(tmp_path / "runs", allow_code=False)
    first = queue.submit("train", ["done", str(tmp_path / "a")], tmp_path / "runs/a")
    second = queue.submit("train", ["done", str(tmp_path / "b")], tmp_path / "runs/b")
    assert [queue.find(id).device for id in (first, second)] == ["cuda:0", "cuda:1"]
    wait_for(queue, first, "done")
    wait_for(queue, second, "done")
    assert "code refuse gpus 4\n" in queue.log_file(first).read_text()
    assert "code refuse gpus 7\n" in queue.log_file(second).read_text()


def test_a_submitted_command_writes_into_the_directory_of_the_queue(queue: JobQueue) -> None:
    job = queue.find(submit_command(queue, ["train", "grpo-toy-flow", "name=a"], "cpu"))
    assert job.directory == str(queue.root / "a")
    assert job.arguments[-1] == f"output_dir={queue.root}"


@pytest.mark.slow
def test_a_real_run_is_stopped_resumed_and_extended(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    run = tmp_path / "a"
    settings = [
        "steps=100000",
        "sample.every=0",
        "guard.every=0",
        "engine.device=cpu",
        f"output_dir={tmp_path}",
        "name=a",
    ]
    id = queue.submit("train", ["train", "grpo-toy-flow", *settings], run, "cpu")
    try:
        wait_for(queue, id, "running")
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.is_file() and b"\n" in metrics.read_bytes(), 300)
        with pytest.raises(ConfigError, match="TM1436"):
            queue.resume(run)
        queue.stop_run(run)
        assert wait_for(queue, id, "stopped", seconds=300).exit_code == 130
        (saved,) = (run / "checkpoints").iterdir()
        step = int(saved.name.removeprefix("step-"))
        (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("steps: 100000", f"steps: {step}"))
        wait_for(queue, queue.resume(run, "cpu", steps=step + 3), "done", seconds=300)
        assert (run / "checkpoints" / f"step-{step + 3:06d}").is_dir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "reward/mean" in row][-4:] == [step, step + 1, step + 2, step + 3]
    finally:
        end_jobs(queue)
