"""How conversations about a picture are put to each family of chat models: their words, tokens and pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rewards.backbones.preprocessing import Preprocessing
from .batching import encode_with_image_tokens, left_pad, to_uint8_images
from .yes_no import IMAGE

Conversation = tuple[str, ...]  # what the user says and what the judge does, in turn; the picture comes with the first
GREY = 127 / 255  # SigLIP's mean colour, in bytes
CAPTION = "Describe this image in one sentence."
FIRST = {"paligemma": 1, "llava": 0}  # families whose tokens are counted one by one, and from which number on


@dataclass(frozen=True)
class ChatInputs:
    """Conversations as a network takes them, padded on the left."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L]
    more: dict[str, Any]  # whatever else it wants to know

    @property
    def told(self) -> dict[str, Any]:
        """What one call of the network is given; tokens that were looked up already are not told twice."""
        ids = {} if "inputs_embeds" in self.more else {"input_ids": self.ids}
        return {**ids, "attention_mask": self.mask, **self.more}


class ChatProcessor(ABC):
    """A family's way of asking."""

    keeps = False  # what was said can be held in memory and asked on about
    differentiable = False  # in the pixels

    @property
    def follows(self) -> bool:
        """Whether it is known where the tokens of an answer stand."""
        return self.keeps

    @property
    def caption(self) -> str:
        """What it is asked for a caption."""
        return CAPTION

    @abstractmethod
    def written(self, turns: Conversation) -> str:
        """The text of a conversation up to where the judge is to speak."""

    @abstractmethod
    def asked(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        """Pictures [B, 3, H, W] in [0, 1] and what is asked of each."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Any, ...]:
        """What goes into a folder beside the weights."""

    def answered(self, asked: ChatInputs, ids: Tensor, mask: Tensor) -> ChatInputs:
        """The same conversations with so many tokens more of each: [B, A], [B, A]."""
        whole = torch.cat([asked.mask, mask], 1)
        more = dict(asked.more)
        for key, x in asked.more.items():
            if key == "position_ids":
                more[key] = self.places(whole)
            elif isinstance(x, Tensor) and x.shape == asked.ids.shape:
                more[key] = F.pad(x, (0, ids.shape[1]), value=self.spoken)
        return ChatInputs(torch.cat([asked.ids, ids], 1), whole, more)

    @property
    def spoken(self) -> int:
        """The kind of tokens that answer, where a network is told of kinds."""
        return 0

    def places(self, mask: Tensor) -> Tensor:
        """The position of each token, had it no picture before it."""
        return (mask.cumsum(-1) - 1).clamp(min=0)

    def shift(self) -> Tensor | None:
        """By how much positions run behind tokens after the last call: [B, 1]."""
        return None

    def next(self, mask: Tensor) -> Tensor:
        """Where the first token of an answer stands, after the last call: [B, 1], or [axes, B, 1]."""
        places, shift = mask.sum(-1, keepdim=True), self.shift()
        return places if shift is None else (places + shift.to(places.device)).expand(3, -1, -1)


@dataclass(frozen=True)
class OneVisionProcessor(ChatProcessor):
    """LLaVA-OneVision as the published judges ask it: one picture padded to a square, in Qwen 1.5's words."""

    net: Any
    tokenizer: Any
    keeps = True
    differentiable = True

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.tokenizer,)

    def written(self, turns: Conversation) -> str:
        said = [f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in zip(_speakers(turns), turns, strict=True)]
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        return system + "".join(said) + "<|im_start|>assistant\n"

    def asked(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        inner = self.net.model
        seen = self.squared(pixels).to(self.net.dtype)
        features = inner.vision_tower(seen, output_hidden_states=True).hidden_states[-1]
        # A single picture cannot pass as one tile through `get_image_features`, so its steps are taken here.
        newline = inner.image_newline.expand(len(pixels), 1, -1)
        features = torch.cat([inner.multi_modal_projector(features), newline], 1)
        number = self.net.config.image_token_id
        rows = [encode_with_image_tokens(self.tokenizer, text, IMAGE, number, features.shape[1]) for text in texts]
        ids, mask = left_pad(rows, self.tokenizer, pixels.device)
        words = inner.get_input_embeddings()(ids)
        shown = words.masked_scatter((ids == number)[..., None], features.to(words.dtype))
        return ChatInputs(ids, mask, {"inputs_embeds": shown, "position_ids": self.places(mask)})

    def answered(self, asked: ChatInputs, ids: Tensor, mask: Tensor) -> ChatInputs:
        whole = super().answered(asked, ids, mask)
        said = self.net.model.get_input_embeddings()(ids)
        return replace(whole, more={**whole.more, "inputs_embeds": torch.cat([asked.more["inputs_embeds"], said], 1)})

    def squared(self, pixels: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] amid grey, at the size of the vision tower, in [-1, 1]."""
        height, width = pixels.shape[-2:]
        side, half = max(height, width), (0.5, 0.5, 0.5)
        left, top = (side - width) // 2, (side - height) // 2
        square = F.pad(pixels, (left, side - width - left, top, side - height - top), value=GREY)
        return Preprocessing(self.net.config.vision_config.image_size, "stretch", "bicubic", half, half)(square)


@dataclass(frozen=True)
class QwenProcessor(ChatProcessor):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL, in their own words; without their processors, which ask for torchvision."""

    net: Any
    tokenizer: Any
    images: Any  # their image processor
    keeps = True

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.tokenizer, self.images)

    def written(self, turns: Conversation) -> str:
        return _templated(self.tokenizer, turns)

    def asked(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        found = self.images(images=to_uint8_images(pixels), return_tensors="pt").to(pixels.device)
        number, grid = self.net.config.image_token_id, found["image_grid_thw"]
        count = int(grid[0].prod()) // self.images.merge_size**2  # all are of one size
        mark = self.tokenizer.convert_ids_to_tokens(number)
        ids, mask = left_pad(
            [encode_with_image_tokens(self.tokenizer, text, mark, number, count) for text in texts],
            self.tokenizer,
            pixels.device,
        )
        kinds = (ids == number).int()
        pixel_values = found["pixel_values"].to(self.net.dtype)
        return ChatInputs(ids, mask, {"pixel_values": pixel_values, "image_grid_thw": grid, "mm_token_type_ids": kinds})

    def shift(self) -> Tensor | None:
        # A picture takes fewer steps along its three axes than it has tokens.
        found: Tensor | None = self.net.model.rope_deltas
        return found


@dataclass(frozen=True)
class AutoChatProcessor(ChatProcessor):
    """Any other family, by the processor it comes with; PaliGemma, which knows no chat, is asked in one piece."""

    net: Any
    processor: Any

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.processor,)

    @property
    def follows(self) -> bool:
        return self.net.config.model_type in FIRST

    @property
    def caption(self) -> str:
        return CAPTION if self.processor.chat_template else "caption en"  # PaliGemma's, in English

    def next(self, mask: Tensor) -> Tensor:
        # Filling is counted too, which turns every place alike.
        return torch.full_like(mask[:, :1], mask.shape[1] + FIRST[self.net.config.model_type])

    @property
    def spoken(self) -> int:
        # PaliGemma reads what comes before in any order, and what it says itself in order alone.
        return int(self.net.config.model_type == "paligemma")

    def written(self, turns: Conversation) -> str:
        if self.processor.chat_template is None:
            return IMAGE + "\n".join(turn.removeprefix(IMAGE).strip() for turn in turns)
        return _templated(self.processor, turns)

    def asked(self, pixels: Tensor, texts: Sequence[str]) -> ChatInputs:
        found = self.processor(
            images=[[picture] for picture in to_uint8_images(pixels)], text=list(texts), padding=True,
            padding_side="left",
            add_special_tokens=self.processor.chat_template is None, return_tensors="pt",
        ).to(pixels.device)  # fmt: skip
        more = {key: x for key, x in found.items() if key not in ("input_ids", "attention_mask", "labels")}
        more = {key: x.to(self.net.dtype) if x.is_floating_point() else x for key, x in more.items()}
        return ChatInputs(found["input_ids"], found["attention_mask"], more)


def _speakers(turns: Conversation) -> list[str]:
    return ["user" if k % 2 == 0 else "assistant" for k in range(len(turns))]


def _templated(writer: Any, turns: Conversation) -> str:
    """A conversation in the words of a chat template."""
    messages = []
    for k, (who, what) in enumerate(zip(_speakers(turns), turns, strict=True)):
        content = [{"type": "text", "text": what.removeprefix(IMAGE).strip()}]
        messages.append({"role": who, "content": [{"type": "image"}, *content] if k == 0 else content})
    text: str = writer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text
