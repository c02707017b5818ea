"""How fast GenEval's 553 x 4 pictures are scored and where the time goes, with a random Mask2Former and CLIP.

    python bench/geneval.py --out geneval.json      # on a GPU: Swin-S at 800 pixels, ViT-L/14
    python bench/geneval.py --tiny                  # the same lines at small size, on any machine

Random weights find nothing, so classes are sharpened until a picture holds some things, as real ones do: masks, boxes
and colours of these are paid for too. The published way is one picture at a time with all hundred masks drawn.
Floor of the network: Swin-S with its heads is about 310 GFLOP at 800x800, so 2,212 pictures are 0.69 PFLOP.
Some pictures stand for all of them; each number is told and written once it is known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sections import Found, deadline, keeper, say, spared  # beside this file, in no package
from torch import Tensor, nn

from tastemaker.core.types import Metadata, Placement
from tastemaker.data.image_io import read_image, save_image
from tastemaker.evaluation.geneval import published_prompts
from tastemaker.evaluation.geneval_rules import DetectedObject
from tastemaker.evaluation.image_prefetch import prefetch_images
from tastemaker.rewards.backbones.color_classifier import ClipColorClassifier, load_color_classifier
from tastemaker.rewards.backbones.geneval_checker import GenevalChecker, apply_rules, as_detections
from tastemaker.rewards.backbones.instance_segmentation import select_instances
from tastemaker.rewards.backbones.loading import freeze_network, random_network
from tastemaker.rewards.backbones.mask2former import Mask2FormerDetector, Mask2FormerNetwork, load_mask2former
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer

SIDE, WHOLE, FLOOR = 512, 2212, 0.3
THINGS = 5  # about how many a picture holds
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def detector(placement: Placement, tiny: bool) -> Mask2FormerDetector:
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
    queries = net.model.transformer_module
    for table in (queries.queries_features, queries.queries_embedder):
        table.weight.data *= 50  # of deviation 1: nearer to each other, all or none would find something
    return Mask2FormerDetector(net, "random")


@torch.no_grad()
def sharpen(seer: Mask2FormerDetector, pixels: Tensor) -> float:
    """Scale the classes until some things are surer than the floor; how many a picture holds then."""
    head, scale, found = seer.net.class_predictor, 1.0, 0.0
    plain = seer.net(seer.looks(pixels)[0].to(head.weight.dtype))[0].float() - head.bias
    for _ in range(400):
        sure = (scale * plain + head.bias).softmax(-1)[..., :-1]
        found = float((sure > FLOOR).sum() / len(pixels))
        if found >= THINGS:
            break
        scale *= 1.02
    head.weight.mul_(scale)
    return found


def teller(placement: Placement, tiny: bool) -> ClipColorClassifier:
    if tiny:
        return load_color_classifier("tiny", placement)
    from transformers import CLIPConfig, CLIPModel

    ends = {"vocab_size": 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    seen = VISION | {"image_size": 224, "patch_size": 14}
    config = CLIPConfig(text_config=TEXT | ends, vision_config=seen, projection_dim=768)
    with torch.device(placement.device):
        return ClipColorClassifier(
            random_network(CLIPModel, config, placement), FixedLengthTokenizer(tiny_clip_tokenizer(), 77), 224
        )


class Clock:
    """Seconds by what they went into."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.spent = device, defaultdict[str, float](float)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        self._settle()
        began = time.perf_counter()
        yield
        self._settle()
        self.spent[name] += time.perf_counter() - began

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def walk(
    sight: GenevalChecker, files: list[Path], facts: list[Metadata], rows: int, floor: float, device: torch.device
) -> Clock:
    """Score pictures part by part; with a floor of nought every mask is drawn, as the published code does."""
    clock, seer = Clock(device), sight.detector
    shares = [files[first : first + rows] for first in range(0, len(files), rows)]
    # One at a time nothing is read ahead either: the published code has no threads.
    read = prefetch_images(shares) if rows > 1 else ([read_image(file) for file in share] for share in shares)
    with torch.no_grad():
        for first in range(0, len(files), rows):
            some = facts[first : first + rows]
            with clock.on("reading"):
                pixels = torch.cat(next(read)).to(device)
            with clock.on("resizing"):
                inputs, frame = seer.looks(pixels)
            with clock.on("network"):
                classes, masks = seer.net(inputs.to(seer.net.class_predictor.weight.dtype))
            with clock.on("masks"):
                found = [
                    select_instances(*row, frame, floor) for row in zip(classes.float(), masks.float(), strict=True)
                ]
                seen = [as_detections(row) for row in found]
            some = [adapted(fact, row) for fact, row in zip(some, seen, strict=True)]
            with clock.on("colours"):
                colored = sight.colored(pixels, found, seen, some)
            with clock.on("rules"):
                for detections, fact in zip(colored, some, strict=True):
                    apply_rules(detections, fact, sight.rules)
    return clock


def adapted(fact: Metadata, seen: list[DetectedObject]) -> Metadata:
    """The same task of what a random network takes the picture for, else nobody would be asked for a colour."""
    names = [one.name for one in seen] or ["dog"]
    include = [{**one, "class": names[k % len(names)]} for k, one in enumerate(fact["include"])]
    return {**fact, "include": include}


@dataclass(frozen=True)
class Way:
    name: str
    dtype: torch.dtype
    tf32: bool  # may matrix products be
    rows: int  # pictures at a time
    floor: float
    most: int  # pictures that are enough


def ways(tiny: bool, cuda: bool, count: int) -> list[Way]:
    half = [Way("bf16, 16 at a time", torch.bfloat16, True, 16, FLOOR, count)] if cuda else []
    rows = 2 if tiny else 8
    return [
        Way(f"TF32, {rows} at a time", torch.float32, True, rows, FLOOR, count),
        *half,
        Way("the published way: one at a time, all masks", torch.float32, False, 1, 0.0, max(2, count // 4)),
        Way(f"fp32, {rows} at a time", torch.float32, False, rows, FLOOR, max(rows, count // 2)),
    ]


class Bench:
    """One set of weights for all ways of a precision, made on the device."""

    def __init__(self, device: torch.device, tiny: bool, files: list[Path], facts: list[Metadata]) -> None:
        self.device, self.tiny, self.files, self.facts = device, tiny, files, facts
        self.sights: dict[torch.dtype, tuple[GenevalChecker, float]] = {}

    def sight(self, dtype: torch.dtype) -> tuple[GenevalChecker, float]:
        """And how many things it finds in a picture."""
        if dtype not in self.sights:
            placement = Placement(self.device, dtype)
            sight = GenevalChecker(detector(placement, self.tiny), teller(placement, self.tiny))
            some = torch.cat([read_image(file) for file in self.files[:8]]).to(self.device)
            self.sights[dtype] = sight, sharpen(sight.detector, some)
            say("geneval", f"networks in {dtype} are ready, {self.sights[dtype][1]:.1f} things a picture")
        return self.sights[dtype]

    def line(self, way: Way) -> dict[str, Any]:
        (sight, things), rows = self.sight(way.dtype), way.rows
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way.tf32
        walk(sight, self.files[:rows], self.facts[:rows], rows, way.floor, self.device)  # warm
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        every = max(1, len(self.files) // way.most)  # so that all tasks are there
        files = self.files[::every]
        clock = walk(sight, files, self.facts[::every], rows, way.floor, self.device)
        total = sum(clock.spent.values())
        return {
            "name": way.name,
            "rate": len(files) / total,
            "whole": WHOLE * total / len(files),
            "peak": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0,
            "shares": {part: seconds / total for part, seconds in clock.spent.items()},
            "pictures": len(files),
            "things": things,
        }


def pictures(folder: Path, count: int, side: int) -> list[Path]:
    """Smooth noise, which PNG neither packs to nothing nor not at all."""

    def picture(k: int) -> Path:
        rough = torch.rand(1, 3, side // 8, side // 8, generator=torch.Generator().manual_seed(k))
        smooth = nn.functional.interpolate(rough, (side, side), mode="bicubic").clamp(0, 1)
        save_image(smooth, folder / f"{k:05d}.png")
        return folder / f"{k:05d}.png"

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(picture, range(count)))


def measured(bench: Bench, chosen: argparse.Namespace, count: int) -> Found:
    found, keep = Found(), keeper(chosen.out)
    for way in ways(chosen.tiny, bench.device.type == "cuda", count):
        if time.monotonic() > deadline(chosen) - 10:
            say(way.name, "left out: no time")
            continue
        with spared(way.name, "it"):
            line = bench.line(way)
            found.append(line)
            keep(line)
            shares = ", ".join(f"{part} {share:.0%}" for part, share in line["shares"].items())
            say(way.name, f"{line['rate']:.1f} pictures/s by {line['pictures']}, {line['peak']:.1f} GiB; {shares}")
    return found


def table(found: Found) -> None:
    parts = list(found[0]["shares"]) if found else []
    print("| way | pictures/s | seconds for 2,212 | peak GiB | " + " | ".join(parts) + " |")
    print("|---" * (4 + len(parts)) + "|")
    for one in found:
        shares = " | ".join(f"{one['shares'][part]:.0%}" for part in parts)
        print(f"| {one['name']} | {one['rate']:.1f} | {one['whole']:.0f} | {one['peak']:.1f} | {shares} |")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--count", type=int, default=0, help="pictures to score; 64, or 4 if tiny")
    options.add_argument("--out", default="")
    options.add_argument("--seconds", type=float, default=70.0, help="after which nothing new is begun")
    chosen = options.parse_args()
    cuda = torch.cuda.is_available()
    device, side = torch.device("cuda" if cuda else "cpu"), 64 if chosen.tiny else SIDE
    count = chosen.count or (4 if chosen.tiny else 64)
    asked = published_prompts()
    facts: list[Metadata] = [asked[k * len(asked) // count] for k in range(count)]  # tasks as often as in the benchmark
    with tempfile.TemporaryDirectory() as folder:
        files = pictures(Path(folder), count, side)
        say("geneval", f"{count} pictures of {side}x{side} drawn")
        bench = Bench(device, chosen.tiny, files, facts)
        found = measured(bench, chosen, count)
    print(f"{count} pictures of {side}x{side} on {torch.cuda.get_device_name() if cuda else 'cpu'}")
    table(found)


if __name__ == "__main__":
    main()
