"""DiT over latents: the same numbers as diffusers', and what every generator owes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import toys
from torch import nn

from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import LatentBatch, Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.latent_dit import checkpoint_formats
from tastemaker.models.latent_dit.model import SIZES, LatentDit, build_network, hash_words
from tastemaker.models.nets.latent_dit import LatentDiT, LatentDiTConfig
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.dynamics import DDIM, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import NoisePath as NoisePath
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving

LINEAR = VariancePreserving(betas="linear", first=1e-4, last=0.02, offset=0, ends_clean=True)
SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 4, "num_embeds_ada_norm": 5}
OURS = LatentDit(
    told="class", classes=5, codec=None, pixels=32, channels=4, factor=8, width=16, depth=2, heads=2, sigma=True,
    habit="diffusers",
)  # fmt: skip


def shared_embedders(net: nn.Module) -> None:
    """As facebook's weights were converted: what embeds time and class is the same in every block."""
    first, *others = (block.norm1.emb for block in net.transformer_blocks)  # type: ignore[union-attr]
    for other in others:
        other.load_state_dict(first.state_dict())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small random DiT of diffusers with a learned variance, and the pipeline's folder it lies in."""
    torch.manual_seed(0)
    net = diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8, **SMALL)
    shared_embedders(net)
    folder = tmp_path_factory.mktemp("dit")
    net.eval().save_pretrained(folder / "transformer")
    return net, folder


def test_a_dit_of_diffusers_says_the_same_here(theirs: tuple[Any, Path]) -> None:
    net, folder = theirs
    ours = build_network(replace(OURS, weights=str(folder)), Placement())
    x, steps, classes = torch.randn(4, 4, 4, 4), torch.tensor([0, 17, 500, 999]), torch.tensor([0, 4, 5, 2])
    with torch.no_grad():
        wanted, found = net(x, steps, classes).sample, ours(x, steps, classes)
    assert found.shape == (4, 8, 4, 4) and wanted.std() > 0.1 and not torch.allclose(wanted[0], wanted[1], atol=0.1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6)


def test_blocks_that_diffusers_trained_apart_are_refused(tmp_path: Path) -> None:
    diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8, **SMALL).save_pretrained(tmp_path / "transformer")
    with pytest.raises(ConfigError, match="reads them once"):
        build_network(replace(OURS, weights=str(tmp_path)), Placement())


def test_facebooks_own_files_load_too(tmp_path: Path) -> None:
    spec = replace(OURS, habit="facebook")
    net = build_network(spec, Placement())
    theirs = {"pos_embed": torch.zeros(1, 4, 16)}
    for key, x in net.state_dict().items():
        for pattern, ours in checkpoint_formats.FACEBOOK:
            prefix = ours.replace(r"\1", r"(\d+)")
            if re.match(prefix, key):
                number = re.findall(r"^blocks\.(\d+)", key)
                name = pattern.replace(r"(\d+)\.", f"{number[0]}." if number else "").replace("\\", "")
                theirs[name + key.rsplit(".", 1)[1]] = x + 0.01
    torch.save({"ema": theirs, "model": {}}, tmp_path / "DiT.pt")
    assert "blocks.1.attn.qkv.weight" in theirs and "y_embedder.embedding_table.weight" in theirs
    found = build_network(replace(spec, weights=str(tmp_path / "DiT.pt")), Placement()).state_dict()
    assert all(found[key].equal(x + 0.01) for key, x in net.state_dict().items())


def test_facebooks_dit_has_exactly_our_tensors() -> None:
    spec = LatentDit(size="XL", told="class", codec=None, pixels=256, channels=4, sigma=True, habit="diffusers")
    with torch.device("meta"):
        net = diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8)
        ours = LatentDiT(spec.net()).state_dict()
    found = checkpoint_formats.to_native_keys(net.state_dict(), "diffusers", 2, "")
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in ours.items()}
    assert sum(x.numel() for x in ours.values()) == 674_834_720  # with the null class, as published: 675 M


@pytest.mark.parametrize(("size", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
@pytest.mark.parametrize("patch", [2, 4, 8])
def test_the_sizes_are_the_published_ones(size: Any, millions: int, patch: int) -> None:
    spec = LatentDit(size=size, told="class", codec=None, pixels=256, channels=4, sigma=True, patch=patch)
    with torch.device("meta"):
        net = LatentDiT(spec.net())
    assert round(sum(p.numel() for p in net.parameters()) / 1e6) in (millions, millions + 1, millions + 2)
    assert (net.shape.width, net.shape.depth, net.shape.heads) == SIZES[spec.size]


KINDS: dict[str, tuple[LatentDit, NoisePath]] = {
    "nothing-flow": (LatentDit(), RectifiedFlow()),
    "class-epsilon": (LatentDit(told="class", classes=3, sigma=True), LINEAR),
    "class-velocity": (LatentDit(told="class", classes=3), replace(LINEAR, prediction="velocity")),
    "words-flow": (LatentDit(told="words"), RectifiedFlow()),
    "caption-flow": (LatentDit(told="caption"), RectifiedFlow()),
}
PROMPTS = {"class": ("0", "2", "1", ""), "nothing": ("", "a", "b", "")}
TEXTS = ("a dog left of a cat", "a cat left of a dog", "three cats", "")


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest) -> Policy[Any]:
    spec, path = KINDS[request.param]
    model = spec.tiny().load(Placement())
    assert isinstance(model, Backbone)
    dynamics = FlowSDE(0.7) if isinstance(path, RectifiedFlow) else DDIM(1.0)
    return Policy(model, GaussianProcess(path, dynamics, 4), FullFinetuning().apply(model, ()))


def prompts(policy: Policy[Any]) -> tuple[str, ...]:
    return PROMPTS.get(policy.model.spec.told, TEXTS)  # type: ignore[attr-defined]


def rows(count: int = 4) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def test_samples_are_pixels_and_the_record_agrees_with_its_replay(policy: Policy[Any]) -> None:
    made = policy.sample(policy.embed(prompts(policy)), rows())
    pixels = policy.decode(made.final)
    assert pixels.shape == (4, *policy.model.pixels) and pixels.min() >= 0 and pixels.max() <= 1
    for segment in made.segments:
        assert policy.decide(made.cond, segment).log_prob(segment.action).equal(segment.log_prob)


def test_what_is_told_changes_the_prediction(policy: Policy[Any]) -> None:
    x, t = rows(1).normal("x", *policy.model.shape).expand(4, -1, -1, -1, -1), torch.full((4,), 0.5)
    out = policy.model.predict(x, t, policy.embed(prompts(policy)))
    differ = not torch.allclose(out[0], out[1], atol=1e-4)
    assert differ == (policy.model.spec.told != "nothing")  # type: ignore[attr-defined]


def test_every_tensor_learns_but_for_the_variance(policy: Policy[Any]) -> None:
    x = policy.encode(torch.rand(4, *policy.model.pixels))
    policy.likelihood(policy.embed(prompts(policy)), x, policy.corrupt(x, rows())).sum().backward()
    assert [key for key, p in policy.weights.trainable().items() if p.grad is None or not bool(p.grad.any())] == []
    spec = policy.model.spec  # type: ignore[attr-defined]
    leave = policy.weights.trainable()["leave.weight"].grad
    assert leave is not None
    heads = leave.view(-1, spec.channels * (2 if spec.sigma else 1), leave.shape[1])
    assert not heads[:, spec.channels :].any()


@pytest.mark.slow
def test_it_learns_to_paint_the_class_it_is_told() -> None:
    spec = replace(LatentDit(told="class", classes=4, names=toys.NAMES, pixels=16).tiny(), weights=None)
    model = spec.load(Placement())
    policy = Policy(model, GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8), FullFinetuning().apply(model, ()))
    before = toys.true_rewards(policy, 64)
    toys.fit(policy, Likelihood(), (toys.pictures(32, 1, seed, side=16) for seed in range(150)), 5e-3, cool=150)
    after = toys.true_rewards(policy, 64)
    assert float(after.mean()) > float(before.mean()) + 0.1 and toys.z_score(before, after) > 5


def test_a_network_held_in_bfloat16_needs_no_autocast() -> None:
    placement = Placement(dtype=torch.bfloat16, trained=torch.bfloat16)
    model = LatentDit(told="words").tiny().load(placement)
    x = torch.randn(2, *model.shape)
    assert model.predict(x, torch.full((2,), 0.5), model.embed(["a dog", ""])).dtype == torch.float32


def test_a_fresh_network_says_nothing_yet() -> None:
    net = LatentDiT(LatentDiTConfig(4, 8, 2, 16, 2, 2, 64))
    assert not net(torch.randn(2, 4, 8, 8), torch.tensor([3.0, 500.0])).any()


def test_guidance_contrasts_with_the_class_after_the_last() -> None:
    spec = KINDS["class-epsilon"][0].tiny()
    model = spec.load(Placement())
    process = GaussianProcess(LINEAR, steps=4)
    cond = process.guide(model, Guidance(scale=3.0)).embed(["0", "1"])
    assert cond.tensors["said"].tolist() == [0, 1] and cond.tensors["negative.said"].tolist() == [3, 3]


def test_words_are_numbers_of_their_own_in_any_case() -> None:
    ids = hash_words(["Ein Hund", "ein hund und mehr", ""], 3)
    assert ids.shape == (3, 3) and ids[0, :2].equal(ids[1, :2]) and ids[0, 0] != ids[0, 1]
    assert ids[0, 2] == 0 and not ids[2].any() and bool(ids[1].all())


def test_latents_of_another_autoencoder_size_or_scale_are_refused() -> None:
    model = LatentDit().tiny().load(Placement())
    x = torch.randn(2, *model.shape[1:])
    assert model.taken(LatentBatch(("", ""), x, model.fingerprint, 1.0)).shape == (2, *model.shape)
    with pytest.raises(ConfigError, match="made by the autoencoder other"):
        model.taken(LatentBatch(("", ""), x, "other", 1.0))
    with pytest.raises(ConfigError, match=r"set model\.pixels"):
        model.taken(LatentBatch(("", ""), x[..., :4], model.fingerprint, 1.0))
    with pytest.raises(ConfigError, match=r"set model\.scale=0\.1818"):
        model.taken(LatentBatch(("", ""), x, model.fingerprint, 5.5))
    model.spec = replace(model.spec, weights="dit_ckpt.pth")  # explainingai never scales latents, and so was it trained
    with pytest.warns(UserWarning, match=r"it is far from 1; right only if 'dit_ckpt.pth' were trained on such"):
        assert model.taken(LatentBatch(("", ""), x, model.fingerprint, 5.5)).equal(x.view(2, *model.shape))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pixels": 72}, "multiple of factor times patch, which is 16"),
        ({"width": 30, "heads": 2}, "multiple of 4 and of 'heads'"),
        ({"told": "class", "classes": 3, "names": ("a",)}, "one name a class"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LatentDit(**settings)
