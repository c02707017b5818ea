"""Signals: the first one asks to stop, and the second Ctrl-C ends the process in any state."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from waiting import handles_signal, wait_until

from tastemaker.core import interruption
from tastemaker.core.interruption import Interrupted, abandonable_call, current_stop, handle_signals


@pytest.mark.parametrize("number", interruption.SIGNALS)
def test_first_signal_sets_the_request_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with handle_signals(raising=False) as stop:
        signal.raise_signal(number)
        assert stop.is_set() and current_stop() is stop
    assert signal.getsignal(number) is before and not current_stop().is_set()
    with pytest.raises(Interrupted), handle_signals(raising=True):
        signal.raise_signal(number)


def test_hangup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals(raising=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_request_ends_waits_of_all_threads() -> None:
    ended: list[type] = []

    def wait() -> None:
        try:
            stop.wait(60)
        except Interrupted as error:
            ended.append(type(error))

    with handle_signals(raising=False) as stop:
        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        signal.raise_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(50)
        with pytest.raises(Interrupted):
            stop.wait(60)
    assert ended == [Interrupted] * 3


def test_call_of_the_main_thread_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "GRACE", 0.2)
    with handle_signals(raising=False):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)  # this is not such a call, and goes on
        with pytest.raises(Interrupted), abandonable_call():
            time.sleep(60)


HANGS = """
    import ctypes, sys, threading
    from tastemaker.core.interruption import handle_signals

    with handle_signals(raising=False):
        print("ready", flush=True)
        {hang}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel resets the handler on Linux only")
def test_second_ctrl_c_ends_a_process_that_holds_the_interpreter_lock() -> None:
    """`PyDLL` keeps the lock during a call, so that no code in Python can run."""
    code = textwrap.dedent(HANGS).format(hang="[ctypes.PyDLL(None).sleep(600) for _ in range(9)]")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not handles_signal(process.pid, signal.SIGINT))  # signals sent at once count as one
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        finally:
            process.kill()
