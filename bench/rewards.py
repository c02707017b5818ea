"""Speed and memory of full-size rewards with random weights.

    python bench/rewards.py                   # on a GPU: ViT-L/14, ViT-H/14 and a 7B judge
    python bench/rewards.py --tiny            # small networks, on any machine

ViT-L/14 needs at least 2 * 304 M weights * 257 tokens = 156 GFLOP per image, so 64 images are 10 TFLOP; ViT-H/14:
2 * 632 M * 257 = 325 GFLOP. A gradient of the pixels costs as much again, because the weights are frozen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from device import DEVICE, default_dtype, device_name, median_seconds, peak_gib, reset_memory  # beside this file
from torch import Tensor

from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.frozen_models import random_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer
from tastemaker.vlm.chat_model import ChatModel, tiny_chat, tiny_tokenizer
from tastemaker.vlm.chat_processors import OneVisionProcessor
from tastemaker.vlm.judge import VlmJudge

BATCH_SIZE, IMAGE_SIZE, REPEATS = 64, 512, 10
JUDGE_BATCH_SIZE = 8
VISION = {
    "ViT-L/14": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "ViT-H/14": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16},
}
TEXT = {
    "ViT-L/14": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "ViT-H/14": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
GFLOP_PER_IMAGE = {"ViT-L/14": 156.0, "ViT-H/14": 325.0}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Measurement:
    """A row of the table."""

    name: str
    what: str
    rate: float  # images/s
    peak: float  # GiB
    note: str = ""


def build_clip_scorer(name: str, placement: Placement, tiny: bool) -> DualEncoderScorer:
    from transformers import CLIPConfig, CLIPModel

    token_ids = {"vocab_size": 514 if tiny else 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision = (SMALL if tiny else VISION[name]) | {"image_size": 224, "patch_size": 14}
    text = (SMALL if tiny else TEXT[name]) | token_ids
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    net = random_network(CLIPModel, config, placement)
    return DualEncoderScorer(
        net, ImagePreprocessing(Preprocessing(224)), FixedLengthTokenizer(tiny_clip_tokenizer(), 77), CosineHead()
    )


def build_judge(placement: Placement, tiny: bool) -> VlmJudge:
    """LLaVA-OneVision 7B: SigLIP so400m at 384 pixels, 730 tokens per image, Qwen2 7B."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    if tiny:
        net, tokenizer = tiny_chat(placement)
        return VlmJudge(ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer)), "yes_no_logits", 0.5)
    tokenizer = tiny_tokenizer()
    text = {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
        "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    token_ids = {f"{kind}_token_index": tokenizer.convert_tokens_to_ids(f"<{kind}>") for kind in ("image", "video")}
    config = LlavaOnevisionConfig(text_config=text, vision_config=vision, vision_feature_layer=-1, **token_ids)
    with torch.device(placement.device), default_dtype(placement.dtype):
        net = LlavaOnevisionForConditionalGeneration(config)
    net.eval().requires_grad_(False)
    return VlmJudge(ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer)), "yes_no_logits", 0.5)


def measure(work: Callable[[], Any]) -> tuple[float, float]:
    """Return seconds per call and peak GiB."""
    reset_memory()
    seconds = median_seconds(work, REPEATS, warmup=2)
    return seconds, peak_gib()


def measure_clip(name: str, placement: Placement, tiny: bool, pixels: Tensor, prompts: list[str]) -> list[Measurement]:
    scorer = build_clip_scorer(name, placement, tiny)
    metadata: list[dict[str, Any]] = [{}] * len(pixels)

    def score() -> None:
        with torch.no_grad():
            scorer.score(pixels, prompts, metadata)

    def score_with_gradient() -> None:
        leaf = pixels.detach().requires_grad_()
        torch.autograd.grad(scorer.score(leaf, prompts, metadata).sum(), leaf)

    inputs = scorer.preprocess(pixels[:, 0])["pixel_values"].to(placement.dtype)

    def run_network() -> None:
        with torch.no_grad():
            scorer.net.get_image_features(pixel_values=inputs)

    (seconds, peak), (network_seconds, _), (gradient_seconds, gradient_peak) = (
        measure(work) for work in (score, run_network, score_with_gradient)
    )
    tflops = GFLOP_PER_IMAGE[name] * len(pixels) / network_seconds / 1e3
    note = f"{network_seconds / seconds:.0%} of it in the network, {tflops:.0f} TFLOP/s"
    ratio = f"{gradient_seconds / seconds:.1f} times the score"
    return [
        Measurement(name, "score", len(pixels) / seconds, peak, note),
        Measurement(name, "with gradient", len(pixels) / gradient_seconds, gradient_peak, ratio),
    ]


def measure_judge(placement: Placement, tiny: bool, pixels: Tensor, prompts: list[str]) -> list[Measurement]:
    judge = build_judge(placement, tiny)
    images, questions = pixels[:JUDGE_BATCH_SIZE, 0], prompts[:JUDGE_BATCH_SIZE]

    def judge_with_gradient() -> None:
        leaf = images.detach().requires_grad_()
        torch.autograd.grad(judge.judge_finished(leaf, questions, "orm").score.sum(), leaf)

    seconds, peak = measure(lambda: judge.judge_finished(images, questions, "orm"))
    gradient_seconds, gradient_peak = measure(judge_with_gradient)
    ratio = f"{gradient_seconds / seconds:.1f} times as long"
    return [
        Measurement("judge, 7B", "yes or no", len(images) / seconds, peak, f"batch of {JUDGE_BATCH_SIZE}"),
        Measurement("judge, 7B", "with gradient", len(images) / gradient_seconds, gradient_peak, ratio),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    placement = Placement(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    batch_size, side = (4, 64) if options.tiny else (BATCH_SIZE, IMAGE_SIZE)
    pixels = torch.rand(batch_size, 1, 3, side, side, device=DEVICE)
    prompts = [f"a photo of {i} dogs" for i in range(batch_size)]
    results = [row for name in VISION for row in measure_clip(name, placement, options.tiny, pixels, prompts)]
    results += measure_judge(placement, options.tiny, pixels, prompts)
    print(f"{batch_size} images of {side}x{side} on {device_name()}, {placement.dtype}")
    print("| network | what | images/s | peak GiB | |\n|---|---|---|---|---|")
    for row in results:
        print(f"| {row.name} | {row.what} | {row.rate:.0f} | {row.peak:.1f} | {row.note} |")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in results], file, indent=1)


if __name__ == "__main__":
    main()
