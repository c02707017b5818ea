"""Tokenizers of text encoders: the one beside the weights, one by name, or tiny ones for tests."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.registry import ConfigError
from ...models.pretrained import WeightsSource, find_weights

CLIP_TOKENIZER = WeightsSource("openai/clip-vit-large-patch14", "tokenizer.json", "2.2 MB", "MIT")
BERT_TOKENIZER = WeightsSource("google-bert/bert-base-uncased", "tokenizer.json", "0.5 MB", "Apache-2.0")
FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
TokenizerKind = Literal["clip", "bert", "any"]
QUOTES = dict.fromkeys(map(ord, "\u02bc\u2018\u2019\u201a\u201b"), "'") | dict.fromkeys(range(0x201C, 0x2020), '"')
FULL_WIDTH = {
    code: unicodedata.normalize("NFKC", chr(code)) for code in (0x3000, *range(0xFB00, 0xFB07), *range(0xFF01, 0xFFF0))
}


@dataclass(frozen=True)
class FixedLengthTokenizer:
    """Tokenize every text to the same length, so that its features do not depend on the other texts of a batch."""

    tokenizer: Any
    max_length: int
    attention_mask: bool = True  # networks that were trained on their padding get no mask
    clean_text: bool = False  # as open_clip does

    def __call__(self, texts: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        texts = [fix_text(text) if self.clean_text else text for text in texts]
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        names = ("input_ids", "attention_mask") if self.attention_mask else ("input_ids",)
        return {name: tokens[name].to(device) for name in names}


def fix_text(text: str) -> str:
    """Replace HTML entities, curly quotes, ligatures and full-width letters: the part of ftfy that prompts need."""
    return html.unescape(html.unescape(text.translate(QUOTES | FULL_WIDTH)))


def load_tokenizer(name: str | None, weights: Path, kind: TokenizerKind, source: WeightsSource, vocab_size: int) -> Any:
    """The tokenizer `name`, else the one beside the weights, else that of `source`; refuses too many tokens."""
    from transformers import AutoTokenizer, BertTokenizer, CLIPTokenizer

    folder = weights if weights.is_dir() else weights.parent
    if name is not None or not has_tokenizer(folder):
        path = find_weights(source.hub if name is None else name, source)
        folder = path if path.is_dir() else path.parent
    if not has_tokenizer(folder) and has_tokenizer(folder / "tokenizer"):  # of a pipeline, such as FLUX
        folder = folder / "tokenizer"
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} holds no tokenizer; expected one of {', '.join(FILES)}; add the files, or set `tokenizer` "
            "to another folder [TM371]"
        )
    tokenizer_class: Any = {"clip": CLIPTokenizer, "bert": BertTokenizer, "any": AutoTokenizer}[kind]
    try:
        tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read ({reason:.200}); download it again [TM372]"
        ) from error
    # The last token of CLIP ends a text, and the network pools its features there.
    if len(tokenizer) > vocab_size or (kind == "clip" and len(tokenizer) != vocab_size):
        raise ConfigError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, but the network has {vocab_size}; use the "
            "tokenizer of this network [TM373]"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / file).is_file() for file in FILES)


def tiny_clip_tokenizer() -> Any:
    """A CLIP tokenizer of single bytes, for tests."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    characters = sorted(ByteLevel.alphabet())
    vocabulary = [*characters, *(f"{x}</w>" for x in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({token: number for number, token in enumerate(vocabulary)}, [])


def tiny_bert_tokenizer() -> Any:
    """A BERT tokenizer of single letters, for tests."""
    from transformers import BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    return BertTokenizer({token: number for number, token in enumerate(vocabulary)})


def omit_tokenizer(
    sources: Sequence[WeightsSource], source: WeightsSource, tokenizer: str | None, weights: str
) -> tuple[WeightsSource, ...]:
    """The sources without that of the tokenizer, if a setting names another one or one lies beside the weights."""
    path = Path(weights).expanduser()
    beside = path.exists() and has_tokenizer(path if path.is_dir() else path.parent)
    return tuple(each for each in sources if each != source or not (tokenizer or beside))
