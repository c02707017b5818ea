"""A process that checks configurations and estimates their memory and time, for the forms of the studio.

Loading a configuration imports torch, which takes 200 MB: the studio does without, and the process ends when it is not
used. A check that takes too long is given up with it. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..core.errors import ConfigError
from ..core.registry import USER_CODE_VARIABLE, subprocess_path

IDLE_SECONDS = 300.0  # after which the process is ended
GIB = 2**30
Answer = dict[str, Any]


class ConfigWorker:
    """The process, started when it is first asked and again after it was given up. Usable from several threads."""

    def __init__(self, *, allow_code: bool) -> None:
        self.allow_code = allow_code
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None

    def ask(self, request: Mapping[str, Any], timeout: float) -> Answer:
        """Return the answer to a request; raise TimeoutError if there is none in this time, also while others wait."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError
        try:
            process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = bytearray()
            while not answer.endswith(b"\n"):
                ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 2**16)
                if not chunk:
                    raise TimeoutError  # it was killed, for example by the system for its memory
                answer += chunk
            result: Answer = json.loads(answer)
            return result
        except (TimeoutError, OSError, ValueError) as error:
            self._end()
            raise TimeoutError from error
        finally:
            self._lock.release()

    def warm_up(self) -> None:
        """Start the process before it is needed, without waiting for it."""
        threading.Thread(target=self._ask_nothing, name="config worker", daemon=True).start()

    def _ask_nothing(self) -> None:
        with suppress(TimeoutError):
            self.ask({"task": "nothing"}, 120.0)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(IDLE_SECONDS, self.close)
        self._timer.daemon = True
        self._timer.start()
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "PYTHONPATH": subprocess_path()}
            if not self.allow_code:
                environment[USER_CODE_VARIABLE] = "refuse"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the studio; this process ends with its input
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if self._timer is not None:
            self._timer.cancel()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


# In the process


def serve() -> None:
    """Answer requests until the input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        answers.flush()


def answer(request: Mapping[str, Any]) -> Answer:
    """Answer one request: check a configuration, or estimate what it needs."""
    try:
        if request["task"] == "check":
            return check_config(request["source"], request["overrides"])
        if request["task"] == "plan":
            return plan_config(request["source"], request["overrides"], request["device"])
        import torch  # noqa: F401  # ready for the next request

        return {}
    except ConfigError as error:
        return {"problems": str(error).splitlines(), "reason": str(error).splitlines()[0]}
    except Exception as error:  # a configuration may break a network in any way
        reason = f"{type(error).__name__}: {error!s:.300}"
        return {"problems": [f"the configuration cannot be checked ({reason}); change it [TM1451]"], "reason": reason}


def check_config(source: str, overrides: list[str]) -> Answer:
    """Check a configuration as `tastemaker check` does, except for reading the data."""
    from ..config import check, config_warnings, required_files, step_counts
    from ..config.load import load_any_config

    config = load_any_config(source, overrides)
    problems = [*check.find_problems(config, 1), *required_files.find_missing_files(config)]
    if problems:
        return {"problems": problems}
    counts = step_counts.compute_step_counts(config, 1)
    summary = f"one step: {counts.samples or counts.prompts} samples, {counts.updates} update(s)"
    return {"problems": [], "warnings": config_warnings.collect_warnings(config), "summary": summary}


def plan_config(source: str, overrides: list[str], device: str) -> Answer:
    """Estimate memory and time of a run, as `tastemaker plan` does."""
    from dataclasses import replace

    from ..config.load import load_any_config
    from ..config.schema import JudgeRunConfig, PreferenceRunConfig
    from ..diagnostics.activation_budget import estimate_on_gpu
    from ..diagnostics.plan_cache import PlanCache
    from ..training.device_precision import resolve_for_planning

    config = load_any_config(source, overrides)
    if isinstance(config, JudgeRunConfig | PreferenceRunConfig):
        return {"reason": "the memory of judges and preference rewards is not estimated"}
    config = replace(config, engine=resolve_for_planning(config.engine)[0])
    try:
        gpu_gib = (find_gpu_speed()[3] or 80.0) if device.startswith("cuda") else math.inf
        estimate = estimate_on_gpu(config, gpu_gib * GIB, 1, PlanCache().estimate)
    except ConfigError as error:
        if "TM659" not in str(error):
            raise
        return {"reason": "small models are not estimated: they fit anywhere, and the first steps show the time"}
    memory = f"{estimate.total / GIB:.1f} GiB" if estimate.total > GIB / 10 else f"{estimate.total / 2**20:.0f} MiB"
    if not device.startswith("cuda"):
        return {"memory": memory, "time": "", "note": "the time of a step is estimated for GPUs only"}
    name, tflops, tbps, gib = find_gpu_speed()
    seconds = estimate.seconds(tflops * 1e12, tbps * 1e12)
    total = seconds * config.steps
    duration = f"{total / 3600:.1f} h" if total >= 360 else f"{total / 60:.1f} min"
    answer = {"memory": memory, "time": f"{seconds:.2g} s per step, {duration} in all", "note": f"on {name}"}
    if gib and estimate.total > gib * GIB:
        answer["note"] += f", which has {gib:.0f} GiB: it does not fit; see `tastemaker plan` for what saves memory"
    return answer


def find_gpu_speed() -> tuple[str, float, float, float]:
    """Return name, TFLOP/s, TB/s and memory in GiB of the GPU of this machine; an H200 if it is unknown."""
    from ..diagnostics.gpu_presets import match_device_name

    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        text = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        name, _, mebibytes = text.splitlines()[0].rpartition(",")
        gib = float(mebibytes) / 1024
        preset = match_device_name(name, gib)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        preset = None
    return (name.strip(), preset.tflops, preset.tbps, gib) if preset else ("an H200", 540.0, 4.3, 0.0)


if __name__ == "__main__":
    serve()
