"""The DiT on latents: log-probabilities, gradients, patches, and initialization from other weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.core.objective import Context, SingleProcess
from tastemaker.core.policy import Backbone, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Rubric
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.data.playground import PlaygroundScenes
from tastemaker.models import weight_files
from tastemaker.models.dit import DitSpec, patchify, unpatchify
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.dynamics import DDIM, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving

PROMPTS = ("a photo of a dog", "a photo of a red car and a blue cup", "a photo of three cats", "")
FLOW = GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 4)
NOISE = GaussianProcess(VariancePreserving(set_alpha_to_one=True), DDIM(1.0), 4)
KINDS = {"flow": (DitSpec(), FLOW), "epsilon": (DitSpec(), NOISE), "video": (DitSpec(frames=3), FLOW)}


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest) -> Policy[Any]:
    spec, process = KINDS[request.param]
    model = spec.tiny().load(Placement())
    assert isinstance(model, Backbone)
    with torch.no_grad():  # blocks of a new network have no effect on its output
        for number, p in enumerate(model.net.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    return Policy(model, process, FullFinetuning().apply(model, ()))


def randomness(count: int = 4) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def test_recorded_log_probs_equal_recomputed_ones(policy: Policy[Any]) -> None:
    trajectory = policy.sample(policy.embed(PROMPTS), randomness())
    pixels = policy.decode(trajectory.final)
    assert pixels.shape == (4, *policy.model.pixels)
    assert pixels.min() >= 0 and pixels.max() <= 1
    for segment in trajectory.segments:
        assert policy.action_distribution(trajectory.cond, segment).log_prob(segment.action).equal(segment.log_prob)


def test_predictions_do_not_depend_on_the_batch(policy: Policy[Any]) -> None:
    batched = policy.sample(policy.embed(PROMPTS), randomness()).final
    single = policy.sample(policy.embed(PROMPTS[2:3]), Randomness(0, 0, torch.tensor([2]))).final
    assert torch.allclose(batched[2:3], single, atol=1e-4)


def test_prediction_depends_on_word_order(policy: Policy[Any]) -> None:
    texts = ("a photo of a dog left of a cat", "a photo of a cat left of a dog", "a photo of a dog right of a cat")
    x, t = randomness(1).normal("x", *policy.model.shape).expand(3, -1, -1, -1, -1), torch.full((3,), 0.5)
    out = policy.model.predict(x, t, policy.embed(texts))
    assert not torch.allclose(out[0], out[1], atol=1e-4)
    assert not torch.allclose(out[0], out[2], atol=1e-4)


def test_every_parameter_gets_a_gradient(policy: Policy[Any]) -> None:
    cond = policy.embed(PROMPTS)
    x = policy.encode(torch.rand(4, *policy.model.pixels))
    policy.likelihood(cond, x, policy.corrupt(x, randomness())).sum().backward()
    assert [key for key, p in policy.weights.trainable().items() if p.grad is None or not bool(p.grad.any())] == []


def test_decoding_selected_frames_equals_decoding_all(policy: Policy[Any]) -> None:
    x = randomness().normal("x", *policy.model.shape)
    last = policy.model.pixels[0] - 1
    assert policy.decode(x, [last]).allclose(policy.decode(x)[:, [last]], atol=1e-6)


def test_unpatchify_inverts_patchify() -> None:
    x = torch.rand(2, 3, 4, 8, 8)
    for size in (1, 2, 4):
        assert unpatchify(patchify(x, size), size, x.shape[1:]).equal(x)
    assert patchify(x, 2)[0, 0, 1].equal(x[0, 0, :, 0:2, 2:4].flatten())


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'image_size'.*60.*TM423"):
        DitSpec(image_size=60)
    with pytest.raises(ValueError, match=r"'width'.*'heads'.*3.*100.*TM424"):
        DitSpec(width=100)
    with pytest.raises(ConfigError, match=r"prompt: .* 'unicorn'.*TM753"):
        DitSpec().tiny().load(Placement()).embed(["a photo of a unicorn"])


def test_tiny_model_learns() -> None:
    model = replace(DitSpec().tiny(), width=48, heads=3).load(Placement())
    policy = Policy(model, FLOW, FullFinetuning().apply(model, ()))
    objective, data = Likelihood(), PlaygroundScenes(device="cpu").load(0)
    trainable = list(policy.weights.trainable().values())
    optimizer, losses = torch.optim.AdamW(trainable, 3e-3), []
    batch = data.batch(0, 32, 0, 1)
    for step in range(40):
        ctx = Context(
            policy, Rubric({}), Randomness(0, step, torch.arange(32)), SingleProcess(), objective.make_state()
        )
        loss = objective.loss(ctx, objective.collect(ctx, batch), None).rows.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_init_weights_of_an_image_model_start_a_video_model(tmp_path: Path) -> None:
    image_spec = replace(DitSpec(max_text_tokens=8).tiny(), seed=3)
    image_weights = image_spec.load(Placement()).net.state_dict()
    weight_files.write_weights(tmp_path / "image.safetensors", image_weights, {}, torch.float32)
    video_spec = replace(
        image_spec, frames=2, max_text_tokens=10, seed=4, init_weights=str(tmp_path / "image.safetensors")
    )
    initialized, random_init = (
        spec.load(Placement()).net.state_dict() for spec in (video_spec, replace(video_spec, init_weights=None))
    )
    assert initialized["word_place"][:, :8].equal(image_weights["word_place"])
    assert initialized["word_place"][:, 8:].equal(random_init["word_place"][:, 8:])
    assert initialized["frame_place"].equal(random_init["frame_place"])
    assert all(initialized[key].equal(x) for key, x in image_weights.items() if key != "word_place")


def test_init_weights_of_a_video_model_are_all_used(tmp_path: Path) -> None:
    spec = replace(DitSpec(max_text_tokens=8).tiny(), frames=2, seed=3)
    weights = spec.load(Placement()).net.state_dict()
    weight_files.write_weights(tmp_path / "video.safetensors", weights, {}, torch.float32)
    initialized = (
        replace(spec, seed=4, init_weights=str(tmp_path / "video.safetensors")).load(Placement()).net.state_dict()
    )
    assert all(initialized[key].equal(x) for key, x in weights.items())


def test_init_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    wide = replace(DitSpec().tiny(), width=64).load(Placement()).net.state_dict()
    weight_files.write_weights(tmp_path / "wide.safetensors", wide, {})
    with pytest.raises(ConfigError, match=r"are of another network.*TM509"):
        replace(DitSpec().tiny(), frames=2, init_weights=str(tmp_path / "wide.safetensors")).load(Placement())
