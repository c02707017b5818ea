"""A trained autoencoder by its name, whatever kind it is and whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from ..codec import CODECS, CodecSpec, Fitting
from ..pretrained import HUB, Source, fill, held
from ..registry import ConfigError
from ..types import Placement
from . import checkpoints, files, vq

WEIGHTS = "diffusion_pytorch_model"  # how diffusers' files of tensors begin
LLAMAGEN = "quantize.embedding.weight"  # a tensor by which its tokenizers are known


def opened(name: str, placement: Placement) -> nn.Module:
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
    return (spec if folder else _fitted(spec, checkpoints.read(weights), name)).load(placement)


def _diffusers(name: str, placement: Placement) -> nn.Module | None:
    """Of a folder with a `config.json`, or a pipeline's with a `vae` in it; or of the hub, if it was fetched."""
    path = Path(name).expanduser()
    if not path.exists():
        known = HUB.fullmatch(name) and not (files.PACKAGE / Path(name).parent / "weights").is_dir()
        path = (held(Source(name)) if known else None) or path
    folders = [folder for folder in (path, path / "vae") if (folder / "config.json").is_file()]
    if not folders or not any(folders[0].glob(f"{WEIGHTS}*")):
        return None
    found: Any = CODECS.find("autoencoder_kl")
    net: nn.Module = found(weights=str(folders[0])).load(placement)
    return net


def _foreign(name: str, placement: Placement) -> nn.Module | None:
    """Of a checkpoint that says nothing of its sizes, which its tensors tell."""
    path = Path(name).expanduser()
    ours = path.suffix == ".safetensors" and path.is_file() and checkpoints.described(path)
    known = name in vq.PUBLISHED and not path.exists()
    if not known and (not path.exists() or ours or (path / "checkpoints").is_dir()):
        return None
    tensors = {} if known else checkpoints.read(name)
    if known or LLAMAGEN in tensors:
        return vq.frozen(*vq.opened(name), name, placement)
    return made("block_vae", {}, tensors, name)


def _own(name: str) -> nn.Module:
    tensors, config = files.read(name)
    settings: dict[str, Any] = dict(config.get("autoencoder", {}))
    if "type" not in settings:
        raise ConfigError(
            f"'{name:.200}' holds no vae and no other autoencoder; train one with `tastemaker train playground-vae`"
        )
    return made(settings.pop("type"), settings, tensors, name)


def made(kind: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> nn.Module:
    """A network of a kind and sizes, made of tensors."""
    spec = _spec(kind, settings, name)
    if "weights" in settings:
        spec = replace(spec, weights=None)  # type: ignore[type-var]  # what they became is here
    net = _fitted(spec, tensors, name).load(Placement())
    absent = [key for key, _ in net.named_buffers() if key not in tensors]
    fill(net, {key: x for key, x in tensors.items() if not checkpoints.TOLERATED.fullmatch(key)}, name, absent)
    return net


def _spec(kind: str, settings: Mapping[str, Any], name: str) -> CodecSpec:
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    found: Any = CODECS.find(kind, name)
    try:
        spec: CodecSpec = found(**listed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"'{name:.200}': {kind} cannot have such settings ({error!s:.200}); mend them") from error
    return spec


def _fitted(spec: CodecSpec, tensors: Mapping[str, Tensor], name: str) -> CodecSpec:
    """With the sizes that tensors tell, where they tell any."""
    try:
        return spec.fitted(tensors) if isinstance(spec, Fitting) else spec
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"'{name:.200}' cannot be opened as {CODECS.name(type(spec))} ({error!s:.200}); name a YAML file with an "
            "`autoencoder:` whose `weights` this is, which says its settings"
        ) from error
