"""Checkpoints that are written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..core.objective import Comm
from . import checkpoint
from .checkpoint import StagedCheckpoint, StagedFile
from .safetensors_io import TensorHeader


class AsyncCheckpointWriter:
    """Writes one checkpoint at a time. Training is blocked only while the tensors are copied to host memory.

    The copies take as much host memory as a checkpoint takes on disk; they are allocated once.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm  # of the thread alone: its collectives must not mix with those of the training
        self.copies: dict[tuple[str, str], Tensor] = {}  # by file and tensor
        self.thread: threading.Thread | None = None
        self.saved: Path | None = None
        self.error: BaseException | None = None

    def start(self, staged: StagedCheckpoint) -> None:
        """Copy the tensors and write them in a thread. Every rank must call this, after `finish`."""
        host = replace(staged, files=[self._copy_to_host(file) for file in staged.files])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.thread = threading.Thread(target=self._write, args=(host,), name="checkpoint")
        self.thread.start()

    def _copy_to_host(self, file: StagedFile) -> StagedFile:
        values: list[Tensor] = []
        for (name, header), value in zip(file.headers.items(), file.values, strict=True):
            if file.writes:  # another rank only takes part in gathering the value
                key = file.name, name
                if key not in self.copies:
                    self.copies[key] = torch.empty(header.shape, dtype=header.dtype, pin_memory=value.is_cuda)
                values.append(self.copies[key].copy_(value.detach(), non_blocking=True))
        headers: Mapping[str, TensorHeader] = file.headers if file.writes else {}
        return replace(file, headers=headers, values=values)

    def _write(self, staged: StagedCheckpoint) -> None:
        try:
            self.saved = checkpoint.write(staged, self.comm)
        except BaseException as error:  # raised again by `finish`, in the thread that trains
            self.error = error

    def poll(self) -> Path | None:
        """Return the checkpoint that was completed since the last call, without waiting."""
        if self.thread is None or self.thread.is_alive() or self.error is not None:
            return None
        self.thread, saved = None, self.saved
        return saved

    def finish(self) -> Path | None:
        """Wait for the checkpoint in progress and return it; None if there is none. Raises its error on all ranks."""
        if self.thread is None:
            return None
        self.thread.join()
        self.thread = None
        if (error := self.error) is not None:
            self.error = None
            raise error
        return self.saved
