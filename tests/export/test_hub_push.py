"""`tastemaker export --push`, against a local server that stands in for the Hugging Face Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_runner import run_cli
from safetensors import safe_open
from tiers import fast
from untrained_runs import UntrainedRun, make_untrained_run

from tastemaker.export.publishable import publishable_config, remove_local_names

TOKEN = "hf_" + "x" * 34
TINY = "model={type: flux, weights: tiny, height: 32, width: 32, max_text_tokens: 16}"


# The hub's client warns about how it calls its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a push uses: account, repository, upload modes, large files and commit."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, bool | str | None] = {}  # visibility by name
    files: dict[str, bytes] = {}
    objects: dict[str, bytes] = {}  # large files by their digest
    fail: str | None = None  # a part of the path of requests that are answered with 500

    def log_message(self, format: str, *values: Any) -> None:
        return

    def _read_body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):  # chunks
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        if self.path == "/api/whoami-v2":
            return self._send(200, {"name": "me", "type": "user", "orgs": [{"name": "lab"}], "auth": {}})
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        if name in Hub.repositories:
            return self._send(200, {"id": name, "siblings": []})
        return self._send(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self._read_body()
        path = self.path.partition("?")[0]
        if Hub.fail and Hub.fail in path:
            return self._send(500, {"error": "out of order"})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":  # of the model card
            valid = isinstance(yaml.safe_load(json.loads(body)["content"].split("---")[1]), dict)
            return self._send(200, {"warnings": [], "errors": [] if valid else [{"message": "no YAML"}]})
        if path.startswith("/api/models/") and "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith((".safetensors", ".png")) else "regular" for name in names]
            files = [{"path": name, "uploadMode": mode} for name, mode in zip(names, modes, strict=True)]
            return self._send(200, {"files": [{**each, "shouldIgnore": False} for each in files]})
        if path.endswith("/info/lfs/objects/batch"):
            host = self.headers["Host"]
            objects = [
                {**each, "actions": {"upload": {"href": f"http://{host}/large/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            return self._send(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            return self._commit([json.loads(line) for line in body.decode().splitlines()])
        return self._send(404, {"error": f"unknown: {path}"})

    def do_PUT(self) -> None:
        body = self._read_body()
        Hub.objects[self.path.rpartition("/")[2]] = body
        self._send(500 if Hub.fail and Hub.fail in self.path else 200, {})

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        url = f"http://{self.headers['Host']}/{name}"
        if name in Hub.repositories:
            return self._send(409, {"error": "exists", "url": url})
        Hub.repositories[name] = request.get("visibility", request.get("private"))
        return self._send(200, {"url": url, "name": name})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                Hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                Hub.files[value["path"]] = Hub.objects[value["oid"]]
        url = f"http://{self.headers['Host']}/me/liked/commit/{'c' * 40}"
        self._send(200, {"success": True, "commitOid": "c" * 40, "commitUrl": url, "hookOutput": ""})

    def _send(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        known = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in {**known, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Hub.repositories, Hub.files, Hub.objects, Hub.fail = {}, {}, {}, None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> UntrainedRun:
    """A run with samples, evaluations before and after, a secret's name and paths of this machine."""
    folder = tmp_path_factory.mktemp("private")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red\na blue\n")
    data = f"data={{type: prompt_file, path: {prompts}}}"
    tuning = "tuning={type: lora, rank: 2, alpha: 6}"
    run = make_untrained_run(folder, "srpo-flux-hps", TINY, tuning, "rewards.color.type=color", data)
    write_samples(run.run.directory)
    for name, mean in (("before", 0.25), ("step-000001", 0.5)):
        path = run.run.directory / "eval" / name / "report.json"
        path.parent.mkdir(parents=True)
        score = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
        checkpoint = "untrained" if name == "before" else "step-000001"
        model = f"flux, {checkpoint}, live, none, seed 0, detector, hash-{name}"
        report = {"benchmark": "geneval", "prompts": 8, "model": model, "scores": {"strict": {"overall": score}}}
        path.write_text(json.dumps(report))
    return run


def write_samples(directory: Path) -> None:
    from PIL import Image

    (directory / "samples").mkdir()
    Image.new("RGB", (64, 32), (200, 30, 30)).save(directory / "samples/step-000002.png")
    boxes, size = [[0, 0, 32, 32], [32, 0, 64, 32]], [32, 32]
    grid = {"step": 2, "file": "step-000002.png", "prompts": ["a red: cat", "a blue"], "scores": {}, "frames": 1}
    (directory / "samples/step-000002.json").write_text(json.dumps({**grid, "boxes": boxes, "size": size}))


def export(trained: UntrainedRun, out: Path, *options: str) -> int:
    settings = ("--layout", "diffusers", "--push", "me/liked", *options)
    return run_cli("export", str(trained.run.directory), "--out", str(out), *settings)


def test_everything_arrives_and_nothing_else(hub: str, trained: UntrainedRun, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "liked"
    assert export(trained, out, "--private") == 0
    assert "created" in capsys.readouterr().err and Hub.repositories == {"me/liked": "private"}
    written = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert written == Hub.files
    expected = {"README.md", "recipe.yaml", "pytorch_lora_weights.safetensors", "images/0.png", "images/1.png"}
    assert written.keys() == expected
    private = [str(trained.run.directory.parent), str(Path.home()), TOKEN]
    for name, data in written.items():
        assert not any(text.encode() in data for text in private), name
    recipe = yaml.safe_load(written["recipe.yaml"])
    assert recipe["data"]["path"] == "prompts.txt" and recipe["output_dir"] == trained.run.directory.parent.name
    card = yaml.safe_load(written["README.md"].decode().split("---")[1])
    assert card["widget"][0] == {"text": "a red: cat", "output": {"url": "images/0.png"}}
    assert {"tastemaker", "srpo", "lora"} <= {*card["tags"]}
    page = written["README.md"].decode()
    assert "<Gallery />" in page and "| strict | 0.25 (0.2 to 0.3) | 0.5 (0.45 to 0.55) |" in page


def test_publishable_configuration_has_no_secrets_and_no_paths() -> None:
    home = Path.home()
    settings = {
        "name": "liked",
        "output_dir": "/data/me/runs",
        "model": {"weights": "black-forest-labs/FLUX.1-dev", "transformer": f"{home}/flux/dit.safetensors"},
        "rewards": {
            "judge": {"type": "openai_judge", "urls": ["https://me:pw@host/v1?key=1"], "api_key_env": "OPENAI_API_KEY"},
            "mine": {"type": "/home/me/secret/rewards.py:score", "api_key": "sk-" + "a" * 30, "token": "abc"},
        },
        "data": {"prompts": ["a cat / a dog", "use hf_" + "a" * 30], "path": "C:\\Users\\me\\prompts.txt"},
        "loggers": {"note": f"see {home}/notes"},
    }
    assert yaml.safe_load(publishable_config(yaml.safe_dump(settings))) == {
        "name": "liked",
        "output_dir": "runs",
        "model": {"weights": "black-forest-labs/FLUX.1-dev", "transformer": "dit.safetensors"},
        "rewards": {
            "judge": {"type": "openai_judge", "urls": ["https://host/v1"], "api_key_env": "OPENAI_API_KEY"},
            "mine": {"type": "rewards.py:score", "api_key": "removed", "token": "removed"},
        },
        "data": {"prompts": ["a cat / a dog", "use removed"], "path": "prompts.txt"},
        "loggers": {"note": "see ~/notes"},
    }


def test_configs_do_not_say_where_components_were_loaded_from(tmp_path: Path) -> None:
    configs = {"vae": {"_name_or_path": "/data/me/base/vae", "a": 1}, "text": {"_name_or_path": "google/t5", "b": 2}}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "list.json").write_text("[1]")
    remove_local_names(tmp_path)
    assert json.loads((tmp_path / "vae/config.json").read_text()) == {"a": 1}
    assert json.loads((tmp_path / "text/config.json").read_text()) == configs["text"]


@pytest.mark.slow
def test_existing_repository_gets_a_commit(hub: str, trained: UntrainedRun, tmp_path: Path, capsys: Any) -> None:
    Hub.repositories["me/liked"] = "public"
    assert export(trained, tmp_path / "liked", "--private") == 0
    assert "existed already and keeps its visibility" in capsys.readouterr().err
    assert Hub.repositories == {"me/liked": "public"} and "README.md" in Hub.files


@pytest.mark.parametrize("part", fast(["/commit/", "/create", "/large/"], "/large/"))
def test_failed_upload_keeps_the_folder_and_says_how_to_continue(
    part: str, hub: str, trained: UntrainedRun, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    Hub.fail, out = part, tmp_path / "liked"
    assert export(trained, out) == 1
    message = capsys.readouterr().err
    assert f"hf upload me/liked {out}" in " ".join(message.split()) and re.search(r"TM256[67]", message)
    assert (out / "pytorch_lora_weights.safetensors").is_file() and not Hub.files


def test_push_is_refused_before_the_export(
    hub: str, trained: UntrainedRun, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "liked"
    for name, code in (("liked", "TM2560"), ("somebody/liked", "TM2563")):
        assert run_cli("export", "runs/x", "--out", str(out), "--layout", "diffusers", "--push", name) == 2
        assert code in capsys.readouterr().err
    assert run_cli("export", "runs/x", "--out", "one.safetensors", "--push", "me/liked") == 2
    assert "TM2561" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert export(trained, out) == 1
    assert "refused the token (401)" in (message := capsys.readouterr().err) and "TM2565" in message
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert export(trained, out) == 2 and "hf auth login" in (message := capsys.readouterr().err) and "TM2562" in message
    assert not out.exists()


@pytest.mark.slow
def test_unreachable_hub_is_said_before_the_export(
    hub: str, trained: UntrainedRun, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert export(trained, tmp_path / "liked") == 1
    assert "TM2567" in (message := capsys.readouterr().err) and "nothing was exported" in message
    assert not (tmp_path / "liked").exists()


def test_metadata_names_model_run_and_hash(hub: str, trained: UntrainedRun, tmp_path: Path) -> None:
    out = tmp_path / "liked"
    assert export(trained, out) == 0
    file = out / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    assert metadata["modelspec.hash_sha256"] == "0x" + hashlib.sha256(data[8 + header :]).hexdigest()
    assert metadata["modelspec.sai_model_spec"] == "1.0.1" and metadata["modelspec.title"] == "run"
    assert metadata["modelspec.architecture"] == "flux/lora" and metadata["modelspec.implementation"] == "diffusers"
    assert metadata["modelspec.prediction_type"] == "flow" and "modelspec.resolution" in metadata
