"""PaliGemma matches recorded features, logits, answers and loss, with every layout of its weights."""

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


def load_paligemma(tensors: Mapping[str, Tensor] | None = None) -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig.from_pretrained(FIXTURE)
    return load_network(PaliGemmaForConditionalGeneration, config, FIXTURE, Placement(), tensors)


@pytest.fixture(scope="module")
def net() -> Any:
    return load_paligemma()


@pytest.fixture(scope="module")
def recording() -> dict[str, Tensor]:
    return load_file(FIXTURE / "expected.safetensors")


def question_inputs(recording: Mapping[str, Tensor], *, token_types: bool = True) -> ChatInputs:
    ids = recording["in.input_ids"]
    extra_inputs = {"pixel_values": recording["in.pixel_values"]}
    return ChatInputs(
        ids,
        recording["in.attention_mask"],
        extra_inputs | ({"token_type_ids": torch.zeros_like(ids)} if token_types else {}),
    )


@torch.no_grad()
def prefill(net: Any, recording: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = net(**question_inputs(recording).network_inputs).logits
    return logits


def test_image_features_match_the_recording(net: Any, recording: dict[str, Tensor]) -> None:
    with torch.no_grad():
        features = net.model.get_image_features(recording["in.pixel_values"])
    torch.testing.assert_close(features.last_hidden_state, recording["out.vision_last_hidden"], **CLOSE)
    torch.testing.assert_close(features.pooler_output, recording["out.image_features"], **CLOSE)


def test_logits_match_the_recording(net: Any, recording: dict[str, Tensor]) -> None:
    logits = prefill(net, recording)
    torch.testing.assert_close(logits, recording["out.prefill_logits_token_type0"], **CLOSE)
    torch.testing.assert_close(logits, recording["out.hkproj_prefill_logits"], atol=2e-5, rtol=2e-5)


def test_greedy_answer_matches_the_recording(net: Any, recording: dict[str, Tensor]) -> None:
    tokens = ChatDecoderPool(net, DefaultChatProcessor(net, None)).generate(question_inputs(recording), 8, 0)
    assert tokens.tolist() == [recording["out.hkproj_greedy"].tolist()]
    assert tokens.tolist() == recording["out.greedy_ids"][:, 9:].tolist()


def test_answer_loss_matches_the_recording(net: Any, recording: dict[str, Tensor]) -> None:
    """Attention is bidirectional over image and question and causal over the answer; only the answer has a loss."""
    ids, labels, kinds = (recording[f"in.train_{name}"] for name in ("ids", "labels", "token_type_ids"))
    num_prompt_tokens = int((kinds == 0).sum())
    assert (labels[:, :num_prompt_tokens] == -100).all() and (
        labels[:, num_prompt_tokens:] == ids[:, num_prompt_tokens:]
    ).all()
    prompt = ids[:, :num_prompt_tokens]
    extra_inputs = {"pixel_values": recording["in.pixel_values"], "token_type_ids": torch.zeros_like(prompt)}
    inputs, answer = ChatInputs(prompt, torch.ones_like(prompt), extra_inputs), ids[:, num_prompt_tokens:]
    loss = answer_loss(net, DefaultChatProcessor(net, None), inputs, answer, torch.ones_like(answer))
    torch.testing.assert_close(loss.rows, recording["out.train_loss"], **CLOSE)


def rename_keys(layout: str) -> dict[str, Tensor]:
    """The weights with the key names of another version of transformers."""
    state = {}
    for key, x in load_file(FIXTURE / "model.safetensors").items():
        text, vision = key.removeprefix("language_model.model."), key.removeprefix("vision_tower.")
        if layout == "hub":  # since 4.41, and on the Hub: vision_tower.vision_model.*
            name = f"vision_tower.vision_model.{vision}" if vision != key else key
        elif layout == "4.52":  # model.language_model.*, model.vision_tower.vision_model.*
            name = f"model.language_model.{text}" if text != key else f"model.{key}"
            name = f"model.vision_tower.vision_model.{vision}" if vision != key else name
        else:  # module names of 5.22
            name = f"model.language_model.{text}" if text != key else f"model.{key}"
        state[name] = x
    return state


@pytest.mark.parametrize("layout", ["hub", "4.52", "modules"])
def test_every_layout_loads_the_same_network(layout: str, recording: dict[str, Tensor]) -> None:
    logits = prefill(load_paligemma(rename_keys(layout)), recording)
    torch.testing.assert_close(logits, recording["out.prefill_logits_token_type0"], **CLOSE)


def test_unknown_layout_is_refused() -> None:
    """The published loader accepted such a file and left 37 vision tensors at random values."""
    misnamed = {
        key.replace("vision_tower.", "unknown."): x for key, x in load_file(FIXTURE / "model.safetensors").items()
    }
    with pytest.raises(ConfigError, match=r"vision_tower.*\d+ more.*TM358"):
        load_paligemma(misnamed)


def test_rope_frequencies_stay_float32_in_bfloat16(net: Any) -> None:
    """Frequencies in bfloat16 would rotate the hundreds of image tokens by as much as a radian."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig.from_pretrained(FIXTURE)
    bfloat16 = load_network(PaliGemmaForConditionalGeneration, config, FIXTURE, Placement(dtype=torch.bfloat16))
    exact = dict(net.named_buffers())
    frequencies = {name: x for name, x in bfloat16.named_buffers() if name.endswith("inv_freq")}
    assert frequencies and all(p.dtype == torch.bfloat16 for p in bfloat16.parameters())
    for name, x in frequencies.items():
        assert torch.equal(x, exact[name]), name
