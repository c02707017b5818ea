"""Token-by-token decoding of chat models with a static KV cache; on a GPU each step replays a CUDA graph.

transformers' `generate` lengthens its cache at every step, makes its masks anew and launches each operation by itself.
Here the language model of a chat model is called alone, its keys and values lie where they stay, and all that changes
from step to step changes in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .chat_processors import ChatInputs, ChatProcessor

DecodingMode = Literal[
    "steps", "recorded", "compiled"
]  # operation by operation; as a CUDA graph; compiled, then recorded
ChatLogitsProcessor = Callable[
    [Tensor, Tensor], Tensor
]  # all tokens so far [B, n] and logits [B, V]: the greatest is next
TokenCallback = Callable[[Tensor], None]  # hears all tokens of the answers so far [B, n]
STEP = 64  # places by which rooms differ, so that answers of like length share one
LOOK = 8  # steps between looks at whether all have ended, for each look waits for the GPU
ROOMS = 4  # kept at a time
USUAL = {
    "no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,), "suppress_tokens": (None,), "min_length": (None, 0),
    "min_new_tokens": (None, 0), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "begin_suppress_tokens": (None,), "sequence_bias": (None,), "guidance_scale": (None, 1.0),
}  # fmt: skip


class ChatKVCache:
    """Keys and values of every layer [B, H, R, D], written in place; what transformers' attention asks of a cache."""

    is_compileable, is_initialized, is_sliding = True, True, (False,)

    def __init__(self, like: Sequence[tuple[Tensor, Tensor]], rows: int, room: int, place: Tensor) -> None:
        self.keys, self.values = (
            [x.new_zeros(rows, x.shape[1], room, x.shape[3]) for x in parts] for parts in zip(*like, strict=True)
        )
        self.place = place  # [1] where the next token goes

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.keys[layer].index_copy_(2, self.place, keys)
        self.values[layer].index_copy_(2, self.place, values)
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked only to make positions and masks, which are given here."""
        return 0


class ChatDecoder:
    """One room for so many rows: reads the token each row wrote last, and gives the logits of the next."""

    @torch.no_grad()
    def __init__(
        self, net: Any, past: Sequence[tuple[Tensor, Tensor]], places: Tensor, room: int, pace: DecodingMode
    ) -> None:
        rows, device = past[0][0].shape[0], past[0][0].device
        self.decoder, self.head = net.model.language_model, net.lm_head
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.places = torch.zeros_like(places).contiguous()  # [B, 1], or [axes, B, 1]
        self.mask = torch.zeros(rows, 1, 1, room, dtype=past[0][0].dtype, device=device)  # is added
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.kept = ChatKVCache(past, rows, room, self.place)
        self.run: Callable[[], Tensor] = torch.compile(self._step, dynamic=False) if pace == "compiled" else self._step
        self.graph: torch.cuda.CUDAGraph | None = None
        if pace != "steps" and device.type == "cuda":
            self._record()

    def begin(self, past: Sequence[tuple[Tensor, Tensor]], mask: Tensor, places: Tensor) -> None:
        """Take up what was read: keys and values of every layer, which of them count [B, L], and what comes next."""
        length = mask.shape[1]
        hidden = torch.finfo(self.mask.dtype).min
        self.mask.fill_(hidden)
        self.mask[:, 0, 0, :length].masked_fill_(mask.bool(), 0.0)
        for (keys, values), own, other in zip(past, self.kept.keys, self.kept.values, strict=True):
            own[:, :, :length].copy_(keys)
            other[:, :, :length].copy_(values)
        self.place.fill_(length)
        self.places.copy_(places)

    @torch.no_grad()
    def step(self, word: Tensor) -> Tensor:
        """The logits [B, V] after one more token of each row [B]."""
        self.ids.copy_(word[:, None])
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.logits

    def _step(self) -> Tensor:
        self.mask.index_fill_(3, self.place, 0.0)
        out = self.decoder(
            input_ids=self.ids, attention_mask=self.mask, position_ids=self.places, past_key_values=self.kept,
            use_cache=True,
        )  # fmt: skip
        logits: Tensor = self.head(out.last_hidden_state[:, -1])
        self.place.add_(1)
        self.places.add_(1)
        return logits

    def _record(self) -> None:
        beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):  # compiles, and begins whatever must not be in a graph
                self.run()
                self.place.zero_()
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = self.run()


@dataclass(frozen=True)
class ChatPrefill:
    """What a network made of questions: of each row the first logits, what is kept of it and which places count."""

    logits: Tensor  # [B, V]
    past: tuple[tuple[Tensor, Tensor], ...]  # of each layer [B, H, L, D]
    mask: Tensor  # [B, L]
    places: Tensor  # [B, 1], or [axes, B, 1], of the first token that is written


class ChatDecoderPool:
    """Writes the answers of one chat model; rooms are kept for batches to come."""

    def __init__(self, net: Any, speech: ChatProcessor, pace: DecodingMode | None = None) -> None:
        self.net, self.speech, self.insists = net, speech, pace is not None
        self.pace: DecodingMode = pace or ("recorded" if net.device.type == "cuda" else "steps")
        self.scribes: dict[tuple[int, ...], ChatDecoder] = {}

    def fits(self, asked: ChatInputs, tokens: int) -> bool:
        """Whether answers can be written here: families whose positions are known, and no window that would slide."""
        text = self.net.config.get_text_config()
        window = getattr(text, "sliding_window", None) or torch.inf
        usual = all(getattr(self.net.generation_config, key, None) in given for key, given in USUAL.items())
        return usual and self.speech.follows and asked.ids.shape[1] + tokens <= window

    def read(self, asked: ChatInputs) -> ChatPrefill:
        out = self.net(use_cache=True, logits_to_keep=1, **asked.told)
        past = tuple((layer.keys, layer.values) for layer in out.past_key_values.layers)
        return ChatPrefill(out.logits[:, -1], past, asked.mask, self.speech.next(asked.mask))

    def scribe(self, read: ChatPrefill, tokens: int) -> ChatDecoder:
        """Ready to write so many tokens after what was read."""
        (rows, length), places = read.mask.shape, read.places
        room = -(-(length + tokens) // STEP) * STEP
        key = (rows, room, places.ndim)
        if key not in self.scribes:
            while len(self.scribes) >= ROOMS:
                del self.scribes[next(iter(self.scribes))]
            self.scribes[key] = self._made(read, room)
        found = self.scribes[key]
        found.begin(read.past, read.mask, places)
        return found

    def _made(self, read: ChatPrefill, room: int) -> ChatDecoder:
        try:
            return ChatDecoder(self.net, read.past, read.places, room, self.pace)
        except RuntimeError as error:
            if self.insists or self.pace == "steps":
                raise
            warnings.warn(
                f"answers are written step by step, for a step cannot be recorded ({error!s:.200})", stacklevel=2
            )
            self.pace = "steps"
            return self._made(read, room)

    @torch.no_grad()
    def write(
        self,
        asked: ChatInputs,
        tokens: int,
        filler: int,
        chosen: Sequence[ChatLogitsProcessor] = (),
        tell: TokenCallback | None = None,
    ) -> Tensor:
        """At most so many tokens of each row [B, n], the likeliest after all of `chosen`; ended rows are filled up."""
        read = self.read(asked)
        scribe, logits, length = self.scribe(read, tokens) if tokens > 1 else None, read.logits, asked.ids.shape[1]
        ids = torch.nn.functional.pad(asked.ids, (0, tokens), value=filler)
        ends = torch.tensor(eos_token_ids(self.net), dtype=ids.dtype, device=ids.device)
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        look = LOOK if ids.is_cuda and tell is None else 1
        for place in range(length, length + tokens):
            scores = logits.float()
            for choose in chosen:
                scores = choose(ids[:, :place], scores)
            word = scores.argmax(-1).masked_fill(done, filler)
            ids[:, place], done = word, done | torch.isin(word, ends)
            if tell is not None:
                tell(ids[:, length : place + 1])
            if scribe is None or place + 1 == length + tokens or ((place - length) % look == 0 and bool(done.all())):
                break
            logits = scribe.step(word)
        return ids[:, length : place + 1]


def eos_token_ids(net: Any) -> list[int]:
    """The tokens that end an answer."""
    found = net.generation_config.eos_token_id
    return [] if found is None else [int(x) for x in found] if isinstance(found, list | tuple) else [int(found)]
