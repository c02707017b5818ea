"""Frozen text encoders with their tokenizers, and a cache of prompt embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement, Prompts
from ..data.embedding_store import EmbeddingsByPrompt, EncoderFingerprint, open_embedding_store

MAX_CACHED_PROMPTS = 1024  # prompts remembered; one of FLUX takes 4 MB of the host's memory
ENCODE_BATCH_SIZE = 16  # prompts read in one call
EncodePrompts = Callable[[list[str]], Mapping[str, Tensor]]


def disable_autocast(x: Tensor) -> torch.autocast:
    """Disable autocast, so that a frozen network computes in its own dtype."""
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class ByteTokenizer:
    """A byte-level tokenizer without files, for random networks: the last id is EOS, 0 is padding."""

    vocabulary: int

    def __call__(
        self, texts: Sequence[str], padding: str, max_length: int, truncation: bool, return_tensors: str
    ) -> dict[str, Tensor]:
        """Called as those of transformers are, though it always cuts and fills up."""
        ids = torch.zeros(len(texts), max_length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            said = [1 + letter % (self.vocabulary - 2) for letter in text.encode()][: max_length - 1]
            ids[row, : len(said) + 1] = torch.tensor([*said, self.vocabulary - 1])
            mask[row, : len(said) + 1] = 1
        return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def temporarily_on_device(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a frozen CPU network to a device for the duration of the block, without copying it back."""
    held = {tensor: tensor.data for tensor in (*net.parameters(), *net.buffers()) if tensor.device != device}
    try:
        for tensor, host in held.items():
            tensor.data = host.to(device)
        yield
    finally:
        for tensor, host in held.items():
            tensor.data = host


@dataclass(frozen=True)
class TextEncoder:
    """A frozen text encoder with its tokenizer, kept on the CPU; prompts are padded to `length` tokens."""

    net: Any
    tokenizer: Any
    length: int
    device: torch.device
    part: str = "text_encoder"  # as the folder it came from calls it

    def tokens(self, prompts: Prompts) -> dict[str, Tensor]:
        """The ids and which of them are no filling: [B, length] each."""
        told = self.tokenizer(
            list(prompts), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        )
        return {name: told[name].to(self.device) for name in ("input_ids", "attention_mask")}

    def __call__(self, prompts: Prompts, *, masked: bool = False, layers: bool = False) -> Any:
        """The output as transformers names its parts; `layers` adds hidden_states, `masked` hides the filling."""
        told = self.tokens(prompts)
        mask = told["attention_mask"] if masked else None
        with disable_autocast(told["input_ids"]), temporarily_on_device(self.net, self.device):
            return self.net(input_ids=told["input_ids"], attention_mask=mask, output_hidden_states=layers)


class CachedTextEncoder:
    """Prompt embeddings by name, from precomputed files or an LRU cache over the text encoders.

    They wait on the host. With a shelf, the encoders are not loaded before a prompt is asked for that is not on it.
    """

    def __init__(
        self,
        load: Callable[[], EncodePrompts],
        placement: Placement,
        made_by: EncoderFingerprint,
        embeddings: Path | None,
    ) -> None:
        self.placement, self.made_by, self.most = placement, made_by, MAX_CACHED_PROMPTS
        self.shelf = None if embeddings is None else open_embedding_store(embeddings, made_by)
        self._load = load
        self._loaded = load() if self.shelf is None else None
        self._held: dict[str, dict[str, Tensor]] = {}  # the latest last
        self.taught = False

    @property
    def read(self) -> Any:
        """Those who read prompts."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def teach(self) -> dict[str, nn.Module]:
        """Make the text encoders trainable: move them to the device, stop caching, and return them by name."""
        self.taught, parts = True, vars(self._encoders("")).values()
        readers = [reader for part in parts for reader in (part if isinstance(part, list | tuple) else (part,))]
        return {each.part: each.net.to(each.device) for each in readers if isinstance(each, TextEncoder)}

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        """One row a prompt: [B, ...] by name."""
        if self.taught:
            texts = list(dict.fromkeys(prompts))
            which = torch.tensor([texts.index(prompt) for prompt in prompts], device=self.placement.device)
            return {name: x.to(self.placement.device)[which] for name, x in self.read(texts).items()}
        rows = {text: self._held.pop(text) for text in dict.fromkeys(prompts) if text in self._held}
        rows |= self._ready([text for text in dict.fromkeys(prompts) if text not in rows])
        new = [text for text in dict.fromkeys(prompts) if text not in rows]
        for first in range(0, len(new), ENCODE_BATCH_SIZE):
            rows |= self._fresh(new[first : first + ENCODE_BATCH_SIZE])
        self._held |= rows
        while len(self._held) > self.most:
            self._held.pop(next(iter(self._held)))
        where = self.placement.device
        return {name: torch.stack([rows[text][name] for text in prompts]).to(where) for name in rows[prompts[0]]}

    def _ready(self, texts: list[str]) -> EmbeddingsByPrompt:
        """What is on the shelf, in the precision the encoders would have computed in."""
        if self.shelf is None:
            return {}
        with torch.inference_mode(False):
            found = self.shelf.take([text for text in texts if text in self.shelf])
        dtype = self.placement.dtype
        return {
            text: {name: x.to(dtype) if x.is_floating_point() else x for name, x in row.items()}
            for text, row in found.items()
        }

    def _fresh(self, texts: list[str]) -> EmbeddingsByPrompt:
        # Kept beyond this call, so neither its graph nor the marks of inference mode may stick to them.
        with torch.inference_mode(False), torch.no_grad():
            told = {name: x.cpu() for name, x in self._encoders(texts[0])(texts).items()}
            return {text: {name: x[row].clone() for name, x in told.items()} for row, text in enumerate(texts)}

    def _encoders(self, text: str) -> EncodePrompts:
        try:
            read: EncodePrompts = self.read
        except ConfigError as error:
            if self.shelf is None:
                raise
            raise ConfigError(
                f"the prompt '{text:.60}' is not among the {len(self.shelf)} in {self.shelf.folder}, and no text "
                f"encoder can be loaded for it ({error}); add it with `tastemaker embed`"
            ) from error
        return read
