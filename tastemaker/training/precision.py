"""Devices, dtypes, autocast and attention backends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..config.schema import EngineConfig
from ..core.errors import TrainingError
from ..core.types import Placement
from ..core.weights import NetworkTraits
from .low_precision_linear import RolloutLinear

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_SKIPPED_UPDATES = 20  # updates skipped in a row before the run stops


def select_device(name: str, local_rank: int) -> torch.device:
    """Return the device that `engine.device` names; `auto` prefers CUDA, then MPS, then the CPU."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    best = next(device for device, there in available.items() if there)
    if name == "auto":
        name = best
    if not available[name]:
        raise TrainingError(
            f"engine.device: PyTorch {torch.__version__} does not find a {name} device here; use --device {best} "
            f"or auto, or install a PyTorch build for {name} [TM280]"
        )
    if name != "cuda":
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"rank {local_rank} of this machine does not have a GPU ({torch.cuda.device_count()} found); start at "
            "most one process per GPU (torchrun --nproc-per-node) [TM281]"
        )
    return torch.device("cuda", local_rank)


def choose_placement(device: str, precision: str) -> Placement:
    """Return the placement of models that are loaded without a run, on this process's GPU if there is one."""
    return Placement(select_device(device, int(os.environ.get("LOCAL_RANK", "0"))), DTYPES[precision])


def check_engine_config(config: EngineConfig, device: torch.device, world_size: int) -> None:
    """Refuse settings that this machine or this PyTorch does not support."""
    if config.param_dtype == "bf16" and config.precision != "bf16":
        raise TrainingError(
            f"engine.param_dtype: bf16 needs engine.precision=bf16, got {config.precision}; set "
            "engine.precision=bf16, or engine.param_dtype=fp32 [TM282]"
        )
    if device.type == "mps" and world_size > 1:
        raise TrainingError(
            f"engine.device: {world_size} ranks cannot share one mps device; start one process, or use --device "
            "cpu [TM283]"
        )
    if device.type == "mps" and config.cpu_offload:
        raise TrainingError(
            "engine.cpu_offload shards weights with FSDP, which has no backend for an mps device; set it to false "
            "(device and host share their memory), or use --device cpu"
            " [TM932]"
        )
    if config.attention_backend == "xformers" and find_spec("xformers") is None:
        raise TrainingError(
            "engine.attention_backend: xformers is not installed; run `pip install xformers`, or set "
            "engine.attention_backend=auto [TM284]"
        )
    if config.compile:
        _check_compiler(config, device)
    if config.attention_backend in ("flash", "cudnn"):
        _check_kernel(config, device)


def _check_kernel(config: EngineConfig, device: torch.device) -> None:
    name, cudnn = config.attention_backend, cast(Any, torch.backends.cudnn)
    available = cudnn.is_available() if name == "cudnn" else torch.backends.cuda.is_flash_attention_available()
    if device.type != "cuda" or not (available or (name == "flash" and find_spec("flash_attn") is not None)):
        raise TrainingError(
            f"engine.attention_backend: {name} is not available in this PyTorch on {device.type}; set "
            "engine.attention_backend to auto or sdpa [TM285]"
        )
    if DTYPES[config.precision] == torch.float32:
        raise TrainingError(
            f"engine.attention_backend: {name} supports fp16 and bf16 only, but engine.precision is "
            f"{config.precision}; set engine.precision=bf16, or engine.attention_backend=auto [TM286]"
        )


def _check_compiler(config: EngineConfig, device: torch.device) -> None:
    """Refuse torch.compile without its compiler: Triton on a GPU, C++ elsewhere."""
    if config.precision == "tf32":
        # torch.compile reads the precision through the old API, which fails once it is set through the new one.
        raise TrainingError(
            "engine.compile: cannot be combined with engine.precision=tf32; set engine.precision to bf16 or fp32 "
            "[TM287]"
        )
    if device.type == "cuda":
        compiler, available = "Triton", find_spec("triton") is not None
    else:
        names = (os.environ.get("CXX"), "g++", "clang++", "c++")
        compiler, available = "a C++ compiler", any(shutil.which(name) for name in names if name)
    if not available:
        raise TrainingError(
            f"engine.compile: {compiler} is needed on {device.type} and was not found; install it, or set "
            "engine.compile=false [TM288]"
        )


@contextmanager
def compute_settings(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Set TF32, normalization dtype and kernels within the block; the backward pass needs it too."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    previous = [backend.fp32_precision for backend in backends]
    fp32_norms = device.type == "cpu" and DTYPES[config.precision] != torch.float32
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if config.precision == "tf32" else "ieee"
        with (
            _attention_kernels(config, device),
            Fp32Norms() if fp32_norms else nullcontext(),
            deterministic_algorithms() if config.deterministic else nullcontext(),
        ):
            yield
    finally:
        for backend, value in zip(backends, previous, strict=True):
            backend.fp32_precision = value


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use kernels that repeat to the bit within the block, where PyTorch has them; it warns of operations without.

    Fused attention is one of those: the kernels stay, and gradients of long sequences may differ in the last bit.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _attention_kernels(config: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Prefer the configured attention kernel; others are used where it does not support the inputs (masks, sizes)."""
    return attention_kernels(config, gradient=torch.is_grad_enabled()) if device.type == "cuda" else nullcontext()


def attention_kernels(config: EngineConfig, *, gradient: bool) -> AbstractContextManager[Any]:
    """Set the priority of attention kernels on a GPU: cuDNN's, the fastest, first, but not if a gradient is needed.

    The backward pass of cuDNN's kernel gives NaN or reads out of bounds where the incoming gradient is a slice of a
    wider tensor, as in FLUX's single blocks (seen with PyTorch 2.11, cuDNN 9 and an H200).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel  # imported here because it imports sympy

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if not gradient and config.attention_backend != "flash":
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(backends, set_priority=True)


def use_fast_attention(
    net: nn.Module, config: EngineConfig, traits: NetworkTraits = NetworkTraits(), *, same_kernels: bool = False
) -> None:
    """Let a network use cuDNN attention on a GPU when no gradient is needed, or when its backward pass is safe.

    With activation checkpointing, both forward passes must use the same kernel, so cuDNN's is left out. It is also left
    out if rewards on the same GPU score in threads: PyTorch's choice of kernels holds for all threads, so that the
    kernels of a reward would depend on what the sampler does at that moment.

    With `same_kernels`, `auto` uses it for rollouts and updates or for none of them: guidance multiplies the difference
    of two kernels, which moves the ratios of a policy gradient.
    """
    forward, cudnn_backward = net.forward, traits.cudnn_backward and config.activation_memory != "checkpoint"
    if config.overlap_rewards == "always" or (
        same_kernels and config.attention_backend == "auto" and not cudnn_backward
    ):
        return

    def call(*inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not cudnn_backward:
            return forward(*inputs, **named)
        with attention_kernels(config, gradient=False):
            return forward(*inputs, **named)

    net.forward = call  # in place, so that parameter names stay the same


class Fp32Norms(TorchFunctionMode):
    """Compute normalization layers in fp32, as autocast does on CUDA.

    On the CPU, autocast leaves them alone, and they fail with bf16 weights and fp32 input.
    """

    norms = (functional.layer_norm, functional.group_norm, functional.rms_norm)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self.norms or not torch.is_autocast_enabled("cpu"):  # rewards may run without autocast
            return func(*args, **(kwargs or {}))
        named = {name: _to_float32(value) for name, value in (kwargs or {}).items()}
        return func(*(_to_float32(value) for value in args), **named)


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of a forward pass and its recomputation, to which the fp32 norms must be applied again."""
    return nullcontext(), Fp32Norms() if torch.is_autocast_enabled("cpu") else nullcontext()


def autocast(config: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return autocast to fp16 or bf16; nothing for fp32 and tf32."""
    dtype = DTYPES[config.precision]
    if dtype == torch.float32:
        return nullcontext()
    # Without a cache: it would outlive `weights.use` and give the live network the snapshot's casts, without gradients.
    return torch.autocast(device.type, dtype, cache_enabled=False)


class CastWeights(torch.autograd.Function):
    """Cast weights to the compute dtype, and their gradients back to fp32."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast([gradient for gradient in gradients if gradient is not None], torch.float32))
        return None, *(None if gradient is None else next(cast) for gradient in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(x, dtype=dtype) for x in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


@contextmanager
def cast_weights(net: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the weights of linear and convolution layers at once within the block, instead of one by one by autocast.

    For one call of a network that uses each weight once: the gradients of two uses would be summed in `dtype`.
    """
    layers = [module for module in net.modules() if type(module) in (nn.Linear, RolloutLinear, nn.Conv2d)]
    named = [(layer, name, p) for layer in layers for name, p in layer.named_parameters() if p.dtype == torch.float32]
    cast = CastWeights.apply(dtype, *(p for _, _, p in named))  # type: ignore[no-untyped-call]
    try:
        for (layer, name, _), weight in zip(named, cast, strict=True):
            layer.__dict__[name] = weight  # attribute lookup finds it before the parameter
        yield
    finally:
        for layer, name, _ in named:
            layer.__dict__.pop(name, None)


@dataclass
class LossScaler:
    """Dynamic loss scale of fp16 training: halved after an overflow, doubled after `patience` updates without one."""

    scale: float = 2.0**16
    good_updates: int = 0  # since the scale last changed
    skipped: int = 0  # consecutive updates
    patience: int = 2000

    def on_success(self) -> None:
        self.good_updates, self.skipped = self.good_updates + 1, 0
        if self.good_updates >= self.patience:
            self.scale, self.good_updates = self.scale * 2, 0

    def on_overflow(self) -> None:
        self.scale, self.good_updates, self.skipped = self.scale / 2, 0, self.skipped + 1
        if self.skipped >= MAX_SKIPPED_UPDATES:
            raise TrainingError(
                f"{MAX_SKIPPED_UPDATES} updates in a row were skipped, because the loss or gradients overflowed "
                "in fp16; set engine.precision to bf16 or fp32, or lower optim.lr and resume from the last "
                "checkpoint [TM289]"
            )

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good_updates, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_updates, self.skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])
