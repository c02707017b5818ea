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
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launch_ranks import environments

BOOT_ID = "/proc/sys/kernel/random/boot_id"
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
    """A network namespace with an address and a boot id of its own."""

    def __init__(self, index: int, host: int) -> None:
        self.index, self.address, self.host = index, f"10.77.0.{index + 1}", host
        self.name, self.interface = f"tm{os.getpid()}-{index}", f"tm{os.getpid() % 10**6}x{index}"
        self.processes: list[subprocess.Popen[str]] = []
        self.boot_id = Path(tempfile.mkdtemp()) / "boot_id"
        self.boot_id.write_text(f"boot of machine {index}\n")

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
        """Start torchrun with two ranks; one of the machines is the endpoint of the rendezvous."""
        rendezvous = {
            "is_host": self.index == self.host,
            "last_call_timeout": 5,
            "join_timeout": 400,
            "read_timeout": 20,
            "keep_alive_interval": 2,
            "keep_alive_max_attempt": 5,
        }
        command = [
            *self.enter(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.{self.host + 1}:{PORT}", "--rdzv-id=test"),
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in rendezvous.items())}",
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

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs a command on this machine, with its network and its boot id."""
        script = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, str(self.boot_id), *command]

    def workers(self) -> dict[int, int]:
        """Return the processes of this machine's ranks by their rank."""
        ranks = {}
        for pid in self.pids():
            with suppress(OSError):
                text = Path(f"/proc/{pid}/environ").read_bytes().decode()
                variables = dict(each.partition("=")[::2] for each in text.split("\0"))
                if "RANK" in variables:
                    ranks.setdefault(int(variables["RANK"]), pid)  # a rank is older than what it started
        return ranks

    def pids(self) -> list[int]:
        """Return all processes of this machine, the oldest first."""
        return sorted(map(int, run("ip", "netns", "pids", self.name).split()))

    def stop(self) -> None:
        """Pause everything on this machine; what waits for it waits."""
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End everything on this machine at once, as a power failure does."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def tear_down(self) -> None:
        self.kill()
        for process in self.processes:
            process.communicate()
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        shutil.rmtree(self.boot_id.parent)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def why_unavailable() -> str:
    """Return why no machines can be made here, or ''."""
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "needs iproute2 and /dev/net/tun"
    try:
        os.close(open_interface(f"tmtest{os.getpid() % 10**6}"))
        run("ip", "netns", "add", f"tmtest{os.getpid()}")
        try:
            run("ip", "netns", "exec", f"tmtest{os.getpid()}", "mount", "--bind", BOOT_ID, BOOT_ID)
        finally:
            run("ip", "netns", "del", f"tmtest{os.getpid()}")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextmanager
def two_machines(delay: float = 0.0, host: int = 0) -> Iterator[tuple[Machine, Machine, VirtualLink]]:
    """Yield two machines, whose first has the first ranks, and their link; `host` is the endpoint of the rendezvous."""
    machines = Machine(0, host), Machine(1, host)
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
