"""One thread a process: tests run beside each other, and small matrices gain nothing from more."""

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: programs that are interrupted in tests would inherit it, and go on for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
