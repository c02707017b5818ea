"""Speed of GenEval's scoring of 553 x 4 images and where the time goes, with a random Mask2Former and CLIP.

    python bench/geneval.py --out geneval.json      # on a GPU: Swin-S at 800 pixels, ViT-L/14
    python bench/geneval.py --tiny                  # small networks, on any machine

Random weights detect nothing, so the class logits are scaled until an image has about as many objects as real ones, to
include the cost of masks, boxes and colors. The published code scores one image at a time and draws all hundred masks.
The network is about 310 GFLOP at 800x800, so 2,212 images are 0.69 PFLOP. A sample of the images is measured, and
results are written at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, PhaseTimer, device_name, peak_gib, reset_memory  # beside this file, in no package
from sections import Results, log, log_errors, result_writer, section_deadline
from torch import Tensor, nn

from tastemaker.core.types import Metadata, Placement
from tastemaker.data.image_io import read_image, save_image
from tastemaker.evaluation.evaluate import prefetch_images
from tastemaker.evaluation.geneval import published_prompts
from tastemaker.evaluation.geneval_rules import DetectedObject
from tastemaker.rewards.backbones.frozen_models import freeze_network, random_network
from tastemaker.rewards.backbones.mask2former import (
    Mask2FormerDetector,
    Mask2FormerNetwork,
    load_mask2former,
    select_instances,
)
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer
from tastemaker.rewards.geneval import (
    ClipColorClassifier,
    GenevalChecker,
    apply_rules,
    load_color_classifier,
    to_detections,
)

IMAGE_SIZE, NUM_IMAGES, THRESHOLD = 512, 2212, 0.3
OBJECTS_PER_IMAGE = 5
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def build_detector(placement: Placement, tiny: bool) -> Mask2FormerDetector:
    if tiny:
        return load_mask2former("tiny", placement)
    from transformers import Mask2FormerConfig, Mask2FormerModel

    swin = {
        "model_type": "swin", "embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24], "window_size": 7,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }  # fmt: skip
    config = Mask2FormerConfig.from_dict({"backbone_config": swin, "num_labels": 80})
    with torch.device(placement.device):
        net: Mask2FormerNetwork = freeze_network(
            Mask2FormerNetwork(random_network(Mask2FormerModel, config, placement)), placement
        )
    transformer = net.model.transformer_module
    for embedding in (transformer.queries_features, transformer.queries_embedder):
        embedding.weight.data *= 50  # to a deviation of 1, because equal queries would all detect the same
    return Mask2FormerDetector(net, "random")


@torch.no_grad()
def scale_class_logits(detector: Mask2FormerDetector, pixels: Tensor) -> float:
    """Scale the class logits until enough objects exceed the threshold. Returns the objects per image."""
    head, scale, num_objects = detector.net.class_predictor, 1.0, 0.0
    logits = detector.net(detector.preprocessing(pixels)[0].to(head.weight.dtype))[0].float() - head.bias
    for _ in range(400):
        probabilities = (scale * logits + head.bias).softmax(-1)[..., :-1]
        num_objects = float((probabilities > THRESHOLD).sum() / len(pixels))
        if num_objects >= OBJECTS_PER_IMAGE:
            break
        scale *= 1.02
    head.weight.mul_(scale)
    return num_objects


def build_color_classifier(placement: Placement, tiny: bool) -> ClipColorClassifier:
    if tiny:
        return load_color_classifier("tiny", placement)
    from transformers import CLIPConfig, CLIPModel

    text = TEXT | {"vocab_size": 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision = VISION | {"image_size": 224, "patch_size": 14}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    with torch.device(placement.device):
        net = random_network(CLIPModel, config, placement)
        return ClipColorClassifier(net, FixedLengthTokenizer(tiny_clip_tokenizer(), 77), 224)


def score_files(
    checker: GenevalChecker, files: list[Path], metadata: list[Metadata], batch_size: int, threshold: float
) -> PhaseTimer:
    """Score images phase by phase. A threshold of 0 draws every mask, as the published code does."""
    timer, detector = PhaseTimer(), checker.detector
    batches = [files[first : first + batch_size] for first in range(0, len(files), batch_size)]
    # The published code, which scores one image at a time, does not read ahead either.
    images = prefetch_images(batches) if batch_size > 1 else ([read_image(file) for file in batch] for batch in batches)
    with torch.no_grad():
        for first in range(0, len(files), batch_size):
            with timer.phase("reading"):
                pixels = torch.cat(next(images)).to(DEVICE)
            with timer.phase("resizing"):
                inputs, frame = detector.preprocessing(pixels)
            with timer.phase("network"):
                classes, masks = detector.net(inputs.to(detector.net.class_predictor.weight.dtype))
            with timer.phase("masks"):
                instances = [
                    select_instances(*sample, frame, threshold)
                    for sample in zip(classes.float(), masks.float(), strict=True)
                ]
                objects = [to_detections(sample) for sample in instances]
            requested = [
                request_detected(each, detected)
                for each, detected in zip(metadata[first : first + batch_size], objects, strict=True)
            ]
            with timer.phase("colors"):
                colored = checker.add_colors(pixels, instances, objects, requested)
            with timer.phase("rules"):
                for detections, each in zip(colored, requested, strict=True):
                    apply_rules(detections, each, checker.rules)
    return timer


def request_detected(metadata: Metadata, objects: list[DetectedObject]) -> Metadata:
    """Return the same task for classes that the random network detects, so that colors are classified."""
    names = [detected.name for detected in objects] or ["dog"]
    include = [{**entry, "class": names[k % len(names)]} for k, entry in enumerate(metadata["include"])]
    return {**metadata, "include": include}


@dataclass(frozen=True)
class Variant:
    name: str
    dtype: torch.dtype
    tf32: bool
    batch_size: int
    threshold: float
    num_images: int


def build_variants(tiny: bool, num_images: int) -> list[Variant]:
    bf16 = [Variant("bf16, batch of 16", torch.bfloat16, True, 16, THRESHOLD, num_images)] if CUDA else []
    size = 2 if tiny else 8
    return [
        Variant(f"TF32, batch of {size}", torch.float32, True, size, THRESHOLD, num_images),
        *bf16,
        Variant("as published: one image at a time, all masks", torch.float32, False, 1, 0.0, max(2, num_images // 4)),
        Variant(f"fp32, batch of {size}", torch.float32, False, size, THRESHOLD, max(size, num_images // 2)),
    ]


class GenevalBenchmark:
    """Measures variants. Those of one dtype share their networks."""

    def __init__(self, tiny: bool, files: list[Path], metadata: list[Metadata]) -> None:
        self.tiny, self.files, self.metadata = tiny, files, metadata
        self.checkers: dict[torch.dtype, tuple[GenevalChecker, float]] = {}

    def checker(self, dtype: torch.dtype) -> tuple[GenevalChecker, float]:
        """Return the checker of a dtype and how many objects it detects per image."""
        if dtype not in self.checkers:
            placement = Placement(DEVICE, dtype)
            detector = build_detector(placement, self.tiny)
            checker = GenevalChecker(detector, build_color_classifier(placement, self.tiny))
            pixels = torch.cat([read_image(file) for file in self.files[:8]]).to(DEVICE)
            self.checkers[dtype] = checker, scale_class_logits(detector, pixels)
            log("geneval", f"networks in {dtype} are ready, {self.checkers[dtype][1]:.1f} objects per image")
        return self.checkers[dtype]

    def measure(self, variant: Variant) -> dict[str, Any]:
        (checker, num_objects), size = self.checker(variant.dtype), variant.batch_size
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = variant.tf32
        score_files(checker, self.files[:size], self.metadata[:size], size, variant.threshold)  # warm-up
        reset_memory()
        stride = max(1, len(self.files) // variant.num_images)  # keeps all tasks
        files = self.files[::stride]
        timer = score_files(checker, files, self.metadata[::stride], size, variant.threshold)
        total = sum(timer.seconds.values())
        return {
            "name": variant.name,
            "rate": len(files) / total,
            "all images": NUM_IMAGES * total / len(files),
            "peak": peak_gib(),
            "shares": {phase: seconds / total for phase, seconds in timer.seconds.items()},
            "images": len(files),
            "objects": num_objects,
        }


def write_images(folder: Path, count: int, side: int) -> list[Path]:
    """Write smooth noise, which compresses about as well as photographs."""

    def write_image(k: int) -> Path:
        coarse = torch.rand(1, 3, side // 8, side // 8, generator=torch.Generator().manual_seed(k))
        smooth = nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
        save_image(smooth, folder / f"{k:05d}.png")
        return folder / f"{k:05d}.png"

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(write_image, range(count)))


def measure_variants(bench: GenevalBenchmark, options: argparse.Namespace, num_images: int) -> Results:
    results, record = Results(), result_writer(options.out)
    for variant in build_variants(options.tiny, num_images):
        if time.monotonic() > section_deadline(options) - 10:
            log(variant.name, "skipped: no time is left")
            continue
        with log_errors(variant.name, "the variant"):
            result = bench.measure(variant)
            results.append(result)
            record(result)
            shares = ", ".join(f"{phase} {share:.0%}" for phase, share in result["shares"].items())
            text = f"{result['rate']:.1f} images/s of {result['images']}, {result['peak']:.1f} GiB; {shares}"
            log(variant.name, text)
    return results


def print_table(results: Results) -> None:
    phases = list(results[0]["shares"]) if results else []
    print(f"| variant | images/s | s for 2,212 | peak GiB | {' | '.join(phases)} |")
    print("|---" * (4 + len(phases)) + "|")
    for result in results:
        cells = [result["name"], f"{result['rate']:.1f}", f"{result['all images']:.0f}", f"{result['peak']:.1f}"]
        cells += [f"{result['shares'][phase]:.0%}" for phase in phases]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--count", type=int, default=0, help="images to score; 64, or 4 if tiny")
    parser.add_argument("--out", default="")
    parser.add_argument("--seconds", type=float, default=70.0, help="no variant starts after this time")
    options = parser.parse_args()
    side, count = 64 if options.tiny else IMAGE_SIZE, options.count or (4 if options.tiny else 64)
    prompts = published_prompts()
    metadata: list[Metadata] = [prompts[k * len(prompts) // count] for k in range(count)]  # tasks as often as there
    with tempfile.TemporaryDirectory() as folder:
        files = write_images(Path(folder), count, side)
        log("geneval", f"{count} images of {side}x{side} written")
        results = measure_variants(GenevalBenchmark(options.tiny, files, metadata), options, count)
    print(f"{count} images of {side}x{side} on {device_name()}")
    print_table(results)


if __name__ == "__main__":
    main()
