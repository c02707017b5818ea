"""A reward served on a real port and asked over it: the same numbers, and a sentence where there are none."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tastemaker.commands.serving import about
from tastemaker.registry import ConfigError
from tastemaker.reward import Graded, RewardError, RewardSpec, Rubric, shared
from tastemaker.rewards.color import Brightness, Color
from tastemaker.rewards.jpeg import Jpeg
from tastemaker.rewards.motion import Stillness
from tastemaker.rewards.remote import Remote
from tastemaker.serving.desk import Desk
from tastemaker.serving.server import Service
from tastemaker.serving.wire import JSON, NPZ, Question, WireError, pack, unpack
from tastemaker.types import Facts, Placement, Prompts

CPU, MUCH = torch.device("cpu"), 2**24
PIXELS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey", "a yellow bird")


@dataclass(frozen=True)
class Own:
    """A reward made of a function."""

    function: Callable[[Tensor, Prompts, Sequence[Facts]], Tensor]
    batch_size: int = 8
    differentiable: bool = False
    reads: Literal["frames", "clip"] = "frames"
    runs_on: Literal["device"] = "device"

    def load(self, placement: Placement) -> Own:
        return self

    def tiny(self) -> Own:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        return self.function(pixels, prompts, facts)


def local(spec: Any, pixels: Tensor = PIXELS, facts: Sequence[Facts] = ()) -> Tensor:
    return Rubric({"it": Graded(spec, shared(spec, Placement()))}).score(pixels, PROMPTS[: len(pixels)], facts).total


@contextmanager
def served(spec: Any, port: int = 0, **terms: Any) -> Iterator[str]:
    desk = Desk(Rubric({"it": Graded(spec, shared(spec, Placement()))}), CPU)
    server = Service(desk, about("it", spec) if not isinstance(spec, Own) else {"reads": spec.reads}, **terms).server(
        "127.0.0.1", port
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        desk.close()


def ask(url: str, path: str, kind: str = "", body: bytes = b"", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    headers |= {"Content-Type": kind} if kind else {}
    connection.request("POST" if kind else "GET", path, body or None, headers)
    response = connection.getresponse()
    told = json.loads(response.read())
    connection.close()
    return response.status, told


@pytest.mark.parametrize(
    "spec", [Color(), Jpeg(), Brightness(0.3), Stillness()], ids=["color", "jpeg", "target", "clip"]
)
def test_a_remote_reward_gives_the_very_numbers_of_a_local_one(spec: RewardSpec) -> None:
    with served(spec) as url:
        remote = Remote(url, reads=spec.reads, batch_size=2)
        assert local(remote).equal(local(spec))


def test_png_bodies_give_the_numbers_of_pictures_in_files() -> None:
    with served(Color()) as url:
        rounded = (PIXELS * 255).round() / 255
        torch.testing.assert_close(local(Remote(url, form="png")), local(Color(), rounded))


def test_clips_travel_as_animated_png() -> None:
    with served(Stillness()) as url:
        rounded = (PIXELS * 255).round() / 255
        torch.testing.assert_close(local(Remote(url, form="png", reads="clip")), local(Stillness(), rounded))


def test_facts_travel_and_say_which_frame_a_row_was() -> None:
    seen: list[Facts] = []

    def which(pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        seen.extend(facts)
        return torch.tensor([float(fact["row"] * 10 + fact["frame"]) for fact in facts])

    with served(Own(which)) as url:
        facts = [{"row": i, "objects": [{"class": "dog", "count": 2}], "text": "Grüße"} for i in range(5)]
        assert local(Remote(url), facts=facts).tolist() == [10.0 * i + 1 for i in range(5)]
        assert seen[4] == {**facts[1], "frame": 1}


def test_facts_that_cannot_travel_are_a_sentence() -> None:
    with served(Brightness()) as url, pytest.raises(RewardError, match=r"facts cannot travel as JSON \(found a Tensor"):
        local(Remote(url), facts=[{"target": PIXELS[0]}] * 5)


def test_health_and_version_tell_of_the_reward() -> None:
    with served(Jpeg(quality=80)) as url:
        assert ask(url, "/health") == (200, {"status": "ok", "waiting": 0})
        status, told = ask(url, "/version")
        assert status == 200 and told["reads"] == "frames" and told["limit"] == 256 * 2**20
        assert told["reward"]["type"] == "jpeg" and told["reward"]["quality"] == 80
        assert told["version"] != about("it", Jpeg())["version"]


def test_what_waits_is_scored_together_and_sizes_are_kept_apart() -> None:
    begun, go = threading.Event(), threading.Event()
    sizes: list[tuple[int, int]] = []

    def slow(pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        sizes.append((len(pixels), pixels.shape[-1]))
        begun.set()
        assert go.wait(20)
        return pixels.mean((1, 2, 3, 4))

    def question(rows: int, side: int) -> Question:
        return Question(torch.rand(rows, 1, 3, side, side), ("",) * rows, ({},) * rows)

    spec = Own(slow, batch_size=4)
    desk = Desk(Rubric({"it": Graded(spec, spec)}), CPU)
    first = desk.ask(question(1, 4))
    assert begun.wait(20)
    asked = [question(*sizes) for sizes in [(2, 4), (1, 8), (2, 4), (1, 4)]]
    waiting = [desk.ask(one) for one in asked]
    assert desk.waiting() == 4
    go.set()
    found = [future.result(20) for future in waiting]
    desk.close()
    assert first.done() and sizes == [(1, 4), (4, 4), (1, 8), (1, 4)]
    for one, scores in zip(asked, found, strict=True):
        assert scores == pytest.approx(one.pixels.mean((1, 2, 3, 4)).tolist())


def test_a_bad_request_does_not_fail_those_it_is_scored_with() -> None:
    begun, go = threading.Event(), threading.Event()

    def picky(pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        begun.set()
        assert go.wait(20)
        if "bad" in prompts:
            raise ValueError("this prompt cannot be judged")
        return pixels.mean((1, 2, 3, 4))

    spec = Own(picky)
    desk = Desk(Rubric({"it": Graded(spec, spec)}), CPU)
    first = desk.ask(Question(PIXELS[:1, :1], ("good",), ({},)))
    assert begun.wait(20)
    bad = desk.ask(Question(PIXELS[:1, :1], ("bad",), ({},)))
    good = desk.ask(Question(PIXELS[1:2, :1], ("good",), ({},)))
    go.set()
    assert len(first.result(20)) == len(good.result(20)) == 1
    assert "cannot be judged" in str(bad.exception(20))
    desk.close()


def test_a_full_queue_refuses_in_a_sentence_and_health_still_answers() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        begun.set()
        assert go.wait(20)
        return pixels.mean((1, 2, 3, 4))

    kind, body = pack(Question(PIXELS[:, :1], PROMPTS, ({},) * 5), "npz")
    with served(Own(slow), queue=1) as url:
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(ask(url, "/score", kind, body)))
        asking.start()
        assert begun.wait(20)
        status, told = ask(url, "/score", kind, body)
        assert status == 503 and "1 requests wait already; ask again later" in told["error"]
        assert ask(url, "/health")[0] == 200
        with pytest.raises(RewardError, match=r"refused \(503\): 1 requests wait already"):
            local(Remote(url))
        go.set()
        asking.join(20)
        assert found[0][0] == 200
        for _ in range(20):
            assert ask(url, "/score", kind, body)[0] == 200  # the place is free again as soon as there is an answer


def test_a_token_is_asked_for_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, body = pack(Question(PIXELS[:1, :1], ("red",), ({},)), "npz")
    with served(Color(), token="hush") as url:
        assert ask(url, "/health")[0] == 200
        for given in ({}, {"Authorization": "Bearer husk"}, {"Authorization": "Bearer h\xfcsh"}):
            assert ask(url, "/version", **given)[0] == 401
            assert ask(url, "/score", kind, body, **given)[0] == 401
        assert ask(url, "/score", kind, body, Authorization="Bearer hush")[0] == 200
        monkeypatch.setenv("REWARD_TOKEN", "hush")
        assert local(Remote(url, token="REWARD_TOKEN")).equal(local(Color()))
        monkeypatch.setenv("REWARD_TOKEN", "wrong")
        with pytest.raises(RewardError, match=r"refused \(401\): the token is missing or wrong"):
            local(Remote(url, token="REWARD_TOKEN", retries=1))
        monkeypatch.delenv("REWARD_TOKEN")
        with pytest.raises(ConfigError, match="environment variable REWARD_TOKEN"):
            Remote(url, token="REWARD_TOKEN").load(Placement())


@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "sentence"),
    [
        ("/score", NPZ, b"not a zip", 400, "the npz cannot be read"),
        ("/score", NPZ, b"", 400, "the npz cannot be read"),
        ("/score", JSON, b"{", 400, "not JSON"),
        ("/score", JSON, b"[]", 400, "no JSON object"),
        ("/score", JSON, b'{"pictures": [], "prompts": []}', 400, "0 pictures"),
        ("/score", JSON, b'{"pictures": ["?"], "prompts": ["a"]}', 400, "picture 0 cannot be read"),
        ("/score", JSON, b'{"pictures": ["aGk="], "prompts": ["a"]}', 400, "picture 0 cannot be read"),
        ("/score", "text/plain", b"{}", 400, "content type is 'text/plain'"),
        ("/score", "application/octet-stream", b"\x80\x04.", 400, "content type"),
        ("/scores", JSON, b"{}", 404, "expected /score"),
        ("/score", JSON, b"x" * 3000, 413, "at most 2000 are taken"),
    ],
)
def test_a_request_that_cannot_be_read_is_a_sentence(
    path: str, kind: str, body: bytes, status: int, sentence: str
) -> None:
    with served(Color(), limit=2000) as url:
        found, told = ask(url, path, kind, body)
        assert found == status and sentence in told["error"]
        assert ask(url, "/nothing")[0] == 404


def test_a_request_without_a_length_or_cut_short_is_refused() -> None:
    with served(Color()) as url, socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 20) as line:
        line.sendall(b"POST /score HTTP/1.0\r\nContent-Type: application/json\r\n\r\n")
        assert b"411" in line.recv(100)
    with served(Color()) as url, socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 20) as line:
        line.sendall(b"POST /score HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        line.shutdown(socket.SHUT_WR)
        assert b"400" in line.recv(100)


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def words(**said: Any) -> Any:
    return np.frombuffer(json.dumps(said).encode(), np.uint8)


def test_pickles_are_never_opened() -> None:
    trap = np.array([print], dtype=object)
    with pytest.raises(WireError, match="cannot be read"):
        unpack(NPZ, npz(pixels=trap, words=words(prompts=["a"])), MUCH)


def test_bodies_that_unfold_beyond_the_limit_are_refused_before_they_do() -> None:
    bomb = npz(pixels=np.zeros((1, 1, 3, 512, 512), np.float32), words=words(prompts=["a"]))
    assert len(bomb) < 20_000
    with pytest.raises(WireError, match="more than there is or may be"):
        unpack(NPZ, bomb, 100_000)
    file = io.BytesIO()
    Image.new("RGB", (512, 512)).save(file, "PNG")
    said = {"pictures": [base64.b64encode(file.getvalue()).decode()], "prompts": ["a"]}
    with pytest.raises(WireError, match="more than 100000 numbers"):
        unpack(JSON, json.dumps(said).encode(), 100_000)


def test_a_header_that_promises_more_than_there_is_is_refused() -> None:
    body = npz(pixels=np.zeros((1, 1, 3, 8, 8), np.uint8), words=words(prompts=["a"]))
    plain = io.BytesIO()
    np.savez(plain, pixels=np.zeros((1, 1, 3, 8, 8), np.uint8), words=words(prompts=["a"]))
    lied = plain.getvalue().replace(b"(1, 1, 3, 8, 8)", b"(9, 9, 3, 8, 8)")
    assert len(unpack(NPZ, body, MUCH)) == 1
    with pytest.raises(WireError):
        unpack(NPZ, lied, MUCH)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"pixels": np.zeros((1, 3, 8, 8), np.uint8)}, "lacks an array"),
        ({"pixels": np.zeros((1, 3, 8, 8), np.uint8), "words": words(prompts=["a"])}, "expected float32"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8)), "words": words(prompts=["a"])}, "'pixels' is float64"),
        ({"pixels": np.zeros((2, 1, 3, 8, 8), np.uint8), "words": words(prompts=["a"])}, "2 pictures, 1 prompts"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8), np.uint8), "words": words(prompts=[3])}, "no list of texts"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8), np.uint8), "words": words(prompts="a")}, "no list of texts"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8), np.uint8), "words": words(prompts=["a"], facts=[1])}, "'facts'"),
    ],
)
def test_arrays_that_make_no_sense_are_sentences(arrays: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        unpack(NPZ, npz(**arrays), MUCH)


def test_bytes_and_halves_are_taken_too_and_facts_may_be_left_out() -> None:
    found = unpack(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 51, np.uint8), words=words(prompts=["a"])), MUCH)
    assert found.pixels.unique().tolist() == pytest.approx([0.2]) and found.facts == ({},)
    half = unpack(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 0.5, np.float16), words=words(prompts=["a"])), MUCH)
    assert half.pixels.dtype == torch.float32


def test_pictures_of_different_sizes_are_sent_apart() -> None:
    pictures = []
    for side in (4, 8):
        file = io.BytesIO()
        Image.new("RGB", (side, side)).save(file, "PNG")
        pictures.append(base64.b64encode(file.getvalue()).decode())
    with pytest.raises(WireError, match="send each size by itself"):
        unpack(JSON, json.dumps({"pictures": pictures, "prompts": ["a", "b"]}).encode(), MUCH)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_server_that_is_not_there_is_tried_again_and_then_told() -> None:
    with pytest.raises(RewardError, match=r"no reward answers at http://127.0.0.1:\d+, asked 3 times .*serve-reward"):
        Remote(f"http://127.0.0.1:{free_port()}", retries=2, pause=0.01).load(Placement())


def test_a_server_that_comes_late_is_waited_for() -> None:
    port, reward = free_port(), []
    url = f"http://127.0.0.1:{port}"
    waiting = threading.Thread(target=lambda: reward.append(Remote(url, retries=50, pause=0.01).load(Placement())))
    waiting.start()
    with served(Color(), port=port):
        waiting.join(20)
        assert len(reward) == 1


def test_a_connection_that_breaks_is_tried_again_with_a_longer_pause_each_time() -> None:
    """A server that hangs up twice before it answers."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            for hang_up in (True, True, False):
                connection, _ = server.accept()
                with connection:
                    calls.append(len(connection.recv(10_000)))
                    if not hang_up:
                        told = b'{"reads": "frames"}'
                        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(told), told))

        thread = threading.Thread(target=answer)
        thread.start()
        Remote(url, retries=2, pause=0.01).load(Placement())
        thread.join(20)
    assert len(calls) == 3


def test_refusals_and_slow_answers_are_not_tried_again() -> None:
    calls: list[int] = []

    def broken(pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        calls.append(len(pixels))
        raise ValueError("a bad day")

    with (
        served(Own(broken)) as url,
        pytest.raises(RewardError, match=r"reward 'it' failed.*refused \(422\).*a bad day"),
    ):
        local(Remote(url, pause=0.01), PIXELS[:, :1])
    assert calls == [5]
    go = threading.Event()

    def slow(pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        calls.append(len(pixels))
        assert go.wait(20)
        return pixels.mean((1, 2, 3, 4))

    with served(Own(slow)) as url:
        with pytest.raises(RewardError, match=r"gave no answer within 0.2 seconds; raise 'timeout'"):
            local(Remote(url, timeout=0.2, pause=0.01), PIXELS[:, :1])
        go.set()
    assert calls == [5, 5]


def test_a_request_above_the_servers_limit_is_not_sent() -> None:
    with served(Color(), limit=2000) as url, pytest.raises(RewardError, match=r"above the server's limit; lower batch"):
        local(Remote(url))


def test_reading_otherwise_than_the_served_reward_is_refused() -> None:
    with served(Stillness()) as url, pytest.raises(ConfigError, match="reads clip, but 'reads' is frames"):
        Remote(url).load(Placement())


@pytest.mark.parametrize(
    "answer", [b'{"scores": [1]}', b'{"scores": [1, null]}', b'{"scores": "no"}', b"[]", b"<html>"]
)
def test_an_answer_that_is_no_scores_is_refused(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            for body in (b'{"reads": "frames"}', answer):
                connection, _ = server.accept()
                with connection:
                    connection.recv(100_000)
                    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(100_000)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(RewardError, match=r"expected a number each|no JSON object"):
            local(Remote(f"http://127.0.0.1:{server.getsockname()[1]}"), PIXELS[:2, :1])
        thread.join(20)


@pytest.mark.parametrize("url", ["http://:1", "http://a:99999", "http://a:0"])
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Remote(url)
