"""Votes of simulated people on painted scenes, which need no generator, or on samples of a model."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import select_rows
from tastemaker.data.image_io import read_image, save_image
from tastemaker.playground.captions import sample_split_captions
from tastemaker.playground.scenes import Painter, sample_scenes
from tastemaker.playground.simulated_people import PEOPLE
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, new_vote_id, now


def write_painted_votes(
    folder: Path, person: str = "large", prompts: int = 24, votes: int = 60, samples: int = 3
) -> Path:
    """Paint scenes of captions, vote on pairs of the same caption, and return the vote log."""
    captions = sample_split_captions(Randomness(3, 0, torch.arange(prompts)), "train")
    repeated = select_rows(captions, torch.arange(prompts).repeat_interleave(samples))
    rng = Randomness(3, 1, torch.arange(len(repeated)))
    pixels, texts = Painter().paint(sample_scenes(repeated, rng, snapped=0.0), rng), repeated.texts()
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{k:03d}.png" for k in range(len(pixels))]
    for image, file in zip(pixels, files, strict=True):
        save_image(image, file)
    return write_votes(folder / "votes.jsonl", person, files, texts, votes)


def paint_pictures(folder: Path, prompts: int = 8, samples: int = 3) -> Path:
    """Paint scenes of captions into a folder with their prompts, as a source of a voting session."""
    captions = sample_split_captions(Randomness(3, 0, torch.arange(prompts)), "train")
    repeated = select_rows(captions, torch.arange(prompts).repeat_interleave(samples))
    rng = Randomness(3, 1, torch.arange(len(repeated)))
    folder.mkdir(parents=True)
    rows = []
    for k, image in enumerate(Painter().paint(sample_scenes(repeated, rng, snapped=0.0), rng)):
        save_image(image, folder / f"{k:03d}.png")
        rows.append(json.dumps({"file": f"{k:03d}.png", "prompt": repeated.texts()[k]}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def write_votes(path: Path, person: str, files: Sequence[Path], prompts: Sequence[str], votes: int) -> Path:
    """Let a simulated person vote on random pairs of samples of the same prompt, and return the vote log."""
    pixels = torch.stack([read_image(file)[:1] for file in files])
    rates = PEOPLE[person].rate(pixels, prompts).tolist()
    pairs = [pair for pair in itertools.combinations(range(len(files)), 2) if prompts[pair[0]] == prompts[pair[1]]]
    numbers = random.Random(0)
    numbers.shuffle(pairs)
    log = VoteLog(path)
    for pair in pairs[:votes]:
        choice = PEOPLE[person].choose([rates[k] for k in pair], numbers.random())
        shown = tuple(VotedSample(os.path.relpath(files[k], path.parent)) for k in pair)
        log.append(Vote(new_vote_id(), now(), person, "pair", prompts[pair[0]], shown, choice))
    return log.path
