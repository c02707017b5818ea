"""DiT over the latents of any autoencoder: told nothing, a class or words; noise, velocity or flow as the path says."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from ...core.autoencoder import ContinuousAutoencoder
from ...core.policy import Process
from ...core.registry import ConfigError
from ...core.types import Condition, LatentBatch, Metadata, Placement, Prompts, to_device
from ...data.class_labels import ClassLabels, make_class_labels
from ...processes.gaussian import GaussianProcess
from .. import autoencoder_fingerprint, loading
from ..caption_encoder import CachedCaptionEncoder, build_caption_encoder, tiny_feature_size
from ..nets.latent_dit import EMBEDDING_CONVENTIONS, LatentDiT, LatentDiTConfig, position_embedding_2d
from ..pipeline_components import TINY
from ..pipeline_layout import DiffusersConversion
from ..pretrained import HUB, WeightsSource
from ..unet_common import cast_to_network_dtype, unet_timestep
from ..vae import load_vae
from . import checkpoint_formats, diffusers_format

Count = Annotated[int, Field(ge=1, le=256)]
DiTConditioning = Literal["nothing", "class", "words", "caption"]
DiTSize = Literal["S", "B", "L", "XL"]
SIZES: dict[DiTSize, tuple[int, int, int]] = {
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}  # width, depth and heads
FACEBOOK = {
    hub: WeightsSource(hub, size="3.0 GB", licence="CC-BY-NC-4.0")
    for hub in ("facebook/DiT-XL-2-256", "facebook/DiT-XL-2-512")
}
T5 = "google/flan-t5-base"
HASH_VOCABULARY_SIZE = 8192  # words, by what their letters add up to; 0 stands for none
MAX_SCALE_ERROR = 1.25  # how far from one the deviation of latents may be


def hash_words(prompts: Prompts, length: int) -> Tensor:
    """Each word by a number of its own, whatever the language: no list of words is needed, and two seldom meet."""
    return torch.stack([_spelled(prompt, length) for prompt in prompts])


@lru_cache(maxsize=2**16)  # captions come again, and a step has hundreds
def _spelled(prompt: str, length: int) -> Tensor:
    said = [1 + zlib.crc32(word.encode()) % (HASH_VOCABULARY_SIZE - 1) for word in prompt.lower().split()][:length]
    return torch.tensor(said + [0] * (length - len(said)))


class LatentDitBackbone:
    """Denoises [1, C, h, w] latents."""

    passes = 1

    def __init__(
        self, spec: LatentDit, codec: ContinuousAutoencoder, net: nn.Module, captions: CachedCaptionEncoder | None
    ) -> None:
        self.spec, self.codec, self.net, self.captions = spec, codec, net, captions
        self.device = next(net.parameters()).device
        self.shape, self.pixels = spec.shape, (1, 3, spec.pixels, spec.pixels)

    @cached_property
    def fingerprint(self) -> str:
        return autoencoder_fingerprint.autoencoder_fingerprint(self.codec)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        said = self.captions(prompts)["features"] if self.captions is not None else self.spec.said(prompts)
        return Condition(tuple(prompts), {} if said is None else {"said": to_device(said, self.device)}, tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        (seen,) = cast_to_network_dtype(self.net, x[:, 0])
        out: Tensor = self.net(seen, unet_timestep(t), cond.tensors.get("said"))
        return out[:, None, : self.shape[1]]  # the variance, where one was learned, is no part of any path

    def encode(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1:] != self.pixels:
            high, wide = pixels.shape[-2:]
            raise ConfigError(
                f"data: pictures are {wide}x{high}, the model makes {self.pixels[3]}x{self.pixels[2]}; "
                f"set data.size={self.pixels[3]}, or model.pixels"
            )
        return self.codec.encode(pixels.flatten(0, 1)).float().view(-1, *self.shape) * self.spec.scale

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = x if frames is None else x[:, list(frames)]
        made = self.codec.decode(shown.flatten(0, 1) / self.spec.scale)
        return made.view(*shown.shape[:2], *self.pixels[1:])

    def taken(self, latents: LatentBatch) -> Tensor:
        if latents.codec != self.fingerprint:
            raise ConfigError(
                f"data: the latents were made by the autoencoder {latents.codec:.40}, the model's codec is "
                f"{self.fingerprint}; encode the pictures again with `tastemaker encode`, or set model.codec"
            )
        if latents.x.shape[1:] != self.shape[1:]:
            found, wanted = (list(shape[1:]) for shape in (latents.x.shape, self.shape))
            raise ConfigError(f"data: latents are {found}, the model has {wanted}; set model.pixels as they were made")
        self._scaled(latents.deviation)
        return to_device(latents.x, self.device).float().view(-1, *self.shape) * self.spec.scale

    def _scaled(self, deviation: float) -> None:
        """Refuse latents that are far too large or small to begin with; weights that were trained may know them so."""
        if 1 / MAX_SCALE_ERROR < deviation * self.spec.scale < MAX_SCALE_ERROR:
            return
        found = f"model.scale: the latents' deviation is {deviation:.4g}, times {self.spec.scale:g} it is far from 1"
        if self.spec.weights in (None, TINY):
            raise ConfigError(f"{found}, which the path expects; set model.scale={1 / deviation:.4g}")
        warnings.warn(f"{found}; right only if '{self.spec.weights!s:.200}' were trained on such", stacklevel=3)


def build_network(spec: LatentDit, placement: Placement) -> LatentDiT:
    if spec.weights in (None, TINY):  # a small one begins open, or tests would look right whatever its blocks did
        return loading.init_random(lambda: LatentDiT(spec.net(), closed=not spec.weights), spec.seed, placement)
    with torch.device("meta"):
        net = LatentDiT(spec.net())
    tensors = checkpoint_formats.read_dit_checkpoint(str(spec.weights), spec.habit, spec.patch)
    loading.assign_state_dict(net, tensors, loading.trainable_dtype(placement), str(spec.weights))
    net.place = position_embedding_2d(net.shape.side // net.shape.patch, net.shape.width, net.shape.habit)[None]
    return net.to(placement.device)


@dataclass(frozen=True)
class LatentDit:
    """DiT in its published sizes, or any other; told nothing, a class, words of its own, or captions T5 has read."""

    size: DiTSize = "S"
    told: DiTConditioning = "nothing"
    weights: str | None = None  # a run, a file, diffusers' folder, or facebook's on the hub; at random if not given
    codec: str | None = "playground/vae"  # a run, a file or diffusers' AutoencoderKL; without, coarse pixels
    pixels: Annotated[int, Field(ge=8, le=4096)] = 64  # a side
    patch: Count = 2  # latents a side that one token stands for
    channels: Annotated[int, Field(ge=1, le=256)] = 16  # of the codec
    factor: Literal[1, 2, 4, 8, 16, 32] = 8  # of the codec
    scale: PositiveFloat = 1.0  # what the codec's latents are multiplied by to have deviation 1; `encode` measures it
    classes: Annotated[int, Field(ge=1, le=10**6)] = 1000
    names: tuple[str, ...] = ()  # of the classes, in order; a thousand without are ImageNet's
    words: Annotated[int, Field(ge=1, le=512)] = 24  # of a prompt that are read
    t5: str = T5  # the encoder of captions: a folder, or its name on the hub
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no encoder is loaded
    features: Annotated[int, Field(ge=1, le=16384)] = 768  # of a word of T5's
    sigma: bool = False  # a variance comes out too, as of facebook's; it is kept, and neither used nor trained
    habit: Literal["facebook", "diffusers", "explainingai"] = "facebook"  # how time and places are counted
    width: Annotated[int, Field(ge=8, le=16384)] | None = None  # likewise below: instead of the size's
    depth: Count | None = None
    heads: Count | None = None
    head: Annotated[int, Field(ge=2, le=1024)] | None = None  # width of one; all are the width together
    inner: Annotated[int, Field(ge=8, le=65536)] | None = None  # of the perceptrons; four times the width
    waves: Annotated[int, Field(ge=4, le=16384, multiple_of=2)] = 256  # that tell the time
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess

    def __post_init__(self) -> None:
        unit, shape = self.factor * self.patch, self.net()
        if self.pixels % unit:
            raise ValueError(f"'pixels' is {self.pixels}; expected a multiple of factor times patch, which is {unit}")
        if shape.mixed % shape.heads or shape.width % 4:
            raise ValueError(
                f"'width' is {shape.width}; expected a multiple of 4 and of 'heads', which is {shape.heads}"
            )
        if self.told == "class":
            self.known()

    def known(self) -> ClassLabels:
        return make_class_labels(self.classes, self.names)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        side = self.pixels // self.factor
        return 1, self.channels, side, side

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        asked = [name for name in (self.weights, self.codec) if name and HUB.fullmatch(name)]
        away = [
            name
            for name in dict.fromkeys(asked)
            if not Path(name).exists() and not autoencoder_fingerprint.is_shipped(name)
        ]
        return tuple(FACEBOOK.get(name, WeightsSource(name)) for name in away)

    def net(self) -> LatentDiTConfig:
        width, depth, heads = SIZES[self.size]
        width = self.width or width
        return LatentDiTConfig(
            self.channels, self.pixels // self.factor, self.patch, width, self.depth or depth, self.heads or heads,
            inner=self.inner or 4 * width,
            outputs=self.channels * (2 if self.sigma else 1),
            classes=self.classes if self.told == "class" else 0,
            vocabulary=HASH_VOCABULARY_SIZE if self.told == "words" else 0,
            features=tiny_feature_size(self.t5) or self.features if self.told == "caption" else 0,
            words=self.words if self.told in ("words", "caption") else 0,
            waves=self.waves,
            habit=EMBEDDING_CONVENTIONS[self.habit],
            head=self.head or 0,
        )  # fmt: skip

    def said(self, prompts: Prompts) -> Tensor | None:
        """Numbers of classes [B] or of words [B, W]; the empty prompt is the class after the last, or no words."""
        if self.told == "words":
            return hash_words(prompts, self.words)
        if self.told != "class":
            return None
        known = self.known()
        return torch.tensor([known.number(prompt) if prompt.strip() else self.classes for prompt in prompts])

    def texts(self, placement: Placement) -> CachedCaptionEncoder:
        if self.told != "caption":
            raise ConfigError(f"model: told {self.told}, there is no caption to embed; set model.told=caption")
        return build_caption_encoder(self.t5, self.words, None, placement, self.embeddings)

    def moved(self, tensors: Mapping[str, Tensor]) -> DiffusersConversion:
        shape, count = self.net(), self.classes if self.told == "class" else 1  # one that adds nothing
        diffusers_format.check_convertible(shape)
        labels = {str(i): self.known().name(i) for i in range(count)} if shape.classes else {}
        return DiffusersConversion(
            "DiTTransformer2DModel", "transformer", "DiTPipeline",
            settings=diffusers_format.diffusers_config(shape),
            tensors=diffusers_format.to_diffusers_keys(tensors, shape),
            index={"id2label": labels} if labels else {},
            reads={"told": "class", "classes": count, "names": self.names if shape.classes else ()},
            differs=diffusers_format.describe_differences(shape),
        )  # fmt: skip

    def load(self, placement: Placement) -> LatentDitBackbone:
        known = load_vae(self.codec, self.channels, self.factor, placement)
        texts = self.texts(placement) if self.told == "caption" else None
        return LatentDitBackbone(self, known, build_network(self, placement), texts)

    def tiny(self) -> LatentDit:
        small = replace(self, weights=TINY, codec=None, channels=16, factor=8, scale=1.0)
        patch = max(1, self.pixels // 8 // 2)
        net = replace(small, patch=patch, width=32, depth=1, heads=2, head=None, inner=None, waves=32, embeddings=None)
        return replace(net, t5=TINY, words=min(self.words, 8))
