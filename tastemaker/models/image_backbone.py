"""Shared parts of the published image generators: frozen VAE, backbone, and how inputs reach the network."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.policy import Backbone
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Prompts, select_rows
from ..data.image_io import read_image, to_uint8
from ..data.image_io import resize_and_center_crop as resize_and_center_crop
from ..data.metadata_images import read_metadata_images
from .nets.gpt import is_sharded
from .text_encoders import CachedTextEncoder, disable_autocast

L = TypeVar("L", bound=Hashable)

DOWNSAMPLE_FACTOR = 8  # pixels per latent and side, of every published image generator here
NUM_TRAIN_TIMESTEPS = 1000  # of every published diffusion model here
DECODE_BATCH_LATENTS = 1 << 13  # latents of 8x8 pixels decoded in one call: one image of 720x720, two of 512x512


@dataclass(frozen=True)
class FrozenVae:
    """A frozen diffusers VAE: latents (raw - shift) * scale, [N, C, h, w], of images [N, 3, H, W] in [0, 1]."""

    net: Any
    shift: Tensor  # scalar, or per channel [C, 1, 1]
    scale: Tensor
    is_video: bool = False  # a video VAE, which encodes each image as a clip of one frame
    downsample_factor: int = DOWNSAMPLE_FACTOR  # pixels per latent and side

    @classmethod
    def from_config(cls, net: Any, config: Mapping[str, Any], *, is_video: bool) -> FrozenVae:
        """Take shift and scale from the VAE's config: mean and deviation per channel, or one factor of each."""
        device = next(net.parameters()).device
        means, deviations = config.get("latents_mean"), config.get("latents_std")
        if means and deviations:
            shift, std = (torch.tensor(x, device=device).view(-1, 1, 1) for x in (means, deviations))
            return cls(net, shift, 1 / std, is_video)
        shift = torch.tensor(config.get("shift_factor") or 0.0, device=device)
        return cls(net, shift, torch.tensor(config.get("scaling_factor") or 1.0, device=device), is_video)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode images to the mode of the posterior, shifted and scaled."""
        x = (2 * pixels - 1).to(self.net.dtype)
        with disable_autocast(x):
            raw: Tensor = self.net.encode(x[:, :, None] if self.is_video else x).latent_dist.mode().float()
        return ((raw[:, :, 0] if self.is_video else raw) - self.shift) * self.scale

    def decode(self, latents: Tensor) -> Tensor:
        """Decode in small batches: the activations of one decoder call take gigabytes."""
        positions = latents[0, 0].numel() * self.downsample_factor**2 // DOWNSAMPLE_FACTOR**2
        batch_size = max(1, DECODE_BATCH_LATENTS // positions)
        return torch.cat([self._decode(batch) for batch in torch.split(latents, batch_size)])

    def _decode(self, latents: Tensor) -> Tensor:
        raw = (latents / self.scale + self.shift).to(self.net.dtype)
        with disable_autocast(raw):
            pixels: Tensor = self.net.decode(raw[:, :, None] if self.is_video else raw, return_dict=False)[0].float()
        return ((pixels[:, :, 0] if self.is_video else pixels) / 2 + 0.5).clamp(0, 1)


class VaeAdapter:
    """An autoencoder of diffusers, of which subclasses change how it encodes or decodes."""

    def __init__(self, net: Any, checkpoint_decoder: bool = False) -> None:
        self.net, self.dtype, self.checkpoint_decoder = net, net.dtype, checkpoint_decoder

    def parameters(self) -> Iterator[nn.Parameter]:
        parameters: Iterator[nn.Parameter] = self.net.parameters()
        return parameters

    def encode(self, pixels: Tensor) -> Any:
        return self.net.encode(pixels)

    def run_stages(self, x: Tensor, stages: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """Run parts of the decoder one after the other; in a backward pass, one at a time keeps its activations."""
        for stage in stages:
            x = checkpoint_if(stage, self.checkpoint_decoder, x)
        return x


def checkpoint_if(function: Callable[..., Any], enabled: bool, *args: Any) -> Any:
    """Call a function, with activation checkpointing if it is enabled and gradients are computed."""
    return checkpoint(function, *args, use_reentrant=False) if enabled and torch.is_grad_enabled() else function(*args)


class TextConditionedBackbone(Backbone):
    """A denoiser with frozen text encoders, whose prompt embeddings are cached."""

    forward_passes = 1
    prompt_encoder: CachedTextEncoder

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return self.prompt_encoder.enable_training()

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        tensors = self.prompt_encoder(prompts)
        # Lengths stay on the CPU, so that cutting off padding or grouping by them needs no device synchronization.
        on_cpu = {name: x.cpu() for name, x in tensors.items() if name == "lengths"}
        return Condition(tuple(prompts), {**tensors, **on_cpu}, tuple(metadata))


class ImageBackbone(TextConditionedBackbone):
    """A denoiser of image latents [1, C, h, w] with a frozen VAE."""

    autoencoder: FrozenVae

    def with_size(self, height: int, width: int) -> Self:
        other, factor = copy(self), self.pixels[2] // self.shape[2]
        other.shape, other.pixels = (1, self.shape[1], height // factor, width // factor), (1, 3, height, width)
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels[:, 0])[:, None]

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        latents = x if frames is None else x[:, list(frames)]
        pixels = self.autoencoder.decode(latents.flatten(0, 1))
        return pixels.view(*latents.shape[:2], *pixels.shape[1:])


def predict_by_layout(
    net: nn.Module,
    predict: Callable[[Tensor, Tensor, Condition, L], Tensor],
    x: Tensor,
    t: Tensor,
    cond: Condition,
    layouts: Sequence[L],
) -> Tensor:
    """Predict samples whose network takes one layout of tokens per call: in one call for each layout among them.

    Sharded networks (FSDP) need equally many calls on all ranks, so that several layouts are refused there.
    """
    members = {layout: [i for i, each in enumerate(layouts) if each == layout] for layout in layouts}
    if len(members) == 1:
        return predict(x, t, cond, layouts[0])
    if is_sharded(net):
        raise ValueError(
            "the samples of a batch differ in the length of their prompts, or in the number or size of their images, "
            "which takes several network calls, and ranks that share weights must make equally many; set "
            "batch.rollout_batch_size=1 and batch.micro_batch_size=1, or engine.strategy=replicated; for images of one "
            "size set model.source_fit=sample [TM2454]"
        )
    parts = []
    for layout, indices in members.items():
        rows = torch.tensor(indices)
        parts.append(predict(*select_rows((x, t), rows), select_rows(cond, rows), layout))
    order = torch.tensor([i for indices in members.values() for i in indices])
    return select_rows(torch.cat(parts), order.argsort())


def unet_timestep(t: Tensor, num_train_timesteps: int = NUM_TRAIN_TIMESTEPS) -> Tensor:
    """Convert t in (0, 1] to the timestep index that networks were trained on: t = (k + 1) / num_train_timesteps is k.

    Times between two training timesteps stay between them; rounding errors of those that are meant exactly are removed.
    """
    timestep = (t.float() * num_train_timesteps - 1).clamp(min=0)
    nearest = timestep.round()
    return torch.where((timestep - nearest).abs() < 1e-3, nearest, timestep)


def cast_to_network_dtype(net: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Cast inputs to the dtype of the network's weights; autocast, if enabled, continues from there."""
    dtype = next(net.parameters()).dtype
    return tuple(x.to(dtype) for x in inputs)


def check_image_size(height: int, width: int, multiple: int = 8) -> None:
    """Refuse an image size that the autoencoder cannot represent."""
    for name, side in (("height", height), ("width", width)):
        if side % multiple or not multiple <= side <= 8192:
            raise ValueError(
                f"'{name}': expected a multiple of {multiple} from {multiple} to 8192, got {side}; change '{name}' "
                "[TM432]"
            )


def check_image_shape(pixels: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse images [B, *] whose size differs from that of the model's samples."""
    if pixels.shape[1:] != expected:
        (data_height, data_width), (height, width) = pixels.shape[-2:], expected[-2:]
        raise ConfigError(
            f"the images are {data_width}x{data_height} pixels, but the model generates {width}x{height}; set "
            "data.image_size, or model.height and model.width [TM433]"
        )


def read_condition_image(image: object, height: int, width: int) -> Tensor | None:
    """Read the image that a prompt comes with, a path or pixels [F, 3, H, W], at a size: [1, 3, height, width].

    Of several frames the first is taken. None if the prompt has no image.
    """
    pixels = read_image(Path(image)) if isinstance(image, (str, Path)) else image
    return resize_and_center_crop(pixels[:1], height, width) if isinstance(pixels, Tensor) else None


def read_source_images(image: object) -> tuple[Tensor, ...]:
    """Read the images that a prompt comes with, in their own sizes: [1, 3, H, W] each.

    `image` is a path, pixels [F, 3, H, W], or a list of those; None is no image. Of several frames the first is taken.
    """
    if image is None or (isinstance(image, (list, tuple)) and not image):
        return ()
    sources = read_metadata_images(image)
    if sources is None:
        kinds = [type(each).__name__ for each in (image if isinstance(image, (list, tuple)) else [image])]
        raise ValueError(
            "metadata: expected a path, pixels [F, 3, H, W] or a list of those as 'image', got "
            f"{', '.join(kinds):.80}; correct 'image' [TM2450]"
        )
    return tuple(source[None] for source in sources)


def resize_with_lanczos(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize an image [1, 3, H, W] as Pillow does, in 8 bits per channel, as diffusers' pipelines do."""
    if tuple(pixels.shape[2:]) == (height, width):
        return pixels
    (array,) = to_uint8(pixels)
    resized = Image.fromarray(array).resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None].to(pixels.device, torch.float32) / 255


def condition_image_key(image: object) -> int | str:
    """Return a key by which the same image of several prompts is recognized, so that it is encoded once."""
    return str(image) if isinstance(image, (str, Path)) else id(image)
