"""Mask2Former for things of COCO, out of mmdet's own file or a folder as the hub's; no part of it is for training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...evaluation.geneval_rules import CLASSES
from ...models.pretrained import WeightsSource, find_weights, load_state_dict
from . import mask2former_keys as keys
from .instance_segmentation import DetectorPreprocessing, Instances, select_instances
from .loading import TINY, freeze_network, load_network, random_network, read_config
from .published_files import DETECTOR

META = WeightsSource("facebook/mask2former-swin-small-coco-instance", size="0.3 GB", licence="its page tells")
HEAD = "class_predictor."


class Mask2FormerNetwork(nn.Module):
    """Mask2Former with its classes; transformers' own class brings a loss as well, which needs scipy."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.class_predictor = nn.Linear(model.config.hidden_dim, model.config.num_labels + 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of classes [N, Q, K + 1], the last for nothing, and of masks [N, Q, h, w]."""
        out = self.model(pixel_values=pixels)
        seen = self.model.transformer_module.decoder.layernorm(out.transformer_decoder_last_hidden_state)
        return self.class_predictor(seen), out.masks_queries_logits[-1]


@dataclass(frozen=True)
class Mask2FormerDetector:
    """A detector with the tests' pipeline of mmdet before and after it."""

    net: Mask2FormerNetwork
    variant: str  # whose weights these are, for scores of others are not comparable
    looks: DetectorPreprocessing = DetectorPreprocessing()

    @torch.no_grad()
    def find(self, pixels: Tensor, floor: float) -> list[Instances]:
        """Things in pictures [N, 3, H, W] that are surer than the floor."""
        inputs, frame = self.looks(pixels)
        classes, masks = self.net(inputs.to(self.net.class_predictor.weight.dtype))
        return [select_instances(*row, frame, floor) for row in zip(classes.float(), masks.float(), strict=True)]


def load_mask2former(weights: str, placement: Placement) -> Mask2FormerDetector:
    """A frozen detector: of mmdet's file, of a folder in transformers' layout, or small and random."""
    if weights == TINY:
        return Mask2FormerDetector(_tiny(placement), "random", DetectorPreprocessing(64, 96))
    path = DETECTOR.here() if weights == DETECTOR.name else find_weights(weights, META)
    state = load_state_dict(path)
    theirs = keys.MARK in state
    net = load_mmdet(state, path, placement) if theirs else _of_hub(state, path, placement)
    known = net.model.config.num_labels
    if known != len(CLASSES):
        raise ConfigError(f"{path} knows {known} classes; GenEval needs a detector of COCO's {len(CLASSES)}")
    return Mask2FormerDetector(net, f"{'mmdet' if theirs else 'transformers'}: {path.name}")


def load_mmdet(state: dict[str, Tensor], path: Path, placement: Placement) -> Mask2FormerNetwork:
    from transformers import Mask2FormerConfig

    sizes = keys.mask2former_config(state)
    return _filled(Mask2FormerConfig.from_dict(sizes), keys.convert_keys(state, str(path)), path, placement)


def _of_hub(state: dict[str, Tensor], path: Path, placement: Placement) -> Mask2FormerNetwork:
    from transformers import Mask2FormerConfig

    folder = path if path.is_dir() else path.parent
    kind = read_config(folder).get("model_type")
    if kind != "mask2former" or f"{HEAD}weight" not in state:
        raise ConfigError(
            f"{path} is of the type {kind!s:.40}; expected mmdet's Mask2Former file, or the folder of a mask2former"
        )
    return _filled(Mask2FormerConfig.from_pretrained(folder, local_files_only=True), state, path, placement)


def _filled(config: Any, state: dict[str, Tensor], path: Path, placement: Placement) -> Mask2FormerNetwork:
    from transformers import Mask2FormerModel

    width = config.backbone_config.embed_dim * 2 ** (len(config.backbone_config.depths) - 1)
    whole = {**keys.unused_norm(width), **state}
    inner = {key.removeprefix("model."): x for key, x in whole.items() if key.startswith("model.")}
    net = Mask2FormerNetwork(load_network(Mask2FormerModel, config, path, placement, inner))
    head = {key.removeprefix(HEAD): x for key, x in state.items() if key.startswith(HEAD)}
    net.class_predictor.load_state_dict(head)
    return _still(net, placement)


def _still(net: Mask2FormerNetwork, placement: Placement) -> Mask2FormerNetwork:
    found: Mask2FormerNetwork = freeze_network(net, placement)
    return found


def _tiny(placement: Placement) -> Mask2FormerNetwork:
    """Small and random, with sharp classes, so that it finds something everywhere."""
    from transformers import Mask2FormerConfig, Mask2FormerModel

    swin = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 4}
    small = {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "num_queries": 12, "num_labels": 80}
    layers = {"encoder_layers": 1, "decoder_layers": 3, "encoder_feedforward_dim": 32, "dim_feedforward": 32}
    backbone = {**swin, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    config = Mask2FormerConfig.from_dict({"backbone_config": backbone, **small, **layers, "num_attention_heads": 2})
    model = random_network(Mask2FormerModel, config, Placement())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Mask2FormerNetwork(model)
    net.class_predictor.weight.data *= 20
    return _still(net, placement)
