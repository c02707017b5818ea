"""Texts as the frozen encoders of published generators read them, each prompt once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..types import Prompts

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


@dataclass(frozen=True)
class Reader:
    """A text encoder: what its network says of prompts, each of them `length` tokens long."""

    net: Any
    tokenizer: Any
    length: int
    device: torch.device

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
        with alone(told["input_ids"]):
            return self.net(input_ids=told["input_ids"], attention_mask=mask, output_hidden_states=layers)


class Remembered:
    """Embeddings of prompts by name, computed once while a prompt is among the latest; they wait on the host."""

    def __init__(self, read: Read, device: torch.device, most: int = HELD) -> None:
        self.device, self.most = device, most
        self._read = read
        self._held: dict[str, dict[str, Tensor]] = {}  # the latest last

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        """One row a prompt: [B, ...] by name."""
        rows = {text: self._held.pop(text) for text in dict.fromkeys(prompts) if text in self._held}
        new = [text for text in dict.fromkeys(prompts) if text not in rows]
        for first in range(0, len(new), AT_ONCE):
            rows |= self._fresh(new[first : first + AT_ONCE])
        self._held |= rows
        while len(self._held) > self.most:
            self._held.pop(next(iter(self._held)))
        return {name: torch.stack([rows[text][name] for text in prompts]).to(self.device) for name in rows[prompts[0]]}

    def _fresh(self, texts: list[str]) -> dict[str, dict[str, Tensor]]:
        # Kept beyond this call, so neither its graph nor the marks of inference mode may stick to them.
        with torch.inference_mode(False), torch.no_grad():
            told = {name: x.cpu() for name, x in self._read(texts).items()}
            return {text: {name: x[row].clone() for name, x in told.items()} for row, text in enumerate(texts)}
