"""Votes needed for the same accuracy: pairs chosen at random or by expected information.

    python bench/pair_selection.py --study build/taste

Simulated people vote on samples of a model that tools/taste_study.py generated; every seed of the study has samples of
its own. A third of the prompts is held out in turn. Prints a table of the accuracy on decided pairs of held-out prompts
by number of votes, with the mean difference between the strategies and its standard error over seeds and splits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tastemaker.core.types import Placement
from tastemaker.data.image_io import read_image
from tastemaker.playground.simulated_people import PEOPLE, SimulatedPerson
from tastemaker.preferences.pair_selection import Strategy, select_pairs
from tastemaker.preferences.preference_model import Blocks, Comparisons, encode_samples, fit_preference
from tastemaker.rewards.playground import PlaygroundMatchReward
from tastemaker.rewards.preference import load_tower

BATCH_SIZE = 64
PARTS = 3  # of the prompts; one is held out


class StudySamples:
    """Samples of one seed of the study with their features."""

    def __init__(self, folder: Path) -> None:
        listed = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
        self.prompts = [prompt for _, prompt in listed]
        self.pixels = torch.stack([read_image(folder / "samples" / name)[:1] for name, _ in listed])
        tower, parts = load_tower(PlaygroundMatchReward(), Placement()), list[Blocks]()
        with torch.no_grad():
            for k in range(0, len(listed), BATCH_SIZE):
                batch = self.pixels[k : k + BATCH_SIZE], self.prompts[k : k + BATCH_SIZE]
                parts.append(encode_samples(tower, *batch, "spatial"))
        self.blocks = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
        numbers = {prompt: k for k, prompt in enumerate(dict.fromkeys(self.prompts))}
        self.prompt = torch.tensor([numbers[prompt] for prompt in self.prompts])
        same = [
            pair for pair in itertools.combinations(range(len(listed)), 2) if listed[pair[0]][1] == listed[pair[1]][1]
        ]
        self.pairs = torch.tensor(same)


class VotingPool:
    """Pairs that a person can vote on, and decided pairs of held-out prompts to predict."""

    def __init__(self, samples: StudySamples, person: SimulatedPerson, split: int) -> None:
        self.samples, self.person = samples, person
        self.rates = person.rate(samples.pixels, samples.prompts).double()
        pairs = samples.pairs
        held_out = samples.prompt[pairs[:, 0]] % PARTS == split
        decided = (self.rates[pairs[:, 0]] - self.rates[pairs[:, 1]]).abs() >= person.indifference
        self.pairs, self.test = pairs[~held_out], pairs[held_out & decided]
        self.noise = torch.rand(len(self.pairs), generator=torch.Generator().manual_seed(split)).tolist()

    def vote(self, place: int) -> float:
        choice = self.person.choose(self.rates[self.pairs[place]].tolist(), self.noise[place])
        return 0.5 if choice == "tie" else 1.0 - choice

    def comparisons(self, places: list[int], votes: list[float]) -> Comparisons:
        first, second = self.pairs[places].unbind(1)
        target = torch.tensor(votes, dtype=torch.float64)
        return Comparisons(self.samples.blocks, first, second, target, self.samples.prompt[first])

    def accuracy(self, score: Tensor) -> float:
        predicted, actual = (x[self.test[:, 0]] > x[self.test[:, 1]] for x in (score, self.rates))
        return float((predicted == actual).double().mean())


def simulate(pool: VotingPool, strategy: Strategy, counts: Sequence[int], seed: int) -> list[float]:
    """Held-out accuracy after each number of votes; the model is fitted again at each of them."""
    places: list[int] = []
    votes: list[float] = []
    fitted, accuracies = None, []
    for count in counts:
        rest = [k for k in range(len(pool.pairs)) if k not in set(places)]
        chosen = select_pairs(
            fitted, pool.samples.blocks, pool.pairs[rest], count - len(places), strategy=strategy, seed=seed + count
        )
        places += [rest[k] for k in chosen]
        votes += [pool.vote(rest[k]) for k in chosen]
        fitted = fit_preference(pool.comparisons(places, votes), seed=seed)
        accuracies.append(pool.accuracy(fitted.score(pool.samples.blocks)))
    return accuracies


def format_row(name: str, strategy: str, cells: Sequence[str]) -> str:
    return f"| {name} | {strategy} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("build/taste"))
    parser.add_argument("--people", nargs="*", default=["large", "warm", "high"])
    parser.add_argument("--votes", type=int, nargs="*", default=[10, 20, 30, 40, 60, 80, 120, 160])
    parser.add_argument("--splits", type=int, default=PARTS, help="how many thirds of the prompts are held out in turn")
    settings = parser.parse_args()
    studies = [StudySamples(file.parent) for file in sorted(settings.study.glob("seed-*/samples.json"))]
    print(format_row("person", "strategy", [f"{n} votes" for n in settings.votes]))
    print(format_row("---", "---", ["---"] * len(settings.votes)))
    for name in settings.people:
        pools = [VotingPool(samples, PEOPLE[name], split) for samples in studies for split in range(settings.splits)]
        strategies: tuple[Strategy, ...] = ("random", "active")
        curves = {
            each: torch.tensor([simulate(pool, each, settings.votes, seed) for seed, pool in enumerate(pools)])
            for each in strategies
        }
        for each, values in curves.items():
            print(format_row(name, each, [f"{value:.3f}" for value in values.mean(0).tolist()]))
        gain = curves["active"] - curves["random"]
        error = gain.std(0) / math.sqrt(len(gain))
        cells = [f"{a:+.3f} ± {b:.3f}" for a, b in zip(gain.mean(0).tolist(), error.tolist(), strict=True)]
        print(format_row(name, "difference", cells), flush=True)


if __name__ == "__main__":
    main()
