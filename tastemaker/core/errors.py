"""Errors that the user can act on: the command line prints their message instead of a traceback.

This module imports the standard library only, so that the command line can recognize the errors without torch.
"""

from __future__ import annotations

import errno
import os
import sys


class ConfigError(ValueError):
    """A mistake in the configuration: where it is, what was found, what was expected and what to do, one per line."""


class ImageError(ValueError):
    """An image that cannot be read or written."""


class RewardError(RuntimeError):
    """A reward failed, or returned unusable scores."""


class TrainingError(RuntimeError):
    """A run cannot continue; the message says what to change."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with missing or changed files."""


class DownloadError(RuntimeError):
    """Weights could not be downloaded; the message says why."""


class UploadError(DownloadError):
    """Files could not be uploaded; the message says why, and how to continue."""


def pluralize(count: int, word: str = "image") -> str:
    """A count with its noun, for messages: "1 image", "2 images"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def explain_error(error: BaseException) -> str | None:
    """Return a message for an error of the machine (out of memory, disk full) that says what to do; None for others."""
    torch = sys.modules.get("torch")  # not imported here, so that a mistyped command fails quickly
    out_of_memory = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if out_of_memory or (isinstance(error, RuntimeError) and "out of memory" in str(error)):
        cause = ". ".join(str(error).split(". ")[:2])
        return (
            f"out of device memory ({cause}); lower batch.micro_batch_size, set engine.activation_memory to "
            "checkpoint or offload, set engine.param_dtype or engine.precision to bf16, or shard over more GPUs "
            "with engine.strategy=fsdp [TM813]"
        )
    if is_lost_connection(error):
        return (
            f"rank {os.environ.get('RANK', '0')} lost the connection to another rank "
            f"({str(error).splitlines()[0]:.200}); look for the first error of the other ranks, then run the same "
            "command again to resume from the last checkpoint [TM2600]"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{place}; free some space, lower checkpoint.keep_last, or set output_dir to another "
            "disk. Then run the same command again to resume from the last checkpoint [TM814]"
        )
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return (
            f"{error.filename or 'the output'} is on a file system that is read-only; mount it for writing, or choose "
            "another output folder [TM1250]"
        )
    return None


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended or could not be reached in time."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistBackendError):  # NCCL
        return True
    # Gloo raises plain runtime errors.
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)
