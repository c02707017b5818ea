"""Prompt tokenization for Show-o: task token, truncation and left padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.registry import ConfigError
from ...core.types import Prompts
from ..nets.showo import ShowoVocabulary
from ..pretrained import WeightsSource, find_weights

PHI = WeightsSource("microsoft/phi-1_5", "tokenizer.json", "2 MB", "MIT")
BYTE_TOKENIZER = "letters"  # a tokenizer without files, for networks with random weights
TextTokenizer = Callable[[str], list[int]]
Detokenizer = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ShowoPromptTokenizer:
    """Tokenizes prompts to `length` ids each, including the task token, BOS and EOS."""

    vocabulary: ShowoVocabulary
    tokenizer: TextTokenizer
    length: int = 129

    def __call__(self, prompts: Prompts) -> Tensor:
        """Ids [B, length] of prompts for text-to-image generation, left-padded."""
        return torch.tensor([self._pad(self._token_ids(prompt)) for prompt in prompts])

    def _token_ids(self, prompt: str) -> list[int]:
        words, end = self.tokenizer(prompt), self.vocabulary.eos_id
        with_bos = words if words[:1] == [end] else [end, *words]
        return [self.vocabulary.t2i_id, *with_bos, end]

    def _pad(self, ids: Sequence[int]) -> list[int]:
        if len(ids) > self.length:
            return [*ids[: self.length - 1], self.vocabulary.eos_id]
        return [self.vocabulary.pad_id] * (self.length - len(ids)) + list(ids)


def load_text_tokenizer(name: str, vocabulary: ShowoVocabulary) -> TextTokenizer:
    """Phi's tokenizer from a file, a folder or the hub cache; or the bytes of the text."""
    if name == BYTE_TOKENIZER:
        return lambda text: [byte % (vocabulary.text_vocab_size - 1) for byte in text.encode()]
    tokenizer = _load_phi_tokenizer(name, vocabulary)
    return lambda text: list(tokenizer(text)["input_ids"])


def load_detokenizer(name: str, vocabulary: ShowoVocabulary) -> Detokenizer:
    """The inverse of `load_text_tokenizer`: text of token ids."""
    if name == BYTE_TOKENIZER:
        return lambda ids: "".join(chr(32 + token % 95) for token in ids)
    tokenizer = _load_phi_tokenizer(name, vocabulary)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _load_phi_tokenizer(name: str, vocabulary: ShowoVocabulary) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer_class: Any = PreTrainedTokenizerFast
    path = find_weights(name, PHI)
    file = path / PHI.file if path.is_dir() else path
    try:
        tokenizer = tokenizer_class(tokenizer_file=str(file))
    except Exception as error:  # the Rust library raises plain exceptions
        raise ConfigError(
            f"model.tokenizer: {path} holds no tokenizer; give a folder with Phi's tokenizer, or {PHI} [TM531]"
        ) from error
    if len(tokenizer) != vocabulary.text_vocab_size:
        raise ConfigError(
            f"model.tokenizer: {path} has {len(tokenizer)} tokens, but the model has "
            f"{vocabulary.text_vocab_size}; give a folder with Phi's tokenizer [TM532]"
        )
    return tokenizer
