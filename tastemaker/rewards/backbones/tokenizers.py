"""Texts as token ids, by the tokenizer that lies beside the weights or one that is named."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

from torch import Tensor, device

from ...core.registry import ConfigError
from ...models.pretrained import WeightsSource, find_weights

CLIP_TOKENIZER = WeightsSource("openai/clip-vit-large-patch14", "tokenizer.json", "2.2 MB", "MIT")
BERT_TOKENIZER = WeightsSource("google-bert/bert-base-uncased", "tokenizer.json", "0.5 MB", "Apache-2.0")
FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
TokenizerKind = Literal["clip", "bert", "any"]
CURLED = dict.fromkeys(map(ord, "\u02bc\u2018\u2019\u201a\u201b"), "'") | dict.fromkeys(range(0x201C, 0x2020), '"')
WIDE = {
    code: unicodedata.normalize("NFKC", chr(code)) for code in (0x3000, *range(0xFB00, 0xFB07), *range(0xFF01, 0xFFF0))
}


@dataclass(frozen=True)
class FixedLengthTokenizer:
    """A tokenizer, and the one length that all texts are cut and filled to, so that no text depends on its company."""

    tokenizer: Any
    length: int
    masked: bool = True  # networks trained to read their padding get no mask
    mended: bool = False  # texts of the web are put right first, as open_clip does

    def __call__(self, texts: Sequence[str], where: device) -> dict[str, Tensor]:
        texts = [fix_text(text) if self.mended else text for text in texts]
        ids = self.tokenizer(texts, padding="max_length", truncation=True, max_length=self.length, return_tensors="pt")
        kept = ("input_ids", "attention_mask") if self.masked else ("input_ids",)
        return {name: ids[name].to(where) for name in kept}


def fix_text(text: str) -> str:
    """Entities, curled quotes, ligatures and wide letters as plain ones: of what ftfy mends, what prompts have."""
    return html.unescape(html.unescape(text.translate(CURLED | WIDE)))


def load_tokenizer(name: str | None, beside: Path, kind: TokenizerKind, source: WeightsSource, known: int) -> Any:
    """The tokenizer of that name, else the one beside the weights, else the usual one; `known` words at most."""
    from transformers import AutoTokenizer, BertTokenizer, CLIPTokenizer

    folder = beside if beside.is_dir() else beside.parent
    if name is not None or not _complete(folder):
        path = find_weights(source.hub if name is None else name, source)
        folder = path if path.is_dir() else path.parent
    if not _complete(folder):
        raise ConfigError(f"{folder} holds no tokenizer; expected one of {', '.join(FILES)}, or another `tokenizer`")
    reader: Any = {"clip": CLIPTokenizer, "bert": BertTokenizer, "any": AutoTokenizer}[kind]
    try:
        found = reader.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"the tokenizer in {folder} cannot be read ({reason:.200}); fetch it again") from error
    if len(found) > known:
        raise ConfigError(f"the tokenizer in {folder} has {len(found)} words, and the network {known}; name its own")
    return found


def _complete(folder: Path) -> bool:
    return any((folder / file).is_file() for file in FILES)


def tiny_clip_tokenizer() -> Any:
    """A CLIP tokenizer that knows no words but single bytes, for tests."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    signs = sorted(ByteLevel.alphabet())
    known = [*signs, *(f"{sign}</w>" for sign in signs), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({sign: place for place, sign in enumerate(known)}, [])


def tiny_bert_tokenizer() -> Any:
    """A BERT tokenizer that knows no words but single letters, for tests."""
    from transformers import BertTokenizer

    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ascii_lowercase, *(f"##{sign}" for sign in ascii_lowercase)]
    return BertTokenizer({sign: place for place, sign in enumerate(known)})
