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
BYTE_TOKENIZER = "letters"  # a tokenizer without files, for random networks
TextTokenizer = Callable[[str], list[int]]
Detokenizer = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ShowoPromptTokenizer:
    """Tokenize prompts to rows of `length` ids, including the task token, BOS and EOS."""

    vocabulary: ShowoVocabulary
    tokenizer: TextTokenizer
    length: int = 129

    def __call__(self, prompts: Prompts) -> Tensor:
        """What a picture is to be painted of: [B, length]."""
        return torch.tensor([self.filled(self.told(prompt)) for prompt in prompts])

    def told(self, prompt: str) -> list[int]:
        words, end = self.tokenizer(prompt), self.vocabulary.end
        begun = words if words[:1] == [end] else [end, *words]
        return [self.vocabulary.painting, *begun, end]

    def filled(self, ids: Sequence[int]) -> list[int]:
        if len(ids) > self.length:
            return [*ids[: self.length - 1], self.vocabulary.end]
        return [self.vocabulary.filling] * (self.length - len(ids)) + list(ids)


def load_text_tokenizer(name: str, vocabulary: ShowoVocabulary) -> TextTokenizer:
    """Phi's, of a file or folder or as fetched of the hub; or the letters themselves."""
    if name == BYTE_TOKENIZER:
        return lambda text: [letter % (vocabulary.words - 1) for letter in text.encode()]
    words = _phi(name, vocabulary)
    return lambda text: list(words(text)["input_ids"])


def load_detokenizer(name: str, vocabulary: ShowoVocabulary) -> Detokenizer:
    """The way back, from ids to what they spell."""
    if name == BYTE_TOKENIZER:
        return lambda ids: "".join(chr(32 + number % 95) for number in ids)
    words = _phi(name, vocabulary)
    return lambda ids: str(words.decode(list(ids), skip_special_tokens=True)).strip()


def _phi(name: str, vocabulary: ShowoVocabulary) -> Any:
    from transformers import PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast
    path = find_weights(name, PHI)
    file = path / PHI.file if path.is_dir() else path
    try:
        words = loader(tokenizer_file=str(file))
    except Exception as error:  # of the library in Rust, which has no class for its errors
        raise ConfigError(f"model.tokenizer: {path} holds no tokenizer; name a folder with Phi's, or {PHI}") from error
    if len(words) != vocabulary.words:
        raise ConfigError(
            f"model.tokenizer: {path} has {len(words)} words, the model {vocabulary.words}; name a folder with Phi's"
        )
    return words
