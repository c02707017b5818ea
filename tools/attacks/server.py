"""Attacks on the reward server over real sockets: bombs, slow, idle, malformed and too many clients."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import signal
import socket
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .lab import GIB, Lab, Lost, Process, attack, expect

NPZ = "application/x-npz"
SLEEPY = "import time\ndef sleepy(images, prompts, **metadata):\n    time.sleep(2)\n    return images.mean((1, 2, 3))\n"


@dataclass
class Server:
    """A reward server that is under attack."""

    process: Process
    port: int

    def send(self, body: bytes, kind: str = NPZ, seconds: float = 60.0, **headers: str) -> tuple[int, Any]:
        """Post a request; return status and answer. Without an HTTP answer the promise is broken."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("POST", "/score", body, {"Content-Type": kind, **headers})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Lost(f"no answer ({type(error).__name__}: {error})") from error
        finally:
            connection.close()

    def expect_scores(self, seconds: float = 60.0, *, patient: bool = False) -> None:
        """Expect the right scores of an honest request, which may be asked to try again for a while.

        A `patient` one also tries again after a connection that was refused.
        """
        end = time.monotonic() + seconds
        while (answer := self._ask(seconds, patient))[0] in (429, 503) and time.monotonic() < end:
            time.sleep(0.2)
        scores = np.asarray(answer[1].get("scores", []), np.float32)
        right = scores.shape == (2,) and np.allclose(scores, [0.25, 0.75])
        expect(answer[0] == 200 and right, f"an honest request got {answer[0]}: {answer[1]!s:.100}")

    def _ask(self, seconds: float, patient: bool) -> tuple[int, Any]:
        try:
            return self.send(HONEST, seconds=seconds)
        except Lost as loss:
            if not patient:
                raise
            return 503, {"error": str(loss)}

    def exchange(self, request: bytes, seconds: float = 20.0) -> int:
        """Send raw bytes and return the status of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            received = b""
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # an answer may come before all is sent
                    connection.sendall(request)
                while b"\r\n" not in received and (part := connection.recv(65536)):
                    received += part
            except OSError as error:
                raise Lost(f"no answer ({type(error).__name__})") from error
        match = re.match(rb"HTTP/1\.[01] (\d{3})", received)
        if match is None:
            raise Lost(f"no answer but {received[:60]!r}")
        return int(match[1])


def start_server(lab: Lab, reward: str = "brightness", *options: str, **settings: Any) -> Server:
    """Start `tastemaker serve-reward` on a free port and wait until it serves."""
    process = lab.start("serve-reward", reward, "--port", "0", *options, memory=5.0, **settings)
    url = re.compile(r"http://(?:127\.0\.0\.1|0\.0\.0\.0):(\d+)")
    return Server(process, int(process.wait_until(lambda: url.search(process.output), interval=0.05)[1]))


def encode_npz(pixels: np.ndarray, *, prompts: list[str] | None = None, compressed: bool = False) -> bytes:
    fields = json.dumps({"prompts": prompts or [""] * len(pixels)}).encode()
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, pixels=pixels, json=np.frombuffer(fields, np.uint8))
    return file.getvalue()


HONEST = encode_npz(np.stack([np.full((1, 3, 8, 8), value, np.float32) for value in (0.25, 0.75)]))


def compress_zeros(count: int, shape: str, dtype: str, samples: int = 1) -> bytes:
    """Return an npz whose pixels are zeros, without holding them in memory."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    fields = json.dumps({"prompts": [""] * samples}).encode()
    head = b"\x93NUMPY\x01\x00"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open("pixels.npy", "w", force_zip64=True) as member:
            member.write(head + struct.pack("<H", len(header)) + header)
            for _ in range(count // 2**20):
                member.write(bytes(2**20))
        array = io.BytesIO()
        np.save(array, np.frombuffer(fields, np.uint8))
        archive.writestr("json.npy", array.getvalue())
    return file.getvalue()


def make_png(width: int, height: int) -> bytes:
    """Return a black PNG with one bit per pixel, which is tiny at any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compressobj(9)
    line = bytes(1 + (width + 7) // 8)
    data = b"".join(rows.compress(line * 64) for _ in range(height // 64)) + rows.flush()
    head = struct.pack(">IIBBBBB", width, height // 64 * 64, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def run_together(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call a function in so many threads at the same moment; return what each returned or raised."""
    barrier, results = threading.Barrier(count), [None] * count

    def call(i: int) -> None:
        barrier.wait()
        try:
            results[i] = function(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@attack(
    "decompression-bombs",
    "eight at once cost less than 2.25 GiB, each gets an answer, the server serves on",
    quick=True,
)
def send_bombs(lab: Lab) -> None:
    png = base64.b64encode(make_png(16384, 16384)).decode()
    size = 256 * 2**20
    bombs = {
        "256 MiB of zeros as bytes": (compress_zeros(size, "(64, 1, 3, 1024, 1365)", "|u1"), NPZ),
        "1 GiB of zeros as floats": (compress_zeros(4 * size, "(64, 1, 3, 1024, 1365)", "<f4"), NPZ),
        "240 MiB of zeros as floats": (compress_zeros(240 * 2**20, "(20, 1, 3, 1024, 1024)", "<f4", 20), NPZ),
        "268-megapixel PNG": (json.dumps({"prompts": [""], "images": [png]}).encode(), "application/json"),
    }
    for name, (body, kind) in list(bombs.items())[: lab.count(4, 1)]:
        with lab.attempt(f"{name} in {len(body) / 1000:.0f} kB, eight times"):
            server = start_server(lab)
            server.expect_scores()
            before = server.process.status("VmRSS")
            answers = run_together(8, lambda i, server=server, body=body, kind=kind: server.send(body, kind, 120))
            # All requests together may hold 1 GiB, and scoring copies a batch of them.
            grown = (server.process.status("VmHWM") - before) / GIB
            lab.notes.append(f"{grown:.2f} GiB")
            expect(grown < 2.25, f"{grown:.1f} GiB of memory")
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            expect(not errors, f"{len(errors)} of 8 got no answer: {errors[:1]}")
            server.expect_scores()


@attack("slow-clients", "honest clients are served while 100 others send a byte per second, which are ended in time")
def send_slowly(lab: Lab) -> None:
    with lab.attempt("100 slow bodies"):
        server = start_server(lab)
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(100)]
        fields = f"Host: 127.0.0.1:{server.port}\r\nContent-Type: {NPZ}\r\nContent-Length: 100000\r\n"
        head = f"POST /score HTTP/1.1\r\n{fields}\r\n"
        for each in slow:
            with suppress(OSError):
                each.sendall(head.encode())
        try:
            for _ in range(5):
                for each in slow:
                    with suppress(OSError):
                        each.sendall(b"x")
                status = server.send(HONEST, seconds=20)[0]
                expect(status == 200, f"an honest request got {status}")
                time.sleep(1)
            expect(server.process.status("Threads") < 64, f"{server.process.status('Threads')} threads")
            expect(count_open(slow, 150) == 0, "slow requests were not ended within 150 s")
        finally:
            close_all(slow)


def count_open(connections: list[socket.socket], seconds: float) -> int:
    """Send a byte per second until the server has ended all connections; return how many it has not."""
    remaining, end = list(connections), time.monotonic() + seconds
    while remaining and time.monotonic() < end:
        remaining = [each for each in remaining if not _has_ended(each)]
        time.sleep(1)
    return len(remaining)


def _has_ended(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"x")
        connection.setblocking(False)
        return bool(connection.recv(4096)) or True  # an answer, such as 408, or the end
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


def close_all(connections: list[socket.socket]) -> None:
    for each in connections:
        each.close()


@attack("idle-connections", "less than 64 threads and 1,200 open files, and honest clients are served within 60 s")
def stay_idle(lab: Lab) -> None:
    with lab.attempt("2,000 idle connections"):
        server = start_server(lab)
        idle: list[socket.socket] = []
        try:
            for _ in range(2000):
                with suppress(OSError):
                    idle.append(socket.create_connection(("127.0.0.1", server.port), timeout=2))
            time.sleep(1)
            threads, files = server.process.status("Threads"), server.process.open_files()
            lab.notes.append(f"{threads} threads, {files} open files")
            expect(threads < 64, f"{threads} threads")
            expect(files < 1200, f"{files} open files")
            server.expect_scores(60, patient=True)
        finally:
            close_all(idle)


@attack("200-clients-at-once", "every one gets an HTTP answer: scores, or a request to try again")
def flood(lab: Lab) -> None:
    server = start_server(lab)
    answers = run_together(lab.count(200, 50), lambda i: server.send(HONEST, seconds=60))
    for i, answer in enumerate(answers):
        with_answer = isinstance(answer, tuple) and answer[0] in (200, 429, 503)
        lab.tries += 1
        if not with_answer:
            lab.losses.append(f"client {i}: {answer}")
    server.process.kill()


def malformed_requests(port: int) -> dict[str, bytes]:
    """Return raw requests that deserve a refusal, by name."""
    host = f"Host: 127.0.0.1:{port}\r\n".encode()
    post = b"POST /score HTTP/1.1\r\n" + host
    kind = f"Content-Type: {NPZ}\r\n".encode()
    return {
        "a foreign host": b"GET /version HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "a foreign origin": post + kind + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}",
        "a header without a colon": b"GET /version HTTP/1.1\r\n" + host + b"nonsense\r\n\r\n",
        "a header with a space in its name": b"GET /version HTTP/1.1\r\n" + host + b"a b: c\r\n\r\n",
        "a length of 10^18": post + kind + b"Content-Length: 1000000000000000000\r\n\r\nx",
        "a length of 30 digits": post + kind + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nx",
        "a negative length": post + kind + b"Content-Length: -5\r\n\r\nx",
        "two lengths": post + kind + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
        "a chunk that is no number": post + kind + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n0\r\n\r\n",
        "a header of a megabyte": b"GET /version HTTP/1.1\r\n" + host + b"X: " + b"a" * 2**20 + b"\r\n\r\n",
        "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    }


@attack("malformed-requests", "each gets an answer of 4xx, and the server serves on", quick=True)
def send_malformed(lab: Lab) -> None:
    server = start_server(lab)
    running = lab.processes.copy()
    for name, request in malformed_requests(server.port).items():
        lab.processes.clear()  # one server for all
        with lab.attempt(name):
            status = server.exchange(request)
            expect(400 <= status < 500, f"status {status}")
    lab.processes[:] = running
    with lab.attempt("an honest request after all that"):
        server.expect_scores()


def hostile_bodies(canary: Path) -> dict[str, tuple[bytes, str]]:
    """Return bodies that deserve a refusal, by name, with their content type."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(canary), "w"))

    pickled = io.BytesIO()
    np.savez(pickled, pixels=np.array([Trap()], dtype=object), json=np.zeros(2, np.uint8))
    deep = f'{{"prompts": {"[" * 50_000}{"]" * 50_000}}}'.encode()
    nested = io.BytesIO()
    np.savez(nested, pixels=np.zeros((1, 1, 3, 2, 2), np.float32), json=np.frombuffer(deep, np.uint8))
    bad_shape = compress_zeros(2**20, "(1000000, 1, 3, 1000, 1000)", "|u1")
    return {
        "a pickle in an npz": (pickled.getvalue(), NPZ),
        "a pickle": (b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.", NPZ),
        "half an npz": (HONEST[: len(HONEST) // 2], NPZ),
        "a shape of terabytes": (bad_shape, NPZ),
        "50,000 brackets": (nested.getvalue(), NPZ),
        "50,000 brackets as JSON": (deep, "application/json"),
        "no numbers": (encode_npz(np.full((1, 1, 3, 4, 4), np.nan, np.float32)), NPZ),
        "images that are no base64": (b'{"prompts": [""], "images": ["***"]}', "application/json"),
        "a surrogate as prompt": (b'{"prompts": ["\\ud800"], "images": ["AA=="]}', "application/json"),
        "another content type": (HONEST, "text/html"),
    }


@attack("hostile-bodies", "each gets an answer of 4xx, nothing is executed, and the server serves on")
def send_hostile_bodies(lab: Lab) -> None:
    canary = lab.folder / "executed"
    server = start_server(lab)
    running = lab.processes.copy()
    for name, (body, kind) in hostile_bodies(canary).items():
        lab.processes.clear()
        with lab.attempt(name):
            status, answer = server.send(body, kind)
            expect(400 <= status < 500, f"status {status}: {answer!s:.80}")
            expect(not canary.exists(), "code was executed")
    lab.processes[:] = running
    with lab.attempt("an honest request after all that"):
        server.expect_scores()


@attack("server-shutdown", "requests that are being scored are answered, then it ends within 30 s")
def shut_down(lab: Lab) -> None:
    (lab.folder / "sleepy.py").write_text(SLEEPY)
    for number in (signal.SIGTERM, signal.SIGINT):
        with lab.attempt(number.name):
            server = start_server(lab, '{type: "sleepy:sleepy"}')
            with ThreadPoolExecutor(1) as pool:
                request = pool.submit(server.send, HONEST)
                time.sleep(1)
                server.process.send(number)
                result = server.process.wait(30)
                status = request.result()[0]
            expect(status == 200, f"the request got {status}")
            expect(result.code in (0, 130), f"exit code {result.code}: {result.last_line}")


@attack("server-without-token", "other machines cannot be served without a token, nor with a wrong one")
def serve_everyone(lab: Lab) -> None:
    with lab.attempt("no token on all interfaces"):
        result = lab.run("serve-reward", "brightness", "--port", "0", "--host", "0.0.0.0", seconds=60)
        result.expect_message()
    with lab.attempt("a wrong token"):
        options = ("--host", "0.0.0.0", "--token-env", "REDTEAM_TOKEN")
        server = start_server(lab, "brightness", *options, env={"REDTEAM_TOKEN": "right"})
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xff"}):
            status = server.send(HONEST, **headers)[0]
            expect(status == 401, f"status {status} with {headers}")
        status = server.send(HONEST, Authorization="Bearer right")[0]
        expect(status == 200, f"status {status} with the right token")
