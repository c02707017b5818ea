"""Dual-encoder rewards: an image is encoded once for several prompts, and a text only once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPModel

from tastemaker.core.reward import CachedImageReward, Rubric, WeightedReward, load_shared_reward
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones import open_clip
from tastemaker.rewards.backbones.dual_encoder import (
    CosineHead,
    DualEncoderScorer,
    ImagePreprocessing,
    TextFeatureCache,
)
from tastemaker.rewards.backbones.frozen_models import load_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.hps import HpsReward
from tastemaker.rewards.imagereward import ImageReward
from tastemaker.rewards.pickscore import PickScoreReward
from tastemaker.rewards.wrappers import ClippedReward, RelativeReward

FIXTURES = Path(__file__).parent.parent / "fixtures" / "srpo"
PROMPTS = ["a red cat", "", "Two dogs & a boat, it's late", "word " * 2000]
PIXELS = torch.rand(4, 1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
NO_METADATA: list[dict[str, Any]] = [{}] * 4


class RecordedTokenizer:
    """Returns the recorded token ids of two prompts; the fixture does not contain the tokenizer itself."""

    def __init__(self, case: dict[str, Tensor], metadata: dict[str, str]) -> None:
        self.token_ids = {metadata["pos"]: case["in.ids.pos"], metadata["neg"]: case["in.ids.neg"]}

    def __call__(self, texts: Sequence[str], device: torch.device) -> dict[str, Any]:
        return {"input_ids": torch.cat([self.token_ids[text] for text in texts])}


def load_recorded_case(kind: str) -> tuple[DualEncoderScorer, dict[str, Tensor], dict[str, str]]:
    """A step of SRPO on a tiny CLIP: the reward network, and recorded images, token ids and rewards."""
    case = load_file(FIXTURES / f"case_{kind}_s500.safetensors")
    with safe_open(FIXTURES / f"case_{kind}_s500.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(FIXTURES / f"reward_{kind}.safetensors")
    scale = 1.0 if kind == "hps" else float(tensors["logit_scale"].exp()) / 20
    tensors = open_clip.convert_keys(tensors, kind) if kind == "hps" else tensors
    net = load_network(
        CLIPModel, open_clip.clip_config(tensors, kind, num_heads=(2, 2)), FIXTURES, Placement(), tensors
    )
    preprocessing = ImagePreprocessing(Preprocessing(224, "crop", overshoot="keep", crop_rounding="round"))
    return DualEncoderScorer(net, preprocessing, RecordedTokenizer(case, metadata), CosineHead(scale)), case, metadata


@pytest.mark.parametrize("kind", ["hps", "clip"])
def test_semantic_relative_rewards_match_srpo(kind: str) -> None:
    scorer, case, metadata = load_recorded_case(kind)
    words, boosts = {"denoise": ("pos", "neg"), "inversion": ("neg", "pos")}, json.loads(metadata["k"])
    for index, (branch, (positive, negative)) in enumerate(words.items()):
        pixels = case[f"out.image.{branch}"][:, None].requires_grad_()
        control = [metadata[name].removesuffix(f". {metadata['caption']}") for name in (positive, negative)]
        relative = RelativeReward(HpsReward().tiny(), *control, positive_boost=boosts[index])
        score = relative.score_with(scorer, pixels, [metadata["caption"]], [{}])
        torch.testing.assert_close(score, case["out.reward"][index : index + 1], atol=2e-6, rtol=1e-6)
        assert torch.autograd.grad(score.sum(), pixels)[0].abs().sum() > 0


@pytest.mark.parametrize(
    "spec", [HpsReward(), PickScoreReward(divide_by=20), ImageReward()], ids=["hps", "pickscore", "imagereward"]
)
def test_shared_image_features_give_the_scores_of_separate_calls(spec: Any) -> None:
    scorer = spec.tiny().load(Placement())
    assert isinstance(scorer, CachedImageReward)
    pixels = PIXELS.clone().requires_grad_()
    prompt_sets = [[f"{word}. {prompt}" for prompt in PROMPTS] for word in ("Real", "Anime")]
    positive, negative = (scorer.score(pixels, prompts, NO_METADATA) for prompts in prompt_sets)
    expected = 1.2 * positive - negative
    gradient = torch.autograd.grad(expected.sum(), pixels)[0]
    rubric = Rubric({"it": WeightedReward(spec.tiny(), scorer, 1.0)})
    relative = RelativeReward(spec.tiny(), "Real", "Anime", positive_boost=0.2).score_with(
        scorer, pixels, PROMPTS, NO_METADATA
    )
    separate = [scores.total for scores in rubric.score_each(pixels, prompt_sets)]
    for score in (relative, 1.2 * separate[0] - separate[1]):
        torch.testing.assert_close(score, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(score.sum(), pixels)[0], gradient, atol=1e-6, rtol=1e-5)


def test_image_is_encoded_once_for_several_prompts() -> None:
    scorer = HpsReward().tiny().load(Placement())
    vision_calls: list[int] = []
    scorer.net.vision_model.register_forward_hook(lambda *_: vision_calls.append(1))
    rubric = Rubric({"it": WeightedReward(HpsReward().tiny(), scorer)})
    rubric.score_each(PIXELS, [PROMPTS, PROMPTS[::-1]])
    RelativeReward(HpsReward().tiny(), "Real", "Anime").score_with(scorer, PIXELS, PROMPTS, NO_METADATA)
    assert len(vision_calls) == 2


def test_uncached_reward_scores_each_prompt_set_separately() -> None:
    spec = ClippedReward(HpsReward().tiny(), min=-1.0)
    rubric = Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))})
    clips = PIXELS.expand(4, 2, 3, 40, 56)
    for scores, prompts in zip(
        rubric.score_each(clips, [PROMPTS, PROMPTS[::-1]]), (PROMPTS, PROMPTS[::-1]), strict=True
    ):
        torch.testing.assert_close(scores.total, rubric.score(PIXELS, prompts).total)


def test_cached_text_features_do_not_change_scores() -> None:
    scorer = HpsReward().tiny().load(Placement())
    text_batches: list[int] = []
    scorer.net.text_model.register_forward_hook(lambda _, __, out: text_batches.append(len(out.pooler_output)))
    with torch.inference_mode():  # cached features must stay usable outside inference mode
        first = scorer.score(PIXELS, ["a", "b", "a", "a"], NO_METADATA)
    pixels = PIXELS.clone().requires_grad_()
    second = scorer.score(pixels, ["b", "a", "c", "b"], NO_METADATA)
    second.sum().backward()
    assert text_batches == [2, 1]
    single = [HpsReward().tiny().load(Placement()).score(PIXELS[i, None], [p], [{}]) for i, p in enumerate("bacb")]
    torch.testing.assert_close(second.detach(), torch.cat(single), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(first[1].clone(), scorer.score(PIXELS, ["b"] * 4, NO_METADATA)[1])


def test_text_feature_cache_evicts_least_recently_used() -> None:
    encoded: list[list[str]] = []

    def features(texts: list[str]) -> Tensor:
        encoded.append(texts)
        return torch.tensor([[float(ord(text))] for text in texts])

    cache = TextFeatureCache(features, max_entries=2)
    assert cache(["a", "b", "a"]).flatten().tolist() == [97, 98, 97]
    cache(["a"])
    cache(["c"])  # evicts b
    cache(["a", "c"])
    assert encoded == [["a", "b"], ["c"]]
    assert cache(["b", "x", "y"]).flatten().tolist() == [98, 120, 121]  # more texts than the cache holds
