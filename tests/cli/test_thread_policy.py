"""OpenMP threads sleep while they wait on a busy machine, and spin on an idle one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tastemaker.cli import thread_policy

linux = pytest.mark.skipif(sys.platform != "linux", reason="the policy is chosen on Linux only")


@linux
def test_passive_wait_only_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cores, quiet_machine, busy_machine = os.cpu_count() or 1, dict[str, str](), dict[str, str]()
    thread_policy.choose_wait_policy(quiet_machine, running=0.0)
    thread_policy.choose_wait_policy(busy_machine, running=float(cores))
    assert quiet_machine == {} and busy_machine == {"OMP_WAIT_POLICY": "passive"}


@linux
@pytest.mark.parametrize("setting", thread_policy.SETTINGS)
def test_user_settings_have_precedence(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment = {setting: "1"}
    thread_policy.choose_wait_policy(environment, running=64.0)
    assert environment == {setting: "1"}


def test_running_thread_count_excludes_the_own_thread(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 4/412 999\n", encoding="ascii")
    assert thread_policy.count_running_threads(tmp_path / "loadavg") == 3.0
    assert thread_policy.count_running_threads(tmp_path / "missing") == 0.0
