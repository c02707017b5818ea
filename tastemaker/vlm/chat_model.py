"""Frozen chat models: one forward pass for the first token of an answer, with follow-up questions on the kept cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.pretrained import WeightsSource, find_weights, load_state_dict
from ..rewards.backbones.frozen_models import TINY, load_network, random_network, read_config, silence_transformers
from .chat_processors import ChatProcessor, Conversation, DefaultChatProcessor, OneVisionProcessor, QwenProcessor
from .llava_keys import convert_keys, llava_config
from .yes_no import IMAGE, AnswerTokens, find_answer_tokens

if TYPE_CHECKING:
    from .generation import GenerationSettings

QWEN_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ONE_VISION = WeightsSource("llava-hf/llava-onevision-qwen2-7b-ov-hf", size="16 GB", license="Apache-2.0")


@dataclass(frozen=True)
class ChatOutput:
    """Logits of the first answer token, and the state for one follow-up question."""

    logits: Tensor  # [B, V]
    pixels: Tensor  # [B, 3, H, W]
    conversations: tuple[Conversation, ...]
    mask: Tensor  # [B, L] attention mask of the conversations
    kv_cache: Any = None
    position_shift: Tensor | None = None  # [B, 1] difference of positions to token counts


class YesNoModel(ABC):
    """A model that answers yes-or-no questions about images."""

    @property
    @abstractmethod
    def answer_tokens(self) -> AnswerTokens:
        """Its tokens of yes and no."""

    @abstractmethod
    def strip_special_tokens(self, prompt: str) -> str:
        """The prompt without special tokens, so that it cannot pass for a turn of the conversation or for an image."""

    @abstractmethod
    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep_cache: bool = False) -> ChatOutput:
        """Answer the last turn of each conversation about its image; `keep_cache` allows a follow-up question."""

    @abstractmethod
    def ask_followup(self, output: ChatOutput, indices: Tensor, answer: str, question: str) -> Tensor:
        """Logits [R, V] for one more question to some of the conversations, given an answer to the first one."""

    def explain(
        self, pixels: Tensor, questions: Sequence[str], sample_ids: Sequence[int], generation: GenerationSettings
    ) -> list[str]:
        """Answers in full sentences; refuses if the model has only single tokens."""
        raise ValueError(
            f"{type(self).__name__} answers in one word only; use a chat model that can explain its answers [TM707]"
        )


class ChatModel(YesNoModel):
    """A frozen vision-language model of transformers with its tokenizer and processor."""

    def __init__(self, net: Any, tokenizer: Any, processor: ChatProcessor) -> None:
        self.net, self.tokenizer, self.processor = net, tokenizer, processor
        self.special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    @cached_property
    def answer_tokens(self) -> AnswerTokens:
        settings = self.net.generation_config
        return find_answer_tokens(self.tokenizer, settings.top_k, settings.top_p)

    def strip_special_tokens(self, prompt: str) -> str:
        for token in [*self.special_tokens, IMAGE]:
            prompt = prompt.replace(token, "")
        return prompt

    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep_cache: bool = False) -> ChatOutput:
        keep_cache = keep_cache and self.processor.supports_followup
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            inputs = self.processor.encode(pixels, [self.processor.render(turns) for turns in conversations])
            out = self.net(use_cache=keep_cache, logits_to_keep=1, **inputs.network_inputs)
        output = ChatOutput(out.logits[:, -1], pixels, tuple(conversations), inputs.attention_mask)
        if not keep_cache:
            return output
        return replace(output, kv_cache=out.past_key_values, position_shift=self.processor.position_shift())

    @torch.no_grad()
    def ask_followup(self, output: ChatOutput, indices: Tensor, answer: str, question: str) -> Tensor:
        """Continue the kept cache if the longer conversations only append text; else encode everything again."""
        render, device = self.processor.render, indices.device
        conversations = [output.conversations[i] for i in indices.tolist()]
        longer = [(*turns, answer, question) for turns in conversations]
        suffixes = {
            after.removeprefix(before) if after.startswith(before) else ""
            for before, after in zip(map(render, conversations), map(render, longer), strict=True)
        }
        if output.kv_cache is None or len(suffixes) > 1 or "" in suffixes:
            return self.ask(output.pixels[indices], longer).logits
        ids = torch.tensor(self.tokenizer(suffixes.pop(), add_special_tokens=False).input_ids, device=device)
        mask = torch.cat([output.mask[indices], output.mask.new_ones(len(indices), len(ids))], 1)
        positions = self.processor.position_ids(mask)[:, -len(ids) :]
        if output.position_shift is not None:
            positions = (positions + output.position_shift.to(device)[indices]).expand(3, -1, -1)
        output.kv_cache.batch_select_indices(indices)
        out = self.net(
            input_ids=ids.expand(len(indices), -1),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=output.kv_cache,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def explain(
        self, pixels: Tensor, questions: Sequence[str], sample_ids: Sequence[int], generation: GenerationSettings
    ) -> list[str]:
        from .generation import generate_answers

        return generate_answers(self, pixels, questions, sample_ids, generation)


def load_chat_model(
    weights: str, placement: Placement, *, differentiable: bool = False, needs_yes_no: bool = True
) -> ChatModel:
    """A chat model from a folder in the layout of the Hub or of LLaVA-NeXT, or a tiny random one.

    Refuses a model without pixel gradients if `differentiable`, and one without tokens of yes and no if `needs_yes_no`.
    """
    if weights == TINY:
        net, tokenizer = tiny_chat(placement)
        return ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer))
    path = find_weights(weights, ONE_VISION if weights == ONE_VISION.hub else WeightsSource(weights))
    settings = read_config(path)
    with silence_transformers():
        load = _load_llava_next if "mm_vision_tower" in settings else _load_from_transformers
        net = load(settings, path, placement)
        chat = _with_processor(net, str(net.config.model_type), path)
    if needs_yes_no:
        _ = chat.answer_tokens  # refuses now rather than at the first image
    if differentiable and not chat.processor.differentiable:
        raise ConfigError(
            f"'pixel_gradient': {path} prepares images outside PyTorch, so it does not have a gradient; use "
            "LLaVA-OneVision, or remove 'pixel_gradient' [TM708]"
        )
    return chat


def _load_llava_next(settings: dict[str, Any], path: Path, placement: Placement) -> Any:
    from transformers import GenerationConfig, LlavaOnevisionForConditionalGeneration

    tensors = convert_keys(load_state_dict(path), path)
    config = llava_config(settings, tensors, path)
    net = load_network(LlavaOnevisionForConditionalGeneration, config, path, placement, tensors)
    if (path / "generation_config.json").is_file():
        net.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return net


def _load_from_transformers(settings: dict[str, Any], path: Path, placement: Placement) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} does not contain a vision-language model ({error}); give a vision-language model of "
            "transformers [TM709]"
        ) from error
    return load_network(model_class, config, path, placement)


def _with_processor(net: Any, model_type: str, path: Path) -> ChatModel:
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    auto_image_processor: Any = AutoImageProcessor
    auto_processor: Any = AutoProcessor
    try:
        if model_type == "llava_onevision":
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            return ChatModel(net, tokenizer, OneVisionProcessor(net, tokenizer))
        if model_type in QWEN_TYPES:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            images = auto_image_processor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            return ChatModel(net, tokenizer, QwenProcessor(net, tokenizer, images))
        processor = auto_processor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the tokenizer or processor in {path} cannot be used ({reason:.200}); download the folder again [TM710]"
        ) from error
    return ChatModel(net, processor.tokenizer, DefaultChatProcessor(net, processor))


TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TINY_MERGES = ("y e", "ye s", "Y e", "Ye s", "n o", "N o", "Ġ yes", "Ġ Yes", "Ġ no", "Ġ No")


def tiny_tokenizer(special: tuple[str, ...] = TINY_SPECIAL_TOKENS) -> Any:
    """A tokenizer of bytes, and of the words yes and no, for tests."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    merges = [(first, second) for first, second in (pair.split() for pair in TINY_MERGES)]
    vocabulary = [*sorted(ByteLevel.alphabet()), *(first + second for first, second in merges)]
    backend = Tokenizer(BPE({token: number for number, token in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def tiny_chat(placement: Placement) -> tuple[Any, Any]:
    """A small random LLaVA-OneVision and its tokenizer, for tests."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    tokenizer = tiny_tokenizer()
    text = {
        "model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 1, "image_size": 30, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = LlavaOnevisionConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        vision_feature_layer=-1,
    )
    return random_network(LlavaOnevisionForConditionalGeneration, config, placement), tokenizer
