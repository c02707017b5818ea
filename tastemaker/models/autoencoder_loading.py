"""Load a trained autoencoder from a run, a file, a diffusers folder or the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from ..core.autoencoder import AUTOENCODERS, AutoencoderSpec, SupportsShapeInference
from ..core.registry import ConfigError
from ..core.types import Placement
from . import loading, vq, weight_files
from .pretrained import HUB, WeightsSource, find_cached, load_weights_into

DIFFUSERS_WEIGHTS_PREFIX = "diffusion_pytorch_model"  # how diffusers' files of tensors begin
LLAMAGEN_KEY = "quantize.embedding.weight"  # a tensor by which its tokenizers are known


def load_autoencoder(name: str, placement: Placement) -> nn.Module:
    """Frozen, in float32: of a run, a file of ours, a name in the package, diffusers' folder, or a published file.

    A YAML file with an `autoencoder:` says those settings of a published file that its tensors do not tell.
    """
    net = _written(name, placement) or _diffusers(name, placement) or _foreign(name, placement) or _own(name)
    return net.requires_grad_(False).eval().to(placement.device)


def _written(name: str, placement: Placement) -> nn.Module | None:
    """Of settings in a YAML file, which name the weights they belong to."""
    if not name.endswith((".yaml", ".yml")):
        return None
    try:
        data = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"'{name:.200}' cannot be read ({error!s:.200}); expected YAML in UTF-8") from error
    settings = data.get("autoencoder") if isinstance(data, dict) else None
    if not isinstance(settings, dict) or not {"type", "weights"} <= settings.keys():
        raise ConfigError(
            f"'{name:.200}' names no autoencoder; expected autoencoder: {{type: block_vae, weights: ..., ...}}, all of "
            "it in this file"
        )
    spec, weights = _spec(str(settings.pop("type")), settings, name), str(settings["weights"])
    folder = Path(weights).expanduser().is_dir()  # which says its own
    return (spec if folder else _fitted(spec, loading.read_checkpoint(weights), name)).load(placement)


def _diffusers(name: str, placement: Placement) -> nn.Module | None:
    """Of a folder with a `config.json`, or a pipeline's with a `vae` in it; or of the hub, if it was fetched."""
    path = Path(name).expanduser()
    if not path.exists():
        known = HUB.fullmatch(name) and not (weight_files.PACKAGE_ROOT / Path(name).parent / "weights").is_dir()
        path = (find_cached(WeightsSource(name)) if known else None) or path
    folders = [folder for folder in (path, path / "vae") if (folder / "config.json").is_file()]
    if not folders or not any(folders[0].glob(f"{DIFFUSERS_WEIGHTS_PREFIX}*")):
        return None
    found: Any = AUTOENCODERS.find("autoencoder_kl")
    net: nn.Module = found(weights=str(folders[0])).load(placement)
    return net


def _foreign(name: str, placement: Placement) -> nn.Module | None:
    """Of a checkpoint that says nothing of its sizes, which its tensors tell."""
    path = Path(name).expanduser()
    ours = path.suffix == ".safetensors" and path.is_file() and loading.has_config_metadata(path)
    known = name in vq.PUBLISHED and not path.exists()
    if not known and (not path.exists() or ours or (path / "checkpoints").is_dir()):
        return None
    tensors = {} if known else loading.read_checkpoint(name)
    if known or LLAMAGEN_KEY in tensors:
        return vq.build_frozen_tokenizer(*vq.read_tokenizer(name), name, placement)
    return build_autoencoder("block_vae", {}, tensors, name)


def _own(name: str) -> nn.Module:
    tensors, config = weight_files.read_weights(name)
    settings: dict[str, Any] = dict(config.get("autoencoder", {}))
    if "type" not in settings:
        raise ConfigError(
            f"'{name:.200}' holds no vae and no other autoencoder; train one with `tastemaker train playground-vae`"
        )
    return build_autoencoder(settings.pop("type"), settings, tensors, name)


def build_autoencoder(kind: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> nn.Module:
    """A network of a kind and sizes, made of tensors."""
    spec = _spec(kind, settings, name)
    if "weights" in settings:
        spec = replace(spec, weights=None)  # type: ignore[type-var]  # what they became is here
    net = _fitted(spec, tensors, name).load(Placement())
    absent = [key for key, _ in net.named_buffers() if key not in tensors]
    load_weights_into(
        net, {key: x for key, x in tensors.items() if not loading.IGNORED_KEYS.fullmatch(key)}, name, absent
    )
    return net


def _spec(kind: str, settings: Mapping[str, Any], name: str) -> AutoencoderSpec:
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    found: Any = AUTOENCODERS.find(kind, name)
    try:
        spec: AutoencoderSpec = found(**listed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"'{name:.200}': {kind} cannot have such settings ({error!s:.200}); mend them") from error
    return spec


def _fitted(spec: AutoencoderSpec, tensors: Mapping[str, Tensor], name: str) -> AutoencoderSpec:
    """With the sizes that tensors tell, where they tell any."""
    try:
        return spec.fitted(tensors) if isinstance(spec, SupportsShapeInference) else spec
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"'{name:.200}' cannot be opened as {AUTOENCODERS.name(type(spec))} ({error!s:.200}); "
            "name a YAML file with an "
            "`autoencoder:` whose `weights` this is, which says its settings"
        ) from error
