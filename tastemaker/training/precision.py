"""Number formats, attention kernels and devices: what is asked for, checked, and switched on for a while."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..config.schema import EngineConfig
from .errors import TrainingError

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_SKIPPED_UPDATES = 20  # updates skipped in a row before the run stops


def select_device(name: str, local_rank: int) -> torch.device:
    """The device a configuration asks for."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    found = next(device for device, there in have.items() if there)
    if name == "auto":
        name = found
    if not have[name]:
        raise TrainingError(
            f"engine.device is {name}, but PyTorch {torch.__version__} sees no such device here; "
            f"use --device {found} or auto, or install a build of PyTorch for {name}"
        )
    if name != "cuda":
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"rank {local_rank} of this machine has no GPU of its own: {torch.cuda.device_count()} found; "
            "start at most one process for each (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)


def check_engine_config(config: EngineConfig, device: torch.device, world: int) -> None:
    """Refuse what this machine cannot do."""
    if config.trainable == "bf16" and config.precision != "bf16":
        raise TrainingError(
            f"engine.trainable is bf16 but engine.precision is {config.precision}, so weights and activations would "
            "differ; set engine.precision to bf16 too, or engine.trainable to fp32"
        )
    if device.type == "mps" and world > 1:
        raise TrainingError(f"{world} ranks cannot share an mps device; start one process, or use --device cpu")
    if config.attention == "xformers" and find_spec("xformers") is None:
        raise TrainingError(
            "engine.attention is xformers, which is not installed; run `pip install xformers` or set it to auto"
        )
    if config.compile:
        _check_compiler(config, device)
    if config.attention in ("flash", "cudnn"):
        _check_kernel(config, device)


def _check_kernel(config: EngineConfig, device: torch.device) -> None:
    name, cudnn = config.attention, cast(Any, torch.backends.cudnn)
    there = cudnn.is_available() if name == "cudnn" else torch.backends.cuda.is_flash_attention_available()
    if device.type != "cuda" or not (there or (name == "flash" and find_spec("flash_attn") is not None)):
        raise TrainingError(
            f"engine.attention is {name}, which this PyTorch does not offer on {device.type}; set it to auto or sdpa"
        )
    if DTYPES[config.precision] == torch.float32:
        raise TrainingError(
            f"engine.attention is {name}, which knows only fp16 and bf16, but engine.precision is {config.precision}; "
            "set engine.precision to bf16 or engine.attention to auto"
        )


def _check_compiler(config: EngineConfig, device: torch.device) -> None:
    """What torch.compile translates with: Triton on a GPU, C++ elsewhere."""
    if config.precision == "tf32":
        # It asks PyTorch for the precision in the old way, which PyTorch refuses to answer once it was set in the new.
        raise TrainingError("engine.compile cannot be combined with tf32; set engine.precision to bf16 or fp32")
    if device.type == "cuda":
        needed, there = "Triton", find_spec("triton") is not None
    else:
        named = os.environ.get("CXX")
        needed, there = "a C++ compiler", any(shutil.which(name) for name in (named, "g++", "clang++", "c++") if name)
    if not there:
        raise TrainingError(
            f"engine.compile is true, but {needed} was not found here, which it needs on {device.type}; "
            "install it, or set engine.compile to false"
        )


@contextmanager
def compute_settings(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Set TF32, normalization dtype and attention kernels within the block; the backward pass needs it too."""
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]  # not in stubs
    before = [place.fp32_precision for place in places]
    norms = device.type == "cpu" and DTYPES[config.precision] != torch.float32
    try:
        for place in places:
            place.fp32_precision = "tf32" if config.precision == "tf32" else "ieee"
        with _attention_kernels(config, device), Fp32Norms() if norms else nullcontext():
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _attention_kernels(config: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Attention takes the kernel asked for, or the next best where that one cannot (masks, odd sizes)."""
    return attention_kernels(config, gradient=torch.is_grad_enabled()) if device.type == "cuda" else nullcontext()


def attention_kernels(config: EngineConfig, *, gradient: bool) -> AbstractContextManager[Any]:
    """On a GPU cuDNN's kernel comes first, for it is the fastest, but not with a gradient.

    Its backward pass, PyTorch's own choice on recent cards, gives NaN or reads beyond its memory where the gradient is
    a slice of a wider tensor, as in FLUX's single blocks (seen with PyTorch 2.11, cuDNN 9 and an H200).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel  # which imports sympy, needed by no command without a GPU

    safe = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    quick = [] if gradient or config.attention == "flash" else [SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel([*quick, *safe], set_priority=True)


@runtime_checkable
class SupportsCudnnBackward(Protocol):
    """A network whose attention gradient is never a slice of a wider tensor, so cuDNN's backward pass is safe."""

    unsliced: bool


def use_fast_attention(net: nn.Module, config: EngineConfig) -> None:
    """Let a network use cuDNN attention on a GPU when no gradient is needed, or when its backward pass is safe.

    What is computed again for its gradient would be so by another kernel, so that both passes keep to the safe one.
    """
    forward, unsliced = net.forward, isinstance(net, SupportsCudnnBackward) and config.memory != "recompute"

    def call(*inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not unsliced:
            return forward(*inputs, **named)
        with attention_kernels(config, gradient=False):
            return forward(*inputs, **named)

    net.forward = call  # in place, so that no name changes


class Fp32Norms(TorchFunctionMode):
    """Norms as autocast has them on CUDA; on a CPU it leaves them alone, and they refuse bf16 weights on fp32 input."""

    norms = (functional.layer_norm, functional.group_norm, functional.rms_norm)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self.norms or not torch.is_autocast_enabled("cpu"):  # rewards and frozen parts may be without
            return func(*args, **(kwargs or {}))
        named = {name: _to_float32(value) for name, value in (kwargs or {}).items()}
        return func(*(_to_float32(value) for value in args), **named)


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around a forward pass and its repetition: no mode reaches into the backward pass, so norms need it once more."""
    return nullcontext(), Fp32Norms() if torch.is_autocast_enabled("cpu") else nullcontext()


def autocast(config: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to fp16 or bf16."""
    dtype = DTYPES[config.precision]
    if dtype == torch.float32:
        return nullcontext()
    # No cache: it would outlive `weights.use`, and hand the live graph the borrowed weights, without gradients.
    return torch.autocast(device.type, dtype, cache_enabled=False)


class CastWeights(torch.autograd.Function):
    """Weights in the precision they are multiplied in, and their gradients in that of the weights."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raised = iter(_cast([gradient for gradient in gradients if gradient is not None], torch.float32))
        return None, *(None if gradient is None else next(raised) for gradient in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    found = [torch.empty_like(x, dtype=dtype) for x in tensors]
    if found:
        torch._foreach_copy_(found, list(tensors))
    return found


@contextmanager
def cast_weights(net: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the block layers find their weights cast already, all at once, where autocast would ask for each.

    For one call of a network that uses each weight once: gradients of two uses would be added up before they are cast.
    """
    layers = [module for module in net.modules() if type(module) in (nn.Linear, nn.Conv2d)]
    named = [(layer, name, p) for layer in layers for name, p in layer.named_parameters() if p.dtype == torch.float32]
    cast = CastWeights.apply(dtype, *(p for _, _, p in named))  # type: ignore[no-untyped-call]
    try:
        for (layer, name, _), weight in zip(named, cast, strict=True):
            layer.__dict__[name] = weight  # is found before the parameter, which stays where it is
        yield
    finally:
        for layer, name, _ in named:
            layer.__dict__.pop(name, None)


@dataclass
class LossScaler:
    """A factor on fp16 losses that keeps small gradients from vanishing: halved at overflow, doubled after peace."""

    scale: float = 2.0**16
    good: int = 0  # updates since the last change
    skipped: int = 0  # updates in a row
    patience: int = 2000

    def accept(self) -> None:
        self.good, self.skipped = self.good + 1, 0
        if self.good >= self.patience:
            self.scale, self.good = self.scale * 2, 0

    def refuse(self) -> None:
        self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
        if self.skipped >= MAX_SKIPPED_UPDATES:
            raise TrainingError(
                f"{MAX_SKIPPED_UPDATES} updates in a row were skipped because loss or gradients overflowed fp16; "
                "set engine.precision to bf16 or fp32, or lower optim.lr and go on from the last checkpoint"
            )

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        self.scale, self.good, self.skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])
