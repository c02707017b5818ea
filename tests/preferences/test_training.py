"""From a vote log to a reward: training, its report, the reward's gradient, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from painted_votes import write_painted_votes
from rich.console import Console

from tastemaker.config.check import find_problems
from tastemaker.config.load import load_any_config
from tastemaker.config.registries import REWARDS
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import read_image
from tastemaker.data.votes import VoteData
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, new_vote_id, now, read_votes
from tastemaker.rewards.preference import PreferenceReward
from tastemaker.training.trainer import run_training

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_painted_votes(tmp_path_factory.mktemp("votes"), prompts=36, votes=100)


@pytest.fixture(scope="module")
def run(votes: Path) -> Path:
    settings = [f"data.path={votes}", f"output_dir={votes.parent}", "name=taste", "steps=2", "preference.folds=3"]
    assert run_training(load_any_config("preference-playground", [*settings, "engine.device=cpu"]), console=QUIET)
    return votes.parent / "taste"


def test_report_has_held_out_accuracy_calibration_and_learning_curve(run: Path) -> None:
    report = json.loads((run / "preference.json").read_text())
    held_out = report["held_out"]
    assert report["votes"] == 100 and held_out["accuracy"] > 0.65
    assert held_out["accuracy_low"] < held_out["accuracy"] < held_out["accuracy_high"]
    assert sum(row["votes"] for row in held_out["reliability"]) == 100 and held_out["calibration_error"] < 0.2
    assert [point["votes"] for point in report["learning_curve"]] == [20, 66]
    assert "it predicts" in report["summary"]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("validation/accuracy" in json.dumps(line) for line in logged)


def test_reward_agrees_with_the_votes_and_has_a_gradient(run: Path, votes: Path) -> None:
    reward = PreferenceReward(run).load(Placement())
    decided = [vote for vote in read_votes(votes) if vote.pairs()]
    right = 0
    for vote in decided:
        pixels = torch.stack([read_image(votes.parent / sample.file)[:1] for sample in vote.samples])
        scores = reward.score(pixels, [vote.prompt] * 2, [{}] * 2)
        right += int(scores.argmax()) == vote.choice
    assert right > 0.7 * len(decided)
    pixels = (0.1 + 0.8 * torch.rand(1, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))).double()
    reward.head.double(), reward.net.net.double()  # type: ignore[attr-defined]
    pixels.requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward.score(pixels, [decided[0].prompt], [{}]).sum(), pixels)
    direction, step = gradient / gradient.norm(), 1e-3
    ends = [reward.score(pixels.detach() + sign * step * direction, [decided[0].prompt], [{}]) for sign in (1, -1)]
    torch.testing.assert_close((ends[0] - ends[1]).double() / (2 * step), gradient.norm()[None], rtol=1e-2, atol=1e-6)


def test_outputs_saturate(run: Path) -> None:
    pixels, prompts = torch.rand(4, 1, 3, 64, 64), ["a photo of a dog"] * 4
    scores = {
        output: PreferenceReward(run, output).load(Placement()).score(pixels, prompts, [{}] * 4)  # type: ignore[arg-type]
        for output in ("logit", "probability", "log_probability")
    }
    torch.testing.assert_close(scores["probability"], scores["logit"].sigmoid())
    torch.testing.assert_close(scores["log_probability"], scores["probability"].log())


def test_new_votes_are_encoded_once(run: Path, votes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tastemaker.preferences import training

    monkeypatch.setattr(training, "encode_samples", lambda *_: pytest.fail("encoded again"))
    settings = [f"data.path={votes}", f"output_dir={votes.parent}", "name=taste", "steps=3", "engine.device=cpu"]
    config = load_any_config("preference-playground", [*settings, "preference.folds=3"])
    monkeypatch.setattr("tastemaker.config.build.feature_width", lambda *_: 672)
    assert run_training(config, allow_change=["steps"], console=QUIET)


def test_likes_are_paired_within_a_prompt_and_undone_votes_are_gone(tmp_path: Path, votes: Path) -> None:
    log = VoteLog(tmp_path / "votes.jsonl")
    files = [VotedSample(str((votes.parent / f"{k:03d}.png").resolve())) for k in range(4)]
    for prompt, file, liked in (("a", 0, True), ("a", 1, False), ("a", 2, False), ("b", 3, True)):
        log.append(Vote(new_vote_id(), now(), "anna", "like", prompt, (files[file],), liked))
    best = Vote(new_vote_id(), now(), "anna", "best_of", "c", tuple(files), 2)
    undone = Vote(new_vote_id(), now(), "anna", "pair", "d", tuple(files[:2]), 0)
    tie = Vote(new_vote_id(), now(), "ben", "pair", "e", tuple(files[:2]), "tie")
    for vote in (best, undone, tie):
        log.append(vote)
    log.undo(undone.id)
    with log.path.open("a") as file:
        file.write('{"id": "cut o')
    data = VoteData(log.path).load(0)
    assert sorted(data.prompts) == ["a", "a", "c", "c", "c"]
    assert {(pair[0].name, pair[1].name) for pair in data.files[-2:]} == {
        ("000.png", "001.png"),
        ("000.png", "002.png"),
    }
    assert VoteData(log.path, ties=True).load(0).targets.count(0.5) == 1
    batch = data.collate([0, 1])
    assert batch.chosen.shape == (2, 1, 3, 64, 64)
    with pytest.raises(ConfigError, match="TM1310"):
        VoteData(log.path, voter="ben").load(0)


def test_mistakes_are_refused(tmp_path: Path, votes: Path) -> None:
    def problems(*overrides: str) -> str:
        return "\n".join(find_problems(load_any_config("preference-playground", [f"data.path={votes}", *overrides])))

    assert not problems()
    assert "TM1304" in problems("data={type: playground_prompts}")
    assert "TM1301" in problems("preference.tower={type: playground_soft}")
    assert "TM800" in problems("data.path=missing.jsonl")
    with pytest.raises(ConfigError, match="TM1302"):
        PreferenceReward(tmp_path).load(Placement())
    few = write_painted_votes(tmp_path / "few", prompts=4, votes=6)
    config = load_any_config("preference-playground", [f"data.path={few}", f"output_dir={tmp_path}", "name=few"])
    with pytest.raises(ConfigError, match="TM1312"):
        run_training(config, console=QUIET)
    (tmp_path / "bad.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match=r"line 1.*TM1393"):
        read_votes(tmp_path / "bad.jsonl")


@pytest.mark.slow
def test_tiny_tower_of_clip_trains_and_scores(tmp_path: Path, votes: Path) -> None:
    settings = [f"data.path={votes}", f"output_dir={tmp_path}", "name=clip", "steps=1", "preference.folds=2"]
    config = load_any_config("preference-clip", [*settings, "engine.device=cpu"])
    assert run_training(config, tiny=True, console=QUIET)
    reward = PreferenceReward(tmp_path / "clip").load(Placement())
    assert reward.score(torch.rand(2, 1, 3, 32, 48), ["a", "b"], [{}] * 2).isfinite().all()
    assert "preference" in REWARDS
