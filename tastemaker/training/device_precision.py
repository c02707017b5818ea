"""`engine.precision: auto`: the precision that fits a device, and how slow bf16 is where a device emulates it.

The decisions are pure functions of a GPU's compute capability, or of a CPU's flags and the environment, so that every
branch can be tested on any machine.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..config.schema import EngineConfig
from ..core.errors import TrainingError
from ..core.objective import Comm
from ..core.output_paths import user_cache_directory, write_text_atomically
from ..core.safe_files import read_json
from .precision import select_device

CPUINFO = Path("/proc/cpuinfo")
FASTER = 0.9  # bf16 must take at most this share of fp32's time to be chosen on a CPU
SLOWER = 1.1  # emulated bf16 that takes more than this many times as long as fp32 is worth a warning
REPEATS, SECONDS = 3, 0.15  # of one measurement, whichever is reached first

# The bf16 units of CPUs, fastest first: the flag in /proc/cpuinfo, the name, and the level oneDNN must be allowed.
UNITS = (("amx_bf16", "AMX-BF16", 2), ("avx512_bf16", "AVX512-BF16", 1), ("bf16", "Arm BF16", 0))
# What values of ONEDNN_MAX_CPU_ISA allow: 0 no bf16 units of x86, 1 AVX512-BF16; all others allow AMX-BF16 too, 2.
ONEDNN_LEVELS = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"), 0),
    **dict.fromkeys(("avx512_core_bf16", "avx512_core_fp16", "avx10_1_512", "avx10_2", "avx10_2_512"), 1),
}
ATEN_BELOW = ("default", "avx2")  # values of ATEN_CPU_CAPABILITY that stand for a CPU without bf16 units
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the last is the older name of the second


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, and why it is used."""

    precision: Literal["fp32", "tf32", "fp16", "bf16"]
    reason: str

    def __str__(self) -> str:
        return f"{self.precision} ({self.reason})"


def choose_for_cuda(
    capability: tuple[int, int], name: str = "the GPU", *, bf16: bool = True, compiled: bool = False
) -> PrecisionChoice:
    """Choose by compute capability; `bf16` says whether this build of PyTorch computes in it on the GPU."""
    gpu = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        if bf16:
            return PrecisionChoice("bf16", f"{gpu}, so it computes in bf16 natively")
        # torch.compile cannot be combined with tf32.
        reason = f"{gpu}, but PyTorch {torch.__version__} does not support bf16 on it"
        return PrecisionChoice("fp32" if compiled else "tf32", reason)
    if capability >= (7, 0) and "GTX 16" not in name:
        return PrecisionChoice("fp16", f"{gpu}: fp16 tensor cores, no native bf16")
    return PrecisionChoice("fp32", f"{gpu}: no tensor cores for fp16 or bf16")


def choose_for_mps() -> PrecisionChoice:
    """Choose fp32 on Apple GPUs, where the speed of autocast has not been measured."""
    return PrecisionChoice("fp32", "on MPS the speed of fp16 and bf16 has not been measured")


def find_bf16_units(flags: Collection[str], environ: Mapping[str, str]) -> str:
    """Name the fastest bf16 units that a CPU has and the environment allows; an empty string if there are none."""
    if environ.get("ATEN_CPU_CAPABILITY", "").lower() in ATEN_BELOW:
        return ""
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or ""
    allowed = ONEDNN_LEVELS.get(limit.lower(), 2)
    return next((name for flag, name, level in UNITS if flag in flags and level <= allowed), "")


def choose_for_cpu(flags: Collection[str], environ: Mapping[str, str], measure: Callable[[], float]) -> PrecisionChoice:
    """Choose bf16 if the CPU has units for it and `measure`, the time of bf16 over that of fp32, is below FASTER."""
    units = find_bf16_units(flags, environ)
    if units:
        factor = measure()
        if factor <= FASTER:
            return PrecisionChoice("bf16", f"the CPU has {units} units: bf16 measured {1 / factor:.1f}x as fast")
        return PrecisionChoice("fp32", f"the CPU has {units} units, but bf16 measured {1 / factor:.1f}x as fast")
    if disabled := find_bf16_units(flags, {}):
        limits = " and ".join(f"{name}={environ[name]}" for name in LIMITS if environ.get(name))
        return PrecisionChoice("fp32", f"{limits} switches off the CPU's {disabled} units")
    return PrecisionChoice("fp32", "the CPU has no bf16 units such as AMX-BF16 or AVX512-BF16")


def choose_precision(config: EngineConfig, device: torch.device) -> PrecisionChoice:
    """Return the precision a configuration asks for; for `auto`, the one that fits the device."""
    if config.precision != "auto":
        return PrecisionChoice(config.precision, "set by engine.precision")
    if config.param_dtype == "bf16":
        return PrecisionChoice("bf16", "auto: engine.param_dtype is bf16, and activations must match")
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        choice = choose_for_cuda(capability, name, bf16=bf16, compiled=config.compile)
    elif device.type == "mps":
        choice = choose_for_mps()
    else:
        choice = choose_for_cpu(read_cpu()[1], os.environ, lambda: measure_slowdown(device))
    return replace(choice, reason=f"auto: {choice.reason}")


def resolve_precision(config: EngineConfig, device: torch.device, comm: Comm) -> tuple[EngineConfig, PrecisionChoice]:
    """Replace `auto` by what rank 0 chooses, the same on every rank; every rank must call this."""
    choices = [choose_precision(config, device)] if comm.rank == 0 else []
    choice: PrecisionChoice = comm.gather_objects(choices)[0]
    return replace(config, precision=choice.precision), choice


def resolve_locally(config: EngineConfig) -> tuple[EngineConfig, PrecisionChoice]:
    """Replace `auto` by the choice for the device that the configuration names, without other ranks."""
    choice = choose_precision(config, select_device(config.device, 0))
    return replace(config, precision=choice.precision), choice


def resolve_for_planning(config: EngineConfig) -> tuple[EngineConfig, PrecisionChoice]:
    """Replace `auto` for `tastemaker plan` by the choice for this machine's GPU, or for a recent one if it has none."""
    planned = config.precision == "auto" and config.device in ("auto", "cuda") and not torch.cuda.is_available()
    if not planned:
        return resolve_locally(config) if config.precision == "auto" else (config, choose_precision(config, CPU))
    assumed = "auto: a GPU of compute capability 8.0 or later is assumed"
    return replace(config, precision="bf16"), PrecisionChoice("bf16", assumed)


def describe_precision(config: EngineConfig) -> tuple[str, str | None]:
    """Return the precision that a run would have on this machine with its reason, and a warning if it is emulated."""
    try:
        resolved, choice = resolve_locally(config)
    except TrainingError:
        later = f"chosen when the run starts: engine.device is {config.device}, which this machine does not have"
        return (f"auto ({later})" if config.precision == "auto" else str(choose_precision(config, CPU))), None
    return str(choice), describe_emulation(resolved, select_device(config.device, 0))


def describe_emulation(config: EngineConfig, device: torch.device) -> str | None:
    """Return a warning if bf16 is emulated on the device and slower than fp32, with advice; None otherwise."""
    if config.precision != "bf16" or not emulates_bf16(device):
        return None
    factor = measure_slowdown(device)
    if factor <= SLOWER:
        return None
    auto = choose_precision(replace(config, precision="auto", param_dtype="fp32"), device).precision
    advice = "set engine.precision=auto" + (" and engine.param_dtype=fp32" if config.param_dtype == "bf16" else "")
    name = "this CPU" if device.type == "cpu" else "this GPU"
    return (
        f"engine.precision: bf16 is emulated on {name} and measured {factor:.1f}x slower than fp32; {advice}, "
        f"which is {auto} here [TM812]"
    )


def emulates_bf16(device: torch.device) -> bool:
    """Return whether a device has no bf16 units."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) < (8, 0)
    return device.type == "cpu" and not find_bf16_units(read_cpu()[1], os.environ)


CPU = torch.device("cpu")


@cache
def read_cpu() -> tuple[str, frozenset[str]]:
    """Return the CPU's model and flags from /proc/cpuinfo, or from PyTorch if that does not exist."""
    try:
        lines = [line.partition(":") for line in CPUINFO.read_text(encoding="utf-8").splitlines()]
    except OSError:
        known = torch.cpu.get_capabilities()
        flags = frozenset(name for name, there in known.items() if there is True)
        return str(known.get("cpu_name") or platform.processor() or platform.machine()), flags
    fields = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name") or platform.machine(), flags


@cache
def measure_slowdown(device: torch.device) -> float:
    """Return the time of a small training step under bf16 autocast over its time in fp32.

    Measured once for each CPU or GPU, PyTorch version and limit on instruction sets; cached in this process and in a
    file in the user's cache folder.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else read_cpu()[0]
    key = " | ".join([name, f"torch {torch.__version__}", *(f"{x}={os.environ.get(x, '')}" for x in LIMITS[:2])])
    known = _read_cache()
    if key not in known:
        known[key] = round(_time_step(device, torch.bfloat16) / _time_step(device, torch.float32), 3)
        _write_cache(known)
    return known[key]


def _time_step(device: torch.device, dtype: torch.dtype) -> float:
    """Return the shortest time in seconds of a convolution and a matrix product, forward and backward."""
    shapes = ((1, 64, 32, 32), (64, 64, 3, 3), (128, 512), (512, 512))
    inputs = [torch.full(shape, 0.01, device=device, requires_grad=True) for shape in shapes]
    times: list[float] = []
    while len(times) <= REPEATS and sum(times[1:]) < SECONDS:
        start = time.perf_counter()
        _run_step(inputs, device, dtype)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first call is a warm-up


def _run_step(inputs: list[Tensor], device: torch.device, dtype: torch.dtype) -> None:
    image, kernel, vectors, matrix = inputs
    with torch.enable_grad(), torch.autocast(device.type, dtype, dtype != torch.float32, cache_enabled=False):
        loss = functional.conv2d(image, kernel, padding=1).sum() + functional.linear(vectors, matrix).sum()
    torch.autograd.grad(loss, inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cache_file() -> Path:
    return user_cache_directory() / "bf16_slowdown.json"


def _read_cache() -> dict[str, float]:
    try:
        cached = read_json(_cache_file())
        return {str(key): float(value) for key, value in cached.items() if float(value) > 0}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        return {}  # no file, a damaged one, or no home directory: measure again


def _write_cache(known: Mapping[str, float]) -> None:
    try:
        write_text_atomically(_cache_file(), json.dumps(known, indent=1))
    except (OSError, RuntimeError):
        return  # without a cache, every process measures
