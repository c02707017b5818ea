"""Similarity of samples to a source or reference image: DINO and CLIP-I, for subjects and edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights
from .backbones.dual_encoder import CLIP_L, ClipResizeMode, load_clip_image_encoder, normalize_features
from .backbones.frozen_models import TINY, load_network, random_network, read_config
from .backbones.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from .reference_images import reference_images

DINO = WeightsSource("facebook/dinov2-base", size="0.35 GB", license="Apache-2.0")
# Classes of transformers by model type: DINOv2, the DINO of DreamBooth's DINO-I, and DINOv3.
DINO_CLASSES = {"dinov2": "Dinov2Model", "vit": "ViTModel", "dinov3_vit": "DINOv3ViTModel"}
DINO_SIZE, DINOV2_SHORTER_SIDE = 224, 256
COPYING = "copies of the reference with its background, pose and light; log a reward of the prompt and the diversity"
Embed = Callable[[Tensor], Tensor]  # images [N, 3, H, W] in [0, 1] to unit features [N, D]


@dataclass(frozen=True)
class DinoSimilarityReward(PretrainedReward):
    """The cosine of DINO's features of the sample and of its reference image; the mean over several references."""

    reference: str = "image"  # key of the metadata that holds the image or a list of them, paths or pixels
    weights: str = DINO.hub  # a DINOv2; or facebook/dino-vits16 for DreamBooth's DINO-I, or a DINOv3
    batch_size: BatchSize = 32
    card: ClassVar[RewardCard] = RewardCard(
        range="0 to 1",
        failure_modes=COPYING,
        memory="0.35 GB, half of it in 16 bits; 186 images/s on an H200",
        sources=(DINO,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> ImageSimilarityScorer:
        return ImageSimilarityScorer(self.reference, load_dino(self.weights, placement))


@dataclass(frozen=True)
class ClipImageSimilarityReward(PretrainedReward):
    """CLIP-I: the cosine of CLIP's embeddings of the sample and of its reference image, or the mean over several."""

    reference: str = "image"  # key of the metadata that holds the image or a list of them, paths or pixels
    weights: str = CLIP_L.hub  # openai/clip-vit-base-patch32 for the published tables
    resize_mode: ClipResizeMode = "crop"
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="0.5 to 1",
        failure_modes=COPYING,
        memory="1.2 GB, half of it in 16 bits; speed as `clip`",
        sources=(CLIP_L,),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> ImageSimilarityScorer:
        encoder = load_clip_image_encoder(self.weights, placement)
        return ImageSimilarityScorer(self.reference, lambda pixels: encoder.embed(pixels, self.resize_mode))


@dataclass(frozen=True)
class ImageSimilarityScorer(Reward):
    reference: str
    embed: Embed

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        features = self.embed(pixels[:, 0])
        scores = []
        for feature, images in zip(features, reference_images(self.reference, prompts, metadata), strict=True):
            with torch.no_grad():
                references = torch.cat([self.embed(image.to(pixels)[None]) for image in images])
            scores.append((references * feature).sum(1).mean())
        return torch.stack(scores)


def load_dino(weights: str, placement: Placement) -> Embed:
    """Unit features of the class token of a DINO, DINOv2 or DINOv3, with the preprocessing of its family."""
    import transformers

    if weights == TINY:
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        net = random_network(transformers.Dinov2Model, transformers.Dinov2Config.from_dict(sizes), placement)
        return DinoEncoder(net, 28)
    path = find_weights(weights, DINO if weights == DINO.hub else WeightsSource(weights))
    folder = path if path.is_dir() else path.parent
    model_type = read_config(folder).get("model_type")
    if model_type not in DINO_CLASSES:
        raise ConfigError(
            f"`weights` of dino_similarity is '{weights:.200}', a network of the type {model_type!s:.40}; expected one "
            f"of {', '.join(DINO_CLASSES)} [TM2122]"
        )
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    network = load_network(getattr(transformers, DINO_CLASSES[model_type]), config, path, placement)
    return DinoEncoder(network, DINO_SIZE)


@dataclass(frozen=True)
class DinoEncoder:
    net: Any
    size: int

    def __call__(self, pixels: Tensor) -> Tensor:
        """Images [N, 3, H, W] in [0, 1] to unit features of the class token [N, D], in at least 32 bits."""
        return normalize_features(self.net(self.preprocess(pixels).to(self.net.dtype)).last_hidden_state[:, 0])

    def preprocess(self, pixels: Tensor) -> Tensor:
        """DINOv2 resizes the shorter side to 256 and crops 224; the others stretch images to 224."""
        if self.net.config.model_type != "dinov2":
            return Preprocessing(self.size, "stretch", "bicubic", IMAGENET_MEAN, IMAGENET_STD)(pixels)
        shorter = self.size * DINOV2_SHORTER_SIDE // DINO_SIZE
        height, width = pixels.shape[-2:]
        resized = (int(shorter * height / min(height, width)), int(shorter * width / min(height, width)))
        if resized != (height, width):
            pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True).clamp(0, 1)
        top, left = ((side - self.size) // 2 for side in resized)
        crop = pixels[..., top : top + self.size, left : left + self.size]
        mean, std = (crop.new_tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
        return (crop - mean) / std
