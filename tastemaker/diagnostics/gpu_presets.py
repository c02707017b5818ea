"""GPUs by name, for `tastemaker plan --gpu` and `tastemaker profile`: memory and speed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.registry import ConfigError, suggest_name

# Shares of the published peaks that training reaches, measured on an H200: 540 of 989 TFLOP/s and 4.3 of 4.8 TB/s.
MATMUL_SHARE, BANDWIDTH_SHARE = 0.546, 0.9


@dataclass(frozen=True)
class GpuPreset:
    """Memory that programs can use, and the published peaks in bf16 without sparsity."""

    gib: float
    peak_tflops: float
    peak_tbps: float

    @property
    def tflops(self) -> float:
        return self.peak_tflops * MATMUL_SHARE

    @property
    def tbps(self) -> float:
        return self.peak_tbps * BANDWIDTH_SHARE


GPU_PRESETS = {
    "a100-40g": GpuPreset(39, 312, 1.56),
    "a100-80g": GpuPreset(79, 312, 2.04),
    "a6000-48g": GpuPreset(47, 155, 0.77),
    "b200-180g": GpuPreset(178, 2250, 8.0),
    "h100-80g": GpuPreset(79, 989, 3.35),
    "h200-141g": GpuPreset(139, 989, 4.8),
    "l4-24g": GpuPreset(22, 121, 0.3),
    "l40s-48g": GpuPreset(44, 362, 0.86),
    "rtx3090-24g": GpuPreset(23, 71, 0.94),
    "rtx4090-24g": GpuPreset(23, 165, 1.01),
    "rtx5090-32g": GpuPreset(31, 209, 1.79),
}


SLOWER_VARIANTS = re.compile(r"laptop|max-q|h100 (pcie|nvl)|h200 nvl")  # of other peaks than the presets


def match_device_name(name: str, gib: float) -> GpuPreset | None:
    """Return the preset of a GPU by its driver's name, such as 'NVIDIA GeForce RTX 4090', and its memory in GiB.

    None if there is none, or if the GPU is a slower variant of one.
    """
    words = re.sub(r"(rtx) (?=[0-9])", r"\1", name.lower())
    matches = [gpu for key, gpu in GPU_PRESETS.items() if re.search(rf"\b{key.partition('-')[0]}\b", words)]
    if SLOWER_VARIANTS.search(words) or not matches:
        return None
    return min(matches, key=lambda gpu: abs(gpu.gib - gib))


def find_gpu(name: str) -> GpuPreset:
    """Return the GPU of a name; case does not matter."""
    preset = GPU_PRESETS.get(name.lower())
    if preset is None:
        raise ConfigError(
            f"--gpu: unknown GPU '{name:.60}'{suggest_name(name, GPU_PRESETS)}; or give its memory with --gpu-gib "
            "[TM661]"
        )
    return preset
