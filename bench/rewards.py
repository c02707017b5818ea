"""How fast rewards of real size are and what memory they take, with random weights: one run, one table.

    python bench/rewards.py                   # on a GPU: ViT-L/14, ViT-H/14 and a judge of 7 billion
    python bench/rewards.py --tiny            # the same lines at small size, on any machine

Floor of ViT-L/14: 2 * 304 M weights * 257 tokens = 156 GFLOP a picture, so 64 pictures are 10 TFLOP; ViT-H/14:
2 * 632 M * 257 = 325 GFLOP. A gradient to the pixels costs as much again, for weights are frozen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.dual_encoders import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.loading import random_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer
from tastemaker.vlm.chat_model import ChatModel
from tastemaker.vlm.chat_processors import OneVisionProcessor
from tastemaker.vlm.judge import VlmJudge
from tastemaker.vlm.tiny_chat_model import tiny_chat, tiny_tokenizer

ROWS, SIDE, REPEATS = 64, 512, 10
VISION = {
    "ViT-L/14": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "ViT-H/14": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16},
}
TEXT = {
    "ViT-L/14": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "ViT-H/14": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
GFLOP = {"ViT-L/14": 156.0, "ViT-H/14": 325.0}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Measured:
    """One line."""

    name: str
    what: str
    rate: float  # pictures a second
    peak: float  # GiB
    note: str = ""


def towers(name: str, placement: Placement, tiny: bool) -> DualEncoderScorer:
    from transformers import CLIPConfig, CLIPModel

    ends = {"vocab_size": 514 if tiny else 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    eyes = (SMALL if tiny else VISION[name]) | {"image_size": 224, "patch_size": 14}
    config = CLIPConfig(text_config=(SMALL if tiny else TEXT[name]) | ends, vision_config=eyes, projection_dim=768)
    net = random_network(CLIPModel, config, placement)
    return DualEncoderScorer(
        net, ImagePreprocessing(Preprocessing(224)), FixedLengthTokenizer(tiny_clip_tokenizer(), 77), CosineHead()
    )


def judge(placement: Placement, tiny: bool) -> VlmJudge:
    """LLaVA-OneVision 7B: SigLIP so400m at 384 pixels, 730 tokens a picture, Qwen2 7B."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    if tiny:
        net, tokenizer = tiny_chat(placement)
        return VlmJudge(ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer)), "yes_no_logits", 0.5)
    tokenizer = tiny_tokenizer()
    text = {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    }  # fmt: skip
    eyes = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
        "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    numbers = {f"{kind}_token_index": tokenizer.convert_tokens_to_ids(f"<{kind}>") for kind in ("image", "video")}
    config = LlavaOnevisionConfig(text_config=text, vision_config=eyes, vision_feature_layer=-1, **numbers)
    with torch.device(placement.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(placement.dtype)  # 28 GB of float32 would be made and thrown away
        try:
            net = LlavaOnevisionForConditionalGeneration(config)
        finally:
            torch.set_default_dtype(before)
    net.eval().requires_grad_(False)
    return VlmJudge(ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer)), "yes_no_logits", 0.5)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds a call and peak GiB, after two calls to warm up."""
    for _ in range(2):
        work()
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    settle(device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return (time.perf_counter() - began) / REPEATS, peak


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def clip_lines(name: str, placement: Placement, tiny: bool, pixels: Tensor, prompts: list[str]) -> list[Measured]:
    scorer, device = towers(name, placement, tiny), pixels.device
    facts: list[dict[str, Any]] = [{}] * len(pixels)

    def score() -> None:
        with torch.no_grad():
            scorer.score(pixels, prompts, facts)

    def climb() -> None:
        leaf = pixels.detach().requires_grad_()
        torch.autograd.grad(scorer.score(leaf, prompts, facts).sum(), leaf)

    prepared = scorer.prepare(pixels[:, 0])["pixel_values"].to(placement.dtype)

    def network() -> None:
        with torch.no_grad():
            scorer.net.get_image_features(pixel_values=prepared)

    (whole, peak), (alone, _), (slope, most) = timed(score, device), timed(network, device), timed(climb, device)
    power = GFLOP[name] * len(pixels) / alone / 1e3
    spent = f"{alone / whole:.0%} of it in the network, {power:.0f} TFLOP/s"
    return [
        Measured(name, "score", len(pixels) / whole, peak, spent),
        Measured(name, "with gradient", len(pixels) / slope, most, f"{slope / whole:.1f} times the score"),
    ]


def judge_lines(placement: Placement, tiny: bool, pixels: Tensor, prompts: list[str]) -> list[Measured]:
    panel = judge(placement, tiny)
    some, asked = pixels[:8, 0], prompts[:8]

    def climb() -> None:
        leaf = some.detach().requires_grad_()
        torch.autograd.grad(panel.outcome(leaf, asked, "orm").score.sum(), leaf)

    seconds, peak = timed(lambda: panel.outcome(some, asked, "orm"), pixels.device)
    slope, most = timed(climb, pixels.device)
    return [
        Measured("judge, 7B", "yes or no", len(some) / seconds, peak, "eight at a time"),
        Measured("judge, 7B", "with gradient", len(some) / slope, most, f"{slope / seconds:.1f} times as long"),
    ]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    chosen = options.parse_args()
    cuda = torch.cuda.is_available()
    placement = Placement(torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32)
    rows, side = (4, 64) if chosen.tiny else (ROWS, SIDE)
    pixels = torch.rand(rows, 1, 3, side, side, device=placement.device)
    prompts = [f"a photo of {i} dogs" for i in range(rows)]
    found = [line for name in VISION for line in clip_lines(name, placement, chosen.tiny, pixels, prompts)]
    found += judge_lines(placement, chosen.tiny, pixels, prompts)
    print(f"{rows} pictures of {side}x{side} on {torch.cuda.get_device_name() if cuda else 'cpu'}, {placement.dtype}")
    print("| network | what | pictures/s | peak GiB | |\n|---|---|---|---|---|")
    for line in found:
        print(f"| {line.name} | {line.what} | {line.rate:.0f} | {line.peak:.1f} | {line.note} |")
    if chosen.out:
        with open(chosen.out, "w", encoding="utf-8") as file:
            json.dump([line.__dict__ for line in found], file, indent=1)


if __name__ == "__main__":
    main()
