"""Prompts as Show-o reads them: marked, cut, and filled up on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pretrained import Source, locate
from ..registry import ConfigError
from ..types import Prompts
from .nets.showo import Vocabulary

PHI = Source("microsoft/phi-1_5", "tokenizer.json", "2 MB", "MIT")
LETTERS = "letters"  # a tokenizer without files, for random networks
Tokenizer = Callable[[str], list[int]]
Speller = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Prompter:
    """Texts as rows of ids, `length` each, the mark of what to do and the ends of the text among them."""

    vocabulary: Vocabulary
    tokenizer: Tokenizer
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


def tokenizer(name: str, vocabulary: Vocabulary) -> Tokenizer:
    """Phi's, of a file or folder or as fetched of the hub; or the letters themselves."""
    if name == LETTERS:
        return lambda text: [letter % (vocabulary.words - 1) for letter in text.encode()]
    words = _phi(name, vocabulary)
    return lambda text: list(words(text)["input_ids"])


def speller(name: str, vocabulary: Vocabulary) -> Speller:
    """The way back, from ids to what they spell."""
    if name == LETTERS:
        return lambda ids: "".join(chr(32 + number % 95) for number in ids)
    words = _phi(name, vocabulary)
    return lambda ids: str(words.decode(list(ids), skip_special_tokens=True)).strip()


def _phi(name: str, vocabulary: Vocabulary) -> Any:
    from transformers import PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast
    path = locate(name, PHI)
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
