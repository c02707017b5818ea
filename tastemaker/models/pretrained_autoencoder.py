"""Load a trained autoencoder from a run, a file, a diffusers folder, a published checkpoint or the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core.autoencoder import AUTOENCODERS, AutoencoderNet, AutoencoderSpec, as_autoencoder
from ..core.registry import ConfigError
from ..core.safe_files import read_yaml_mapping
from ..core.types import Placement
from . import image_tokenizer, loading, weight_files
from .nets.vae import PixelShuffleAutoencoder
from .pretrained import HUB_ID, WeightsSource, find_cached, load_weights_into, with_fast_convolutions

DIFFUSERS_WEIGHTS_PREFIX = "diffusion_pytorch_model"  # of the names of diffusers' weight files
LLAMAGEN_KEY = "quantize.embedding.weight"  # identifies tokenizers of LlamaGen


def load_autoencoder(name: str, placement: Placement) -> nn.Module:
    """A frozen autoencoder in float32, of any kind.

    The name is a run, a file, a name in the package, a diffusers folder, a hub id, a published checkpoint, or a YAML
    file with a section `autoencoder`, for settings of a published checkpoint that its tensors do not determine.
    """
    net = (
        _load_from_yaml(name, placement)
        or _load_from_diffusers(name, placement)
        or _load_published(name, placement)
        or _load_own(name)
    )
    return net.requires_grad_(False).eval().to(placement.device)


def load_vae(name: str | None, channels: int, factor: int, placement: Placement) -> AutoencoderNet:
    """A frozen autoencoder with continuous latents of these sizes; downsampled pixels if `name` is None."""
    if name is None:
        return PixelShuffleAutoencoder(channels, factor)
    try:
        loaded = with_fast_convolutions(load_autoencoder(name, placement))
    except ConfigError as error:
        raise ConfigError(f"model.autoencoder: {error} [TM510]") from error
    net = as_autoencoder(loaded)
    if not net.channels:
        raise ConfigError(
            f"model.autoencoder: '{name:.200}' is a {type(loaded).__name__} without continuous latents; use a "
            "VAE, for example from `tastemaker train playground-vae` [TM511]"
        )
    if (net.channels, net.stride) != (channels, factor):
        raise ConfigError(
            f"model.autoencoder: '{name:.200}' has {net.channels} latent channels and downsample factor "
            f"{net.stride}, but the model expects {channels} and {factor}; set "
            f"model.latent_channels={net.channels} and model.downsample_factor={net.stride}, or use another "
            "autoencoder [TM512]"
        )
    return net


def _load_from_yaml(name: str, placement: Placement) -> nn.Module | None:
    """An autoencoder of the settings in a YAML file, which name their weights."""
    if not name.endswith((".yaml", ".yml")):
        return None
    settings = read_yaml_mapping(Path(name).expanduser()).get("autoencoder")
    if not isinstance(settings, dict) or not settings.get("type") or not settings.get("weights"):
        raise ConfigError(
            f"'{name:.200}' does not have a section `autoencoder` with `type` and `weights`; write for example "
            "autoencoder: {type: block_vae, weights: ...} [TM514]"
        )
    spec, weights = _make_spec(str(settings.pop("type")), settings, name), str(settings["weights"])
    is_folder = Path(weights).expanduser().is_dir()  # folders come with their sizes
    return (spec if is_folder else _infer_sizes(spec, loading.read_checkpoint(weights), name)).load(placement)


def _load_from_diffusers(name: str, placement: Placement) -> nn.Module | None:
    """An autoencoder of a diffusers folder, of the folder `vae` of a pipeline, or of a downloaded hub repository."""
    path = Path(name).expanduser()
    if not path.exists():
        on_hub = HUB_ID.fullmatch(name) and not (weight_files.PACKAGE_ROOT / Path(name).parent / "weights").is_dir()
        path = (find_cached(WeightsSource(name)) if on_hub else None) or path
    folders = [folder for folder in (path, path / "vae") if (folder / "config.json").is_file()]
    if not folders or not any(folders[0].glob(f"{DIFFUSERS_WEIGHTS_PREFIX}*")):
        return None
    spec_class: Any = AUTOENCODERS.find("autoencoder_kl")
    net: nn.Module = spec_class(weights=str(folders[0])).load(placement)
    return net


def _load_published(name: str, placement: Placement) -> nn.Module | None:
    """An autoencoder of a published checkpoint, whose sizes are inferred from its tensors."""
    path = Path(name).expanduser()
    is_own = path.suffix == ".safetensors" and path.is_file() and loading.has_config_metadata(path)
    released = name in image_tokenizer.PUBLISHED_TOKENIZERS and not path.exists()
    if not released and (not path.exists() or is_own or (path / "checkpoints").is_dir()):
        return None
    tensors = {} if released else loading.read_checkpoint(name)
    if released or LLAMAGEN_KEY in tensors:
        return image_tokenizer.build_frozen_tokenizer(*image_tokenizer.read_tokenizer(name), name, placement)
    return build_autoencoder("block_vae", {}, tensors, name)


def _load_own(name: str) -> nn.Module:
    """An autoencoder of a run, of one of our files, or of a name in the package."""
    tensors, config = weight_files.read_weights(name)
    settings: dict[str, Any] = dict(config.get("autoencoder", {}))
    if "type" not in settings:
        raise ConfigError(
            f"'{name:.200}' does not contain a VAE or another autoencoder; train one with `tastemaker train "
            "playground-vae` [TM515]"
        )
    return build_autoencoder(settings.pop("type"), settings, tensors, name)


def build_autoencoder(
    type_name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str
) -> nn.Module:
    """An autoencoder of a registered type with these tensors; sizes come from the settings and from the tensors."""
    spec = _make_spec(type_name, settings, name)
    if "weights" in settings:
        spec = replace(spec, weights=None)  # type: ignore[type-var]  # the tensors are what became of them
    net = _infer_sizes(spec, tensors, name).load(Placement())
    missing_buffers = [key for key, _ in net.named_buffers() if key not in tensors]
    loadable = {key: x for key, x in tensors.items() if not loading.IGNORED_KEYS.fullmatch(key)}
    load_weights_into(net, loadable, name, missing_buffers)
    return net


def _make_spec(type_name: str, settings: Mapping[str, Any], name: str) -> AutoencoderSpec:
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    spec_class: Any = AUTOENCODERS.find(type_name, name)
    try:
        spec: AutoencoderSpec = spec_class(**arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"'{name:.200}': the settings of {type_name} are wrong ({error!s:.200}); correct them in this file [TM516]"
        ) from error
    return spec


def _infer_sizes(spec: AutoencoderSpec, tensors: Mapping[str, Tensor], name: str) -> AutoencoderSpec:
    try:
        return spec.with_inferred_sizes(tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"'{name:.200}' cannot be loaded as {AUTOENCODERS.name(type(spec))} ({error!s:.200}); give a YAML "
            "file with a section `autoencoder` that contains the settings, and this file as `weights` [TM517]"
        ) from error


def autoencoder_fingerprint(net: AutoencoderNet) -> str:
    """A hash of an autoencoder's class, sizes and weights, to identify the latents it encoded."""
    digest = hashlib.sha256(f"{type(net).__name__} {net.channels} {net.stride}".encode())
    for key, x in sorted(net.state_dict().items()):
        digest.update(key.encode() + x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
