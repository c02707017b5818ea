"""Show-o as a policy: prefix cache, known tokens, outpainting, LoRA and settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning, Tuning
from tastemaker.models.showo.inpainting import outpaint
from tastemaker.models.showo.model import PUBLISHED_SHOWO, ShowoSpec, infer_showo_spec
from tastemaker.processes.masked import MaskedProcess, UncachedMaskedPredictor

TINY = ShowoSpec().tiny()
RANDOMNESS = Randomness(0, 0, torch.arange(4))
PROMPTS = ("a red", "a green cup", "a red", "")


def make_policy(tuning: Tuning = FullFinetuning(), guidance: Guidance | None = None) -> Policy[Any]:
    model, process = TINY.load(Placement()), MaskedProcess(4, recompute_log_probs=False)
    weights = tuning.apply(model, ())
    return Policy(process.wrap_guidance(model, guidance) if guidance else model, process, weights)


def test_rollout_only_guidance_scores_reference_unguided() -> None:
    policy = make_policy(guidance=Guidance(3.0, rollouts_only=True))
    cond = policy.embed(PROMPTS)
    x = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    noisy = policy.corrupt(x, RANDOMNESS)
    with torch.no_grad():
        unguided = policy.likelihood(cond, x, noisy)
    torch.testing.assert_close(unguided, policy.likelihood(cond, x, noisy).detach())


@pytest.mark.parametrize("guidance", [None, Guidance(2.0, interval=(0.2, 0.9))])
def test_prefix_cache_gives_the_same_samples(guidance: Guidance | None) -> None:
    policy = make_policy(guidance=guidance)
    cond = policy.embed(PROMPTS)
    with torch.no_grad():
        cached, uncached = (policy.rollout(cond, RANDOMNESS) for _ in range(2))
        uncached.predictor = UncachedMaskedPredictor(policy.model, cond)  # type: ignore[attr-defined]
        first, second = cached.finish(), uncached.finish()
    assert torch.equal(first.final, second.final)
    for one, two in zip(first.segments, second.segments, strict=True):
        torch.testing.assert_close(one.log_prob, two.log_prob, rtol=1e-4, atol=1e-5)


def test_prefix_cache_stores_distinct_prompts_once() -> None:
    policy = make_policy(guidance=Guidance(2.0))
    with torch.no_grad():
        rollout: Any = policy.rollout(policy.embed(["a red"]).repeat(20), RANDOMNESS.same_for_all_rows().repeat(5))
        assert rollout.predictor.past[0][0].shape[0] == 2  # the prompt and the empty one
        rollout.step()
        rollout.select(torch.tensor([3, 7]))
        rollout.step()
    assert rollout.preview().shape == (2, 16)


def test_sources_follow_settings() -> None:
    assert [str(source) for source in ShowoSpec().sources] == [
        "showlab/show-o/pytorch_model.safetensors", "showlab/magvitv2/pytorch_model.safetensors",
        "microsoft/phi-1_5/tokenizer.json",
    ]  # fmt: skip
    assert (
        str(PUBLISHED_SHOWO["dpo_iter_parm_guide"])
        == "ZiyuG/Image-Generation-CoT/dpo_iter_parm_gudie/pytorch_model.bin"
    )
    # The published file name has this typo.
    assert PUBLISHED_SHOWO["dpo_iter_parm_gudie"] == PUBLISHED_SHOWO["dpo_iter_parm_guide"]
    assert TINY.sources == ()


@pytest.mark.parametrize(
    ("name", "image_size", "has_vision_encoder"),
    [("512x512-wo-llava-tuning", 512, False), ("w-clip-vit-512x512", 512, True)],
)
def test_published_names_give_their_spec(name: str, image_size: int, has_vision_encoder: bool) -> None:
    spec = infer_showo_spec(f"showlab/show-o-{name}")
    assert (
        spec is not None and spec.image_size == image_size and (spec.vision_encoder is not None) == has_vision_encoder
    )
    assert spec.sources[0].hub == f"showlab/show-o-{name}"


def test_mask_without_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no 'image'.*TM525"):
        make_policy().embed(["a red"], [{"mask": torch.ones(1, 3, 32, 32)}])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1, 2], "'tokens'.*shape"), ([64] * 16, r"below 64.* 64 to 64"),
     ([-2] * 16, r"-2 to -2"), ([0.5] * 16, r"0\.5 to 0\.5")],
)  # fmt: skip
def test_invalid_known_tokens_are_refused(tokens: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy().embed(["a red"], [{"tokens": tokens}])


@pytest.mark.parametrize(("edge", "size"), [("right", (4, 6)), ("left", (4, 6)), ("up", (6, 4)), ("down", (6, 4))])
def test_outpainting_extends_an_edge(edge: Any, size: tuple[int, int]) -> None:
    policy = make_policy()
    tokens = torch.arange(16).view(4, 4)
    extended = outpaint(policy, tokens, "a red", edge, 2, Randomness(0, 0, torch.arange(1)))
    assert extended.shape == size and (extended >= 0).all()
    inside = {"right": extended[:, :4], "left": extended[:, 2:], "up": extended[2:], "down": extended[:4]}[edge]
    assert torch.equal(inside, tokens)


def test_outpainting_covers_long_edges_in_windows() -> None:
    extended = outpaint(
        make_policy(), torch.zeros(4, 7, dtype=torch.long), "", "down", 1, Randomness(0, 0, torch.arange(1))
    )
    assert extended.shape == (5, 7) and (extended >= 0).all()
    with pytest.raises(ValueError, match=r" 4 to add.*TM528"):
        outpaint(make_policy(), torch.zeros(4, 4, dtype=torch.long), "", "down", 4, Randomness(0, 0, torch.arange(1)))


def test_lora_trains_showo() -> None:
    policy = make_policy(tuning=Lora(rank=2))
    cond = policy.embed(PROMPTS)
    x = torch.zeros(4, 16, dtype=torch.long)
    policy.likelihood(cond, x, policy.corrupt(x, RANDOMNESS)).sum().backward()
    trained = policy.weights.trainable()
    assert any("lm_head" in key for key in trained)
    assert all(p.grad is not None for p in trained.values())


def test_inconsistent_settings_are_refused() -> None:
    for changes, message in (
        ({"image_size": 100}, "'image_size'.*100"),
        ({"eos_token_id": 60000}, "'eos_token_id'.*60000"),
        ({"codebook_size": 8000}, "power of two"),
        ({"heads": 7}, "heads.*width"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(ShowoSpec(), **changes)  # type: ignore[arg-type]
