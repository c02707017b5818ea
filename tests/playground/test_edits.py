"""Edits of the playground: instructions, scenes and the verdict on edited images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tastemaker.config.build import build, make_tiny
from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.data.playground_edits import PlaygroundEdits
from tastemaker.models.dit import DitSpec
from tastemaker.playground.captions import EDIT_VOCABULARY, VOCABULARY, tokenize
from tastemaker.playground.detector import SceneDetector, decode_detections
from tastemaker.playground.edits import (
    ADD,
    EDITED,
    KEPT,
    KINDS,
    RECOLOR,
    REMOVE,
    SceneEdits,
    check_edits,
    sample_edits,
)
from tastemaker.playground.network_files import load_network
from tastemaker.playground.scenes import Painter
from tastemaker.rewards.playground_edit import PlaygroundEditReward
from tastemaker.training.loop import train

COUNT = 48


def sampled(split: str = "held_out", count: int = COUNT) -> tuple[SceneEdits, Randomness]:
    rng = Randomness(3, 0, torch.arange(count))
    return sample_edits(rng, split), rng  # type: ignore[arg-type]


def scores(edits: SceneEdits, sources: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    """What the verdict says about edited pixels."""
    net = load_network(SceneDetector, "playground/detector0")
    with torch.no_grad():
        checks = check_edits(decode_detections(net(pixels[:, 0])), pixels[:, 0], sources[:, 0], edits.requests())
    followed, preserved = checks.followed().float(), checks.preserved().float()
    strict = followed * preserved
    assert [not reasons for reasons in checks.reasons()] == strict.bool().tolist()
    return {"verdict": strict, "followed": followed, "preserved": preserved, "graded": checks.credit()}


def test_instructions_are_tokens_and_splits_do_not_share_them() -> None:
    edits, rng = sampled("train", 512)
    again = sample_edits(Randomness(3, 0, torch.arange(512)), "train")
    assert edits.texts() == again.texts() and edits.target.x.equal(again.target.x)  # rows do not depend on each other
    assert not {*edits.texts()} & {*sampled("held_out", 512)[0].texts()} - {""}
    ids = tokenize(edits.texts(), 8, edits=True)
    assert len(VOCABULARY) <= ids.max() < len(EDIT_VOCABULARY)
    with pytest.raises(ValueError, match="TM753"):
        tokenize(["remove the dog"], 8)
    assert tokenize(["a photo of a dog"], 8).equal(tokenize(["a photo of a dog"], 8, edits=True))
    assert {text.split()[0] for text in edits.texts()} == {"make", "add", "remove", "replace"}
    assert any(text.startswith("add a second") for text in edits.texts())
    assert edits.kind.bincount().min() > 60  # all kinds are about equally likely
    masks = edits.masks()
    source, target = edits.paint(Painter(), rng)
    changed = (source - target).abs().amax(2, keepdim=True) > 0
    assert not (changed & (masks[:, :, :1] == 0)).any() and changed.flatten(1).any(1).all()


def test_verdict_wants_the_edit_and_nothing_else() -> None:
    edits, rng = sampled()
    sources, targets = edits.paint(Painter(), rng)
    assert scores(edits, sources, targets)["verdict"].mean() > 0.98
    metadata = [{"edit": e, "image": x} for e, x in zip(edits.requests().metadata(), sources, strict=True)]
    with torch.no_grad():
        reward = PlaygroundEditReward().load(Placement()).score(sources, edits.texts(), metadata)
    copied = scores(edits, sources, sources)
    assert torch.allclose(reward, (copied["graded"] + copied["verdict"]) / 2)
    assert copied["verdict"].mean() < 0.05 and copied["followed"].mean() < 0.1
    others = torch.arange(COUNT).roll(1)  # the right objects on the background of another edit: the source is ignored
    elsewhere = Painter().over(Painter().background(rng)[others], edits.target)[:, None]
    ignored = scores(edits, sources, elsewhere)
    assert ignored["followed"].mean() > 0.95 and ignored["verdict"].mean() < 0.25
    alone = replace(edits.target, present=edits.target.present & (torch.arange(4) != KEPT))
    lost = scores(edits, sources, replace(edits, target=alone).paint(Painter(), rng)[1])
    assert lost["preserved"].max() == 0 and lost["graded"].mean() < 0.8
    moved = replace(edits.target, x=torch.where(torch.arange(4) == EDITED, 64 - edits.target.x, edits.target.x))
    shifted = scores(edits, sources, replace(edits, target=moved).paint(Painter(), rng)[1])
    far = ((edits.target.x - moved.x)[:, EDITED].abs() > 12) & (edits.kind == RECOLOR)
    assert far.any() and shifted["verdict"][far].max() == 0
    for name, kind in (("add", ADD), ("remove", REMOVE)):
        assert scores(edits, sources, targets)["graded"][edits.kind == kind].mean() > 0.97, name
    assert set(edits.kind.tolist()) == set(range(len(KINDS)))


def test_editor_starts_as_the_generator_and_reads_each_source_once() -> None:
    sizes = DitSpec(autoencoder=None, width=32, depth=1, heads=2, patch_size=4, max_text_tokens=8)
    generator, editor = sizes.load(Placement()), replace(sizes, edits=True).load(Placement())
    state = generator.net.state_dict()
    editor.net.load_state_dict({**editor.net.state_dict(), **{k: v for k, v in state.items() if k != "word.weight"}})
    with torch.no_grad():
        editor.net.word.weight[: len(VOCABULARY)] = generator.net.word.weight
    x, t, batch = torch.randn(2, *editor.shape), torch.rand(2), PlaygroundEdits(num_prompts=2).load(0).first_prompts(2)
    words = ("a photo of a dog", "a photo of a cat")
    plain = [model.predict(x, t, model.embed(words)) for model in (generator, editor)]
    assert plain[0].equal(plain[1])
    calls: list[int] = []
    encode = editor.encode
    editor.encode = lambda pixels: calls.append(len(pixels)) or encode(pixels)  # type: ignore[func-returns-value,method-assign]
    first, second = (editor.embed(batch.prompts, batch.metadata).tensors["source"] for _ in range(2))
    assert calls == [2] and first.equal(second)
    torch.nn.init.constant_(editor.net.keep.bias, 50.0)  # keeps all of the source: the clean sample is the source
    velocity = editor.predict(x, torch.full((2,), 0.5), editor.embed(batch.prompts, batch.metadata))
    assert torch.allclose(x - 0.5 * velocity, first, atol=1e-4)
    with pytest.raises(ValueError, match="TM2351"):
        editor.embed(batch.prompts, [batch.metadata[0], {}])


@pytest.mark.slow
def test_editor_pretrains_and_aligns_with_the_edit_verdict(tmp_path: Path) -> None:
    quick = ["steps=2", "batch.prompts=4", "sample.count=2", "sample.every=1", "guard.prompts=4", "checkpoint.every=9"]
    for recipe in ("playground-edit", "nft-playground-edit"):
        config = make_tiny(load(recipe, [*quick, "engine.precision=fp32"]))
        run = build(config, tmp_path / recipe)
        before = {name: x.clone() for name, x in run.policy.weights.trainable().items()}
        events = list(train(run))
        assert any(not x.equal(before[name]) for name, x in run.policy.weights.trainable().items()), recipe
        assert any("source_distance" in getattr(event, "metrics", {}) for event in events) == (recipe[0] == "n")
