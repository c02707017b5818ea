"""Decoding with a static KV cache gives the tokens of transformers' generate for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vlm_stubs import FAMILIES, TEXT

from tastemaker.core.types import Placement
from tastemaker.vlm.chat_model import ChatModel, load_chat_model
from tastemaker.vlm.chat_processors import ChatInputs, DefaultChatProcessor
from tastemaker.vlm.generation import CACHE_STEP, ChatDecoderPool, GenerationSettings, eos_token_ids, generate_answers

# PaliGemma's processor calls a deprecated numpy interface.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
QUESTIONS = ["What is this?", "Describe the picture in a few words, as many as you like.", "How many?"]
TOKENS = 12


def chat_inputs(model: ChatModel, questions: list[str] = QUESTIONS) -> ChatInputs:
    texts = [model.processor.render((f"<image>\n{question}",)) for question in questions]
    return model.processor.encode(IMAGES[: len(questions)], texts)


@torch.no_grad()
def transformers_generate(model: ChatModel, tokens: int = TOKENS) -> Tensor:
    inputs = chat_inputs(model)
    ids: Tensor = model.net.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        **inputs.extra_inputs,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return ids[:, inputs.input_ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_match_transformers_generate(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    pool = ChatDecoderPool(model.net, model.processor)
    assert pool.supports(chat_inputs(model), TOKENS)
    tokens, expected = pool.generate(chat_inputs(model), TOKENS, 0), transformers_generate(model)
    assert tokens.tolist() == expected.tolist()
    assert len({tuple(row) for row in tokens.tolist()}) > 1


def test_cache_is_reused_and_cleared_between_calls(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["paligemma"]), Placement())
    pool = ChatDecoderPool(model.net, model.processor)
    first = pool.generate(chat_inputs(model), TOKENS, 0)
    pool.generate(chat_inputs(model, ["Another question?"] * 3), TOKENS, 0)
    assert pool.generate(chat_inputs(model), TOKENS, 0).tolist() == first.tolist()
    assert len({cache_length for _, cache_length, _ in pool.decoders}) == len(pool.decoders) <= 2
    assert all(cache_length % CACHE_STEP == 0 for _, cache_length, _ in pool.decoders)


@pytest.mark.slow
def test_compiled_decoding_gives_the_same_tokens(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = load_chat_model(str(folders["paligemma"]), Placement()), torch.compile
    eager = ChatDecoderPool(model.net, model.processor, "eager").generate(chat_inputs(model), TOKENS, 0)
    compile_options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}  # one graph, as a CUDA graph needs it
    monkeypatch.setattr(torch, "compile", lambda step, **settings: compiled(step, **settings, **compile_options))
    assert (
        ChatDecoderPool(model.net, model.processor, "compiled").generate(chat_inputs(model), TOKENS, 0).tolist()
        == eager.tolist()
    )


def test_generation_stops_at_eos(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava"]), Placement())
    unlimited = transformers_generate(model)
    model.net.generation_config.eos_token_id = [int(unlimited[0, 2]), 9999]
    assert eos_token_ids(model.net) == [int(unlimited[0, 2]), 9999]
    tokens, expected = (
        ChatDecoderPool(model.net, model.processor).generate(chat_inputs(model), TOKENS, 0),
        transformers_generate(model),
    )
    assert tokens.tolist() == expected.tolist()
    assert not tokens[0, 3:].any()


def test_repetition_penalty_of_the_model_is_applied(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["qwen2_5_vl"]), Placement())
    plain = generate_answers(model, IMAGES, QUESTIONS, [0, 1, 2], GenerationSettings(max_new_tokens=TOKENS))
    model.net.generation_config.repetition_penalty = 5.0
    penalized = generate_answers(model, IMAGES, QUESTIONS, [0, 1, 2], GenerationSettings(max_new_tokens=TOKENS))
    assert plain != penalized
    expected = model.tokenizer.batch_decode(transformers_generate(model), skip_special_tokens=True)
    assert penalized == [text.strip() for text in expected]


@pytest.mark.parametrize("setting", [{"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_unsupported_generation_settings_fall_back_to_generate(
    setting: dict[str, Any], folders: dict[str, Path]
) -> None:
    model = load_chat_model(str(folders["llava"]), Placement())
    for key, value in setting.items():
        setattr(model.net.generation_config, key, value)
    assert not ChatDecoderPool(model.net, model.processor).supports(chat_inputs(model), TOKENS)
    pieces: list[str] = []
    answers = generate_answers(
        model, IMAGES[:1], QUESTIONS[:1], [0], GenerationSettings(max_new_tokens=TOKENS), pieces.append
    )
    assert "".join(pieces) == answers[0]


def test_sliding_window_falls_back_to_generate(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava"]), Placement())
    inputs = chat_inputs(model)
    model.net.config.text_config.sliding_window = inputs.input_ids.shape[1] + 5
    pool = ChatDecoderPool(model.net, model.processor)
    assert pool.supports(inputs, 5) and not pool.supports(inputs, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_streamed_in_pieces(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    for generation in (
        GenerationSettings(max_new_tokens=TOKENS),
        GenerationSettings(temperature=1.0, max_new_tokens=TOKENS),
    ):
        pieces: list[str] = []
        answers = generate_answers(model, IMAGES[:1], QUESTIONS[:1], [4], generation, pieces.append)
        assert "".join(pieces) == answers[0]
        assert len(pieces) > 1


def test_paligemma_2_matches_generate_within_its_sliding_window() -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | {"model_type": "gemma2", "vocab_size": 90, "sliding_window": 32, "query_pre_attn_scalar": 16}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    settings: Any = {"image_token_id": 89, "projection_dim": 32}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, **settings)
    net: Any = PaliGemmaForConditionalGeneration(config).eval().requires_grad_(False)
    net.generation_config.eos_token_id = None
    ids = torch.cat([torch.full((2, 4), 89), torch.randint(3, 80, (2, 6))], 1)
    extra_inputs = {"pixel_values": IMAGES[:2, :, :28, :28], "token_type_ids": torch.zeros_like(ids)}
    inputs, pool = (
        ChatInputs(ids, torch.ones_like(ids), extra_inputs),
        ChatDecoderPool(net, DefaultChatProcessor(net, None)),
    )
    assert pool.supports(inputs, 22) and not pool.supports(inputs, 23)
    expected = net.generate(
        ids, attention_mask=inputs.attention_mask, **extra_inputs, max_new_tokens=22, do_sample=False, pad_token_id=0
    )
    assert pool.generate(inputs, 22, 0).tolist() == expected[:, 10:].tolist()
