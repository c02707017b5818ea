"""`engine.precision: auto`: the precision that fits a device, and how slow bf16 is where a device emulates it.

What decides is kept in pure functions of a GPU's compute capability, or of a CPU's flags and the environment, so that
every branch can be tested on any machine.
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
from ..core.objective import Comm
from .errors import TrainingError
from .precision import select_device

CPUINFO = Path("/proc/cpuinfo")
FASTER = 0.9  # bf16 must take at most this share of fp32's time to be chosen on a CPU
SLOWER = 1.1  # emulated bf16 that takes more than this many times as long as fp32 is worth a warning
REPEATS, SECONDS = 3, 0.15  # of one measurement, whichever ends first

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
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        if bf16:
            return PrecisionChoice("bf16", f"{found}, so it computes in bf16 natively")
        # torch.compile cannot be combined with tf32.
        without = f"{found}, but PyTorch {torch.__version__} offers no bf16 on it"
        return PrecisionChoice("fp32" if compiled else "tf32", without)
    if capability >= (7, 0) and "GTX 16" not in name:
        return PrecisionChoice("fp16", f"{found}: fp16 tensor cores, no native bf16")
    return PrecisionChoice("fp32", f"{found}: no tensor cores for fp16 or bf16")


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
    """Choose bf16 where the CPU has units for it and `measure`, its time over that of fp32, says that they pay."""
    units = find_bf16_units(flags, environ)
    if units:
        factor = measure()
        if factor <= FASTER:
            return PrecisionChoice("bf16", f"the CPU has {units} units: bf16 measured {1 / factor:.1f}x as fast")
        return PrecisionChoice("fp32", f"the CPU has {units} units, but bf16 measured {1 / factor:.1f}x as fast")
    if found := find_bf16_units(flags, {}):
        limits = " and ".join(f"{name}={environ[name]}" for name in LIMITS if environ.get(name))
        return PrecisionChoice("fp32", f"{limits} switches off the CPU's {found} units")
    return PrecisionChoice("fp32", "the CPU has no bf16 units such as AMX-BF16 or AVX512-BF16")


def choose_precision(config: EngineConfig, device: torch.device) -> PrecisionChoice:
    """Return the precision a configuration asks for; for `auto`, the one that fits the device."""
    if config.precision != "auto":
        return PrecisionChoice(config.precision, "set by engine.precision")
    if config.trainable == "bf16":
        return PrecisionChoice("bf16", "auto: engine.trainable is bf16, and activations must match")
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        found = choose_for_cuda(capability, name, bf16=bf16, compiled=config.compile)
    elif device.type == "mps":
        found = choose_for_mps()
    else:
        found = choose_for_cpu(read_cpu()[1], os.environ, lambda: measure_slowdown(device))
    return replace(found, reason=f"auto: {found.reason}")


def resolve_precision(config: EngineConfig, device: torch.device, comm: Comm) -> tuple[EngineConfig, PrecisionChoice]:
    """Replace `auto` by what rank 0 chooses, the same on every rank; every rank must call this."""
    own = [choose_precision(config, device)] if comm.rank == 0 else []
    choice: PrecisionChoice = comm.gather_objects(own)[0]
    return replace(config, precision=choice.precision), choice


def resolve_locally(config: EngineConfig) -> tuple[EngineConfig, PrecisionChoice]:
    """Replace `auto` by what this process would choose alone, on the device the configuration asks for."""
    choice = choose_precision(config, select_device(config.device, 0))
    return replace(config, precision=choice.precision), choice


def resolve_for_planning(config: EngineConfig) -> tuple[EngineConfig, PrecisionChoice]:
    """Replace `auto` for a plan: a GPU that is here decides; if there is none, a recent one is assumed."""
    planned = config.precision == "auto" and config.device in ("auto", "cuda") and not torch.cuda.is_available()
    if not planned:
        return resolve_locally(config) if config.precision == "auto" else (config, choose_precision(config, CPU))
    assumed = "auto: a GPU of compute capability 8.0 or later is assumed"
    return replace(config, precision="bf16"), PrecisionChoice("bf16", assumed)


def describe_precision(config: EngineConfig) -> tuple[str, str | None]:
    """Say which precision a run would compute in if it were started here and why, and whether that is emulated."""
    try:
        found, choice = resolve_locally(config)
    except TrainingError:
        elsewhere = f"chosen when the run starts: engine.device is {config.device}, which is not here"
        return (f"auto ({elsewhere})" if config.precision == "auto" else str(choose_precision(config, CPU))), None
    return str(choice), describe_emulation(found, select_device(config.device, 0))


def describe_emulation(config: EngineConfig, device: torch.device) -> str | None:
    """Say how much slower bf16 is than fp32 on a device that emulates it, and the way out; None where all is well."""
    if config.precision != "bf16" or not emulates_bf16(device):
        return None
    factor = measure_slowdown(device)
    if factor <= SLOWER:
        return None
    auto = choose_precision(replace(config, precision="auto", trainable="fp32"), device).precision
    way = "set engine.precision=auto" + (" and engine.trainable=fp32" if config.trainable == "bf16" else "")
    what = "this CPU" if device.type == "cpu" else "this GPU"
    return (
        f"engine.precision: bf16 is emulated on {what} and measured {factor:.1f}x slower than fp32; "
        f"{way}, with which a new run takes {auto} here"
    )


def emulates_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16 without units for it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) < (8, 0)
    return device.type == "cpu" and not find_bf16_units(read_cpu()[1], os.environ)


CPU = torch.device("cpu")


@cache
def read_cpu() -> tuple[str, frozenset[str]]:
    """Return the CPU's model and its flags: from /proc/cpuinfo, or where there is none from PyTorch."""
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

    Measured once for each CPU or GPU, version of PyTorch and limit on instruction sets: the number is kept in this
    process and in a file in the user's cache folder.
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
    given = [torch.full(shape, 0.01, device=device, requires_grad=True) for shape in shapes]
    times: list[float] = []
    while len(times) <= REPEATS and sum(times[1:]) < SECONDS:
        began = time.perf_counter()
        _step(given, device, dtype)
        times.append(time.perf_counter() - began)
    return min(times[1:])  # the first call prepares kernels


def _step(given: list[Tensor], device: torch.device, dtype: torch.dtype) -> None:
    image, kernel, rows, matrix = given
    with torch.enable_grad(), torch.autocast(device.type, dtype, dtype != torch.float32, cache_enabled=False):
        loss = functional.conv2d(image, kernel, padding=1).sum() + functional.linear(rows, matrix).sum()
    torch.autograd.grad(loss, given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cache_file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tastemaker" / "bf16_slowdown.json"


def _read_cache() -> dict[str, float]:
    try:
        found = json.loads(_cache_file().read_text(encoding="utf-8"))
        return {str(key): float(value) for key, value in found.items() if float(value) > 0}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        return {}  # missing, damaged or without a home: it is measured again


def _write_cache(known: Mapping[str, float]) -> None:
    try:
        path = _cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
        partial.replace(path)
    except (OSError, RuntimeError):
        return  # a folder that cannot be written to costs a measurement in every process, no more
