"""Fetching published weights, from a hub that is a small server here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.hf_api import RepoFile

from tastemaker.core.registry import ConfigError
from tastemaker.models.downloads import published_sources, required_files, required_sources
from tastemaker.models.pretrained import WeightsSource, select_needed_files
from tastemaker.rewards.backbones.detectors import DINO
from tastemaker.rewards.clip import CLIP_L, ClipReward
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.wrappers import ClippedReward

ROOT = Path(__file__).parent.parent.parent
COMMIT = "c" * 40
WEIGHTS = bytes(range(256)) * 100_000  # 26 MB; what is written down at a time are ten
FILES = {
    "config.json": b'{"model_type": "clip"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "flax_model.msgpack": b"flax",
    "README.md": b"words",
    "tokenizer.json": b"{}",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    asked: list[str] = []
    break_after: int | None = None  # bytes of a body
    gated = False

    def log_message(self, format: str, *values: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        Hub.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if self.path.startswith("/api/models/somebody/model/tree/"):
            told = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in FILES.items()]
            return self._send(200, json.dumps(told).encode(), body)
        if self.path.startswith("/api/models/somebody/model"):
            return self._send(200, json.dumps({"id": "somebody/model", "sha": COMMIT, "siblings": []}).encode(), body)
        if Hub.gated:
            return self._send(403, b"ask first", body, {"X-Error-Code": "GatedRepo"})
        match = re.fullmatch(r"/somebody/model/resolve/\w+/([\w.]+)", self.path.split("?")[0])
        if match is None:
            return self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})
        if match[1] not in FILES:
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        told = {"X-Repo-Commit": COMMIT, "ETag": f'"{match[1].replace(".", "")}"', "Accept-Ranges": "bytes"}
        return self._send_file(FILES[match[1]], body, told)

    def _send_file(self, data: bytes, body: bool, headers: dict[str, str]) -> None:
        start = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if start:
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        if body and Hub.break_after is not None and len(data) - start > Hub.break_after:
            self.close_connection = True
            return self._send(206 if start else 200, data[start:], body, headers, Hub.break_after)
        return self._send(206 if start else 200, data[start:], body, headers)

    def _send(
        self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None, most: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:most])


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked, Hub.break_after, Hub.gated = [], None, False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def download(hub: str, home: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """In a process of its own, for the hub's client reads its settings once."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {**os.environ, **settings, **more, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tastemaker", "download", *arguments],
        env=environment, cwd=home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def cached(home: Path, name: str) -> Path:
    return home / "hub/models--somebody--model/snapshots" / COMMIT / name


@pytest.mark.slow
def test_a_file_is_fetched_once_and_then_found_without_the_hub(hub: str, tmp_path: Path) -> None:
    code, told = download(hub, tmp_path, "somebody/model/model.safetensors")
    assert code == 0 and "somebody/model" in told and "model.safetensors is in" in told
    assert cached(tmp_path, "model.safetensors").read_bytes() == WEIGHTS
    asked = len(Hub.asked)
    code, told = download(hub, tmp_path, "somebody/model/model.safetensors")
    assert code == 0 and len(Hub.asked) == asked


@pytest.mark.slow
def test_of_a_whole_repository_the_weights_are_fetched_once(hub: str, tmp_path: Path) -> None:
    code, told = download(hub, tmp_path, "somebody/model")
    assert code == 0
    assert "somebody/model: 3 files, 25.6 MB" in told
    kept = {path.name for path in cached(tmp_path, "").iterdir()}
    assert kept == {"config.json", "model.safetensors", "tokenizer.json"}
    code, told = download(hub, tmp_path, "somebody/model", HF_HUB_OFFLINE="1")  # what is here serves without the hub
    assert code == 0 and str(cached(tmp_path, "")).rstrip("/") in told


@pytest.mark.slow
def test_a_download_that_broke_off_is_gone_on_with(hub: str, tmp_path: Path) -> None:
    Hub.break_after = 15_000_000
    code, told = download(hub, tmp_path, "somebody/model/model.safetensors")
    if code:  # the client tries again by itself, and may get there
        assert code == 1 and "could not be downloaded" in told and "to resume" in told
    Hub.break_after = None
    assert download(hub, tmp_path, "somebody/model/model.safetensors")[0] == 0
    assert cached(tmp_path, "model.safetensors").read_bytes() == WEIGHTS
    assert any("bytes=" in line for line in Hub.asked)


def test_listing_tells_licences_in_full_and_fetches_nothing(hub: str, tmp_path: Path) -> None:
    code, told = download(hub, tmp_path, "hps", "{type: clip, weights: somebody/model}", "flux", "--list")
    assert code == 0 and Hub.asked == []
    assert "FLUX.1 [dev] Non-Commercial License" in told
    for word in ("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", "Apache-2.0", "somebody/model", "all files", "no"):
        assert word in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nobody/model", "no public repository nobody/model"),
        ("somebody/model/none.pt", "somebody/model has no file 'none.pt'"),
    ],
)
def test_what_the_hub_does_not_have_is_a_sentence(hub: str, tmp_path: Path, name: str, sentence: str) -> None:
    code, told = download(hub, tmp_path, name)
    assert code == 1 and sentence in told


@pytest.mark.slow
def test_weights_to_be_asked_for_say_where(hub: str, tmp_path: Path) -> None:
    Hub.gated = True
    code, told = download(hub, tmp_path, "somebody/model/model.safetensors")
    assert code == 1 and "is gated; request access at https://huggingface.co/somebody/model" in told


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"], ids=["unreachable", "offline"])
def test_without_a_network_there_is_one_sentence(tmp_path: Path, offline: str) -> None:
    nowhere = "http://127.0.0.1:9"
    code, told = download(nowhere, tmp_path, "somebody/model/model.safetensors", HF_HUB_OFFLINE=offline)
    assert code == 1 and "model.safetensors could not be downloaded" in told and "give its path" in told


def test_a_name_that_is_nothing_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="'hpss' is no recipe, reward, model or id such as owner/name; did you mean"):
        required_sources("hpss")


def test_what_is_needed_follows_the_settings(tmp_path: Path) -> None:
    assert ClipReward().sources == (CLIP_L,)
    assert ClipReward(weights="somebody/model").sources == (WeightsSource("somebody/model"),)
    assert ClipReward(weights=str(tmp_path)).sources == ()
    assert BrightnessReward().sources == ()
    assert ClippedReward(ClipReward(), min=0.0).sources == (CLIP_L,)


def test_the_version_and_the_kind_of_a_network_name_what_is_fetched() -> None:
    def files(name: str) -> set[str]:
        return {str(source) for source in required_sources(name)}

    for recipe in ("alignprop-sd15", "draft-sd15", "{type: clipped, min: 0, reward: {type: hps, version: v2.0}}"):
        assert "xswu/HPSv2/HPS_v2_compressed.pt" in files(recipe)
        assert "xswu/HPSv2/HPS_v2.1_compressed.pt" not in files(recipe)
    assert files("detection") == {"hustvl/yolos-base"}
    assert files("{type: detection, weights: IDEA-Research/grounding-dino-base}") == {DINO.hub}
    assert required_sources("{type: detection, weights: IDEA-Research/grounding-dino-base}") == [DINO]


def test_recipes_models_and_ids_of_the_hub_are_known() -> None:
    assert (
        required_sources("grpo-toy-flow") == [] and required_sources("toy_flow") == [] and required_sources("vae") == []
    )
    assert required_sources("aesthetic_hps") == [*required_sources("aesthetic"), *required_sources("hps")]
    assert required_sources("xswu/HPSv2") == [source for source in published_sources() if source.hub == "xswu/HPSv2"]
    assert required_sources("a/b/c/d.pt") == [WeightsSource("a/b", "c/d.pt")]
    assert required_sources("huggingface-pickscore") == required_sources("zheyangqin/VADER_VideoCrafter_PickScore")
    assert required_sources("huggingface-pickscore")[0].file == "vader_videocrafter_pickscore.pt"


def test_of_a_repository_without_safetensors_the_pickles_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.bin", "config.json", ".gitattributes", "onnx/model.onnx", "sub/b.pt", "sub/b.safetensors"]
    told = [RepoFile(path=name, size=2, oid="") for name in names]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda self, hub, recursive: told)
    assert required_files("somebody/model") == {"sub/b.safetensors": 2, "a.bin": 2, "config.json": 2}


def test_of_a_pipeline_the_parts_that_are_loaded_are_fetched_once() -> None:
    needed = [
        "model_index.json", "LICENSE.md", "scheduler/scheduler_config.json", "text_encoder/config.json",
        "text_encoder/model.safetensors", "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors", "text_encoder_2/model.safetensors.index.json",
        "tokenizer/merges.txt", "tokenizer_2/spiece.model", "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00001.safetensors", "vae/diffusion_pytorch_model.safetensors",
    ]  # fmt: skip
    needless = [
        "flux1-dev.safetensors", "ae.safetensors", "README.md", ".gitattributes", "dev_grid.jpg", "v1-5-pruned.ckpt",
        "text_encoder/model.fp16.safetensors", "text_encoder/pytorch_model.bin", "text_encoder/flax_model.msgpack",
        "text_encoder/openvino_model.bin", "text_encoder/openvino_model.xml", "text_encoder/model.onnx",
        "text_encoder_2/model.fp16-00001-of-00002.safetensors", "text_encoder_2/model.safetensors.index.fp16.json",
        "vae/diffusion_pytorch_model.fp16.safetensors", "vae/diffusion_pytorch_model.non_ema.safetensors",
        "vae_1_0/diffusion_pytorch_model.safetensors", "vae_decoder/model.onnx", "vae_encoder/config.json",
        "safety_checker/model.safetensors",
    ]  # fmt: skip
    assert sorted(select_needed_files([*needless, *needed])) == sorted(needed)
