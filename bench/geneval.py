"""How fast GenEval's 553 x 4 pictures are scored and where the time goes, with a random Mask2Former and CLIP.

    python bench/geneval.py --out geneval.json      # on a GPU: Swin-S at 800 pixels, ViT-L/14
    python bench/geneval.py --tiny                  # the same lines at small size, on any machine

Random weights find nothing, so classes are sharpened until a picture holds some things, as real ones do: masks, boxes
and colours of these are paid for too. The published way is one picture at a time with all hundred masks drawn.
Floor of the network: Swin-S with its heads is about 310 GFLOP at 800x800, so 2,212 pictures are 0.69 PFLOP.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tastemaker.eval.geneval import prompts
from tastemaker.geneval import Detection
from tastemaker.pictures import read_picture, save_picture
from tastemaker.rewards.nets.hub import frozen, random
from tastemaker.rewards.nets.instances import instances
from tastemaker.rewards.nets.mask2former import Mask2Former, Network, opened
from tastemaker.rewards.nets.sight import Sight, listed, ruling
from tastemaker.rewards.nets.tints import Tints, tints
from tastemaker.rewards.nets.words import Words, tiny_clip
from tastemaker.types import Facts, Placement

SIDE, WHOLE, FLOOR = 512, 2212, 0.3
THINGS = 5  # about how many a picture holds
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def detector(placement: Placement, tiny: bool) -> Mask2Former:
    if tiny:
        return opened("tiny", placement)
    from transformers import Mask2FormerConfig, Mask2FormerModel

    swin = {
        "model_type": "swin", "embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24], "window_size": 7,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }  # fmt: skip
    config = Mask2FormerConfig.from_dict({"backbone_config": swin, "num_labels": 80})
    net: Network = frozen(Network(random(Mask2FormerModel, config, Placement())), placement)
    return Mask2Former(net, "random")


def sharpen(seer: Mask2Former, pixels: Tensor) -> float:
    """Scale the classes until some things are surer than the floor; how many a picture holds then."""
    found = 0.0
    for _ in range(40):
        found = sum(len(row.label) for row in seer.find(pixels, FLOOR)) / len(pixels)
        if found >= THINGS:
            break
        seer.net.class_predictor.weight.data *= 1.3
    return found


def teller(placement: Placement, tiny: bool) -> Tints:
    if tiny:
        return tints("tiny", placement)
    from transformers import CLIPConfig, CLIPModel

    ends = {"vocab_size": 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    seen = VISION | {"image_size": 224, "patch_size": 14}
    config = CLIPConfig(text_config=TEXT | ends, vision_config=seen, projection_dim=768)
    return Tints(random(CLIPModel, config, placement), Words(tiny_clip(), 77), 224)


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


def walk(sight: Sight, files: list[Path], facts: list[Facts], rows: int, floor: float, device: torch.device) -> Clock:
    """Score pictures part by part; with a floor of nought every mask is drawn, as the published code does."""
    clock, seer = Clock(device), sight.detector
    with ThreadPoolExecutor(8 if rows > 1 else 1) as pool, torch.no_grad():
        for first in range(0, len(files), rows):
            some = facts[first : first + rows]
            with clock.on("reading"):
                pixels = torch.cat(list(pool.map(read_picture, files[first : first + rows]))).to(device)
            with clock.on("resizing"):
                inputs, frame = seer.looks(pixels)
            with clock.on("network"):
                classes, masks = seer.net(inputs.to(seer.net.class_predictor.weight.dtype))
            with clock.on("masks"):
                found = [instances(*row, frame, floor) for row in zip(classes.float(), masks.float(), strict=True)]
                seen = [listed(row) for row in found]
            some = [adapted(fact, row) for fact, row in zip(some, seen, strict=True)]
            with clock.on("colours"):
                colored = sight.colored(pixels, found, seen, some)
            with clock.on("rules"):
                for detections, fact in zip(colored, some, strict=True):
                    ruling(detections, fact, sight.rules)
    return clock


def adapted(fact: Facts, seen: list[Detection]) -> Facts:
    """The same task of what a random network takes the picture for, else nobody would be asked for a colour."""
    names = [one.name for one in seen] or ["dog"]
    include = [{**one, "class": names[k % len(names)]} for k, one in enumerate(fact["include"])]
    return {**fact, "include": include}


def line(name: str, sight: Sight, files: list[Path], facts: list[Facts], rows: int, floor: float) -> dict[str, Any]:
    device = next(sight.detector.net.parameters()).device
    walk(sight, files[:rows], facts[:rows], rows, floor, device)  # warm
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = walk(sight, files, facts, rows, floor, device)
    total = sum(clock.spent.values())
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    shares = {part: seconds / total for part, seconds in clock.spent.items()}
    return {
        "name": name,
        "rate": len(files) / total,
        "whole": WHOLE * total / len(files),
        "peak": peak,
        "shares": shares,
    }


def ways(tiny: bool, cuda: bool) -> list[tuple[str, torch.dtype, bool, int, float]]:
    """Name, precision, whether matrix products may be TF32, pictures at a time, floor."""
    half = [("bf16, 16 at a time", torch.bfloat16, True, 16, FLOOR)] if cuda else []
    rows = 2 if tiny else 8
    return [
        ("the published way: one at a time, all masks", torch.float32, False, 1, 0.0),
        (f"fp32, {rows} at a time", torch.float32, False, rows, FLOOR),
        (f"TF32, {rows} at a time", torch.float32, True, rows, FLOOR),
        *half,
    ]


def pictures(folder: Path, count: int, side: int) -> list[Path]:
    """Smooth noise, which PNG neither packs to nothing nor not at all."""
    files = []
    for k in range(count):
        rough = torch.rand(1, 3, side // 8, side // 8, generator=torch.Generator().manual_seed(k))
        smooth = nn.functional.interpolate(rough, (side, side), mode="bicubic").clamp(0, 1)
        save_picture(smooth, folder / f"{k:05d}.png")
        files.append(folder / f"{k:05d}.png")
    return files


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--count", type=int, default=0, help="pictures to score; 256, or 4 if tiny")
    options.add_argument("--out", default="")
    chosen = options.parse_args()
    cuda = torch.cuda.is_available()
    device, side = torch.device("cuda" if cuda else "cpu"), 64 if chosen.tiny else SIDE
    count = chosen.count or (4 if chosen.tiny else 256)
    asked = prompts()
    facts: list[Facts] = [asked[k * len(asked) // count] for k in range(count)]  # tasks as often as in the benchmark
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = pictures(Path(folder), count, side)
        for name, dtype, tf32, rows, floor in ways(chosen.tiny, cuda):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            placement = Placement(device, dtype)
            sight = Sight(detector(placement, chosen.tiny), teller(placement, chosen.tiny))
            things = sharpen(sight.detector, torch.cat([read_picture(file) for file in files[:2]]).to(device))
            found.append({**line(name, sight, files, facts, rows, floor), "things": things})
            print(json.dumps(found[-1]))
    print(f"{count} pictures of {side}x{side} on {torch.cuda.get_device_name() if cuda else 'cpu'}")
    parts = list(found[0]["shares"])
    print("| way | pictures/s | seconds for 2,212 | peak GiB | " + " | ".join(parts) + " |")
    print("|---" * (4 + len(parts)) + "|")
    for one in found:
        shares = " | ".join(f"{one['shares'][part]:.0%}" for part in parts)
        print(f"| {one['name']} | {one['rate']:.1f} | {one['whole']:.0f} | {one['peak']:.1f} | {shares} |")
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
