"""Train the playground's reward models: python -m tastemaker.playground.train_reward_models all --out DIRECTORY."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.randomness import Randomness
from ..core.types import select_rows
from .art import Style
from .detector import SceneDetector
from .motion import MotionClassifier
from .network_files import copy_detector_stem, random_network, save_network
from .networks import ImageTextScorer, QualityScorer, YesNoJudge
from .training_tasks import DetectorTask, JudgeTask, MotionTask, ScorerTask, TaskBatch, TasteTask, TrainingTask

TASKS_BY_NAME: dict[str, tuple[type[TrainingTask[Any]], type[nn.Module]]] = {
    "detector": (DetectorTask, SceneDetector),
    "scorer": (ScorerTask, ImageTextScorer),
    "judge": (JudgeTask, YesNoJudge),
    "taste": (TasteTask, QualityScorer),
    "motion": (MotionTask, MotionClassifier),
}
TRAINED_TWICE = ("detector", "motion")  # once for rewards and once for evaluation only
ALL_NETWORKS = (
    *(("detector", 0), ("detector", 1), ("scorer", 0), ("judge", 0), ("taste", 0)),
    *(("motion", 0), ("motion", 1)),
)
INITIALIZED_FROM_DETECTOR = ("scorer", "judge")  # their stems, if the first detector exists
STYLES: tuple[Style, ...] = ("noto", "twemoji")
EVALUATION_SEED = 1_000_003  # a seed that no training uses


@dataclass(frozen=True)
class TrainingBudget:
    """Duration, batch size and device of a training."""

    seconds: float = 45.0
    steps: int | None = None  # instead of seconds, for reproducible results
    batch_size: int = 256
    chunk_size: int = 16384  # images painted at a time, each used once
    lr: float = 1e-3
    device: torch.device = torch.device("cpu")


def fit(task: TrainingTask[Any], budget: TrainingBudget, seed: int) -> list[float]:
    """Train until the budget is spent, with a cosine schedule to 0; returns the mean loss of every chunk."""
    device, cuda = budget.device, budget.device.type == "cuda"
    torch.backends.cudnn.benchmark = cuda
    net = task.net.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), budget.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=cuda)
    began, step, done, means = time.monotonic(), 0, 0.0, list[float]()
    everything = torch.arange(max(budget.batch_size, budget.chunk_size // task.frames), device=device)
    while done < 1:
        with torch.no_grad():
            lesson = task.sample_batch(Randomness(seed, len(means), everything))
        losses: list[Tensor] = []
        for rows in torch.split(everything, budget.batch_size):
            spent, step = time.monotonic() - began, step + 1
            done = min(1.0, spent / budget.seconds if budget.steps is None else step / budget.steps)
            for group in optimizer.param_groups:
                group["lr"] = budget.lr * min(1.0, step / 50) * (0.5 + 0.5 * math.cos(math.pi * done))
            losses.append(update(task, select_rows(lesson, rows), optimizer, cuda))
            if done >= 1:
                break
        means.append(torch.stack(losses).mean().item())
        print_line(f"  step {step:6d}  {time.monotonic() - began:5.0f} s  loss {means[-1]:.4f}")
    return means


def update(task: TrainingTask[Any], rows: TaskBatch, optimizer: torch.optim.Optimizer, cuda: bool) -> Tensor:
    """Take one optimizer step; returns the loss before it."""
    with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=cuda):
        loss = task.loss(rows)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(task.net.parameters(), 5.0, foreach=True)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate_task(
    task: TrainingTask[Any], style: Style, count: int, device: torch.device, at_once: int = 2048
) -> dict[str, float]:
    """Evaluate on new scenes, in chunks of `at_once`; returns the means."""
    task.net.eval()
    chunks = torch.split(torch.arange(count, device=device), min(at_once, count))
    scores = [task.evaluate(Randomness(EVALUATION_SEED, 0, rows), style) for rows in chunks]
    return {name: sum(part[name] for part in scores) / len(scores) for name in scores[0]}


def network_file(name: str, seed: int, out: Path) -> Path:
    """The file of a network; detectors and motion classifiers are trained twice, with two seeds."""
    return out / f"{name}{seed if name in TRAINED_TWICE else ''}.safetensors"


def train(name: str, seed: int, budget: TrainingBudget, out: Path, *, tiny: bool = False, count: int = 8192) -> Path:
    """Train, evaluate and write a network of TASKS_BY_NAME."""
    make, kind = TASKS_BY_NAME[name]
    path = network_file(name, seed, out)
    task = make(random_network(kind, seed, tiny=tiny))
    size = sum(weights.numel() for weights in task.net.parameters())
    sizes: Any = kind
    widths: tuple[int, ...] = sizes.tiny if tiny else sizes.widths
    detector = network_file("detector", 0, out)
    initialized = (
        name in INITIALIZED_FROM_DETECTOR and detector.is_file() and copy_detector_stem(task.net, widths, detector)
    )
    print_line(f"{path.stem}: {size:,} weights, {budget.device}{f', stem of {detector}' if initialized else ''}")
    fit(task, budget, seed)
    scores = {style: evaluate_task(task, style, count, budget.device) for style in STYLES}
    save_network(task.net, widths, path, scores)
    print_line(f"{path}: {path.stat().st_size / 1e6:.2f} MB, on {count} new scenes")
    for style, shares in scores.items():
        print_line(f"  {style:8s} " + "  ".join(f"{key} {value:.4f}" for key, value in shares.items()))
    return path


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """Train a network, or all networks that are not written yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=[*TASKS_BY_NAME, "all"])
    parser.add_argument("--seed", type=int, default=0, help="1 is for evaluation only")
    parser.add_argument("--seconds", type=float, default=TrainingBudget.seconds)
    parser.add_argument("--steps", type=int, help="instead of seconds")
    parser.add_argument("--batch", type=int, default=TrainingBudget.batch_size)
    parser.add_argument("--lesson", type=int, default=TrainingBudget.chunk_size, help="images painted at a time")
    parser.add_argument("--num-scenes", type=int, default=8192, help="new scenes to evaluate on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    budget = TrainingBudget(
        options.seconds, options.steps, options.batch, options.lesson, device=torch.device(options.device)
    )
    everyone = ALL_NETWORKS if options.who == "all" else ((options.who, options.seed),)
    for name, seed in everyone:
        path = network_file(name, seed, options.out)
        if options.who == "all" and path.is_file():
            print_line(f"{path} exists; remove it to train it again")
            continue
        train(name, seed, budget, options.out, tiny=options.tiny, count=options.num_scenes)


if __name__ == "__main__":
    main()
