"""T5's tokenizer from `spiece.model` alone, as PixArt and Open-Sora publish it, without the package sentencepiece."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from ..core.registry import ConfigError
from ..core.safe_files import read_bytes, read_json_object
from .protobuf_reader import chunks, messages, read_fields, text

SPIECE_FILE, TOKENIZER_FILE = "spiece.model", "tokenizer.json"
T5_SPECIAL_PIECES = ["<pad>", "</s>", "<unk>"]  # ids 0, 1 and 2
UNIGRAM = 1  # of the trainer's model types
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
