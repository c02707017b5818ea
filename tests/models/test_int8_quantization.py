"""Int8 quantization of weight files."""

from __future__ import annotations

from pathlib import Path

import torch

from tastemaker.models import weight_files
from tastemaker.models.weight_files import dequantize_int8, quantize_int8


def make_matrix() -> torch.Tensor:
    """A matrix with rows of very different scales, one of them all zeros: [65, 128]."""
    sizes = torch.logspace(-4, 2, 64)[:, None]
    return torch.cat([torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * sizes, torch.zeros(1, 128)])


def test_int8_error_is_below_half_a_step_per_row() -> None:
    x = make_matrix()
    restored = dequantize_int8(quantize_int8({"x": x}))["x"]
    step = x.abs().amax(1, keepdim=True).clamp(min=127 * 2.0**-14) / 127
    assert ((restored - x).abs() <= 0.502 * step).all()  # scales are rounded to half precision
    assert restored[-1].eq(0).all()


def test_small_tensors_and_integers_are_not_quantized() -> None:
    tensors = {"bias": torch.randn(9000), "ids": torch.arange(9000).view(2, -1), "table": torch.randn(6, 32)}
    assert quantize_int8(tensors) == tensors


def test_parameter_named_scale_is_kept() -> None:
    tensors = {"norm.scale": torch.randn(8), "net.weight": torch.randn(64, 64), "net.scale": torch.randn(8)}
    restored = dequantize_int8(quantize_int8(tensors))
    assert set(restored) == set(tensors) and restored["net.scale"].equal(tensors["net.scale"])


def test_int8_file_is_half_the_size_and_loads(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(512, 512), "b": torch.randn(512)}
    weight_files.write_weights(tmp_path / "half.safetensors", tensors, {})
    weight_files.write_weights(tmp_path / "packed.safetensors", quantize_int8(tensors), {"model": {"type": "dit"}})
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "packed")]
    restored, config = weight_files.read_weights(tmp_path / "packed.safetensors")
    assert sizes[1] < 0.52 * sizes[0] and config == {"model": {"type": "dit"}}
    assert (restored["x"] - tensors["x"]).norm() < 0.01 * tensors["x"].norm() and restored["x"].dtype == torch.float32
