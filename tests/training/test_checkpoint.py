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
from engine_toys import (
    assert_equal,
    build_engine,
    build_network,
    full_tensors,
    full_weights,
    subprocess_environment,
    train_step,
)
from fork_server import ForkedProcess
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.config.schema import CheckpointConfig, OptimConfig
from tastemaker.core.checkpoint_files import list_checkpoints
from tastemaker.core.lora import LoraWeights
from tastemaker.core.weights import FullWeights, Weights
from tastemaker.training import checkpoint, optimizer
from tastemaker.training.checkpoint import CheckpointError
from tastemaker.training.engine import Engine

FORMATS = pytest.mark.parametrize("format", ["consolidated", "sharded"])


def full_state(engine: Engine, weights: Weights) -> dict[str, Tensor]:
    result = full_tensors(dict(weights.trainable())) | full_tensors(engine.optimizer.state_dict())
    for name, snapshot in weights.snapshot_tensors().items():
        result |= {f"{name}/{key}": value for key, value in full_tensors(snapshot).items()}
    return result


def save_checkpoints(
    directory: Path, *steps: int, format: str = "consolidated", keep_last: int = 0
) -> tuple[Engine, FullWeights]:
    weights = full_weights("old")
    engine = build_engine(weights)
    train_step(engine, weights, 0)
    for step in steps:
        checkpoint.save(
            directory, step, engine, weights, {"step": step}, CheckpointConfig(format=format, keep_last=keep_last)
        )  # type: ignore[arg-type]
    return engine, weights


def checkpoint_names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def lora() -> LoraWeights:
    torch.manual_seed(0)
    return LoraWeights(build_network(), LoraConfig(r=2, target_modules=["up", "down"]), ("old",))


@FORMATS
@pytest.mark.parametrize("kind", ["full", "lora", "bf16", "fp16", "int8"])
def test_resume_is_exact(tmp_path: Path, format: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = {"precision": "bf16", "param_dtype": "bf16"}
    settings = {"bf16": bf16, "int8": bf16, "fp16": {"precision": "fp16"}}.get(kind, {})
    optim = OptimConfig(lr=1e-2, state_dtype="int8" if kind == "int8" else "fp32")
    monkeypatch.setattr(optimizer, "MIN_BLOCK", 1)  # so that the small network's tensors count as large

    def start() -> tuple[Engine, Weights]:
        weights = lora() if kind == "lora" else full_weights("old")
        return build_engine(weights, optim, **settings), weights

    engine, weights = start()
    for step in range(3):
        train_step(engine, weights, step)
        weights.update_snapshot("old", 0.5)
    config = CheckpointConfig(format=format)  # type: ignore[arg-type]
    path = checkpoint.save(tmp_path, 3, engine, weights, {"step": 3, "memory": {"a": [1.5, None]}}, config)
    for step in range(3, 6):
        train_step(engine, weights, step)
    resumed, resumed_weights = start()
    assert checkpoint.load(path, resumed, resumed_weights) == {"step": 3, "memory": {"a": [1.5, None]}}
    for step in range(3, 6):
        train_step(resumed, resumed_weights, step)
    assert_equal(full_state(resumed, resumed_weights), full_state(engine, weights))
    assert (resumed.scaler and resumed.scaler.state_dict()) == (engine.scaler and engine.scaler.state_dict())


def test_consolidated_format_is_plain_safetensors(tmp_path: Path) -> None:
    _, weights = save_checkpoints(tmp_path, 2)
    path = tmp_path / "checkpoints" / "step-000002"
    assert_equal(load_file(path / "weights.safetensors"), full_tensors(weights.trainable()))
    assert_equal(load_file(path / "snapshots" / "old.safetensors"), full_tensors(weights.snapshot_tensors()["old"]))
    assert checkpoint.latest_checkpoint(tmp_path) == path
    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "manifest.json"))
    assert manifest["files"]["weights.safetensors"]["bytes"] == (path / "weights.safetensors").stat().st_size
    assert state["versions"]["torch"] == torch.__version__


def test_partial_checkpoints_are_not_latest(tmp_path: Path) -> None:
    assert checkpoint.latest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "step-000005.partial").mkdir(parents=True)
    assert checkpoint.latest_checkpoint(tmp_path) is None


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000001.partial" / "weights").mkdir(parents=True)
    save_checkpoints(tmp_path, 2, 10, 9, 30, keep_last=2)
    assert checkpoint_names(tmp_path) == ["step-000010", "step-000030"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    engine, weights = save_checkpoints(tmp_path, 4)
    train_step(engine, weights, 4)
    path = checkpoint.save(tmp_path, 4, engine, weights, {}, CheckpointConfig())
    assert checkpoint_names(tmp_path) == ["step-000004"]
    assert_equal(load_file(path / "weights.safetensors"), full_tensors(weights.trainable()))


def test_old_checkpoint_counts_until_its_replacement_is_complete(tmp_path: Path) -> None:
    engine, weights = save_checkpoints(tmp_path, 4)
    path = tmp_path / "checkpoints" / "step-000004"
    path.rename(path.with_name("step-000004.old"))
    latest = checkpoint.latest_checkpoint(tmp_path)
    assert latest == path.with_name("step-000004.old")
    assert checkpoint.load(latest, engine, weights) == {"step": 4}
    save_checkpoints(tmp_path, 4)
    path.with_name("step-000004.old").mkdir()  # killed while it was deleted
    assert list_checkpoints(path.parent) == [path]
    save_checkpoints(tmp_path, 4, 5)
    assert checkpoint_names(tmp_path) == ["step-000004", "step-000005"]


@FORMATS
def test_truncated_file_is_named_with_the_older_checkpoint(tmp_path: Path, format: str) -> None:
    engine, weights = save_checkpoints(tmp_path, 1, 2, format=format)
    path = tmp_path / "checkpoints" / "step-000002"
    file = path / ("optimizer.safetensors" if format == "consolidated" else "optimizer/00000-of-00001.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 7)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, engine, weights)
    message = str(error.value)
    assert str(file) in message and str(size - 7) in message and str(size) in message
    assert "step-000001" in message


@pytest.mark.parametrize("damage", ["bit", "header", "missing", "state", "empty state"])
def test_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    engine, weights = save_checkpoints(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-000001"
    file = path / ("state.json" if "state" in damage else "weights.safetensors")
    content = bytearray(file.read_bytes())
    content[-5 if damage == "bit" else 3] ^= 0x55
    file.write_bytes(content if damage != "empty state" else b"{}")
    if damage == "missing":
        file.unlink()
    before = full_state(engine, weights)
    with pytest.raises(CheckpointError, match=rf"{file.name}.*\bno older\b.*TM841"):
        checkpoint.load(path, engine, weights)
    assert_equal(full_state(engine, weights), before)


def test_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    save_checkpoints(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step-000001"
    other = FullWeights(torch.nn.Linear(3, 3), ("old",))
    with pytest.raises(CheckpointError, match=r"'weight', 'bias'.*'blocks.* and 19 more.*TM256"):
        checkpoint.load(path, build_engine(other), other)
    extra_snapshot = full_weights("old", "ema")
    with pytest.raises(CheckpointError, match=r"'snapshots/ema'.*TM264"):
        checkpoint.load(path, build_engine(extra_snapshot), extra_snapshot)


def test_kill_during_save_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from engine_toys import build_engine, full_weights
        from tastemaker.config.schema import CheckpointConfig, OptimConfig
        from tastemaker.training import checkpoint, safetensors_io
        weights = full_weights("old")
        engine = build_engine(weights)
        checkpoint.save(Path(sys.argv[1]), 1, engine, weights, {"step": 1}, CheckpointConfig(keep_last=1))
        add, written = safetensors_io.SafetensorsWriter.add, []
        def slow(self, tensor):
            add(self, tensor)
            self.file.flush()
            written.append(tensor)
            print("writing", flush=True)
            time.sleep(600 if len(written) == 2 else 0)
        safetensors_io.SafetensorsWriter.add = slow
        checkpoint.save(Path(sys.argv[1]), 2, engine, weights, {"step": 2}, CheckpointConfig(keep_last=1))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with ForkedProcess(command, env=subprocess_environment()) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["writing\n"] * 2
        process.send_signal(signal.SIGKILL)
    assert checkpoint_names(tmp_path) == ["step-000001", "step-000002.partial"]
    latest = checkpoint.latest_checkpoint(tmp_path)
    weights = full_weights("old")
    assert latest is not None
    assert checkpoint.load(latest, build_engine(weights), weights) == {"step": 1}
    save_checkpoints(tmp_path, 3)
    assert checkpoint_names(tmp_path) == ["step-000001", "step-000003"]


KILLED_AT_EVERY_POINT = """
    import os, shutil, signal, sys
    from pathlib import Path
    from engine_toys import build_engine, full_weights
    from tastemaker.config.schema import CheckpointConfig
    from tastemaker.core.checkpoint_files import is_sound, latest_checkpoint, list_checkpoints
    from tastemaker.training import checkpoint, safetensors_io

    directory, weights = Path(sys.argv[1]), full_weights("old")
    engine = build_engine(weights)
    left = 0
    os.fsync = lambda handle: None  # a killed process loses nothing that it wrote, and syncing takes time

    def save(run, step):
        checkpoint.save(run, step, engine, weights, {"step": step}, CheckpointConfig(keep_last=2), best=True)

    def kill_before(function):
        def call(*arguments, **options):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call

    def save_and_die(run, step, point):
        global left
        left = point
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "symlink"):
            setattr(os, name, kill_before(getattr(os, name)))
        safetensors_io.SafetensorsWriter.checksum = kill_before(safetensors_io.SafetensorsWriter.checksum)
        save(run, step)
        os._exit(0)

    save(directory / "start", 1), save(directory / "start", 2)
    for step in (3, 2):  # a new checkpoint, after which one is pruned, and one that replaces the same step
        point, status = 0, None
        while status != 0:
            run = shutil.copytree(directory / "start", directory / f"{step}-{point}", symlinks=True)
            child = os.fork()
            if not child:
                save_and_die(run, step, point)
            status = os.waitpid(child, 0)[1]
            assert status in (0, signal.SIGKILL), status
            found = list_checkpoints(run / "checkpoints")
            assert all(map(is_sound, found)) and found, (step, point, found)
            assert latest_checkpoint(run).name[:11] in ("step-000002", f"step-{step:06d}"), (step, point, found)
            save(run, step)
            left_over = sorted(path.name for path in (run / "checkpoints").iterdir())
            names = ["best", "step-000001", "step-000002"] if step == 2 else ["best", "step-000002", "step-000003"]
            assert left_over == names, (step, point, left_over)
            shutil.rmtree(run)
            point += 1
        print(point, flush=True)
"""


@pytest.mark.slow
def test_kill_at_every_point_of_save_keeps_a_sound_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED_AT_EVERY_POINT), str(tmp_path)]
    with ForkedProcess(command, env=subprocess_environment()) as process:
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    points = [int(line) for line in output.split()]
    assert len(points) == 2 and min(points) > 20, points  # places where a child was killed, and one where it was not


def test_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=r"checkpoints.*TM828"):
        save_checkpoints(tmp_path, 1)


@FORMATS
def test_initialize_weights_sets_weights_and_snapshots(tmp_path: Path, format: str) -> None:
    _, trained = save_checkpoints(tmp_path, 1, format=format)
    for path in (tmp_path, tmp_path / "checkpoints" / "step-000001"):
        weights = full_weights("reference", seed=4)
        checkpoint.initialize_weights(path, weights)
        assert_equal(full_tensors(weights.trainable()), full_tensors(trained.trainable()))
        assert_equal(full_tensors(weights.snapshot_tensors()["reference"]), full_tensors(trained.trainable()))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin"])
def test_initialize_weights_reads_files(tmp_path: Path, suffix: str) -> None:
    file, trained, weights = tmp_path / f"net{suffix}", build_network(4), full_weights()
    tensors = trained.state_dict()  # including buffers
    save_file(tensors, file) if suffix == ".safetensors" else torch.save(tensors, file)
    checkpoint.initialize_weights(file, weights)
    assert_equal(full_tensors(weights.trainable()), full_tensors(dict(trained.named_parameters())))


class MaliciousPickle:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("pwned",)


def test_pickle_with_code_is_refused_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"proj_in.weight": MaliciousPickle()}, tmp_path / "bad.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(MaliciousPickle()))
    for name in ("bad.pt", "raw.pt"):
        with pytest.raises(CheckpointError, match=r"safetensors.*TM292"):
            checkpoint.initialize_weights(tmp_path / name, full_weights())
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("absent.pt", None, "does not exist"),
        ("empty.pt", b"", r"torch\.save"),
        ("noise.pt", b"PK\x03\x04 no archive", r"torch\.save"),
        ("noise.safetensors", b"nothing of the kind", "safetensors file"),
        ("net.ckpt", b"", r"'\.ckpt'"),
    ],
)
def test_invalid_weights_file_is_refused(tmp_path: Path, name: str, content: bytes, fragment: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=fragment):
        checkpoint.initialize_weights(tmp_path / name, full_weights())


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tensors = build_network().state_dict() | {"proj_in.weight": torch.zeros(5, 4)}
    save_file(tensors, tmp_path / "net.safetensors")
    with pytest.raises(CheckpointError, match=r"'proj_in\.weight'.*\[5, 4\].*\[5, 3\].*TM257"):
        checkpoint.initialize_weights(tmp_path / "net.safetensors", full_weights())
    torch.save({"state_dict": build_network().state_dict()}, tmp_path / "net.pt")
    with pytest.raises(CheckpointError, match=r"state_dict.*TM294"):
        checkpoint.initialize_weights(tmp_path / "net.pt", full_weights())
