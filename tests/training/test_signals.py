"""Signals to real commands: nothing that was computed is lost, and every command ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fork_server import ForkedProcess
from launch_ranks import environments, launch
from waiting import handles_signal, wait_until

from tastemaker.serving.protocol import decode_request
from tastemaker.training import checkpoint

COMMAND = """
import sys
from tastemaker.core import interruption
interruption.GRACE = 0.3
from tastemaker.cli import main
main(sys.argv[1:])
"""


def start(folder: Path, *arguments: str, ranks: int = 1) -> list[ForkedProcess]:
    """Start a command that gives up hung calls soon after a signal."""
    script = folder / "command.py"
    if not script.exists():  # a process that was started before may be reading it
        script.write_text(COMMAND)
    return [ForkedProcess([sys.executable, str(script), *arguments], env=each) for each in environments(ranks)]


@contextmanager
def serve_then_hang(answers: int) -> Iterator[tuple[str, threading.Event]]:
    """A reward server that hangs after some answers; the event says that it does."""
    hung, closing, left = threading.Event(), threading.Event(), [answers]

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content: dict) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"modality": "image"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            left[0] -= 1
            if left[0] < 0:
                hung.set()
                closing.wait(600)
                return
            pixels = decode_request(self.headers["Content-Type"], body, 2**30).pixels
            self.answer({"scores": pixels.mean((1, 2, 3, 4)).tolist()})

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", hung
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def train_arguments(directory: Path, url: str) -> list[str]:
    return [
        "train", "grpo-toy-flow", "sample.every=0", "guard.every=0",
        f"rewards={{judge: {{type: remote, url: '{url}', batch_size: 64}}}}",
        "batch.prompts=4", "checkpoint.every=1000", "steps=1000", f"output_dir={directory}", "name=run",
    ]  # fmt: skip


def latest_step(directory: Path) -> int:
    latest = checkpoint.latest_checkpoint(directory)
    return 0 if latest is None else int(latest.name.split("-")[1])


@pytest.mark.slow
def test_hung_reward_server_loses_no_step_after_sigterm_and_ends_at_the_second_ctrl_c(tmp_path):
    with serve_then_hang(3) as (url, hung), serve_then_hang(2) as (other_url, other_hung):
        (stopped,) = start(tmp_path, *train_arguments(tmp_path / "a", url))
        command = [sys.executable, "-m", "tastemaker", *train_arguments(tmp_path / "b", other_url)]
        killed = ForkedProcess(command, env=environments(1)[0])
        assert hung.wait(240) and other_hung.wait(240)
        stopped.send_signal(signal.SIGTERM)
        killed.send_signal(signal.SIGINT)
        wait_until(lambda: not handles_signal(killed.process.pid, signal.SIGINT))  # signals sent at once count as one
        killed.send_signal(signal.SIGINT)
        errors = [process.communicate(120)[1] for process in (stopped, killed)]
        assert stopped.returncode == 130 and killed.returncode == -signal.SIGINT, errors
    assert latest_step(tmp_path / "a" / "run") == 3


@pytest.mark.slow
def test_two_ranks_give_up_a_hung_reward_at_the_same_step(tmp_path):
    with serve_then_hang(5) as (url, hung):  # of the third step, only one rank gets its scores
        processes = start(tmp_path, *train_arguments(tmp_path, url), ranks=2)
        assert hung.wait(240)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        errors = [process.communicate(120)[1] for process in processes]
        assert [process.returncode for process in processes] == [130, 130], errors
    assert latest_step(tmp_path / "run") == 2


def test_hangup_and_quit_save_a_checkpoint(tmp_path):
    numbers = (signal.SIGHUP, signal.SIGQUIT)
    settings = ("steps=100000", "checkpoint.every=100000")
    processes = [launch("grpo-toy-flow", tmp_path / number.name, *settings)[0] for number in numbers]
    for process in processes:
        assert process.stdout.readline().strip() == "0"
    for process, number in zip(processes, numbers, strict=True):
        wait_until(lambda process=process, number=number: handles_signal(process.process.pid, number))
        process.send_signal(number)
    for process, number in zip(processes, numbers, strict=True):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and latest_step(tmp_path / number.name) == int(output) > 0, errors


@pytest.mark.slow
def test_closed_terminal_saves_a_checkpoint(tmp_path):
    """Output to a terminal that was closed raises errors, which must not end the run before it is saved."""
    arguments = ["train", "grpo-toy-flow", "sample.every=0", "checkpoint.every=100000", "steps=100000"]
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(environments(1)[0])
        os.execv(sys.executable, [sys.executable, "-m", "tastemaker", *arguments, f"output_dir={tmp_path}"])
    metrics, deadline = tmp_path / "grpo-toy-flow" / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 3) and time.monotonic() < deadline:
        os.read(terminal, 10_000)
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert latest_step(metrics.parent) > 0


@pytest.mark.slow
def test_other_commands_keep_what_is_done(tmp_path):
    """SIGTERM ends them as Ctrl-C does, with exit code 130, and the same command continues."""
    common = ["grpo-playground-flow", "--tiny"]
    commands = {
        "generate": [
            "generate",
            *common,
            "--prompt",
            "a red bicycle",
            "--count",
            "20000",
            "--out",
            str(tmp_path / "g"),
        ],
        "evaluate": ["evaluate", "playeval", "--model", *common, "--count", "50", "--out", str(tmp_path / "e")],
        "demo": ["demo", "--out", str(tmp_path / "d"), "--steps", "100000"],
        "sweep": ["sweep", "grpo-toy-flow", "seed=0,1", "steps=100000", "sample.every=0", "--out", str(tmp_path / "s")],
    }
    processes = {name: start(tmp_path, *command)[0] for name, command in commands.items()}
    files = {"generate": "g/**/*.png", "evaluate": "e/**/*", "demo": "d/**/*", "sweep": "s/*/metrics.jsonl"}

    def has_written(pattern: str) -> bool:
        return any(path.is_file() and path.stat().st_size for path in tmp_path.glob(pattern))

    for name, pattern in files.items():
        deadline = time.monotonic() + 240
        while not has_written(pattern) and time.monotonic() < deadline and processes[name].returncode is None:
            time.sleep(0.1)
    time.sleep(0.5)
    for process in processes.values():
        process.send_signal(signal.SIGTERM)
    errors = {name: process.communicate(120)[1][-500:] for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(commands, 130), errors
    assert all(any(tmp_path.glob(pattern)) for pattern in files.values())
    assert latest_step(tmp_path / "s" / "seed=0") > 0
