"""Sealed checkpoints: no changed file is used, and a run continues from the newest sound checkpoint."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_toys import assert_equal, build_engine, full_tensors, full_weights, train_step
from safetensors.torch import load_file, save_file

from tastemaker.cli import main
from tastemaker.cli.options import EXIT_FAILURE, EXIT_USAGE
from tastemaker.config.schema import CheckpointConfig
from tastemaker.core import checkpoint_files
from tastemaker.core.checkpoint_files import FileChecksum, read_manifest, write_manifest, write_synced
from tastemaker.core.errors import CheckpointError
from tastemaker.models import weight_files
from tastemaker.rewards.discriminator import discriminator_file
from tastemaker.training import checkpoint
from tastemaker.training.run import GeneratorState

SETTINGS = ("ema_decay=0.5", "batch.prompts=4", "checkpoint.every=2", "checkpoint.keep_last=3", "sample.every=2")
GUARD = (
    "guard.every=2",
    "guard.prompts=4",
    "guard.samples_per_prompt=2",
    "rewards.held={type: brightness, weight: 0}",
)


def run_command(*arguments: str) -> int:
    try:
        main([*arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints of steps 4, 6 and 8."""
    output = tmp_path_factory.mktemp("trained")
    command = ("train", "ddpo-toy-epsilon", f"output_dir={output}", "name=run", "steps=8", *SETTINGS, *GUARD)
    assert run_command(*command) == 0
    return output / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "a run", symlinks=True))


def edit_step(path: Path, step: int) -> None:
    """Edit the step as a user might, to train fewer steps."""
    state = json.loads((path / "state.json").read_text())
    state["step"] = state["extra"]["step"] = step
    (path / "state.json").write_text(json.dumps(state, indent=1))


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in row.items() if not k.startswith("time/") and "per_second" not in k} for row in rows]


def test_edited_step_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_step(run / "checkpoints/step-000008", 10)
    assert run_command("train", str(run), "steps=10") == EXIT_FAILURE
    message = capsys.readouterr().err
    assert "state.json" in message and "TM841" in message
    assert not (run / "checkpoints/step-000010").exists()


def test_recommended_command_repairs_a_run_with_a_damaged_checkpoint(
    run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last two checkpoints are damaged: the advice names step 4, and following it repeats the run to the bit."""
    for step, name in ((6, "optimizer.safetensors"), (8, "state.json")):
        file = run / f"checkpoints/step-{step:06d}" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    damaged = (run / "checkpoints/step-000008/state.json").read_bytes()
    assert run_command("train", str(run), "steps=8") == EXIT_FAILURE
    advice = re.search("`(tastemaker train .*?)`", capsys.readouterr().err)
    assert advice is not None
    arguments = shlex.split(advice[1])[1:]
    assert arguments == ["train", str(run), "--from-step", "4"]
    assert run_command(*arguments) == 0
    names = sorted(path.name for path in (run / "checkpoints").glob("step*"))
    assert names == ["step-000004", "step-000006", "step-000006.aside", "step-000008", "step-000008.aside"]
    assert (run / "checkpoints/step-000008.aside/state.json").read_bytes() == damaged
    for file in (trained / "checkpoints/step-000008").rglob("*.safetensors"):
        assert_equal(load_file(run / file.relative_to(trained)), load_file(file))
    states = [json.loads((each / "checkpoints/step-000008/state.json").read_text()) for each in (run, trained)]
    assert states[0] == states[1]
    assert read_rows(run) == read_rows(trained)
    samples = sorted(path.name for path in (run / "samples").glob("step-*"))
    assert samples == sorted(path.name for path in (trained / "samples").glob("step-*"))
    assert all((run / "samples" / name).read_bytes() == (trained / "samples" / name).read_bytes() for name in samples)
    best = [(each / "checkpoints/best").resolve().name for each in (run, trained)]
    assert best[0] == best[1]
    # A second time, the older copies keep their names; pruning counts neither.
    assert run_command("train", str(run), "--from-step", "6") == 0
    assert sorted(path.name for path in (run / "checkpoints").glob("*.aside*")) == [
        "step-000006.aside",
        "step-000008.aside",
        "step-000008.aside-2",
    ]


def test_from_step_needs_a_checkpoint_of_that_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("train", str(run), "--from-step", "5") == EXIT_FAILURE
    assert "4, 6, 8" in capsys.readouterr().err
    checkpoint_dir = str(run / "checkpoints/step-000004")
    assert run_command("train", str(run), "--from-step", "4", "--resume", checkpoint_dir) == EXIT_USAGE
    assert "TM1122" in capsys.readouterr().err


def flip_byte(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def save_checkpoint(directory: Path) -> Path:
    weights = full_weights("ema", "buffers", "discriminator")
    engine = build_engine(weights, precision="fp16")
    train_step(engine, weights, 0)
    extra = {"step": 3, "memory": {"rewards": {"a": [0.5]}}, "guard": []}
    return checkpoint.save(directory, 3, engine, weights, extra, CheckpointConfig())


READERS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "resume": (
        lambda path: checkpoint.load(path, build_engine(w := full_weights("ema", "buffers", "discriminator")), w),
        {"state.json", "weights.safetensors", "optimizer.safetensors", "ema.safetensors", "buffers.safetensors"},
    ),
    "init from": (lambda path: checkpoint.initialize_weights(path, full_weights()), {"weights.safetensors"}),
    "init from ema": (
        lambda path: checkpoint.initialize_weights(path, full_weights(), "snapshots/ema"),
        {"ema.safetensors"},
    ),
    "report": (checkpoint.read_state, {"state.json"}),
    "weights of a run": (
        lambda path: weight_files.read_weights(path.parents[1]),
        {"ema.safetensors", "buffers.safetensors"},
    ),
    "discriminator": (lambda path: discriminator_file(path.parents[1]), {"discriminator.safetensors"}),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_notices_a_flipped_byte_in_every_file_it_reads(tmp_path: Path, reader: str) -> None:
    path, rng = save_checkpoint(tmp_path), random.Random(reader)
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    read, names = READERS[reader]
    (path / "notes.txt").write_text("files that the manifest does not list are ignored")
    read(path)
    for file in [path / "manifest.json", *(file for file in path.rglob("*") if file.name in names)]:
        content = file.read_bytes()
        for _ in range(5):
            flip_byte(file, rng)
            with pytest.raises(CheckpointError):
                read(path)
            file.write_bytes(content)
    assert read_manifest(path).step == 3


def reseal(path: Path, state: Any) -> None:
    """Replace state.json and the manifest, as a program with a bug would write them."""
    content = state if isinstance(state, bytes) else json.dumps(state).encode()
    files = read_manifest(path).files
    write_manifest(path, 3, {**files, "state.json": write_synced(path / "state.json", content)})


def test_sealed_but_wrong_state_is_one_message(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path)
    state = json.loads((path / "state.json").read_text())
    load = lambda: checkpoint.load(path, *start(), GeneratorState)

    def start() -> tuple[Any, Any]:
        weights = full_weights("ema", "buffers", "discriminator")
        return build_engine(weights, precision="fp16"), weights

    load()
    wrong: dict[str, Any] = {f"without {key}": {k: x for k, x in state.items() if k != key} for key in state}
    wrong |= {f"without extra.{key}": {**state, "extra": _without(state["extra"], key)} for key in ("step", "memory")}
    wrong |= {
        "step as text": {**state, "step": "3"},
        "another step": {**state, "step": 4},
        "another extra step": {**state, "extra": {**state["extra"], "step": 4}},
        "negative step": {**state, "step": -3},
        "boolean step": {**state, "step": True},
        "list": [state],
        "scaler": {**state, "scaler": {"scale": "high", "good": 0, "skipped": 0}},
        "guard": {**state, "extra": {**state["extra"], "guard": [{"step": 1}]}},
        "deep": b"[" * 200_000,
        "deep value": b'{"extra": ' + b'{"a": ' * 100_000,
        "digits": b'{"step": ' + b"9" * 10_000 + b"}",
        "no text": b"\xff\xfe\x00",
        "empty": b"",
    }
    for name, content in wrong.items():
        reseal(path, content)
        try:
            load()
        except CheckpointError as error:
            assert re.search(r"state\.json.*TM841", str(error)), name
        else:
            pytest.fail(name)
    reseal(path, state)
    load()


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: x for k, x in state.items() if k != key}


def test_manifest_cannot_name_files_outside_and_old_or_renamed_checkpoints_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path)
    good = (path / "manifest.json").read_bytes()
    for name in ("../secret", "/etc/passwd", "a/../../b", "", "./state.json"):
        write_manifest(path, 3, {name: FileChecksum(bytes=0, crc=0)})
        with pytest.raises(CheckpointError, match="TM1111"):
            read_manifest(path)
    (path / "manifest.json").write_bytes(good.replace(b'"format": 2', b'"format": 3'))
    with pytest.raises(CheckpointError, match=r"format 3.*TM259"):
        read_manifest(path)
    (path / "manifest.json").write_bytes(good)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "MAX_MANIFEST_BYTES", 10)
        with pytest.raises(CheckpointError, match="TM1110"):
            read_manifest(path)
    renamed = path.rename(path.with_name("step-000009"))
    with pytest.raises(CheckpointError, match=r"step 9.*step 3.*TM1114"):
        read_manifest(renamed)
    elsewhere = renamed.rename(tmp_path / "copy")
    assert read_manifest(elsewhere).step == 3
    (elsewhere / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="TM1112"):
        read_manifest(elsewhere)
    (elsewhere / "state.json").write_text('{"format": 1, "step": 3}')
    with pytest.raises(CheckpointError, match=r"format 1.*TM1115"):
        read_manifest(elsewhere)


def test_nothing_is_restored_from_a_checkpoint_that_does_not_match(tmp_path: Path) -> None:
    """Here the weights match and the optimizer does not; the weights must not be restored either."""
    path = save_checkpoint(tmp_path)
    weights = full_weights("ema", "buffers", "discriminator", seed=7)
    engine, before = build_engine(weights), {}
    before = {key: x.clone() for key, x in full_tensors(weights.trainable()).items()}
    optimizer = load_file(path / "optimizer.safetensors")
    optimizer.pop(next(iter(optimizer)))
    save_file(optimizer, path / "optimizer.safetensors")
    files = {name: checkpoint_files.compute_checksum(path / name) for name in read_manifest(path).files}
    write_manifest(path, 3, files)
    with pytest.raises(CheckpointError, match="TM256"):
        checkpoint.load(path, engine, weights)
    assert_equal(full_tensors(weights.trainable()), before)
