"""Do models aligned to votes please the voter? Simulated people vote, models are aligned, and the people judge blind.

    python tools/taste_study.py --out build/taste             # three people, 300 votes, three seeds; minutes on a GPU
    python tools/taste_study.py --out build/taste --small     # one person, 60 votes, one seed; minutes on a CPU

Writes study.json, study.md and sheets of samples before and after, by person. Runs again continue where they stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import tastemaker as tm
from tastemaker.core.randomness import Randomness
from tastemaker.data.image_io import make_contact_sheet, read_image, save_image
from tastemaker.playground.captions import sample_split_captions
from tastemaker.playground.simulated_people import PEOPLE, SimulatedPerson
from tastemaker.preferences.sessions import Session
from tastemaker.preferences.statistics import wilson_interval
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, new_vote_id, now

QUIET = Console(quiet=True)


def sample_prompts(seed: int, count: int) -> list[str]:
    """Training captions of the playground; those of the blind evaluation are held out."""
    return list(dict.fromkeys(sample_split_captions(Randomness(seed, 7, torch.arange(count)), "train").texts()))


def read_images(files: list[Path]) -> Tensor:
    return torch.stack([read_image(file)[:1] for file in files])


def cast_votes(
    person: SimulatedPerson, files: list[Path], prompts: list[str], count: int, seed: int, log: Path
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
    votes = VoteLog(log)
    for pair in pairs[:count]:
        choice = person.choose([rates[k] for k in pair], numbers.random())
        samples = tuple(VotedSample(str(files[k].resolve())) for k in pair)
        votes.append(Vote(new_vote_id(), now(), person.name, "pair", prompts[pair[0]], samples, choice))


def session_images(session: Session, source: int) -> tuple[Tensor, list[str]]:
    """All samples of a source, with their prompts."""
    places = [(k, seed) for k in range(len(session.prompts)) for seed in session.seeds]
    files = [session.find_sample(source, k, seed) for k, seed in places]
    return read_images(files), [session.prompts[k] for k, _ in places]


def count_wins(person: SimulatedPerson, session: Session) -> tuple[float, int]:
    """How often the rule of a person prefers the sample of the model after; a tie counts half."""
    (before, prompts), (after, _) = session_images(session, 0), session_images(session, 1)
    difference = person.rate(after, prompts) - person.rate(before, prompts)
    wins = torch.where(difference.abs() < person.indifference, 0.5, (difference > 0).float())
    return float(wins.sum()), len(wins)


def evaluate_strict(model: str, overrides: list[str], num_prompts: int, out: Path) -> float:
    report = tm.evaluate("playeval", model, overrides, num_prompts=num_prompts, out=out, console=QUIET)
    return float(find_mean(report, "strict"))


def find_mean(report: dict[str, Any], name: str) -> float:
    value = report["scores"][name] if "scores" in report else report[name]
    value = value["overall"] if isinstance(value, dict) and "overall" in value else value
    return value["mean"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value


def study_person(
    name: str, seed: int, files: list[Path], prompts: list[str], settings: argparse.Namespace
) -> dict[str, Any]:
    """Votes, alignment and evaluation of one person and seed."""
    person, folder, started = PEOPLE[name], settings.out / f"{name}-{seed}", time.perf_counter()
    cast_votes(person, files, prompts, settings.votes, seed, folder / "votes.jsonl")
    overrides = [f"steps={settings.steps}", f"batch.prompts={settings.batch}", f"seed={seed}", *settings.overrides]
    aligned = tm.align(
        folder / "votes.jsonl",
        settings.model,
        overrides,
        method=settings.method,
        out=folder / "align",
        num_prompts=settings.eval_prompts,
        preference_overrides=[f"seed={seed}"],
        console=QUIET,
    )
    if aligned.session is None:
        raise SystemExit("interrupted; run the same command again to continue")
    others = {other: count_wins(PEOPLE[other], aligned.session)[0] for other in PEOPLE}
    wins, pairs = count_wins(person, aligned.session)
    report = folder / "align" / "preference" / "preference.json"
    quality = json.loads(report.read_text(encoding="utf-8"))["held_out"] if report.is_file() else {}
    after = evaluate_strict(str(aligned.run), [], settings.playeval, folder / "playeval")
    before_images, _ = session_images(aligned.session, 0)
    after_images, texts = session_images(aligned.session, 1)
    if seed == 0:
        rows = list(range(0, len(texts), len(aligned.session.seeds)))[:12]
        for label, images in (("before", before_images), ("after", after_images)):
            save_image(make_contact_sheet(images[rows])[None], settings.out / f"{name}-{label}.png")
    return {
        "person": name,
        "seed": seed,
        "wins": wins,
        "pairs": pairs,
        "vote_accuracy": quality.get("accuracy"),
        "calibration_error": quality.get("calibration_error"),
        "strict_after": after,
        "wins_by_rule": {other: won / pairs for other, won in others.items()},
        "seconds": time.perf_counter() - started,
    }


def format_table(rows: list[dict[str, Any]], strict_before: float) -> str:
    """A Markdown table: one line per person, pooled over seeds."""
    lines = [
        "| person | win rate | 95 % interval | vote accuracy | strict before | strict after |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["person"] for row in rows):
        own = [row for row in rows if row["person"] == name]
        wins, pairs = sum(row["wins"] for row in own), sum(row["pairs"] for row in own)
        low, high = wilson_interval(wins, pairs)
        accuracy = sum(row["vote_accuracy"] or 0 for row in own) / len(own)
        after = sum(row["strict_after"] for row in own) / len(own)
        lines.append(
            f"| {name} | {wins / pairs:.3f} of {pairs} | {low:.3f} to {high:.3f} | {accuracy:.3f} "
            f"| {strict_before:.3f} | {after:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/taste"))
    parser.add_argument("--small", action="store_true", help="one person, one seed, 60 votes, few steps")
    parser.add_argument("--people", nargs="*", default=None)
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--votes", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--method", default="reward_gradient")
    parser.add_argument("--model", default="reward-gradient-playground")
    parser.add_argument("overrides", nargs="*", help="settings of the runs that train models, as key=value")
    settings = parser.parse_intermixed_args()
    small = settings.small
    settings.people = settings.people or (["large"] if small else ["large", "warm", "high"])
    settings.seeds = settings.seeds or (1 if small else 3)
    settings.votes = settings.votes or (60 if small else 300)
    settings.steps = settings.steps or (20 if small else 60)
    settings.batch, settings.eval_prompts, settings.playeval = (24, 20, 30) if small else (64, 100, 252)
    settings.out.mkdir(parents=True, exist_ok=True)
    strict_before = evaluate_strict(settings.model, [], settings.playeval, settings.out / "playeval-before")
    rows = []
    for seed in range(settings.seeds):
        texts = sample_prompts(seed, max(20, settings.votes // 3))
        files = tm.generate(
            settings.model, texts, out=settings.out / f"samples-{seed}", count=4, seed=seed, console=QUIET
        )
        prompts = [text for text in texts for _ in range(4)]
        for name in settings.people:
            rows.append(study_person(name, seed, files, prompts, settings))
            print(json.dumps(rows[-1]), flush=True)
            study = {"strict_before": strict_before, "rows": rows}
            (settings.out / "study.json").write_text(json.dumps(study, indent=1), encoding="utf-8")
    table = format_table(rows, strict_before)
    (settings.out / "study.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
