"""Networks of ONNX files computed by torch, so that gradients go through them; of the operations, those in use here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from .onnx_files import OnnxFile, Operation

Settings = Mapping[str, Any]
Compute = Callable[[Sequence[Any], Settings], Tensor]


class OnnxNetwork(nn.Module):
    """A frozen network of one input; whole numbers stay on the host, for they are shapes and places.

    `until` names the value that is given back in the place of the file's own output.
    """

    def __init__(self, file: OnnxFile, until: str | None = None) -> None:
        super().__init__()
        unknown = sorted({each.kind for each in file.operations} - {*OPERATIONS})
        if unknown or len(file.inputs) != 1:
            found = f"{', '.join(unknown)} or {len(file.inputs)} inputs"
            raise ConfigError(f"found an ONNX network of {found}; expected one input and {', '.join(OPERATIONS)}")
        self.file, self.until = file, until or file.outputs[0]
        # Names of tensors have dots in them, which those of buffers may not.
        self.names = {name: f"tensor{i}" for i, name in enumerate(file.tensors)}
        self.whole = {name: x for name, x in file.tensors.items() if not x.is_floating_point()}
        for name, x in file.tensors.items():
            if x.is_floating_point():
                self.register_buffer(self.names[name], x)

    def forward(self, x: Tensor) -> Tensor:
        found: dict[str, Tensor] = {self.file.inputs[0]: x, **self.whole}
        found |= {name: self.get_buffer(own) for name, own in self.names.items() if name not in self.whole}
        for each in self.file.operations:
            found[each.outputs[0]] = computed(each, found)
            if each.outputs[0] == self.until:
                break
        return found[self.until]


def computed(operation: Operation, found: Mapping[str, Tensor]) -> Tensor:
    inputs = [found[name] if name else None for name in operation.inputs]
    return OPERATIONS[operation.kind](inputs, operation.settings)


def before_softmax(file: OnnxFile) -> str:
    """What the last softmax is taken of."""
    return next(each.inputs[0] for each in reversed(file.operations) if each.kind == "Softmax")


def padded(x: Tensor, settings: Settings, filling: float = 0.0) -> Tensor:
    """With what a window needs at the edges of pictures."""
    sizes, strides = settings["kernel_shape"], settings.get("strides", (1, 1))
    if settings.get("auto_pad", "NOTSET") == "SAME_UPPER":
        wanted = [
            max(0, (-(-side // s) - 1) * s + k - side) for side, k, s in zip(x.shape[2:], sizes, strides, strict=True)
        ]
        top, left = (need // 2 for need in wanted)
        bottom, right = wanted[0] - top, wanted[1] - left
    else:
        top, left, bottom, right = settings.get("pads", (0, 0, 0, 0))
    return F.pad(x, (left, right, top, bottom), value=filling) if any((top, left, bottom, right)) else x


def convolution(inputs: Sequence[Any], settings: Settings) -> Tensor:
    x, weight, *bias = inputs
    strides, dilations = settings.get("strides", (1, 1)), settings.get("dilations", (1, 1))
    around = padded(x, settings)
    return F.conv2d(around, weight, bias[0] if bias else None, strides, 0, dilations, settings.get("group", 1))


def largest(inputs: Sequence[Any], settings: Settings) -> Tensor:
    around = padded(inputs[0], settings, -torch.inf)
    return F.max_pool2d(around, settings["kernel_shape"], settings.get("strides", (1, 1)))


def average(inputs: Sequence[Any], settings: Settings) -> Tensor:
    return F.avg_pool2d(padded(inputs[0], settings), settings["kernel_shape"], settings.get("strides", (1, 1)))


def normalised(inputs: Sequence[Any], settings: Settings) -> Tensor:
    x, weight, bias, mean, variance = inputs
    # Written out: on a CPU the gradient of F.batch_norm is wrong where that of its output is laid out channels last.
    scale = weight / (variance + settings.get("epsilon", 1e-5)).sqrt()
    out: Tensor = x * scale[:, None, None] + (bias - mean * scale)[:, None, None]
    return out


def mean(inputs: Sequence[Any], settings: Settings) -> Tensor:
    out: Tensor = inputs[0].mean(tuple(settings["axes"]), keepdim=bool(settings.get("keepdims", 1)))
    return out


def cut(inputs: Sequence[Any], settings: Settings) -> Tensor:
    x, starts, ends, *rest = inputs
    axes = rest[0].tolist() if rest else range(len(starts))
    steps = rest[1].tolist() if len(rest) > 1 else [1] * len(starts)
    places = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        places[axis] = slice(start, end, step)
    out: Tensor = x[tuple(places)]
    return out


def squeezed(inputs: Sequence[Any], settings: Settings) -> Tensor:
    out: Tensor = inputs[0].squeeze(tuple(settings["axes"]))
    return out


def unsqueezed(inputs: Sequence[Any], settings: Settings) -> Tensor:
    out: Tensor = inputs[0]
    for axis in sorted(settings["axes"]):
        out = out.unsqueeze(axis)
    return out


def reshaped(inputs: Sequence[Any], settings: Settings) -> Tensor:
    x, shape = inputs
    out: Tensor = x.reshape([x.shape[i] if side == 0 else side for i, side in enumerate(shape.tolist())])
    return out


OPERATIONS: dict[str, Compute] = {
    "Add": lambda x, _: x[0] + x[1],
    "AveragePool": average,
    "BatchNormalization": normalised,
    "Concat": lambda x, s: torch.cat(list(x), s["axis"]),
    "Conv": convolution,
    "Div": lambda x, _: x[0] / x[1],
    "Erf": lambda x, _: torch.erf(x[0]),
    "HardSigmoid": lambda x, s: (s.get("alpha", 0.2) * x[0] + s.get("beta", 0.5)).clamp(0, 1),
    "Identity": lambda x, _: x[0],
    "MatMul": lambda x, _: x[0] @ x[1],
    "MaxPool": largest,
    "Mul": lambda x, _: x[0] * x[1],
    "Pow": lambda x, _: x[0] ** x[1],
    "ReduceMean": mean,
    "Relu": lambda x, _: x[0].relu(),
    "Reshape": reshaped,
    "Shape": lambda x, _: torch.tensor(x[0].shape),
    "Sigmoid": lambda x, _: x[0].sigmoid(),
    "Slice": cut,
    "Softmax": lambda x, s: x[0].softmax(s["axis"]),
    "Sqrt": lambda x, _: x[0].sqrt(),
    "Squeeze": squeezed,
    "Sub": lambda x, _: x[0] - x[1],
    "Transpose": lambda x, s: x[0].permute(s["perm"]),
    "Unsqueeze": unsqueezed,
}
