"""Chat models that see, asked for the first word of their answers: one forward pass, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...pretrained import Source, locate, read
from ...registry import ConfigError
from ...types import Placement
from .answers import IMAGE, Words, vocabulary
from .hub import TINY, assembled, described, silence
from .llava import configuration, converted, published
from .speech import OneVision, Processed, Qwen, Speech, Turns

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ONE_VISION = Source("llava-hf/llava-onevision-qwen2-7b-ov-hf", size="16 GB", licence="Apache-2.0")


@dataclass(frozen=True)
class Heard:
    """The first words of answers, and what it takes to ask on once."""

    logits: Tensor  # [B, V]
    pixels: Tensor  # [B, 3, H, W]
    conversations: tuple[Turns, ...]
    mask: Tensor  # [B, L] of what was said
    cache: Any = None  # keys and values of it
    shift: Tensor | None = None  # [B, 1] by which positions run behind tokens


class Chat:
    """A frozen chat model."""

    def __init__(self, net: Any, tokenizer: Any, speech: Speech) -> None:
        self.net, self.tokenizer, self.speech = net, tokenizer, speech
        self.special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    @cached_property
    def words(self) -> Words:
        """Its tokens of yes and no."""
        settings = self.net.generation_config
        return vocabulary(self.tokenizer, settings.top_k, settings.top_p)

    def plain(self, prompt: str) -> str:
        """A prompt that cannot be taken for a turn of the conversation, or for a picture."""
        for token in [*self.special, IMAGE]:
            prompt = prompt.replace(token, "")
        return prompt

    def ask(self, pixels: Tensor, conversations: Sequence[Turns], keep: bool = False) -> Heard:
        """What is answered to the last turn of each, about its picture [B, 3, H, W]; `keep` what was said to ask on."""
        keep = keep and self.speech.keeps
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            asked = self.speech.asked(pixels, [self.speech.written(turns) for turns in conversations])
            out = self.net(use_cache=keep, logits_to_keep=1, **asked.told)
        heard = Heard(out.logits[:, -1], pixels, tuple(conversations), asked.mask)
        return replace(heard, cache=out.past_key_values, shift=self.speech.shift()) if keep else heard

    @torch.no_grad()
    def follow(self, heard: Heard, rows: Tensor, answer: str, question: str) -> Tensor:
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


def chat(weights: str, placement: Placement, *, gradient: bool = False, judges: bool = True) -> Chat:
    """A chat model from a folder as the hub's, or as LLaVA-NeXT writes them; one that has a gradient, if so asked.

    One that `judges` must have words for yes and no.
    """
    if weights == TINY:
        from .tiny_chat import tiny_chat

        net, tokenizer = tiny_chat(placement)
        return Chat(net, tokenizer, OneVision(net, tokenizer))
    path = locate(weights, ONE_VISION if weights == ONE_VISION.hub else Source(weights))
    told = described(path)
    with silence():
        net = _published(told, path, placement) if published(told) else _usual(path, placement)
        found = _speaking(net, str(net.config.model_type), path)
    if judges:
        _ = found.words  # refused here rather than before the first picture
    if gradient and not found.speech.differentiable:
        raise ConfigError(
            f"{path} prepares pictures outside PyTorch, so it gives no gradient; "
            "expected LLaVA-OneVision, or leave 'gradient' out"
        )
    return found


def _published(told: dict[str, Any], path: Path, placement: Placement) -> Any:
    from transformers import GenerationConfig, LlavaOnevisionForConditionalGeneration

    tensors = converted(read(path), path)
    config = configuration(told, tensors, path)
    net = assembled(LlavaOnevisionForConditionalGeneration, config, path, placement, tensors)
    if (path / "generation_config.json").is_file():
        net.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return net


def _usual(path: Path, placement: Placement) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} holds no chat model that sees ({error}); name one of transformers'") from error
    return assembled(kind, config, path, placement)


def _speaking(net: Any, family: str, path: Path) -> Chat:
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    looks: Any = AutoImageProcessor
    whole: Any = AutoProcessor
    try:
        if family == "llava_onevision":
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            return Chat(net, tokenizer, OneVision(net, tokenizer))
        if family in QWEN:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            images = looks.from_pretrained(path, local_files_only=True)
            return Chat(net, tokenizer, Qwen(net, tokenizer, images))
        processor = whole.from_pretrained(path, local_files_only=True)
    except (OSError, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the tokenizer or processor in {path} cannot be used ({reason:.200}); fetch it") from error
    return Chat(net, processor.tokenizer, Processed(net, processor))
