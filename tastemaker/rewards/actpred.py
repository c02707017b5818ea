"""Action prediction: the probability of the prompt's action in a video, by VideoMAE (VADER; Tong et al. 2022)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.reward import BatchSize, Modality, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights
from .backbones.frozen_models import TINY, load_network, random_network, require_model_type
from .backbones.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

VIDEOMAE = WeightsSource("MCG-NJU/videomae-base-finetuned-kinetics", size="0.35 GB", license="CC-BY-NC-4.0")
# VADER's action for a word of the prompt; the first word that matches counts.
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


@dataclass(frozen=True)
class ActionReward(RewardSpec):
    """The log-probability, or probability, of the prompt's action among the 400 of Kinetics.

    The action is `label`, the prompt's metadata field `action`, the prompt itself if it is a Kinetics action, or that
    of one of VADER's thirteen words in it. Frames are stretched to 224 pixels a side; an odd last frame is dropped.
    """

    label: str | None = None  # the action of every video, whatever its prompt
    log_prob: bool = True  # as VADER's loss; its plots show the probability
    frame_stride: BatchSize = 1  # 2 is VADER's `alt`
    weights: str = VIDEOMAE.hub
    batch_size: BatchSize = 4
    card: ClassVar[RewardCard] = RewardCard(
        range="-6 (chance) to 0; as a probability 0 to 1",
        failure_modes="the object of the action in view without the action; textures with a high classifier score",
        memory="0.35 GB",
        sources=(VIDEOMAE,),
    )
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def load(self, placement: Placement) -> ActionScorer:
        return ActionScorer(self, load_action_classifier(self.weights, placement))

    def tiny(self) -> Self:
        return replace(self, weights=TINY, label=self.label or "playing piano")


@dataclass(frozen=True)
class ActionScorer(Reward):
    spec: ActionReward
    net: ActionClassifier

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        actions = [fields.get("action") for fields in metadata] or [None] * len(prompts)
        labels = [
            self.net.label_id(prompt, self.spec.label or action)
            for prompt, action in zip(prompts, actions, strict=True)
        ]
        log_probs = self.net.log_probs(pixels[:, :: self.spec.frame_stride])  # [B, actions]
        score = log_probs.gather(1, torch.tensor(labels, device=log_probs.device)[:, None])[:, 0]
        return score if self.spec.log_prob else score.exp()


class ActionClassifier:
    """A frozen VideoMAE classifier for videos of any length."""

    def __init__(self, net: Any, placement: Placement) -> None:
        self.net, self.placement = net, placement
        self.labels = {str(name): int(number) for number, name in net.config.id2label.items()}
        self.tubelet_size = int(net.config.tubelet_size)  # frames per patch
        self.preprocessing = Preprocessing(net.config.image_size, "stretch", "bilinear", IMAGENET_MEAN, IMAGENET_STD)

    def log_probs(self, videos: Tensor) -> Tensor:
        """Log-probabilities of all actions [B, actions] in videos [B, F, 3, H, W] in [0, 1]."""
        frames = videos.shape[1] - videos.shape[1] % self.tubelet_size
        if not frames:
            expected = f"expected videos of {self.tubelet_size} frames or more"
            raise ValueError(f"{expected} to classify actions, got {videos.shape[1]}; use longer videos [TM344]")
        prepared = self.preprocessing(videos[:, :frames].flatten(0, 1))
        prepared = prepared.view(len(videos), frames, *prepared.shape[1:])
        self._set_num_frames(frames)
        logits: Tensor = self.net(pixel_values=prepared.to(self.placement.dtype)).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _set_num_frames(self, frames: int) -> None:
        """Set the position embeddings for a number of frames; as sinusoids they exist for any length."""
        config, embeddings = self.net.config, self.net.videomae.embeddings
        count = frames // self.tubelet_size * (config.image_size // config.patch_size) ** 2
        if embeddings.position_embeddings.shape[1] != count or embeddings.position_embeddings.is_meta:
            embeddings.position_embeddings = sinusoidal_positions(count, config.hidden_size).to(self.placement.device)

    def label_id(self, prompt: str, label: str | None) -> int:
        """The class of the action that a video should show."""
        action = label or prompt
        if label is None and prompt not in self.labels:
            action = next((known for word, known in ACTION_ALIASES.items() if word in prompt), "")
        if action not in self.labels:
            close = difflib.get_close_matches(label or prompt, self.labels, 1)
            example = close[0] if close else next(iter(self.labels))
            request = (
                f"label '{label:.80}' is not a known action" if label else f"prompt '{prompt:.80}' has no known action"
            )
            expected = f"an action of Kinetics-400, such as '{example}', in the prompt or as `label`"
            raise ValueError(f"{request}; give {expected} [TM345]")
        return self.labels[action]


def sinusoidal_positions(count: int, width: int) -> Tensor:
    """Position embeddings of alternating sines and cosines: [1, count, width]."""
    rates = 10000.0 ** (-2 * (torch.arange(width, dtype=torch.float64) // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    angles[:, 0::2], angles[:, 1::2] = angles[:, 0::2].sin(), angles[:, 1::2].cos()
    return angles[None].float()


def load_action_classifier(weights: str, placement: Placement) -> ActionClassifier:
    """VideoMAE from a folder in the Hub's layout, or a tiny random one."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    model_class: Any = VideoMAEForVideoClassification
    if weights == TINY:
        names = dict(enumerate(sorted(ACTION_ALIASES.values())))
        config = VideoMAEConfig(
            image_size=32, patch_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, id2label=names, label2id={name: number for number, name in names.items()},
        )  # fmt: skip
        return ActionClassifier(random_network(model_class, config, placement), placement)
    path = find_weights(weights, VIDEOMAE)
    require_model_type(path, "videomae", "`weights` of actpred")
    config = VideoMAEConfig.from_pretrained(path, local_files_only=True)
    return ActionClassifier(load_network(model_class, config, path, placement), placement)
