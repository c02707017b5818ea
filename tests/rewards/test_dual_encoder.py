"""What holds for rewards that compare a look with a text: one look serves several prompts, a text is read once."""

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
NO_FACTS: list[dict[str, Any]] = [{}] * 4


class Ids:
    """The recorded token ids of two prompts; the tokenizer of the recording is not kept."""

    def __init__(self, case: dict[str, Tensor], told: dict[str, str]) -> None:
        self.known = {told["pos"]: case["in.ids.pos"], told["neg"]: case["in.ids.neg"]}

    def __call__(self, texts: Sequence[str], where: torch.device) -> dict[str, Any]:
        return {"input_ids": torch.cat([self.known[text] for text in texts])}


def recorded(kind: str) -> tuple[DualEncoderScorer, dict[str, Tensor], dict[str, str]]:
    """SRPO's own step on a tiny CLIP: the reward network as it came, pictures, ids and what they earned."""
    case = load_file(FIXTURES / f"case_{kind}_s500.safetensors")
    with safe_open(FIXTURES / f"case_{kind}_s500.safetensors", "pt") as file:
        told = file.metadata()
    tensors = load_file(FIXTURES / f"reward_{kind}.safetensors")
    scale = 1.0 if kind == "hps" else float(tensors["logit_scale"].exp()) / 20
    tensors = open_clip.convert_keys(tensors, kind) if kind == "hps" else tensors
    net = load_network(
        CLIPModel, open_clip.clip_config(tensors, kind, num_heads=(2, 2)), FIXTURES, Placement(), tensors
    )
    looks = ImagePreprocessing(Preprocessing(224, "crop", overshoot="keep", crop_rounding="round"))
    return DualEncoderScorer(net, looks, Ids(case, told), CosineHead(scale)), case, told


@pytest.mark.parametrize("kind", ["hps", "clip"])
def test_semantic_relative_rewards_are_those_of_srpo(kind: str) -> None:
    scorer, case, told = recorded(kind)
    words, boosts = {"denoise": ("pos", "neg"), "inversion": ("neg", "pos")}, json.loads(told["k"])
    for place, (branch, (praise, blame)) in enumerate(words.items()):
        pixels = case[f"out.image.{branch}"][:, None].requires_grad_()
        control = [told[name].removesuffix(f". {told['caption']}") for name in (praise, blame)]
        relative = RelativeReward(HpsReward().tiny(), *control, positive_boost=boosts[place])
        earned = relative.score_with(scorer, pixels, [told["caption"]], [{}])
        torch.testing.assert_close(earned, case["out.reward"][place : place + 1], atol=2e-6, rtol=1e-6)
        assert torch.autograd.grad(earned.sum(), pixels)[0].abs().sum() > 0


@pytest.mark.parametrize(
    "spec", [HpsReward(), PickScoreReward(divide_by=20), ImageReward()], ids=["hps", "pickscore", "imagereward"]
)
def test_one_look_earns_what_two_would(spec: Any) -> None:
    scorer = spec.tiny().load(Placement())
    assert isinstance(scorer, CachedImageReward)
    pixels = PIXELS.clone().requires_grad_()
    both = [[f"{word}. {prompt}" for prompt in PROMPTS] for word in ("Real", "Anime")]
    praised, blamed = (scorer.score(pixels, prompts, NO_FACTS) for prompts in both)
    expected = 1.2 * praised - blamed
    slope = torch.autograd.grad(expected.sum(), pixels)[0]
    rubric = Rubric({"it": WeightedReward(spec.tiny(), scorer, 1.0)})
    once = RelativeReward(spec.tiny(), "Real", "Anime", positive_boost=0.2).score_with(
        scorer, pixels, PROMPTS, NO_FACTS
    )
    asked = [scores.total for scores in rubric.score_each(pixels, both)]
    for earned in (once, 1.2 * asked[0] - asked[1]):
        torch.testing.assert_close(earned, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(earned.sum(), pixels)[0], slope, atol=1e-6, rtol=1e-5)


def test_a_picture_is_looked_at_once_for_several_prompts() -> None:
    scorer = HpsReward().tiny().load(Placement())
    looks: list[int] = []
    scorer.net.vision_model.register_forward_hook(lambda *_: looks.append(1))
    rubric = Rubric({"it": WeightedReward(HpsReward().tiny(), scorer)})
    rubric.score_each(PIXELS, [PROMPTS, PROMPTS[::-1]])
    RelativeReward(HpsReward().tiny(), "Real", "Anime").score_with(scorer, PIXELS, PROMPTS, NO_FACTS)
    assert len(looks) == 2


def test_a_rubric_asks_rewards_that_need_their_prompts_first_once_for_each() -> None:
    spec = ClippedReward(HpsReward().tiny(), min=-1.0)
    rubric = Rubric({"it": WeightedReward(spec, load_shared_reward(spec, Placement()))})
    clips = PIXELS.expand(4, 2, 3, 40, 56)
    for found, prompts in zip(
        rubric.score_each(clips, [PROMPTS, PROMPTS[::-1]]), (PROMPTS, PROMPTS[::-1]), strict=True
    ):
        torch.testing.assert_close(found.total, rubric.score(PIXELS, prompts).total)


def test_texts_are_read_once_and_cost_what_they_cost_without_memory() -> None:
    scorer = HpsReward().tiny().load(Placement())
    read: list[int] = []
    scorer.net.text_model.register_forward_hook(lambda _, __, out: read.append(len(out.pooler_output)))
    with torch.inference_mode():  # what is kept must be of use outside
        first = scorer.score(PIXELS, ["a", "b", "a", "a"], NO_FACTS)
    pixels = PIXELS.clone().requires_grad_()
    again = scorer.score(pixels, ["b", "a", "c", "b"], NO_FACTS)
    again.sum().backward()
    assert read == [2, 1]
    alone = [HpsReward().tiny().load(Placement()).score(PIXELS[i, None], [p], [{}]) for i, p in enumerate("bacb")]
    torch.testing.assert_close(again.detach(), torch.cat(alone), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(first[1].clone(), scorer.score(PIXELS, ["b"] * 4, NO_FACTS)[1])


def test_memory_of_texts_forgets_the_one_longest_unasked() -> None:
    read: list[list[str]] = []

    def features(texts: list[str]) -> Tensor:
        read.append(texts)
        return torch.tensor([[float(ord(text))] for text in texts])

    memory = TextFeatureCache(features, max_entries=2)
    assert memory(["a", "b", "a"]).flatten().tolist() == [97, 98, 97]
    memory(["a"])
    memory(["c"])  # b goes
    memory(["a", "c"])
    assert read == [["a", "b"], ["c"]]
    assert memory(["b", "x", "y"]).flatten().tolist() == [98, 120, 121]  # more than are kept
