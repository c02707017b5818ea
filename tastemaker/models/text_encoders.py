"""Frozen text encoders with their tokenizers, and the cache of prompt embeddings in front of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.model_spec import EncoderFingerprint
from ..core.registry import ConfigError
from ..core.types import Metadata, Placement, Prompts
from ..data.embedding_store import EmbeddingsByPrompt, open_embedding_store
from .sequential_offload import temporarily_on_device

MAX_CACHED_PROMPTS = 1024  # one prompt of FLUX takes 4 MB of CPU memory
ENCODE_BATCH_SIZE = 16  # prompts per call of the text encoders


def disable_autocast(x: Tensor) -> torch.autocast:
    """Disable autocast on the device of `x`, so that a frozen network computes in its own dtype."""
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class ByteTokenizer:
    """A byte-level tokenizer without files, for random networks: the last id is EOS, 0 is padding."""

    vocab_size: int

    def __call__(
        self, texts: Sequence[str], padding: str, max_length: int, truncation: bool, return_tensors: str
    ) -> dict[str, Tensor]:
        """Tokenize with the signature of transformers; truncation and padding to `max_length` are always on."""
        ids = torch.zeros(len(texts), max_length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            tokens = [1 + byte % (self.vocab_size - 2) for byte in text.encode()][: max_length - 1]
            ids[row, : len(tokens) + 1] = torch.tensor([*tokens, self.vocab_size - 1])
            mask[row, : len(tokens) + 1] = 1
        return {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class TextEncoder:
    """A frozen transformers text encoder with its tokenizer; prompts are truncated or padded to `max_length` tokens.

    The network stays on the CPU and is moved to `device` for each call, layer by layer: beside a network in training
    there is seldom room.
    """

    net: Any
    tokenizer: Any
    max_length: int
    device: torch.device
    component: str = "text_encoder"  # folder of the pipeline that it comes from

    def tokenize(self, prompts: Prompts) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, [B, max_length] each."""
        tokens = self.tokenizer(
            list(prompts), padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        )
        return {name: tokens[name].to(self.device) for name in ("input_ids", "attention_mask")}

    def __call__(
        self, prompts: Prompts, *, use_attention_mask: bool = False, output_hidden_states: bool = False
    ) -> Any:
        """Return the output object of transformers; without the mask, padding is attended to like any token."""
        tokens = self.tokenize(prompts)
        mask = tokens["attention_mask"] if use_attention_mask else None
        with disable_autocast(tokens["input_ids"]), temporarily_on_device(self.net, self.device):
            return self.net(
                input_ids=tokens["input_ids"], attention_mask=mask, output_hidden_states=output_hidden_states
            )


class TextEncoders(ABC):
    """The text encoders of one generator, and how their outputs become its conditioning tensors."""

    text_encoders: tuple[TextEncoder, ...]  # in the order in which LoRA adapts them

    @abstractmethod
    def __call__(self, prompts: list[str]) -> Mapping[str, Tensor]:
        """Embed prompts: tensors by name, one row per prompt."""


class CachedTextEncoder:
    """Prompt embeddings by name, from precomputed files or an LRU cache over the text encoders.

    Embeddings are cached on the CPU. With precomputed files, the text encoders are loaded when the first prompt is
    requested that is not among them. Once the encoders train, nothing is cached.
    """

    def __init__(
        self,
        load: Callable[[], TextEncoders],
        placement: Placement,
        fingerprint: EncoderFingerprint,
        embeddings: Path | None,
        negative_mark: str = "",
    ) -> None:
        self.placement, self.fingerprint, self.max_cached_prompts = placement, fingerprint, MAX_CACHED_PROMPTS
        self.negative_mark = negative_mark  # before the keys of negative prompts, if they are encoded differently
        self.store = None if embeddings is None else open_embedding_store(embeddings, fingerprint)
        self._load = load
        self._loaded = load() if self.store is None else None
        self._cache: dict[str, dict[str, Tensor]] = {}  # least recently used first
        self.trainable = False

    @property
    def encoders(self) -> TextEncoders:
        """The text encoders, loaded at first use."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def enable_training(self) -> dict[str, nn.Module]:
        """Move the text encoders to the device, stop caching, and return the networks by component name."""
        self.trainable = True
        return {each.component: each.net.to(each.device) for each in self._encoders_for("").text_encoders}

    def keys(self, prompts: Prompts, metadata: Sequence[Metadata] = (), *, negative: bool = False) -> list[str]:
        """Return the texts under which embeddings are kept: the prompts, with what else the encoders read of them."""
        return [self.negative_mark + prompt for prompt in prompts] if negative else list(prompts)

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        """Embed prompts, given by their keys: [B, ...] by name, on the device of the run."""
        device, unique = self.placement.device, list(dict.fromkeys(prompts))
        if self.trainable:
            rows = torch.tensor([unique.index(prompt) for prompt in prompts], device=device)
            return {name: x.to(device)[rows] for name, x in self.encoders(unique).items()}
        embeddings = {text: self._cache.pop(text) for text in unique if text in self._cache}
        embeddings |= self._read_precomputed([text for text in unique if text not in embeddings])
        missing = [text for text in unique if text not in embeddings]
        for first in range(0, len(missing), ENCODE_BATCH_SIZE):
            embeddings |= self._encode(missing[first : first + ENCODE_BATCH_SIZE])
        self._cache |= embeddings
        while len(self._cache) > self.max_cached_prompts:
            self._cache.pop(next(iter(self._cache)))
        names = embeddings[prompts[0]]
        return {name: torch.stack([embeddings[text][name] for text in prompts]).to(device) for name in names}

    def _read_precomputed(self, texts: list[str]) -> EmbeddingsByPrompt:
        """Read stored embeddings, in the dtype that the encoders would have computed in."""
        if self.store is None:
            return {}
        with torch.inference_mode(False):
            stored = self.store.take([text for text in texts if text in self.store])
        dtype = self.placement.dtype
        return {
            text: {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
            for text, tensors in stored.items()
        }

    def _encode(self, texts: list[str]) -> EmbeddingsByPrompt:
        # The cache outlives this call, so its tensors must be neither part of a graph nor inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            batch = {name: x.cpu() for name, x in self._encoders_for(texts[0])(texts).items()}
            return {text: {name: x[row].clone() for name, x in batch.items()} for row, text in enumerate(texts)}

    def _encoders_for(self, text: str) -> TextEncoders:
        try:
            return self.encoders
        except ConfigError as error:
            if self.store is None:
                raise
            raise ConfigError(
                f"prompt '{text:.60}' is not among the {len(self.store)} prompts in {self.store.folder}, and the "
                f"text encoder could not be loaded ({error}); add the prompt with `tastemaker embed` [TM537]"
            ) from error
