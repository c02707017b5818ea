"""LoRA adapters on the tower of a preference model, trained on votes together with the Bradley-Terry head.

The head starts as the one that was fitted to the frozen tower, and adapters start without effect, so that training
starts from the frozen model. Only layers that encode images are adapted: features of texts stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.lora import Lora, LoraWeights
from ..core.reward import ImageTextTower
from ..core.types import PreferenceBatch
from .preference_model import TEMPERATURES, FeatureLayer, PreferenceHead, encode_samples

PREFIX = "adapter."  # of the adapters' tensors in the file of a preference model
HEAD_LR = 1e-2  # relative to the root mean square of the fitted weights
Collate = Callable[[list[int]], PreferenceBatch]


@dataclass(frozen=True)
class AdapterSettings:
    """How adapters are trained."""

    layer: FeatureLayer
    steps: int
    lr: float
    batch_size: int  # votes
    l2: float  # precision of the head's prior
    seed: int


def add_adapters(tower: ImageTextTower, rank: int, seed: int = 0) -> LoraWeights:
    """Add LoRA adapters without effect to the image layers of a tower, in place."""
    net, names = tower.image_layers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LoraWeights(net, Lora(rank=rank).config(net, names))


def adapter_tensors(adapters: LoraWeights) -> dict[str, Tensor]:
    """Copies of the adapters' tensors, by their names in the file of a preference model."""
    return {PREFIX + name: p.detach().clone() for name, p in adapters.trainable().items()}


@torch.no_grad()
def load_adapter_tensors(adapters: LoraWeights, tensors: Mapping[str, Tensor]) -> None:
    """Set the adapters to tensors of `adapter_tensors`; a missing one is a KeyError."""
    for name, p in adapters.trainable().items():
        p.copy_(tensors[PREFIX + name])


def score_pairs(
    tower: ImageTextTower, head: PreferenceHead, batch: PreferenceBatch, layer: FeatureLayer, device: torch.device
) -> Tensor:
    """Logits [B] of the preference for the chosen sample of each pair."""
    pixels = torch.cat([batch.chosen, batch.rejected]).to(device)
    # Rounded as in an 8-bit image, since files are what people voted on.
    pixels = (pixels * 255).round().clamp(0, 255) / 255
    blocks = encode_samples(tower, pixels, [*batch.prompts, *batch.prompts], layer)
    chosen, rejected = head(torch.cat(list(blocks.values()), 1).float()).chunk(2)
    difference: Tensor = chosen - rejected
    return difference


def train_adapters(
    tower: ImageTextTower,
    adapters: LoraWeights,
    head: PreferenceHead,
    collate: Collate,
    targets: Tensor,
    votes: Sequence[int],
    settings: AdapterSettings,
) -> Iterator[int]:
    """Minimize the Bradley-Terry loss of votes over adapters and head, in place; yield the steps done after each.

    `targets` [V] are 1, or 0.5 for a tie, of all votes; `votes` are the places of those to train on.
    """
    device = next(head.parameters()).device
    head.requires_grad_(True)
    head_lr = HEAD_LR * float(head.weight.detach().square().mean().sqrt().clamp(min=1e-3))
    trained = [*adapters.trainable().values(), head.weight]
    groups = [
        {"params": list(adapters.trainable().values()), "lr": settings.lr},
        {"params": [head.weight], "lr": head_lr},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    )
    generator, order = torch.Generator().manual_seed(settings.seed), list[int]()
    for step in range(settings.steps):
        if len(order) < min(settings.batch_size, len(votes)):
            order += [votes[k] for k in torch.randperm(len(votes), generator=generator).tolist()]
        places, order = order[: settings.batch_size], order[settings.batch_size :]
        logits = score_pairs(tower, head, collate(places), settings.layer, device)
        loss = F.binary_cross_entropy_with_logits(logits, targets[places].to(logits))
        prior = settings.l2 * head.weight.square().sum() / (2 * len(votes))
        optimizer.zero_grad()
        torch.autograd.backward(loss + prior)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        yield step + 1
    head.requires_grad_(False)


@torch.no_grad()
def predict_votes(
    tower: ImageTextTower,
    head: PreferenceHead,
    collate: Collate,
    votes: Sequence[int],
    layer: FeatureLayer,
    batch_size: int,
) -> Tensor:
    """Logits of votes for their chosen sample, in float64 on the CPU: [V]."""
    device = next(head.parameters()).device
    parts = [
        score_pairs(tower, head, collate(list(votes[k : k + batch_size])), layer, device).double().cpu()
        for k in range(0, len(votes), batch_size)
    ]
    return torch.cat(parts)


def choose_temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature that calibrates logits [V] of held-out votes."""
    losses = [float(F.binary_cross_entropy_with_logits(logits / t, targets.to(logits))) for t in TEMPERATURES]
    return TEMPERATURES[losses.index(min(losses))]
