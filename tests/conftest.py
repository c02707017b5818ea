"""One thread per process: tests run in parallel, and small matrices gain nothing from more threads.

bf16 instructions are disabled: `engine.precision: auto` chooses fp32 on every CPU, so that results are reproducible.
"""

import gc
import os
import random
import signal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # read by oneDNN when it is first used

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2":
    # torch.compile reads the CPU's capabilities and would emit 512-bit vectors with headers for 256: wrong results.
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256
# Objects created during collection live to the end; scanning them for garbage would take a quarter of the time.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored. Child processes would inherit that and never stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:  # by nohup, or as for SIGINT
        signal.signal(number, signal.SIG_DFL)


SEED = 20_261_119  # unlike the seeds that tests choose


def seed_random_streams(seed: int) -> None:
    """Seed the global streams, so that no result depends on which tests the worker ran before."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before the fixtures of a test are made."""
    seed_random_streams(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed before a test, for which fixtures of its module may have been made before; other numbers than theirs."""
    seed_random_streams(SEED + 1)


def pytest_collection_finish() -> None:
    """Enable garbage collection, restricted to objects that the tests create."""
    gc.freeze()
    gc.enable()
