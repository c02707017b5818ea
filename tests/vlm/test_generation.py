"""Answers by our own loop with a cache laid out once: the same tokens as transformers' generate, of every family."""

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

# PaliGemma's processor itself asks numpy for what it will no longer do.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PICTURES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
QUESTIONS = ["What is this?", "Describe the picture in a few words, as many as you like.", "How many?"]
TOKENS = 12


def asked(model: ChatModel, questions: list[str] = QUESTIONS) -> ChatInputs:
    written = [model.processor.render((f"<image>\n{question}",)) for question in questions]
    return model.processor.encode(PICTURES[: len(questions)], written)


@torch.no_grad()
def generated(model: ChatModel, tokens: int = TOKENS) -> Tensor:
    said = asked(model)
    ids: Tensor = model.net.generate(
        said.input_ids,
        attention_mask=said.attention_mask,
        **said.extra_inputs,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return ids[:, said.input_ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_generate(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    desk = ChatDecoderPool(model.net, model.processor)
    assert desk.supports(asked(model), TOKENS)
    found, expected = desk.generate(asked(model), TOKENS, 0), generated(model)
    assert found.tolist() == expected.tolist()
    assert len({tuple(row) for row in found.tolist()}) > 1


def test_a_room_is_used_again_and_holds_nothing_of_before(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["paligemma"]), Placement())
    desk = ChatDecoderPool(model.net, model.processor)
    first = desk.generate(asked(model), TOKENS, 0)
    desk.generate(asked(model, ["Another question?"] * 3), TOKENS, 0)
    assert desk.generate(asked(model), TOKENS, 0).tolist() == first.tolist()
    assert len({room for _, room, _ in desk.decoders}) == len(desk.decoders) <= 2
    assert all(room % CACHE_STEP == 0 for _, room, _ in desk.decoders)


@pytest.mark.slow
def test_a_compiled_step_writes_the_same(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = load_chat_model(str(folders["paligemma"]), Placement()), torch.compile
    plain = ChatDecoderPool(model.net, model.processor, "eager").generate(asked(model), TOKENS, 0)
    whole: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}  # in one piece, as a recording needs it
    monkeypatch.setattr(torch, "compile", lambda step, **settings: compiled(step, **settings, **whole))
    assert (
        ChatDecoderPool(model.net, model.processor, "compiled").generate(asked(model), TOKENS, 0).tolist()
        == plain.tolist()
    )


def test_an_answer_ends_where_the_model_ends_it(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava"]), Placement())
    whole = generated(model)
    model.net.generation_config.eos_token_id = [int(whole[0, 2]), 9999]
    assert eos_token_ids(model.net) == [int(whole[0, 2]), 9999]
    found, expected = ChatDecoderPool(model.net, model.processor).generate(asked(model), TOKENS, 0), generated(model)
    assert found.tolist() == expected.tolist()
    assert not found[0, 3:].any()


def test_penalties_of_a_model_count_here_too(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["qwen2_5_vl"]), Placement())
    plain = generate_answers(model, PICTURES, QUESTIONS, [0, 1, 2], GenerationSettings(max_new_tokens=TOKENS))
    model.net.generation_config.repetition_penalty = 5.0
    fewer = generate_answers(model, PICTURES, QUESTIONS, [0, 1, 2], GenerationSettings(max_new_tokens=TOKENS))
    assert plain != fewer
    expected = model.tokenizer.batch_decode(generated(model), skip_special_tokens=True)
    assert fewer == [text.strip() for text in expected]


@pytest.mark.parametrize("setting", [{"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_what_only_generate_knows_is_left_to_it(setting: dict[str, Any], folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava"]), Placement())
    for key, value in setting.items():
        setattr(model.net.generation_config, key, value)
    assert not ChatDecoderPool(model.net, model.processor).supports(asked(model), TOKENS)
    pieces: list[str] = []
    told = generate_answers(
        model, PICTURES[:1], QUESTIONS[:1], [0], GenerationSettings(max_new_tokens=TOKENS), pieces.append
    )
    assert "".join(pieces) == told[0]


def test_a_window_that_would_slide_is_left_to_generate(folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders["llava"]), Placement())
    said = asked(model)
    model.net.config.text_config.sliding_window = said.input_ids.shape[1] + 5
    desk = ChatDecoderPool(model.net, model.processor)
    assert desk.supports(said, 5) and not desk.supports(said, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_heard_as_it_is_written(family: str, folders: dict[str, Path]) -> None:
    model = load_chat_model(str(folders[family]), Placement())
    for manner in (
        GenerationSettings(max_new_tokens=TOKENS),
        GenerationSettings(temperature=1.0, max_new_tokens=TOKENS),
    ):
        pieces: list[str] = []
        told = generate_answers(model, PICTURES[:1], QUESTIONS[:1], [4], manner, pieces.append)
        assert "".join(pieces) == told[0]
        assert len(pieces) > 1


def test_paligemma_2_writes_as_generate_does_within_its_window() -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    torch.manual_seed(0)
    text = TEXT | {"model_type": "gemma2", "vocab_size": 90, "sliding_window": 32, "query_pre_attn_scalar": 16}
    eyes = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    settings: Any = {"image_token_id": 89, "projection_dim": 32}
    config = PaliGemmaConfig(text_config=text, vision_config=eyes, **settings)
    net: Any = PaliGemmaForConditionalGeneration(config).eval().requires_grad_(False)
    net.generation_config.eos_token_id = None
    ids = torch.cat([torch.full((2, 4), 89), torch.randint(3, 80, (2, 6))], 1)
    more = {"pixel_values": PICTURES[:2, :, :28, :28], "token_type_ids": torch.zeros_like(ids)}
    said, desk = ChatInputs(ids, torch.ones_like(ids), more), ChatDecoderPool(net, DefaultChatProcessor(net, None))
    assert desk.supports(said, 22) and not desk.supports(said, 23)
    expected = net.generate(
        ids, attention_mask=said.attention_mask, **more, max_new_tokens=22, do_sample=False, pad_token_id=0
    )
    assert desk.generate(said, 22, 0).tolist() == expected[:, 10:].tolist()
