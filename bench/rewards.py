"""Speed and memory of full-size rewards with random weights.

    python bench/rewards.py                           # on a GPU: all of them
    python bench/rewards.py --rewards hpsv3,deqa      # some of them
    python bench/rewards.py --tiny                    # small networks, on any machine

A reward that fails is reported, the others are measured, and the exit code is 1.

ViT-L/14 needs at least 2 * 304 M weights * 257 tokens = 156 GFLOP per image, so 64 images are 10 TFLOP; ViT-H/14:
2 * 632 M * 257 = 325 GFLOP. A gradient of the pixels costs as much again, because the weights are frozen.

Rewards on Qwen2-VL and mPLUG-Owl2 read their published instructions. Without their vocabularies, a word or a run of
punctuation is one token.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from device import DEVICE, default_dtype, device_name, median_seconds, peak_gib, reset_memory  # beside this file
from sections import result_writer
from torch import Tensor, nn

from tastemaker.core.reward import Reward
from tastemaker.core.types import Placement
from tastemaker.rewards import edit_reward, hpsv3, video_align
from tastemaker.rewards.aesthetic_v25 import AestheticV25Scorer
from tastemaker.rewards.backbones.dual_encoder import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.frozen_models import random_network
from tastemaker.rewards.backbones.mplug_owl2 import TINY_SIZES, MplugOwl2, OwlQuestion, OwlSizes
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.backbones.qwen2_vl import (
    QwenPreprocessing,
    QwenRewardBackbone,
    freeze_head,
    qwen_config,
    reward_head,
    tiny_qwen_tokenizer,
)
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer
from tastemaker.rewards.image_similarity import DINO_SIZE, DinoEncoder, ImageSimilarityScorer
from tastemaker.rewards.musiq import MusiqNet, MusiqScorer
from tastemaker.rewards.quality_levels import DEQA_VALUES, QALIGN_VALUES, LevelScorer
from tastemaker.vlm.chat_model import ChatModel, tiny_chat, tiny_tokenizer
from tastemaker.vlm.chat_processors import OneVisionProcessor
from tastemaker.vlm.judge import VlmJudge

BATCH_SIZE, IMAGE_SIZE, REPEATS = 64, 512, 10
SCORE_REPEATS = 3  # of rewards of which only the score is measured
JUDGE_BATCH_SIZE = 8
CLIP_FRAMES, CLIP_SIZE, CLIP_FPS = 8, 256, 2.0  # video_align reads 2 frames per second, so all of them
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
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
DINO = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 518}
QWEN_TEXT = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "2B": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
QWEN_TOKENS = 151657  # of the published tokenizers; each reward adds its own
# As many ids as LLaMA's tokens of the published question, with 65 embeddings of the image in between.
OWL_QUESTION = OwlQuestion(tuple(range(1, 16)), tuple(range(16, 29)), tuple(range(30, 35)))


@dataclass(frozen=True)
class Measurement:
    """A row of the table."""

    name: str
    what: str
    rate: float  # samples/s
    peak: float  # GiB
    note: str = ""
    unit: str = "images/s"


@dataclass(frozen=True)
class Workload:
    """What is scored: sizes are small for small networks."""

    placement: Placement
    tiny: bool

    @property
    def batch_size(self) -> int:
        return 2 if self.tiny else BATCH_SIZE

    @property
    def image_size(self) -> int:
        return 64 if self.tiny else IMAGE_SIZE

    def samples(self, count: int, frames: int = 1, side: int = 0) -> Tensor:
        """Random pixels [count, frames, 3, side, side] on the device; fewer and smaller for small networks."""
        count, side = min(count, self.batch_size), min(side or self.image_size, self.image_size)
        return torch.rand(count, frames, 3, side, side, device=self.placement.device)


def prompts_of(count: int) -> list[str]:
    return [f"a photo of {i} dogs" for i in range(count)]


def build_network(model_class: Any, config: Any, placement: Placement) -> Any:
    """A frozen random network, made on its device in its dtype: 7B of float32 on the CPU would take minutes."""
    with torch.device(placement.device), default_dtype(placement.dtype):
        return random_network(model_class, config, placement)


def build_clip_scorer(name: str, placement: Placement, tiny: bool) -> DualEncoderScorer:
    from transformers import CLIPConfig, CLIPModel

    token_ids = {"vocab_size": 514 if tiny else 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision = (SMALL if tiny else VISION[name]) | {"image_size": 224, "patch_size": 14}
    text = (SMALL if tiny else TEXT[name]) | token_ids
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    net = build_network(CLIPModel, config, placement)
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
    text = {"model_type": "qwen2", "vocab_size": 152064, "num_hidden_layers": 28} | QWEN_TEXT["7B"]
    vision = SIGLIP | {
        "model_type": "siglip_vision_model", "num_hidden_layers": 26, "image_size": 384, "patch_size": 14,
        "vision_use_head": False,
    }  # fmt: skip
    token_ids = {f"{kind}_token_index": tokenizer.convert_tokens_to_ids(f"<{kind}>") for kind in ("image", "video")}
    config = LlavaOnevisionConfig(text_config=text, vision_config=vision, vision_feature_layer=-1, **token_ids)
    net = build_network(LlavaOnevisionForConditionalGeneration, config, placement)
    return VlmJudge(ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer)), "yes_no_logits", 0.5)


def build_aesthetic_v25(placement: Placement, tiny: bool) -> AestheticV25Scorer:
    """SigLIP so400m at 384 pixels, 729 tokens per image, and the affine head."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(**(SMALL if tiny else SIGLIP), image_size=28 if tiny else 384, patch_size=14)
    net = build_network(SiglipVisionModel, config, placement)
    weight = torch.randn(config.hidden_size, device=placement.device)
    return AestheticV25Scorer(net, weight, torch.tensor(5.0, device=placement.device))


def build_dino_similarity(placement: Placement, tiny: bool) -> ImageSimilarityScorer:
    """DINOv2-base, whose position embeddings of 518 pixels are interpolated to 224."""
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 42} if tiny else DINO
    net = build_network(Dinov2Model, Dinov2Config(**sizes, patch_size=14), placement)
    return ImageSimilarityScorer("image", DinoEncoder(net, 28 if tiny else DINO_SIZE))


def build_musiq(placement: Placement, tiny: bool) -> MusiqScorer:
    """The network of the KonIQ weights."""
    sizes = {"width": 32, "mlp_width": 48, "depth": 2, "heads": 2} if tiny else {}
    return MusiqScorer(build_network(partial(MusiqNet, **sizes), 1, placement))


def build_qwen(
    size: str, version: str, reward_tokens: Sequence[str], media: str, placement: Placement, tiny: bool
) -> QwenRewardBackbone:
    """Qwen2-VL or Qwen2.5-VL of the size 2B or 7B without a language-model head; their vision transformers differ."""
    import transformers
    from tokenizers.models import WordLevel

    tokenizer = tiny_qwen_tokenizer(WordLevel({"<unk>": 0}, "<unk>"))  # with bytes, texts were four times as long
    tokenizer.add_tokens(list(reward_tokens), special_tokens=True)
    text = {
        **({"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
           if tiny else QWEN_TEXT[size]),
        "vocab_size": len(tokenizer) if tiny else QWEN_TOKENS + len(reward_tokens),
        "num_hidden_layers": 2 if tiny else 28, "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": QWEN_ROPE | {"mrope_section": [2, 3, 3] if tiny else [16, 24, 24]},
    }  # fmt: skip
    width, depth = (32, 2) if tiny else (1280, 32)
    vision: dict[str, Any] = {"depth": depth, "num_heads": 2 if tiny else 16}
    if version == "2.5":
        vision |= {"hidden_size": width, "out_hidden_size": text["hidden_size"], "window_size": 112}
        vision |= {"intermediate_size": 64 if tiny else 3420, "fullatt_block_indexes": [1] if tiny else [7, 15, 23, 31]}
        config_class, model_class = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLModel
    else:
        vision |= {"embed_dim": width, "hidden_size": text["hidden_size"]}
        config_class, model_class = transformers.Qwen2VLConfig, transformers.Qwen2VLModel
    config = qwen_config(config_class, text, vision, tokenizer)
    return QwenRewardBackbone(build_network(model_class, config, placement), tokenizer, reward_tokens, media)


def build_hpsv3(placement: Placement, tiny: bool) -> hpsv3.Hpsv3Scorer:
    backbone = build_qwen("7B", "2", [hpsv3.REWARD_TOKEN], "image", placement, tiny)
    head = freeze_head(reward_head(backbone.width), placement)
    return hpsv3.Hpsv3Scorer(backbone, head, QwenPreprocessing(hpsv3.PIXELS, hpsv3.PIXELS))


def build_edit_reward(placement: Placement, tiny: bool) -> edit_reward.EditRewardScorer:
    backbone = build_qwen("7B", "2.5", [edit_reward.REWARD_TOKEN], "image", placement, tiny)
    heads = freeze_head(edit_reward.rating_heads(backbone.width), placement)
    preprocessing = QwenPreprocessing(edit_reward.PIXELS, edit_reward.PIXELS)
    return edit_reward.EditRewardScorer("image", backbone, heads, preprocessing)


def build_video_align(placement: Placement, tiny: bool) -> video_align.VideoAlignScorer:
    backbone = build_qwen("2B", "2", video_align.REWARD_TOKENS, "video", placement, tiny)
    head = freeze_head(nn.Linear(backbone.width, 1, bias=False), placement)
    preprocessing = QwenPreprocessing(video_align.MIN_PIXELS, video_align.MAX_PIXELS)
    rater = video_align.VideoRater(backbone, head)
    return video_align.VideoAlignScorer(video_align.VideoAlignReward(), rater, preprocessing)


def build_level_scorer(values: tuple[float, ...], placement: Placement, tiny: bool) -> LevelScorer:
    """mPLUG-Owl2 at 448 pixels, of DeQA-Score and Q-Align, which differ in their values only."""
    net = build_network(MplugOwl2, TINY_SIZES if tiny else OwlSizes(), placement)
    return LevelScorer(net, OWL_QUESTION, values)


@dataclass(frozen=True)
class ScoreCase:
    """A reward of which only `score` is measured."""

    build: Callable[[Placement, bool], Reward]
    batch_size: int
    network: str
    media: str = "image"  # or `edit`, an image with another one in its metadata, or `clip`


SCORE_CASES: dict[str, ScoreCase] = {
    "aesthetic_v25": ScoreCase(build_aesthetic_v25, BATCH_SIZE, "SigLIP so400m"),
    "dino_similarity": ScoreCase(build_dino_similarity, BATCH_SIZE, "DINOv2-base", "edit"),
    "musiq": ScoreCase(build_musiq, BATCH_SIZE, "MUSIQ"),
    "hpsv3": ScoreCase(build_hpsv3, JUDGE_BATCH_SIZE, "Qwen2-VL 7B"),
    "edit_reward": ScoreCase(build_edit_reward, JUDGE_BATCH_SIZE, "Qwen2.5-VL 7B", "edit"),
    "video_align": ScoreCase(build_video_align, JUDGE_BATCH_SIZE, "Qwen2-VL 2B", "clip"),
    "deqa": ScoreCase(partial(build_level_scorer, DEQA_VALUES), JUDGE_BATCH_SIZE, "mPLUG-Owl2 7B"),
    "qalign": ScoreCase(partial(build_level_scorer, QALIGN_VALUES), JUDGE_BATCH_SIZE, "mPLUG-Owl2 7B"),
}
CLIP_NAMES = {"clip": "ViT-L/14", "hps": "ViT-H/14"}
NAMES = (*CLIP_NAMES, "vlm", *SCORE_CASES)


def measure(work: Callable[[], Any], repeats: int = REPEATS, warmup: int = 2) -> tuple[float, float]:
    """Return seconds per call and peak GiB."""
    reset_memory()
    seconds = median_seconds(work, repeats, warmup)
    return seconds, peak_gib()


def measure_clip(name: str, workload: Workload) -> Iterator[Measurement]:
    placement, pixels = workload.placement, workload.samples(BATCH_SIZE)
    prompts = prompts_of(len(pixels))
    scorer = build_clip_scorer(name, placement, workload.tiny)
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
    yield Measurement(name, "score", len(pixels) / seconds, peak, note)
    yield Measurement(name, "with gradient", len(pixels) / gradient_seconds, gradient_peak, ratio)


def measure_judge(workload: Workload) -> Iterator[Measurement]:
    judge = build_judge(workload.placement, workload.tiny)
    images = workload.samples(JUDGE_BATCH_SIZE)[:, 0]
    questions = prompts_of(len(images))

    def judge_with_gradient() -> None:
        leaf = images.detach().requires_grad_()
        torch.autograd.grad(judge.judge_finished(leaf, questions, "orm").score.sum(), leaf)

    seconds, peak = measure(lambda: judge.judge_finished(images, questions, "orm"))
    yield Measurement("judge, 7B", "yes or no", len(images) / seconds, peak, f"batch of {len(images)}")
    gradient_seconds, gradient_peak = measure(judge_with_gradient)
    ratio = f"{gradient_seconds / seconds:.1f} times as long"
    yield Measurement("judge, 7B", "with gradient", len(images) / gradient_seconds, gradient_peak, ratio)


def measure_score(name: str, workload: Workload) -> Iterator[Measurement]:
    case = SCORE_CASES[name]
    clips = case.media == "clip"
    reward = case.build(workload.placement, workload.tiny)
    pixels = workload.samples(case.batch_size, *((CLIP_FRAMES, CLIP_SIZE) if clips else ()))
    prompts = prompts_of(len(pixels))
    metadata: list[dict[str, Any]] = [{}] * len(pixels)
    if clips:
        metadata = [{"fps": CLIP_FPS}] * len(pixels)
    elif case.media == "edit":
        metadata = [{"image": image} for image in workload.samples(len(pixels))[:, 0]]

    def score() -> None:
        with torch.no_grad():
            scores = reward.score(pixels, prompts, metadata)
        assert scores.isfinite().all(), f"scores are {scores.tolist()}"

    seconds, peak = measure(score, 1 if workload.tiny else SCORE_REPEATS, warmup=1)
    shape = f"{CLIP_FRAMES} frames of " if clips else ""
    note = f"{case.network}, batch of {len(pixels)}, {shape}{pixels.shape[-2]}x{pixels.shape[-1]}"
    yield Measurement(name, "score", len(pixels) / seconds, peak, note, "clips/s" if clips else "images/s")


def measure_reward(name: str, workload: Workload) -> Iterator[Measurement]:
    if name in CLIP_NAMES:
        return measure_clip(CLIP_NAMES[name], workload)
    return measure_judge(workload) if name == "vlm" else measure_score(name, workload)


def parse_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(NAMES)):
        raise argparse.ArgumentTypeError(f"unknown rewards {', '.join(unknown)}; expected some of {', '.join(NAMES)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rewards", type=parse_names, default=list(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    placement = Placement(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    workload, record, failed = Workload(placement, options.tiny), result_writer(options.out), []
    side = workload.image_size
    print(f"at most {workload.batch_size} images of {side}x{side} at once on {device_name()}, {placement.dtype}")
    print("| network | what | rate | peak GiB | |\n|---|---|---|---|---|", flush=True)
    for name in options.rewards:
        try:
            for row in measure_reward(name, workload):
                print(
                    f"| {row.name} | {row.what} | {row.rate:.1f} {row.unit} | {row.peak:.1f} | {row.note} |", flush=True
                )
                record(asdict(row))
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
            failed.append(name)
        gc.collect()  # also the frames of the error, so that the next one has the memory
        reset_memory()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
