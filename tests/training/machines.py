"""Two machines on one computer: network namespaces, each with torchrun, joined by a link that can be slow or cut."""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch_ranks import environments

SET_INTERFACE, TUN_WITHOUT_HEADERS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
PORT = 29500


class VirtualLink:
    """A cable between two TUN interfaces: packets arrive after `delay` seconds, or never if it is cut."""

    def __init__(self, names: Sequence[str], delay: float) -> None:
        self.files = [open_interface(name) for name in names]
        self.delay, self.cut, self.stopped = delay, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._forward, daemon=True)

    def start(self) -> None:
        """Forward packets; both interfaces must be up."""
        self.thread.start()

    def _forward(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # due, sequence number, receiver, packet
        sent = 0
        while not self.stopped.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for ready in select.select(self.files, [], [], min(pause, 0.1))[0]:
                packet = os.read(ready, 1 << 16)
                if not self.cut.is_set():
                    receiver = self.files[1 - self.files.index(ready)]
                    heapq.heappush(waiting, (time.monotonic() + self.delay, sent, receiver, packet))
                    sent += 1
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(waiting)
                if not self.cut.is_set():
                    os.write(receiver, packet)

    def close(self) -> None:
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join()
        for file in self.files:
            os.close(file)


def open_interface(name: str) -> int:
    """Create a TUN interface; it lasts until the file is closed."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, SET_INTERFACE, struct.pack("16sH", name.encode(), TUN_WITHOUT_HEADERS))
    return file


class Machine:
    """A network namespace with an address of its own."""

    def __init__(self, index: int) -> None:
        self.index, self.address = index, f"10.77.0.{index + 1}"
        self.name, self.interface = f"tm{os.getpid()}-{index}", f"tm{os.getpid() % 10**6}x{index}"
        self.processes: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "set", self.interface, "netns", self.name)
        for arguments in (
            ("addr", "add", f"{self.address}/24", "dev", self.interface),
            ("link", "set", self.interface, "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", self.name, *arguments)

    def torchrun(self, *arguments: str, nodes: str = "2", restarts: int = 0, **variables: str) -> subprocess.Popen[str]:
        """Start torchrun with two ranks; the first machine is the endpoint of the rendezvous."""
        command = [
            *("ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=test"),
            f"--rdzv-conf=is_host={self.index == 0},last_call_timeout=5,join_timeout=400",
            *(f"--local-addr={self.address}", "-m", "tastemaker", *arguments),
        ]
        environment = {**environments(1)[0], "GLOO_SOCKET_IFNAME": self.interface, **variables}
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """Return all processes of this machine, the oldest first."""
        return sorted(map(int, run("ip", "netns", "pids", self.name).split()))

    def kill(self) -> None:
        """End everything on this machine at once, as a power failure does."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def tear_down(self) -> None:
        self.kill()
        for process in self.processes:
            process.communicate()
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def why_unavailable() -> str:
    """Return why no machines can be made here, or ''."""
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "needs iproute2 and /dev/net/tun"
    try:
        os.close(open_interface(f"tmtest{os.getpid() % 10**6}"))
        run("ip", "netns", "add", f"tmtest{os.getpid()}")
        run("ip", "netns", "del", f"tmtest{os.getpid()}")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextmanager
def two_machines(delay: float = 0.0) -> Iterator[tuple[Machine, Machine, VirtualLink]]:
    machines = Machine(0), Machine(1)
    link = VirtualLink([machine.interface for machine in machines], delay)
    try:
        for machine in machines:
            machine.set_up()
        link.start()
        yield *machines, link
    finally:
        link.close()
        for machine in machines:
            machine.tear_down()
