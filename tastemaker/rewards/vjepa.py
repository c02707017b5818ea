"""Predictability of a video by V-JEPA 2, which was trained to predict features of hidden parts (VADER, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.reward import BatchSize, Modality, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights
from .backbones.frozen_models import TINY, load_network, random_network, require_model_type
from .backbones.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

VJEPA = WeightsSource("facebook/vjepa2-vitl-fpc64-256", size="1.5 GB", license="MIT")
# Number of hidden blocks and the fraction of a frame that each covers: many small ones, then two large ones.
BLOCKS = ((8, 0.15), (2, 0.7))
ASPECT_RATIOS = (0.75, 1.5)
RESIZE_RATIO = 256 / 224  # of the resized frame to its center crop


@dataclass(frozen=True)
class VjepaReward(PretrainedReward):
    """Minus V-JEPA 2's training loss (Assran et al. 2025): the mean absolute error of features of hidden blocks.

    The blocks are drawn as in training, eight small ones or two large ones through all frames, but from a fixed `seed`,
    so that a video has one score. Frames are enlarged by 8/7 and cropped to 256 pixels; an odd last frame is dropped.
    Gradients flow through the visible and through the hidden part.
    """

    num_masks: BatchSize = 1  # draws, each of small and of large blocks
    seed: int = 0
    weights: str = VJEPA.hub
    batch_size: BatchSize = 2
    card: ClassVar[RewardCard] = RewardCard(
        range="about -1 to 0, on a scale of its own for each size of the network; compare videos, not numbers",
        failure_modes="frozen, blurred or empty videos, which are easy to predict: log `dynamics` beside it",
        memory="1.5 GB",
        sources=(VJEPA,),
    )
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def load(self, placement: Placement) -> VjepaScorer:
        return VjepaScorer(load_vjepa(self.weights, self.num_masks, self.seed, placement))


@dataclass(frozen=True)
class VjepaScorer(Reward):
    net: VjepaPredictor

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return -self.net.prediction_error(pixels)


def sample_block_mask(steps: int, side: int, blocks: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of visible and of hidden patches, [K] and [N - K]; the blocks are the same in all frames."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.zeros(side, side, dtype=torch.bool)
    for _ in range(blocks):
        aspect = math.exp(float(torch.empty(()).uniform_(*map(math.log, ASPECT_RATIOS), generator=rng)))
        area = fraction * side * side
        height, width = (max(1, min(round(x), side)) for x in (math.sqrt(area * aspect), math.sqrt(area / aspect)))
        top, left = (int(torch.randint(side - x + 1, (), generator=rng)) for x in (height, width))
        hidden[top : top + height, left : left + width] = True
    if hidden.all():
        hidden[0, 0] = False  # the context must not be empty
    tubes = hidden.flatten().repeat(steps)
    return (~tubes).nonzero().flatten(), tubes.nonzero().flatten()


class VjepaPredictor:
    """A frozen V-JEPA 2 and the error of its predictions."""

    def __init__(self, net: Any, seeds: Sequence[int], placement: Placement) -> None:
        self.net, self.seeds, self.placement = net, tuple(seeds), placement
        self.tubelet_size = int(net.config.tubelet_size)  # frames per patch
        self.crop_size = int(net.config.crop_size)
        resized = int(self.crop_size * RESIZE_RATIO)
        self.preprocessing = Preprocessing(resized, "crop", "bilinear", IMAGENET_MEAN, IMAGENET_STD)

    def prediction_error(self, videos: Tensor) -> Tensor:
        """Mean absolute error over the hidden features of videos [B, F, 3, H, W] in [0, 1]: [B]."""
        frames = videos.shape[1] - videos.shape[1] % self.tubelet_size
        if not frames:
            expected = f"V-JEPA needs videos of {self.tubelet_size} frames or more"
            raise ValueError(f"{expected}, got {videos.shape[1]}; use longer videos [TM409]")
        patches = self.net.encoder.embeddings(self._preprocess(videos[:, :frames]).to(self.placement.dtype))
        features = self._encode(patches, torch.arange(patches.shape[1], device=patches.device))  # [B, N, D]
        target = F.layer_norm(features, features.shape[-1:])
        side = self.crop_size // int(self.net.config.patch_size)
        errors = [
            self._masked_error(patches, target, *sample_block_mask(frames // self.tubelet_size, side, *block, seed))
            for seed in self.seeds
            for block in BLOCKS
        ]
        return torch.stack(errors).mean(0)

    def _preprocess(self, videos: Tensor) -> Tensor:
        frames = self.preprocessing(videos.flatten(0, 1))
        margin = (frames.shape[-1] - self.crop_size) // 2
        cropped = frames[..., margin : margin + self.crop_size, margin : margin + self.crop_size]
        return cropped.reshape(*videos.shape[:2], *cropped.shape[1:])

    def _encode(self, patches: Tensor, indices: Tensor) -> Tensor:
        """Features of some patches of a video, computed from these alone: [B, K, D]."""
        hidden, positions = patches[:, indices], indices.expand(len(patches), -1)
        for layer in self.net.encoder.layer:
            hidden = layer(hidden, positions)[0]
        out: Tensor = self.net.encoder.layernorm(hidden)
        return out

    def _masked_error(self, patches: Tensor, target: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        visible, hidden = visible.to(patches.device), hidden.to(patches.device)
        # The predictor selects the visible ones from features of all patches, so the others are left empty.
        context = torch.zeros_like(target).index_copy(1, visible, self._encode(patches, visible))
        masks = ([visible.expand(len(patches), -1)], [hidden.expand(len(patches), -1)])
        prediction: Tensor = self.net.predictor(context, *masks).last_hidden_state
        dtype = torch.promote_types(prediction.dtype, torch.float32)
        return (prediction.to(dtype) - target[:, hidden].to(dtype)).abs().mean((1, 2))


def load_vjepa(weights: str, num_masks: int, seed: int, placement: Placement) -> VjepaPredictor:
    """V-JEPA 2 from a folder in the Hub's layout, or a tiny random one, with a number of masks."""
    from transformers import VJEPA2Config, VJEPA2Model

    seeds = range(seed, seed + num_masks)
    if weights == TINY:
        config = VJEPA2Config(
            crop_size=64, patch_size=16, hidden_size=36, num_attention_heads=2, num_hidden_layers=1,
            pred_hidden_size=36, pred_num_attention_heads=2, pred_num_hidden_layers=1, pred_zero_init_mask_tokens=False,
        )  # fmt: skip
        return VjepaPredictor(random_network(VJEPA2Model, config, placement), seeds, placement)
    path = find_weights(weights, VJEPA)
    require_model_type(path, "vjepa2", "`weights` of vjepa")
    config = VJEPA2Config.from_pretrained(path, local_files_only=True)
    return VjepaPredictor(load_network(VJEPA2Model, config, path, placement), seeds, placement)
