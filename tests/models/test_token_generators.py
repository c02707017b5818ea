"""GPT and MaskGIT: log-probabilities, caches, masks, prompts and training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from tiers import fast

from tastemaker.core.policy import Backbone, Guidance, Policy, Process
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import MASK_TOKEN_ID, Condition, ImageBatch, Placement, Trajectory, select_rows
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.gpt import GptSpec
from tastemaker.models.maskgit import MaskgitSpec
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.processes.masked import MaskedProcess

PROMPTS = (
    "a photo of a cat",
    "a photo of three dogs",
    "",
    "a photo of a dog above a cat",
    "a photo of a cat above a dog",
)
BATCH_SIZE = len(PROMPTS)
SPECS: dict[str, tuple[GptSpec | MaskgitSpec, Process]] = {
    "gpt": (GptSpec().tiny(), AutoregressiveProcess()),
    "gpt-grouped": (replace(GptSpec().tiny(), kv_heads=1), AutoregressiveProcess()),
    "maskgit": (MaskgitSpec().tiny(), MaskedProcess(num_steps=4)),
}


def make_policy(name: str, guidance: Guidance | None = None) -> Policy[Any]:
    """A policy with perturbed weights, because some networks start with an output of zero."""
    spec, process = SPECS[name]
    model = spec.load(Placement())
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    weights = FullFinetuning().apply(model, ())
    return Policy(process.wrap_guidance(model, guidance) if guidance else model, process, weights)


@pytest.fixture(params=[(name, scale) for name in SPECS for scale in (1.0, 2.0)], ids=str)
def generator(request: pytest.FixtureRequest) -> Policy[Any]:
    name, scale = request.param
    return make_policy(name, Guidance(scale) if scale != 1 else None)


def randomness(*numbers: int) -> Randomness:
    return Randomness(0, 0, torch.tensor(numbers or range(BATCH_SIZE)))


def sample_prompts(generator: Policy[Any]) -> Trajectory:
    return generator.sample(generator.embed(PROMPTS), randomness())


def test_models_follow_the_backbone_interface(generator: Policy[Any]) -> None:
    assert isinstance(generator.model, Backbone)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_recorded_log_probs_equal_recomputed_ones(generator: Policy[Any], precision: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        trajectory = sample_prompts(generator)
        for segment in trajectory.segments:
            log_prob = generator.action_distribution(trajectory.cond, segment).log_prob(segment.action)
            assert torch.equal(log_prob[segment.mask > 0], segment.log_prob[segment.mask > 0])


def test_samples_decode_to_the_declared_size(generator: Policy[Any]) -> None:
    final = sample_prompts(generator).final
    pixels = generator.decode(final)
    assert final.shape == (BATCH_SIZE, *generator.model.shape)
    assert pixels.shape == (BATCH_SIZE, *generator.model.pixels) == (BATCH_SIZE, 1, 3, 64, 64)
    assert pixels.min() >= 0 and pixels.max() <= 1
    assert generator.encode(pixels).shape == final.shape


def test_samples_do_not_depend_on_the_batch(generator: Policy[Any]) -> None:
    full = sample_prompts(generator)
    single = generator.sample(generator.embed(PROMPTS[3:4]), randomness(3))
    assert torch.equal(single.final, full.final[3:4])


def test_pruned_rollout_draws_the_same_random_numbers(generator: Policy[Any]) -> None:
    full, kept = sample_prompts(generator), torch.tensor([4, 1])
    rollout = generator.rollout(generator.embed(PROMPTS), randomness())
    with torch.no_grad():
        rollout.step()
        rollout.step()
        assert generator.decode(rollout.preview()).shape == (BATCH_SIZE, 1, 3, 64, 64)
        rollout.select(kept)
        assert torch.equal(rollout.finish().final, full.final[kept])


@pytest.mark.parametrize("name", ["gpt", "gpt-grouped"])
@pytest.mark.parametrize("guidance", [None, Guidance(3.0, interval=(0.3, 1.0))])
@torch.no_grad()
def test_cached_calls_equal_the_full_call(name: str, guidance: Guidance | None) -> None:
    generator = make_policy(name, guidance)
    cond, ids, model = generator.embed(PROMPTS), sample_prompts(generator).final, generator.model
    full = model.predict(ids, torch.ones(BATCH_SIZE), cond)
    cache, last = model.init_cache(cond), None
    for position in range(ids.shape[1]):
        logits, cache = model.decode_step(last, cache, cond)
        torch.testing.assert_close(logits, full[:, position], rtol=1e-4, atol=1e-4)
        last = ids[:, position]


@torch.no_grad()
def test_causal_prediction_ignores_later_tokens() -> None:
    generator = make_policy("gpt")
    ids, cond = sample_prompts(generator).final, generator.embed(PROMPTS)
    changed = torch.cat([ids[:, :7], (ids[:, 7:] + 1) % 64], 1)
    before, after = (generator.model.predict(x, torch.ones(BATCH_SIZE), cond) for x in (ids, changed))
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


@torch.no_grad()
def test_masked_prediction_uses_all_visible_tokens() -> None:
    model = make_policy("maskgit").model
    ids, cond = torch.arange(16).expand(BATCH_SIZE, 16).clone(), model.embed(PROMPTS)
    ids[:, 5] = MASK_TOKEN_ID
    changed = ids.clone()
    changed[:, 15] = 3
    before, after = (model.predict(x, torch.ones(BATCH_SIZE), cond) for x in (ids, changed))
    assert before.shape == (BATCH_SIZE, 16, 64)
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_prediction_depends_on_word_order(generator: Policy[Any]) -> None:
    cond = generator.embed(PROMPTS)
    ids = torch.zeros(BATCH_SIZE, 16, dtype=torch.long)
    with torch.no_grad():
        logits = generator.model.predict(ids, torch.ones(BATCH_SIZE), cond)
    one, other = PROMPTS.index("a photo of a dog above a cat"), PROMPTS.index("a photo of a cat above a dog")
    assert not torch.allclose(logits[one], logits[other], atol=1e-3)
    assert isinstance(select_rows(cond, torch.tensor([0])), Condition)


def test_prompts_with_unknown_words_are_refused() -> None:
    for spec, _ in SPECS.values():
        with pytest.raises(ConfigError, match=r"unicorn.*TM753"):
            spec.load(Placement()).embed(["a photo of a unicorn"])


@pytest.mark.parametrize("name", fast(["gpt", "maskgit"], "maskgit"))
def test_tiny_model_learns_the_color_of_each_caption(name: str) -> None:
    spec, process = SPECS[name]
    model = spec.load(Placement())
    generator = Policy(model, process, FullFinetuning().apply(model, ()))
    captions = ("a photo of a cat", "a photo of a dog") * 8
    colors = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).repeat(8, 1).view(16, 1, 3, 1, 1)
    batch = ImageBatch(captions, colors.expand(16, 1, 3, 64, 64))
    toys.train(generator, Likelihood(prompt_dropout=0.0), [batch] * 60, 1e-2)
    cond = generator.embed(captions)
    pixels = generator.decode(generator.sample(cond, Randomness(0, 0, torch.arange(16))).final)
    assert (pixels - colors).abs().mean() < 0.1
