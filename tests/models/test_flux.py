"""FLUX.1 compared with diffusers' pipeline: samples, gradients, guidance, checkpoints and every objective."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import save_file
from tiers import fast
from tiny_pipelines import make_flux_pipeline, sample_latents

from tastemaker.core.lora import Lora
from tastemaker.core.policy import Backbone, Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models import flux
from tastemaker.models.flux import FluxSpec
from tastemaker.models.latent_packing import latent_image_ids, pack_latents, unpack_latents
from tastemaker.models.pipeline_components import dynamic_shift, fill_random, parameters_on_meta
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.processes.dynamics import FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

PROMPTS = ["a red cat", "Two dogs, on a boat", ""]
SDE = GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 4)


@pytest.fixture(scope="module", params=[True, False], ids=["dev", "schnell"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, bool]:
    pipeline, folder = make_flux_pipeline(distilled=request.param), tmp_path_factory.mktemp("flux")
    pipeline.save_pretrained(folder)
    return pipeline, str(folder), request.param


@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(saved: tuple[Any, str, bool]) -> None:
    pipeline, folder, distilled = saved
    pipeline.set_progress_bar_config(disable=True)
    model = FluxSpec(folder, height=96, width=64, max_text_tokens=24).load(Placement())
    noise = torch.randn(3, 1, *model.shape[1:], generator=torch.Generator().manual_seed(0))
    shift = dynamic_shift(tokens=24) if distilled else 1.0
    sampled = sample_latents(model, GaussianProcess(RectifiedFlow(shift), num_steps=5), PROMPTS, noise)
    options = {"prompt": PROMPTS, "height": 96, "width": 64, "num_inference_steps": 5, "max_sequence_length": 24}
    start = pack_latents(noise[:, 0])
    latents = pipeline(**options, latents=start, output_type="latent").images
    torch.testing.assert_close(pack_latents(sampled[:, 0]), latents, atol=1e-5, rtol=0)
    pixels = pipeline(**options, latents=start, output_type="pt").images
    torch.testing.assert_close(model.decode(sampled)[:, 0], pixels, atol=1e-5, rtol=0)
    assert not torch.allclose(latents[0], latents[1], atol=1e-2)


@pytest.fixture
def policy() -> Policy[Any]:
    model = FluxSpec().tiny().load(Placement())
    assert isinstance(model, Backbone)
    return Policy(model, SDE, FullFinetuning().apply(model, ()))


def randomness(count: int = 3) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def test_recorded_log_probs_equal_recomputed_ones(policy: Policy[Any]) -> None:
    trajectory = policy.sample(policy.embed(PROMPTS), randomness())
    pixels = policy.decode(trajectory.final)
    assert pixels.shape == (3, *policy.model.pixels)
    assert pixels.min() >= 0 and pixels.max() <= 1
    assert policy.encode(pixels).shape == trajectory.final.shape
    for segment in trajectory.segments:
        assert policy.action_distribution(trajectory.cond, segment).log_prob(segment.action).equal(segment.log_prob)


def test_predictions_do_not_depend_on_the_batch(policy: Policy[Any]) -> None:
    batched = policy.sample(policy.embed(PROMPTS), randomness()).final
    single = policy.sample(policy.embed(PROMPTS[1:2]), Randomness(0, 0, torch.tensor([1]))).final
    torch.testing.assert_close(batched[1:2], single, atol=1e-5, rtol=0)


def test_only_the_transformer_gets_gradients(policy: Policy[Any]) -> None:
    x = policy.encode(torch.rand(3, *policy.model.pixels))
    policy.likelihood(policy.embed(PROMPTS), x, policy.corrupt(x, randomness())).sum().backward()
    assert [key for key, p in policy.weights.trainable().items() if p.grad is None or not bool(p.grad.any())] == []
    model: Any = policy.model
    encoders = model.prompt_encoder.encoders
    assert not [
        p for part in (model.autoencoder, encoders.clip, encoders.t5) for p in part.net.parameters() if p.requires_grad
    ]


def test_decoder_gradient_is_the_same_with_checkpointing() -> None:
    gradients = []
    for recompute in (True, False):
        model = replace(FluxSpec(), checkpoint_decoder=recompute).tiny().load(Placement())
        x = randomness(1).normal("x", *model.shape).requires_grad_()
        model.decode(x).square().sum().backward()
        gradients.append(x.grad)
    assert bool(gradients[0].any()) and gradients[0].equal(gradients[1])


def test_each_prompt_is_encoded_once(policy: Policy[Any]) -> None:
    model: Any = policy.model
    calls: list[int] = []
    model.prompt_encoder.encoders.t5.net.register_forward_hook(lambda *_: calls.append(1))
    first = policy.embed(PROMPTS)
    second = policy.embed([PROMPTS[2], PROMPTS[0], PROMPTS[0]])
    assert len(calls) == 1
    assert second.tensors["prompt_embeds"][1].equal(first.tensors["prompt_embeds"][0])
    assert second.tensors["pooled_prompt_embeds"][0].equal(first.tensors["pooled_prompt_embeds"][2])


def test_distilled_guidance_may_differ_in_rollouts() -> None:
    x, t = randomness(1).normal("x", 1, 16, 4, 4), torch.tensor([0.5])
    weak, strong, both = (
        replace(FluxSpec().tiny(), guidance_scale=scale, rollout_guidance_scale=other).load(Placement())
        for scale, other in ((1.0, None), (4.0, None), (4.0, 1.0))
    )
    cond = weak.embed(["a cat"])
    assert not torch.allclose(weak.predict(x, t, cond), strong.predict(x, t, cond), atol=1e-5)
    assert both.predict(x, t, cond).equal(strong.predict(x, t, cond))
    with torch.no_grad():
        assert both.predict(x, t, cond).equal(weak.predict(x, t, cond))


def test_classifier_free_guidance_works_beside_distilled_guidance(policy: Policy[Any]) -> None:
    guided = SDE.wrap_guidance(policy.model, Guidance(2.0, "blurry"))
    trajectory = SDE.start(guided, guided.embed(PROMPTS), randomness()).finish()
    assert torch.isfinite(trajectory.final).all()


def test_unpack_inverts_pack_and_image_ids_are_positions() -> None:
    x = torch.rand(2, 16, 6, 4)
    assert unpack_latents(pack_latents(x), 6, 4).equal(x)
    assert pack_latents(x)[0, 3].equal(x[0, :, 2:4, 2:4].flatten())
    assert latent_image_ids(6, 4)[3].tolist() == [0, 1, 1]


@pytest.mark.slow
def test_single_file_replaces_the_transformer(saved: tuple[Any, str, bool], tmp_path: Path) -> None:
    pipeline, folder, _ = saved
    other = {key: x + 1 for key, x in pipeline.transformer.state_dict().items()}
    for prefix in ("", "model.diffusion_model."):
        save_file({prefix + key: x for key, x in other.items()}, tmp_path / "one.safetensors")
        net = FluxSpec(folder, transformer=str(tmp_path / "one.safetensors")).load(Placement()).net
        assert all(x.equal(other[key]) for key, x in net.state_dict().items())
        assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("complete", fast([False, True], True), ids=["transformer", "complete"])
def test_single_file_in_the_original_layout_loads(saved: tuple[Any, str, bool], complete: bool, tmp_path: Path) -> None:
    """Files may contain the other components as well, as ComfyUI's checkpoints do."""
    pipeline, folder, _ = saved
    other = {key: x + 1 for key, x in pipeline.transformer.state_dict().items()}
    tensors = {key: x.clone() for key, x in flux.flux_to_original(other, pipeline.transformer.config).items()}
    if complete:
        tensors = {f"model.diffusion_model.{key}": x for key, x in tensors.items()} | {"vae.scale": torch.ones(1)}
    save_file(tensors, tmp_path / "one.safetensors")
    net = FluxSpec(folder, transformer=str(tmp_path / "one.safetensors")).load(Placement()).net
    assert all(x.equal(other[key]) for key, x in net.state_dict().items())
    save_file({key: x[:1].clone() for key, x in tensors.items()}, tmp_path / "one.safetensors")
    with pytest.raises(ConfigError, match=r"this transformer.*TM503"):
        FluxSpec(folder, transformer=str(tmp_path / "one.safetensors")).load(Placement())


def test_invalid_settings_are_refused(saved: tuple[Any, str, bool], tmp_path: Path) -> None:
    _, folder, _ = saved
    with pytest.raises(ConfigError, match=r"'no/where'.*`tastemaker download no/where`.*TM505"):
        FluxSpec("no/where").load(Placement())
    save_file({"x": torch.zeros(1)}, tmp_path / "one.safetensors")
    with pytest.raises(ConfigError, match=r"this transformer.*TM503"):
        FluxSpec(folder, transformer=str(tmp_path / "one.safetensors")).load(Placement())
    with pytest.raises(ConfigError, match=r"one\.safetensors.*diffusers' layout.*TM497"):
        FluxSpec(str(tmp_path / "one.safetensors")).load(Placement())
    with pytest.raises(ConfigError, match=r"transformer cannot be read.*TM501"):
        FluxSpec(str(tmp_path)).load(Placement())
    config_file = Path(folder) / "vae" / "config.json"
    config = config_file.read_text()
    try:
        config_file.write_text(json.dumps({**json.loads(config), "block_out_channels": [8, 8, 8, 16]}))
        with pytest.raises(ConfigError, match=r"vae cannot be read.*TM501"):
            FluxSpec(folder).load(Placement())
    finally:
        config_file.write_text(config)


@pytest.mark.slow  # one of each is in objectives/test_published.py
@pytest.mark.parametrize("tuning", [FullFinetuning(), Lora(4)], ids=["full", "lora"])
@pytest.mark.parametrize(
    "objective", [GRPO(group_size=4), NFT(group_size=4), RewardGradient(), SRPO(relative=False, reward_margin=None)]
)
def test_every_objective_changes_the_weights(objective: Any, tuning: Any) -> None:
    model = FluxSpec().tiny().load(Placement())
    policy = Policy(model, SDE, tuning.apply(model, objective.snapshots()))
    before = {key: p.detach().clone() for key, p in policy.weights.trainable().items()}
    toys.train(policy, objective, [toys.prompts(4)], 1e-3)
    assert any(not p.equal(before[key]) for key, p in policy.weights.trainable().items())
    assert all(torch.isfinite(p).all() for p in policy.weights.trainable().values())


def test_random_weights_are_drawn_on_one_device_and_kept_on_another() -> None:
    """As a GPU draws those that it has no room for; shared ones stay shared."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
            self.norm = torch.nn.LayerNorm(32)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.arange(4.0))

    with parameters_on_meta():
        net = fill_random(Tied(), torch.device("cpu"), torch.device("cpu"))
    assert net.head.weight is net.embed.weight and net.table.tolist() == [0, 1, 2, 3]
    generator = torch.Generator().manual_seed(0)
    assert 0.9 < net.head(torch.randn(64, 32, generator=generator)).std().item() < 1.1
    assert net.norm.weight.eq(1).all() and net.norm.bias.eq(0).all() and net.head.bias.eq(0).all()
