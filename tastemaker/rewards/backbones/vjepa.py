"""V-JEPA 2 as it was trained: the features of hidden parts of a clip, predicted from the rest (Assran et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights
from .loading import TINY, load_network, random_network
from .preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

VJEPA = WeightsSource("facebook/vjepa2-vitl-fpc64-256", size="1.5 GB", licence="MIT")
# How many blocks are hidden, and what share of a frame each covers: many small ones, then two large ones.
BLOCKS = ((8, 0.15), (2, 0.7))
ASPECTS = (0.75, 1.5)
ENLARGED = 256 / 224  # pictures are cropped from this much larger ones


def sample_block_mask(steps: int, side: int, blocks: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Which of the places of a clip are seen and which are to be predicted, the same in all frames: [K], [N - K]."""
    rng = torch.Generator().manual_seed(seed)
    covered = torch.zeros(side, side, dtype=torch.bool)
    for _ in range(blocks):
        aspect = math.exp(float(torch.empty(()).uniform_(*map(math.log, ASPECTS), generator=rng)))
        area = share * side * side
        high, wide = (max(1, min(round(x), side)) for x in (math.sqrt(area * aspect), math.sqrt(area / aspect)))
        top, left = (int(torch.randint(side - x + 1, (), generator=rng)) for x in (high, wide))
        covered[top : top + high, left : left + wide] = True
    if covered.all():
        covered[0, 0] = False  # something must be seen
    everywhere = covered.flatten().repeat(steps)
    return (~everywhere).nonzero().flatten(), everywhere.nonzero().flatten()


class VjepaPredictor:
    """A frozen V-JEPA 2: how far off its guesses at what it does not see are."""

    def __init__(self, net: Any, seeds: Sequence[int], placement: Placement) -> None:
        self.net, self.seeds, self.placement = net, tuple(seeds), placement
        self.depth = int(net.config.tubelet_size)  # frames that are looked at together
        self.crop = int(net.config.crop_size)
        enlarged = int(self.crop * ENLARGED)
        self.fitted = Preprocessing(enlarged, "crop", "bilinear", IMAGENET_MEAN, IMAGENET_STD)

    def surprise(self, clips: Tensor) -> Tensor:
        """The mean absolute error over hidden features of clips [B, F, 3, H, W] in [0, 1]: [B]."""
        frames = clips.shape[1] - clips.shape[1] % self.depth
        if not frames:
            raise ValueError(f"V-JEPA takes {self.depth} frames or more, but the clips have {clips.shape[1]}")
        places = self.net.encoder.embeddings(self._fit(clips[:, :frames]).to(self.placement.dtype))  # [B, N, D]
        whole = self._encoded(places, torch.arange(places.shape[1], device=places.device))
        target = F.layer_norm(whole, whole.shape[-1:])
        side = self.crop // int(self.net.config.patch_size)
        errors = [
            self._error(places, target, *sample_block_mask(frames // self.depth, side, *block, seed))
            for seed in self.seeds
            for block in BLOCKS
        ]
        return torch.stack(errors).mean(0)

    def _fit(self, clips: Tensor) -> Tensor:
        fitted = self.fitted(clips.flatten(0, 1))
        edge = (fitted.shape[-1] - self.crop) // 2
        cropped = fitted[..., edge : edge + self.crop, edge : edge + self.crop]
        return cropped.reshape(*clips.shape[:2], *cropped.shape[1:])

    def _encoded(self, places: Tensor, where: Tensor) -> Tensor:
        """Features of some places of a clip, which know of no others: [B, K, D]."""
        found, numbers = places[:, where], where.expand(len(places), -1)
        for layer in self.net.encoder.layer:
            found = layer(found, numbers)[0]
        out: Tensor = self.net.encoder.layernorm(found)
        return out

    def _error(self, places: Tensor, target: Tensor, seen: Tensor, missing: Tensor) -> Tensor:
        seen, missing = seen.to(places.device), missing.to(places.device)
        # The predictor picks what it may see out of features of the whole clip, so those of the rest are left empty.
        context = torch.zeros_like(target).index_copy(1, seen, self._encoded(places, seen))
        rows = len(places)
        masks = ([seen.expand(rows, -1)], [missing.expand(rows, -1)])
        guess: Tensor = self.net.predictor(context, *masks).last_hidden_state
        exact = torch.promote_types(guess.dtype, torch.float32)
        return (guess.to(exact) - target[:, missing].to(exact)).abs().mean((1, 2))


def load_vjepa(weights: str, masks: int, seed: int, placement: Placement) -> VjepaPredictor:
    """V-JEPA 2 from a folder as the hub's, with so many draws of what is hidden."""
    from transformers import VJEPA2Config, VJEPA2Model

    seeds, kind = range(seed, seed + masks), VJEPA2Model
    if weights == TINY:
        config = VJEPA2Config(
            crop_size=64, patch_size=16, hidden_size=36, num_attention_heads=2, num_hidden_layers=1,
            pred_hidden_size=36, pred_num_attention_heads=2, pred_num_hidden_layers=1, pred_zero_init_mask_tokens=False,
        )  # fmt: skip
        return VjepaPredictor(random_network(kind, config, placement), seeds, placement)
    path = find_weights(weights, VJEPA)
    config = VJEPA2Config.from_pretrained(path, local_files_only=True)
    return VjepaPredictor(load_network(kind, config, path, placement), seeds, placement)
