"""Every reader of files and messages, with small valid inputs for it. A new reader is one line of `READERS`."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_mutations import Repair, repair_nothing, repair_png, repair_tar
from PIL import Image
from safetensors.torch import save

from tastemaker.config.named_datasets import read_datasets_file
from tastemaker.config.recipes import merge_parents
from tastemaker.core import checkpoint_files
from tastemaker.core.checkpoint_files import FileChecksum, compute_checksum, encode_manifest
from tastemaker.core.errors import ConfigError, ImageError
from tastemaker.core.safe_files import parse_json, parse_yaml, read_json_object, read_json_rows, read_yaml_mapping
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.data.image_io import decode_image, encode_gif, encode_png, image_size, read_image, save_image
from tastemaker.data.image_sources import READ_ERRORS, open_tar_shards
from tastemaker.data.image_transforms import decode_square
from tastemaker.data.latents import read_manifest, read_shard
from tastemaker.data.prompt_images import load_document, read_caption_map, read_jsonl_entries
from tastemaker.data.prompts import PromptFile
from tastemaker.data.text_files import read_mixture
from tastemaker.data.tokens import read_npy
from tastemaker.data.vqa import parse_examples
from tastemaker.evaluation.geneval import read_metadata
from tastemaker.evaluation.image_sets import load_reference, read_adm_statistics, read_npz
from tastemaker.export.lora import LoraLayerNames, is_external_lora, match_layers
from tastemaker.models.deferred_loading import open_folder
from tastemaker.models.loading import has_config_metadata
from tastemaker.models.pretrained import load_state_dict
from tastemaker.models.restricted_unpickler import load_pickle, load_trainer_pickle
from tastemaker.models.sentencepiece_tokenizer import read_sentencepiece
from tastemaker.models.weight_files import read_weights
from tastemaker.preferences.alignment import STATE_FILE as ALIGNMENT_FILE
from tastemaker.preferences.alignment import AlignmentOptions, claim_directory
from tastemaker.preferences.interchange import read_rows
from tastemaker.preferences.session_results import describe_progress
from tastemaker.preferences.sessions import ORDER_FILE, SESSION_FILE, load_session, order_actively
from tastemaker.preferences.votes import read_votes
from tastemaker.report.run_record import read_evaluated_samples, read_run
from tastemaker.report.sample_sets import read_metadata as read_sample_metadata
from tastemaker.rewards.backbones.frozen_models import read_config
from tastemaker.rewards.backbones.open_clip import read_settings
from tastemaker.serving.chat_client import ChatClient
from tastemaker.serving.client import RewardClient, RewardServiceError, TemporaryError
from tastemaker.serving.protocol import JSON, NPZ, ScoreRequest, decode_request, encode_request
from tastemaker.training.checkpoint import read_state
from tastemaker.training.loggers.jsonl import truncate_after
from tastemaker.training.run_directory import flatten_settings
from tastemaker.training.run_lock import read_owner
from tastemaker.training.run_status import read_status
from tastemaker.training.safetensors_io import ShardedTensorReader, load_pickled
from tastemaker.training.sweep import read_results
from tastemaker.vlm import annotations
from tastemaker.vlm.question_answering import read_answers

Read = Callable[[Path], Any]
RNG = torch.Generator().manual_seed(0)
MAX_VALUES = 100_000  # of pixels in a request


@dataclass(frozen=True)
class Reader:
    """A function that reads a file called `file`, valid contents of it, and how many damaged ones to try."""

    name: str
    file: str
    read: Read
    valid: Sequence[bytes]
    slow_inputs: int  # in the slow set; the fast one has a few of them
    repair: Repair = repair_nothing


def to_json(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def save_with(function: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    function(file)
    return file.getvalue()


def make_image(kind: str, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
    return save_with(lambda file: Image.fromarray(noise).save(file, kind, **options))


def make_tar() -> bytes:
    def write(file: io.BytesIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, data in (("a.png", PNG), ("a.json", to_json({"caption": "a cat", "label": 1})), ("b.jpg", JPEG)):
                member = tarfile.TarInfo(f"folder/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    return save_with(write)


def make_request(image_format: Any) -> bytes:
    return encode_request(
        ScoreRequest(torch.rand(2, 1, 3, 4, 4, generator=RNG), ("a", "b"), ({}, {"n": 1})), image_format
    )[1]


def read_tar(path: Path) -> None:
    """Read as training does, which skips samples with errors of these classes and reports their messages."""
    source = open_tar_shards(path)
    for index in range(len(source)):
        for read in (source.label, source.caption, source.image):
            with suppress(*READ_ERRORS):
                read(index)


def read_tokens(path: Path) -> None:
    with suppress(*READ_ERRORS):
        read_npy(path)


def read_report(path: Path) -> None:
    """Read a run whose file was replaced, among files that are not."""
    run = next(folder for folder in path.parents if folder.name == "input")
    if path.name != "metrics.jsonl":
        (run / "metrics.jsonl").write_bytes(METRICS)
    (run / "samples").mkdir(exist_ok=True)
    (run / "samples" / "step-000001.png").write_bytes(PNG)
    record = read_run(run)
    assert all(isinstance(step, int) for name in record.metric_names() for step, _ in record.curve(name))
    assert record.steps >= 0 and record.total("samples") is not None and isinstance(record.held_out, tuple)
    for name in record.evaluations:
        read_evaluated_samples(record, name)


def read_adapter(path: Path) -> None:
    is_external_lora(path)
    match_layers(load_state_dict(path), LoraLayerNames({"net.0": "net.0"}, {}, "", None), path)


def read_checkpoint_state(path: Path) -> None:
    """Read a state that is sealed as it is, so that its contents are checked too."""
    sealed = encode_manifest(3, {path.name: compute_checksum(path)})
    (path.parent / "manifest.json").write_bytes(sealed)
    read_state(path.parent)


def read_sharded(path: Path) -> None:
    (path.parent / "model.safetensors").write_bytes(SAFETENSORS)
    load_state_dict(path.parent)


def read_shards(path: Path) -> None:
    reader = ShardedTensorReader([path])
    for name, shape in reader.shapes.items():
        reader.read(name, 0, shape[0] if shape else 1)


def read_embeddings(path: Path) -> None:
    store = ShardedEmbeddingStore(path.parent, {"encoder": "a"})
    assert len(store) >= len(store.prompts)


def read_vqa(path: Path) -> None:
    (path.parent / "a.json").write_bytes(to_json([CONVERSATION]))
    for row in read_mixture(path, 0):
        parse_examples(row)


def read_pixels(path: Path) -> None:
    """Read by each function that decodes images; one that succeeds does not hide the error of another."""
    for read in (read_image, image_size, lambda path: decode_square(path, path.name, 8)):
        with suppress(ImageError):
            read(path)
    decode_image(path.read_bytes(), path.name, MAX_VALUES)


TENSORS = {
    "net.0.lora_A.weight": torch.rand(2, 3, generator=RNG),
    "net.0.lora_B.weight": torch.rand(3, 2, generator=RNG),
    "n": torch.tensor(1),
}
SAFETENSORS = save(TENSORS, {"config": json.dumps({"width": 8})})
SHARD = {"prompts": ["a"], "class_ids": [1], "sums": [0.1, 0.2], "num_values": 4, "skipped": []}
LABEL = {"name": "n", "split": "s", "count": 3, "side": 8, "network": "x", "preprocessing": "p"}
MOMENTS = {"mean": torch.zeros(3), "covariance": torch.eye(3), "features": torch.rand(4, 3, generator=RNG)}
TORCH = save_with(lambda file: torch.save({"state_dict": TENSORS}, file))
FLAT = save_with(lambda file: torch.save(TENSORS, file))
PNG, JPEG, WEBP, GIF = make_image("PNG"), make_image("JPEG"), make_image("WEBP"), make_image("GIF")
ANIMATED = torch.rand(3, 3, 6, 6, generator=RNG)
NPY = save_with(lambda file: np.save(file, np.arange(12).reshape(2, 6)))
NPZ_FILE = save_with(
    lambda file: np.savez(file, arr_0=np.zeros((1, 2, 2, 3), np.uint8), mu=np.zeros(3), sigma=np.eye(3))
)
RECIPE = b"name: run\nsteps: 10\nmodel: {type: toy_flow, width: 8}\noptim:\n  lr: 3e-4\n  betas: [0.9, 0.99]\n# end\n"
METRICS = to_json({"step": 1, "loss/policy": 0.5, "samples": 8}, {"step": 2, "reward": 1e-3, "samples": 8})
GRID = {"file": "step-000001.png", "step": 1, "prompts": ["a"], "boxes": [[0, 0, 5, 5]], "size": [5, 5], "frames": 1}
GRID["scores"] = {"jpeg": 0.5}
STATE = {
    "format": 2,
    "step": 3,
    "form": "consolidated",
    "strategy": "replicated",
    "world": 1,
    "versions": {"torch": "2"},
}
STATE |= {"scaler": None, "extra": {"step": 3, "guard": []}}
SEALED = encode_manifest(3, {"weights.safetensors": FileChecksum(bytes=3, crc=4)})
SCORES = to_json({"prompt": "a", "file": "a.png", "index": 0, "seed": 1, "strict": 1, "reasons": ["b"]})
CONVERSATION = {
    "id": "1",
    "image": "a.json",
    "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}],
}
MANIFEST = {"autoencoder": "a", "data": "b", "images": "c", "num_images": 1, "image_size": 8, "views": 1}
MANIFEST |= {"shape": [4, 2, 2], "caption_source": "d", "class_names": ["a"], "shard_size": 1}
OPEN_CLIP = {"model_cfg": {"vision_cfg": {"width": 64, "head_width": 32}, "text_cfg": {"heads": 2}}}
GENEVAL = to_json({"tag": "single_object", "include": [{"class": "cat", "count": 1}], "prompt": "a photo of a cat"})
ANSWERS = to_json({"file": "a.png", "question": "b", "made": "c"})
EMBEDDINGS = to_json(
    {"made_by": {"encoder": "a"}, "shards": {"embeddings-0.safetensors": ["a", "b"]}, "negatives": [""]}
)
INDEX = to_json({"weight_map": {"a": "model.safetensors"}})
SPIECE = b"".join(
    b"\x0a%c\x0a%c%s\x15\x00\x00\x00\x00" % (len(x) + 7, len(x), x) for x in (b"<pad>", b"</s>", b"<unk>", b"cat")
)
SWEEP = to_json([{"name": "a", "settings": {"seed": "1"}, "status": "finished", "metrics": {"loss": 0.1}}])

READERS: tuple[Reader, ...] = (
    Reader("recipe", "recipe.yaml", merge_parents, [RECIPE], 4000),
    Reader("config of a run", "config.yaml", lambda path: flatten_settings(read_yaml_mapping(path)), [RECIPE], 4000),
    Reader(
        "YAML value", "value.yaml", lambda path: parse_yaml(decode(path), "value"), [b"{a: [1, 2]}", b'"\\u0061"'], 4000
    ),
    Reader("datasets file", "datasets.yaml", read_datasets_file, [b"faces: {type: image_collection, path: a}\n"], 2000),
    Reader(
        "JSON value", "value.json", lambda path: parse_json(decode(path), "value"), [SWEEP, b'"\\ud83d\\ude00"'], 5400
    ),
    Reader("JSON object", "config.json", read_json_object, [to_json(OPEN_CLIP)], 4500),
    Reader("JSON rows", "metadata.jsonl", lambda path: list(read_json_rows(path)), [METRICS, SCORES], 4500),
    Reader("metrics of a resumed run", "metrics.jsonl", lambda path: truncate_after(path, 1), [METRICS], 2000),
    Reader("report: metrics", "metrics.jsonl", read_report, [METRICS], 2000),
    Reader("report: grid", "samples/step-000001.json", read_report, [to_json(GRID)], 2000),
    Reader("report: config", "config.yaml", read_report, [RECIPE], 1000),
    Reader("report: scores", "evaluations/a/scores.jsonl", read_report, [SCORES], 1000),
    Reader("report: evaluation", "evaluations/a/report.json", read_report, [to_json({"scores": {}})], 1000),
    Reader("samples of a folder", "metadata.jsonl", lambda path: read_sample_metadata(path.parent), [SCORES], 2000),
    Reader("sweep", "sweep.json", lambda path: read_results(path.parent), [SWEEP], 2000),
    Reader("answers", "answers.jsonl", read_answers, [ANSWERS], 2000),
    Reader("state.json", "state.json", read_checkpoint_state, [to_json(STATE)], 4000),
    Reader("manifest.json", "manifest.json", lambda path: checkpoint_files.read_manifest(path.parent), [SEALED], 4000),
    Reader("prompts .txt", "prompts.txt", lambda path: PromptFile(path).load(0), [b"a cat\na dog\n"], 2000),
    Reader(
        "prompts .jsonl",
        "prompts.jsonl",
        lambda path: PromptFile(path).load(0),
        [to_json({"prompt": "a", "n": 1})],
        4000,
    ),
    Reader("prompts .csv", "prompts.csv", lambda path: PromptFile(path).load(0), [b'prompt,n\n"a, b",1\nc,2\n'], 4000),
    Reader("prompts .json", "prompts.json", lambda path: PromptFile(path).load(0), [to_json(["a", "b"])], 2000),
    Reader("conversations", "data.json", read_vqa, [to_json([CONVERSATION])], 2000),
    Reader(
        "mixture", "data.yaml", read_vqa, [b"datasets:\n- {json_path: a.json, sampling_strategy: 'first:2'}\n"], 1000
    ),
    Reader(
        "images of prompts", "data.jsonl", read_jsonl_entries, [to_json({"prompt": "a", "image": "data.jsonl"})], 2000
    ),
    Reader("caption map", "data.json", read_caption_map, [to_json({"a": "data.json"})], 1000),
    Reader(
        "caption pickle",
        "data.pkl",
        load_document,
        [pickle.dumps({"a": ["b", 1.5]}, 2), pickle.dumps({"a": "b"}, 4)],
        3000,
    ),
    Reader("GenEval metadata", "metadata.jsonl", read_metadata, [GENEVAL], 2000),
    Reader("PNG", "a.png", read_pixels, [PNG, encode_png(ANIMATED)], 2000, repair_png),
    Reader("JPEG", "a.jpg", read_pixels, [JPEG], 1500),
    Reader("WebP", "a.webp", read_pixels, [WEBP], 1500),
    Reader("GIF", "a.gif", read_pixels, [GIF, encode_gif(ANIMATED)], 1500),
    Reader("tar", "a.tar", read_tar, [make_tar()], 1500, repair_tar),
    Reader("tokens", "0.npy", read_tokens, [NPY], 2000),
    Reader("images .npz", "a.npz", read_npz, [NPZ_FILE], 1000),
    Reader("statistics .npz", "a.npz", read_adm_statistics, [NPZ_FILE], 1000),
    Reader("mask decoder .npz", "a.npz", annotations._read_tensors, [NPZ_FILE], 1000),
    Reader(
        "request npz",
        "body",
        lambda path: decode_request(NPZ, path.read_bytes(), MAX_VALUES),
        [make_request("npz")],
        2000,
    ),
    Reader(
        "request JSON",
        "body",
        lambda path: decode_request(JSON, path.read_bytes(), MAX_VALUES),
        [make_request("png")],
        2000,
    ),
    Reader("weights", "a.safetensors", read_weights, [SAFETENSORS], 1500),
    Reader("weights with metadata", "a.safetensors", has_config_metadata, [SAFETENSORS], 500),
    Reader("state dict", "a.safetensors", load_state_dict, [SAFETENSORS], 1500),
    Reader("checkpoint shard", "a.safetensors", read_shards, [SAFETENSORS], 1500),
    Reader("LoRA", "a.safetensors", read_adapter, [SAFETENSORS], 1500),
    Reader(
        "deferred weights",
        "diffusion_pytorch_model.safetensors",
        lambda path: open_folder(path.parent, torch.float32, ()),
        [SAFETENSORS],
        500,
    ),
    Reader("latent shard", "a.safetensors", read_shard, [save(TENSORS, {"samples": json.dumps(SHARD)})], 1500),
    Reader("latents.json", "latents.json", lambda path: read_manifest(path.parent), [to_json(MANIFEST)], 1000),
    Reader("reference", "a.safetensors", load_reference, [save(MOMENTS, {"label": json.dumps(LABEL)})], 1000),
    Reader("index of shards", "model.safetensors.index.json", read_sharded, [INDEX], 1500),
    Reader("torch file", "a.pt", load_pickle, [TORCH], 500),
    Reader("trainer's torch file", "a.pt", load_trainer_pickle, [TORCH], 300),
    Reader("optimizer's torch file", "a.pt", load_pickled, [FLAT], 300),
    Reader("embeddings", "embeddings.json", read_embeddings, [EMBEDDINGS], 1500),
    Reader(
        "open_clip settings",
        "open_clip_config.json",
        lambda path: read_settings(path.parent),
        [to_json(OPEN_CLIP)],
        1500,
    ),
    Reader(
        "model config", "config.json", lambda path: read_config(path.parent), [to_json({"model_type": "clip"})], 1000
    ),
    Reader("sentencepiece", "spiece.model", read_sentencepiece, [SPIECE], 3000),
)


VOTE = {"id": "0" * 26, "time": "2026-01-01", "voter": "a", "kind": "pair", "prompt": "b", "choice": 0}
VOTE |= {"samples": [{"file": "a.png", "seed": 1}, {"file": "b.png"}], "shown": [1, 0], "seconds": 1.5}
UNDO = {"id": "1" * 26, "time": "2026-01-01", "voter": "a", "kind": "undo", "undoes": "0" * 26}
SESSION = {"name": "a", "created": "2026-01-01", "kind": "pair", "blind": True, "target": 2, "order_seed": 0}
SESSION |= {
    "prompts": ["a", "b"],
    "seeds": [0],
    "sources": [{"label": "x", "model": "y"}, {"label": "z", "model": "y"}],
}
OWNER = {"host": "a", "pid": 7, "started": "2026-01-01", "machine": "b", "process": "c 1", "token": "d"}
STATUS = {"state": "running", "step": 1, "steps": 2, "reason": "", "time": "2026-01-01"}
CHOICES = {"choices": [{"message": {"content": "a"}}], "usage": {"total_tokens": 3}}


def read_order(path: Path) -> None:
    (path.parent / SESSION_FILE).write_bytes(to_json(SESSION))
    order_actively(load_session(path.parent))


def read_session(path: Path) -> None:
    describe_progress(load_session(path.parent))


def read_alignment(path: Path) -> None:
    (path.parent / "votes.jsonl").touch()
    with suppress(ConfigError):  # of another alignment, as which the valid one counts too
        claim_directory(AlignmentOptions(path.parent / "votes.jsonl", "b", path.parent))


def read_answer(client: RewardClient) -> Read:
    """Return a reader of the body of an answer, of which nothing but a retry or a refusal may come."""

    def read(path: Path) -> None:
        for status in (200, 400, 503):
            with suppress(TemporaryError, RewardServiceError):
                client._parse_response(status, path.read_bytes(), 0.0)

    return read


# Files of votes, of running processes, and of servers that a run asks.
READERS += (
    Reader("votes", "votes.jsonl", read_votes, [to_json(VOTE), to_json(VOTE, UNDO)], 800),
    Reader("session", SESSION_FILE, read_session, [to_json(SESSION)], 600),
    Reader("order of a session", ORDER_FILE, read_order, [to_json([[0, 1], [2, 3]])], 600),
    Reader("votes of others", "a.jsonl", lambda path: list(read_rows(path, "train")), [to_json({"a": "b"})], 600),
    Reader("alignment", ALIGNMENT_FILE, read_alignment, [to_json({"count": 1})], 300),
    Reader("run.lock", "run.lock", lambda path: read_owner(path.parent), [to_json(OWNER)], 800),
    Reader("status.json", "status.json", lambda path: read_status(path.parent), [to_json(STATUS)], 800),
    Reader("answer of a reward", "body", read_answer(RewardClient("http://a")), [to_json({"scores": [0.5]})], 800),
    Reader("answer of a judge", "body", read_answer(ChatClient("http://a")), [to_json(CHOICES)], 800),
)


def decode(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


def make_video(folder: Path) -> bytes:
    """An MP4, whose frames FFmpeg encodes."""
    save_image(torch.rand(4, 3, 16, 16, generator=RNG), folder / "valid.mp4")
    return (folder / "valid.mp4").read_bytes()
