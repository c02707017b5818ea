"""Turn machine errors (out of memory, disk full) into messages that say what to do."""

from __future__ import annotations

import errno
import sys

from ..core.errors import TrainingError as TrainingError


def explain_error(error: BaseException) -> str | None:
    """The sentence for an error of the machine, such as full memory or a full disk; None for any other."""
    torch = sys.modules.get("torch")  # only if something else imported it: a mistyped command does without
    out_of_memory = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if out_of_memory or (isinstance(error, RuntimeError) and "out of memory" in str(error)):
        found = ". ".join(str(error).split(". ")[:2])
        return (
            f"out of device memory ({found}): lower batch.microbatch, set engine.memory to recompute or offload, "
            "engine.trainable or engine.precision to bf16, or shard over more ranks with engine.strategy=fsdp"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" while writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{place}: free some space, lower checkpoint.keep, or put `output` on another disk; "
            "then run the same command again, and it goes on from the last checkpoint"
        )
    return None
