"""Answers of chat models: sampling settings, streaming, and decoding with a static KV cache and CUDA graphs.

`generate` of transformers grows its cache at every step, rebuilds its masks and launches every kernel by itself. The
decoder here calls the language model alone, with a cache of fixed size whose contents change in place, so that on a
GPU a step is the replay of one CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.randomness import Purpose, Randomness
from ..core.registry import ConfigError
from .chat_model import ChatModel
from .chat_processors import ChatInputs, ChatProcessor
from .yes_no import IMAGE

DecodingMode = Literal["eager", "cuda_graph", "compiled"]  # compiled steps are captured as CUDA graphs too
ChatLogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # tokens so far [B, n] and logits [B, V] to logits
TokenCallback = Callable[[Tensor], None]  # called with all answer tokens so far [B, n]
AnswerCallback = Callable[[str], None]  # called with the new part of an answer
KeyValues = Sequence[tuple[Tensor, Tensor]]  # of each layer [B, H, L, D]
PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # stands for a character whose other bytes are still to come
CACHE_STEP = 64  # cache lengths are multiples of it, so that answers of similar length share a decoder
EOS_INTERVAL = 8  # steps between checks whether all answers have ended, since each check waits for the GPU
MAX_DECODERS = 4  # kept at a time
# Generation settings that only `generate` implements, with the values at which they do nothing.
UNSUPPORTED_SETTINGS = {
    "no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,), "suppress_tokens": (None,), "min_length": (None, 0),
    "min_new_tokens": (None, 0), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "begin_suppress_tokens": (None,), "sequence_bias": (None,), "guidance_scale": (None, 1.0),
}  # fmt: skip


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are sampled."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ConfigError(
                "expected temperature of at least 0, top-p above 0 and at most 1, and at least one token, got "
                f"temperature {self.temperature}, top-p {self.top_p} and {self.max_new_tokens} tokens; correct "
                "these settings [TM711]"
            )


@dataclass(frozen=True)
class GumbelSampling:
    """Logits plus Gumbel noise, whose argmax is a random draw; the noise does not depend on the rest of the batch."""

    settings: GenerationSettings
    sample_ids: Tensor  # [B]
    prompt_length: int = 0  # tokens

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.float() / self.settings.temperature
        ranked, indices = logits.sort(descending=True)
        probabilities = ranked.softmax(-1)
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        dropped.scatter_(1, indices, probabilities.cumsum(-1) - probabilities >= self.settings.top_p)
        rng = Randomness(self.settings.seed, ids.shape[1] - self.prompt_length, self.sample_ids)
        uniform = rng.uniform(Purpose.ANSWER, logits.shape[1]).clamp(1e-12, 1 - 1e-7)
        return logits.masked_fill(dropped, -torch.inf) - (-uniform.log()).log()


class AnswerStreamer:
    """Passes on the first answer of a batch while it grows; incomplete characters and trailing spaces are held back."""

    def __init__(self, decode: Callable[[Tensor], str], on_text: AnswerCallback) -> None:
        self.decode, self.on_text, self.emitted = decode, on_text, ""

    def __call__(self, ids: Tensor) -> None:
        self.emit(self.decode(ids[0]).strip().rstrip(PARTIAL_CHARACTER).rstrip())

    def emit(self, text: str) -> None:
        if text.startswith(self.emitted) and len(text) > len(self.emitted):
            self.on_text(text[len(self.emitted) :])
            self.emitted = text


class TokenStreamer:
    """A streamer for transformers' `generate` that collects the new tokens of all answers."""

    def __init__(self, on_tokens: TokenCallback) -> None:
        self.on_tokens, self.tokens = on_tokens, torch.zeros(0, 0, dtype=torch.long)

    def put(self, ids: Tensor) -> None:
        if ids.ndim == 1:  # the first call has the prompt
            self.tokens = torch.cat([self.tokens.view(len(ids), -1), ids[:, None].cpu()], 1)
            self.on_tokens(self.tokens)

    def end(self) -> None:
        """Required by `generate`."""


class ChatDecoder:
    """Decoding steps of one batch size and cache length: the last token of each answer to the next logits."""

    @torch.no_grad()
    def __init__(
        self, net: Any, key_values: KeyValues, next_position: Tensor, cache_length: int, mode: DecodingMode
    ) -> None:
        from transformers.cache_utils import Cache, StaticLayer

        keys = key_values[0][0]
        batch, dtype, device = keys.shape[0], keys.dtype, keys.device
        self.language_model, self.lm_head = net.model.language_model, net.lm_head
        self.position_ids = torch.zeros_like(next_position).contiguous()  # [B, 1], or [axes, B, 1]
        self.attention_mask = torch.zeros(batch, 1, 1, cache_length, dtype=dtype, device=device)  # additive
        self.input_ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        # Not StaticCache: its sliding-window layers keep their length in an int, which a CUDA graph would freeze.
        self.kv_cache: Any = Cache(layers=[StaticLayer(cache_length) for _ in key_values])
        self.start(key_values, torch.ones(batch, keys.shape[2], device=device), next_position)  # allocates the cache
        self.step_fn: Callable[[], Tensor] = (
            torch.compile(self._step, dynamic=False) if mode == "compiled" else self._step
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        if mode != "eager" and device.type == "cuda":
            self._capture_cuda_graph()

    def start(self, key_values: KeyValues, mask: Tensor, next_position: Tensor) -> None:
        """Begin new answers: the prompts' keys and values, their mask [B, L], and the position of the first token."""
        length = mask.shape[1]
        self.attention_mask.fill_(torch.finfo(self.attention_mask.dtype).min)
        self.attention_mask[:, 0, 0, :length].masked_fill_(mask.bool(), 0.0)
        self.kv_cache.reset()
        for layer, (keys, values) in zip(self.kv_cache.layers, key_values, strict=True):
            layer.update(keys, values)
        self.position_ids.copy_(next_position)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token of each answer [B]."""
        self.input_ids.copy_(tokens[:, None])
        if self.graph is None:
            return self.step_fn()
        self.graph.replay()
        return self.logits

    def _step(self) -> Tensor:
        self.attention_mask.index_fill_(3, self.kv_cache.layers[0].cumulative_length.view(1), 0.0)
        out = self.language_model(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            position_ids=self.position_ids,
            past_key_values=self.kv_cache,
            use_cache=True,
        )
        self.position_ids.add_(1)
        logits: Tensor = self.lm_head(out.last_hidden_state[:, -1])
        return logits

    def _capture_cuda_graph(self) -> None:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and initializes what must not happen during capture
                self.kv_cache.reset()
                self.step_fn()
        torch.cuda.current_stream().wait_stream(stream)
        self.kv_cache.reset()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = self.step_fn()


@dataclass(frozen=True)
class ChatPrefill:
    """Outputs of the forward pass over the prompts."""

    logits: Tensor  # [B, V]
    key_values: tuple[tuple[Tensor, Tensor], ...]  # of each layer [B, H, L, D]
    attention_mask: Tensor  # [B, L]
    next_position: Tensor  # [B, 1], or [axes, B, 1], of the first answer token


class ChatDecoderPool:
    """Decodes the answers of one chat model; decoders are kept for later batches."""

    def __init__(self, net: Any, processor: ChatProcessor, mode: DecodingMode | None = None) -> None:
        self.net, self.processor, self.strict_mode = net, processor, mode is not None
        self.mode: DecodingMode = mode or ("cuda_graph" if net.device.type == "cuda" else "eager")
        self.decoders: dict[tuple[int, ...], ChatDecoder] = {}

    def supports(self, inputs: ChatInputs, max_new_tokens: int) -> bool:
        """Whether these answers can be decoded here: known positions, no sliding window, no special settings."""
        window = getattr(self.net.config.get_text_config(), "sliding_window", None) or torch.inf
        plain = all(
            getattr(self.net.generation_config, key, None) in values for key, values in UNSUPPORTED_SETTINGS.items()
        )
        fits = inputs.input_ids.shape[1] + max_new_tokens <= window
        return plain and self.processor.supports_static_cache and fits

    def prefill(self, inputs: ChatInputs) -> ChatPrefill:
        out = self.net(use_cache=True, logits_to_keep=1, **inputs.network_inputs)
        key_values = tuple((layer.keys, layer.values) for layer in out.past_key_values.layers)
        next_position = self.processor.next_position(inputs.attention_mask)
        return ChatPrefill(out.logits[:, -1], key_values, inputs.attention_mask, next_position)

    def decoder_for(self, prefill: ChatPrefill, max_new_tokens: int) -> ChatDecoder:
        """A decoder that starts after the prompts and has room for the answers."""
        batch, length = prefill.attention_mask.shape
        cache_length = -(-(length + max_new_tokens) // CACHE_STEP) * CACHE_STEP
        key = (batch, cache_length, prefill.next_position.ndim)
        if key not in self.decoders:
            while len(self.decoders) >= MAX_DECODERS:
                del self.decoders[next(iter(self.decoders))]
            self.decoders[key] = self._build_decoder(prefill, cache_length)
        decoder = self.decoders[key]
        decoder.start(prefill.key_values, prefill.attention_mask, prefill.next_position)
        return decoder

    def _build_decoder(self, prefill: ChatPrefill, cache_length: int) -> ChatDecoder:
        try:
            return ChatDecoder(self.net, prefill.key_values, prefill.next_position, cache_length, self.mode)
        except RuntimeError as error:
            if self.strict_mode or self.mode == "eager":
                raise
            warnings.warn(
                f"decoding runs without CUDA graphs, because a step cannot be captured ({error!s:.200}); the "
                "answers are the same, but slower [TM712]",
                stacklevel=2,
            )
            self.mode = "eager"
            return self._build_decoder(prefill, cache_length)

    @torch.no_grad()
    def generate(
        self,
        inputs: ChatInputs,
        max_new_tokens: int,
        pad_token_id: int,
        logits_processors: Sequence[ChatLogitsProcessor] = (),
        on_tokens: TokenCallback | None = None,
    ) -> Tensor:
        """Answer tokens [B, n], the argmax of the processed logits; ended answers are padded."""
        prefill = self.prefill(inputs)
        decoder = self.decoder_for(prefill, max_new_tokens) if max_new_tokens > 1 else None
        logits, length = prefill.logits, inputs.input_ids.shape[1]
        ids = torch.nn.functional.pad(inputs.input_ids, (0, max_new_tokens), value=pad_token_id)
        eos = torch.tensor(eos_token_ids(self.net), dtype=ids.dtype, device=ids.device)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        interval = EOS_INTERVAL if ids.is_cuda and on_tokens is None else 1
        for position in range(length, length + max_new_tokens):
            scores = logits.float()
            for process in logits_processors:
                scores = process(ids[:, :position], scores)
            tokens = scores.argmax(-1).masked_fill(ended, pad_token_id)
            ids[:, position], ended = tokens, ended | torch.isin(tokens, eos)
            if on_tokens is not None:
                on_tokens(ids[:, length : position + 1])
            if decoder is None or position + 1 == length + max_new_tokens:
                break
            if (position - length) % interval == 0 and bool(ended.all()):
                break
            logits = decoder.step(tokens)
        return ids[:, length : position + 1]


def eos_token_ids(net: Any) -> list[int]:
    """The tokens that end an answer."""
    ids = net.generation_config.eos_token_id
    return [] if ids is None else [int(x) for x in ids] if isinstance(ids, list | tuple) else [int(ids)]


@torch.no_grad()
def generate_answers(
    chat: ChatModel,
    pixels: Tensor,
    questions: Sequence[str],
    sample_ids: Sequence[int],
    generation: GenerationSettings,
    on_text: AnswerCallback | None = None,
    decoder_pool: ChatDecoderPool | None = None,
) -> list[str]:
    """Answers to one question about each image of [B, 3, H, W]; `sample_ids` seed the random draws.

    `on_text` gets the first answer while it is decoded. A `decoder_pool` that is kept makes later batches faster.
    """
    prompts = [f"{IMAGE}\n{chat.strip_special_tokens(question)}" for question in questions]
    inputs = chat.processor.encode(pixels, [chat.processor.render((prompt,)) for prompt in prompts])
    length = inputs.input_ids.shape[1]
    decoder_pool = decoder_pool or ChatDecoderPool(chat.net, chat.processor, "eager")
    ids = torch.tensor(sample_ids, device=inputs.input_ids.device)
    sampling: list[Any] = [GumbelSampling(generation, ids, length)] if generation.temperature else []
    streamer = AnswerStreamer(lambda tokens: _decode(chat, tokens[None])[0], on_text) if on_text else None
    if decoder_pool.supports(inputs, generation.max_new_tokens):
        processors = [*_repetition_penalty(chat), *sampling]
        tokens = decoder_pool.generate(inputs, generation.max_new_tokens, _pad_token(chat), processors, streamer)
    else:
        tokens = chat.net.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            **inputs.extra_inputs,
            max_new_tokens=generation.max_new_tokens,
            do_sample=False,
            logits_processor=sampling,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=_pad_token(chat),
            streamer=TokenStreamer(streamer) if streamer else None,
        )[:, length:]
    answers = [answer.strip() for answer in _decode(chat, tokens)]
    if streamer is not None:
        streamer.emit(answers[0])
    return answers


def _decode(chat: ChatModel, ids: Tensor) -> list[str]:
    texts: list[str] = chat.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def _repetition_penalty(chat: ChatModel) -> list[ChatLogitsProcessor]:
    """The repetition penalty of the model's generation settings."""
    penalty = chat.net.generation_config.repetition_penalty
    if penalty in (None, 1.0):
        return []
    from transformers import RepetitionPenaltyLogitsProcessor

    processor: Any = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    return [processor]


def _pad_token(chat: ChatModel) -> int:
    pad = chat.tokenizer.pad_token_id
    return int(chat.tokenizer.eos_token_id or 0) if pad is None else int(pad)
