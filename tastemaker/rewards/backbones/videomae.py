"""VideoMAE as a classifier of the actions in clips of any length (Tong et al. 2022)."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor

from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights
from .loading import TINY, load_network, random_network
from .preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

VIDEOMAE = WeightsSource("MCG-NJU/videomae-base-finetuned-kinetics", size="0.35 GB", licence="CC-BY-NC-4.0")
# What VADER takes a word of the prompt to mean, the first that is found.
ACTION_ALIASES = {
    "piano": "playing piano",
    "guitar": "playing guitar",
    "doughnuts": "eating doughnuts",
    "beer": "drinking beer",
    "badminton": "playing badminton",
    "cello": "playing cello",
    "scooter": "riding scooter",
    "ballet": "dancing ballet",
    "pancake": "flipping pancake",
    "violin": "playing violin",
    "wood": "chopping wood",
    "watermelon": "eating watermelon",
    "jogging": "jogging",
}


class ActionClassifier:
    """A frozen VideoMAE with the names of what it tells apart."""

    def __init__(self, net: Any, placement: Placement) -> None:
        self.net, self.placement = net, placement
        self.labels = {str(name): int(number) for number, name in net.config.id2label.items()}
        self.depth = int(net.config.tubelet_size)  # frames that are looked at together
        self.fitted = Preprocessing(net.config.image_size, "stretch", "bilinear", IMAGENET_MEAN, IMAGENET_STD)

    def likely(self, clips: Tensor) -> Tensor:
        """The log-probability of each action in clips [B, F, 3, H, W] in [0, 1]: [B, actions]."""
        rows, frames = len(clips), clips.shape[1] - clips.shape[1] % self.depth
        if not frames:
            raise ValueError(f"actions are told from {self.depth} frames or more, but the clips have {clips.shape[1]}")
        seen = self.fitted(clips[:, :frames].flatten(0, 1))
        seen = seen.view(rows, frames, *seen.shape[1:])
        self._lengthen(frames // self.depth)
        logits: Tensor = self.net(pixel_values=seen.to(self.placement.dtype)).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _lengthen(self, steps: int) -> None:
        """Positions for so many steps; they are sines of the place alone, so a network bears clips of any length."""
        config, embeddings = self.net.config, self.net.videomae.embeddings
        count = steps * (config.image_size // config.patch_size) ** 2
        if embeddings.position_embeddings.shape[1] != count or embeddings.position_embeddings.is_meta:
            embeddings.position_embeddings = sinusoidal_positions(count, config.hidden_size).to(self.placement.device)

    def place(self, prompt: str, label: str | None) -> int:
        """The number of the action that a clip is to show."""
        wanted = label or prompt
        if label is None and prompt not in self.labels:
            wanted = next((action for word, action in ACTION_ALIASES.items() if word in prompt), "")
        if wanted not in self.labels:
            near = difflib.get_close_matches(label or prompt, self.labels, 1)
            hint = f"one of Kinetics-400, such as '{near[0] if near else next(iter(self.labels))}'"
            told = f"the label '{label:.80}' is no action" if label else f"the prompt '{prompt:.80}' names no action"
            raise ValueError(f"{told} the classifier knows; expected {hint}, in the prompt or as `label`")
        return self.labels[wanted]


def sinusoidal_positions(count: int, width: int) -> Tensor:
    """Sines and cosines of places, in turn: [1, count, width]."""
    rates = 10000.0 ** (-2 * (torch.arange(width, dtype=torch.float64) // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    angles[:, 0::2], angles[:, 1::2] = angles[:, 0::2].sin(), angles[:, 1::2].cos()
    return angles[None].float()


def load_action_classifier(weights: str, placement: Placement) -> ActionClassifier:
    """VideoMAE from a folder as the hub's."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    kind: Any = VideoMAEForVideoClassification
    if weights == TINY:
        names = dict(enumerate(sorted(ACTION_ALIASES.values())))
        config = VideoMAEConfig(
            image_size=32, patch_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, id2label=names, label2id={name: number for number, name in names.items()},
        )  # fmt: skip
        return ActionClassifier(random_network(kind, config, placement), placement)
    path = find_weights(weights, VIDEOMAE)
    config = VideoMAEConfig.from_pretrained(path, local_files_only=True)
    return ActionClassifier(load_network(kind, config, path, placement), placement)
