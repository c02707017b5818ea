"""Precomputed prompt embeddings on disk: in safetensors shards, or in the layout of SRPO."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import safe_files
from ..core.model_spec import EncoderFingerprint, PromptEncoder
from ..core.output_paths import replace_file, write_text_atomically
from ..core.registry import ConfigError
from ..models.restricted_unpickler import load_pickle

STEM = "embeddings"
INDEX = f"{STEM}.json"
CAPTIONS = ("videos2caption.json", "videos2caption2.json")  # SRPO writes the first and reads the second
MADE_BY = "made_by.json"  # the encoder's fingerprint, which SRPO's own files lack
FOLDERS = {
    "prompt_embeds": "prompt_embed",
    "pooled_prompt_embeds": "pooled_prompt_embeds",
}  # SRPO's folders, by our names of the tensors
KEYS = {"prompt_embeds": "prompt_embed_path", "pooled_prompt_embeds": "pooled_prompt_embeds_path"}
EmbeddingsByPrompt = dict[str, dict[str, Tensor]]  # by prompt, then by name


class EmbeddingStore(ABC):
    """Embeddings on disk, by prompt."""

    folder: Path

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def __contains__(self, text: object) -> bool: ...
    @abstractmethod
    def take(self, texts: Sequence[str]) -> EmbeddingsByPrompt:
        """Load the embeddings of some prompts."""

    @abstractmethod
    def add(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Write one row per prompt; all of them, or none if interrupted."""


def fingerprint_file(path: Path, chunks: int = 16, length: int = 65536) -> str:
    """Fingerprint of a file's size and of chunks all over it; training changes weights everywhere."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for chunk in range(chunks):
            file.seek(max(0, (size - length) * chunk // (chunks - 1)))
            digest.update(file.read(length))
    return digest.hexdigest()[:16]


def require_same_encoder(stored: EncoderFingerprint, expected: EncoderFingerprint, folder: Path) -> None:
    """Refuse embeddings of another encoder; compares the entries that both fingerprints have."""
    for name in expected:
        if name in stored and stored[name] != expected[name]:
            raise ConfigError(
                f"model.embeddings: the embeddings in {folder} were made with another {name} ({stored[name]}, "
                f"this model has {expected[name]}); compute the embeddings again with `tastemaker embed`, or use "
                "the model they were made for [TM141]"
            )


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return safe_files.read_json(path)
    except ConfigError as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error!s:.200}); compute the embeddings again with `tastemaker "
            "embed` [TM142]"
        ) from error


def write_json_atomically(path: Path, data: Any) -> None:
    write_text_atomically(path, json.dumps(data, ensure_ascii=False, indent=0))


class ShardedEmbeddingStore(EmbeddingStore):
    """Rows of many prompts a safetensors file, and an index that says which; a file counts once an index names it.

    Several ranks may write at once, each files and an index of its own; all of them are read.
    """

    def __init__(self, folder: Path, made_by: EncoderFingerprint, negatives: Sequence[str] = (), rank: int = 0) -> None:
        self.folder, self.made_by, self.rank = folder, dict(made_by), rank
        self.index = folder / (f"{STEM}-of-{rank}.json" if rank else INDEX)
        self.negatives: list[str] = []
        self.shards: dict[str, list[str]] = {}  # prompts by file, of this rank
        self.others: dict[str, list[str]] = {}
        for path in sorted(folder.glob(f"{STEM}*.json")):
            index = read_json(path)
            if not isinstance(index, dict) or not all(
                isinstance(index.get(key), dict) for key in ("made_by", "shards")
            ):
                raise ConfigError(
                    f"{path} is not an index of embeddings; compute the embeddings in another folder with `tastemaker "
                    "embed` [TM143]"
                )
            require_same_encoder(index["made_by"], made_by, folder)
            self.made_by = {**index["made_by"], **self.made_by}
            self.negatives += index.get("negatives", ())
            wrong = [x for x in index["shards"].items() if Path(x[0]).name != x[0] or not isinstance(x[1], list)]
            if wrong or not isinstance(index.get("negatives", []), list):
                raise ConfigError(
                    f"{path} does not list the prompts of files in its own folder; compute the embeddings again with "
                    "`tastemaker embed` [TM1160]"
                )
            existing = {file: texts for file, texts in index["shards"].items() if os.path.isfile(folder / file)}
            (self.shards if path == self.index else self.others).update(existing)
        self.negatives = list(dict.fromkeys([*self.negatives, *negatives]))

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        files = {**self.others, **self.shards}
        return {text: (file, row) for file, texts in files.items() for row, text in enumerate(texts)}

    @property
    def prompts(self) -> list[str]:
        """All but those that only guidance asks for."""
        return [text for text in self._places if text not in self.negatives]

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, text: object) -> bool:
        return text in self._places

    def take(self, texts: Sequence[str]) -> EmbeddingsByPrompt:
        from safetensors import safe_open

        embeddings: EmbeddingsByPrompt = {}
        for file in dict.fromkeys(self._places[text][0] for text in texts):
            with safe_open(self.folder / file, "pt") as shard:
                names = shard.keys()
                for text in (text for text in texts if self._places[text][0] == file):
                    row = self._places[text][1]
                    embeddings[text] = {name: shard.get_slice(name)[row : row + 1][0] for name in names}
        return embeddings

    def add(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        numbers = [int(Path(file).stem.split("-")[-1]) for file in self.shards]
        name = f"{STEM}-{f'{self.rank}-' if self.rank else ''}{max(numbers, default=-1) + 1:05d}.safetensors"
        with replace_file(self.folder / name) as partial:
            save_file({key: x.contiguous() for key, x in tensors.items()}, partial)
        self.shards[name] = list(texts)
        self.__dict__.pop("_places", None)
        index = {"made_by": self.made_by, "negatives": self.negatives, "shards": self.shards}
        write_json_atomically(self.index, index)


class SRPOEmbeddingStore(EmbeddingStore):
    """The layout that SRPO and DanceGRPO read for FLUX: a list of captions, and three small files per caption."""

    def __init__(self, listed: Path, made_by: EncoderFingerprint) -> None:
        self.listed, self.folder, self.made_by = listed, listed.parent, made_by
        if made_by.get("model", "flux") != "flux":
            raise ConfigError(
                f"model.embeddings: {listed} contains embeddings for FLUX; compute embeddings for this model with "
                "`tastemaker embed` [TM144]"
            )
        self.entries = read_srpo_captions(listed) if listed.is_file() else []
        if (self.folder / MADE_BY).is_file():
            require_same_encoder(read_json(self.folder / MADE_BY), made_by, self.folder)

    @cached_property
    def _entries(self) -> dict[str, Mapping[str, str]]:
        return {entry["caption"]: entry for entry in self.entries}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, text: object) -> bool:
        return text in self._entries

    def take(self, texts: Sequence[str]) -> EmbeddingsByPrompt:
        return {text: {name: self._tensor(self._entries[text], name) for name in FOLDERS} for text in texts}

    def _tensor(self, entry: Mapping[str, str], name: str) -> Tensor:
        path = self.folder / FOLDERS[name] / entry[KEYS[name]]
        x = load_pickle(path)
        dimensions = 2 if name == "prompt_embeds" else 1
        if not isinstance(x, Tensor) or x.dim() < dimensions or x.shape[-dimensions:].numel() != x.numel():
            raise ConfigError(
                f"{path} is not the embedding of one prompt; compute the embedding again with `tastemaker embed` "
                "[TM145]"
            )
        x = x.view(x.shape[-dimensions:])
        length = self.made_by.get("max_text_tokens")
        if name == "prompt_embeds" and length not in (None, str(len(x))):
            raise ConfigError(
                f"{path} has {len(x)} tokens, but the model uses {length}; set model.max_text_tokens={len(x)} [TM146]"
            )
        return x

    def add(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        for folder in (*FOLDERS.values(), "text_ids"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        first, new = len(self.entries), []
        for row, text in enumerate(texts):
            file = f"{first + row}.pt"
            for name, folder in FOLDERS.items():
                torch.save(tensors[name][row].clone(), self.folder / folder / file)
            torch.save(torch.zeros(3, dtype=tensors["prompt_embeds"].dtype), self.folder / "text_ids" / file)
            new.append({**dict.fromkeys((*KEYS.values(), "text_ids"), file), "caption": text})
        self.entries += new
        self.__dict__.pop("_entries", None)
        write_json_atomically(self.folder / MADE_BY, dict(self.made_by))
        write_json_atomically(self.listed, self.entries)


def read_srpo_captions(listed: Path) -> list[dict[str, str]]:
    """The entries of SRPO's list of captions."""
    entries, keys = read_json(listed), ("caption", *KEYS.values())
    valid = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not valid or not all(isinstance(entry.get(key), str) for entry in entries for key in keys):
        raise ConfigError(
            f"{listed} is not a list of captions; write a JSON list of objects with the keys {', '.join(keys)} [TM147]"
        )
    return list(entries)


def open_embedding_store(path: Path, made_by: EncoderFingerprint) -> EmbeddingStore:
    """The store in a folder, or of an index or list of captions; refuses embeddings of another encoder."""
    if path.is_file() and path.name != INDEX:
        return SRPOEmbeddingStore(path, made_by)
    folder = path.parent if path.is_file() else path
    if (folder / INDEX).is_file():
        return ShardedEmbeddingStore(folder, made_by)
    for name in CAPTIONS:
        if (folder / name).is_file():
            return SRPOEmbeddingStore(folder / name, made_by)
    raise ConfigError(
        f"model.embeddings: {folder} does not contain {INDEX} or {CAPTIONS[0]}; write embeddings into this folder "
        "with `tastemaker embed` [TM148]"
    )


def list_embedded_prompts(path: Path) -> list[str]:
    """The prompts of our index, of SRPO's list, or of a JSON list of prompts; without negative prompts."""
    content = None if path.name == INDEX else read_json(path)
    if content is None:
        prompts = ShardedEmbeddingStore(path.parent, {}).prompts
    elif isinstance(content, list) and all(isinstance(text, str) for text in content):
        prompts = content  # the layout of HPDv2's test prompts
    else:
        prompts = [entry["caption"] for entry in read_srpo_captions(path)]
    if not prompts:
        raise ConfigError(f"{path} does not list any prompts; add prompts with `tastemaker embed` [TM149]")
    return prompts


def fill_embedding_store(
    store: EmbeddingStore, encoder: PromptEncoder, prompts: Sequence[str], shard_bytes: int, batch_size: int
) -> Iterator[int]:
    """Embed the prompts that the store lacks, in shards of at most `shard_bytes`; yields the prompts of each shard."""
    missing = [text for text in dict.fromkeys(prompts) if text not in store]
    while missing:
        rows = {name: [x.cpu()] for name, x in encoder(missing[:1]).items()}
        shard = missing[: max(1, shard_bytes // sum(x[0].nbytes for x in rows.values()))]
        for first in range(1, len(shard), batch_size):
            for name, x in encoder(shard[first : min(first + batch_size, len(shard))]).items():
                rows[name].append(x.cpu())
        store.add(shard, {name: torch.cat(parts) for name, parts in rows.items()})
        missing = missing[len(shard) :]
        yield len(shard)
