"""The weights of LlamaGen's transformer as its CUDA-graph decoder multiplies them: shared, copied, or in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.quantization import DTYPES, Kind, quantize_rows
from .gpt import GPT
from .token_decoder import transformer_blocks

SQUARES_GROUP = 16  # channels of the residual stream whose squares are summed by one program


class InputNorm(NamedTuple):
    """The RMS norm of the input of a matrix product."""

    weight: Tensor  # [D]
    squares: Tensor  # [R, D / SQUARES_GROUP] sums of squares of groups of channels, in fp32
    eps: float


@dataclass(frozen=True)
class DecodeMatrix:
    """A matrix [M, K] in the dtype of the matrix products, or of 8-bit numbers with a scale per row."""

    weight: Tensor
    scale: Tensor | None = None  # [M, 1] in fp32, of 8-bit numbers


@dataclass(frozen=True)
class DecodeLayerWeights:
    attention_norm: Tensor
    wqkv: DecodeMatrix
    wo: DecodeMatrix
    ffn_norm: Tensor
    w13: DecodeMatrix  # w1 above w3
    w2: DecodeMatrix


@dataclass
class QuantizedCopy:
    """The 8-bit copy of a layer's weight, and the version of the weight that was copied."""

    module: nn.Module
    weight: Tensor
    scale: Tensor
    version: tuple[int, int] | None = None

    def refresh(self, kind: Kind, dtype: torch.dtype) -> None:
        """Copy the weight if it has changed; with adapters always, because they may also be switched off."""
        module, version = self.module, None
        if type(module) is nn.Linear:
            version = (module.weight._version, module.weight.data_ptr())
            if version == self.version:
                return
        exact = module.weight if type(module) is nn.Linear else merged_weight(module, self.weight.shape[1], dtype)
        numbers, scale = quantize_rows(exact, kind)
        self.weight.copy_(numbers)
        self.scale.copy_(scale)
        self.version = version


class DecodeWeights:
    """The weights of a network in the dtype of the matrix products, the matrices of its blocks in 8 bits if asked.

    A plain layer of that dtype is used in place, so that optimizer steps and swapped weights, which write in place,
    take effect at once; w1 and w3 move into one storage for it, which takes no more memory. Layers of another dtype,
    layers with adapters and 8-bit numbers are copied before each batch.
    """

    def __init__(self, net: GPT, dtype: torch.dtype, kind: Kind | None = None) -> None:
        self.net, self.dtype, self.kind = net, dtype, kind
        self.copies, self.shared = list[tuple[nn.Module, Tensor]](), list[Tensor]()
        self.quantized: list[QuantizedCopy] = []
        width = net.config.width
        self.layers = [
            DecodeLayerWeights(
                self._share(block.attention_norm.weight),
                self._matrix((block.attention.wqkv,), width, kind),
                self._matrix((block.attention.wo,), width, kind),
                self._share(block.ffn_norm.weight),
                self._matrix((block.feed_forward.w1, block.feed_forward.w3), width, kind),
                self._matrix((block.feed_forward.w2,), net.config.intermediate_size, kind),
            )
            for block in transformer_blocks(net)
        ]
        # The head keeps its precision, as all layers outside of blocks do in rollouts.
        self.norm, self.output = self._share(net.norm.weight), self._matrix((net.output,), width, None)
        self.embeddings = self._share(net.tok_embeddings.weight)
        self.addresses = [x.data_ptr() for x in self.shared]

    def _share(self, weight: Tensor) -> Tensor:
        self.shared.append(weight)
        return weight.detach()

    def _matrix(self, modules: tuple[nn.Module, ...], in_features: int, kind: Kind | None) -> DecodeMatrix:
        """The weights of one or more layers as one matrix, shared or to be copied."""
        heights = [out_features(module) for module in modules]
        device = next(modules[0].parameters()).device
        if kind is not None:
            numbers = torch.empty(sum(heights), in_features, dtype=DTYPES[kind], device=device)
            scale = torch.empty(sum(heights), 1, device=device)
            parts = zip(modules, torch.split(numbers, heights), torch.split(scale, heights), strict=True)
            self.quantized += [QuantizedCopy(*part) for part in parts]
            return DecodeMatrix(numbers, scale)
        linear = [module for module in modules if type(module) is nn.Linear and module.weight.dtype == self.dtype]
        if len(linear) == len(modules):
            fused = fuse_weights(linear)
            self.shared += [module.weight for module in linear]
            return DecodeMatrix(fused)
        copy = torch.empty(sum(heights), in_features, dtype=self.dtype, device=device)
        self.copies += list(zip(modules, torch.split(copy, heights), strict=True))
        return DecodeMatrix(copy)

    def is_current(self) -> bool:
        """Whether the shared weights still have the addresses that graphs were captured with."""
        return self.addresses == [x.data_ptr() for x in self.shared]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights that are not shared."""
        for module, copy in self.copies:
            if type(module) is nn.Linear:
                copy.copy_(module.weight)
            else:
                copy.copy_(merged_weight(module, copy.shape[1], self.dtype))
        for each in self.quantized:
            assert self.kind is not None
            each.refresh(self.kind, self.dtype)


def out_features(module: Any) -> int:
    return int(module.out_features)


def merged_weight(module: nn.Module, in_features: int, dtype: torch.dtype) -> Tensor:
    """The matrix [M, K] of a layer with adapters, whose outputs for unit vectors are the columns."""
    device = next(module.parameters()).device
    columns: Tensor = module(torch.eye(in_features, dtype=dtype, device=device))
    return columns.t()


@torch.no_grad()
def fuse_weights(linear: list[nn.Linear]) -> Tensor:
    """The weights of linear layers as one matrix; afterwards the layers' own weights are views of it."""
    first = linear[0].weight
    if len(linear) == 1:
        return first.detach()
    heights = [len(layer.weight) for layer in linear]
    size = first.numel() * first.element_size()
    shape = (sum(heights), first.shape[1])
    if linear[1].weight.data_ptr() != first.data_ptr() + size or first.untyped_storage().nbytes() < 2 * size:
        fused = torch.cat([layer.weight for layer in linear])
        for layer, part in zip(linear, torch.split(fused, heights), strict=True):
            layer.weight.data = part
    return first.detach().as_strided(shape, (shape[1], 1))
