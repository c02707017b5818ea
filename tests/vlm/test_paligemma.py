"""PaliGemma as recorded: what it sees, its logits, its answers and its loss, from whichever layout its weights have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.frozen_models import load_network
from tastemaker.vlm.chat_processors import ChatInputs, DefaultChatProcessor
from tastemaker.vlm.generation import ChatDecoderPool
from tastemaker.vlm.judge_models import answer_loss

FIXTURE = Path(__file__).parent.parent / "fixtures/paligemma"
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def loaded(tensors: Mapping[str, Tensor] | None = None) -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig.from_pretrained(FIXTURE)
    return load_network(PaliGemmaForConditionalGeneration, config, FIXTURE, Placement(), tensors)


@pytest.fixture(scope="module")
def net() -> Any:
    return loaded()


@pytest.fixture(scope="module")
def told() -> dict[str, Tensor]:
    return load_file(FIXTURE / "expected.safetensors")


def question(told: Mapping[str, Tensor], *, kinds: bool = True) -> ChatInputs:
    ids = told["in.input_ids"]
    more = {"pixel_values": told["in.pixel_values"]}
    return ChatInputs(
        ids, told["in.attention_mask"], more | ({"token_type_ids": torch.zeros_like(ids)} if kinds else {})
    )


@torch.no_grad()
def prefill(net: Any, told: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = net(**question(told).network_inputs).logits
    return logits


def test_pictures_are_seen_as_recorded(net: Any, told: dict[str, Tensor]) -> None:
    with torch.no_grad():
        found = net.model.get_image_features(told["in.pixel_values"])
    torch.testing.assert_close(found.last_hidden_state, told["out.vision_last_hidden"], **CLOSE)
    torch.testing.assert_close(found.pooler_output, told["out.image_features"], **CLOSE)


def test_logits_are_those_recorded(net: Any, told: dict[str, Tensor]) -> None:
    logits = prefill(net, told)
    torch.testing.assert_close(logits, told["out.prefill_logits_token_type0"], **CLOSE)
    torch.testing.assert_close(logits, told["out.hkproj_prefill_logits"], atol=2e-5, rtol=2e-5)


def test_the_likeliest_answer_is_the_one_recorded(net: Any, told: dict[str, Tensor]) -> None:
    written = ChatDecoderPool(net, DefaultChatProcessor(net, None)).generate(question(told), 8, 0)
    assert written.tolist() == [told["out.hkproj_greedy"].tolist()]
    assert written.tolist() == told["out.greedy_ids"][:, 9:].tolist()


def test_the_loss_of_an_answer_is_the_one_recorded(net: Any, told: dict[str, Tensor]) -> None:
    """Picture and question read in any order, the answer in order; the loss is of the answer alone."""
    ids, labels, kinds = (told[f"in.train_{name}"] for name in ("ids", "labels", "token_type_ids"))
    asked = int((kinds == 0).sum())
    assert (labels[:, :asked] == -100).all() and (labels[:, asked:] == ids[:, asked:]).all()
    before = ids[:, :asked]
    more = {"pixel_values": told["in.pixel_values"], "token_type_ids": torch.zeros_like(before)}
    said, answer = ChatInputs(before, torch.ones_like(before), more), ids[:, asked:]
    loss = answer_loss(net, DefaultChatProcessor(net, None), said, answer, torch.ones_like(answer))
    torch.testing.assert_close(loss.rows, told["out.train_loss"], **CLOSE)


def renamed(layout: str) -> dict[str, Tensor]:
    """The weights under the names that other versions of transformers gave them."""
    found = {}
    for key, x in load_file(FIXTURE / "model.safetensors").items():
        text, eyes = key.removeprefix("language_model.model."), key.removeprefix("vision_tower.")
        if layout == "of the hub":  # 4.41 on, and what is on the hub: vision_tower.vision_model.*
            name = f"vision_tower.vision_model.{eyes}" if eyes != key else key
        elif layout == "of 4.52":  # model.language_model.*, model.vision_tower.vision_model.*
            name = f"model.language_model.{text}" if text != key else f"model.{key}"
            name = f"model.vision_tower.vision_model.{eyes}" if eyes != key else name
        else:  # as the modules of 5.22 are named
            name = f"model.language_model.{text}" if text != key else f"model.{key}"
        found[name] = x
    return found


@pytest.mark.parametrize("layout", ["of the hub", "of 4.52", "of the modules"])
def test_every_layout_loads_the_same_network(layout: str, told: dict[str, Tensor]) -> None:
    logits = prefill(loaded(renamed(layout)), told)
    torch.testing.assert_close(logits, told["out.prefill_logits_token_type0"], **CLOSE)


def test_an_unknown_layout_fails_loudly() -> None:
    """As the published loader did not, which left 37 tensors of the eyes at random."""
    lost = {key.replace("vision_tower.", "eyes."): x for key, x in load_file(FIXTURE / "model.safetensors").items()}
    with pytest.raises(ConfigError, match=r"lacks '.*vision_tower.*' and \d+ more tensors"):
        loaded(lost)


def test_positions_stay_exact_in_a_low_precision(net: Any) -> None:
    """Frequencies in bfloat16 would turn the hundreds of tokens of a picture by as much as a radian."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig.from_pretrained(FIXTURE)
    low = load_network(PaliGemmaForConditionalGeneration, config, FIXTURE, Placement(dtype=torch.bfloat16))
    exact = dict(net.named_buffers())
    frequencies = {name: x for name, x in low.named_buffers() if name.endswith("inv_freq")}
    assert frequencies and all(p.dtype == torch.bfloat16 for p in low.parameters())
    for name, x in frequencies.items():
        assert torch.equal(x, exact[name]), name
