"""Mask2Former for COCO instances, from mmdet's file or a folder of the Hub, with mmdet's pre- and postprocessing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...evaluation.geneval_rules import CLASSES
from ...models.pretrained import WeightsSource, find_weights, load_state_dict
from . import mask2former_keys as keys
from .frozen_models import TINY, freeze_network, load_network, random_network, read_config
from .published_files import PublishedFile as PublishedFile

HUB_WEIGHTS = WeightsSource("facebook/mask2former-swin-small-coco-instance", size="0.3 GB")
CLASS_HEAD = "class_predictor."
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in bytes
STRIDE = 32  # input sides are multiples of it
PADDING = 128.0  # pixel value, before normalization
MAX_INSTANCES = 100  # per image
Size = tuple[int, int]  # height, width


# The file of GenEval's own script: keys of mmdet 3, weights of mmdet 2. mmdet puts digests into file names.
GENEVAL_DETECTOR = PublishedFile(
    "mmdet/mask2former-swin-s",
    "https://download.openmmlab.com/mmdetection/v3.0/mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco/"
    "mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco_20220504_001756-c9d0c4f2.pth",
    "c9d0c4f2",
    "0.3 GB",
    "Apache-2.0",
)


@dataclass(frozen=True)
class ResizedFrame:
    """Sizes of an image through the pipeline."""

    size: Size  # original
    resized: Size
    padded: Size


@dataclass(frozen=True)
class Instances:
    """Detected instances of one image."""

    label: Tensor  # [M]
    score: Tensor  # [M] class probability times mask confidence
    boxes: Tensor  # [M, 4] left, top, right, bottom; right and bottom are exclusive
    masks: Tensor  # [M, H, W] bool, at the image's own size


@dataclass(frozen=True)
class DetectorPreprocessing:
    """Resize so that the shorter side is `short` and the longer at most `long`, and pad at the right and bottom."""

    short: int = 800
    long: int = 1333

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ResizedFrame]:
        """Images [N, 3, H, W] in [0, 1] as network inputs, and their sizes."""
        height, width = pixels.shape[-2:]
        scale = min(self.long / max(height, width), self.short / min(height, width))
        resized = max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))
        padded = -(-resized[0] // STRIDE) * STRIDE, -(-resized[1] // STRIDE) * STRIDE
        inputs = resize_bilinear((pixels.float() * 255).round().clamp(0, 255).int(), resized).float()
        inputs = F.pad(inputs, (0, padded[1] - resized[1], 0, padded[0] - resized[0]), value=PADDING)
        mean, std = (inputs.new_tensor(x)[:, None, None] for x in (MEAN, STD))
        return (inputs - mean) / std, ResizedFrame((height, width), resized, padded)


def resize_bilinear(values: Tensor, size: Size) -> Tensor:
    """Resize bytes [..., H, W], held as integers, exactly as OpenCV's bilinear filter does."""
    height, width = values.shape[-2:]
    left, left_weight, right_weight = _taps(width, size[1], values.device)
    # Beyond the border OpenCV takes the outermost pixel alone in rows, and mixes it with itself in columns.
    inside = (left >= 0) & (left < width - 1)
    left_weight, right_weight = left_weight.where(inside, 2048), right_weight.where(inside, 0)
    first, second = left.clamp(0, width - 1), (left + 1).clamp(0, width - 1)
    rows = values[..., first] * left_weight + values[..., second] * right_weight
    top, top_weight, bottom_weight = _taps(height, size[0], values.device)
    above, below = (rows[..., k.clamp(0, height - 1), :] >> 4 for k in (top, top + 1))
    return ((top_weight[:, None] * above >> 16) + (bottom_weight[:, None] * below >> 16) + 2) >> 2


def _taps(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pixel before each target position, and the weights of it and of the next one in 2048ths."""
    positions = ((torch.arange(target, dtype=torch.float64) + 0.5) * (source / target) - 0.5).float()
    before = positions.floor()
    fraction = positions - before
    weights = [(x * 2048).round().int().to(device) for x in (1 - fraction, fraction)]
    return before.long().to(device), weights[0], weights[1]


def select_instances(
    classes: Tensor, masks: Tensor, frame: ResizedFrame, threshold: float = 0.0, max_instances: int = MAX_INSTANCES
) -> Instances:
    """Instances above a threshold, from logits [Q, K + 1] and [Q, h, w]; a query may count for several classes."""
    probabilities = classes.softmax(-1)[:, :-1]
    score, index = probabilities.flatten().topk(min(max_instances, probabilities.numel()))
    above = score > threshold  # mask confidence only lowers scores, so the others need no mask
    score, index = score[above], index[above]
    label = index % probabilities.shape[1]
    query, inverse = torch.unique(index // probabilities.shape[1], return_inverse=True)
    logits = upsample_masks(masks[query], frame)
    binary = logits > 0
    confidence = (logits.sigmoid() * binary).sum((1, 2)) / (binary.sum((1, 2)) + 1e-6)
    return Instances(label, score * confidence[inverse], mask_boxes(binary)[inverse], binary[inverse])


def upsample_masks(masks: Tensor, frame: ResizedFrame) -> Tensor:
    """Mask logits [M, h, w] at the image's own size, via the network's input size."""
    if not len(masks):
        return masks.new_zeros(0, *frame.size)
    padded = F.interpolate(masks[None], frame.padded, mode="bilinear", align_corners=False)
    resized = padded[..., : frame.resized[0], : frame.resized[1]]
    return F.interpolate(resized, frame.size, mode="bilinear", align_corners=False)[0]


def mask_boxes(masks: Tensor) -> Tensor:
    """Tight boxes [M, 4] of masks [M, H, W]; zeros for empty masks."""
    columns, rows = masks.any(1), masks.any(2)
    (left, right), (top, bottom) = _extent(columns), _extent(rows)
    boxes = torch.stack([left, top, right, bottom], 1)
    return (boxes * columns.any(1, keepdim=True)).float()


def _extent(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each row that is set, and the one after the last: [M] each."""
    flags = occupied.int()
    return flags.argmax(1), occupied.shape[1] - flags.flip(1).argmax(1)


class Mask2FormerNetwork(nn.Module):
    """Mask2Former with its class head; transformers' class for this brings a loss too, which needs scipy."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.class_predictor = nn.Linear(model.config.hidden_dim, model.config.num_labels + 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits [N, Q, K + 1], the last for no object, and mask logits [N, Q, h, w]."""
        out = self.model(pixel_values=pixels)
        queries = self.model.transformer_module.decoder.layernorm(out.transformer_decoder_last_hidden_state)
        return self.class_predictor(queries), out.masks_queries_logits[-1]


@dataclass(frozen=True)
class Mask2FormerDetector:
    """A network with mmdet's test pipeline."""

    net: Mask2FormerNetwork
    variant: str  # origin of the weights; scores of different ones are not comparable
    preprocessing: DetectorPreprocessing = DetectorPreprocessing()

    @torch.no_grad()
    def detect(self, pixels: Tensor, threshold: float) -> list[Instances]:
        """Instances above the threshold in each of the images [N, 3, H, W]."""
        inputs, frame = self.preprocessing(pixels)
        classes, masks = self.net(inputs.to(self.net.class_predictor.weight.dtype))
        outputs = zip(classes.float(), masks.float(), strict=True)
        return [select_instances(*logits, frame, threshold) for logits in outputs]


def load_mask2former(weights: str, placement: Placement) -> Mask2FormerDetector:
    """A frozen detector of mmdet's file, of a folder in transformers' layout, or tiny and random."""
    if weights == TINY:
        return Mask2FormerDetector(_tiny_network(placement), "random", DetectorPreprocessing(64, 96))
    path = GENEVAL_DETECTOR.local_path() if weights == GENEVAL_DETECTOR.name else find_weights(weights, HUB_WEIGHTS)
    state = load_state_dict(path)
    mmdet = keys.MARKER in state
    net = load_mmdet(state, path, placement) if mmdet else _load_from_hub(state, path, placement)
    num_classes = net.model.config.num_labels
    if num_classes != len(CLASSES):
        raise ConfigError(
            f"{path} has {num_classes} classes; GenEval needs a detector with the {len(CLASSES)} classes of COCO, "
            "so use other weights [TM361]"
        )
    return Mask2FormerDetector(net, f"{'mmdet' if mmdet else 'transformers'}: {path.name}")


def load_mmdet(state: dict[str, Tensor], path: Path, placement: Placement) -> Mask2FormerNetwork:
    from transformers import Mask2FormerConfig

    config = Mask2FormerConfig.from_dict(keys.mask2former_config(state))
    return _load_network(config, keys.convert_keys(state, str(path)), path, placement)


def _load_from_hub(state: dict[str, Tensor], path: Path, placement: Placement) -> Mask2FormerNetwork:
    from transformers import Mask2FormerConfig

    folder = path if path.is_dir() else path.parent
    model_type = read_config(folder).get("model_type")
    if model_type != "mask2former" or f"{CLASS_HEAD}weight" not in state:
        expected = "mmdet's Mask2Former file, or the folder of a mask2former model"
        raise ConfigError(f"{path} has the model type {model_type!s:.40}; give {expected} [TM362]")
    return _load_network(Mask2FormerConfig.from_pretrained(folder, local_files_only=True), state, path, placement)


def _load_network(config: Any, state: dict[str, Tensor], path: Path, placement: Placement) -> Mask2FormerNetwork:
    from transformers import Mask2FormerModel

    width = config.backbone_config.embed_dim * 2 ** (len(config.backbone_config.depths) - 1)
    complete = {**keys.unused_norm(width), **state}
    inner = {key.removeprefix("model."): x for key, x in complete.items() if key.startswith("model.")}
    net = Mask2FormerNetwork(load_network(Mask2FormerModel, config, path, placement, inner))
    head = {key.removeprefix(CLASS_HEAD): x for key, x in state.items() if key.startswith(CLASS_HEAD)}
    net.class_predictor.load_state_dict(head)
    frozen: Mask2FormerNetwork = freeze_network(net, placement)
    return frozen


def _tiny_network(placement: Placement) -> Mask2FormerNetwork:
    """A small random network with large class weights, so that it detects something in every image."""
    from transformers import Mask2FormerConfig, Mask2FormerModel

    swin = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 4}
    sizes = {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "num_queries": 12, "num_labels": 80}
    layers = {"encoder_layers": 1, "decoder_layers": 3, "encoder_feedforward_dim": 32, "dim_feedforward": 32}
    backbone = {**swin, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    config = Mask2FormerConfig.from_dict({"backbone_config": backbone, **sizes, **layers, "num_attention_heads": 2})
    model = random_network(Mask2FormerModel, config, Placement())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Mask2FormerNetwork(model)
    net.class_predictor.weight.data *= 20
    frozen: Mask2FormerNetwork = freeze_network(net, placement)
    return frozen
