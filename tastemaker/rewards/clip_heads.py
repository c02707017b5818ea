"""Small heads on the image embedding of CLIP ViT-L/14: aesthetic, weather and compression score."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights, load_state_dict, load_weights_into
from .backbones.dual_encoder import CLIP_L, ClipImageEncoder, ClipResizeMode, load_clip_image_encoder
from .backbones.frozen_models import TINY

AESTHETIC_HEAD = WeightsSource(
    "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth", "3.7 MB", "Apache-2.0 upstream"
)
VADER = "https://github.com/mihirp1998/VADER"  # its heads are in `assets/` of the repository, not on the Hub
MEMORY = "1.2 GB, half of it in 16 bits"


@dataclass(frozen=True)
class HeadLayout:
    """The known numberings of a head's linear layers in its file, and whether ReLUs are between them."""

    layer_indices: tuple[tuple[int, ...], ...]
    relu: bool = False


LAION_LAYOUT = HeadLayout(((0, 2, 4, 6, 7), (0,)))  # five layers or one, with only dropout between them
VADER_LAYOUT = HeadLayout(((0, 3, 6, 9), (0, 3, 6, 9, 12)), relu=True)  # of its checkpoint, and of its class


class ClipHeadReward(RewardSpec):
    """A head on CLIP's image embedding."""

    weights: str
    resize_mode: ClipResizeMode

    @abstractmethod
    def transform(self, output: Tensor) -> Tensor:
        """Scores [B], from the output of the head."""

    def tiny(self) -> Self:
        settings: Any = self  # every spec is a dataclass, which an abstract class cannot say
        return replace(settings, weights=TINY, head=TINY)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AestheticReward(ClipHeadReward):
    """LAION's aesthetic predictor (2022): how much people like an image.

    The head is version 2's `sac+logos+ava1-l14-linearMSE.pth` or version 1's `sa_0_4_vit_l_14_linear.pth`. With a
    `target`, the score is minus the distance to it, as in VADER.
    """

    weights: str = CLIP_L.hub
    head: str = AESTHETIC_HEAD.hub
    resize_mode: ClipResizeMode = "stretch"  # VADER's; `crop` is how the heads were trained
    target: float | None = None
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="4 to 7",
        failure_modes="glow, saturated colors and smooth portraits; its gradient points one way for every image, "
        "so textures with that embedding go far beyond 10",
        memory=MEMORY,
        sources=(CLIP_L, AESTHETIC_HEAD),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> ClipHeadScorer:
        return load_clip_head(self, self.head, AESTHETIC_HEAD, LAION_LAYOUT, placement)

    def transform(self, output: Tensor) -> Tensor:
        return output if self.target is None else -(output - self.target).abs()


@dataclass(frozen=True)
class WeatherReward(ClipHeadReward):
    """The probability of rain or snow (VADER, Prabhudesai et al. 2024), by a linear head and a sigmoid.

    The heads come with VADER's code as `assets/rainy_reward.pt` and `assets/snowy_reward.pt`.
    """

    kind: Literal["rainy", "snowy"] = "rainy"
    weights: str = CLIP_L.hub
    head: str = ""  # a path; `rainy_reward.pt` or `snowy_reward.pt` in the working directory if empty
    resize_mode: ClipResizeMode = "stretch"
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes="gray haze and streaks for rain, white noise for snow",
        memory=MEMORY,
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> ClipHeadScorer:
        file = f"{self.kind}_reward.pt"
        return load_clip_head(self, self.head or file, f"assets/{file} of {VADER}", LAION_LAYOUT, placement)

    def transform(self, output: Tensor) -> Tensor:
        return output.sigmoid()


@dataclass(frozen=True)
class CompressionScoreReward(ClipHeadReward):
    """Minus the predicted kilobytes of the image's JPEG at quality 95 (VADER, Prabhudesai et al. 2024).

    The head comes with VADER's code. `jpeg` counts real kilobytes; `compression` is differentiable without a network.
    """

    goal: Literal["compressible", "incompressible"] = "compressible"
    weights: str = CLIP_L.hub
    head: str = "compression_reward.pt"  # a path
    resize_mode: ClipResizeMode = "stretch"
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="-20 to 0 kilobytes",
        failure_modes="images that look plain to CLIP and are not; log `jpeg` beside it",
        memory=MEMORY,
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> ClipHeadScorer:
        return load_clip_head(self, self.head, f"assets/compression_reward.pt of {VADER}", VADER_LAYOUT, placement)

    def transform(self, output: Tensor) -> Tensor:
        return (-1 if self.goal == "compressible" else 1) * output


class Head(nn.Module):
    """Linear layers under the keys of the published files."""

    def __init__(self, layer_indices: Sequence[int], widths: Sequence[int], relu: bool) -> None:
        super().__init__()
        pairs = zip(layer_indices, pairwise(widths), strict=True)
        self.layers = nn.ModuleDict({str(index): nn.Linear(*sizes) for index, sizes in pairs})
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings [N, D] to scores [N]."""
        for count, layer in enumerate(self.layers.values(), 1):
            x = layer(x)
            if self.relu and count < len(self.layers):
                x = x.relu()
        return x[:, 0]


@dataclass(frozen=True)
class ClipHeadScorer(Reward):
    spec: ClipHeadReward
    encoder: ClipImageEncoder
    head: Head

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.spec.transform(self.head(self.encoder.embed(pixels[:, 0], self.spec.resize_mode)))


def load_clip_head(
    spec: ClipHeadReward, head: str, source: WeightsSource | str, layout: HeadLayout, placement: Placement
) -> ClipHeadScorer:
    """A head on CLIP's shared image encoder. `source` is where the head is published, on the Hub or elsewhere."""
    encoder = load_clip_image_encoder(spec.weights, placement)
    if head == TINY:
        indices = layout.layer_indices[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Head(indices, [encoder.width, *([8] * (len(indices) - 1)), 1], layout.relu)
    elif isinstance(source, WeightsSource):
        net = read_head(find_weights(head, source), layout)
    elif (path := Path(head).expanduser()).is_file():
        net = read_head(path, layout)
    else:
        raise ConfigError(
            f"head: the file '{head:.200}' does not exist; download it from {source} and set `head` to its path [TM378]"
        )
    width = next(iter(net.layers.values())).in_features
    if width != encoder.width:
        raise ConfigError(
            f"head: '{head:.200}' takes embeddings of width {width}, but '{spec.weights:.200}' has width "
            f"{encoder.width}; use the CLIP model that the head was trained on [TM379]"
        )
    net = net.to(placement.device, torch.promote_types(placement.dtype, torch.float32))
    return ClipHeadScorer(spec, encoder, net.eval().requires_grad_(False))


def read_head(path: Path, layout: HeadLayout) -> Head:
    """A published head: numbered layers, or a single layer without a number."""
    tensors = load_state_dict(path)
    if set(tensors) == {"weight", "bias"}:
        tensors = {f"layers.0.{key}": x for key, x in tensors.items()}
    keys = [re.fullmatch(r"layers\.(\d+)\.(weight|bias)", key) for key in tensors]
    indices = tuple(sorted({int(key[1]) for key in keys if key}))
    if indices not in layout.layer_indices or len(tensors) != 2 * len(indices):
        layers = " or ".join(str(list(known)) for known in layout.layer_indices)
        raise ConfigError(
            f"head: {path} contains {list(tensors)[:3]}; expected weights and biases of the layers {layers}, so "
            "give the published file [TM380]"
        )
    shapes = [tensors[f"layers.{index}.weight"].shape for index in indices if f"layers.{index}.weight" in tensors]
    widths = [shape[1] for shape in shapes if len(shape) == 2] + [1]
    if len(widths) != len(indices) + 1:
        raise ConfigError(f"head: {path} has layers that are not matrices; give the published file [TM381]")
    head = Head(indices, widths, layout.relu)
    load_weights_into(head, tensors, path)
    return head
