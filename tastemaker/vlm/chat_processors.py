"""Inputs of chat models, by family: chat template, tokens and pixels of conversations about one image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..data.image_io import to_uint8
from ..rewards.backbones.preprocessing import Preprocessing
from .yes_no import IMAGE

Conversation = tuple[str, ...]  # turns of user and assistant in alternation; the image comes with the first
SIGLIP_GRAY = 127 / 255  # SigLIP's mean color, in bytes
CAPTION_PROMPT = "Describe this image in one sentence."
FIRST_POSITION = {"paligemma": 1, "llava": 0}  # of families whose positions simply count the tokens


@dataclass(frozen=True)
class ChatInputs:
    """Inputs of a network for a batch of conversations, padded on the left."""

    input_ids: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L]
    extra_inputs: dict[str, Any]  # pixels, token types, embeddings

    @property
    def network_inputs(self) -> dict[str, Any]:
        """Keyword arguments of one forward pass; token ids are left out if their embeddings are given."""
        ids = {} if "inputs_embeds" in self.extra_inputs else {"input_ids": self.input_ids}
        return {**ids, "attention_mask": self.attention_mask, **self.extra_inputs}


class ChatProcessor(ABC):
    """Turns images and conversations into the inputs of one model family."""

    supports_followup = False  # a kept KV cache can be continued with another question
    differentiable = False  # with respect to the pixels

    @property
    def supports_static_cache(self) -> bool:
        """Whether the positions of answer tokens are known, as decoding with a static cache needs."""
        return self.supports_followup

    @property
    def caption_prompt(self) -> str:
        """The default question for a caption."""
        return CAPTION_PROMPT

    @property
    @abstractmethod
    def saved_processors(self) -> tuple[Any, ...]:
        """Tokenizers and processors to save beside the weights."""

    @abstractmethod
    def render(self, conversation: Conversation) -> str:
        """The text of a conversation up to where the assistant answers."""

    @abstractmethod
    def encode(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        """Network inputs for images [B, 3, H, W] in [0, 1] and one rendered text each."""

    def append_answers(self, inputs: ChatInputs, ids: Tensor, mask: Tensor) -> ChatInputs:
        """Inputs with the tokens of answers [B, A] and their mask [B, A] appended."""
        attention_mask = torch.cat([inputs.attention_mask, mask], 1)
        extra_inputs = dict(inputs.extra_inputs)
        for key, x in inputs.extra_inputs.items():
            if key == "position_ids":
                extra_inputs[key] = self.position_ids(attention_mask)
            elif isinstance(x, Tensor) and x.shape == inputs.input_ids.shape:
                extra_inputs[key] = F.pad(x, (0, ids.shape[1]), value=self.answer_token_type)
        return ChatInputs(torch.cat([inputs.input_ids, ids], 1), attention_mask, extra_inputs)

    @property
    def answer_token_type(self) -> int:
        """The type of answer tokens, for networks with token types."""
        return 0

    def position_ids(self, mask: Tensor) -> Tensor:
        """Positions of the tokens [B, L], for families that count the tokens that are not padding."""
        return (mask.cumsum(-1) - 1).clamp(min=0)

    def position_shift(self) -> Tensor | None:
        """Difference of positions to token counts after the last forward pass, if the family has one: [B, 1]."""
        return None

    def next_position(self, mask: Tensor) -> Tensor:
        """Position of the first answer token after the last forward pass: [B, 1], or [axes, B, 1]."""
        count, shift = mask.sum(-1, keepdim=True), self.position_shift()
        return count if shift is None else (count + shift.to(count.device)).expand(3, -1, -1)


@dataclass(frozen=True)
class OneVisionProcessor(ChatProcessor):
    """LLaVA-OneVision as the published ORM and PARM use it: one image padded to a square, Qwen 1.5's template."""

    net: Any
    tokenizer: Any
    supports_followup = True
    differentiable = True

    @property
    def saved_processors(self) -> tuple[Any, ...]:
        return (self.tokenizer,)

    def render(self, conversation: Conversation) -> str:
        # Neither Qwen's template nor that of llava-hf has this system turn.
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        turns = zip(_roles(conversation), conversation, strict=True)
        rendered = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns]
        return system + "".join(rendered) + "<|im_start|>assistant\n"

    def encode(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        model = self.net.model
        prepared = self.preprocess(pixels).to(self.net.dtype)
        features = model.vision_tower(prepared, output_hidden_states=True).hidden_states[-1]
        # `get_image_features` cannot take an image as a single tile, so its steps are repeated here.
        newline = model.image_newline.expand(len(pixels), 1, -1)
        features = torch.cat([model.multi_modal_projector(features), newline], 1)
        image_token = self.net.config.image_token_id
        ids, mask = left_pad(
            [encode_with_image_tokens(self.tokenizer, text, IMAGE, image_token, features.shape[1]) for text in texts],
            self.tokenizer,
            pixels.device,
        )
        embeddings = model.get_input_embeddings()(ids)
        embeddings = embeddings.masked_scatter((ids == image_token)[..., None], features.to(embeddings.dtype))
        return ChatInputs(ids, mask, {"inputs_embeds": embeddings, "position_ids": self.position_ids(mask)})

    def append_answers(self, inputs: ChatInputs, ids: Tensor, mask: Tensor) -> ChatInputs:
        longer = super().append_answers(inputs, ids, mask)
        answers = self.net.model.get_input_embeddings()(ids)
        embeddings = torch.cat([inputs.extra_inputs["inputs_embeds"], answers], 1)
        return replace(longer, extra_inputs={**longer.extra_inputs, "inputs_embeds": embeddings})

    def preprocess(self, pixels: Tensor) -> Tensor:
        """Images [B, 3, H, W] padded with gray to a square, at the size of the vision tower, in [-1, 1]."""
        height, width = pixels.shape[-2:]
        side, half = max(height, width), (0.5, 0.5, 0.5)
        left, top = (side - width) // 2, (side - height) // 2
        square = F.pad(pixels, (left, side - width - left, top, side - height - top), value=SIGLIP_GRAY)
        return Preprocessing(self.net.config.vision_config.image_size, "stretch", "bicubic", half, half)(square)


@dataclass(frozen=True)
class QwenProcessor(ChatProcessor):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL, without their AutoProcessor, whose video part needs torchvision."""

    net: Any
    tokenizer: Any
    image_processor: Any
    supports_followup = True

    @property
    def saved_processors(self) -> tuple[Any, ...]:
        return (self.tokenizer, self.image_processor)

    def render(self, conversation: Conversation) -> str:
        return _apply_chat_template(self.tokenizer, conversation)

    def encode(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        images = self.image_processor(images=to_pil_images(pixels), return_tensors="pt").to(pixels.device)
        image_token, grid = self.net.config.image_token_id, images["image_grid_thw"]
        count = int(grid[0].prod()) // self.image_processor.merge_size**2  # all images have one size
        placeholder = self.tokenizer.convert_ids_to_tokens(image_token)
        ids, mask = left_pad(
            [encode_with_image_tokens(self.tokenizer, text, placeholder, image_token, count) for text in texts],
            self.tokenizer,
            pixels.device,
        )
        token_types = (ids == image_token).int()
        pixel_values = images["pixel_values"].to(self.net.dtype)
        return ChatInputs(
            ids, mask, {"pixel_values": pixel_values, "image_grid_thw": grid, "mm_token_type_ids": token_types}
        )

    def position_shift(self) -> Tensor | None:
        # An image takes fewer positions along its three axes than it has tokens.
        shift: Tensor | None = self.net.model.rope_deltas
        return shift


@dataclass(frozen=True)
class DefaultChatProcessor(ChatProcessor):
    """Any other family, by its own processor; PaliGemma, which has no chat template, gets image and text."""

    net: Any
    processor: Any

    @property
    def saved_processors(self) -> tuple[Any, ...]:
        return (self.processor,)

    @property
    def supports_static_cache(self) -> bool:
        return self.net.config.model_type in FIRST_POSITION

    @property
    def caption_prompt(self) -> str:
        return CAPTION_PROMPT if self.processor.chat_template else "caption en"  # PaliGemma's

    def next_position(self, mask: Tensor) -> Tensor:
        # Padding counts too, which rotates all positions alike.
        return torch.full_like(mask[:, :1], mask.shape[1] + FIRST_POSITION[self.net.config.model_type])

    @property
    def answer_token_type(self) -> int:
        # PaliGemma attends to its prompt in both directions and to its answer causally.
        return int(self.net.config.model_type == "paligemma")

    def render(self, conversation: Conversation) -> str:
        if self.processor.chat_template is None:
            return IMAGE + "\n".join(turn.removeprefix(IMAGE).strip() for turn in conversation)
        return _apply_chat_template(self.processor, conversation)

    def encode(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        inputs = self.processor(
            images=[[image] for image in to_pil_images(pixels)],
            text=list(texts),
            padding=True,
            padding_side="left",
            add_special_tokens=self.processor.chat_template is None,
            return_tensors="pt",
        ).to(pixels.device)
        extra = {key: x for key, x in inputs.items() if key not in ("input_ids", "attention_mask", "labels")}
        extra = {key: x.to(self.net.dtype) if x.is_floating_point() else x for key, x in extra.items()}
        return ChatInputs(inputs["input_ids"], inputs["attention_mask"], extra)


def _roles(conversation: Conversation) -> list[str]:
    return ["user" if k % 2 == 0 else "assistant" for k in range(len(conversation))]


def _apply_chat_template(processor: Any, conversation: Conversation) -> str:
    messages = []
    for k, (role, text) in enumerate(zip(_roles(conversation), conversation, strict=True)):
        content = [{"type": "text", "text": text.removeprefix(IMAGE).strip()}]
        messages.append({"role": role, "content": [{"type": "image"}, *content] if k == 0 else content})
    rendered: str = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return rendered


def encode_with_image_tokens(tokenizer: Any, text: str, placeholder: str, image_token: int, count: int) -> list[int]:
    """Token ids of a text, with its first image placeholder as `count` image tokens."""
    before, _, after = text.partition(placeholder)
    ids: list[list[int]] = [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]
    return [*ids[0], *[image_token] * count, *ids[1]]


def left_pad(rows: Sequence[list[int]], tokenizer: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids padded on the left, and their attention mask: [B, L] each."""
    length = max(map(len, rows))
    pad = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def to_pil_images(pixels: Tensor) -> list[Image.Image]:
    return [Image.fromarray(array) for array in to_uint8(pixels)]
