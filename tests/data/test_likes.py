"""Likes as data: JSON lines, folders and vote logs, with labels, and a chosen share of likes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import LikeBatch, concatenate
from tastemaker.data.image_io import save_image
from tastemaker.data.likes import LikeFile, LikeFolder
from tastemaker.data.toy import ToyLikes
from tastemaker.data.votes import LikeVotes
from tastemaker.preferences.votes import Vote, VotedSample, VoteLog, new_vote_id, now

SHADES = {"good": 1.0, "bad": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bright image that is liked and a dark one that is not, in three layouts."""
    for name, shade in SHADES.items():
        place = tmp_path / ("liked" if shade else "disliked")
        place.mkdir()
        save_image(torch.full((1, 3, 8, 8), shade), place / f"{name}.png")
        (place / f"{name}.txt").write_text(f"a {name} photo\n")
    rows = [
        {"prompt": f"a {name} photo", "image": f"{'liked' if shade else 'disliked'}/{name}.png", "label": shade > 0}
        for name, shade in SHADES.items()
    ]
    (tmp_path / "likes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = VoteLog(tmp_path / "votes.jsonl")
    for row in (rows[0] | {"label": False}, *rows):  # the first vote is changed by a later one
        sample = VotedSample(str(row["image"]))
        log.append(Vote(new_vote_id(), now(), "ann", "like", str(row["prompt"]), (sample,), bool(row["label"])))
    pair = (VotedSample("liked/good.png"), VotedSample("disliked/bad.png"))
    log.append(Vote(new_vote_id(), now(), "bob", "pair", "a photo", pair, 0))
    return tmp_path


def test_all_layouts_have_the_same_images_and_labels(folder: Path) -> None:
    for spec in (LikeFile(folder / "likes.jsonl"), LikeFolder(folder), LikeVotes(folder / "votes.jsonl")):
        batch = spec.load(0).batch(0, 2, 0, 1)
        assert sorted(batch.prompts) == ["a bad photo", "a good photo"]
        assert torch.equal(batch.pixels.mean((1, 2, 3, 4)) > 0.5, batch.liked), spec
        assert batch.liked.sum() == 1 and [prompt == "a good photo" for prompt in batch.prompts] == batch.liked.tolist()


def test_ranks_share_a_batch(folder: Path) -> None:
    for data in (LikeFile(folder / "likes.jsonl", like_ratio=0.7).load(3), ToyLikes(num_samples=8).load(3)):
        whole: LikeBatch = data.batch(2, 6, 0, 1)
        parts = concatenate([data.batch(2, 6, rank, 2) for rank in range(2)])
        assert parts.prompts == whole.prompts and torch.equal(parts.liked, whole.liked)
        assert torch.equal(parts.pixels, whole.pixels)


def test_like_ratio_is_the_share_of_likes(folder: Path) -> None:
    data = LikeFile(folder / "likes.jsonl", like_ratio=0.8).load(0)
    liked = data.batch(0, 400, 0, 1).liked.float()
    assert 0.72 < liked.mean() < 0.88


def test_toy_likes_have_the_color_of_their_prompt() -> None:
    batch = ToyLikes(colors=("red", "blue")).load(0).batch(0, 16, 0, 1)
    is_red = batch.pixels[:, 0, 0].mean((1, 2)) > batch.pixels[:, 0, 2].mean((1, 2))
    right = torch.tensor([(prompt == "a red") == bool(red) for prompt, red in zip(batch.prompts, is_red, strict=True)])
    assert torch.equal(right, batch.liked)


def test_bad_likes_are_refused(folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"prompt": "a", "image": "liked/good.png", "label": "yes"}')
    with pytest.raises(ConfigError, match=r"line 1: 'label'.*TM1603"):
        LikeFile(folder / "text.jsonl").load(0)
    (folder / "one.jsonl").write_text('{"prompt": "a", "image": "liked/good.png", "label": true}')
    with pytest.raises(ConfigError, match=r"data\.like_ratio.*TM1602"):
        LikeFile(folder / "one.jsonl", like_ratio=0.5).load(0)
    with pytest.raises(ConfigError, match=r"bob.*TM1600"):
        LikeVotes(folder / "votes.jsonl", voter="bob").load(0)
    with pytest.raises(ConfigError, match="TM1604"):
        LikeFolder(folder / "liked").load(0)
    with pytest.raises(ValueError, match=r"'like_ratio'.*TM1601"):
        LikeFolder(folder, like_ratio=2.0)
