"""The files of a checkpoint: which directories are checkpoints, and the manifest that seals all files of one.

`manifest.json` is written last. It lists size and CRC of every other file and a digest of itself, so that every reader
notices a missing, truncated or changed file. It protects against accidents, not against forgery. Files that it does not
list are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from .errors import CheckpointError, DamagedCheckpointError

FORMAT = 2  # 1 had no manifest
MANIFEST_FILE, STATE_FILE = "manifest.json", "state.json"
CHECKPOINT_NAME = re.compile(r"step-(\d+)(\.old)?")  # .old: renamed while the same step is saved again
ASIDE_SUFFIX = ".aside"  # of checkpoints that `train --from-step` replaced; no command reads them
MAX_MANIFEST_BYTES = 1 << 26  # the files of thousands of ranks
MAX_STATE_BYTES = 1 << 30  # the reward histories of a million prompts
BLOCK_BYTES = 1 << 22
Model = TypeVar("Model", bound=BaseModel)


class SealedModel(BaseModel):
    """A JSON object of a checkpoint: exactly these keys, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileChecksum(SealedModel):
    """Size and CRC of a file, to detect truncation and damage."""

    bytes: Annotated[int, Field(ge=0)]
    crc: Annotated[int, Field(ge=0, lt=1 << 32)]


def _require_inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
        raise ValueError("expected the name of a file inside the checkpoint [TM1121]")
    return name


class Manifest(SealedModel):
    """The contents of manifest.json."""

    format: int
    step: Annotated[int, Field(ge=0)]
    files: dict[Annotated[str, AfterValidator(_require_inside)], FileChecksum]
    digest: str

    def group_files(self, group: str) -> list[str]:
        """Return the names of the files of a group of tensors, in the order of its shards."""
        consolidated, folder = f"{group}.safetensors", f"{group}/"
        return [name for name in sorted(self.files) if name == consolidated or name.startswith(folder)]

    @property
    def snapshots(self) -> list[str]:
        """The names of the snapshots, such as ema."""
        parts = (PurePosixPath(name).parts for name in self.files)
        return sorted({part[1].removesuffix(".safetensors") for part in parts if part[0] == "snapshots"})


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first; a replaced one only until its replacement is there."""
    found = {path.name: path for path in folder.glob("step-*") if CHECKPOINT_NAME.fullmatch(path.name)}
    complete = [path for name, path in found.items() if not name.endswith(".old") or path.stem not in found]
    return sorted(complete, key=lambda path: int(path.name.removesuffix(".old").removeprefix("step-")))


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in the directory of a run."""
    checkpoints = list_checkpoints(directory / "checkpoints")
    return checkpoints[-1] if checkpoints else None


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, of this format or an older one."""
    return (path / MANIFEST_FILE).is_file() or (path / STATE_FILE).is_file()


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint, also through the link `best`; None if it was renamed."""
    match = CHECKPOINT_NAME.fullmatch(path.name) or CHECKPOINT_NAME.fullmatch(path.resolve().name)
    return int(match[1]) if match else None


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file of a checkpoint; one that is too large, nested too deeply or no JSON is a damaged checkpoint."""
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise DamagedCheckpointError(f"{path} has {size} bytes, expected at most {max_bytes} [TM1110]")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise DamagedCheckpointError(
            f"{path} is missing or damaged ({type(error).__name__}: {error!s:.200}) [TM260]"
        ) from error


def validate_contents(schema: type[Model], data: Any, path: Path) -> Model:
    """Return the contents of a file as `schema`; a checkpoint whose file has other keys or types is damaged."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "contents"
        raise DamagedCheckpointError(f"{path} is damaged: {place:.200}: {first['msg']} [TM1111]") from error


def encode_manifest(step: int, files: Mapping[str, FileChecksum]) -> bytes:
    """Return the only valid bytes of a manifest with these contents; its digest is a SHA-256 of them."""
    content = {"format": FORMAT, "step": step, "files": {name: x.model_dump() for name, x in files.items()}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "digest": digest}, sort_keys=True, indent=1).encode()


def write_manifest(path: Path, step: int, files: Mapping[str, FileChecksum]) -> None:
    """Seal a checkpoint whose other files are complete, and sync the manifest to disk."""
    write_synced(path / MANIFEST_FILE, encode_manifest(step, files))


def write_synced(path: Path, content: bytes) -> FileChecksum:
    """Write a file, sync it to disk and return its checksum."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(bytes=len(content), crc=zlib.crc32(content))


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint."""
    file = path / MANIFEST_FILE
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a checkpoint directory; give a directory such as checkpoints/step-000100 of a run [TM258]"
        )
    if not file.is_file():
        _refuse_first_format(path)
        raise DamagedCheckpointError(f"{file} is missing, so the checkpoint is incomplete [TM1112]")
    data = read_json(file, MAX_MANIFEST_BYTES)
    if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
        raise CheckpointError(
            f"{file} has format {data['format']}, but this version reads format {FORMAT}; use the version of "
            "tastemaker that wrote it [TM259]"
        )
    manifest = validate_contents(Manifest, data, file)
    if file.read_bytes() != encode_manifest(manifest.step, manifest.files):
        raise DamagedCheckpointError(f"{file} was changed after it was saved: its digest differs [TM1113]")
    if manifest.step != (named := checkpoint_step(path)) and named is not None:
        raise DamagedCheckpointError(
            f"{path} is named after step {named}, but holds step {manifest.step}, so it was renamed [TM1114]"
        )
    return manifest


def _refuse_first_format(path: Path) -> None:
    """Refuse a checkpoint of format 1, which had no manifest, as such rather than as a damaged one."""
    file = path / STATE_FILE
    try:
        data = read_json(file, MAX_STATE_BYTES)
    except DamagedCheckpointError:
        return
    if isinstance(data, dict) and data.get("format") == 1:
        raise CheckpointError(
            f"{file} has format 1, whose files are not sealed by a {MANIFEST_FILE}, but this version reads format "
            f"{FORMAT}; train the run again, or use the version of tastemaker that wrote it [TM1115]"
        )


def compute_checksum(path: Path) -> FileChecksum:
    """Return the size and CRC of a file; one that the disk cannot read is a damaged checkpoint."""
    crc, count, buffer = 0, 0, memoryview(bytearray(BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                crc, count = zlib.crc32(buffer[:size], crc), count + size
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror or error}) [TM1119]") from error
    return FileChecksum(bytes=count, crc=crc)


def verify_files(
    path: Path, manifest: Manifest, names: Collection[str] | None = None, *, rank: int = 0, world_size: int = 1
) -> None:
    """Refuse a checkpoint with a missing, truncated or changed file among `names`; by default among all files.

    Each of several ranks reads a share of the files, and looks at the sizes of all.
    """
    for number, (name, expected) in enumerate(manifest.files.items()):
        file = path / name
        if names is not None and name not in names:
            continue
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing [TM261]")
        if (size := file.stat().st_size) != expected.bytes:
            raise DamagedCheckpointError(
                f"{file} has {size} bytes instead of {expected.bytes}, so it is truncated or damaged [TM262]"
            )
        if number % world_size == rank and compute_checksum(file) != expected:
            raise DamagedCheckpointError(
                f"{file} has another checksum than when it was saved, so it is damaged [TM263]"
            )


def is_sound(path: Path) -> bool:
    """Whether all files of a checkpoint are as they were saved. Reads all of them."""
    try:
        verify_files(path, read_manifest(path))
    except (CheckpointError, OSError):
        return False
    return True


def explain_damage(error: DamagedCheckpointError, path: Path) -> str:
    """Return the message for a damaged checkpoint: what is damaged, and how to continue without it."""
    return f"{error}; {suggest_fallback(path)} [TM841]"


def suggest_fallback(path: Path) -> str:
    """Suggest what to do about a damaged checkpoint: continue from the newest one before it that is sound."""
    path = path.resolve() if path.is_symlink() else path
    step = checkpoint_step(path)
    older = [each for each in list_checkpoints(path.parent) if step is not None and (checkpoint_step(each) or 0) < step]
    sound = next((each for each in reversed(older) if is_sound(each)), None)
    if sound is None:
        return (
            f"no older checkpoint in this folder is sound, so restore {path.name} from a copy, or delete it and start "
            "over"
        )
    command = shlex.join(["tastemaker", "train", str(path.parent.parent), "--from-step", str(checkpoint_step(sound))])
    return (
        f"continue the run from its newest sound checkpoint with `{command}`, which keeps the damaged one as "
        f"{path.name}{ASIDE_SUFFIX}, or start another run from it with --resume {sound}"
    )
