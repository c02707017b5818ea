"""Downloads of published weights, from a local server that stands in for the Hugging Face Hub."""

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
import torch
from huggingface_hub.hf_api import RepoFile
from rich.console import Console

from tastemaker.config.load import list_recipes
from tastemaker.config.registries import AUTOENCODERS, MODELS, REWARDS
from tastemaker.core.cards import PUBLISHED_JUDGES
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.lora import PUBLISHED_LORAS
from tastemaker.models.downloads import (
    VADER_HEADS_NAME,
    fetch_source,
    published_sources,
    required_files,
    required_sources,
)
from tastemaker.models.pretrained import WeightsSource, find_weights, select_needed_files
from tastemaker.models.showo.model import MAGVIT, PUBLISHED_SHOWO, ShowoSpec, build_network
from tastemaker.models.showo.prompt_tokenizer import BYTE_TOKENIZER
from tastemaker.rewards.backbones.detectors import DINO
from tastemaker.rewards.clip import CLIP_L, ClipReward
from tastemaker.rewards.color import BrightnessReward
from tastemaker.rewards.vlm import VlmReward
from tastemaker.rewards.wrappers import ClippedReward

ROOT = Path(__file__).parent.parent.parent
COMMIT = "c" * 40
WEIGHTS = bytes(range(256)) * 100_000  # 26 MB; the client writes 10 MB at a time
FILES = {
    "config.json": b'{"model_type": "clip"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "flax_model.msgpack": b"flax",
    "README.md": b"words",
    "tokenizer.json": b"{}",
}
JUDGE_FILES = {
    "judge/config.json": b'{"model_type": "llava"}',
    "judge/model-1.safetensors": b"half",
    "judge/model-2.safetensors": b"the other half",
    "judge/tokenizer.json": b"{}",
    "judge/training_args.bin": b"a pickle",
}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses."""

    requests: list[str] = []
    break_after: int | None = None  # bytes of a body
    gated = False

    def log_message(self, format: str, *values: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def do_GET(self) -> None:
        self._respond(body=True)

    def _respond(self, body: bool) -> None:
        Hub.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if self.path.startswith("/api/models/somebody/model/tree/"):
            folder = self.path.split("?")[0].partition("/tree/main/")[2]
            files = JUDGE_FILES if folder == "judge" else FILES
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()
            ]
            return self._send(200, json.dumps(listing).encode(), body)
        if self.path.startswith("/api/models/somebody/model"):
            return self._send(200, json.dumps({"id": "somebody/model", "sha": COMMIT, "siblings": []}).encode(), body)
        if Hub.gated:
            return self._send(403, b"request access", body, {"X-Error-Code": "GatedRepo"})
        match = re.fullmatch(r"/somebody/model/resolve/\w+/([\w./-]+)", self.path.split("?")[0])
        if match is None:
            return self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})
        files = {**FILES, **JUDGE_FILES}
        if match[1] not in files:
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        tag = re.sub(r"\W", "", match[1])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        return self._send_file(files[match[1]], body, headers)

    def _send_file(self, data: bytes, body: bool, headers: dict[str, str]) -> None:
        start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if start:
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        if body and Hub.break_after is not None and len(data) - start > Hub.break_after:
            self.close_connection = True
            return self._send(206 if start else 200, data[start:], body, headers, Hub.break_after)
        return self._send(206 if start else 200, data[start:], body, headers)

    def _send(
        self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None, max_bytes: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:max_bytes])


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.requests, Hub.break_after, Hub.gated = [], None, False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def run_download(hub: str, home: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run `tastemaker download` in a new process, because the hub's client reads its settings once."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {
        **os.environ,
        **settings,
        **variables,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", "tastemaker", "download", *arguments],
        env=environment, cwd=home, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "Traceback" not in process.stderr, process.stderr
    return process.returncode, process.stderr


def cached_path(home: Path, name: str) -> Path:
    return home / "hub/models--somebody--model/snapshots" / COMMIT / name


@pytest.mark.slow
def test_file_is_downloaded_once_and_then_read_from_the_cache(hub: str, tmp_path: Path) -> None:
    code, output = run_download(hub, tmp_path, "somebody/model/model.safetensors")
    assert code == 0 and "somebody/model" in output and "model.safetensors" in output
    assert cached_path(tmp_path, "model.safetensors").read_bytes() == WEIGHTS
    request_count = len(Hub.requests)
    code, output = run_download(hub, tmp_path, "somebody/model/model.safetensors")
    assert code == 0 and len(Hub.requests) == request_count


@pytest.mark.slow
def test_repository_download_skips_duplicate_weights(hub: str, tmp_path: Path) -> None:
    code, output = run_download(hub, tmp_path, "somebody/model")
    assert code == 0
    assert "somebody/model: 3 files, 25.6 MB" in output
    files = {path.name for path in cached_path(tmp_path, "").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json"}
    code, output = run_download(hub, tmp_path, "somebody/model", HF_HUB_OFFLINE="1")  # the cache serves without the hub
    assert code == 0 and str(cached_path(tmp_path, "")).rstrip("/") in output


@pytest.mark.slow
def test_folder_download_fetches_nothing_else(hub: str, tmp_path: Path) -> None:
    code, output = run_download(hub, tmp_path, "somebody/model/judge")
    assert code == 0 and "somebody/model/judge: 4 files" in output
    files = {path.relative_to(cached_path(tmp_path, "")).as_posix() for path in cached_path(tmp_path, "").rglob("*.*")}
    assert files == set(JUDGE_FILES) - {"judge/training_args.bin"}
    last = [line.split("/")[-1] for line in Hub.requests if line.startswith("GET /somebody")][-1]
    assert last == "config.json"  # a folder without it counts as incomplete
    code, output = run_download(hub, tmp_path, "somebody/model/judge", HF_HUB_OFFLINE="1")
    assert code == 0 and str(cached_path(tmp_path, "judge")) in output


@pytest.mark.slow
def test_interrupted_download_resumes(hub: str, tmp_path: Path) -> None:
    Hub.break_after = 15_000_000
    code, output = run_download(hub, tmp_path, "somebody/model/model.safetensors")
    if code:  # the client retries by itself and may succeed
        assert code == 1 and "somebody/model" in output and "resume" in output
    Hub.break_after = None
    assert run_download(hub, tmp_path, "somebody/model/model.safetensors")[0] == 0
    assert cached_path(tmp_path, "model.safetensors").read_bytes() == WEIGHTS
    assert any("bytes=" in line for line in Hub.requests)


def test_listing_shows_licenses_and_downloads_nothing(hub: str, tmp_path: Path) -> None:
    code, output = run_download(hub, tmp_path, "hps", "{type: clip, weights: somebody/model}", "flux", "--list")
    assert code == 0 and Hub.requests == []
    assert "FLUX.1 [dev] Non-Commercial License" in output
    for word in ("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", "Apache-2.0", "somebody/model", "all files", "no"):
        assert word in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("nobody/model", "repository nobody/model"),
        ("somebody/model/none.pt", "'none.pt'"),
    ],
)
def test_missing_repository_or_file_is_reported(hub: str, tmp_path: Path, name: str, fragment: str) -> None:
    code, output = run_download(hub, tmp_path, name)
    assert code == 1 and fragment in output


@pytest.mark.slow
def test_gated_weights_name_the_access_page(hub: str, tmp_path: Path) -> None:
    Hub.gated = True
    code, output = run_download(hub, tmp_path, "somebody/model/model.safetensors")
    assert code == 1 and "gated" in output and "https://huggingface.co/somebody/model" in output


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"], ids=["unreachable", "offline"])
def test_unreachable_hub_is_reported(tmp_path: Path, offline: str) -> None:
    unreachable = "http://127.0.0.1:9"
    code, output = run_download(unreachable, tmp_path, "somebody/model/model.safetensors", HF_HUB_OFFLINE=offline)
    assert code == 1 and "model.safetensors" in output and "path" in output


def test_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'hpss'.*'hps'.*TM425"):
        required_sources("hpss")


def test_required_weights_follow_the_settings(tmp_path: Path) -> None:
    assert ClipReward().sources == (CLIP_L,)
    assert ClipReward(weights="somebody/model").sources == (WeightsSource("somebody/model"),)
    assert ClipReward(weights=str(tmp_path)).sources == ()
    assert BrightnessReward().sources == ()
    assert ClippedReward(ClipReward(), min=0.0).sources == (CLIP_L,)


def test_required_files_follow_version_and_network() -> None:
    def files(name: str) -> set[str]:
        return {str(source) for source in required_sources(name)}

    for recipe in ("alignprop-sd15", "draft-sd15", "{type: clipped, min: 0, reward: {type: hps, version: v2.0}}"):
        assert "xswu/HPSv2/HPS_v2_compressed.pt" in files(recipe)
        assert "xswu/HPSv2/HPS_v2.1_compressed.pt" not in files(recipe)
    assert files("detection") == {"hustvl/yolos-base"}
    assert files("{type: detection, weights: IDEA-Research/grounding-dino-base}") == {DINO.hub}
    assert required_sources("{type: detection, weights: IDEA-Research/grounding-dino-base}") == [DINO]


def test_recipes_models_and_hub_ids_are_resolved() -> None:
    assert (
        required_sources("grpo-toy-flow") == [] and required_sources("toy_flow") == [] and required_sources("vae") == []
    )
    assert required_sources("aesthetic_hps") == [*required_sources("aesthetic"), *required_sources("hps")]
    assert required_sources("xswu/HPSv2") == [source for source in published_sources() if source.hub == "xswu/HPSv2"]
    assert required_sources("a/b/c/d.pt") == [WeightsSource("a/b", "c/d.pt")]
    assert required_sources("huggingface-pickscore") == required_sources("zheyangqin/VADER_VideoCrafter_PickScore")
    assert required_sources("huggingface-pickscore")[0].file == "vader_videocrafter_pickscore.pt"


def recommended_download(message: object) -> str:
    """The argument of the download command that a message recommends."""
    match = re.search(r"`tastemaker download ([^`]+)`", " ".join(str(message).split()))
    assert match, message
    return match[1]


def test_every_recommended_download_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    names = [*list_recipes(), *REWARDS, *MODELS, *AUTOENCODERS, *PUBLISHED_SHOWO, *PUBLISHED_JUDGES, *PUBLISHED_LORAS]
    names = [name for name in names if name not in ("folder", "remote", "sum", "clipped", "from_config")]
    sources: set[WeightsSource] = set()
    for name in names:
        try:
            sources |= set(required_sources(name))
        except ConfigError:  # a component that has no defaults
            continue
    assert len(sources) > 50
    for source in sources:
        with pytest.raises(ConfigError) as raised:
            find_weights(source.hub, source)
        found = required_sources(recommended_download(raised.value))
        parts = {(each.hub, each.file, each.folder) for each in found}
        assert (source.hub, source.file, source.folder) in parts, source


def test_documented_downloads_are_understood() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "tastemaker/recipes").rglob("*.yaml")]
    names = {
        name
        for page in pages
        for arguments in re.findall(r"tastemaker download((?: [\w./-]+)+)", page.read_text(encoding="utf-8"))
        for name in arguments.split()
        if not name.startswith("--") and name not in ("geneval", "owner/name", "RECIPE", VADER_HEADS_NAME)
    }
    assert len(names) > 20 and {"parm", "orm_ft", "dpo-parm-showo"} <= names
    for name in names:
        required_sources(name)  # refuses an unknown name


def test_published_judges_and_stages_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = tmp_path / "models--ZiyuG--Image-Generation-CoT" / "snapshots" / ("a" * 40)
    (snapshot / "parm").mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("parm", "orm_ft"):
        assert required_sources(name) == [PUBLISHED_JUDGES[name]] == list(VlmReward(weights=name).sources)
        assert str(PUBLISHED_JUDGES[name]) == f"ZiyuG/Image-Generation-CoT/{name}"
        for missing in (name, f"ckpts/{name}", f"./ckpts/{name}"):
            with pytest.raises(ConfigError, match="TM505") as raised:
                find_weights(missing, WeightsSource(missing))
            assert recommended_download(raised.value) == name
    (snapshot / "parm" / "config.json").write_text("{}")
    for name in ("parm", "ZiyuG/Image-Generation-CoT/parm"):
        assert find_weights(name, WeightsSource(name)) == snapshot / "parm"
    for stage in ("dpo", "dpo_iter", "dpo_iter_parm_guide"):
        assert required_sources(stage)[0] == PUBLISHED_SHOWO[stage] and MAGVIT in required_sources(stage)
        spec = ShowoSpec(f"ckpts/{stage}", autoencoder=None, tokenizer=BYTE_TOKENIZER)
        with pytest.raises(ConfigError, match=r"model\.weights.*TM900") as raised:
            build_network(spec, Placement(torch.device("cpu"), torch.float32))
        assert recommended_download(raised.value) == stage


def test_pickles_are_used_if_there_are_no_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.bin", "config.json", ".gitattributes", "onnx/model.onnx", "sub/b.pt", "sub/b.safetensors"]
    listing = [RepoFile(path=name, size=2, oid="") for name in names]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda self, hub, recursive: listing)
    assert required_files("somebody/model") == {"sub/b.safetensors": 2, "a.bin": 2, "config.json": 2}


def test_folder_of_a_repository_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["dpo/pytorch_model.bin", "parm/config.json", "parm/model-1.safetensors", "parm/README.md"]
    fetched: list[str] = []

    def list_tree(self: Any, hub: str, folder: str = "", recursive: bool = False) -> list[RepoFile]:
        return [RepoFile(path=name, size=2, oid="") for name in names if name.startswith(folder)]

    def fetch(hub: str, file: str) -> str:
        fetched.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", list_tree)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert fetch_source(PUBLISHED_JUDGES["parm"], Console(quiet=True)) == tmp_path / "parm"
    assert fetched == ["parm/model-1.safetensors", "parm/config.json"]


def test_pipeline_download_selects_the_loaded_components() -> None:
    needed = [
        "model_index.json", "LICENSE.md", "scheduler/scheduler_config.json", "text_encoder/config.json",
        "text_encoder/model.safetensors", "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors", "text_encoder_2/model.safetensors.index.json",
        "tokenizer/merges.txt", "tokenizer_2/spiece.model", "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00001.safetensors", "vae/diffusion_pytorch_model.safetensors",
    ]  # fmt: skip
    unneeded = [
        "flux1-dev.safetensors", "ae.safetensors", "README.md", ".gitattributes", "dev_grid.jpg", "v1-5-pruned.ckpt",
        "text_encoder/model.fp16.safetensors", "text_encoder/pytorch_model.bin", "text_encoder/flax_model.msgpack",
        "text_encoder/openvino_model.bin", "text_encoder/openvino_model.xml", "text_encoder/model.onnx",
        "text_encoder_2/model.fp16-00001-of-00002.safetensors", "text_encoder_2/model.safetensors.index.fp16.json",
        "vae/diffusion_pytorch_model.fp16.safetensors", "vae/diffusion_pytorch_model.non_ema.safetensors",
        "vae_1_0/diffusion_pytorch_model.safetensors", "vae_decoder/model.onnx", "vae_encoder/config.json",
        "safety_checker/model.safetensors",
    ]  # fmt: skip
    assert sorted(select_needed_files([*unneeded, *needed])) == sorted(needed)
