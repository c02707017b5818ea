"""Tokenizers from sentencepiece files alone, without the package sentencepiece: T5's and LLaMA's."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from ..core.safe_files import read_bytes, read_json_object
from .protobuf_reader import chunks, messages, read_fields, text

SPIECE_FILE, TOKENIZER_FILE = "spiece.model", "tokenizer.json"
T5_SPECIAL_PIECES = ["<pad>", "</s>", "<unk>"]  # ids 0, 1 and 2
UNIGRAM, BPE = 1, 2  # of the trainer's model types
SPACE = "\u2581"  # how sentencepiece writes a space
DEFAULT_EXTRA_IDS = 100  # sentinels that T5 adds after the pieces of the file


def needs_conversion(folder: Path) -> bool:
    """Whether a folder holds a sentencepiece file and no converted tokenizer."""
    return (folder / SPIECE_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file()


def load_t5_tokenizer(folder: Path) -> Any:
    """T5's tokenizer of a folder's spiece.model, the same as that of its tokenizer.json."""
    from transformers import T5Tokenizer

    path = folder / SPIECE_FILE
    pieces, model_type, charsmap = read_sentencepiece(path)
    if [piece for piece, _ in pieces[:3]] != T5_SPECIAL_PIECES or model_type != UNIGRAM:
        raise ConfigError(
            f"{path} is no tokenizer of T5; put the {TOKENIZER_FILE} of the same model beside it, or run "
            "`pip install sentencepiece` and convert it with transformers"
            " [TM888]"
        )
    extra_ids = _extra_ids(folder)
    sentinels = [(f"<extra_id_{i}>", 0.0) for i in range(extra_ids - 1, -1, -1)]
    tokenizer_class: Any = T5Tokenizer
    return tokenizer_class(vocab=[*pieces, *sentinels], _spm_precompiled_charsmap=charsmap or None, extra_ids=extra_ids)


def read_sentencepiece(path: Path) -> tuple[list[tuple[str, float]], int | memoryview, bytes]:
    """The pieces of a sentencepiece file with their scores, the type of its model, and its map of characters."""
    try:
        model = read_fields(memoryview(read_bytes(path)))
        pieces = [(text(piece, 1), struct.unpack("<f", next(chunks(piece, 2)))[0]) for piece in messages(model, 1)]
        model_type = next((trainer.get(3, [UNIGRAM])[-1] for trainer in messages(model, 2)), UNIGRAM)
        charsmap = next((bytes(x) for normalizer in messages(model, 3) for x in chunks(normalizer, 2)), b"")
    except (OSError, IndexError, KeyError, StopIteration, ValueError, struct.error) as error:
        raise ConfigError(
            f"{path} is not a readable sentencepiece file ({error!r:.100}); fetch it again [TM887]"
        ) from error
    return pieces, model_type, charsmap


def _extra_ids(folder: Path) -> int:
    """The number of sentinels in tokenizer_config.json, or T5's."""
    path = folder / "tokenizer_config.json"
    try:
        settings = read_json_object(path) if path.is_file() else {}
        return int(settings.get("extra_ids", DEFAULT_EXTRA_IDS))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); fetch it again [TM889]") from error


class SentencepieceBpe:
    """A byte-pair tokenizer of sentencepiece with byte fallback, such as LLaMA's `tokenizer.model`, for plain texts.

    A text gets a space in front and no special tokens. Symbols are merged into the known piece with the highest score,
    the leftmost one first, until no pair of neighbors is a piece.
    """

    def __init__(self, pieces: list[tuple[str, float]]) -> None:
        self._ids = {piece: number for number, (piece, _) in enumerate(pieces)}
        self._scores = dict(pieces)

    @classmethod
    def read(cls, path: Path) -> SentencepieceBpe:
        """The tokenizer of a file; refuses one of another type."""
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; download the whole folder of the weights [TM2304]")
        pieces, model_type, _ = read_sentencepiece(path)
        if model_type != BPE:
            raise ConfigError(
                f"{path} is no byte-pair tokenizer of sentencepiece, as LLaMA's is; download it again [TM2305]"
            )
        return cls(pieces)

    def __len__(self) -> int:
        return len(self._ids)

    def id_of(self, piece: str) -> int:
        return self._ids[piece]

    def encode(self, text: str) -> list[int]:
        """Ids of the tokens of a text."""
        symbols = list(SPACE + text.replace(" ", SPACE))
        while True:
            pairs = [left + right for left, right in pairwise(symbols)]
            known = [(self._scores[pair], -i) for i, pair in enumerate(pairs) if pair in self._scores]
            if not known:
                break
            place = -max(known)[1]
            symbols[place : place + 2] = [pairs[place]]
        return [number for symbol in symbols for number in self._symbol_ids(symbol)]

    def _symbol_ids(self, symbol: str) -> list[int]:
        """The id of a piece, or those of its bytes if it is none."""
        if symbol in self._ids:
            return [self._ids[symbol]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
