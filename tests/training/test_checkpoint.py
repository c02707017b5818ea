"""Checkpoints on one process: atomic, complete, refused when damaged."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from engine_toys import environment, equal, full_weights, learn, network, ready, whole
from fork_server import ForkedProcess
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.config.schema import CheckpointConfig, OptimConfig
from tastemaker.core.lora import LoraWeights
from tastemaker.core.weights import FullWeights, Weights
from tastemaker.training import checkpoint, optimizer
from tastemaker.training.checkpoint import CheckpointError
from tastemaker.training.engine import Engine

FORMS = pytest.mark.parametrize("form", ["consolidated", "sharded"])


def everything(engine: Engine, weights: Weights) -> dict[str, Tensor]:
    result = whole(dict(weights.trainable())) | whole(engine.optimizer.state_dict())
    for name, snapshot in weights.snapshot_tensors().items():
        result |= {f"{name}/{key}": value for key, value in whole(snapshot).items()}
    return result


def saved(directory: Path, *steps: int, form: str = "consolidated", keep: int = 0) -> tuple[Engine, FullWeights]:
    weights = full_weights("old")
    engine = ready(weights)
    learn(engine, weights, 0)
    for step in steps:
        checkpoint.save(directory, step, engine, weights, {"step": step}, CheckpointConfig(format=form, keep_last=keep))  # type: ignore[arg-type]
    return engine, weights


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def lora() -> LoraWeights:
    torch.manual_seed(0)
    return LoraWeights(network(), LoraConfig(r=2, target_modules=["up", "down"]), ("old",))


@FORMS
@pytest.mark.parametrize("kind", ["full", "lora", "bf16", "fp16", "int8"])
def test_resume_is_exact(tmp_path: Path, form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"precision": "bf16", "param_dtype": "bf16"}
    settings = {"bf16": few, "int8": few, "fp16": {"precision": "fp16"}}.get(kind, {})
    optim = OptimConfig(lr=1e-2, state_dtype="int8" if kind == "int8" else "fp32")
    monkeypatch.setattr(optimizer, "MIN_BLOCK", 1)  # so that the small network's tensors count as large

    def start() -> tuple[Engine, Weights]:
        weights = lora() if kind == "lora" else full_weights("old")
        return ready(weights, optim, **settings), weights

    engine, weights = start()
    for step in range(3):
        learn(engine, weights, step)
        weights.update_snapshot("old", 0.5)
    config = CheckpointConfig(format=form)  # type: ignore[arg-type]
    path = checkpoint.save(tmp_path, 3, engine, weights, {"step": 3, "memory": {"a": [1.5, None]}}, config)
    for step in range(3, 6):
        learn(engine, weights, step)
    again, theirs = start()
    assert checkpoint.load(path, again, theirs) == {"step": 3, "memory": {"a": [1.5, None]}}
    for step in range(3, 6):
        learn(again, theirs, step)
    equal(everything(again, theirs), everything(engine, weights))
    assert (again.scaler and again.scaler.state_dict()) == (engine.scaler and engine.scaler.state_dict())


def test_consolidated_format_is_plain_safetensors(tmp_path: Path) -> None:
    _, weights = saved(tmp_path, 2)
    path = tmp_path / "checkpoints" / "step-000002"
    equal(load_file(path / "weights.safetensors"), whole(weights.trainable()))
    equal(load_file(path / "snapshots" / "old.safetensors"), whole(weights.snapshot_tensors()["old"]))
    assert checkpoint.latest_checkpoint(tmp_path) == path
    state = json.loads((path / "state.json").read_text())
    assert state["files"]["weights.safetensors"]["bytes"] == (path / "weights.safetensors").stat().st_size
    assert state["versions"]["torch"] == torch.__version__


def test_partial_checkpoints_are_not_latest(tmp_path: Path) -> None:
    assert checkpoint.latest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "step-000005.partial").mkdir(parents=True)
    assert checkpoint.latest_checkpoint(tmp_path) is None


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000001.partial" / "weights").mkdir(parents=True)
    saved(tmp_path, 2, 10, 9, 30, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000030"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    engine, weights = saved(tmp_path, 4)
    learn(engine, weights, 4)
    path = checkpoint.save(tmp_path, 4, engine, weights, {}, CheckpointConfig())
    assert names(tmp_path) == ["step-000004"]
    equal(load_file(path / "weights.safetensors"), whole(weights.trainable()))


def test_old_checkpoint_counts_until_its_replacement_is_complete(tmp_path: Path) -> None:
    engine, weights = saved(tmp_path, 4)
    path = tmp_path / "checkpoints" / "step-000004"
    path.rename(path.with_name("step-000004.old"))
    result = checkpoint.latest_checkpoint(tmp_path)
    assert result == path.with_name("step-000004.old")
    assert checkpoint.load(result, engine, weights) == {"step": 4}
    saved(tmp_path, 4, 5)
    assert names(tmp_path) == ["step-000004", "step-000005"]


@FORMS
def test_truncated_file_is_named_with_the_older_checkpoint(tmp_path: Path, form: str) -> None:
    engine, weights = saved(tmp_path, 1, 2, form=form)
    path = tmp_path / "checkpoints" / "step-000002"
    file = path / ("optimizer.safetensors" if form == "consolidated" else "optimizer/00000-of-00001.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 7)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, engine, weights)
    assert f"{file} has {size - 7} bytes instead of {size}" in str(caught.value)
    assert "resume from the older checkpoint" in str(caught.value)
    assert "step-000001" in str(caught.value)


@pytest.mark.parametrize("damage", ["bit", "header", "missing", "state", "empty state"])
def test_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    engine, weights = saved(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-000001"
    file = path / ("state.json" if "state" in damage else "weights.safetensors")
    content = bytearray(file.read_bytes())
    content[-5 if damage == "bit" else 3] ^= 0x55
    file.write_bytes(content if damage != "empty state" else b"{}")
    if damage == "missing":
        file.unlink()
    before = everything(engine, weights)
    with pytest.raises(CheckpointError, match=f"{file.name}.*no older checkpoint"):
        checkpoint.load(path, engine, weights)
    equal(everything(engine, weights), before)


def test_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-000001"
    other = FullWeights(torch.nn.Linear(3, 3), ("old",))
    with pytest.raises(CheckpointError, match=r"'weight', 'bias'.*'blocks.* and 19 more"):
        checkpoint.load(path, ready(other), other)
    narrow = full_weights("old", "ema")
    with pytest.raises(CheckpointError, match="'snapshots/ema'"):
        checkpoint.load(path, ready(narrow), narrow)


def test_kill_during_save_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from engine_toys import full_weights, ready
        from tastemaker.config.schema import CheckpointConfig, OptimConfig
        from tastemaker.training import checkpoint, safetensors_io
        weights = full_weights("old")
        engine = ready(weights)
        checkpoint.save(Path(sys.argv[1]), 1, engine, weights, {"step": 1}, CheckpointConfig(keep_last=1))
        add = safetensors_io.SafetensorsWriter.add
        def slow(self, tensor):
            add(self, tensor)
            self.file.flush()
            print("writing", flush=True)
            time.sleep(0.5)
        safetensors_io.SafetensorsWriter.add = slow
        checkpoint.save(Path(sys.argv[1]), 2, engine, weights, {"step": 2}, CheckpointConfig(keep_last=1))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with ForkedProcess(command, env=environment()) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["writing\n"] * 2
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == ["step-000001", "step-000002.partial"]
    result = checkpoint.latest_checkpoint(tmp_path)
    weights = full_weights("old")
    assert result is not None
    assert checkpoint.load(result, ready(weights), weights) == {"step": 1}
    saved(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"no checkpoint was saved"):
        saved(tmp_path, 1)


@FORMS
def test_initialize_weights_sets_weights_and_snapshots(tmp_path: Path, form: str) -> None:
    _, trained = saved(tmp_path, 1, form=form)
    for path in (tmp_path, tmp_path / "checkpoints" / "step-000001"):
        weights = full_weights("reference", seed=4)
        checkpoint.initialize_weights(path, weights)
        equal(whole(weights.trainable()), whole(trained.trainable()))
        equal(whole(weights.snapshot_tensors()["reference"]), whole(trained.trainable()))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin"])
def test_initialize_weights_reads_files(tmp_path: Path, suffix: str) -> None:
    file, theirs, weights = tmp_path / f"net{suffix}", network(4), full_weights()
    tensors = theirs.state_dict()  # with its buffer, which is no parameter
    save_file(tensors, file) if suffix == ".safetensors" else torch.save(tensors, file)
    checkpoint.initialize_weights(file, weights)
    equal(whole(weights.trainable()), whole(dict(theirs.named_parameters())))


class Malice:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("pwned",)


def test_pickle_with_code_is_refused_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"enter.weight": Malice()}, tmp_path / "bad.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Malice()))
    for name in ("bad.pt", "raw.pt"):
        with pytest.raises(CheckpointError, match=r"safetensors"):
            checkpoint.initialize_weights(tmp_path / name, full_weights())
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.pt", None, "does not exist; expected a checkpoint directory"),
        ("empty.pt", b"", "is not a file of torch.save, or damaged"),
        ("noise.pt", b"PK\x03\x04 no archive", "is not a file of torch.save, or damaged"),
        ("noise.safetensors", b"nothing of the kind", "is not a readable safetensors file"),
        ("net.ckpt", b"", "ends in '.ckpt'; expected"),
    ],
)
def test_invalid_weights_file_is_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.initialize_weights(tmp_path / name, full_weights())


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tensors = network().state_dict() | {"enter.weight": torch.zeros(5, 4)}
    save_file(tensors, tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match=r"'enter.weight' has shape \[5, 4\], expected \[5, 3\]"):
        checkpoint.initialize_weights(tmp_path / "net.safetensors", full_weights())
    torch.save({"state_dict": network().state_dict()}, tmp_path / "net.pt")
    with pytest.raises(CheckpointError, match="state_dict"):
        checkpoint.initialize_weights(tmp_path / "net.pt", full_weights())
