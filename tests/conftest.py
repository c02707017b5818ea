"""One thread a process: tests run beside each other, and small matrices gain nothing from more.

No bf16 units: `engine.precision: auto` chooses fp32 in tests whatever the CPU, so that numbers are the same everywhere.
"""

import gc
import os
import signal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # read by oneDNN when it is first used

import torch

torch.set_num_threads(1)
if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2":
    # torch.compile would go by what the CPU has and take vectors of 512 bits, beside headers for 256: wrong numbers.
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256
# What is made while tests are collected stays to the end; looking through it for garbage takes a quarter of the time.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: programs that are interrupted in tests would inherit it, and go on for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but only among what tests make."""
    gc.freeze()
    gc.enable()
