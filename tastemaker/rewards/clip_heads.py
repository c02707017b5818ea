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
from ..models.pretrained import WeightsSource, find_published_file, load_state_dict, load_weights_into
from .backbones.dual_encoder import CLIP_L, ClipImageEncoder, ClipResizeMode, load_clip_image_encoder
from .backbones.frozen_models import TINY
from .backbones.published_files import CONTENTS, PublishedFile, require_contents

AESTHETIC_HEAD = WeightsSource(
    "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth", "3.7 MB", "Apache-2.0 upstream"
)
AESTHETIC_FILES = ("sac+logos+ava1-l14-linearMSE.pth", "sa_0_4_vit_l_14_linear.pth")  # LAION's own names
VADER = "https://github.com/mihirp1998/VADER"  # its heads are in `assets/` of the repository, not on the Hub
VADER_HEADS = {
    file: PublishedFile(
        file, f"{VADER}/raw/HEAD/assets/{file}", "", size, "no license", "vader-heads", "the `head:` of the reward"
    )
    for file, size in (("rainy_reward.pt", "3.7 MB"), ("snowy_reward.pt", "3.7 MB"), ("compression_reward.pt", "2 MB"))
}
MEMORY = "1.2 GB, half of it in 16 bits"


@dataclass(frozen=True)
class HeadLayout:
    """The known numberings of a head's linear layers in its file, and whether ReLUs are between them."""

    layer_indices: tuple[tuple[int, ...], ...]
    relu: bool = False


LAION_LAYOUT = HeadLayout(((0, 2, 4, 6, 7), (0,)))  # five layers or one, with only dropout between them
VADER_LAYOUT = HeadLayout(((0, 3, 6, 9), (0, 3, 6, 9, 12)), relu=True)  # of its checkpoint, and of its class


# Outputs of the published heads, before a sigmoid, for six random unit embeddings. They tell apart heads of one shape.
PROBE_SEED, PROBE_WIDTH = 21, 768
RECORDED_OUTPUTS = {
    "the aesthetic head": (4.7252, 5.4189, 5.6176, 5.2211, 5.8769, 4.9469),
    "the head of rain": (-2.2123, -2.5665, -2.1302, -0.6588, -3.1004, -0.8424),
    "the head of snow": (-4.4735, -0.7409, -1.8092, -2.3329, -0.2101, -1.2781),
    "the compression head": (1.4474, 10.5425, 11.7492, 10.1544, 13.4941, 14.4269),
}
RECORDED_FILES = ("sac+logos+ava1-l14-linearMSE.pth", "rainy_reward.pt", "snowy_reward.pt", "compression_reward.pt")


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
        return load_clip_head(self, self.head, AESTHETIC_HEAD, LAION_LAYOUT, placement, "the aesthetic head")

    def transform(self, output: Tensor) -> Tensor:
        return output if self.target is None else -(output - self.target).abs()


@dataclass(frozen=True)
class WeatherReward(ClipHeadReward):
    """The probability of rain or snow (VADER, Prabhudesai et al. 2024), by a linear head and a sigmoid.

    The heads come with VADER's code as `assets/rainy_reward.pt` and `assets/snowy_reward.pt`.
    """

    kind: Literal["rainy", "snowy"] = "rainy"
    weights: str = CLIP_L.hub
    head: str = ""  # a path; if empty, `rainy_reward.pt` or `snowy_reward.pt` here, or as downloaded
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
        contents = "the head of rain" if self.kind == "rainy" else "the head of snow"
        return load_clip_head(self, self.head or file, VADER_HEADS[file], LAION_LAYOUT, placement, contents)

    def transform(self, output: Tensor) -> Tensor:
        return output.sigmoid()


@dataclass(frozen=True)
class CompressionScoreReward(ClipHeadReward):
    """Minus the predicted kilobytes of the image's JPEG at quality 95 (VADER, Prabhudesai et al. 2024).

    The head comes with VADER's code. `jpeg` counts real kilobytes; `compression` is differentiable without a network.
    """

    goal: Literal["compressible", "incompressible"] = "compressible"
    weights: str = CLIP_L.hub
    head: str = "compression_reward.pt"  # a path; this name is also that of the downloaded file
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
        source = VADER_HEADS["compression_reward.pt"]
        return load_clip_head(self, self.head, source, VADER_LAYOUT, placement, "the compression head")

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
    spec: ClipHeadReward,
    head: str,
    source: WeightsSource | PublishedFile,
    layout: HeadLayout,
    placement: Placement,
    contents: str,
) -> ClipHeadScorer:
    """A head on CLIP's shared image encoder. `source` is where the head is published, on the Hub or elsewhere.

    `contents` is what its file must hold; a published head of another kind is refused.
    """
    encoder = load_clip_image_encoder(spec.weights, placement)
    if head == TINY:
        indices = layout.layer_indices[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Head(indices, [encoder.width, *([8] * (len(indices) - 1)), 1], layout.relu)
    elif isinstance(source, WeightsSource):
        path = find_published_file(head, source, "`head`", AESTHETIC_FILES)
        net = require_head(read_head(path, layout), path, contents)
    else:
        path = find_vader_head(head, source)
        net = require_head(read_head(path, layout), path, contents)
    width = next(iter(net.layers.values())).in_features
    if width != encoder.width:
        raise ConfigError(
            f"head: '{head:.200}' takes embeddings of width {width}, but '{spec.weights:.200}' has width "
            f"{encoder.width}; use the CLIP model that the head was trained on [TM379]"
        )
    net = net.to(placement.device, torch.promote_types(placement.dtype, torch.float32))
    return ClipHeadScorer(spec, encoder, net.eval().requires_grad_(False))


def find_vader_head(head: str, source: PublishedFile) -> Path:
    """The path of a head: as given, or of the download if its published name is given."""
    path = Path(head).expanduser()
    if path.is_file():
        return path
    if head == source.name and source.path.is_file():
        return source.path
    raise ConfigError(
        f"head: the file '{head:.200}' does not exist; download {source.url} with `tastemaker download "
        f"{source.folder}`, or set `head` to the path of your copy [TM378]"
    )


def check_vader_head(path: Path) -> None:
    """Refuse a downloaded file that is not the published head of its name."""
    layout = VADER_LAYOUT if path.name == "compression_reward.pt" else LAION_LAYOUT
    require_head(read_head(path, layout), path, CONTENTS[path.name])


def require_head(head: Head, path: Path, contents: str) -> Head:
    """The head itself; refuses a published one of another kind, and one that differs from what its name says."""
    require_contents(path, contents, "`head`")
    if next(iter(head.layers.values())).in_features != PROBE_WIDTH:
        return head
    found = identify_head(head)
    if found not in (None, contents):
        raise ConfigError(
            f"`head` is '{path!s:.200}', which computes the scores of {found}, but {contents} is asked for; name its "
            "file"
            " [TM885]"
        )
    if found is None and path.name in RECORDED_FILES:
        raise ConfigError(
            f"`head` is '{path!s:.200}', which does not compute the scores of {contents}, although it has its name; "
            "fetch it again, or rename your own head"
            " [TM886]"
        )
    return head


@torch.no_grad()
def identify_head(head: Head) -> str | None:
    """Which published head it is, by its outputs for the recorded embeddings."""
    embeddings = torch.randn(6, PROBE_WIDTH, generator=torch.Generator().manual_seed(PROBE_SEED))
    outputs = head.float()(nn.functional.normalize(embeddings, dim=1))
    for name, recorded in RECORDED_OUTPUTS.items():
        if torch.allclose(outputs, torch.tensor(recorded), rtol=0.01, atol=0.02):
            return name
    return None


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
