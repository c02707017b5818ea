"""Embeddings of prompts computed beforehand: folders of them, in shards of safetensors or in the layout of SRPO."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement, Prompts
from ..models.pretrained import load_pickle_safely

STEM = "embeddings"
INDEX = f"{STEM}.json"
CAPTIONS = ("videos2caption.json", "videos2caption2.json")  # SRPO writes the first and reads the second
MADE_BY = "made_by.json"  # beside SRPO's own files, which do not say what made them
FOLDERS = {"words": "prompt_embed", "pooled": "pooled_prompt_embeds"}  # SRPO's, by our names of the tensors
KEYS = {"words": "prompt_embed_path", "pooled": "pooled_prompt_embeds_path"}
EmbeddingsByPrompt = dict[str, dict[str, Tensor]]  # by prompt, then by name
EncoderFingerprint = Mapping[
    str, str
]  # what embeddings depend on: the kind of model, its settings, and digests of its encoders


class PromptEncoder(Protocol):
    """Embeds prompts: tensors by name, one row a prompt."""

    most: int  # prompts remembered

    @property
    def made_by(self) -> EncoderFingerprint: ...
    def __call__(self, prompts: Prompts) -> dict[str, Tensor]: ...


@runtime_checkable
class SupportsPromptEmbeddings(Protocol):
    """A model whose prompts can be embedded beforehand, by its text encoders alone."""

    def texts(self, placement: Placement) -> PromptEncoder: ...


class EmbeddingStore(Protocol):
    """Embeddings that are on the disk."""

    folder: Path

    def __len__(self) -> int: ...
    def __contains__(self, text: object) -> bool: ...
    def take(self, texts: Sequence[str]) -> EmbeddingsByPrompt: ...
    def add(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Keep one row a text; all of them, or none if interrupted."""


def fingerprint_file(path: Path, places: int = 16, length: int = 65536) -> str:
    """Of a file's size and of bytes all over it; weights that were trained differ everywhere."""
    size = path.stat().st_size
    told = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for place in range(places):
            file.seek(max(0, (size - length) * place // (places - 1)))
            told.update(file.read(length))
    return told.hexdigest()[:16]


def require_same_encoder(found: EncoderFingerprint, wanted: EncoderFingerprint, folder: Path) -> None:
    """Refuse embeddings made by another; what one of both does not know is not compared."""
    for name in wanted:
        if name in found and found[name] != wanted[name]:
            raise ConfigError(
                f"the embeddings in {folder} were made with another {name} ({found[name]}, this model has "
                f"{wanted[name]}); make them anew with `tastemaker embed`, or name the model they are of"
            )


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error!s:.200}); write the folder anew") from error


def write_json_atomically(path: Path, data: Any) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(data, ensure_ascii=False, indent=0), encoding="utf-8")
    partial.replace(path)


class ShardedEmbeddingStore:
    """Rows of many prompts a safetensors file, and an index that says which; a file counts once an index names it.

    Several ranks may write at once, each files and an index of its own; all of them are read.
    """

    def __init__(self, folder: Path, made_by: EncoderFingerprint, negatives: Sequence[str] = (), rank: int = 0) -> None:
        self.folder, self.made_by, self.rank = folder, dict(made_by), rank
        self.index = folder / (f"{STEM}-of-{rank}.json" if rank else INDEX)
        self.negatives: list[str] = []
        self.shards: dict[str, list[str]] = {}  # our own
        self.others: dict[str, list[str]] = {}
        for path in sorted(folder.glob(f"{STEM}*.json")):
            told = read_shard_index(path)
            require_same_encoder(told["made_by"], made_by, folder)
            self.made_by = {**told["made_by"], **self.made_by}
            self.negatives += told.get("negatives", ())
            there = {file: rows for file, rows in told["shards"].items() if (folder / file).is_file()}
            (self.shards if path == self.index else self.others).update(there)
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

        found: EmbeddingsByPrompt = {}
        for file in dict.fromkeys(self._places[text][0] for text in texts):
            with safe_open(self.folder / file, "pt") as shard:
                names = shard.keys()
                for text in (text for text in texts if self._places[text][0] == file):
                    row = self._places[text][1]
                    found[text] = {name: shard.get_slice(name)[row : row + 1][0] for name in names}
        return found

    def add(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(Path(file).stem.split("-")[-1]) for file in self.shards]
        name = f"{STEM}-{f'{self.rank}-' if self.rank else ''}{max(numbers, default=-1) + 1:05d}.safetensors"
        partial = self.folder / f"{name}.partial"
        save_file({key: x.contiguous() for key, x in tensors.items()}, partial)
        partial.replace(self.folder / name)
        self.shards[name] = list(texts)
        self.__dict__.pop("_places", None)
        index = {"made_by": self.made_by, "negatives": self.negatives, "shards": self.shards}
        write_json_atomically(self.index, index)


def read_shard_index(path: Path) -> dict[str, Any]:
    """What an index of shards says."""
    told = read_json(path)
    if not isinstance(told, dict) or not all(isinstance(told.get(key), dict) for key in ("made_by", "shards")):
        raise ConfigError(f"{path} is no index of embeddings; make them anew in another folder")
    return told


class SRPOEmbeddingStore:
    """The layout SRPO and DanceGRPO train FLUX from: a list of captions, and three small files for each of them."""

    def __init__(self, listed: Path, made_by: EncoderFingerprint) -> None:
        self.listed, self.folder, self.made_by = listed, listed.parent, made_by
        if made_by.get("model", "flux") != "flux":
            raise ConfigError(f"{listed} is of embeddings of FLUX; make those of this model with `tastemaker embed`")
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
        x = load_pickle_safely(path)
        dimensions = 2 if name == "words" else 1
        if not isinstance(x, Tensor) or x.dim() < dimensions or x.shape[-dimensions:].numel() != x.numel():
            raise ConfigError(f"{path} is not the embedding of one prompt; make it anew with `tastemaker embed`")
        x = x.view(x.shape[-dimensions:])
        length = self.made_by.get("words")
        if name == "words" and length not in (None, str(len(x))):
            raise ConfigError(f"{path} holds {len(x)} words, and the model reads {length}; set model.words={len(x)}")
        return x

    def add(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        for folder in (*FOLDERS.values(), "text_ids"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        first, new = len(self.entries), []
        for row, text in enumerate(texts):
            file = f"{first + row}.pt"
            for name, folder in FOLDERS.items():
                torch.save(tensors[name][row].clone(), self.folder / folder / file)
            torch.save(torch.zeros(3, dtype=tensors["words"].dtype), self.folder / "text_ids" / file)
            new.append({**dict.fromkeys((*KEYS.values(), "text_ids"), file), "caption": text})
        self.entries += new
        self.__dict__.pop("_entries", None)
        write_json_atomically(self.folder / MADE_BY, dict(self.made_by))
        write_json_atomically(self.listed, self.entries)


def read_srpo_captions(listed: Path) -> list[dict[str, str]]:
    """The entries of SRPO's list."""
    told = read_json(listed)
    asked = ("caption", *KEYS.values())
    right = isinstance(told, list) and all(isinstance(entry, dict) for entry in told)
    if not right or not all(isinstance(entry.get(key), str) for entry in told for key in asked):
        raise ConfigError(f"{listed} is no list of captions; expected objects with {', '.join(asked)}")
    return list(told)


def open_embedding_store(place: Path, made_by: EncoderFingerprint) -> EmbeddingStore:
    """The embeddings in a folder, or beside the list that is named, if they are of this model."""
    if place.is_file() and place.name != INDEX:
        return SRPOEmbeddingStore(place, made_by)
    folder = place.parent if place.is_file() else place
    if (folder / INDEX).is_file():
        return ShardedEmbeddingStore(folder, made_by)
    for name in CAPTIONS:
        if (folder / name).is_file():
            return SRPOEmbeddingStore(folder / name, made_by)
    raise ConfigError(
        f"there are no embeddings in {folder}; expected {INDEX} or {CAPTIONS[0]}, which `tastemaker embed` writes"
    )


def list_embedded_prompts(place: Path) -> list[str]:
    """The prompts of an index or of a list, SRPO's or a bare one, without those that only guidance asks for."""
    told = None if place.name == INDEX else read_json(place)
    if told is None:
        found = ShardedEmbeddingStore(place.parent, {}).prompts
    elif isinstance(told, list) and all(isinstance(text, str) for text in told):
        found = told  # as the test prompts of HPDv2 come
    else:
        found = [entry["caption"] for entry in read_srpo_captions(place)]
    if not found:
        raise ConfigError(f"{place} lists no prompts; write some with `tastemaker embed`")
    return found


def fill_embedding_store(
    target: EmbeddingStore, texts: PromptEncoder, wanted: Sequence[str], size: int, at_once: int
) -> Iterator[int]:
    """Embed what the shelf lacks, in pieces of at most `size` bytes; tells how many prompts each piece added."""
    left = [text for text in dict.fromkeys(wanted) if text not in target]
    while left:
        rows = {name: [x.cpu()] for name, x in texts(left[:1]).items()}
        piece = left[: max(1, size // sum(x[0].nbytes for x in rows.values()))]
        for first in range(1, len(piece), at_once):
            for name, x in texts(piece[first : min(first + at_once, len(piece))]).items():
                rows[name].append(x.cpu())
        target.add(piece, {name: torch.cat(parts) for name, parts in rows.items()})
        left = left[len(piece) :]
        yield len(piece)
