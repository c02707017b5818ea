"""The process beside a job (POSIX only): starts its command, passes stop requests on, and writes how it ended.

It outlives the studio, so that the exit code of a job is known even if the studio was killed meanwhile. It imports the
standard library only, and is started by its path.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STOP_SIGNALS = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")]


def write_json(path: str, values: dict[str, float]) -> None:
    """Write a file that readers see complete or not at all."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)


def main(arguments: list[str]) -> int:
    """Start a process that runs a command, and return when its ids are written.

    The process is nobody's child, so it leaves no zombie, and leads a session of its own.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.read(reader, 1)  # ends when the other process closes its side
        return 0
    os.close(reader)
    os.setsid()
    return run_command(arguments, writer)


def run_command(arguments: list[str], ready: int) -> int:
    """Run a command. The arguments are PROCESS_FILE EXIT_FILE NICE COMMAND...

    The process file is locked as long as this process lives, and holds both process ids.
    """
    process_file, exit_file, niceness, *command = arguments
    stops: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        for child in children:
            child.send_signal(signal.SIGTERM)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    if int(niceness):
        os.nice(int(niceness))
    with open(process_file, "a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 1  # the job has a process already
            except OSError:
                pass  # a file system without locks; the process ids count
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        if stops:  # before there was a child to pass it to
            children[0].send_signal(signal.SIGTERM)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "child": children[0].pid}, file)
        file.flush()
        os.close(ready)
        code = children[0].wait()
        write_json(exit_file, {"exit_code": code, "time": time.time()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
