"""Configurations of nanoVLA-RL's first stage, its newer and its older ones, by our names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.named_datasets import convert_image_folder, resolve_named_dataset
from ..core.registry import ConfigError, suggest_name
from ..data.images import open_images

Settings = dict[str, Any]
OLDER = ("dataset_params", "diffusion_params", "dit_params", "autoencoder_params", "train_params")
# What the older trainer calls a setting that the newer has too.
RENAMED = {"autoencoder_batch_size": "batch_size", "autoencoder_epochs": "epochs", "autoencoder_lr": "lr"}
TRAIN = {
    *("seed", "batch_size", "lr", "weight_decay", "epochs", "save_every", "output_dir", "disc_start", "disc_weight"),
    *("perceptual_weight", "kl_weight", "autoencoder_acc_steps", "autoencoder_img_save_steps"),
    *("vae_autoencoder_ckpt_name", "vae_discriminator_ckpt_name"),
}
# Of the second stage, of a codebook that neither trainer makes, and of what is now a command of its own.
ELSEWHERE = {
    *("codebook_weight", "commitment_beta", "save_latents", "vae_latent_dir_name", "dit_batch_size", "dit_epochs"),
    *("dit_lr", "dit_acc_steps", "dit_ckpt_name", "num_samples", "num_grid_rows", "task_name"),
}


def convert_new_config(data: Mapping[str, Any], model: Mapping[str, Any]) -> Settings:
    known(data, {"dataset", "model", "train"}, "config")
    known(model, {"name", "params", "weights"}, "model")
    train = mapping(data, "train")
    pictures = resolve_named_dataset({"type": "named", "name": data.get("dataset")})
    own = {"type": "block_vae"} if model["name"] == "vae" else {"type": "from_config", "of": model["name"]}
    params = {**mapping(model, "params"), "weights": model.get("weights")}
    net = {**own, **params} if model["name"] == "vae" else {**own, "params": mapping(model, "params")}
    optim = {"lr": train.get("lr", 1e-4), "weight_decay": train.get("weight_decay", 0.01), "clip": 0.0}
    place = Path(train.get("output_dir", "outputs"))
    return whole(net, pictures, {**train, "batch_size": train.get("batch_size", 8)}, optim, place)


def convert_old_config(data: Mapping[str, Any]) -> Settings:
    told, net = mapping(data, "train_params"), mapping(data, "autoencoder_params")
    known(told, {*RENAMED, *TRAIN, *ELSEWHERE}, "train_params")
    train = {RENAMED.get(key, key): value for key, value in told.items() if key not in ELSEWHERE}
    own = {"type": "block_vae", **{key: value for key, value in net.items() if key != "codebook_size"}}
    optim = {"lr": train.get("lr", 1e-5), "betas": [0.5, 0.999], "weight_decay": 0.0, "clip": 0.0}
    return whole(own, pictured(data), train, optim, Path(told.get("task_name", "runs")))


def pictured(data: Mapping[str, Any]) -> Settings:
    """The pictures of an older file."""
    said = mapping(data, "dataset_params")
    known(said, {"im_path", "im_size", "im_channels"}, "dataset_params")
    path = {"path": said.get("im_path")}
    return convert_image_folder({**path, **{k: v for k, v in said.items() if k != "im_path"}}, "dataset_params")


def whole(net: Settings, pictures: Settings, train: Settings, optim: Settings, place: Path) -> Settings:
    """A run of ours: no average and nothing held out, as there."""
    known(train, TRAIN, "train")
    if net["type"] == "block_vae":
        net = {**net, "im_channels": 1 if pictures.get("grey") else 3, "kl": train.get("kl_weight", 5e-6)}
        net["weights"] = net.get("weights") or found(place, train, "vae_autoencoder")
    size, pieces = counted(train, "batch_size", 4), counted(train, "autoencoder_acc_steps", 1)
    # There batches are counted, here updates, of which each takes several batches if gradients are accumulated.
    batches = {"disc_start": 7500, "autoencoder_img_save_steps": 64, "save_every": 100}
    begins, shows, saves = (-(-counted(train, key, usual, 0) // pieces) for key, usual in batches.items())
    critic = {"weight": train.get("disc_weight", 0.5), "start": begins, "tail": False}
    least_squares = {"loss": "least_squares", "deceive": "least_squares"}
    return {
        "autoencoder": net,
        "data": pictures,
        "loss": {"l1": 0.0, "mse": 1.0, "edge": 0.0, "lpips": train.get("perceptual_weight", 1.0)},
        "critic": {
            **critic,
            **least_squares,
            "weights": found(place, train, "vae_discriminator"),
            "optim": {"lr": optim["lr"], "betas": [0.5, 0.999], "weight_decay": 0.0, "clip": 0.0},
        },
        "rows": size * pieces,
        "microbatch": size if pieces > 1 else None,
        "optim": optim,
        "steps": counted(train, "epochs", 3) * -(-size_of(pictures) // (size * pieces)),
        "sample": {"every": shows},
        "checkpoint": {"every": saves},
        "seed": train.get("seed", 1111),
        "output": str(place.parent),
        "name": place.name,
    }


def size_of(pictures: Settings) -> int:
    if not isinstance(pictures.get("path"), str):
        raise ConfigError(f"data.path is {pictures.get('path')!r:.60}; expected where the pictures are")
    return len(open_images(Path(pictures["path"]), "*", "train"))


def counted(train: Settings, key: str, usual: int, least: int = 1) -> int:
    value = train.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r:.60}; expected a whole number from {least} on")
    return value


def found(place: Path, train: Settings, kind: str) -> str | None:
    """A checkpoint in the place where the trainer would look for one and begin with it."""
    path = place / str(train.get(f"{kind}_ckpt_name", f"{kind}.pth"))
    return str(path) if path.is_file() else None


def mapping(data: Mapping[str, Any], key: str) -> Settings:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: expected a mapping of settings, found {value!r:.60}")
    return dict(value)


def known(data: Mapping[str, Any], keys: set[str], where: str) -> None:
    for key in data:
        if key not in keys:
            raise ConfigError(f"{where}: nanoVLA-RL has no key '{key!s:.60}'{suggest_name(str(key), keys)}")
