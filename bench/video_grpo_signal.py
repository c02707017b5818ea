"""How much of GRPO's advantage on playground videos is caused by the noise that it trains: variance components.

    python bench/video_grpo_signal.py --num-prompts 8 --starts 4 --draws 2 --out build/video-grpo-signal.json

GRPO with an SDE window compares videos of a group that differ in two ways: in the initial noise, which no action of the
window chose, and in the noise of the window, whose log-probability is trained. A prompt gets `starts` initial noises
with `draws` window noises each. For each reward, the table splits the variance within a group into the share of the
window noise, which is signal, and the share of the initial noise, which is noise to the gradient. Windows start at the
steps 0 to 3 in turn, as in `grpo-playground-video`. No gradient is computed. Intervals are 95 % bootstrap intervals
over prompts.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tastemaker.config.build import build_policy, build_rubric
from tastemaker.config.load import load
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Rubric
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.data.playground import PlaygroundPrompts
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import SDEWindow

RECIPE = "grpo-playground-video"
WINDOW_STARTS = 4  # of the recipe: 0 to start_max
BOOTSTRAP_DRAWS = 2000


@torch.no_grad()
def sample_rewards(
    policy: Policy[Any], rubric: Rubric, batch: PromptBatch, noise_level: float, options: argparse.Namespace
) -> dict[str, Tensor]:
    """Motion, content and their sum, as log-probabilities and as probabilities: [prompts, starts, draws] each."""
    scores: dict[str, list[Tensor]] = {"motion": [], "content": []}
    group = options.starts * options.draws
    for p in range(len(batch)):
        window = SDEWindow(options.window_size, start_min=p % WINDOW_STARTS, schedule="fixed")
        process = replace(policy.process, dynamics=FlowSDE(noise_level), window=window)
        prompts, metadata = (batch.prompts[p],) * group, (batch.metadata[p],) * group
        rows = p * group + torch.arange(group)
        start = Randomness(options.seed, 0, rows // options.draws * options.draws)
        rollout = process.start(policy.model, policy.embed(prompts, metadata), start)
        rollout.reseed(Randomness(options.seed, 1, rows))
        rewards = rubric.score(policy.decode(rollout.finish().final), prompts, metadata).rewards
        for name, values in scores.items():
            values.append(rewards[name].double().view(options.starts, options.draws))
    motion, content = (torch.stack(values) for values in scores.values())
    return {
        "motion": motion,
        "content": content,
        "sum": motion + content,
        "exp(motion)": motion.exp(),
        "exp(content)": content.exp(),
        "exp(sum)": (motion + content).exp(),
    }


def variance_components(reward: Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased variances by window noise and by initial noise of rewards [prompts, starts, draws]: [prompts] each."""
    window = reward.var(2).mean(1)
    return window, reward.mean(2).var(1) - window / reward.shape[2]


def bootstrap_share(window: Tensor, start: Tensor) -> tuple[float, float, float]:
    """Share of the window noise in the mean variance over prompts, with its interval."""
    rows = torch.randint(len(window), (BOOTSTRAP_DRAWS, len(window)), generator=torch.Generator().manual_seed(0))
    shares = window[rows].mean(1) / (window + start)[rows].mean(1).clamp(min=1e-12)
    low, high = shares.quantile(torch.tensor([0.025, 0.975], dtype=shares.dtype)).tolist()
    share = float(
        window.mean() / (window + start).mean()
    )  # above 1 if the variance by initial noise is estimated below 0
    return min(share, 1.0), low, min(high, 1.0)


def tail_share(reward: Tensor) -> float:
    """Share of the squared deviations from the group mean in the tenth of samples that deviates most."""
    groups = reward.flatten(1)
    squares = ((groups - groups.mean(1, keepdim=True)) ** 2).flatten().sort(descending=True).values
    return float(squares[: max(1, len(squares) // 10)].sum() / squares.sum())


def summarize(rewards: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    summary: dict[str, dict[str, Any]] = {}
    for name, reward in rewards.items():
        window, start = variance_components(reward)
        share, low, high = bootstrap_share(window, start)
        summary[name] = {
            "mean": float(reward.mean()),
            "group_std": float((window + start).mean().clamp(min=0).sqrt()),
            "window_share": share,
            "low": low,
            "high": high,
            "snr": share / (1 - share) if share < 1 else math.inf,
            "tail_share": tail_share(reward),
        }
    return summary


def reward_parts(rewards: dict[str, Tensor]) -> dict[str, float]:
    """Shares of the variance of the summed reward: covariance of each reward with the sum, by source of noise."""
    total = rewards["sum"]
    window_total, start_total = (part.mean() for part in variance_components(total))
    parts: dict[str, float] = {}
    for name in ("motion", "content"):
        # cov(a, b) = (var(a + b) - var(a) - var(b)) / 2, for each component
        combined, single = variance_components(rewards[name] + total), variance_components(rewards[name])
        for source, both, alone, of_total in zip(
            ("window", "start"), combined, single, (window_total, start_total), strict=True
        ):
            covariance = (both.mean() - alone.mean() - of_total) / 2
            parts[f"{name}, {source}"] = float(covariance / (window_total + start_total))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--starts", type=int, default=4, help="initial noises per prompt")
    parser.add_argument("--draws", type=int, default=2, help="window noises per initial noise")
    parser.add_argument("--noise-levels", type=float, nargs="+", default=[0.3, 0.5, 0.7, 1.0])
    parser.add_argument("--window-size", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = load(RECIPE)
    assert isinstance(config.data, PlaygroundPrompts)
    policy, rubric = build_policy(config, Placement()), build_rubric(config.rewards, Placement())
    policy.model.net.eval().requires_grad_(requires_grad=False)
    batch = config.data.load(0).first_prompts(options.num_prompts)
    results: dict[str, Any] = {}
    for noise_level in options.noise_levels:
        rewards = sample_rewards(policy, rubric, batch, noise_level, options)
        summary, parts = summarize(rewards), reward_parts(rewards)
        raw = {name: rewards[name].tolist() for name in ("motion", "content")}
        results[str(noise_level)] = {"rewards": summary, "parts": parts, "raw": raw}
        for name, row in summary.items():
            share = f"{row['window_share']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            numbers = [f"{row[key]:.2f}" for key in ("mean", "group_std", "snr", "tail_share")]
            print(f"| {' | '.join((str(noise_level), name, *numbers[:2], share, *numbers[2:]))} |")
        print("  " + ", ".join(f"{name}: {value:.2f}" for name, value in parts.items()), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"options": str(options), "results": results}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
