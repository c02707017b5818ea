"""DiT (Peebles and Xie 2023) on the latents of any autoencoder: unconditional, or given a class, words or a caption."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from ...core.autoencoder import AutoencoderNet
from ...core.model_spec import DiffusersConversion, ModelSpec, Tensors
from ...core.policy import Backbone, Process
from ...core.registry import ConfigError
from ...core.types import Condition, LatentBatch, Metadata, Placement, Prompts, to_device
from ...core.weights import NetworkTraits
from ...data.class_labels import ClassLabels, make_class_labels, names_from_data
from ...processes.gaussian import GaussianProcess
from .. import loading, weight_files
from ..caption_encoder import CachedCaptionEncoder, build_caption_encoder, tiny_feature_size
from ..image_backbone import cast_to_network_dtype, unet_timestep
from ..nets.latent_dit import EMBEDDING_CONVENTIONS, LatentDiT, LatentDiTConfig, position_embedding_2d
from ..pipeline_components import TINY
from ..pretrained import HUB_ID, WeightsSource
from ..pretrained_autoencoder import autoencoder_fingerprint, load_vae
from .checkpoint import (
    check_convertible,
    describe_differences,
    diffusers_config,
    read_dit_checkpoint,
    to_diffusers_keys,
    to_explainingai_keys,
)

Count = Annotated[int, Field(ge=1, le=256)]
DiTConditioning = Literal["nothing", "class", "words", "caption"]
DiTVariant = Literal["S", "B", "L", "XL"]
VARIANTS: dict[DiTVariant, tuple[int, int, int]] = {  # width, depth and heads
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}
FACEBOOK_RELEASES = {
    hub: WeightsSource(hub, size="3.0 GB", license="CC-BY-NC-4.0")
    for hub in ("facebook/DiT-XL-2-256", "facebook/DiT-XL-2-512")
}
T5 = "google/flan-t5-base"
HASH_VOCABULARY_SIZE = 8192  # word ids are hashes; 0 is padding
MAX_SCALE_ERROR = 1.25  # largest factor by which the standard deviation of latents may differ from 1


def hash_words(prompts: Prompts, length: int) -> Tensor:
    """Return hashes of words as ids, [B, length]: no vocabulary file is needed, and collisions are rare."""
    return torch.stack([_hash_prompt(prompt, length) for prompt in prompts])


@lru_cache(maxsize=2**16)  # prompts repeat, and a step has hundreds of them
def _hash_prompt(prompt: str, length: int) -> Tensor:
    ids = [1 + zlib.crc32(word.encode()) % (HASH_VOCABULARY_SIZE - 1) for word in prompt.lower().split()][:length]
    return torch.tensor(ids + [0] * (length - len(ids)))


class LatentDitBackbone(Backbone):
    """Denoises latents [1, C, h, w]; the path's prediction type says what the output is."""

    forward_passes = 1
    # One projection follows attention, so that the gradient of attention is a tensor of its own.
    traits = NetworkTraits(cudnn_backward=True)

    def __init__(
        self,
        spec: LatentDitSpec,
        autoencoder: AutoencoderNet,
        net: nn.Module,
        caption_encoder: CachedCaptionEncoder | None,
    ) -> None:
        self.spec, self.autoencoder, self.net, self.caption_encoder = spec, autoencoder, net, caption_encoder
        self.device = next(net.parameters()).device
        self.shape, self.pixels = spec.shape, (1, 3, spec.image_size, spec.image_size)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the autoencoder, by which stored latents are checked."""
        return autoencoder_fingerprint(self.autoencoder)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        if self.caption_encoder is not None:
            condition: Tensor | None = self.caption_encoder(prompts)["features"]
        else:
            condition = self.spec.condition_ids(prompts)
        tensors = {} if condition is None else {"condition": to_device(condition, self.device)}
        return Condition(tuple(prompts), tensors, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        (latents,) = cast_to_network_dtype(self.net, x[:, 0])
        out: Tensor = self.net(latents, unet_timestep(t, self.spec.num_train_timesteps), cond.tensors.get("condition"))
        return out[:, None, : self.shape[1]]  # without the learned variance, which no sampler here uses

    def encode(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1:] != self.pixels:
            data_height, data_width = pixels.shape[-2:]
            raise ConfigError(
                f"data.image_size: the images are {data_width}x{data_height} pixels, but the model generates "
                f"{self.pixels[3]}x{self.pixels[2]}; set data.image_size={self.pixels[3]}, or change "
                "model.image_size [TM442]"
            )
        return self.autoencoder.encode(pixels.flatten(0, 1)).float().view(-1, *self.shape) * self.spec.scaling_factor

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        latents = x if frames is None else x[:, list(frames)]
        pixels = self.autoencoder.decode(latents.flatten(0, 1) / self.spec.scaling_factor)
        return pixels.view(*latents.shape[:2], *self.pixels[1:])

    def from_latents(self, latents: LatentBatch) -> Tensor:
        if latents.autoencoder != self.fingerprint:
            raise ConfigError(
                f"data: the latents were made with the autoencoder {latents.autoencoder:.40}, but the model uses "
                f"{self.fingerprint}; encode the images again with `tastemaker encode`, or set model.autoencoder "
                "[TM443]"
            )
        if latents.x.shape[1:] != self.shape[1:]:
            stored, expected = (list(shape[1:]) for shape in (latents.x.shape, self.shape))
            raise ConfigError(
                f"data: the latents are {stored}, but the model has {expected}; set model.image_size to the size "
                "at which the images were encoded [TM444]"
            )
        self._check_scale(latents.std)
        return to_device(latents.x, self.device).float().view(-1, *self.shape) * self.spec.scaling_factor

    def _check_scale(self, std: float) -> None:
        """Refuse latents far from unit variance for new weights; warn for trained ones, which may expect them."""
        factor = self.spec.scaling_factor
        if 1 / MAX_SCALE_ERROR < std * factor < MAX_SCALE_ERROR:
            return
        deviation = f"{std:.4g}, and {std * factor:.4g} after scaling by {factor:g}"
        message = f"model.scaling_factor: the standard deviation of the latents is {deviation}"
        if self.spec.weights in (None, TINY):
            raise ConfigError(
                f"{message}, but the path expects about 1; set model.scaling_factor={1 / std:.4g} [TM445]"
            )
        warnings.warn(
            f"{message}; this is right only if '{self.spec.weights!s:.200}' was trained with such latents, "
            "otherwise correct model.scaling_factor [TM446]",
            stacklevel=3,
        )


def load_latent_dit(spec: LatentDitSpec, placement: Placement) -> LatentDiT:
    """Build the network with the weights of a checkpoint, or random ones."""
    config = spec.network_config()
    if spec.weights in (None, TINY):
        # Without zero initialization in tests: otherwise outputs would not depend on the blocks.
        return loading.init_random(lambda: LatentDiT(config, zero_init=not spec.weights), spec.seed, placement)
    with torch.device("meta"):
        net = LatentDiT(config)
    tensors = read_dit_checkpoint(str(spec.weights), spec.convention, spec.patch_size)
    loading.assign_state_dict(net, tensors, loading.trainable_dtype(placement), str(spec.weights))
    # The position table is in no checkpoint.
    net.place = position_embedding_2d(config.side // config.patch_size, config.width, config.convention)[None]
    return net.to(placement.device)


@dataclass(frozen=True)
class LatentDitSpec(ModelSpec):
    """DiT of a published or any other size: unconditional, or given a class, hashed words, or a caption read by T5."""

    variant: DiTVariant = "S"
    conditioning: DiTConditioning = "nothing"
    weights: str | None = None  # run, file, diffusers folder, or facebook's hub ids; random if not given
    autoencoder: str | None = "playground/vae"  # run, file or diffusers' AutoencoderKL; without, coarse pixels
    image_size: Annotated[int, Field(ge=8, le=4096)] = 64  # pixels per side
    patch_size: Count = 2  # latents per token and side
    latent_channels: Annotated[int, Field(ge=1, le=256)] = 16  # of the autoencoder
    downsample_factor: Literal[1, 2, 4, 8, 16, 32] = 8  # of the autoencoder
    scaling_factor: PositiveFloat = 1.0  # makes the autoencoder's latents unit variance; `encode` measures it
    num_classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    class_names: tuple[str, ...] = ()  # in order; a thousand classes without names are ImageNet's
    max_text_tokens: Annotated[int, Field(ge=1, le=512)] = 24  # words, or tokens of a caption
    text_encoder: str = T5  # of captions: folder or hub id
    embeddings: Path | None = None  # folder written by `tastemaker embed`; the text encoder is loaded only if needed
    text_embed_dim: Annotated[int, Field(ge=1, le=16384)] = 768  # T5's hidden size
    learn_sigma: bool = False  # the network also outputs a variance, as facebook's; it is neither used nor trained
    convention: Literal["facebook", "diffusers", "explainingai"] = "facebook"  # how time and position are embedded
    width: Annotated[int, Field(ge=8, le=16384)] | None = None  # this and those below replace the variant's
    depth: Count | None = None
    heads: Count | None = None
    head_dim: Annotated[int, Field(ge=2, le=1024)] | None = None  # width / heads if not given
    intermediate_size: Annotated[int, Field(ge=8, le=65536)] | None = None  # of the MLPs; four times the width
    timestep_embed_dim: Annotated[int, Field(ge=4, le=16384, multiple_of=2)] = 256  # of the sinusoidal embedding
    num_train_timesteps: Annotated[int, Field(ge=2, le=100_000)] = 1000  # the network gets t as index among these
    seed: int = 0
    frames: ClassVar[int] = 1
    process_type: ClassVar[type[Process]] = GaussianProcess
    releases: ClassVar[tuple[WeightsSource, ...]] = tuple(FACEBOOK_RELEASES.values())

    def __post_init__(self) -> None:
        unit, config = self.downsample_factor * self.patch_size, self.network_config()
        if self.image_size % unit:
            raise ValueError(
                f"'image_size': expected a multiple of downsample_factor * patch_size = {unit}, got "
                f"{self.image_size}; change 'image_size' [TM447]"
            )
        if config.attention_width % config.heads or config.width % 4:
            raise ValueError(
                f"'width': expected a multiple of 4 and of 'heads' ({config.heads}), got {config.width}; change "
                "'width' or 'heads' [TM448]"
            )
        if self.conditioning == "class":
            self.class_labels()

    def class_labels(self) -> ClassLabels:
        return make_class_labels(self.num_classes, self.class_names)

    def with_class_names(self, names: Sequence[str]) -> Self:
        if self.conditioning != "class" or self.class_names:
            return self
        return replace(self, class_names=names_from_data(self.class_labels(), names))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        side = self.image_size // self.downsample_factor
        return 1, self.latent_channels, side, side

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        hub_ids = [name for name in (self.weights, self.autoencoder) if name and HUB_ID.fullmatch(name)]
        return tuple(
            FACEBOOK_RELEASES.get(name, WeightsSource(name))
            for name in dict.fromkeys(hub_ids)
            if not Path(name).exists() and not weight_files.is_shipped(name)
        )

    def network_config(self) -> LatentDiTConfig:
        width, depth, heads = VARIANTS[self.variant]
        width, has_words = self.width or width, self.conditioning in ("words", "caption")
        features = tiny_feature_size(self.text_encoder) or self.text_embed_dim
        return LatentDiTConfig(
            self.latent_channels,
            self.image_size // self.downsample_factor,
            self.patch_size,
            width,
            self.depth or depth,
            self.heads or heads,
            intermediate_size=self.intermediate_size or 4 * width,
            outputs=self.latent_channels * (2 if self.learn_sigma else 1),
            num_classes=self.num_classes if self.conditioning == "class" else 0,
            vocabulary=HASH_VOCABULARY_SIZE if self.conditioning == "words" else 0,
            text_embed_dim=features if self.conditioning == "caption" else 0,
            max_text_tokens=self.max_text_tokens if has_words else 0,
            timestep_embed_dim=self.timestep_embed_dim,
            convention=EMBEDDING_CONVENTIONS[self.convention],
            head_dim=self.head_dim or 0,
        )

    def condition_ids(self, prompts: Prompts) -> Tensor | None:
        """Return class ids [B] or word ids [B, L]; the empty prompt is class `num_classes`, or no words."""
        if self.conditioning == "words":
            return hash_words(prompts, self.max_text_tokens)
        if self.conditioning != "class":
            return None
        labels = self.class_labels()
        return torch.tensor([labels.find_class(prompt) if prompt.strip() else self.num_classes for prompt in prompts])

    def load_prompt_encoder(self, placement: Placement) -> CachedCaptionEncoder:
        if self.conditioning != "caption":
            raise ConfigError(
                f"model.conditioning: expected caption, because captions are embedded, got {self.conditioning}; "
                "set model.conditioning=caption [TM449]"
            )
        return build_caption_encoder(self.text_encoder, self.max_text_tokens, None, placement, self.embeddings)

    @property
    def converts_to_diffusers(self) -> bool:
        return True

    def to_diffusers(self, tensors: Mapping[str, Tensor]) -> DiffusersConversion:
        config = self.network_config()
        check_convertible(config)
        count = config.num_classes or 1  # an unconditional network gets one class, whose embedding is zero
        labels = {str(i): self.class_labels().name(i) for i in range(count)} if config.num_classes else {}
        class_names = self.class_names if config.num_classes else ()
        return DiffusersConversion(
            "DiTTransformer2DModel",
            "transformer",
            "DiTPipeline",
            config=diffusers_config(config),
            tensors=to_diffusers_keys(tensors, config),
            model_index={"id2label": labels} if labels else {},
            spec_fields={"conditioning": "class", "num_classes": count, "class_names": class_names},
            differences=describe_differences(config),
            autoencoder=self.autoencoder,
            scaling_factor=self.scaling_factor,
        )

    def to_authors(self, tensors: Mapping[str, Tensor]) -> Tensors:
        return to_explainingai_keys(tensors, self.network_config())

    def load(self, placement: Placement) -> LatentDitBackbone:
        autoencoder = load_vae(self.autoencoder, self.latent_channels, self.downsample_factor, placement)
        captions = self.load_prompt_encoder(placement) if self.conditioning == "caption" else None
        return LatentDitBackbone(self, autoencoder, load_latent_dit(self, placement), captions)

    def tiny(self) -> LatentDitSpec:
        return replace(
            self,
            weights=TINY,
            autoencoder=None,
            latent_channels=16,
            downsample_factor=8,
            scaling_factor=1.0,
            patch_size=max(1, self.image_size // 8 // 2),
            width=32,
            depth=1,
            heads=2,
            head_dim=None,
            intermediate_size=None,
            timestep_embed_dim=32,
            embeddings=None,
            text_encoder=TINY,
            max_text_tokens=min(self.max_text_tokens, 8),
        )
