"""Aesthetic Predictor V2.5: an affine map of SigLIP's image embedding, by discus0434. Its head is AGPL-3.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights, load_state_dict
from .backbones.dual_encoder import TINY_SIZES, normalize_features
from .backbones.frozen_models import TINY, load_network, random_network, read_config
from .backbones.preprocessing import Preprocessing
from .backbones.published_files import require_contents

SIGLIP = WeightsSource("google/siglip-so400m-patch14-384", size="3.5 GB", license="Apache-2.0")
FILE = "aesthetic_predictor_v2_5.pth"  # in the repository github.com/discus0434/aesthetic-predictor-v2-5
LAYERS = (0, 2, 4, 6, 8)
HALF = (0.5, 0.5, 0.5)
VISION = "vision_model."


@dataclass(frozen=True)
class AestheticV25Reward(RewardSpec):
    """Aesthetic Predictor V2.5: how much people like an image, from 1 to 10. The head's license is AGPL-3.0.

    The head is not included and is not downloaded: set `head` to your copy of aesthetic_predictor_v2_5.pth.
    """

    head: str = FILE  # the path of your copy
    weights: str = SIGLIP.hub
    batch_size: BatchSize = 32
    card: ClassVar[RewardCard] = RewardCard(
        range="1 to 10; good from 5.5",
        failure_modes="as `aesthetic`: its gradient points one way for every image, so textures with that embedding "
        "go beyond 10",
        memory="1.7 GB, half of it in 16 bits; 503 images/s on an H200",
        sources=(SIGLIP,),
        own_files=("your copy of aesthetic_predictor_v2_5.pth (2.6 MB, AGPL-3.0)",),
    )
    differentiable: ClassVar[bool] = True

    def tiny(self) -> Self:
        return replace(self, weights=TINY, head=TINY)

    def load(self, placement: Placement) -> AestheticV25Scorer:
        net = load_siglip_vision(self.weights, placement)
        width = int(net.config.hidden_size)
        if self.head == TINY:
            weight = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            bias = torch.tensor(5.0, dtype=torch.float64)
        else:
            weight, bias = read_affine_head(Path(self.head).expanduser())
        if len(weight) != width:
            raise ConfigError(
                f"head: '{self.head:.200}' takes embeddings of width {len(weight)}, but '{self.weights:.200}' has "
                f"width {width}; use {SIGLIP.hub} [TM2130]"
            )
        dtype = torch.promote_types(placement.dtype, torch.float32)
        return AestheticV25Scorer(net, weight.to(placement.device, dtype), bias.to(placement.device, dtype))


@dataclass(frozen=True)
class AestheticV25Scorer(Reward):
    net: Any
    weight: Tensor  # [D]
    bias: Tensor  # []

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        prepared = Preprocessing(self.net.config.image_size, "stretch", "bicubic", HALF, HALF)(pixels[:, 0])
        embedding = normalize_features(self.net(pixel_values=prepared.to(self.net.dtype)).pooler_output)
        return embedding @ self.weight + self.bias


def read_affine_head(path: Path) -> tuple[Tensor, Tensor]:
    """The head's five linear layers, between which there is no activation, as one: weight [D] and bias, in 64 bits."""
    if not path.is_file():
        raise ConfigError(
            f"head: the file '{path!s:.200}' does not exist; get {FILE} (AGPL-3.0) from "
            "https://github.com/discus0434/aesthetic-predictor-v2-5, and set `head` to its path [TM2131]"
        )
    require_contents(path, "the aesthetic head V2.5", "`head` of aesthetic_v25")
    tensors = {key.removeprefix("scoring_head."): x.double() for key, x in load_state_dict(path).items()}
    expected = {f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")}
    if set(tensors) != expected or not _is_chain(tensors):
        raise ConfigError(
            f"head: {path} holds {sorted(tensors)[:3]}; expected scoring_head.N.weight and .bias of the layers "
            f"{list(LAYERS)} from an embedding to one number, so give {FILE} [TM2132]"
        )
    weight, bias = tensors["8.weight"], tensors["8.bias"]
    for layer in reversed(LAYERS[:-1]):
        bias = weight @ tensors[f"{layer}.bias"] + bias
        weight = weight @ tensors[f"{layer}.weight"]
    return weight[0], bias[0]


def _is_chain(tensors: Mapping[str, Tensor]) -> bool:
    """Whether each layer takes what the one before returns, and the last returns one number."""
    weights = [tensors[f"{layer}.weight"] for layer in LAYERS]
    biases = [tensors[f"{layer}.bias"] for layer in LAYERS]
    if any(w.ndim != 2 for w in weights) or any(b.shape != w.shape[:1] for w, b in zip(weights, biases, strict=True)):
        return False
    widths = [len(w) for w in weights]
    return widths[-1] == 1 and all(w.shape[1] == width for w, width in zip(weights[1:], widths[:-1], strict=True))


def load_siglip_vision(weights: str, placement: Placement) -> Any:
    """The frozen image encoder of a SigLIP with its pooling head."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    if weights == TINY:
        config: Any = SiglipVisionConfig.from_dict({**TINY_SIZES, "image_size": 28, "patch_size": 14})
        return random_network(SiglipVisionModel, config, placement)
    path = find_weights(weights, SIGLIP)
    folder = path if path.is_dir() else path.parent
    model_type = read_config(folder).get("model_type")
    if model_type != "siglip":
        raise ConfigError(
            f"`weights` of aesthetic_v25 is '{weights:.200}', a network of the type {model_type!s:.40}; expected "
            f"{SIGLIP.hub} [TM2133]"
        )
    config = SiglipVisionConfig.from_pretrained(folder, local_files_only=True)
    tensors = {key.removeprefix(VISION): x for key, x in load_state_dict(path).items() if key.startswith(VISION)}
    return load_network(SiglipVisionModel, config, path, placement, tensors)
