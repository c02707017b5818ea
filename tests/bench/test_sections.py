"""Sections of benchmark scripts: results are kept when a section or the script is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import os, time
from sections import log, result_writer, run_sections, section_deadline, section_parser

options = section_parser("quick,slow,late", 60).parse_args()
if not options.section:
    run_sections(__file__, {"quick": 60, "slow": float(os.environ.get("SLOW", 60)), "late": 300}, options)
else:
    record = result_writer(options.out)
    left = section_deadline(options) - time.monotonic()
    record({"section": options.section, "left": left, "process": os.getpid()})
    log(options.section, "known")
    if options.section == "slow":
        time.sleep(600)
"""


def start_script(folder: Path, *options: str, **settings: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "bench")} | settings
    command = [sys.executable, "script.py", "--out", "results.json", *options]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def read_results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.json"
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return results


def test_stopped_section_keeps_results_and_late_section_is_skipped(tmp_path: Path) -> None:
    output = start_script(tmp_path, "--seconds", "90", SLOW="3").communicate(timeout=120)[0]
    lines = read_results(tmp_path)
    assert [line["section"] for line in lines] == ["quick", "slow"]
    assert 0 < lines[1]["left"] <= 3 and 30 < lines[0]["left"] <= 60
    assert "stopped after 3 s" in output and "[late]" in output and "skipped" in output


def test_results_are_written_at_once_and_no_process_outlives_the_script(
    tmp_path: Path,
) -> None:
    script = start_script(tmp_path, "--seconds", "90")
    wait_until(lambda: [line["section"] for line in read_results(tmp_path)] == ["quick", "slow"])
    section_pid = read_results(tmp_path)[1]["process"]
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 143
    assert script.stdout is not None
    script.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(section_pid, 0)
