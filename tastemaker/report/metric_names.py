"""Readable names of metrics, benchmarks and tasks, and which direction of a metric is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .run_record import RunRecord

Direction = Literal["higher is better", "lower is better", ""]
HIGHER: Direction = "higher is better"
LOWER: Direction = "lower is better"

BENCHMARK_NAMES = {
    "playeval": "PlayEval",
    "playeval-edit": "PlayEval-Edit",
    "playeval-motion": "PlayEval-Motion",
    "wordeval": "WordEval",
    "geneval": "GenEval",
}
TASK_NAMES = {"overall": "all tasks", "color_attr": "color attributes"}


@dataclass(frozen=True)
class MetricName:
    """How the report presents a metric. The direction is empty where neither is better."""

    title: str
    explanation: str = ""
    better: Direction = ""


METRIC_NAMES = {
    "reward/mean": MetricName("training reward", "mean reward of the samples that the model is trained on", HIGHER),
    "reward/std": MetricName("spread of the training reward", "standard deviation over the samples of a step"),
    "kl": MetricName("KL to the reference", "0 at the start; large values mean that the model moved far away"),
    "grad_norm": MetricName("gradient norm"),
    "loss/policy": MetricName("policy loss", "no measure of progress: its samples change with the model"),
    "loss": MetricName("loss"),
    "lr": MetricName("learning rate"),
    "ratio": MetricName("probability ratio", "of the new to the old policy; 1 if they agree"),
    "ratio_deviation": MetricName("deviation of the probability ratio", "mean distance from 1"),
    "clip_fraction": MetricName("clipped samples", "share of samples whose probability ratio is clipped"),
    "rollout/importance_weight": MetricName(
        "importance weight of 8-bit rollouts", "mean over tokens; 1 if rounding changes no probability"
    ),
    "rollout/truncated": MetricName(
        "truncated importance weights", "share of tokens at objective.importance_cap", LOWER
    ),
    "rollout/kl": MetricName("KL of 8-bit rollouts", "to the sampler in the training precision, per token", LOWER),
    "zero_std_groups": MetricName("groups without a gradient", "share of groups whose samples all score alike", LOWER),
    "positive_weight": MetricName("weight of the positive branch"),
    "accuracy": MetricName("accuracy", "", HIGHER),
    "margin": MetricName("preference margin", "by how much the chosen sample is preferred", HIGHER),
    "log_ratio/chosen": MetricName("log ratio of chosen samples", "to the reference model"),
    "log_ratio/positive": MetricName("log ratio of positive samples", "to the reference model"),
    "log_ratio/negative": MetricName("log ratio of negative samples", "to the reference model"),
    "log_likelihood": MetricName("log likelihood", "", HIGHER),
    "psnr": MetricName("PSNR", "of reconstructions, in dB", HIGHER),
    "mse": MetricName("mean squared error", "of reconstructions", LOWER),
    "kl_loss": MetricName("KL of the latents", "to a standard normal distribution, without its weight"),
    "vq_loss": MetricName("loss of the quantizer", "codebook, commitment, entropy and dead codes, weighted", LOWER),
    "guard/reward/mean": MetricName("training reward, fixed prompts", "always the same prompts and noise", HIGHER),
    "guard/diversity": MetricName(
        "diversity within prompts", "distance between samples of one prompt; 0 if all are equal", HIGHER
    ),
    "guard/variety": MetricName("variety between prompts", "distance between samples of different prompts", HIGHER),
    "guard/entropy": MetricName("entropy", "of the brightness, in bits; low for blank images"),
    "guard/edges": MetricName("edges", "share of pixels where the brightness jumps"),
    "guard/saturation": MetricName("saturation"),
    "guard/source_distance": MetricName(
        "distance to the source", "of edits, mean difference to the source image; 0 if they are copies"
    ),
    "guard/motion": MetricName("motion", "of videos, in percent of the frame size per frame; 0 if frozen"),
    "guard/frames": MetricName("frame difference", "how much the frames of a video differ"),
    "guard/flicker": MetricName("flicker", "of videos; 0 if steady", LOWER),
    "guard/dark": MetricName("dark pixels", "share of dark pixels"),
}
SCORE_NAMES = {
    "strict": MetricName("strict score", "share of images that show the prompt and nothing else", HIGHER),
    "lenient": MetricName("lenient score", "share of images that show the prompt, possibly with more", HIGHER),
    "correct": MetricName("correct images", "share of images that GenEval's rules accept", HIGHER),
    "graded": MetricName("partial credit", "how much of the prompt an image shows, from 0 to 1", HIGHER),
    "followed": MetricName("instruction followed", "share of edits that show what was asked for", HIGHER),
    "preserved": MetricName("rest unchanged", "share of edits in which everything else is as in the source", HIGHER),
    "content": MetricName("content", "share of videos whose objects are as requested", HIGHER),
    "motion": MetricName("motion", "share of videos whose motion is as requested", HIGHER),
    "frechet": MetricName("Fréchet distance", "between generated and real images", LOWER),
    "diversity": MetricName("diversity", "distance between samples of one prompt; 0 if all are equal", HIGHER),
}


def name_metric(metric: str, records: Sequence[RunRecord]) -> MetricName:
    """Return the name of a training metric. Rewards are named after the keys of the `rewards` section."""
    if metric == "loss" and not any(record.curve("reward/mean") for record in records):
        return MetricName("loss", "", LOWER)
    if metric in METRIC_NAMES:
        return METRIC_NAMES[metric]
    if "rewards/" not in metric:
        return MetricName(metric.replace("_", " ").replace("/", ", "))
    name = metric.rpartition("rewards/")[2]
    better = LOWER if any(record.reward_weight(name) < 0 for record in records) else HIGHER
    holders = [record.name for record in records if name in record.held_out and record.curve(metric)]
    if holders and len(holders) == sum(bool(record.curve(metric)) for record in records):
        return MetricName(f"{name}, held out", "weight 0: measured, never trained on", better)
    if holders:
        return MetricName(name, f"held out in {', '.join(holders)}", better)
    if metric.startswith("guard/rewards/"):
        return MetricName(f"{name}, fixed prompts", "", better)
    return MetricName(f"reward: {name}", "", better)


def name_score(metric: str) -> MetricName:
    """Return the name of a score of a benchmark."""
    return SCORE_NAMES.get(metric, MetricName(metric.replace("_", " ")))


def name_benchmark(benchmark: str) -> str:
    return BENCHMARK_NAMES.get(benchmark, benchmark)


def name_task(task: str) -> str:
    return TASK_NAMES.get(task, task.replace("_", " "))
