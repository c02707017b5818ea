"""ImageReward: BLIP with a scalar head, trained on human ratings (Xu et al. 2023)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.reward import BatchSize, CachedImageReward, PretrainedReward, RewardCard
from ..core.types import Placement, Prompts
from ..models.pretrained import WeightsSource, find_published_file, load_state_dict, load_weights_into
from .backbones.frozen_models import TINY
from .backbones.preprocessing import Preprocessing
from .backbones.published_files import require_contents
from .backbones.tokenizers import (
    BERT_TOKENIZER,
    FixedLengthTokenizer,
    load_tokenizer,
    omit_tokenizer,
    tiny_bert_tokenizer,
)

FILE = WeightsSource("THUDM/ImageReward", "ImageReward.pt", "1.8 GB", "Apache-2.0")
MAX_TEXT_TOKENS = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw score over the authors' images
HEAD_WIDTHS = {"0": 1024, "2": 128, "4": 64, "6": 16, "7": 1}  # of the linear layers by key; dropout was between them
KEYS = (
    (r"blip\.visual_encoder\.cls_token", "vision.embeddings.class_embedding"),
    (r"blip\.visual_encoder\.pos_embed", "vision.embeddings.position_embedding"),
    (r"blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"blip\.text_encoder\.", "text."),
    (r"mlp\.layers\.", "head."),
)
UNUSED_KEYS = re.compile(r"blip\.((vision|text)_proj\..+|text_encoder\.embeddings\.position_ids)")


@dataclass(frozen=True)
class ImageReward(PretrainedReward):
    """A score of image and prompt, normalized to mean 0 and standard deviation 1 over the authors' images."""

    weights: str = FILE.hub
    tokenizer: str | None = None  # folder or hub id of bert-base-uncased; else the one beside the weights
    overshoot: Literal["clip", "keep"] = "clip"  # of the bicubic filter; ReFL keeps it
    batch_size: BatchSize = 32
    card: ClassVar[RewardCard] = RewardCard(
        range="-2 to 2",
        failure_modes="crowded, over-detailed images that repeat the prompt's objects; grids of texture at other sizes",
        memory="1.8 GB, half of it in 16 bits",
        sources=(FILE, BERT_TOKENIZER),
    )
    differentiable: ClassVar[bool] = True

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return omit_tokenizer(super().sources, BERT_TOKENIZER, self.tokenizer, self.weights)

    def load(self, placement: Placement) -> ImageRewardScorer:
        if self.weights == TINY:
            net, tokenizer = tiny_blip(), tiny_bert_tokenizer()
        else:
            path = find_published_file(self.weights, FILE, "`weights` of imagereward")
            require_contents(path, "ImageReward", "`weights` of imagereward")
            net = read_blip(load_state_dict(path), self.weights)
            tokenizer = load_tokenizer(self.tokenizer, path, "bert", BERT_TOKENIZER, net.text.config.vocab_size)
        preprocessing = Preprocessing(net.image_size, overshoot=self.overshoot, crop_rounding="round")
        return ImageRewardScorer(net.freeze(placement), preprocessing, FixedLengthTokenizer(tokenizer, MAX_TEXT_TOKENS))


@dataclass(frozen=True)
class ImageRewardScorer(CachedImageReward):
    net: Blip
    preprocessing: Preprocessing
    tokenizer: FixedLengthTokenizer

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Image tokens [B, 1 + patches, D] of the first frames; they do not depend on the prompt."""
        return self.net.encode_images(self.preprocessing(pixels[:, 0]))

    def score_features(self, features: Tensor, prompts: Prompts) -> Tensor:
        raw: Tensor = self.net(features, **self.tokenizer(prompts, features.device))
        return (raw - MEAN) / STD


class Blip(nn.Module):
    """BLIP's image encoder, its text encoder with cross-attention to the image, and a linear head."""

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.vision: Any = BlipVisionModel(BlipVisionConfig(**vision, layer_norm_eps=1e-6))
        # `is_decoder` adds the cross-attention; the text itself attends in both directions.
        unused: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "sep_token_id": 0}
        text_config = BlipTextConfig(**text, **unused, encoder_hidden_size=vision["hidden_size"], is_decoder=True)
        self.text: Any = BlipTextModel(text_config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
        widths = (int(text["hidden_size"]), *HEAD_WIDTHS.values())
        self.head = nn.ModuleDict({key: nn.Linear(widths[i], widths[i + 1]) for i, key in enumerate(HEAD_WIDTHS)})

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        """Preprocessed images [B, 3, H, W] to image tokens [B, 1 + patches, D]."""
        features: Tensor = self.vision(pixel_values.to(self.vision.dtype)).last_hidden_state
        return features

    def forward(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Raw scores, before normalization: [B]."""
        encoded = self.text(input_ids, attention_mask, encoder_hidden_states=features, is_decoder=False)
        x: Tensor = encoded.last_hidden_state[:, 0].to(self.head["0"].weight.dtype)
        for layer in self.head.values():
            x = layer(x)
        return x[:, 0]

    @property
    def image_size(self) -> int:
        return int(self.vision.config.image_size)

    def freeze(self, placement: Placement) -> Blip:
        """Freeze and cast the network, except for the head, which stays in at least 32 bits."""
        self.to(placement.device, placement.dtype).eval().requires_grad_(False)
        self.head.to(dtype=torch.promote_types(placement.dtype, torch.float32))
        return self


def read_blip(tensors: Mapping[str, Tensor], name: str, num_heads: tuple[int, int] | None = None) -> Blip:
    """The network of published tensors; heads have 64 channels unless their numbers (image, text) are given."""
    from transformers.initialization import no_init_weights

    state = {_convert_key(key): x for key, x in tensors.items() if not UNUSED_KEYS.fullmatch(key)}
    try:
        patches = state["vision.embeddings.patch_embedding.weight"]
        positions = state["vision.embeddings.position_embedding"]
        vocabulary = state["text.embeddings.word_embeddings.weight"]
        vision = _encoder_sizes(state, "vision.encoder.layers.", "mlp.fc1.weight")
        text = _encoder_sizes(state, "text.encoder.layer.", "intermediate.dense.weight")
        length = len(state["text.embeddings.position_embeddings.weight"])
    except (KeyError, ValueError) as error:
        expected = "use the published ImageReward.pt"
        raise ConfigError(f"the weights '{name:.200}' do not contain {error}; {expected} [TM396]") from error
    vision_heads, text_heads = num_heads or (vision["hidden_size"] // 64, text["hidden_size"] // 64)
    if not vision_heads or not text_heads:
        raise ConfigError(
            f"the weights '{name:.200}' have widths {vision['hidden_size']} and {text['hidden_size']}, less than "
            "one attention head of 64; use the published ImageReward.pt [TM397]"
        )
    image_size = round((positions.shape[1] - 1) ** 0.5) * patches.shape[-1]
    vision |= {"num_attention_heads": vision_heads, "image_size": image_size, "patch_size": patches.shape[-1]}
    text |= {"num_attention_heads": text_heads, "vocab_size": len(vocabulary), "max_position_embeddings": length}
    with no_init_weights():  # half a billion random numbers that would be overwritten at once
        net = Blip(vision, {**text, "layer_norm_eps": 1e-12})
    load_weights_into(net, state, name)
    return net


def _convert_key(key: str) -> str:
    for pattern, replacement in KEYS:
        key, count = re.subn(f"^{pattern}", replacement, key)
        if count:
            break
    return key


def _encoder_sizes(tensors: Mapping[str, Tensor], prefix: str, first_mlp: str) -> dict[str, int]:
    layers = 1 + max(int(key.removeprefix(prefix).split(".")[0]) for key in tensors if key.startswith(prefix))
    weight = tensors[f"{prefix}0.{first_mlp}"]
    return {"hidden_size": weight.shape[1], "intermediate_size": len(weight), "num_hidden_layers": layers}


def tiny_blip() -> Blip:
    """A small random network whose scores differ: the usual initialization is too close to zero for that."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 64, "max_position_embeddings": 40, "layer_norm_eps": 1e-12}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = Blip(sizes | {"image_size": 32, "patch_size": 8}, text)
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return net
