"""OpenMP threads sleep while they wait on a busy machine, and spin on an idle one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tastemaker.cli import thread_policy

linux = pytest.mark.skipif(sys.platform != "linux", reason="the policy is chosen on Linux only")


@linux
def test_threads_sleep_only_if_others_need_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cores, idle, busy = os.cpu_count() or 1, dict[str, str](), dict[str, str]()
    thread_policy.choose_wait_policy(idle, running=0.0)
    thread_policy.choose_wait_policy(busy, running=float(cores))
    assert idle == {} and busy == {"OMP_WAIT_POLICY": "passive"}


@linux
@pytest.mark.parametrize("setting", thread_policy.SETTINGS)
def test_settings_of_the_user_are_kept(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    chosen = {setting: "1"}
    thread_policy.choose_wait_policy(chosen, running=64.0)
    assert chosen == {setting: "1"}


def test_running_threads_are_counted_without_our_own(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 4/412 999\n", encoding="ascii")
    assert thread_policy.count_running_threads(tmp_path / "loadavg") == 3.0
    assert thread_policy.count_running_threads(tmp_path / "missing") == 0.0
