"""LlamaGen in its published sizes: autoregressive image tokens, conditioned on a class or a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ...core.policy import Process
from ...core.registry import ConfigError
from ...core.types import Condition, Metadata, Placement, Prompts, to_device
from ...data.class_labels import ClassLabels, make_class_labels, names_from_data
from ...processes.autoregressive import AutoregressiveProcess
from .. import loading
from ..caption_encoder import FEATURE_SIZE, T5, CachedCaptionEncoder, build_caption_encoder, tiny_feature_size
from ..gpt import CausalTokenBackbone
from ..image_tokenizer import (
    LLAMAGEN,
    LLAMAGEN_TEXT,
    PUBLISHED_TOKENIZERS,
    CodebookSize,
    Count,
    TokenGridSpec,
    load_image_tokenizer,
)
from ..nets.cuda_graph_decoder import DecoderPool
from ..nets.gpt import GPT, CaptionFeatureEmbedder, GPTConfig
from ..pretrained import WeightsSource

LlamagenConditioning = Literal["class", "caption"]
LlamagenVariant = Literal["B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B", "tiny"]
# Width, depth and heads.
VARIANTS: dict[LlamagenVariant, tuple[int, int, int]] = {
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1280, 36, 20),
    "XXL": (1536, 48, 24),
    "XXXL": (2560, 48, 40),
    "1B": (2048, 22, 32),
    "3B": (3200, 24, 32),
    "7B": (4096, 32, 32),
    "tiny": (32, 2, 2),
}
DOWNLOAD_SIZES = {"B": "0.4 GB", "L": "1.4 GB", "XL": "3.1 GB", "XXL": "2.8 GB", "3B": "6.2 GB"}
RELEASES = (
    WeightsSource(LLAMAGEN, size=f"{DOWNLOAD_SIZES['B']} to {DOWNLOAD_SIZES['3B']}", license="MIT"),
    WeightsSource(LLAMAGEN_TEXT, size=DOWNLOAD_SIZES["XL"], license="MIT"),
)
# Variants and image sizes with released weights.
RELEASED_VARIANTS: dict[LlamagenConditioning, tuple[str, ...]] = {
    "class": ("B 256", "L 256", "B 384", "L 384", "XL 384", "XXL 384", "3B 384"),
    "caption": ("XL 256", "XL 512"),
}


class LlamagenBackbone(CausalTokenBackbone):
    """Reads a class or a caption, then generates a square of tokens row by row."""

    has_unconditional = True

    def __init__(self, spec: LlamagenSpec, placement: Placement) -> None:
        self.device, self.class_labels = placement.device, spec.class_labels() if spec.conditioning == "class" else None
        self.shape: tuple[int, ...] = spec.shape
        self.codebook_size = spec.codebook_size
        self.pixels = (1, 3, spec.image_size, spec.image_size)
        self.autoencoder = load_image_tokenizer(
            spec.autoencoder, spec.codebook_size, spec.grid_size, spec.image_size, placement
        )
        net = build_network(spec, placement)
        net.rotary_factors = net.rotary_factors.to(placement.device)
        self.caption_encoder: CachedCaptionEncoder | None = None
        if isinstance(net.cls_embedding, CaptionFeatureEmbedder):
            null_embedding = net.cls_embedding.uncond_embedding.detach().clone()  # never trained, so a copy stays valid
            self.caption_encoder = spec.load_prompt_encoder(placement, null_embedding)
        self.net = net
        self.decoder_pool = DecoderPool()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        if self.caption_encoder is not None:
            return Condition(tuple(prompts), self.caption_encoder(prompts), tuple(metadata))
        assert self.class_labels is not None
        labels = self.class_labels
        index = {prompt: labels.find_class(prompt) if prompt.strip() else labels.count for prompt in {*prompts}}
        label = to_device(torch.tensor([index[prompt] for prompt in prompts]), self.device)
        return Condition(tuple(prompts), {"label": label}, tuple(metadata))

    def without_prompt(self, cond: Condition) -> Condition:
        """The unconditional rows. The padding mask of the captions stays, as in the network's training."""
        tensors = self.embed([""] * len(cond)).tensors
        return replace(
            cond, tensors={**tensors, **{key: x for key, x in cond.tensors.items() if key == "attention_mask"}}
        )

    def condition_tokens(self, cond: Condition) -> tuple[Tensor, Tensor | None]:
        if self.caption_encoder is None:
            return cond.tensors["label"], None
        return cond.tensors["features"].to(next(self.net.parameters()).dtype), cond.tensors["attention_mask"]

    def encode(self, pixels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, enabled=False):  # rounding would change the nearest codes
            ids = self.autoencoder.encode(pixels[:, 0].float())
        return loading.check_token_count(ids, pixels, self.shape, self.pixels[-1])


def build_network(spec: LlamagenSpec, placement: Placement) -> GPT:
    """The transformer with its published weights, assigned without initializing it first, or with random ones."""
    dtype = loading.trainable_dtype(placement)
    if spec.weights is not None:
        with torch.device("meta"):
            net = GPT(spec.network_config())
        loading.assign_state_dict(
            net, check_weights_size(loading.read_checkpoint(spec.weights, spec.source), spec), dtype, spec.weights
        )
        return net.to(placement.device)
    return loading.init_random(lambda: GPT(spec.network_config()), spec.seed, placement)


def check_weights_size(tensors: loading.Tensors, spec: LlamagenSpec) -> loading.Tensors:
    """The tensors themselves; refuse weights of another variant or conditioning, and name it."""
    if "tok_embeddings.weight" not in tensors:
        return tensors
    width, depth = tensors["tok_embeddings.weight"].shape[1], 0
    while f"layers.{depth}.attention.wo.weight" in tensors:
        depth += 1
    config = spec.network_config()
    conditioning = "caption" if any(key.startswith("cls_embedding.cap_proj.") for key in tensors) else "class"
    variant = next((name for name, sizes in VARIANTS.items() if sizes[:2] == (width, depth)), None)
    if (width, depth) != (config.width, config.depth):
        advice = f"set model.variant={variant}" if variant else "set model.width, model.depth and model.heads"
        raise ConfigError(
            f"model.weights: '{spec.weights!s:.200}' has width {width} and depth {depth}, but the model has "
            f"{config.width} and {config.depth}; {advice} [TM450]"
        )
    if conditioning != spec.conditioning:
        raise ConfigError(
            f"model.weights: '{spec.weights!s:.200}' is conditioned on a {conditioning}, but the model on a "
            f"{spec.conditioning}; set model.conditioning={conditioning} [TM451]"
        )
    return tensors


@dataclass(frozen=True)
class LlamagenSpec(TokenGridSpec):
    """LlamaGen, conditioned on a class (by index or name) or on a caption (encoded by T5)."""

    variant: LlamagenVariant = "B"
    conditioning: LlamagenConditioning = "class"
    weights: str | None = LLAMAGEN  # a hub name, a file, a folder or a run; None: random weights
    autoencoder: str | None = "vq_ds16_c2i"  # a released name, a file or a run; None: tokens are the colors of cells
    image_size: Annotated[int, Field(ge=8, le=1024)] = 256  # pixels per side
    downsample_factor: Literal[1, 2, 4, 8, 16, 32] = 16  # pixels per token, in each direction
    codebook_size: CodebookSize = 16384
    num_classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    class_names: tuple[str, ...] = ()  # in order; by default those of ImageNet if there are 1000 classes
    width: Annotated[int, Field(ge=8, le=16384)] | None = None  # this and the next two override the variant's sizes
    depth: Annotated[int, Field(ge=1, le=256)] | None = None
    heads: Annotated[int, Field(ge=1, le=256)] | None = None
    kv_heads: Count | None = None  # heads of keys and values; None: as many as `heads`
    max_text_tokens: Annotated[int, Field(ge=1, le=512)] = 120  # of a caption, padded on the left
    text_encoder: str = T5.hub  # of captions: a folder or a hub name
    embeddings: Path | None = None  # a folder written by `tastemaker embed`; then no text encoder is loaded
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # where gradients are enabled; 0.1 in pretraining
    seed: int = 0
    process_type: ClassVar[type[Process]] = AutoregressiveProcess
    supports_8bit_decoding: ClassVar[bool] = True
    releases: ClassVar[tuple[WeightsSource, ...]] = RELEASES

    def __post_init__(self) -> None:
        self.network_config()
        self.class_labels()
        self.check_image_size("downsample_factor")

    def class_labels(self) -> ClassLabels:
        return make_class_labels(self.num_classes, self.class_names)

    def with_class_names(self, names: Sequence[str]) -> Self:
        if self.conditioning != "class" or self.class_names:
            return self
        return replace(self, class_names=names_from_data(self.class_labels(), names))

    def network_config(self) -> GPTConfig:
        width, depth, heads = VARIANTS[self.variant]
        caption, tiny = self.conditioning == "caption", self.variant == "tiny"
        return GPTConfig(
            self.width or width,
            self.depth or depth,
            self.heads or heads,
            self.kv_heads,
            self.codebook_size,
            self.grid_size,
            conditioning=self.conditioning,
            prefix_length=self.max_text_tokens if caption else 1,
            vocabulary=(tiny_feature_size(self.text_encoder) or FEATURE_SIZE) if caption else self.num_classes,
            multiple_of=16 if tiny else 256,
            dropout=self.dropout,
        )

    @property
    def grid_size(self) -> int:
        return self.image_size // self.downsample_factor

    @property
    def source(self) -> WeightsSource | None:
        """The released file of this variant, if `weights` is one of the released repositories."""
        if self.weights not in (LLAMAGEN, LLAMAGEN_TEXT):
            return None
        variant, size, conditioning = self.variant, self.image_size, self.conditioning
        released = RELEASED_VARIANTS[conditioning]
        if f"{variant} {size}" not in released:
            raise ConfigError(
                f"model: weights for variant {variant} at {size} pixels with conditioning {conditioning} were not "
                f"released, only {', '.join(released)}; choose one of these, or set model.weights [TM452]"
            )
        if conditioning == "class":
            return WeightsSource(LLAMAGEN, f"c2i_{variant}_{size}.pt", DOWNLOAD_SIZES[variant], "MIT")
        stage = "stage1_256" if size == 256 else "stage2_512"
        return WeightsSource(LLAMAGEN_TEXT, f"t2i_{variant}_{stage}.pt", DOWNLOAD_SIZES[variant], "MIT")

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        encodes = self.conditioning == "caption" and self.text_encoder == T5.hub and self.embeddings is None
        sources = (self.source, PUBLISHED_TOKENIZERS.get(self.autoencoder or ""), T5 if encodes else None)
        return tuple(source for source in sources if source is not None)

    def load_prompt_encoder(self, placement: Placement, null_embedding: Tensor | None = None) -> CachedCaptionEncoder:
        if self.conditioning == "class":
            raise ConfigError(
                "model.conditioning: a model with conditioning=class does not use captions; set "
                "model.conditioning=caption [TM453]"
            )
        return build_caption_encoder(
            self.text_encoder, self.max_text_tokens, null_embedding, placement, self.embeddings
        )

    def load(self, placement: Placement) -> LlamagenBackbone:
        return LlamagenBackbone(self, placement)

    def tiny(self) -> LlamagenSpec:
        return replace(
            self,
            variant="tiny",
            weights=None,
            autoencoder=None,
            image_size=32,
            downsample_factor=8,
            codebook_size=64,
            width=None,
            depth=None,
            heads=None,
            kv_heads=1 if self.kv_heads else None,
            max_text_tokens=min(self.max_text_tokens, 8),
            text_encoder="tiny",
            embeddings=None,
            dropout=0.0,
        )
