"""One thread a process: tests run beside each other, and small matrices gain nothing from more.

No bf16 units: `engine.precision: auto` chooses fp32 in tests whatever the CPU, so that numbers are the same everywhere.
"""

import os
import signal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # read by oneDNN when it is first used

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: programs that are interrupted in tests would inherit it, and go on for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
