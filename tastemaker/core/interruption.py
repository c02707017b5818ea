"""Signals that ask a process to stop, and waits that end when they arrive.

The first SIGTERM, Ctrl-C (SIGINT), SIGHUP or SIGQUIT asks the process to stop: a training loop finishes its step, other
commands unwind. Calls that hang are abandoned after `GRACE` seconds. The second Ctrl-C ends the process in any state.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GRACE = 10.0  # seconds that a call under way may still take after a stop request
POLL_SECONDS = 0.1  # between two looks at the stop request
SIGNALS = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")]
KEYBOARD = [each for each in SIGNALS if each.name in ("SIGINT", "SIGQUIT")]  # the second one ends the process
INHERITED = [each for each in SIGNALS if each.name in ("SIGHUP", "SIGQUIT")]  # stay ignored if they were (nohup)
SA_RESETHAND = -0x80000000  # as a signed integer


class Interrupted(KeyboardInterrupt):
    """A call that was given up because the process was asked to stop."""

    def __init__(self, *, on_all_ranks: bool = False) -> None:
        super().__init__("asked to stop")
        self.on_all_ranks = on_all_ranks  # whether every rank raises it at the same place


class StopRequest:
    """Whether a block of code was asked to stop, readable from all threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.time = math.inf  # of the request, on the monotonic clock
        self.may_abandon = True  # False where other ranks would wait for this one
        self.ranks_can_agree = False  # whether several ranks may give up a call together, see `finish_scoring`
        self.call_start = math.inf  # of the call that the main thread makes and that may be given up

    def request(self) -> None:
        if not self._event.is_set():
            self.time = time.monotonic()
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def is_expired(self, start: float) -> bool:
        """Whether a call that began at `start` has had its time since the request."""
        return self.is_set() and self.may_abandon and time.monotonic() - max(self.time, start) >= GRACE

    def wait(self, seconds: float) -> None:
        """Sleep; raise Interrupted at once if there is a request."""
        deadline = time.monotonic() + seconds
        while not (self.is_set() and self.may_abandon):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, POLL_SECONDS))  # in the main thread, handlers run between two sleeps
        raise Interrupted


_current = StopRequest()


def current_stop() -> StopRequest:
    """The request that signals set now. A call keeps the one it began with, so that it outlives the block."""
    return _current


@contextmanager
def abandonable_call() -> Iterator[None]:
    """Mark a call of the main thread into code that may hang, such as a reward: a stop request ends it in the end."""
    stop = _current
    if threading.current_thread() is not threading.main_thread() or stop.call_start != math.inf:
        yield
        return
    stop.call_start = time.monotonic()
    try:
        yield
    finally:
        stop.call_start = math.inf


@contextmanager
def handle_signals(*, raising: bool) -> Iterator[StopRequest]:
    """Yield a request that signals set; with `raising` the first signal also raises Interrupted in the main thread.

    In other threads than the main one no signal can be handled, and the request is never set.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    outer, stop = _current, StopRequest()
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: object) -> None:
        first = not stop.is_set()
        stop.request()
        if first:
            threading.Thread(target=_wake_main_thread, args=(stop,), daemon=True).start()
        if number in KEYBOARD:
            signal.signal(number, signal.SIG_DFL)
        _replace_lost_terminals(terminals)
        if (raising and first) or stop.is_expired(stop.call_start):
            raise Interrupted

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    previous = {n: old for n, old in previous.items() if not (n in INHERITED and old is signal.SIG_IGN)}
    _current = stop
    try:
        for number in previous:
            signal.signal(number, handle)
            if number in KEYBOARD:
                _reset_on_delivery(number)
        yield stop
    finally:
        stop.call_start = math.inf
        _current = outer
        for number, old in previous.items():
            # A command that was interrupted is about to end: another Ctrl-C must not wait for its last lines.
            if not (stop.is_set() and number in KEYBOARD and _is_handled(old)):
                signal.signal(number, old)


def _is_handled(handler: object) -> bool:
    """Whether a signal handler is one of this module."""
    return getattr(handler, "__module__", "") == __name__


def _wake_main_thread(stop: StopRequest) -> None:
    """Interrupt the main thread when a call of it has had its time, by a signal whose handler then raises."""
    while stop is _current:
        time.sleep(POLL_SECONDS)
        if stop.is_expired(stop.call_start) and stop is _current:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            time.sleep(1)  # for the handler


def _replace_lost_terminals(descriptors: list[int]) -> None:
    """Write to nowhere instead of to a terminal that was closed, where every message would raise an error."""
    for descriptor in descriptors:
        if not os.isatty(descriptor):
            with suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, descriptor)
                os.close(null)


class _SignalAction(ctypes.Structure):
    """`struct sigaction` of Linux on 64-bit processors."""

    _fields_ = (
        ("sa_handler", ctypes.c_void_p),
        ("sa_mask", ctypes.c_ulong * 16),
        ("sa_flags", ctypes.c_int),
        ("sa_restorer", ctypes.c_void_p),
    )


def _reset_on_delivery(number: int) -> None:
    """Let the kernel restore the default action when a signal arrives, so that the second one ends the process.

    Handlers in Python run only between two instructions of the main thread. This also works while it is blocked in C,
    even if that holds the interpreter's lock. Elsewhere than on Linux the handler in Python does the same, if it runs.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    action = _SignalAction()
    library = ctypes.CDLL(None)
    if library.sigaction(int(number), None, ctypes.byref(action)) == 0:
        action.sa_flags |= SA_RESETHAND
        library.sigaction(int(number), ctypes.byref(action), None)


def exit_now(code: int, wait_seconds: float = 2.0) -> None:
    """End the process, also if threads that hang in a call would keep it alive."""
    deadline = time.monotonic() + wait_seconds
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
