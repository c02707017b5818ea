"""Configurations of nanoVLA-RL's second stage, a DiT over the latents of the first, by our names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.named_datasets import resolve_named_dataset
from ..core.registry import ConfigError
from .nanovla_vae import ELSEWHERE, RENAMED, TRAIN, Settings, counted, found, known, mapping, pictured, size_of

RECIPE = "dit-celebhq"  # whose settings hold where a file is silent
PARAMS = {
    "patch_size": "patch",
    "num_layers": "depth",
    "hidden_size": "width",
    "ff_hidden_dim": "inner",
    "num_heads": "heads",
    "head_dim": "head",
    "timestep_emb_dim": "waves",
}
FIRST = {
    *("weights", "z_channels", "codebook_size", "down_channels", "mid_channels", "down_sample", "attn_down"),
    *("norm_channels", "num_heads", "num_down_layers", "num_mid_layers", "num_up_layers"),
}  # of the first stage
UNTOLD = {"num_heads": 4, "norm_channels": 32}  # of the first stage, what no tensor tells, and what is then assumed
NOISE = {"beta_start": "first", "beta_end": "last"}
TIMES = 1000  # in which levels of noise are counted


def convert_new_config(data: Mapping[str, Any], model: Mapping[str, Any]) -> Settings:
    known(data, {"dataset", "model", "train", "autoencoder"}, "config")
    known(model, {"name", "params", "weights"}, "model")
    train, first = mapping(data, "train"), mapping(data, "autoencoder")
    known(train, {*TRAIN, *ELSEWHERE}, "train")
    if not isinstance(first.get("weights"), str):
        raise ConfigError(
            f"autoencoder.weights is {first.get('weights')!r:.60}; expected where the first stage lies, which is the "
            "folder of its run or a file such as vae_autoencoder.pth"
        )
    pictures = resolve_named_dataset({"type": "named", "name": data.get("dataset")})
    net = {"codec": first["weights"], "weights": model.get("weights")}
    net |= shaped(first, mapping(model, "params"), pictures)
    place = Path(train.get("output_dir", "outputs"))
    return {
        **paced({"batch_size": 8, "epochs": 3, **train}, pictures),
        "model": net,
        "optim": {"lr": train.get("lr", 1e-4), "weight_decay": train.get("weight_decay", 0.01)},
        "checkpoint": {"every": -(-counted(train, "save_every", 100) // counted(train, "dit_acc_steps", 1))},
        "output": str(place.parent),
        "name": place.name,
    }


def convert_old_config(data: Mapping[str, Any]) -> Settings:
    train = mapping(data, "train_params")
    known(train, {*RENAMED, *TRAIN, *ELSEWHERE}, "train_params")
    pictures, place = pictured(data), Path(train.get("task_name", "runs"))
    first = mapping(data, "autoencoder_params")
    net = {"codec": copying(place, train, first), "weights": found(place, train, "dit")}
    net |= shaped(first, mapping(data, "dit_params"), pictures)
    told = {"batch_size": train.get("dit_batch_size", 32), "epochs": train.get("dit_epochs", 500)}
    return {
        **paced({**train, **told}, pictures),
        **cached(place / str(train.get("vae_latent_dir_name", "vae_latents"))),
        "process": {"path": noised(mapping(data, "diffusion_params"))},
        "model": net,
        "optim": {"lr": train.get("dit_lr", 1e-5), "weight_decay": 0.0},
        "output": str(place.parent),
        "name": f"{place.name}-dit",
    }


def copying(place: Path, train: Settings, first: Settings) -> str:
    """The first stage: a run of ours, or the trainer's file where its tensors tell all there is to know."""
    told = all(first.get(key, usual) == usual for key, usual in UNTOLD.items())
    own = (place / "checkpoints").is_dir()
    return (found(place, train, "vae_autoencoder") if told and not own else None) or str(place)


def shaped(first: Settings, params: Settings, pictures: Settings) -> Settings:
    """The network: as wide as its own settings say, over latents as large as the first stage's."""
    known(params, {*PARAMS}, "params of the DiT")
    known(first, FIRST, "params of the autoencoder")
    halved = first.get("down_sample", [True, True])
    if not isinstance(halved, list) or not all(isinstance(each, bool) for each in halved):
        raise ConfigError(f"down_sample is {halved!r:.60}; expected a list that says of each block whether it halves")
    own = {PARAMS[key]: value for key, value in params.items()}
    latents = {"channels": first.get("z_channels", 4), "factor": 2 ** sum(halved)}
    return {**own, **latents, "pixels": pictures.get("size", 128)}


def paced(train: Settings, pictures: Settings) -> Settings:
    """How much is learned from at once and for how long: epochs of the pictures that are there."""
    size, pieces = counted(train, "batch_size", 32), counted(train, "dit_acc_steps", 1)
    epoch = -(-size_of(pictures) // (size * pieces))
    return {
        "extends": RECIPE,
        "data": pictures,
        "batch": {"prompts": size * pieces, "microbatch": size if pieces > 1 else None},
        "steps": counted(train, "epochs", 500) * epoch,
        "checkpoint": {"every": epoch},
        "seed": train.get("seed", 1111),
    }


def cached(folder: Path) -> Settings:
    """Latents of ours, in the place where the trainer would look for its pickles."""
    return {"data": {"type": "latent_folder", "path": str(folder)}} if (folder / "latents.json").is_file() else {}


def noised(told: Settings) -> Settings:
    known(told, {*NOISE, "num_timesteps"}, "diffusion_params")
    times = told.get("num_timesteps", TIMES)
    if times != TIMES:
        raise ConfigError(f"num_timesteps is {times!r:.60}; expected {TIMES}, in which time is told here")
    return {ours: told[theirs] for theirs, ours in NOISE.items() if theirs in told}
