"""Prompts of Janus-Pro: its chat template, the start of an image, and padding on the left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.registry import ConfigError
from ...core.types import Prompts

BOS, PAD = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5c\u2581pad\u2581\uff5c>"
IMAGE_START = "<begin_of_image>"
USER, ASSISTANT = "<|User|>: ", "\n\n<|Assistant|>:"  # around the prompt


class TextTokenizer(Protocol):
    """Token ids of texts, and those of the three special tokens of a prompt."""

    bos_id: int
    pad_id: int
    image_start_id: int

    def __call__(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """The bytes of a text, for networks with random weights; the template is left out, as it would be most of it."""

    bos_id, pad_id, image_start_id = 1, 0, 2

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, text: str) -> list[int]:
        text = text.removeprefix(USER).removesuffix(ASSISTANT + IMAGE_START).removesuffix(ASSISTANT)
        return [3 + byte % (self.vocab_size - 3) for byte in text.encode()]


class FileTokenizer:
    """The tokenizer.json of a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer_class: Any = PreTrainedTokenizerFast
        try:
            self.tokenizer: Any = tokenizer_class(tokenizer_file=str(folder / "tokenizer.json"))
        except Exception as error:  # the Rust library raises plain exceptions
            raise ConfigError(
                f"model.weights: {folder} has no readable tokenizer.json; download the folder again [TM2552]"
            ) from error
        vocabulary = self.tokenizer.get_vocab()
        missing = [token for token in (BOS, PAD, IMAGE_START) if token not in vocabulary]
        if missing:
            raise ConfigError(
                f"model.weights: the tokenizer in {folder} has no token {missing[0]}; give the folder of a Janus-Pro "
                "model [TM2553]"
            )
        self.bos_id, self.pad_id, self.image_start_id = (vocabulary[token] for token in (BOS, PAD, IMAGE_START))

    def __call__(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class JanusPromptTokenizer:
    """Tokenizes prompts to `length` ids: padding, BOS, the prompt in its template, and the start of the image."""

    tokenizer: TextTokenizer
    length: int

    def __call__(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Ids [B, length], and which of them are not padding."""
        rows = [self.token_ids(prompt) for prompt in prompts]
        padding = torch.tensor([self.length - len(row) for row in rows])
        ids = torch.tensor([[self.tokenizer.pad_id] * (self.length - len(row)) + row for row in rows])
        return ids, torch.arange(self.length) >= padding[:, None]

    def token_ids(self, prompt: str) -> list[int]:
        """Ids of a prompt without padding. If they are too many, the prompt is cut, not its template."""
        tokenizer = self.tokenizer
        ids = [tokenizer.bos_id, *tokenizer(f"{USER}{prompt.strip()}{ASSISTANT}"), tokenizer.image_start_id]
        if len(ids) <= self.length:
            return ids
        end = [*tokenizer(ASSISTANT), tokenizer.image_start_id]
        return [*ids[: self.length - len(end)], *end]

    def without_prompt(self, ids: Tensor) -> Tensor:
        """The unconditional rows: every token but BOS and the start of the image is padding, which is attended to."""
        kept = (ids == self.tokenizer.bos_id) | (ids == self.tokenizer.image_start_id)
        return ids.where(kept, self.tokenizer.pad_id)
