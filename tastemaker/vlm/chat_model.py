"""Chat models that see, asked for the first word of their answers: one forward pass, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.pretrained import WeightsSource, find_weights, load_state_dict
from ..rewards.backbones.loading import TINY, load_network, quiet_transformers, read_config
from .chat_processors import AutoChatProcessor, ChatProcessor, Conversation, OneVisionProcessor, QwenProcessor
from .llava_keys import convert_keys, is_llava_next, llava_config
from .yes_no import IMAGE, AnswerTokens, find_answer_tokens

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ONE_VISION = WeightsSource("llava-hf/llava-onevision-qwen2-7b-ov-hf", size="16 GB", licence="Apache-2.0")


@dataclass(frozen=True)
class ChatOutput:
    """The first words of answers, and what it takes to ask on once."""

    logits: Tensor  # [B, V]
    pixels: Tensor  # [B, 3, H, W]
    conversations: tuple[Conversation, ...]
    mask: Tensor  # [B, L] of what was said
    cache: Any = None  # keys and values of it
    shift: Tensor | None = None  # [B, 1] by which positions run behind tokens


class ChatModel:
    """A frozen chat model."""

    def __init__(self, net: Any, tokenizer: Any, speech: ChatProcessor) -> None:
        self.net, self.tokenizer, self.speech = net, tokenizer, speech
        self.special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    @cached_property
    def words(self) -> AnswerTokens:
        """Its tokens of yes and no."""
        settings = self.net.generation_config
        return find_answer_tokens(self.tokenizer, settings.top_k, settings.top_p)

    def plain(self, prompt: str) -> str:
        """A prompt that cannot be taken for a turn of the conversation, or for a picture."""
        for token in [*self.special, IMAGE]:
            prompt = prompt.replace(token, "")
        return prompt

    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep: bool = False) -> ChatOutput:
        """What is answered to the last turn of each, about its picture [B, 3, H, W]; `keep` what was said to ask on."""
        keep = keep and self.speech.keeps
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            asked = self.speech.asked(pixels, [self.speech.written(turns) for turns in conversations])
            out = self.net(use_cache=keep, logits_to_keep=1, **asked.told)
        heard = ChatOutput(out.logits[:, -1], pixels, tuple(conversations), asked.mask)
        return replace(heard, cache=out.past_key_values, shift=self.speech.shift()) if keep else heard

    @torch.no_grad()
    def follow(self, heard: ChatOutput, rows: Tensor, answer: str, question: str) -> Tensor:
        """What some rows, had they given that answer, answer to one more question: logits [R, V].

        What was kept is taken up where it ended, so that pictures and first questions are read once.
        """
        turns = [heard.conversations[i] for i in rows.tolist()]
        longer = [(*before, answer, question) for before in turns]
        added = {
            after.removeprefix(before) if after.startswith(before) else ""
            for before, after in zip(map(self.speech.written, turns), map(self.speech.written, longer), strict=True)
        }
        if heard.cache is None or len(added) > 1 or "" in added:
            return self.ask(heard.pixels[rows], longer).logits
        ids = torch.tensor(self.tokenizer(added.pop(), add_special_tokens=False).input_ids, device=rows.device)
        mask = torch.cat([heard.mask[rows], heard.mask.new_ones(len(rows), len(ids))], 1)
        places = self.speech.places(mask)[:, -len(ids) :]
        if heard.shift is not None:
            places = (places + heard.shift.to(rows.device)[rows]).expand(3, -1, -1)
        heard.cache.batch_select_indices(rows)
        out = self.net(
            input_ids=ids.expand(len(rows), -1), attention_mask=mask, position_ids=places,
            past_key_values=heard.cache, logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = out.logits[:, -1]
        return logits


def load_chat_model(weights: str, placement: Placement, *, gradient: bool = False, judges: bool = True) -> ChatModel:
    """A chat model from a folder as the hub's, or as LLaVA-NeXT writes them; one that has a gradient, if so asked.

    One that `judges` must have words for yes and no.
    """
    if weights == TINY:
        from .tiny_chat_model import tiny_chat

        net, tokenizer = tiny_chat(placement)
        return ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer))
    path = find_weights(weights, ONE_VISION if weights == ONE_VISION.hub else WeightsSource(weights))
    told = read_config(path)
    with quiet_transformers():
        net = (
            _load_llava_next(told, path, placement) if is_llava_next(told) else _load_from_transformers(path, placement)
        )
        found = _with_processor(net, str(net.config.model_type), path)
    if judges:
        _ = found.words  # refused here rather than before the first picture
    if gradient and not found.speech.differentiable:
        raise ConfigError(
            f"{path} prepares pictures outside PyTorch, so it gives no gradient; "
            "expected LLaVA-OneVision, or leave 'gradient' out"
        )
    return found


def _load_llava_next(told: dict[str, Any], path: Path, placement: Placement) -> Any:
    from transformers import GenerationConfig, LlavaOnevisionForConditionalGeneration

    tensors = convert_keys(load_state_dict(path), path)
    config = llava_config(told, tensors, path)
    net = load_network(LlavaOnevisionForConditionalGeneration, config, path, placement, tensors)
    if (path / "generation_config.json").is_file():
        net.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return net


def _load_from_transformers(path: Path, placement: Placement) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} holds no chat model that sees ({error}); name one of transformers'") from error
    return load_network(kind, config, path, placement)


def _with_processor(net: Any, family: str, path: Path) -> ChatModel:
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    looks: Any = AutoImageProcessor
    whole: Any = AutoProcessor
    try:
        if family == "llava_onevision":
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            return ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer))
        if family in QWEN:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            images = looks.from_pretrained(path, local_files_only=True)
            return ChatModel(net, tokenizer, QwenProcessor(net, tokenizer, images))
        processor = whole.from_pretrained(path, local_files_only=True)
    except (OSError, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the tokenizer or processor in {path} cannot be used ({reason:.200}); fetch it") from error
    return ChatModel(net, processor.tokenizer, AutoChatProcessor(net, processor))
