"""Language models as text encoders: the chat template around a prompt, and the hidden layers that generators read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .latent_packing import move_padding_last
from .pipeline_components import PipelineComponents
from .text_encoders import TextEncoder, TextEncoders

Message = Mapping[str, object]  # `role` and `content` of one turn of a conversation


def user_message(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def load_decoder(
    components: PipelineComponents, network_class: Any, max_length: int, tokenizer: str = "tokenizer"
) -> TextEncoder:
    """Load a language model without its vision tower and its output layer, from `text_encoder` and its tokenizer."""
    encoder = components.load_text_encoder("text_encoder", network_class, tokenizer, max_length)
    inner = dict(encoder.net.named_modules()).get("model.language_model", encoder.net)  # of a vision-language model
    inner.config.use_cache = False  # keys and values are read once
    return replace(encoder, net=inner)


class LanguageModelEncoder(TextEncoders):
    """The hidden states of some layers side by side: prompt_embeds [B, max_text_tokens, layers * D].

    `make_messages` turns a prompt into the conversation that the tokenizer's template formats; small random models
    read the bytes of the prompt alone. With `lengths`, padding is moved last and zeroed, and the number of real
    tokens [B] is returned too.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        layers: Sequence[int],  # 0 is the embedding; negative from the end
        make_messages: Callable[[str], Sequence[Message]] = user_message,
        *,
        template_options: Mapping[str, object] | None = None,
        plain: bool = False,  # no template
        lengths: bool = False,
    ) -> None:
        self.text_encoder, self.make_messages = encoder, make_messages
        self.template_options, self.plain, self.lengths = dict(template_options or {}), plain, lengths
        count = len(encoder.net.layers) + 1
        self.layers = [layer % count for layer in layers]
        # Later layers are not read: without them, the encoder is smaller, and each of its weights gets a gradient.
        if max(self.layers) < count - 1:
            encoder.net.layers, encoder.net.norm = encoder.net.layers[: max(self.layers)], nn.Identity()
            encoder.net.config.num_hidden_layers = max(self.layers)
        self.text_encoders = (encoder,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.format(prompt) for prompt in prompts]
        states = self.text_encoder(texts, use_attention_mask=True, output_hidden_states=True).hidden_states
        prompt_embeds = torch.cat([states[layer] for layer in self.layers], dim=-1)
        if not self.lengths:
            return {"prompt_embeds": prompt_embeds}
        mask = self.text_encoder.tokenize(texts)["attention_mask"]
        prompt_embeds, lengths = move_padding_last(prompt_embeds, mask)
        return {"prompt_embeds": prompt_embeds, "lengths": lengths}

    def format(self, prompt: str) -> str:
        """Return the text of a prompt with its template."""
        if self.plain:
            return prompt
        messages = list(self.make_messages(prompt))
        tokenizer = self.text_encoder.tokenizer
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **self.template_options)
        # Mistral's template begins with the token that its tokenizer adds too.
        begins = tokenizer.bos_token is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        return text.removeprefix(tokenizer.bos_token) if begins else text


class TemplateEncoder(TextEncoders):
    """The last hidden states of prompts in a template: prompt_embeds [B, L, D], padding last; and lengths [B].

    The generator does not get the first `prefix` tokens, those of the template before the prompt. An empty prompt is
    read as `empty`.
    """

    def __init__(self, encoder: TextEncoder, template: str, prefix: int, empty: str = "") -> None:
        self.text_encoder, self.template, self.prefix, self.empty = encoder, template, prefix, empty
        self.text_encoders = (encoder,)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.template.format(prompt or self.empty) for prompt in prompts]
        mask = self.text_encoder.tokenize(texts)["attention_mask"]
        hidden = self.text_encoder(texts, use_attention_mask=True).last_hidden_state
        prompt_embeds, lengths = move_padding_last(hidden, mask)
        return {"prompt_embeds": prompt_embeds[:, self.prefix :], "lengths": lengths - self.prefix}
