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
from .image_text_scorer import ImageTextScorer
from .judge import YesNoJudge
from .motion_classifier import MotionClassifier
from .motion_training import MotionTask
from .network_files import copy_detector_stem, random_network, save_network
from .taste import QualityScorer
from .training_tasks import DetectorTask, JudgeTask, ScorerTask, TaskBatch, TasteTask, TrainingTask

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
INITIALIZED_FROM_DETECTOR = ("scorer", "judge")  # who begin with the eyes of the first detector, where it is there
STYLES: tuple[Style, ...] = ("noto", "twemoji")
FRESH = 1_000_003  # added to a seed, it is one nobody learns from


@dataclass(frozen=True)
class TrainingBudget:
    """How long, how much at a time, and where."""

    seconds: float = 45.0
    steps: int | None = None  # instead of seconds, for the same result on every machine
    batch: int = 256
    lesson: int = 16384  # pictures made at a time, each learned from once
    lr: float = 1e-3
    device: torch.device = torch.device("cpu")


def fit(course: TrainingTask[Any], effort: TrainingBudget, seed: int) -> list[float]:
    """Train to the end of the effort, the rate falling to nought; the mean loss of every lesson."""
    device, cuda = effort.device, effort.device.type == "cuda"
    torch.backends.cudnn.benchmark = cuda
    net = course.net.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), effort.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=cuda)
    began, step, done, means = time.monotonic(), 0, 0.0, list[float]()
    everything = torch.arange(max(effort.batch, effort.lesson // course.frames), device=device)
    while done < 1:
        with torch.no_grad():
            lesson = course.lesson(Randomness(seed, len(means), everything))
        losses: list[Tensor] = []
        for rows in torch.split(everything, effort.batch):
            spent, step = time.monotonic() - began, step + 1
            done = min(1.0, spent / effort.seconds if effort.steps is None else step / effort.steps)
            for group in optimizer.param_groups:
                group["lr"] = effort.lr * min(1.0, step / 50) * (0.5 + 0.5 * math.cos(math.pi * done))
            losses.append(update(course, select_rows(lesson, rows), optimizer, cuda))
            if done >= 1:
                break
        means.append(torch.stack(losses).mean().item())
        say(f"  step {step:6d}  {time.monotonic() - began:5.0f} s  loss {means[-1]:.4f}")
    return means


def update(course: TrainingTask[Any], rows: TaskBatch, optimizer: torch.optim.Optimizer, cuda: bool) -> Tensor:
    """One step of the optimizer; the loss before it."""
    with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=cuda):
        loss = course.loss(rows)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(course.net.parameters(), 5.0, foreach=True)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate_task(
    course: TrainingTask[Any], style: Style, count: int, device: torch.device, at_once: int = 2048
) -> dict[str, float]:
    """The examination on fresh scenes, in chunks a processor can bear; means of all."""
    course.net.eval()
    chunks = torch.split(torch.arange(count, device=device), min(at_once, count))
    told = [course.exam(Randomness(FRESH, 0, rows), style) for rows in chunks]
    return {name: sum(part[name] for part in told) / len(told) for name in told[0]}


def network_file(name: str, seed: int, out: Path) -> Path:
    """There are two of those who see what is there, and one of everybody else."""
    return out / f"{name}{seed if name in TRAINED_TWICE else ''}.safetensors"


def train(name: str, seed: int, effort: TrainingBudget, out: Path, *, tiny: bool = False, count: int = 8192) -> Path:
    """Train, examine and write one of COURSES."""
    make, kind = TASKS_BY_NAME[name]
    path = network_file(name, seed, out)
    course = make(random_network(kind, seed, tiny=tiny))
    size = sum(weights.numel() for weights in course.net.parameters())
    sizes: Any = kind
    widths: tuple[int, ...] = sizes.tiny if tiny else sizes.widths
    detector = network_file("detector", 0, out)
    eyes = name in INITIALIZED_FROM_DETECTOR and detector.is_file() and copy_detector_stem(course.net, widths, detector)
    say(f"{path.stem}: {size:,} weights, {effort.device}{f', begins with the eyes of {detector}' if eyes else ''}")
    fit(course, effort, seed)
    told = {style: evaluate_task(course, style, count, effort.device) for style in STYLES}
    save_network(course.net, widths, path, told)
    say(f"{path}: {path.stat().st_size / 1e6:.2f} MB, on {count} fresh scenes")
    for style, shares in told.items():
        say(f"  {style:8s} " + "  ".join(f"{key} {value:.4f}" for key, value in shares.items()))
    return path


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """Train whom the command line names; those already written are left as they are when all are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=[*TASKS_BY_NAME, "all"])
    parser.add_argument("--seed", type=int, default=0, help="1 is the one that only evaluates")
    parser.add_argument("--seconds", type=float, default=TrainingBudget.seconds)
    parser.add_argument("--steps", type=int, help="instead of seconds")
    parser.add_argument("--batch", type=int, default=TrainingBudget.batch)
    parser.add_argument("--lesson", type=int, default=TrainingBudget.lesson, help="pictures made at a time")
    parser.add_argument("--exam", type=int, default=8192, help="fresh scenes to be examined on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    effort = TrainingBudget(asked.seconds, asked.steps, asked.batch, asked.lesson, device=torch.device(asked.device))
    everyone = ALL_NETWORKS if asked.who == "all" else ((asked.who, asked.seed),)
    for name, seed in everyone:
        path = network_file(name, seed, asked.out)
        if asked.who == "all" and path.is_file():
            say(f"{path} is there already; remove it to train it anew")
            continue
        train(name, seed, effort, asked.out, tiny=asked.tiny, count=asked.exam)


if __name__ == "__main__":
    main()
