"""LlamaGen in its published sizes: pictures of a class or of a caption, written token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.distributions import TokenSampler
from ...core.guidance import batch_conditions
from ...core.policy import Guidance, Process, TokenDecoder
from ...core.registry import ConfigError
from ...core.types import Condition, Metadata, Placement, Prompts, to_device
from ...data.class_labels import ClassLabels, make_class_labels
from ...processes.autoregressive import AutoregressiveProcess
from .. import loading
from ..caption_encoder import FEATURE_SIZE, T5, CachedCaptionEncoder, build_caption_encoder, tiny_feature_size
from ..nets.decoder_pool import DecoderPool, hidden_states_and_head
from ..nets.gpt import GPT, CaptionFeatureEmbedder, GPTConfig, KVCache
from ..nets.token_decoder import DecodeRequest
from ..pretrained import WeightsSource
from ..vq import LLAMAGEN, LLAMAGEN_TEXT, PUBLISHED, Codes, Count, load_image_tokenizer
from .sizes import SIZES, LlamagenConditioning, LlamagenSize, released_source


class LlamagenBackbone:
    """Is told a class or a caption, then writes a square of tokens row by row."""

    passes = 1

    def __init__(self, spec: Llamagen, placement: Placement) -> None:
        self.device, self.classes = placement.device, spec.known() if spec.told == "class" else None
        self.shape: tuple[int, ...] = spec.shape
        self.codes = spec.codes
        self.pixels = (1, 3, spec.pixels, spec.pixels)
        self.codec = load_image_tokenizer(spec.codec, spec.codes, spec.side, spec.pixels, placement)
        net = build_network(spec, placement)
        net.factors = net.factors.to(placement.device)
        self.captions: CachedCaptionEncoder | None = None
        if isinstance(
            net.cls_embedding, CaptionFeatureEmbedder
        ):  # never trained, so that it can be kept beside the network
            self.captions = spec.texts(placement, net.cls_embedding.uncond_embedding.detach().clone())
        self.net: nn.Module = net
        self.desk = DecoderPool()

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        if self.captions is not None:
            return Condition(tuple(prompts), self.captions(prompts), tuple(facts))
        assert self.classes is not None
        known = {said: self.classes.number(said) if said.strip() else self.classes.count for said in {*prompts}}
        numbers = [known[prompt] for prompt in prompts]
        return Condition(tuple(prompts), {"label": to_device(torch.tensor(numbers), self.device)}, tuple(facts))

    def without(self, cond: Condition) -> Condition:
        """The same rows told nothing; what hides the filling of captions stays, as the network was trained."""
        tensors = self.embed([""] * len(cond)).tensors
        return replace(cond, tensors={**tensors, **{key: x for key, x in cond.tensors.items() if key == "shown"}})

    def told(self, cond: Condition) -> tuple[Tensor, Tensor | None]:
        """What the network reads first, and which of it is no filling."""
        if self.captions is None:
            return cond.tensors["label"], None
        return cond.tensors["features"].to(next(self.net.parameters()).dtype), cond.tensors["shown"]

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        told, shown = self.told(cond)
        logits: Tensor = self.net(x[:, :-1], told, None, shown)[0]
        return logits

    def states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        return hidden_states_and_head(self.net, x, *self.told(cond))

    def begin(self, cond: Condition) -> KVCache:
        return ()

    def extend(self, ids: Tensor | None, cache: KVCache, cond: Condition) -> tuple[Tensor, KVCache]:
        told, shown = self.told(cond)
        fresh = None if ids is None else ids[:, None]
        logits, cache = self.net(fresh, told if ids is None else None, cache, shown)
        return logits[:, -1], cache

    def scribe(
        self, cond: Condition, uniform: Tensor, choice: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        told, shown = self.told(batch_conditions(cond) if guidance else cond)
        return self.desk.scribe(self.net, DecodeRequest(told, shown, uniform, choice, guidance))

    def encode(self, pixels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, enabled=False):  # rounded, other codes would be the nearest
            ids = self.codec.encode(pixels[:, 0].float())
        return loading.check_token_count(ids, pixels, self.shape, self.pixels[-1])

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.codec.decode(x)[:, None]

    def vectors(self, ids: Tensor) -> Tensor:
        return self.codec.vectors(ids)

    def latents(self, pixels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, enabled=False):
            return self.codec.latents(pixels[:, 0].float()).flatten(2).transpose(1, 2)


def build_network(spec: Llamagen, placement: Placement) -> GPT:
    """Of published weights, without having been filled before; or at random, where and as it will be."""
    dtype = loading.trainable_dtype(placement)
    if spec.weights is not None:
        with torch.device("meta"):
            net = GPT(spec.sizes())
        loading.assign_state_dict(
            net, check_weights_size(loading.read_checkpoint(spec.weights, spec.source), spec), dtype, spec.weights
        )
        return net.to(placement.device)
    return loading.init_random(lambda: GPT(spec.sizes()), spec.seed, placement)


def check_weights_size(tensors: loading.Tensors, spec: Llamagen) -> loading.Tensors:
    """Refuse the weights of another size by its name."""
    if "tok_embeddings.weight" not in tensors:
        return tensors
    width, depth = tensors["tok_embeddings.weight"].shape[1], 0
    while f"layers.{depth}.attention.wo.weight" in tensors:
        depth += 1
    shape = spec.sizes()
    told = "caption" if any(key.startswith("cls_embedding.cap_proj.") for key in tensors) else "class"
    found = next((size for size, known in SIZES.items() if known[:2] == (width, depth)), None)
    if (width, depth) != (shape.width, shape.depth):
        advice = f"set model.size={found}" if found else "set model.width, model.depth and model.heads"
        raise ConfigError(
            f"model.weights: '{spec.weights!s:.200}' are of width {width} and depth {depth}, the model has "
            f"{shape.width} and {shape.depth}; {advice}"
        )
    if told != spec.told:
        raise ConfigError(
            f"model.weights: '{spec.weights!s:.200}' are told a {told}, the model a {spec.told}; set model.told={told}"
        )
    return tensors


@dataclass(frozen=True)
class Llamagen:
    """LlamaGen, told a class by its number or name, or a caption read by T5."""

    size: LlamagenSize = "B"
    told: LlamagenConditioning = "class"
    weights: str | None = LLAMAGEN  # a file, a folder, a run, or as released on the hub; at random if not given
    codec: str | None = "vq_ds16_c2i"  # as released by that name, a file or a run; without, tokens are colours of cells
    pixels: Annotated[int, Field(ge=8, le=1024)] = 256  # a side
    downsample: Literal[1, 2, 4, 8, 16, 32] = 16  # pixels a token, each way
    codes: Codes = 16384  # of the codec
    classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    names: tuple[str, ...] = ()  # of the classes, in order; a thousand without are ImageNet's
    width: Annotated[int, Field(ge=8, le=16384)] | None = None  # likewise below: instead of the size's
    depth: Annotated[int, Field(ge=1, le=256)] | None = None
    heads: Annotated[int, Field(ge=1, le=256)] | None = None
    kv_heads: Count | None = None  # heads of keys and values, as many as of queries if not given
    words: Annotated[int, Field(ge=1, le=512)] = 120  # of a caption, filled up on the left
    t5: str = T5.hub  # the encoder of captions: a folder, or its name on the hub
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no encoder is loaded
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # where gradients are wanted; pretraining has 0.1
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = AutoregressiveProcess

    def __post_init__(self) -> None:
        self.sizes()
        self.known()
        if self.pixels % self.downsample:
            raise ValueError(
                f"'pixels' is {self.pixels}; expected a multiple of 'downsample', which is {self.downsample}"
            )

    def known(self) -> ClassLabels:
        return make_class_labels(self.classes, self.names)

    def sizes(self) -> GPTConfig:
        width, depth, heads = SIZES[self.size]
        caption, tiny = self.told == "caption", self.size == "tiny"
        return GPTConfig(
            self.width or width,
            self.depth or depth,
            self.heads or heads,
            self.kv_heads,
            self.codes,
            self.side,
            told=self.told,
            prefix=self.words if caption else 1,
            vocabulary=(tiny_feature_size(self.t5) or FEATURE_SIZE) if caption else self.classes,
            multiple=16 if tiny else 256,
            dropout=self.dropout,
        )

    @property
    def side(self) -> int:
        """Tokens a side."""
        return self.pixels // self.downsample

    @property
    def shape(self) -> tuple[int]:
        return (self.side * self.side,)

    @property
    def source(self) -> WeightsSource | None:
        """The released file of these settings."""
        if self.weights not in (LLAMAGEN, LLAMAGEN_TEXT):
            return None
        return released_source(self.size, self.pixels, self.told)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        codec = PUBLISHED.get(self.codec or "")
        encoder = T5 if self.told == "caption" and self.t5 == T5.hub and self.embeddings is None else None
        return tuple(source for source in (self.source, codec, encoder) if source is not None)

    def texts(self, placement: Placement, nothing: Tensor | None = None) -> CachedCaptionEncoder:
        if self.told == "class":
            raise ConfigError("model: told a class there is no caption to embed; set model.told=caption")
        return build_caption_encoder(self.t5, self.words, nothing, placement, self.embeddings)

    def load(self, placement: Placement) -> LlamagenBackbone:
        return LlamagenBackbone(self, placement)

    def tiny(self) -> Llamagen:
        sized = replace(self, size="tiny", width=None, depth=None, heads=None, words=min(self.words, 8))
        small = replace(sized, weights=None, codec=None, pixels=32, downsample=8, codes=64, t5="tiny", embeddings=None)
        return replace(small, kv_heads=1 if self.kv_heads else None, dropout=0.0)
