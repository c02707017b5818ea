"""DiT on latents compared with diffusers: outputs, checkpoints, conditioning and gradients."""

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
from tastemaker.models.latent_dit import checkpoint
from tastemaker.models.latent_dit.model import VARIANTS, LatentDitSpec, hash_words, load_latent_dit
from tastemaker.models.nets.latent_dit import LatentDiT, LatentDiTConfig
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.dynamics import DDIM, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import NoisePath, RectifiedFlow, VariancePreserving

LINEAR = VariancePreserving(
    beta_schedule="linear", beta_start=1e-4, beta_end=0.02, steps_offset=0, set_alpha_to_one=True
)
SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 4, "num_embeds_ada_norm": 5}
SPEC = LatentDitSpec(
    conditioning="class",
    num_classes=5,
    autoencoder=None,
    image_size=32,
    latent_channels=4,
    downsample_factor=8,
    width=16,
    depth=2,
    heads=2,
    learn_sigma=True,
    convention="diffusers",
)


def share_embedders(net: nn.Module) -> None:
    """Give every block the same time and class embedder, as in the converted weights of facebook."""
    first, *others = (block.norm1.emb for block in net.transformer_blocks)  # type: ignore[union-attr]
    for other in others:
        other.load_state_dict(first.state_dict())


@pytest.fixture(scope="module")
def diffusers_dit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small random diffusers DiT with a learned variance, and its pipeline folder."""
    torch.manual_seed(0)
    net = diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8, **SMALL)
    share_embedders(net)
    folder = tmp_path_factory.mktemp("dit")
    net.eval().save_pretrained(folder / "transformer")
    return net, folder


def test_diffusers_dit_gives_the_same_outputs(diffusers_dit: tuple[Any, Path]) -> None:
    net, folder = diffusers_dit
    loaded = load_latent_dit(replace(SPEC, weights=str(folder)), Placement())
    x, timesteps, classes = torch.randn(4, 4, 4, 4), torch.tensor([0, 17, 500, 999]), torch.tensor([0, 4, 5, 2])
    with torch.no_grad():
        expected, actual = net(x, timesteps, classes).sample, loaded(x, timesteps, classes)
    assert (
        actual.shape == (4, 8, 4, 4) and expected.std() > 0.1 and not torch.allclose(expected[0], expected[1], atol=0.1)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


def test_diffusers_checkpoint_with_different_block_embedders_is_refused(tmp_path: Path) -> None:
    diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8, **SMALL).save_pretrained(tmp_path / "transformer")
    with pytest.raises(ConfigError, match=r"all blocks.*TM440"):
        load_latent_dit(replace(SPEC, weights=str(tmp_path)), Placement())


def test_facebook_checkpoint_loads(tmp_path: Path) -> None:
    spec = replace(SPEC, convention="facebook")
    net = load_latent_dit(spec, Placement())
    facebook = {"pos_embed": torch.zeros(1, 4, 16)}
    for key, x in net.state_dict().items():
        for pattern, native in checkpoint.FACEBOOK_KEY_RULES:
            prefix = native.replace(r"\1", r"(\d+)")
            if re.match(prefix, key):
                number = re.findall(r"^blocks\.(\d+)", key)
                name = pattern.replace(r"(\d+)\.", f"{number[0]}." if number else "").replace("\\", "")
                facebook[name + key.rsplit(".", 1)[1]] = x + 0.01
    torch.save({"ema": facebook, "model": {}}, tmp_path / "DiT.pt")
    assert "blocks.1.attn.qkv.weight" in facebook and "y_embedder.embedding_table.weight" in facebook
    loaded = load_latent_dit(replace(spec, weights=str(tmp_path / "DiT.pt")), Placement()).state_dict()
    assert all(loaded[key].equal(x + 0.01) for key, x in net.state_dict().items())


def test_facebook_dit_has_native_keys_and_shapes() -> None:
    spec = LatentDitSpec(
        variant="XL",
        conditioning="class",
        autoencoder=None,
        image_size=256,
        latent_channels=4,
        learn_sigma=True,
        convention="diffusers",
    )
    with torch.device("meta"):
        net = diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8)
        native = LatentDiT(spec.network_config()).state_dict()
    converted = checkpoint.to_native_keys(net.state_dict(), "diffusers", 2, "")
    assert {key: x.shape for key, x in converted.items()} == {key: x.shape for key, x in native.items()}
    assert sum(x.numel() for x in native.values()) == 674_834_720  # with the null class; published as 675 M


@pytest.mark.parametrize(("variant", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
@pytest.mark.parametrize("patch", [2, 4, 8])
def test_variants_have_the_published_sizes(variant: Any, millions: int, patch: int) -> None:
    spec = LatentDitSpec(
        variant=variant,
        conditioning="class",
        autoencoder=None,
        image_size=256,
        latent_channels=4,
        learn_sigma=True,
        patch_size=patch,
    )
    with torch.device("meta"):
        net = LatentDiT(spec.network_config())
    assert round(sum(p.numel() for p in net.parameters()) / 1e6) in (millions, millions + 1, millions + 2)
    assert (net.config.width, net.config.depth, net.config.heads) == VARIANTS[spec.variant]


KINDS: dict[str, tuple[LatentDitSpec, NoisePath]] = {
    "nothing-flow": (LatentDitSpec(), RectifiedFlow()),
    "class-epsilon": (LatentDitSpec(conditioning="class", num_classes=3, learn_sigma=True), LINEAR),
    "class-velocity": (
        LatentDitSpec(conditioning="class", num_classes=3),
        replace(LINEAR, prediction_type="v_prediction"),
    ),
    "words-flow": (LatentDitSpec(conditioning="words"), RectifiedFlow()),
    "caption-flow": (LatentDitSpec(conditioning="caption"), RectifiedFlow()),
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
    return PROMPTS.get(policy.model.spec.conditioning, TEXTS)  # type: ignore[attr-defined]


def randomness(count: int = 4) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def test_recorded_log_probs_equal_recomputed_ones(policy: Policy[Any]) -> None:
    trajectory = policy.sample(policy.embed(prompts(policy)), randomness())
    pixels = policy.decode(trajectory.final)
    assert pixels.shape == (4, *policy.model.pixels) and pixels.min() >= 0 and pixels.max() <= 1
    for segment in trajectory.segments:
        assert policy.action_distribution(trajectory.cond, segment).log_prob(segment.action).equal(segment.log_prob)


def test_prediction_depends_on_the_condition(policy: Policy[Any]) -> None:
    x, t = randomness(1).normal("x", *policy.model.shape).expand(4, -1, -1, -1, -1), torch.full((4,), 0.5)
    out = policy.model.predict(x, t, policy.embed(prompts(policy)))
    differ = not torch.allclose(out[0], out[1], atol=1e-4)
    assert differ == (policy.model.spec.conditioning != "nothing")  # type: ignore[attr-defined]


def test_every_parameter_but_the_variance_gets_a_gradient(policy: Policy[Any]) -> None:
    x = policy.encode(torch.rand(4, *policy.model.pixels))
    policy.likelihood(policy.embed(prompts(policy)), x, policy.corrupt(x, randomness())).sum().backward()
    assert [key for key, p in policy.weights.trainable().items() if p.grad is None or not bool(p.grad.any())] == []
    spec = policy.model.spec  # type: ignore[attr-defined]
    gradient = policy.weights.trainable()["leave.weight"].grad
    assert gradient is not None
    heads = gradient.view(-1, spec.latent_channels * (2 if spec.learn_sigma else 1), gradient.shape[1])
    assert not heads[:, spec.latent_channels :].any()


@pytest.mark.slow
def test_tiny_model_learns_classes() -> None:
    spec = replace(
        LatentDitSpec(conditioning="class", num_classes=4, class_names=toys.NAMES, image_size=16).tiny(), weights=None
    )
    model = spec.load(Placement())
    policy = Policy(model, GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8), FullFinetuning().apply(model, ()))
    before = toys.true_rewards(policy, 64)
    toys.train(
        policy, Likelihood(), (toys.image_batch(32, 1, seed, side=16) for seed in range(150)), 5e-3, decay_steps=150
    )
    after = toys.true_rewards(policy, 64)
    assert float(after.mean()) > float(before.mean()) + 0.1 and toys.z_score(before, after) > 5


def test_bf16_weights_need_no_autocast() -> None:
    placement = Placement(dtype=torch.bfloat16, trainable_dtype=torch.bfloat16)
    model = LatentDitSpec(conditioning="words").tiny().load(placement)
    x = torch.randn(2, *model.shape)
    assert model.predict(x, torch.full((2,), 0.5), model.embed(["a dog", ""])).dtype == torch.float32


def test_new_network_outputs_zeros() -> None:
    net = LatentDiT(LatentDiTConfig(4, 8, 2, 16, 2, 2, 64))
    assert not net(torch.randn(2, 4, 8, 8), torch.tensor([3.0, 500.0])).any()


def test_guidance_uses_the_null_class() -> None:
    spec = KINDS["class-epsilon"][0].tiny()
    model = spec.load(Placement())
    process = GaussianProcess(LINEAR, num_steps=4)
    cond = process.wrap_guidance(model, Guidance(scale=3.0)).embed(["0", "1"])
    assert cond.tensors["condition"].tolist() == [0, 1] and cond.tensors["negative.condition"].tolist() == [3, 3]


def test_hash_words_ignores_case() -> None:
    ids = hash_words(["Ein Hund", "ein hund und mehr", ""], 3)
    assert ids.shape == (3, 3) and ids[0, :2].equal(ids[1, :2]) and ids[0, 0] != ids[0, 1]
    assert ids[0, 2] == 0 and not ids[2].any() and bool(ids[1].all())


def test_latents_of_another_autoencoder_size_or_scale_are_refused() -> None:
    model = LatentDitSpec().tiny().load(Placement())
    x = torch.randn(2, *model.shape[1:])
    assert model.from_latents(LatentBatch(("", ""), x, model.fingerprint, 1.0)).shape == (2, *model.shape)
    with pytest.raises(ConfigError, match=r"autoencoder other.*TM443"):
        model.from_latents(LatentBatch(("", ""), x, "other", 1.0))
    with pytest.raises(ConfigError, match=r"model\.image_size.*TM444"):
        model.from_latents(LatentBatch(("", ""), x[..., :4], model.fingerprint, 1.0))
    with pytest.raises(ConfigError, match=r"model\.scaling_factor=0\.1818.*TM445"):
        model.from_latents(LatentBatch(("", ""), x, model.fingerprint, 5.5))
    model.spec = replace(model.spec, weights="dit_ckpt.pth")  # explainingai trains on unscaled latents
    with pytest.warns(UserWarning, match=r"'dit_ckpt\.pth'"):
        assert model.from_latents(LatentBatch(("", ""), x, model.fingerprint, 5.5)).equal(x.view(2, *model.shape))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 72}, "'image_size'.*16"),
        ({"width": 30, "heads": 2}, "'heads'"),
        ({"conditioning": "class", "num_classes": 3, "class_names": ("a",)}, "class_names"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentDitSpec(**settings)
