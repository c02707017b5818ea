"""HPSv3: Qwen2-VL 7B with a preference head, trained on human choices with their uncertainty (Ma et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.reward import BatchSize, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_published_file, load_state_dict, load_weights_into
from .backbones.frozen_models import TINY
from .backbones.published_files import require_contents
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

FILE = WeightsSource("MizzenAI/HPSv3", "HPSv3.safetensors", "16.6 GB", "Apache-2.0")
BASE = "Qwen/Qwen2-VL-7B-Instruct"
BASE_CONFIG = WeightsSource(BASE, "config.json", "2 kB", "Apache-2.0")
BASE_TOKENIZER = WeightsSource(BASE, "tokenizer.json", "7 MB", "Apache-2.0")
BASE_TOKENIZER_CONFIG = WeightsSource(BASE, "tokenizer_config.json", "5 kB", "Apache-2.0")
REWARD_TOKEN = "<|Reward|>"
PIXELS = 200704  # of every image, as 448x448
HEAD = "rm_head."


@dataclass(frozen=True)
class Hpsv3Reward(PretrainedReward):
    """The preferred quality of an image for its prompt: the mean that HPSv3 predicts, without a bound."""

    weights: str = FILE.hub  # or a folder that holds the published file, or a file
    base: str = BASE  # folder or hub id with the config.json and the tokenizer of the base model
    round_to_bytes: bool = False  # of pixels, as in the published code; the gradient passes straight through
    batch_size: BatchSize = 4
    card: ClassVar[RewardCard] = RewardCard(
        range="-2 to 15",
        failure_modes="glossy, detailed images; with reward gradients, oversaturation and high-frequency grain",
        memory="16.6 GB in 16 bits; 38 images/s on an H200",
        sources=(FILE, BASE_CONFIG, BASE_TOKENIZER, BASE_TOKENIZER_CONFIG),
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> Hpsv3Scorer:
        preprocessing = QwenPreprocessing(PIXELS, PIXELS, self.round_to_bytes)
        if self.weights == TINY:
            backbone = tiny_backbone([REWARD_TOKEN], placement)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                head = reward_head(backbone.width)
            return Hpsv3Scorer(backbone, freeze_head(head, placement), preprocessing)
        path = find_published_file(self.weights, FILE, "`weights` of hpsv3")
        require_contents(path, "HPSv3", "`weights` of hpsv3")
        tensors = load_state_dict(path)
        head_tensors = {key.removeprefix(HEAD): x for key, x in tensors.items() if key.startswith(HEAD)}
        body = {key: x for key, x in tensors.items() if not key.startswith(HEAD)}
        backbone = load_backbone(body, self.base, BASE_CONFIG, [REWARD_TOKEN], path, placement)
        head = reward_head(backbone.width)
        load_weights_into(head, head_tensors, path)
        return Hpsv3Scorer(backbone, freeze_head(head, placement), preprocessing)


@dataclass(frozen=True)
class Hpsv3Scorer(Reward):
    backbone: QwenRewardBackbone
    head: nn.Module
    preprocessing: QwenPreprocessing

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return self.predict(pixels, prompts)[:, 0]

    def predict(self, pixels: Tensor, prompts: Prompts) -> Tensor:
        """Mean and logarithm of the standard deviation of the preference: [B, 2]."""
        template = read_template("hpsv3.instruction") + read_template("hpsv3.suffix")
        requests = []
        for clip, prompt in zip(pixels, prompts, strict=True):
            # The suffix holds the reward token, which is removed from prompts only.
            requests.append(RewardRequest((clip[:1],), self.backbone.fill_template(template, prompt)))
        hidden = self.backbone.hidden_states(requests, self.preprocessing)[:, 0]
        output: Tensor = self.head(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
        return output.to(pixels.device)
