"""Detectors at random small size, which find something in every picture, with a tokenizer that is in no file."""

from __future__ import annotations

from typing import Any

import torch

from ...core.types import Placement
from .loading import random_network

LABELS = ("person", "cat", "dog", "book", "cup", "mouse")
SPECIAL = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}  # BERT's own
WORDS = {**SPECIAL, **{name: 1030 + place for place, name in enumerate(LABELS)}}


def tiny_yolos(placement: Placement) -> Any:
    from transformers import YolosConfig, YolosForObjectDetection

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sight = {"image_size": [64, 64], "num_detection_tokens": 6, "initializer_range": 0.3}
    config = YolosConfig.from_dict({**small, **sight, "id2label": dict(enumerate(LABELS))})
    net = random_network(YolosForObjectDetection, config, placement)
    tokens = net.vit.embeddings.detection_tokens  # all nought before training, and so the same
    tokens.data = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens)
    net.class_labels_classifier.layers[-1].bias.data[1] += 2  # cats are everywhere
    return net


def tiny_dino(placement: Placement) -> tuple[Any, Any]:
    """A network and its tokenizer."""
    from transformers import BertTokenizer, GroundingDinoConfig, GroundingDinoForObjectDetection

    swin = {"model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 4}
    bert = {"model_type": "bert", "vocab_size": max(WORDS.values()) + 1, "hidden_size": 32, "num_hidden_layers": 1}
    small = {"d_model": 32, "num_queries": 6, "disable_custom_kernels": True}
    encoder = {"encoder_layers": 1, "encoder_ffn_dim": 64, "encoder_attention_heads": 2}
    decoder = {"decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 2}
    parts = {
        "backbone_config": {**swin, "image_size": 64, "out_indices": [2, 3, 4]},
        "text_config": {**bert, "num_attention_heads": 2, "intermediate_size": 64},
    }
    config = GroundingDinoConfig.from_dict({**parts, **small, **encoder, **decoder})
    return random_network(GroundingDinoForObjectDetection, config, placement), BertTokenizer(vocab=WORDS)
