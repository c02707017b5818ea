"""Janus-Pro: a language model that generates 24x24 image tokens after a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ...core.distributions import TokenSampler
from ...core.guidance import batch_conditions
from ...core.model_spec import PipelineLayout
from ...core.policy import Guidance, Process, TokenDecoder
from ...core.types import Condition, Metadata, Placement, Prompts
from ...core.weights import NetworkTraits
from ...processes.autoregressive import AutoregressiveProcess
from .. import loading
from ..checkpoint_keys import keep_names
from ..deferred_loading import defer_weights, open_model
from ..gpt import CausalTokenBackbone
from ..image_tokenizer import TokenGridSpec, build_frozen_tokenizer
from ..nets.gpt import is_sharded
from ..nets.janus import JanusNet, JanusSizes, make_janus_decoder
from ..nets.token_decoder import DecodeRequest
from ..nets.vq import VQ, ColorTokenizer, drop_usage_buffer
from ..pipeline_components import RANDOM, TINY, default_dtype, parameters_on_meta
from ..pretrained import WeightsSource, find_weights, silence_libraries
from .checkpoint import JANUS_1B, JANUS_7B, NETWORK_PREFIXES, find_release, find_sizes, read_tensors
from .prompt_tokenizer import ByteTokenizer, FileTokenizer, JanusPromptTokenizer

# The linear layers of the language model, as in the community's adapters.
LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TRIM_MULTIPLE = 16  # padding that all rows have is removed in steps of so many tokens, so that shapes repeat


class JanusBackbone(CausalTokenBackbone):
    """Reads a prompt in its chat template, then generates a square of tokens row by row."""

    has_unconditional = True
    traits = NetworkTraits(lora_targets=LLAMA_LAYERS)

    def __init__(self, spec: JanusSpec, placement: Placement) -> None:
        self.device, sizes = placement.device, spec.sizes
        self.shape: tuple[int, ...] = spec.shape
        self.codebook_size = sizes.vq.codebook_size
        self.pixels = (1, 3, sizes.image_size, sizes.image_size)
        self.load_networks(spec, placement)

    def load_networks(self, spec: JanusSpec, placement: Placement) -> None:
        """Load tokenizer, network and frozen image tokenizer."""
        folder, sizes = spec.folder, spec.sizes
        text_tokenizer = ByteTokenizer(sizes.text_vocab_size) if folder is None else FileTokenizer(folder)
        self.prompt_tokenizer = JanusPromptTokenizer(text_tokenizer, spec.max_text_tokens)
        self.net, self.autoencoder = build_networks(spec, folder, placement)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        ids, mask = self.prompt_tokenizer(prompts)
        tensors = {"text": ids.to(self.device), "attention_mask": mask.to(self.device)}
        return Condition(tuple(prompts), tensors, tuple(metadata))

    def without_prompt(self, cond: Condition) -> Condition:
        return replace(
            cond, tensors={**cond.tensors, "text": self.prompt_tokenizer.without_prompt(cond.tensors["text"])}
        )

    def condition_tokens(self, cond: Condition) -> tuple[Tensor, Tensor]:
        return cond.tensors["text"], cond.tensors["attention_mask"]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        text, mask = self.condition_tokens(cond)
        unused = int((~mask).sum(1).min()) // TRIM_MULTIPLE * TRIM_MULTIPLE
        logits: Tensor = self.net(x[:, :-1], text[:, unused:], None, mask[:, unused:])[0]
        return logits

    def hidden_states(self, x: Tensor, t: Tensor, cond: Condition) -> None:
        """None: the head over the codebook is not one matrix."""
        return None

    def make_decoder(
        self, cond: Condition, uniform: Tensor, sampler: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        if not isinstance(self.net, JanusNet) or is_sharded(self.net):
            return None
        text, mask = self.condition_tokens(batch_conditions(cond) if guidance else cond)
        return make_janus_decoder(self.net, DecodeRequest(text, mask, uniform, sampler, guidance))

    def encode(self, pixels: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):  # rounding would change the codes
            ids = self.autoencoder.encode(pixels[:, 0].float())
        return loading.check_token_count(ids, pixels, self.shape, self.pixels[-1])


def build_networks(spec: JanusSpec, folder: Path | None, placement: Placement) -> tuple[JanusNet, VQ | ColorTokenizer]:
    """The network that trains and the frozen image tokenizer, from a folder or random."""
    sizes = spec.sizes
    if folder is not None:
        dtype, device = loading.trainable_dtype(placement), placement.trainable_device or placement.device
        tensors, vq_tensors = read_tensors(folder)
        vq = build_frozen_tokenizer(sizes.vq, drop_usage_buffer(vq_tensors), spec.weights, placement)
        with silence_libraries(), parameters_on_meta():
            net = JanusNet(sizes)
        if device.type == "meta":  # ranks read their rows of each tensor once the network is sharded
            deferred = open_model(folder, dtype, NETWORK_PREFIXES)
            if deferred is not None and defer_weights(net, deferred):
                return net, vq
            device = torch.device("cpu")
        loading.assign_state_dict(net, tensors, dtype, spec.weights)
        return net.to(device), vq
    net = loading.init_random(lambda: JanusNet(sizes), spec.seed, placement)
    if spec.weights == TINY:
        return net, ColorTokenizer(sizes.vq.codebook_size, sizes.grid_size, sizes.image_size).to(placement.device)
    with default_dtype(torch.float32), torch.device(placement.device):
        return net, VQ(sizes.vq).requires_grad_(False).eval()


@dataclass(frozen=True)
class JanusSpec(TokenGridSpec):
    """Janus-Pro, autoregressive: DeepSeek's language model with 576 image tokens after the prompt, 384x384 pixels."""

    # A released name, a folder in transformers' or the authors' layout, `tiny` or `random:HUB_ID`.
    weights: str = JANUS_1B.hub
    # Tokens of a prompt with its template, padded on the left; longer prompts are cut.
    max_text_tokens: Annotated[int, Field(ge=8, le=4096)] = 128
    seed: int = 0  # of random weights
    process_type: ClassVar[type[Process]] = AutoregressiveProcess

    @property
    def sizes(self) -> JanusSizes:
        return replace(find_sizes(self.weights), prefix_length=self.max_text_tokens)

    @property
    def folder(self) -> Path | None:
        """The folder of the weights; None if they are random."""
        if self.weights == TINY or self.weights.partition(":")[0] == RANDOM:
            return None
        return find_weights(self.weights, find_release(self.weights))

    @property
    def image_size(self) -> int:  # type: ignore[override]
        return self.sizes.image_size

    @property
    def grid_size(self) -> int:
        return self.sizes.grid_size

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        if self.weights == TINY or self.weights.partition(":")[0] == RANDOM or Path(self.weights).expanduser().exists():
            return ()
        return (find_release(self.weights),)

    releases: ClassVar[tuple[WeightsSource, ...]] = (JANUS_1B, JANUS_7B)
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "JanusForConditionalGeneration", "", "", keep_names, library="transformers"
    )

    def load(self, placement: Placement) -> JanusBackbone:
        return JanusBackbone(self, placement)

    def tiny(self) -> JanusSpec:
        return replace(self, weights=TINY, max_text_tokens=min(self.max_text_tokens, 16))
