"""EditReward: Qwen2.5-VL 7B with two heads that rate an edited image beside its source (Wu et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights, load_state_dict, load_weights_into
from .backbones.frozen_models import TINY
from .backbones.qwen2_vl import (
    QwenPreprocessing,
    QwenRewardBackbone,
    RewardRequest,
    freeze_head,
    load_backbone,
    read_template,
    reward_head,
    tiny_backbone,
)
from .reference_images import reference_images

WEIGHTS = WeightsSource("TIGER-Lab/EditReward-Qwen2.5-VL-7B", size="16.6 GB", license="license on its page, code MIT")
BASE = "Qwen/Qwen2.5-VL-7B-Instruct"
BASE_CONFIG = WeightsSource(BASE, "config.json", "2 kB", "Apache-2.0")
BASE_TOKENIZER = WeightsSource(BASE, "tokenizer.json", "7 MB", "Apache-2.0")
BASE_TOKENIZER_CONFIG = WeightsSource(BASE, "tokenizer_config.json", "7 kB", "Apache-2.0")
FILES = ("model.safetensors", "model.pth")
REWARD_TOKEN = "<|Reward|>"
PIXELS = 200704  # of source and edited image, as 448x448
# Instruction following is rated by head 0, quality by head 1, each with a text of its own.
TEMPLATE_NAMES = ("editreward.dim1", "editreward.dim2")
HEADS = "rm_heads."


@dataclass(frozen=True)
class EditRewardReward(PretrainedReward):
    """The mean of EditReward's two ratings of an edit: how well it follows the instruction, and how good it looks.

    The prompt is the instruction, and the metadata hold the source image; of several, the first, which is the one that
    is edited, because the model was trained with one. Scores have no bound.
    """

    source: str = "image"  # key of the metadata that holds the source image or a list of them, paths or pixels
    weights: str = WEIGHTS.hub  # or a folder with the published file, or a file; that of MiMo-VL needs its own `base`
    base: str = BASE  # folder or hub id with the config.json and the tokenizer of the base model
    round_to_bytes: bool = False  # of pixels, as in the published code; the gradient passes straight through
    batch_size: BatchSize = 2
    card: ClassVar[RewardCard] = RewardCard(
        range="-3 to 2",
        failure_modes="not known; check that unchanged sources and oversharpened edits score low",
        memory="16.6 GB in 16 bits; two passes; speed not measured",
        sources=(WEIGHTS, BASE_CONFIG, BASE_TOKENIZER, BASE_TOKENIZER_CONFIG),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> EditRewardScorer:
        preprocessing = QwenPreprocessing(PIXELS, PIXELS, self.round_to_bytes)
        if self.weights == TINY:
            backbone = tiny_backbone([REWARD_TOKEN], placement)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                heads = rating_heads(backbone.width)
            return EditRewardScorer(self.source, backbone, freeze_head(heads, placement), preprocessing)
        path = find_edit_reward(self.weights)
        tensors = load_state_dict(path)
        head_tensors = {key.removeprefix(HEADS): x for key, x in tensors.items() if key.startswith(HEADS)}
        body = {key: x for key, x in tensors.items() if not key.startswith(HEADS)}
        backbone = load_backbone(body, self.base, BASE_CONFIG, [REWARD_TOKEN], path, placement)
        heads = rating_heads(backbone.width)
        load_weights_into(heads, head_tensors, path)
        return EditRewardScorer(self.source, backbone, freeze_head(heads, placement), preprocessing)


@dataclass(frozen=True)
class EditRewardScorer(Reward):
    source: str
    backbone: QwenRewardBackbone
    heads: nn.Module
    preprocessing: QwenPreprocessing

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.rate(pixels, prompts, metadata).mean(1)

    def rate(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Instruction following and quality, the means that the heads predict: [B, 2]."""
        sources = [images[0].to(pixels)[None] for images in reference_images(self.source, prompts, metadata)]
        ratings = []
        for name, head in zip(TEMPLATE_NAMES, self.heads.children(), strict=True):
            template = read_template(name) + read_template("hpsv3.suffix")
            requests = [
                RewardRequest((source, clip[:1]), self.backbone.fill_template(template, prompt))
                for source, clip, prompt in zip(sources, pixels, prompts, strict=True)
            ]
            hidden = self.backbone.hidden_states(requests, self.preprocessing)[:, 0]
            ratings.append(head(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))[:, 0])
        return torch.stack(ratings, 1).to(pixels.device)


def rating_heads(width: int) -> nn.ModuleDict:
    """A head of its own for each rating, with random weights."""
    return nn.ModuleDict({f"head_{k}": reward_head(width) for k in range(len(TEMPLATE_NAMES))})


def find_edit_reward(weights: str) -> Path:
    """The published file of a folder or hub id; a folder of shards, or a file, is returned as it is."""
    path = find_weights(weights, WEIGHTS)
    if not path.is_dir() or any(path.glob("*.index.json")):
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise ConfigError(
        f"`weights` of edit_reward is the folder '{weights:.200}', which has no {' or '.join(FILES)}; download it with "
        f"`tastemaker download {WEIGHTS}`, or name the file itself [TM2121]"
    )
