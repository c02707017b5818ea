"""FK steering, noise search and PARM against best-of-N at equal network calls, on the playground flow model.

    python bench/search.py --num-prompts 60 --samples 2 --out build/search.json

Every search scores with the same reward and has the same budget of n * steps network calls per sample. Prompts are
held-out captions of PlayEval; `strict` is the verdict of a detector that no search used. Differences are paired by
prompt and seed; intervals are 95 % bootstrap intervals over prompts.

    python bench/search.py --diagnose 2 4 6 8

says why resampling helps or not: how well the reward of a preview predicts the final reward, and how much of the final
reward is still open after that step, which is what copies of a particle can explore.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tastemaker.config.build import build_policy
from tastemaker.config.load import load
from tastemaker.core.policy import Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Rubric, Verifier, WeightedReward
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.evaluation.benchmarks import Benchmark, playeval
from tastemaker.evaluation.metrics import bootstrap_interval
from tastemaker.evaluation.playeval import load_playeval_scorer
from tastemaker.processes.dynamics import CPS, ODE, FlowSDE, SamplerDynamics
from tastemaker.rewards.playground import PlaygroundJudgeReward, PlaygroundSoftReward
from tastemaker.search.base import RubricVerifier, Search, start_candidates
from tastemaker.search.best_of_n import BestOfN, SingleSample
from tastemaker.search.fk_steering import FKSteering
from tastemaker.search.noise_search import NoiseSearch
from tastemaker.search.parm import PARMSearch

BASELINE = "best of n, ode"


def build_methods(n: int, scale: float) -> dict[str, tuple[Search, SamplerDynamics]]:
    """Searches by name, with the sampler of each."""
    methods: dict[str, tuple[Search, SamplerDynamics]] = {
        "single, ode": (SingleSample(), ODE()),
        BASELINE: (BestOfN(n), ODE()),
        f"noise search {n // 2} x 2": (NoiseSearch(n // 2, 2), ODE()),
        "parm from .5": (PARMSearch(n + n // 4, start_progress=0.5, top_k=n - n // 4), ODE()),
    }
    for label, dynamics in (("sde .7", FlowSDE(0.7)), ("sde .4", FlowSDE(0.4)), ("cps .5", CPS(0.5))):
        methods[f"best of n, {label}"] = (BestOfN(n), dynamics)
        methods[f"fk diff, {label}"] = (FKSteering(n, "diff", scale), dynamics)
        methods[f"fk diff from .4, {label}"] = (FKSteering(n, "diff", scale, (0.4, 0.6, 0.8)), dynamics)
    for potential in ("max", "add", "rt"):
        methods[f"fk {potential}, sde .7"] = (FKSteering(n, potential, scale), FlowSDE(0.7))  # type: ignore[arg-type]
    return methods


def build_verifier(reward: str, placement: Placement) -> Verifier:
    if reward == "judge":
        verifier = PlaygroundJudgeReward().load(placement).verifier()
        assert verifier is not None
        return verifier
    spec = PlaygroundSoftReward()
    return RubricVerifier(Rubric({"soft": WeightedReward(spec, spec.load(placement))}))


def measure(
    policy: Policy[Any], search: Search, verifier: Verifier, benchmark: Benchmark, options: argparse.Namespace
) -> dict[str, Any]:
    """Scores per prompt [P] and costs per sample of one search."""
    device = torch.device(options.device)
    scorer = load_playeval_scorer(device=device)
    rewards, strict, calls, verifier_calls, started = [], [], 0.0, 0.0, time.process_time()
    for sample in range(options.samples):
        for first in range(0, len(benchmark.prompts), options.batch_size):
            chunk = slice(first, first + options.batch_size)
            batch = PromptBatch(tuple(benchmark.prompts[chunk]), tuple(benchmark.metadata[chunk]))
            rows = torch.arange(first, first + len(batch), device=device) * options.samples + sample
            result = search.run(policy, verifier, batch, Randomness(options.seed, 0, rows))
            with torch.no_grad():
                pixels = policy.decode(result.x)
                rewards.append(verifier.judge(pixels, batch.prompts, batch.metadata, 1.0).score.double().cpu())
            verdicts = scorer.score(pixels, batch.prompts, batch.metadata)
            strict.append(torch.tensor([float(row["strict"]) for row in verdicts], dtype=torch.float64))
            calls, verifier_calls = calls + result.cost.calls, verifier_calls + result.cost.verifier_calls
    total = options.samples * len(benchmark.prompts)
    return {
        "reward": torch.cat(rewards).view(options.samples, -1).mean(0),
        "strict": torch.cat(strict).view(options.samples, -1).mean(0),
        "calls": calls / total,
        "verifier_calls": verifier_calls / total,
        "seconds": time.process_time() - started,
    }


@torch.no_grad()
def diagnose(
    policy: Policy[Any], verifier: Verifier, benchmark: Benchmark, step: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Correlation of preview and final reward within a prompt, and share of the final variance that comes later."""
    previews, finals = [], []
    for first in range(0, len(benchmark.prompts), options.batch_size):
        chunk = slice(first, first + options.batch_size)
        prompts, metadata = tuple(benchmark.prompts[chunk]), tuple(benchmark.metadata[chunk])
        cond = policy.embed(prompts, metadata).repeat(options.n)
        rng = Randomness(options.seed, 0, torch.arange(first, first + len(prompts), device=options.device)).repeat(
            options.n
        )
        rollout = start_candidates(policy, cond, rng)
        for _ in range(step):
            rollout.step()
        score = verifier.judge(policy.decode(rollout.preview()), cond.prompts, cond.metadata, rollout.progress).score
        rollout.select(torch.arange(len(cond), device=options.device).repeat_interleave(2))
        rollout.reseed(replace(rng, step=1).repeat(2))
        final, cond = rollout.finish().final, rollout.cond
        previews.append(score.double().view(-1, options.n))
        score = verifier.judge(policy.decode(final), cond.prompts, cond.metadata, 1.0).score
        finals.append(score.double().view(-1, options.n, 2))
    preview, outcome = torch.cat(previews), torch.cat(finals)
    later = outcome.var(2).mean()
    earlier = outcome.mean(2).var(1).mean() - later / 2
    centered = (preview - preview.mean(1, keepdim=True), outcome[..., 0] - outcome[..., 0].mean(1, keepdim=True))
    correlation = torch.corrcoef(torch.stack([x.flatten() for x in centered]))[0, 1]
    return float(correlation), float(later / (later + earlier))


def format_interval(values: Tensor) -> str:
    interval = bootstrap_interval(values)
    return f"{interval['mean']:+.3f} ({interval['low']:+.3f} to {interval['high']:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=1, help="per prompt")
    parser.add_argument("--batch-size", type=int, default=12, help="prompts per call of a search")
    parser.add_argument("-n", type=int, default=4, help="candidates per sample")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward", choices=("judge", "soft"), default="judge")
    parser.add_argument("--scale", type=float, default=10.0, help="lambda of FK steering")
    parser.add_argument("--methods", nargs="*", default=None, help="all by default")
    parser.add_argument("--diagnose", type=int, nargs="*", help="steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    placement = Placement(torch.device(options.device))
    benchmark, verifier = playeval(options.num_prompts, 1), build_verifier(options.reward, placement)
    policy = build_policy(load("playground-flow", ["model.weights=playground/flow"]), placement)
    policy.model.net.eval().requires_grad_(requires_grad=False)
    for step in options.diagnose or ():
        for noise_level in (0.4, 0.7):
            process = replace(policy.process, dynamics=FlowSDE(noise_level), num_steps=options.steps)
            correlation, later = diagnose(replace(policy, process=process), verifier, benchmark, step, options)
            print(f"| {step} | {noise_level} | {correlation:.2f} | {later:.2f} |", flush=True)
    if options.diagnose:
        return
    results: dict[str, dict[str, Any]] = {}
    for name, (search, dynamics) in build_methods(options.n, options.scale).items():
        if options.methods and name not in (*options.methods, BASELINE):
            continue
        process = replace(policy.process, dynamics=dynamics, num_steps=options.steps)
        results[name] = result = measure(replace(policy, process=process), search, verifier, benchmark, options)
        parts = [f"{result['reward'].mean():.3f}", f"{result['strict'].mean():.3f}"]
        if BASELINE in results:
            parts += [format_interval(result[key] - results[BASELINE][key]) for key in ("reward", "strict")]
        costs = (f"{result['calls']:.1f}", f"{result['verifier_calls']:.1f}", f"{result['seconds']:.0f} s")
        print(f"| {' | '.join((name, *costs, *parts))} |", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        rows = {
            name: {k: v.tolist() if k in ("reward", "strict") else v for k, v in r.items()}
            for name, r in results.items()
        }
        options.out.write_text(json.dumps({"options": str(options), "results": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
