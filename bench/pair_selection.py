"""Votes needed for the same accuracy: pairs chosen at random or by expected information.

    python bench/pair_selection.py --people large high --seeds 3

Scenes of the playground are painted, so that no generator is needed; a simulated person votes on pairs of a pool.
Prints a table of the held-out accuracy by number of votes.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.playground.captions import sample_split_captions
from tastemaker.playground.scenes import Painter, sample_scenes
from tastemaker.playground.simulated_people import PEOPLE, SimulatedPerson
from tastemaker.preferences.pair_selection import Strategy, select_pairs
from tastemaker.preferences.preference_model import Comparisons, encode_samples, fit_preference
from tastemaker.rewards.playground import PlaygroundMatchReward
from tastemaker.rewards.preference import load_tower

SAMPLES = 4  # of each prompt


class VotingPool:
    """Painted samples with their features and what a person thinks of them, in training and held-out pairs."""

    def __init__(self, person: SimulatedPerson, num_prompts: int, seed: int) -> None:
        rng = Randomness(seed, 0, torch.arange(num_prompts))
        captions = sample_split_captions(rng, "train")
        repeated = type(captions)(*(column.repeat_interleave(SAMPLES) for column in captions._columns()))
        rows = Randomness(seed, 1, torch.arange(num_prompts * SAMPLES))
        pixels = Painter().paint(sample_scenes(repeated, rows, snapped=0.0), rows)
        prompts = repeated.texts()
        tower = load_tower(PlaygroundMatchReward(), Placement())
        with torch.no_grad():
            blocks = encode_samples(tower, pixels, prompts, "spatial")
        self.person, self.blocks = person, {name: x.double() for name, x in blocks.items()}
        self.rates = person.rate(pixels, prompts).double()
        first = [k + a for k in range(0, len(pixels), SAMPLES) for a in range(SAMPLES) for b in range(a + 1, SAMPLES)]
        second = [k + b for k in range(0, len(pixels), SAMPLES) for a in range(SAMPLES) for b in range(a + 1, SAMPLES)]
        pairs = torch.tensor([first, second]).T
        held_out = pairs[:, 0] // SAMPLES >= num_prompts * 2 // 3
        decided = (self.rates[pairs[:, 0]] - self.rates[pairs[:, 1]]).abs() >= person.indifference
        self.pairs, self.test = pairs[~held_out], pairs[held_out & decided]
        self.noise = torch.rand(len(self.pairs), generator=torch.Generator().manual_seed(seed)).tolist()

    def vote(self, place: int) -> float:
        choice = self.person.choose(self.rates[self.pairs[place]].tolist(), self.noise[place])
        return 0.5 if choice == "tie" else 1.0 - choice

    def comparisons(self, places: list[int], votes: list[float]) -> Comparisons:
        pairs = self.pairs[places]
        target = torch.tensor(votes, dtype=torch.float64)
        return Comparisons(self.blocks, pairs[:, 0], pairs[:, 1], target, pairs[:, 0] // SAMPLES)

    def accuracy(self, score: Tensor) -> float:
        predicted, actual = (x[self.test[:, 0]] > x[self.test[:, 1]] for x in (score, self.rates))
        return float((predicted == actual).double().mean())


def simulate(pool: VotingPool, strategy: Strategy, counts: list[int], seed: int) -> list[float]:
    """Held-out accuracy after each number of votes; the model is fitted again at each of them."""
    places: list[int] = []
    votes: list[float] = []
    fitted, accuracies = None, []
    for count in counts:
        rest = [k for k in range(len(pool.pairs)) if k not in set(places)]
        chosen = select_pairs(
            fitted, pool.blocks, pool.pairs[rest], count - len(places), strategy=strategy, seed=seed + count
        )
        places += [rest[k] for k in chosen]
        votes += [pool.vote(rest[k]) for k in chosen]
        fitted = fit_preference(pool.comparisons(places, votes), seed=seed)
        accuracies.append(pool.accuracy(fitted.score(pool.blocks)))
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", nargs="*", default=["large", "warm", "high"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--votes", type=int, nargs="*", default=[10, 20, 30, 40, 60, 80, 120])
    settings = parser.parse_args()
    print(f"| person | strategy | {' | '.join(f'{n} votes' for n in settings.votes)} |")
    print(f"|---|---|{'---|' * len(settings.votes)}")
    for name in settings.people:
        pools = [VotingPool(PEOPLE[name], settings.prompts, seed) for seed in range(settings.seeds)]
        for strategy in ("random", "active"):
            runs = [simulate(pool, strategy, settings.votes, seed) for seed, pool in enumerate(pools)]
            means = torch.tensor(runs).mean(0).tolist()
            print(f"| {name} | {strategy} | {' | '.join(f'{value:.3f}' for value in means)} |", flush=True)


if __name__ == "__main__":
    main()
