"""`tastemaker encode`: write the latents or tokens of images, so that a generator trains without decoding them.

Latents go to safetensors shards (see `latents.py`), tokens to LlamaGen's folders of .npy files (see `tokens.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..config.check import torchrun_world_size
from ..config.load import YAML_SUFFIXES, list_trainable_recipes, load_any_config, read_recipe
from ..config.schema import AutoencoderRunConfig
from ..console import ProgressBar, make_console
from ..core import output_paths
from ..core.autoencoder import AutoencoderNet, AutoencoderSpec, as_autoencoder
from ..core.registry import ConfigError
from ..core.safe_files import read_json
from ..core.types import Placement
from ..models.image_tokenizer import build_frozen_tokenizer, read_tokenizer
from ..models.nets.vq import VQ
from ..models.pretrained_autoencoder import autoencoder_fingerprint, load_autoencoder
from ..training.run_directory import find_named_weights, find_run_checkpoint
from .cifar10 import is_cifar10, load_cifar10
from .image_io import ImageError
from .image_sources import READ_ERRORS, open_class_folder
from .image_transforms import center_and_flip, center_crop, decode_square, ten_crop
from .images import ImageCaptionSource, ImageCollection, ImageCollectionDataset
from .latents import (
    MANIFEST,
    SHARD_METADATA,
    LatentFolder,
    LatentManifest,
    files_fingerprint,
    read_manifest,
    read_shard,
)

BATCH_SIZE = 64  # squares encoded per network call
TOKEN_MANIFEST = "codes.json"  # what the tokens of a folder were computed from
Views = Literal["center", "flip", "ten-crop"]
NUM_VIEWS: dict[Views, int] = {"center": 1, "flip": 2, "ten-crop": 10}


def rank_and_world_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), torchrun_world_size()


def console_of_first_rank(console: Console, rank: int) -> Console:
    return console if rank == 0 else make_console(quiet=True)


@dataclass
class SkippedFiles:
    """Images that cannot be read: each is reported and skipped, and one more than `limit` is an error."""

    limit: int
    messages: list[str] = field(default_factory=list)

    def add(self, message: str, error: Exception, console: Console) -> None:
        self.messages.append(message)
        count = len(self.messages)
        if count > self.limit:
            before = f", and {count - 1} before it" if count > 1 else ""
            failure = f"{message}{before}; or skip more files with --max-skipped {2 * count} [TM829]"
            if os.environ.get("RANK", "0") != "0":  # torchrun shows the errors of the first rank only
                console.print(f"error: {failure}", markup=False, highlight=False, soft_wrap=True)
            raise ConfigError(failure) from error
        console.print(f"skipped: {message}", markup=False, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """The end of a sentence about how many images were processed."""
        return f", {len(self.messages)} could not be read" if self.messages else ""


@dataclass(frozen=True)
class LatentEncodingOptions:
    """Which images to encode, how, and where to write their latents."""

    images: Path
    vae: str
    out: Path
    size: int
    flip: bool = False
    caption_source: ImageCaptionSource | None = None  # by default captions, else class ids, else empty prompts
    shard_size: int = 1024  # images per shard
    max_skipped: int = 10  # unreadable images per rank; one more is an error


def encode_latents(options: LatentEncodingOptions, placement: Placement, console: Console) -> Path:
    """Write the shards that are missing, each rank its share; the content of a shard does not depend on the rank."""
    output_paths.check_output_directory(options.out)
    autoencoder = load_continuous_autoencoder(options.vae, options.size, placement, console)
    images = open_images(options)
    side = options.size // autoencoder.stride
    manifest = LatentManifest(
        autoencoder=autoencoder_fingerprint(autoencoder),
        data=files_fingerprint(options.images),
        images=str(options.images.resolve()),
        num_images=len(images),
        image_size=options.size,
        views=2 if options.flip else 1,
        shape=(autoencoder.channels, side, side),
        caption_source=images.caption_source,
        class_names=images.source.class_names,
        shard_size=options.shard_size,
    )
    if (options.out / MANIFEST).is_file():
        check_same_manifest(asdict(manifest), asdict(read_manifest(options.out)), options.out)
    manifest.write(options.out)
    rank, world_size = rank_and_world_size()
    rank_console = console_of_first_rank(console, rank)
    files = [options.out / manifest.shard_file(i) for i in range(manifest.num_shards)]
    shards = range(rank, manifest.num_shards, world_size)
    # Only of this rank's shards: other ranks may be writing theirs.
    messages = [message for i in shards if files[i].is_file() for message in read_shard(files[i]).skipped]
    skipped = SkippedFiles(options.max_skipped, messages)
    encoder = LatentEncoder(autoencoder, images, manifest, placement, skipped, console)
    with ProgressBar(rank_console) as progress:
        progress.start("encoding", sum(len(manifest.shard_range(i)) for i in shards), unit="images")
        for i in shards:
            for count in encoder.write_shard(files[i], manifest.shard_range(i)):
                progress.advance(count)
    if all(file.is_file() for file in files):
        latents = LatentFolder(options.out).load(0)
        summary = SkippedFiles(0, [message for shard in latents.shards for message in shard.skipped]).summary()
        line = f"latents of {len(latents)} images in {options.out}, standard deviation {latents.std:.4g}{summary}"
        rank_console.print(line, markup=False, soft_wrap=True)
    return options.out


def open_images(options: LatentEncodingOptions) -> ImageCollectionDataset:
    """The images with captions; by default with class ids where there are no captions but several classes."""

    def load(caption_source: ImageCaptionSource | None) -> ImageCollectionDataset:
        return ImageCollection(options.images, options.size, caption_source=caption_source, num_workers=0).load(0)

    images = load(options.caption_source)
    unlabeled = options.caption_source is None and images.caption_source == "empty"
    return load("class_id") if unlabeled and len(images.source.class_names) > 1 else images


def resolve_autoencoder(name: str, option: str, console: Console) -> tuple[str, AutoencoderSpec | None]:
    """The run, file or name of an autoencoder; for a configuration, its run, or the settings that name its weights.

    Refuses a configuration whose autoencoder is not trained yet.
    """
    if not name.endswith(YAML_SUFFIXES) and (name not in list_trainable_recipes() or Path(name).exists()):
        return name, None
    if "data" not in read_recipe(name):
        return name, None  # a file with the settings of a published checkpoint alone
    config = load_any_config(name)
    if not isinstance(config, AutoencoderRunConfig):
        raise ConfigError(
            f"{option}: {name:.200} does not train an autoencoder; give a configuration with a section `autoencoder:` "
            "[TM640]"
        )
    if find_run_checkpoint(config, name, (), console) is not None:
        return str(config.directory), None
    if not find_named_weights(config):
        raise ConfigError(
            f"{option}: {name:.200} has no autoencoder.weights, and {config.directory} no checkpoint, so its weights "
            f"would be random; run `tastemaker train {name:.200}` first, or name a run or a file"
            " [TM842]"
        )
    return name, config.autoencoder


def load_any_autoencoder(name: str, option: str, placement: Placement, console: Console) -> nn.Module:
    """A frozen autoencoder of a run, a file, a folder, a published name or a configuration."""
    source, spec = resolve_autoencoder(name, option, console)
    return spec.load(placement).requires_grad_(False).eval() if spec else load_autoencoder(source, placement)


def load_continuous_autoencoder(name: str, size: int, placement: Placement, console: Console) -> AutoencoderNet:
    net = as_autoencoder(load_any_autoencoder(name, "--vae", placement, console))
    if not net.channels:
        raise ConfigError(
            f"--vae: '{name:.200}' does not have continuous latents; use --tokenizer for a tokenizer. A network "
            "of your own must derive from AutoencoderNet and define `channels`, `stride`, `encode` and `decode` "
            "[TM159]"
        )
    if size % net.stride:
        raise ConfigError(
            f"--size: {size} is not a multiple of {net.stride}, the stride of the autoencoder; choose a multiple "
            f"of {net.stride} [TM160]"
        )
    return net


def check_same_manifest(manifest: Mapping[str, Any], existing: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume in a folder that was started with another autoencoder, other images or another size."""
    changed = next((key for key in manifest if existing.get(key) != manifest[key]), None)
    if changed is not None:
        what = {"data": "images", "num_images": "images"}.get(changed, changed)
        raise ConfigError(
            f"--out: {folder} was started with another '{what}' ({existing.get(changed)!s:.60}, now "
            f"{manifest[changed]!s:.60}); choose another folder with --out, or remove {folder} [TM161]"
        )


@dataclass(frozen=True)
class LatentChunk:
    """Latents of consecutive images in half precision."""

    x: Tensor  # [N, V, C, h, w]
    prompts: tuple[str, ...]
    class_ids: tuple[int, ...]
    skipped: tuple[str, ...]  # messages about images that could not be read

    def write(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        values = self.x.double()
        content = {
            "prompts": self.prompts,
            "class_ids": self.class_ids,
            "sums": [float(values.sum()), float(values.square().sum())],
            "num_values": self.x.numel(),
            "skipped": self.skipped,
        }
        with output_paths.replace_file(path) as partial:
            save_file({"latents": self.x.contiguous()}, partial, {SHARD_METADATA: json.dumps(content)})


@dataclass(frozen=True)
class LatentEncoder:
    """Encodes images to shards of latents."""

    autoencoder: AutoencoderNet
    images: ImageCollectionDataset
    manifest: LatentManifest
    placement: Placement
    skipped: SkippedFiles
    console: Console

    def write_shard(self, path: Path, indices: range) -> Iterator[int]:
        """Write a missing shard chunk by chunk, so that an interruption loses one chunk; yields image counts."""
        if path.is_file():
            yield len(indices)
            return
        parts = [indices[first : first + BATCH_SIZE] for first in range(0, len(indices), BATCH_SIZE)]
        files = [path.with_name(f".{path.stem}-{part.start}-{part.stop}.piece") for part in parts]
        for file, part in zip(files, parts, strict=True):
            if file.is_file():
                self.skipped.messages.extend(read_shard(file).skipped)
            else:
                self.encode_chunk(part).write(file)
            yield len(part)
        shards = [read_shard(file) for file in files]
        columns = zip(*((shard.prompts, shard.class_ids, shard.skipped) for shard in shards), strict=True)
        latents = torch.cat([load_file(file)["latents"] for file in files])
        LatentChunk(latents, *(sum(column, ()) for column in columns)).write(path)
        for file in files:
            file.unlink()

    def encode_chunk(self, indices: range) -> LatentChunk:
        """Encode the readable images among some indices."""
        before = len(self.skipped.messages)
        crops = {index: crop for index in indices if (crop := self._crop(index)) is not None}
        class_ids = []
        for index in crops:
            try:
                class_ids.append(self.images.source.label(index))
            except READ_ERRORS:
                class_ids.append(-1)
        latents = self._encode([pixels for _, pixels in crops.values()])
        prompts = tuple(prompt for prompt, _ in crops.values())
        return LatentChunk(latents, prompts, tuple(class_ids), tuple(self.skipped.messages[before:]))

    def _crop(self, index: int) -> tuple[str, Tensor] | None:
        """Prompt and center square [3, S, S] uint8 of an image, or None if it cannot be read."""
        source = self.images.source
        try:
            pixels = decode_square(source.encoded(index), source.name(index), self.manifest.image_size)
            return self.images.prompt(index), pixels.movedim(-1, 0)
        except READ_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"{source.name(index)} cannot be used ({reason:.200}); repair or remove this file"
            self.skipped.add(str(error) if isinstance(error, ImageError) else message, error, self.console)
            return None

    @torch.no_grad()
    def _encode(self, squares: Sequence[Tensor]) -> Tensor:
        """Latents of squares [3, S, S] uint8: [N, V, C, h, w] float16."""
        manifest = self.manifest
        if not squares:
            return torch.empty(0, manifest.views, *manifest.shape, dtype=torch.half)
        pixels = torch.stack(list(squares)) / 255
        views = torch.stack([pixels, pixels.flip(-1)][: manifest.views], 1)  # [B, V, 3, S, S]
        latents = self.autoencoder.encode(views.flatten(0, 1).to(self.placement.device)).half().cpu()
        return latents.view(*views.shape[:2], *manifest.shape)


@dataclass(frozen=True)
class TokenEncodingOptions:
    """Which images to encode, how, and where to write their tokens."""

    images: Path
    tokenizer: str
    out: Path
    size: int
    views: Views
    crop_range: float = 1.1  # ten-crop: side of the square that is cropped, relative to `size`
    name: str = "imagenet"  # of the data, in the names of the folders
    split: str = "train"
    max_skipped: int = 10  # unreadable images per rank; one more is an error

    @property
    def codes(self) -> Path:
        return self.out / f"{self.name}{self.size}_codes"

    @property
    def labels(self) -> Path:
        return self.out / f"{self.name}{self.size}_labels"

    def crop(self, pixels: Tensor) -> Tensor:
        """The views of an image [3, H, W]: [V, 3, size, size]."""
        if self.views == "ten-crop":
            return ten_crop(pixels, self.size, self.crop_range)
        return center_and_flip(pixels, self.size) if self.views == "flip" else center_crop(pixels, self.size)[None]


def encode_tokens(options: TokenEncodingOptions, placement: Placement, console: Console) -> Path:
    """Write what is missing, each rank its share: `<index>.npy` with codes [1, V, T], and with the label [1]."""
    output_paths.check_output_directory(options.out)
    source, spec = resolve_autoencoder(options.tokenizer, "--tokenizer", console)
    shape, tensors = read_tokenizer(str(vars(spec)["weights"]) if spec else source)
    if options.size % shape.stride:
        raise ConfigError(
            f"--size: {options.size} is not a multiple of {shape.stride}, the stride of the tokenizer; choose a "
            f"multiple of {shape.stride} [TM162]"
        )
    cifar10 = is_cifar10(options.images)
    images = load_cifar10(options.images, options.split) if cifar10 else open_class_folder(options.images)
    rank, world_size = rank_and_world_size()
    write_token_manifest(options, len(images), tensors)
    net = build_frozen_tokenizer(shape, tensors, options.tokenizer, placement)
    share = range(rank, len(images), world_size)
    missing = [i for i in share if not (options.labels / f"{i}.npy").is_file()]  # the label is written last
    rank_console, skipped = console_of_first_rank(console, rank), SkippedFiles(options.max_skipped)
    batch_size = max(1, BATCH_SIZE // NUM_VIEWS[options.views])
    with ProgressBar(rank_console) as progress:
        progress.start("encoding", len(share), len(share) - len(missing), "images")
        for first in range(0, len(missing), batch_size):
            indices = missing[first : first + batch_size]
            views: dict[int, Tensor] = {}  # [V, 3, S, S] by index
            for index in indices:
                try:
                    views[index] = options.crop(images.image(index))
                except ImageError as error:
                    skipped.add(str(error), error, console)
            for index, ids in zip(views, tokenize_views(net, list(views.values()), placement), strict=True):
                write_array(options.codes / f"{index}.npy", ids[None])
                write_array(options.labels / f"{index}.npy", np.array([images.label(index)]))
            progress.advance(len(indices))
    folders = f"{options.codes} and {options.labels}"
    line = f"{len(images)} images in {NUM_VIEWS[options.views]} views, {folders}{skipped.summary()}"
    rank_console.print(line, markup=False, soft_wrap=True)
    return options.codes


@torch.no_grad()
def tokenize_views(net: VQ, crops: Sequence[Tensor], placement: Placement) -> Iterator[NDArray[np.int64]]:
    """The token ids of each image's views: [V, T]."""
    if crops:
        views = torch.stack(list(crops))
        ids = net.encode(views.flatten(0, 1).to(placement.device))
        yield from ids.view(*views.shape[:2], -1).cpu().numpy()


def write_token_manifest(options: TokenEncodingOptions, num_images: int, tensors: Mapping[str, Tensor]) -> None:
    """Write codes.json; refuse to resume in a folder that was started with another tokenizer, images or views."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].contiguous().cpu().numpy().tobytes())
    manifest: dict[str, Any] = {**asdict(options), "images": str(options.images.resolve()), "num_images": num_images}
    manifest = {**manifest, "tokenizer": digest.hexdigest()}
    del manifest["out"], manifest["max_skipped"]
    path = options.codes / TOKEN_MANIFEST
    if path.is_file():
        check_same_manifest(manifest, read_json(path), options.codes)
    output_paths.write_text_atomically(path, json.dumps(manifest, indent=1))  # by every rank


def write_array(path: Path, values: NDArray[np.int64]) -> None:
    """Write an .npy file atomically."""
    with output_paths.replace_file(path) as partial, partial.open("wb") as file:
        np.save(file, values.astype(np.int64))
