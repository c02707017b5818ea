"""Texts as the frozen encoders of published generators read them, each prompt once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..embeddings import Identity, Rows, shelf
from ..registry import ConfigError
from ..types import Placement, Prompts

HELD = 1024  # prompts remembered; one of FLUX takes 4 MB of the host's memory
AT_ONCE = 16  # prompts read in one call
Read = Callable[[list[str]], Mapping[str, Tensor]]


def alone(x: Tensor) -> torch.autocast:
    """Within the block a frozen part computes in its own precision; autocast would widen its activations."""
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class Letters:
    """A tokenizer without files, for random networks: letters as ids, the last id at the end and, as filling, the 0."""

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
def lent(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the block a frozen network that waits on the host computes on a device; nothing is copied back."""
    held = {tensor: tensor.data for tensor in (*net.parameters(), *net.buffers()) if tensor.device != device}
    try:
        for tensor, host in held.items():
            tensor.data = host.to(device)
        yield
    finally:
        for tensor, host in held.items():
            tensor.data = host


@dataclass(frozen=True)
class Reader:
    """A text encoder on the host: what its network says of prompts, each of them `length` tokens long."""

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
        with alone(told["input_ids"]), lent(self.net, self.device):
            return self.net(input_ids=told["input_ids"], attention_mask=mask, output_hidden_states=layers)


class Remembered:
    """Embeddings of prompts by name, from the shelf or computed once while a prompt is among the latest.

    They wait on the host. With a shelf, the encoders are not loaded before a prompt is asked for that is not on it.
    """

    def __init__(
        self,
        load: Callable[[], Read],
        placement: Placement,
        made_by: Identity,
        embeddings: Path | None,
    ) -> None:
        self.placement, self.made_by, self.most = placement, made_by, HELD
        self.shelf = None if embeddings is None else shelf(embeddings, made_by)
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
        """From now on every call reads anew, with gradients; the encoders by name, on the device to stay there."""
        self.taught, parts = True, vars(self._encoders("")).values()
        readers = [reader for part in parts for reader in (part if isinstance(part, list | tuple) else (part,))]
        return {each.part: each.net.to(each.device) for each in readers if isinstance(each, Reader)}

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        """One row a prompt: [B, ...] by name."""
        if self.taught:
            texts = list(dict.fromkeys(prompts))
            which = torch.tensor([texts.index(prompt) for prompt in prompts], device=self.placement.device)
            return {name: x.to(self.placement.device)[which] for name, x in self.read(texts).items()}
        rows = {text: self._held.pop(text) for text in dict.fromkeys(prompts) if text in self._held}
        rows |= self._ready([text for text in dict.fromkeys(prompts) if text not in rows])
        new = [text for text in dict.fromkeys(prompts) if text not in rows]
        for first in range(0, len(new), AT_ONCE):
            rows |= self._fresh(new[first : first + AT_ONCE])
        self._held |= rows
        while len(self._held) > self.most:
            self._held.pop(next(iter(self._held)))
        where = self.placement.device
        return {name: torch.stack([rows[text][name] for text in prompts]).to(where) for name in rows[prompts[0]]}

    def _ready(self, texts: list[str]) -> Rows:
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

    def _fresh(self, texts: list[str]) -> Rows:
        # Kept beyond this call, so neither its graph nor the marks of inference mode may stick to them.
        with torch.inference_mode(False), torch.no_grad():
            told = {name: x.cpu() for name, x in self._encoders(texts[0])(texts).items()}
            return {text: {name: x[row].clone() for name, x in told.items()} for row, text in enumerate(texts)}

    def _encoders(self, text: str) -> Read:
        try:
            read: Read = self.read
        except ConfigError as error:
            if self.shelf is None:
                raise
            raise ConfigError(
                f"the prompt '{text:.60}' is not among the {len(self.shelf)} in {self.shelf.folder}, and no text "
                f"encoder can be loaded for it ({error}); add it with `tastemaker embed`"
            ) from error
        return read
