"""Alignment to votes: the run it configures, the blind evaluation, and that a simulated person likes the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from painted_votes import write_painted_votes, write_votes
from rich.console import Console

import tastemaker as tm
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.data.image_io import read_image
from tastemaker.objectives.kto import KTO
from tastemaker.playground.captions import sample_split_captions
from tastemaker.playground.simulated_people import PEOPLE
from tastemaker.preferences.alignment import (
    OBJECTIVES,
    STEPS,
    AlignmentOptions,
    Method,
    build_model_config,
    choose_method,
    choose_unseen_prompts,
    claim_directory,
    same_sampler,
)
from tastemaker.preferences.sessions import load_session
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, new_vote_id, now, read_votes
from tastemaker.search.generation import resolve_source

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_painted_votes(tmp_path_factory.mktemp("votes"), prompts=12, votes=30)


def test_every_method_configures_a_valid_run(votes: Path, tmp_path: Path) -> None:
    base, _ = resolve_source("playground-flow16", (), console=QUIET)
    for method in get_args(Method):
        if method == "kto":  # trains on likes, of which this log has none
            continue
        options = AlignmentOptions(votes, "playground-flow16", tmp_path, method, ("steps=8",))  # type: ignore[arg-type]
        config = build_model_config(options, base)
        learned = config.rewards.get("preference")
        assert (learned is None) == (method == "dpo")
        content = [name for name, reward in config.rewards.items() if reward.weight and name != "preference"]
        assert bool(content) == (method != "dpo")  # the content is kept by a reward beside the learned one
        assert any(reward.held_out for reward in config.rewards.values()) and config.guard.every == 2
        assert bool(same_sampler(base, config)) == (method in ("grpo", "nft"))
        prompts = choose_unseen_prompts(options, config)
        voted = {json.loads(line)["prompt"] for line in votes.read_text().splitlines()}
        assert len(prompts) == 30 and not voted & set(prompts)


def test_a_log_of_likes_only_trains_with_kto(votes: Path, tmp_path: Path) -> None:
    log, shown = VoteLog(tmp_path / "votes.jsonl"), read_votes(votes)[0]
    for k, sample in enumerate(shown.samples):
        file = replace(sample, file=str(votes.parent / sample.file))
        log.append(Vote(new_vote_id(), now(), "ann", "like", shown.prompt, (file,), k == 0))
    assert choose_method(votes) == "reward_gradient" and choose_method(log.path) == "kto"
    assert set(OBJECTIVES) == set(STEPS) == set(get_args(Method))  # what the studio offers
    for model, beta in (("playground-flow16", 300.0), ("playground-causal", 0.1)):
        options = AlignmentOptions(log.path, model, tmp_path / model, choose_method(log.path))
        config = build_model_config(options, resolve_source(model, (), console=QUIET)[0])
        batch = config.data.load(0).batch(0, 2, 0, 1)
        assert config.objective == KTO(beta=beta, utility="loss_averse", num_timesteps=4) and sorted(
            batch.liked.tolist()
        ) == [False, True]
        assert not any(reward.weight for reward in config.rewards.values())


def test_directory_belongs_to_one_alignment(votes: Path, tmp_path: Path) -> None:
    claim_directory(AlignmentOptions(votes, "playground-flow16", tmp_path))
    claim_directory(AlignmentOptions(votes, "playground-flow16", tmp_path))  # again: it resumes
    with pytest.raises(ConfigError, match="TM1321"):
        claim_directory(AlignmentOptions(votes, "playground-flow16", tmp_path, "dpo"))


def write_likes(votes: Path, path: Path) -> Path:
    """Like the first painted sample of every prompt, and dislike the others."""
    samples: dict[str, dict[str, VotedSample]] = {}
    for vote in read_votes(votes):
        for sample in vote.samples:
            file = str((votes.parent / sample.file).resolve())
            samples.setdefault(vote.prompt, {})[file] = VotedSample(file)
    log = VoteLog(path)
    for prompt, shown in samples.items():
        for k, sample in enumerate(shown.values()):
            log.append(Vote(new_vote_id(), now(), "anna", "like", prompt, (sample,), k == 0))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "nft", "dpo"])
def test_two_steps_of_every_method_end_in_a_blind_evaluation(votes: Path, tmp_path: Path, method: str) -> None:
    sizes = ["steps=2", "batch.prompts=2", "guard.prompts=4", "sample.every=0", "optim.lr=0.02"]
    groups = [] if method == "dpo" else ["objective.group_size=2"]
    # DPO trains on likes, paired within a prompt; the others on a reward that was learned from votes on pairs.
    used = write_likes(votes, tmp_path / "likes.jsonl") if method == "dpo" else votes
    aligned = tm.align(
        used,
        "reward-gradient-playground",
        [*sizes, *groups],
        method=method,  # type: ignore[arg-type]
        out=tmp_path / "aligned",
        preference_overrides=["steps=1", "preference.folds=2"],
        num_prompts=4,
        seeds=(0,),
        tiny=True,
        console=QUIET,
    )
    assert aligned.completed and aligned.session is not None and (aligned.preference is None) == (method == "dpo")
    logged = [json.loads(line) for line in (aligned.run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2] and all(line["grad_norm"] > 0 for line in steps)
    session = load_session(aligned.directory / "evaluation")
    assert [source.name for source in session.sources] == ["before", "after"] and session.blind and session.is_ready
    assert len(session.prompts) == 4 and not {vote.prompt for vote in read_votes(used)} & set(session.prompts)
    before, after = (torch.stack([read_image(session.find_sample(i, k, 0)) for k in range(4)]) for i in (0, 1))
    assert (before - after).abs().max() > 1e-2  # the weights after training, not those before


@pytest.mark.slow
def test_aligned_model_pleases_the_person_on_unseen_prompts(tmp_path: Path) -> None:
    captions = sample_split_captions(Randomness(5, 0, torch.arange(22)), "train")
    prompts = list(dict.fromkeys(captions.texts()))
    files = tm.generate("reward-gradient-playground", prompts, out=tmp_path / "samples", count=4, console=QUIET)
    texts = [prompt for prompt in prompts for _ in range(4)]
    votes = write_votes(tmp_path / "votes.jsonl", "large_and_warm", files, texts, 60)
    settings = ["steps=12", "batch.prompts=24", "guard.prompts=4", "sample.every=0"]
    options = {"out": tmp_path / "aligned", "num_prompts": 20, "seeds": (0, 1), "console": QUIET}
    aligned = tm.align(votes, "reward-gradient-playground", settings, **options)  # type: ignore[arg-type]
    assert aligned.completed and aligned.session is not None and "it predicts" in aligned.summary
    session, person = aligned.session, PEOPLE["large_and_warm"]
    pairs = [(k, seed) for k in range(20) for seed in session.seeds]
    unseen = [session.prompts[k] for k, _ in pairs]
    before, after = (
        person.rate(torch.stack([read_image(session.find_sample(i, *p))[:1] for p in pairs]), unseen) for i in (0, 1)
    )
    assert (after > before).float().mean() > 0.65
    again = tm.align(votes, "reward-gradient-playground", settings, **options)  # type: ignore[arg-type]
    assert again.completed and again.run == aligned.run  # everything is done, so nothing is done again
