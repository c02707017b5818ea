"""PP-OCRv6's small text recognizer as a PyTorch module, with the weights of the ONNX file in rapidocr's wheel.

The ONNX file holds the network as it is deployed: an LCNet whose parallel branches and batch norms are fused into
single convolutions, two transformer blocks over the columns of the line (SVTR) and a linear head for CTC. Its tensors
are read in the order in which the graph uses them, which is the order in which the modules are defined here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...models.protobuf_reader import Fields, chunks, messages, read_fields, read_varint, text

# Channels in, channels out, vertical stride, and whether squeeze-and-excitation follows the depthwise convolution.
BLOCKS = (
    (96, 96, 1, True), (96, 96, 1, False), (96, 96, 1, False), (96, 192, 2, False),
    (192, 192, 1, True), (192, 192, 1, False), (192, 192, 1, True), (192, 192, 1, False), (192, 192, 1, True),
    (192, 192, 1, False), (192, 384, 2, False), (384, 384, 1, True), (384, 384, 1, False),
)  # fmt: skip
WIDTH, HEADS = 120, 8  # of the transformer
FLOAT = 1  # ONNX's number of the type float32


class LCNetStem(nn.Module):
    """Two branches at half the resolution, merged at a quarter: [N, 3, H, W] to [N, 96, H/4, W/4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 48, 3, stride=2, padding=1)
        self.conv2a, self.conv2b = nn.Conv2d(48, 24, 2), nn.Conv2d(24, 48, 2)
        self.conv3 = nn.Conv2d(96, 48, 3, stride=2, padding=1)
        self.conv4 = nn.Conv2d(48, 96, 1)

    def forward(self, x: Tensor) -> Tensor:
        # ONNX's SAME_UPPER pads windows of two pixels at the right and at the bottom.
        x = F.pad(self.conv1(x).relu(), (0, 1, 0, 1))
        branch = F.pad(self.conv2a(x).relu(), (0, 1, 0, 1))
        x = torch.cat([F.max_pool2d(x, 2, stride=1), self.conv2b(branch).relu()], 1)
        out: Tensor = self.conv4(self.conv3(x).relu()).relu()
        return out


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()))


class LCNetBlock(nn.Module):
    """A depthwise convolution, then a pointwise MLP; residual where the width stays."""

    def __init__(self, width: int, out: int, stride: int, excite: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, stride=(stride, 1), padding=1, groups=width)
        self.excitation = SqueezeExcitation(width) if excite else nn.Identity()
        self.fc1, self.fc2 = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, out, 1)
        self.residual = width == out

    def forward(self, x: Tensor) -> Tensor:
        x = self.excitation(self.depthwise(x))
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return x + out if self.residual else out


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with fixed statistics.

    Written out, because on a CPU the gradient of `F.batch_norm` is wrong if that of its output is channels last.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, variance = self.buffers()
        scale = weight / (variance + self.eps).sqrt()
        return x * scale[:, None, None] + (bias - mean * scale)[:, None, None]


def conv_norm(width: int, out: int, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution along the line, batch norm and SiLU."""
    conv = nn.Conv2d(width, out, (1, kernel), padding=(0, kernel // 2), groups=groups, bias=False)
    return nn.Sequential(conv, FrozenBatchNorm2d(out), nn.SiLU())


class TransformerBlock(nn.Module):
    """Self-attention and an MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.fc2(F.silu(self.fc1(self.norm2(x))))
        return out


class PPOCRRecognizer(nn.Module):
    """Lines of text [N, 3, 48, W] in [-1, 1], blue first, to logits [N, W/8, classes] for CTC; class 0 is the blank."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = LCNetStem()
        self.blocks = nn.Sequential(*(LCNetBlock(*block) for block in BLOCKS))
        self.skip, self.reduce = conv_norm(384, WIDTH), conv_norm(384, WIDTH)
        self.local = conv_norm(WIDTH, WIDTH, kernel=7, groups=WIDTH)
        self.encoder = nn.Sequential(TransformerBlock(), TransformerBlock())
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, lines: Tensor) -> Tensor:
        features = F.avg_pool2d(self.blocks(self.stem(lines)), (3, 2))  # [N, 384, 1, W/8]
        x = self.reduce(features)
        x = self.encoder((x + self.local(x)).squeeze(2).transpose(1, 2))
        out: Tensor = self.head(self.norm(x) + self.skip(features).squeeze(2).transpose(1, 2))
        return out


def load_ppocr_recognizer(path: Path) -> tuple[PPOCRRecognizer, list[str]]:
    """The frozen network of rapidocr's ONNX file, and its characters: classes 1, 2, ...; one more is the space."""
    file = read_onnx(path)
    if "character" not in file.metadata:
        raise ConfigError(f"{path} does not list its characters; give a recognizer of PaddleOCR [TM368]")
    net = PPOCRRecognizer(len(file.weights[-1]))
    linear = {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    state = net.state_dict()
    sizes = [(x.T if name in linear else x).numel() for name, x in state.items()]
    if sizes != [x.numel() for x in file.weights]:
        raise ConfigError(f"{path} is not PP-OCRv6's small recognizer; run `pip install 'rapidocr==3.10.*'` [TM369]")
    for (name, parameter), x in zip(state.items(), file.weights, strict=True):
        parameter.copy_(x.T if name in linear else x.view(parameter.shape))
    return net.eval().requires_grad_(False), file.metadata["character"].split("\n")


@dataclass(frozen=True)
class OnnxWeights:
    weights: list[Tensor]  # of float32 and more than one number, in the order in which the graph uses them
    metadata: dict[str, str]


def read_onnx(path: Path) -> OnnxWeights:
    """The weights of an ONNX file that holds its tensors itself; the numbers of fields are those of onnx.proto."""
    try:
        model = read_fields(memoryview(path.read_bytes()))
        (graph,) = messages(model, 7)
        tensors = {text(x, 8): read_tensor(x) for x in messages(graph, 5) if x[2] == [FLOAT]}
        used = dict.fromkeys(str(name, "utf-8") for node in messages(graph, 1) for name in chunks(node, 1))
        weights = [tensors[name] for name in used if name in tensors and tensors[name].numel() > 1]
        return OnnxWeights(weights, {text(x, 1): text(x, 2) for x in messages(model, 14)})
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read as an ONNX file ({error}); install rapidocr again [TM370]") from error


def read_tensor(fields: Fields) -> Tensor:
    """A float32 tensor, as raw bytes or as a packed list of floats."""
    data = b"".join(chunks(fields, 9)) or b"".join(chunks(fields, 4))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(list(_dims(fields.get(1, ()))))


def _dims(values: Sequence[int | memoryview]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
            continue
        position = 0
        while position < len(value):
            dim, position = read_varint(value, position)
            yield dim
