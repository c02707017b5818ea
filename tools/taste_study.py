"""Do models aligned to votes please the voter? Simulated people vote, models are aligned, and the people judge blind.

    python tools/taste_study.py --out build/taste --seeds 0 1 2     # three people, 300 votes each, three seeds
    python tools/taste_study.py --out build/taste --small           # one person, 60 votes, one seed
    python tools/taste_study.py --out build/taste --report          # the tables of what is done

Every seed also trains a control: the same steps on the same prompts and noise, with the content reward alone. Runs
again continue where they stopped; seeds can run in several processes. Writes study.json, study.md and sample sheets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import tastemaker as tm
from tastemaker.config.schema import RunConfig
from tastemaker.core.randomness import Randomness
from tastemaker.data.image_io import make_grid, read_image, save_image
from tastemaker.playground.captions import sample_split_captions
from tastemaker.playground.simulated_people import PEOPLE, SimulatedPerson
from tastemaker.preferences.sessions import Session, SessionSource, create_session
from tastemaker.preferences.statistics import wilson_interval
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, new_vote_id, now
from tastemaker.training.trainer import load_run_config, run_training

QUIET = Console(quiet=True)
TASTES = ("large", "warm", "high")
SAMPLES = 4  # of each prompt that is voted on
EVALUATION_SEEDS = (0, 1)
SHEET_COLUMNS = 10
NUM_RESAMPLES = 2000  # of the bootstrap over prompts


def sample_prompts(seed: int, count: int) -> list[str]:
    """Training captions of the playground; those of the blind evaluation are held out."""
    return list(dict.fromkeys(sample_split_captions(Randomness(seed, 7, torch.arange(count)), "train").texts()))


def read_images(files: Sequence[Path]) -> Tensor:
    return torch.stack([read_image(file)[:1] for file in files])


def cast_votes(
    person: SimulatedPerson, files: Sequence[Path], prompts: Sequence[str], count: int, seed: int, log: Path
) -> None:
    """Vote on random pairs of samples of the same prompt."""
    if log.is_file():
        return
    rates = person.rate(read_images(files), prompts).tolist()
    by_prompt: dict[str, list[int]] = {}
    for k, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(k)
    pairs = [pair for places in by_prompt.values() for pair in itertools.combinations(places, 2)]
    numbers = random.Random(seed)
    numbers.shuffle(pairs)
    partial = VoteLog(log.with_suffix(".partial"))
    partial.path.unlink(missing_ok=True)
    for pair in pairs[:count]:
        choice = person.choose([rates[k] for k in pair], numbers.random())
        samples = tuple(VotedSample(str(files[k].resolve())) for k in pair)
        partial.append(Vote(new_vote_id(), now(), person.name, "pair", prompts[pair[0]], samples, choice))
    partial.path.rename(log)


def session_images(session: Session, source: int) -> tuple[Tensor, list[str]]:
    """All samples of a source, with their prompts."""
    places = [(k, seed) for k in range(len(session.prompts)) for seed in session.seeds]
    files = [session.find_sample(source, k, seed) for k, seed in places]
    return read_images(files), [session.prompts[k] for k, _ in places]


def compare_images(person: SimulatedPerson, new: Tensor, old: Tensor, prompts: Sequence[str]) -> list[float]:
    """The votes of a person without noise: 1 if the new sample is preferred, 0 if the old one, 0.5 for a tie."""
    difference = person.rate(new, prompts) - person.rate(old, prompts)
    return torch.where(difference.abs() < person.indifference, 0.5, (difference > 0).float()).tolist()


def evaluate_strict(model: str, num_prompts: int, out: Path) -> list[float]:
    """PlayEval's strict verdict of every sample, in the order of prompts and seeds."""
    tm.evaluate("playeval", model, [], num_prompts=num_prompts, out=out, console=QUIET)
    scores = [json.loads(line) for line in (out / "scores.jsonl").read_text(encoding="utf-8").splitlines()]
    return [float(row["strict"]) for row in sorted(scores, key=lambda row: (row["index"], row["seed"]))]


class SeedStudy:
    """Voting samples, the control run and the aligned models of one seed."""

    def __init__(self, seed: int, settings: argparse.Namespace) -> None:
        self.seed, self.settings, self.folder = seed, settings, settings.out / f"seed-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.strict_before = evaluate_strict(settings.model, settings.playeval, settings.out / "playeval-before")
        texts = sample_prompts(seed, settings.votes // 3)
        self.files = tm.generate(
            settings.model, texts, out=self.folder / "samples", count=SAMPLES, seed=seed, console=QUIET
        )
        self.prompts = [text for text in texts for _ in range(SAMPLES)]
        listed = [[file.name, prompt] for file, prompt in zip(self.files, self.prompts, strict=True)]
        (self.folder / "samples.json").write_text(json.dumps(listed, indent=0) + "\n", encoding="utf-8")

    @property
    def overrides(self) -> list[str]:
        settings = self.settings
        sizes = [f"steps={settings.steps}", f"batch.prompts={settings.batch}", f"seed={self.seed}", "guard.prompts=4"]
        return [*sizes, "sample.every=0", *settings.overrides]

    def train_control(self, prompts: Sequence[str]) -> tuple[Session, Path]:
        """The same run without the learned reward, and its samples of the evaluation's prompts."""
        config = load_run_config(
            self.settings.model, [*self.overrides, f"output_dir={self.folder}", "name=control", "guard.every=0"]
        )
        assert isinstance(config, RunConfig)
        if not run_training(config, console=QUIET):
            raise SystemExit("interrupted; run the same command again to continue")
        sources = [SessionSource("control", str(config.directory))]
        out = self.folder / "control-samples"
        return create_session(out, sources, prompts, EVALUATION_SEEDS, console=QUIET), config.directory

    def study_person(self, name: str) -> dict[str, Any]:
        """Votes, alignment and evaluation of one person."""
        settings, folder, started = self.settings, self.folder / name, time.perf_counter()
        cast_votes(PEOPLE[name], self.files, self.prompts, settings.votes, self.seed, folder / "votes.jsonl")
        taste = [f"rewards.preference.weight={settings.weight}"] if settings.weight else []
        aligned = tm.align(
            folder / "votes.jsonl",
            settings.model,
            [*self.overrides, *taste],
            method=settings.method,
            out=folder / "align",
            num_prompts=settings.eval_prompts,
            seeds=EVALUATION_SEEDS,
            preference_overrides=[f"seed={self.seed}"],
            console=QUIET,
        )
        if aligned.session is None:
            raise SystemExit("interrupted; run the same command again to continue")
        trained = time.perf_counter() - started
        control, directory = self.train_control(aligned.session.prompts)
        (before, texts), (after, _) = session_images(aligned.session, 0), session_images(aligned.session, 1)
        controlled, _ = session_images(control, 0)
        self.save_sheet(name, before, controlled, after)
        quality = json.loads((folder / "align" / "preference" / "preference.json").read_text(encoding="utf-8"))
        people = {rule: PEOPLE[rule] for rule in TASTES}
        return {
            "person": name,
            "seed": self.seed,
            "prompts": list(aligned.session.prompts),
            "after_before": {rule: compare_images(each, after, before, texts) for rule, each in people.items()},
            "control_before": {rule: compare_images(each, controlled, before, texts) for rule, each in people.items()},
            "after_control": {rule: compare_images(each, after, controlled, texts) for rule, each in people.items()},
            "votes": {key: quality[key] for key in ("votes", "ties", "prompts")},
            "held_out": {key: value for key, value in quality["held_out"].items() if key != "reliability"},
            "strict_before": self.strict_before,
            "strict_control": evaluate_strict(str(directory), settings.playeval, self.folder / "playeval-control"),
            "strict_after": evaluate_strict(str(aligned.run), settings.playeval, folder / "playeval"),
            "align_seconds": trained,
            "settings": {key: getattr(settings, key) for key in ("method", "model", "steps", "batch", "weight")},
        }

    def save_sheet(self, name: str, before: Tensor, control: Tensor, after: Tensor) -> None:
        """A sheet with one prompt per column, and the rows before, control and after."""
        columns = range(0, len(before), len(EVALUATION_SEEDS))[:SHEET_COLUMNS]
        rows = torch.cat([images[list(columns)] for images in (before, control, after)])
        enlarged = F.interpolate(rows[:, 0], scale_factor=2, mode="bilinear")[:, None]
        save_image(make_grid(enlarged, columns=len(columns), min_size=128), self.folder / f"{name}.jpg")


def bootstrap_mean(numbers: Sequence[float], prompts: Sequence[str], sign: str = "") -> str:
    """A mean with its 95 % interval, by a bootstrap over prompts, because seeds share prompts."""
    places = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    index = torch.tensor([places[prompt] for prompt in prompts])
    total = torch.zeros(len(places), dtype=torch.float64).index_add_(0, index, torch.tensor(numbers).double())
    count = index.bincount().double()
    chosen = torch.randint(len(places), (NUM_RESAMPLES, len(places)), generator=torch.Generator().manual_seed(0))
    means = total[chosen].sum(1) / count[chosen].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return f"{total.sum() / count.sum():{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def describe_wins(wins: Sequence[float]) -> str:
    """A win rate with its Wilson interval."""
    low, high = wilson_interval(sum(wins), len(wins))
    return f"{sum(wins) / len(wins):.3f} ({low:.3f} to {high:.3f})"


def split_right(right: float, count: int) -> list[float]:
    """`count` votes of which a number are predicted right."""
    return [1.0] * round(right) + [0.0] * (count - round(right))


def pool_wins(rows: Sequence[dict[str, Any]], key: str, rule: str) -> str:
    """The win rate by a rule over all seeds."""
    prompts = [prompt for row in rows for prompt in row["prompts"] for _ in EVALUATION_SEEDS]
    return bootstrap_mean([win for row in rows for win in row[key][rule]], prompts)


def pool_changes(rows: Sequence[dict[str, Any]], base: str) -> str:
    """The mean difference of PlayEval's strict verdicts to those of another model, over all seeds."""
    pairs = [zip(row["strict_after"], row[f"strict_{base}"], strict=True) for row in rows]
    prompts = [str(k // 2) for row in rows for k in range(len(row["strict_after"]))]
    return bootstrap_mean([after - before for each in pairs for after, before in each], prompts, "+")


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown tables: win rates by the person's own rule, content, and wins over the control by every rule."""
    people = {name: own for name in TASTES if (own := [row for row in rows if row["person"] == name])}
    lines = [
        "| person | pairs | after over before | control over before | after over control |",
        "|---|---|---|---|---|",
    ]
    for name, own in people.items():
        wins = [pool_wins(own, key, name) for key in ("after_before", "control_before", "after_control")]
        lines.append(f"| {name} | {sum(len(row['after_before'][name]) for row in own)} | {' | '.join(wins)} |")
    lines += [
        "",
        "| person | seed | after over before | after over control | accuracy on decided votes | ties |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in people.items():
        for row in own:
            wins = [describe_wins(row[key][name]) for key in ("after_before", "after_control")]
            held = row["held_out"]
            votes, ties = row["votes"]["votes"], row["votes"]["ties"]
            accuracy = describe_wins(split_right(held["accuracy"] * votes - ties / 2, votes - ties))
            lines.append(f"| {name} | {row['seed']} | {' | '.join(wins)} | {accuracy} | {ties} of {votes} |")
    lines += [
        "",
        "| person | strict before | control | after | after less before | after less control |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in people.items():
        strict = [[score for row in own for score in row[f"strict_{key}"]] for key in ("before", "control", "after")]
        means = " | ".join(f"{sum(scores) / len(scores):.3f}" for scores in strict)
        changes = " | ".join(pool_changes(own, base) for base in ("before", "control"))
        lines.append(f"| {name} | {means} | {changes} |")
    lines += ["", f"| aligned to | {' | '.join(f'by the rule {rule}' for rule in TASTES)} |", "|---|---|---|---|"]
    for name, own in people.items():
        wins = [pool_wins(own, "after_control", rule) for rule in TASTES]
        lines.append(f"| {name} | {' | '.join(wins)} |")
    return "\n".join(lines)


def write_report(out: Path) -> None:
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("seed-*/*/result.json"))]
    if rows:
        (out / "study.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")
        (out / "study.md").write_text(format_tables(rows) + "\n", encoding="utf-8")
        print(format_tables(rows))


def parse_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/taste"))
    parser.add_argument("--small", action="store_true", help="one person, one seed, 60 votes, few steps")
    parser.add_argument("--report", action="store_true", help="only write the tables of what is done")
    parser.add_argument("--people", nargs="*", default=None)
    parser.add_argument("--seeds", type=int, nargs="*", default=None)
    parser.add_argument("--votes", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--weight", type=float, default=None, help="of the learned reward; by default that of align")
    parser.add_argument("--method", default="reward_gradient")
    parser.add_argument("--model", default="reward-gradient-playground")
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], help="settings of the runs, as key=value")
    settings = parser.parse_args()
    small = settings.small
    settings.people = settings.people or (["large"] if small else list(TASTES))
    settings.seeds = settings.seeds or ([0] if small else [0, 1, 2])
    settings.votes = settings.votes or (60 if small else 300)
    settings.steps = settings.steps or (20 if small else 30)
    settings.batch, settings.eval_prompts, settings.playeval = (24, 20, 30) if small else (20, 50, 168)
    return settings


def main() -> None:
    settings = parse_settings()
    settings.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if settings.report else settings.seeds:
        waiting = [name for name in settings.people if not (settings.out / f"seed-{seed}/{name}/result.json").is_file()]
        study = SeedStudy(seed, settings) if waiting else None
        for name in waiting:
            assert study is not None
            started = time.perf_counter()
            row = study.study_person(name)
            (study.folder / name / "result.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
            print(f"seed {seed}, {name}: {time.perf_counter() - started:.0f} s", flush=True)
    write_report(settings.out)


if __name__ == "__main__":
    main()
