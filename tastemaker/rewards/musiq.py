"""MUSIQ: a transformer over patches of an image at three sizes that predicts its technical quality (Ke et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import STATE_DICT_WRAPPERS, load_weights_into, unwrap_state_dict
from ..models.restricted_unpickler import load_pickle
from .backbones.frozen_models import TINY, freeze_network
from .backbones.published_files import require_contents

FILE = "musiq_koniq_ckpt-e95806b9.pth"
RELEASE = "https://github.com/chaofengc/IQA-PyTorch/releases/tag/v0.1-weights"
PATCH, GRID = 32, 10  # pixels of a patch, and positions per side, to which those of every size are mapped
LONGER_SIDES = (224, 384)  # of the two smaller sizes; the third one is that of the image
STEM, STEM_OUT = 64, 256  # channels of the convolutions
TOKEN_SIDE = PATCH // 4  # after the convolutions
GROUPS = 32


@dataclass(frozen=True)
class MusiqReward(PretrainedReward):
    """MUSIQ: the technical quality of an image, from 0 to 100; from 1 to 10 with its AVA weights.

    The weights are not downloaded: set `weights` to your copy of a file of IQA-PyTorch, such as those of KonIQ or SPAQ.
    """

    weights: str = FILE  # the path of your copy; AVA's rate taste, the others technical quality
    batch_size: BatchSize = 4
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 100; AVA 1 to 10",
        failure_modes="noise and halos of sharpening (not measured here); it does not read the prompt",
        memory="0.11 GB; 1,364 images/s on an H200",
        own_files=("your copy of a MUSIQ file of IQA-PyTorch (0.11 GB; Apache-2.0 at MUSIQ's authors)",),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> MusiqScorer:
        if self.weights == TINY:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return MusiqScorer(freeze_network(MusiqNet(1, width=32, mlp_width=48, depth=2, heads=2), placement))
        return MusiqScorer(freeze_network(load_musiq(Path(self.weights).expanduser()), placement))


@dataclass(frozen=True)
class MusiqScorer(Reward):
    net: MusiqNet

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        weight = self.net.embedding.weight
        scores: Tensor = self.net(2 * pixels[:, 0].to(weight.device, weight.dtype) - 1)
        return scores.to(pixels.device)


def load_musiq(path: Path) -> MusiqNet:
    """The network of a published file, whose head tells which one it is."""
    if not path.is_file():
        raise ConfigError(
            f"`weights` of musiq: the file '{path!s:.200}' does not exist; get {FILE} from {RELEASE}, and set "
            "`weights` to its path [TM2313]"
        )
    require_contents(path, "MUSIQ", "`weights` of musiq")
    tensors = unwrap_state_dict(load_pickle(path), path, (*STATE_DICT_WRAPPERS, "params"))
    head = next((tensors[key] for key in ("head.weight", "head.0.weight") if key in tensors), None)
    if head is None or len(head) not in (1, 10):
        raise ConfigError(
            f"{path} has no head with 1 or 10 outputs, as MUSIQ's files have; give {FILE} or another one of {RELEASE} "
            "[TM2314]"
        )
    net = MusiqNet(len(head))
    load_weights_into(net, tensors, path)
    return net


class StandardizedConv(nn.Conv2d):
    """A convolution without bias whose filters have mean 0 and deviation 1, padded as TensorFlow's SAME."""

    def __init__(self, channels: int, out: int, size: int, stride: int = 1) -> None:
        super().__init__(channels, out, size, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, (self.weight - mean) / (std + 1e-5), stride=self.stride)


def pad_same(x: Tensor, size: int, stride: int) -> Tensor:
    """Zeros around [..., H, W], so that ceil(side / stride) windows fit; the odd one is at the end."""
    margins = []
    for side in (x.shape[-1], x.shape[-2]):
        missing = max(0, (-(-side // stride) - 1) * stride + size - side)
        margins += [missing // 2, missing - missing // 2]
    return F.pad(x, margins)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.gn1 = StandardizedConv(channels, channels, 1), nn.GroupNorm(GROUPS, channels, 1e-4)
        self.conv2, self.gn2 = StandardizedConv(channels, channels, 3), nn.GroupNorm(GROUPS, channels, 1e-4)
        self.conv3, self.gn3 = StandardizedConv(channels, out, 1), nn.GroupNorm(GROUPS, out, 1e-4)
        self.conv_proj, self.gn_proj = StandardizedConv(channels, out, 1), nn.GroupNorm(GROUPS, out, 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.gn1(self.conv1(x)))
        y = F.relu(self.gn2(self.conv2(y)))
        return F.relu(self.gn3(self.conv3(y)) + self.gn_proj(self.conv_proj(x)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.unflatten(layer(x), -1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return attended


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return projected


class EncoderBlock(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, 1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, 1e-6), Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        projected: Tensor = self.mlp(self.norm2(x))
        return x + projected


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.position_emb = nn.Parameter(torch.randn(1, GRID * GRID, width) * 0.02)


class Scales(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_emb = nn.Parameter(torch.randn(len(LONGER_SIDES) + 1, width) * 0.02)


class Encoder(nn.Module):
    def __init__(self, width: int, hidden: int, depth: int, heads: int) -> None:
        super().__init__()
        self.posembed_input, self.scaleembed_input = Positions(width), Scales(width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.transformer = nn.ModuleDict(
            {f"encoderblock_{i}": EncoderBlock(width, hidden, heads) for i in range(depth)}
        )
        self.encoder_norm = nn.LayerNorm(width, 1e-6)

    def forward(self, x: Tensor, positions: Tensor, scales: Tensor) -> Tensor:
        """Features [B, C] of the class token, given tokens [B, L, C] with their positions and scales [L]."""
        x = x + self.posembed_input.position_emb[:, positions] + self.scaleembed_input.scale_emb[scales]
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for block in self.transformer.values():
            x = block(x)
        normalized: Tensor = self.encoder_norm(x[:, 0])
        return normalized


class MusiqNet(nn.Module):
    """The network with the names of the published tensors; `outputs` is 1, or 10 for the shares of AVA's votes."""

    def __init__(self, outputs: int, width: int = 384, mlp_width: int = 1152, depth: int = 14, heads: int = 6) -> None:
        super().__init__()
        self.outputs = outputs
        self.conv_root, self.gn_root = StandardizedConv(3, STEM, 7, 2), nn.GroupNorm(GROUPS, STEM, 1e-6)
        self.block1 = Bottleneck(STEM, STEM_OUT)
        self.embedding = nn.Linear(STEM_OUT * TOKEN_SIDE**2, width)
        self.transformer_encoder = Encoder(width, mlp_width, depth, heads)
        head = nn.Linear(width, outputs)
        self.head = head if outputs == 1 else nn.Sequential(head)

    def forward(self, images: Tensor) -> Tensor:
        """Scores [B] of images [B, 3, H, W] in [-1, 1].

        The published network pads the smaller sizes to 49 and 144 patches and gives pairs with a padded one a logit of
        -1000. Their weight is exactly 0, so they are left out here.
        """
        tokens, positions, scales = [], [], []
        for scale, side in enumerate((*LONGER_SIDES, 0)):
            patches, grid = cut_patches(resize_longer_side(images, side) if side else images)
            tokens.append(self._embed(patches))
            positions.append(hash_positions(*grid).to(images.device))
            scales.append(torch.full_like(positions[-1], scale))
        x = self.transformer_encoder(torch.cat(tokens, 1), torch.cat(positions), torch.cat(scales))
        output: Tensor = self.head(x)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.outputs == 1:
            return output[:, 0]
        votes = torch.arange(1, self.outputs + 1, device=output.device, dtype=output.dtype)
        return output.softmax(-1) @ votes

    def _embed(self, patches: Tensor) -> Tensor:
        """Tokens [B, N, C] of patches [B, N, 3, P, P]."""
        x = F.relu(self.gn_root(self.conv_root(patches.flatten(0, 1))))
        x = self.block1(F.max_pool2d(pad_same(x, 3, 2), 3, 2))
        # The published order of a token's values is that of TensorFlow: rows, columns, channels.
        embedded: Tensor = self.embedding(x.permute(0, 2, 3, 1).flatten(1))
        return torch.unflatten(embedded, 0, patches.shape[:2])


def resize_longer_side(images: Tensor, side: int) -> Tensor:
    """Images whose longer side has `side` pixels, by a bicubic filter without antialiasing, as published."""
    height, width = images.shape[-2:]
    ratio = side / max(height, width)
    size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    return F.interpolate(images, size, mode="bicubic")


def cut_patches(images: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Patches [B, N, 3, P, P] of images with zeros around them, row by row, and the numbers of rows and columns."""
    padded = pad_same(images, PATCH, PATCH)
    rows, columns = (side // PATCH for side in padded.shape[-2:])
    x = padded.reshape(len(images), 3, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    return x.flatten(1, 2), (rows, columns)


def hash_positions(rows: int, columns: int) -> Tensor:
    """The position embedding of each patch [rows * columns], by nearest interpolation of a grid."""
    grid = torch.arange(GRID, dtype=torch.float32)[None, None]
    row, column = (F.interpolate(grid, count, mode="nearest")[0, 0].long() for count in (rows, columns))
    return (row[:, None] * GRID + column).flatten()
