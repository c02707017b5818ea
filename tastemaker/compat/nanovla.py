"""Convert configurations of nanoVLA-RL to ours.

Its newer files train one model (`model: {name: vae}` or `{name: dit}`). Its older files have the sections *_params and
describe both stages: a VAE, and a DiT over its latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.load import apply_overrides
from ..config.named_datasets import resolve_named_dataset
from ..core.registry import ConfigError, suggest_name
from ..data.images import open_image_source

Settings = dict[str, Any]

OLD_SECTIONS = ("dataset_params", "diffusion_params", "dit_params", "autoencoder_params", "train_params")
# Names of the older trainer for settings that the newer one has too.
OLD_TRAIN_KEYS = {"autoencoder_batch_size": "batch_size", "autoencoder_epochs": "epochs", "autoencoder_lr": "lr"}
TRAIN_KEYS = {
    *("seed", "batch_size", "lr", "weight_decay", "epochs", "save_every", "output_dir", "disc_start", "disc_weight"),
    *("perceptual_weight", "kl_weight", "autoencoder_acc_steps", "autoencoder_img_save_steps"),
    *("vae_autoencoder_ckpt_name", "vae_discriminator_ckpt_name"),
}
# Keys of the DiT stage, of a codebook that neither trainer has, and of what are separate commands here.
OTHER_TRAIN_KEYS = {
    *("codebook_weight", "commitment_beta", "save_latents", "vae_latent_dir_name", "dit_batch_size", "dit_epochs"),
    *("dit_lr", "dit_acc_steps", "dit_ckpt_name", "num_samples", "num_grid_rows", "task_name"),
}
VAE_KEYS = {
    *("weights", "z_channels", "codebook_size", "down_channels", "mid_channels", "down_sample", "attn_down"),
    *("norm_channels", "num_heads", "num_down_layers", "num_mid_layers", "num_up_layers"),
}
DIT_KEYS = {
    "patch_size": "patch_size",
    "num_layers": "depth",
    "hidden_size": "width",
    "ff_hidden_dim": "intermediate_size",
    "num_heads": "heads",
    "head_dim": "head_dim",
    "timestep_emb_dim": "timestep_embed_dim",
}  # theirs: ours
NOISE_KEYS = {"beta_start", "beta_end"}
DIT_RECIPE = "dit-celebhq"  # provides the defaults
NUM_TRAIN_TIMESTEPS = 1000
PROCESS_STEPS, SAMPLE_STEPS = 250, 50  # sampling steps of that recipe
VAE_DEFAULTS = {"num_heads": 4, "norm_channels": 32}  # settings that cannot be read from the shapes of the weights
GRAYSCALE = {1: True, 3: False}  # by im_channels


def convert_config(data: Settings, overrides: Sequence[str]) -> tuple[Settings, list[str]] | None:
    """Convert a file of nanoVLA-RL; None if it is not one.

    The override `stage=dit` selects the second stage of an older file and is not passed on.
    """
    model = data.get("model")
    if "autoencoder_params" in data and "train_params" in data:
        stage_overrides = [each for each in overrides if each.startswith("stage=")]
        data = apply_overrides(data, stage_overrides)
        check_keys(data, {*OLD_SECTIONS, "stage"}, "config")
        stages = {"vae": convert_old_vae, "dit": convert_old_dit}
        stage = data.get("stage", "vae")
        if stage not in stages:
            raise ConfigError(
                f"stage: expected vae (first stage) or dit (second stage), got {stage!r:.60}; set stage to one of "
                "these [TM762]"
            )
        return stages[stage](data), [each for each in overrides if each not in stage_overrides]
    if isinstance(model, Mapping) and "name" in model and "type" not in model:
        convert = convert_new_dit if model["name"] == "dit" else convert_new_vae
        return convert(data, model), list(overrides)
    return None


def convert_image_folder(entry: Mapping[str, Any], where: str) -> Settings:
    """Convert a dataset {path, im_size, im_channels}."""
    others = {key: value for key, value in entry.items() if key not in ("type", "im_size", "im_channels")}
    channels = entry.get("im_channels", 3)
    if channels not in GRAYSCALE:
        raise ConfigError(
            f"{where}: expected im_channels 1 or 3, got {channels!r:.40}; set im_channels to 1 (grayscale) or 3 (RGB) "
            "[TM763]"
        )
    size = {"image_size": entry["im_size"]} if "im_size" in entry else {}
    return {"type": "image_collection", **others, **size, **({"grayscale": True} if GRAYSCALE[channels] else {})}


def convert_new_vae(data: Mapping[str, Any], model: Mapping[str, Any]) -> Settings:
    check_keys(data, {"dataset", "model", "train"}, "config")
    check_keys(model, {"name", "params", "weights"}, "model")
    train, params = get_mapping(data, "train"), get_mapping(model, "params")
    if model["name"] == "vae":
        autoencoder = {"type": "block_vae", **params, "weights": model.get("weights")}
    else:
        autoencoder = {"type": "from_config", "class_path": model["name"], "params": params}
    optim = {"lr": train.get("lr", 1e-4), "weight_decay": train.get("weight_decay", 0.01), "max_grad_norm": 0.0}
    output = Path(train.get("output_dir", "outputs"))
    train = {**train, "batch_size": train.get("batch_size", 8)}
    return _vae_run(autoencoder, _named_dataset(data), train, optim, output)


def convert_old_vae(data: Mapping[str, Any]) -> Settings:
    params, autoencoder = get_mapping(data, "train_params"), get_mapping(data, "autoencoder_params")
    check_keys(params, {*OLD_TRAIN_KEYS, *TRAIN_KEYS, *OTHER_TRAIN_KEYS}, "train_params")
    train = {OLD_TRAIN_KEYS.get(key, key): value for key, value in params.items() if key not in OTHER_TRAIN_KEYS}
    autoencoder = {"type": "block_vae", **{k: v for k, v in autoencoder.items() if k != "codebook_size"}}
    optim = {"lr": train.get("lr", 1e-5), "betas": [0.5, 0.999], "weight_decay": 0.0, "max_grad_norm": 0.0}
    return _vae_run(autoencoder, _old_dataset(data), train, optim, Path(params.get("task_name", "runs")))


def _vae_run(autoencoder: Settings, images: Settings, train: Settings, optim: Settings, output: Path) -> Settings:
    """A run without EMA and validation, as in the original."""
    check_keys(train, TRAIN_KEYS, "train")
    if autoencoder["type"] == "block_vae":
        autoencoder = {
            **autoencoder,
            "im_channels": 1 if images.get("grayscale") else 3,
            "kl_weight": train.get("kl_weight", 5e-6),
            "weights": autoencoder.get("weights") or _find_checkpoint(output, train, "vae_autoencoder"),
        }
    batch_size = get_count(train, "batch_size", 4)
    accumulation = get_count(train, "autoencoder_acc_steps", 1)
    # The original counts batches; here an update takes several batches if gradients are accumulated.
    defaults = {"disc_start": 7500, "autoencoder_img_save_steps": 64, "save_every": 100}
    start, sample_every, save_every = (
        -(-get_count(train, key, default, 0) // accumulation) for key, default in defaults.items()
    )
    return {
        "autoencoder": autoencoder,
        "data": images,
        "loss": {"l1": 0.0, "mse": 1.0, "gradient": 0.0, "lpips": train.get("perceptual_weight", 1.0)},
        "discriminator": {
            "weight": train.get("disc_weight", 0.5),
            "start_step": start,
            "extra_layer": False,
            "loss": "least_squares",
            "generator_loss": "least_squares",
            "weights": _find_checkpoint(output, train, "vae_discriminator"),
            "optim": {"lr": optim["lr"], "betas": [0.5, 0.999], "weight_decay": 0.0, "max_grad_norm": 0.0},
        },
        "batch_size": batch_size * accumulation,
        "micro_batch_size": batch_size if accumulation > 1 else None,
        "optim": optim,
        "steps": get_count(train, "epochs", 3) * -(-_dataset_size(images) // (batch_size * accumulation)),
        "sample": {"every": sample_every},
        "checkpoint": {"every": save_every},
        "seed": train.get("seed", 1111),
        "output_dir": str(output.parent),
        "name": output.name,
    }


def convert_new_dit(data: Mapping[str, Any], model: Mapping[str, Any]) -> Settings:
    check_keys(data, {"dataset", "model", "train", "autoencoder"}, "config")
    check_keys(model, {"name", "params", "weights"}, "model")
    train, vae = get_mapping(data, "train"), get_mapping(data, "autoencoder")
    check_keys(train, {*TRAIN_KEYS, *OTHER_TRAIN_KEYS}, "train")
    if not isinstance(vae.get("weights"), str):
        raise ConfigError(
            f"autoencoder.weights is {vae.get('weights')!r:.60}; set it to the run directory of the first stage, "
            "or to a file such as vae_autoencoder.pth [TM764]"
        )
    images, output = _named_dataset(data), Path(train.get("output_dir", "outputs"))
    network = _dit_network(vae, get_mapping(model, "params"), images)
    return {
        **_dit_schedule({"batch_size": 8, "epochs": 3, **train}, images),
        "model": {"autoencoder": vae["weights"], "weights": model.get("weights"), **network},
        "optim": {"lr": train.get("lr", 1e-4), "weight_decay": train.get("weight_decay", 0.01)},
        "checkpoint": {"every": -(-get_count(train, "save_every", 100) // get_count(train, "dit_acc_steps", 1))},
        "output_dir": str(output.parent),
        "name": output.name,
    }


def convert_old_dit(data: Mapping[str, Any]) -> Settings:
    train, vae = get_mapping(data, "train_params"), get_mapping(data, "autoencoder_params")
    check_keys(train, {*OLD_TRAIN_KEYS, *TRAIN_KEYS, *OTHER_TRAIN_KEYS}, "train_params")
    images, output = _old_dataset(data), Path(train.get("task_name", "runs"))
    schedule = {"batch_size": train.get("dit_batch_size", 32), "epochs": train.get("dit_epochs", 500)}
    noise = _noise_schedule(get_mapping(data, "diffusion_params"))
    weights = {"autoencoder": _find_vae(output, train, vae), "weights": _find_checkpoint(output, train, "dit")}
    return {
        **_dit_schedule({**train, **schedule}, images),
        **_cached_latents(output / str(train.get("vae_latent_dir_name", "vae_latents"))),
        **noise,
        "model": {**weights, **_dit_network(vae, get_mapping(data, "dit_params"), images), **noise.get("model", {})},
        "optim": {"lr": train.get("dit_lr", 1e-5), "weight_decay": 0.0},
        "output_dir": str(output.parent),
        "name": f"{output.name}-dit",
    }


def _find_vae(output: Path, train: Settings, vae: Settings) -> str:
    """The first stage: our run, or the original's checkpoint if all settings can be read from its weights."""
    readable = all(vae.get(key, default) == default for key, default in VAE_DEFAULTS.items())
    is_run = (output / "checkpoints").is_dir()
    checkpoint = _find_checkpoint(output, train, "vae_autoencoder") if readable and not is_run else None
    return checkpoint or str(output)


def _dit_network(vae: Settings, params: Settings, images: Settings) -> Settings:
    """Settings of the DiT, and of the latents of its VAE."""
    check_keys(params, {*DIT_KEYS}, "params of the DiT")
    check_keys(vae, VAE_KEYS, "params of the autoencoder")
    halves = vae.get("down_sample", [True, True])
    if not isinstance(halves, list) or not all(isinstance(each, bool) for each in halves):
        raise ConfigError(
            f"down_sample: expected a list of true and false, one per block, got {halves!r:.60}; correct the list "
            "[TM765]"
        )
    network = {DIT_KEYS[key]: value for key, value in params.items()}
    latents = {"latent_channels": vae.get("z_channels", 4), "downsample_factor": 2 ** sum(halves)}
    return {**network, **latents, "image_size": images.get("image_size", 128)}


def _dit_schedule(train: Settings, images: Settings) -> Settings:
    """Batch sizes, steps and seed: epochs are converted to steps by the size of the data."""
    batch_size, accumulation = get_count(train, "batch_size", 32), get_count(train, "dit_acc_steps", 1)
    steps_per_epoch = -(-_dataset_size(images) // (batch_size * accumulation))
    return {
        "extends": DIT_RECIPE,
        "data": images,
        "batch": {
            "prompts": batch_size * accumulation,
            "micro_batch_size": batch_size if accumulation > 1 else None,
        },
        "steps": get_count(train, "epochs", 500) * steps_per_epoch,
        "checkpoint": {"every": steps_per_epoch},
        "seed": train.get("seed", 1111),
    }


def _cached_latents(folder: Path) -> Settings:
    """Use our encoded latents if they are in the folder where the original keeps its own."""
    return {"data": {"type": "latent_folder", "path": str(folder)}} if (folder / "latents.json").is_file() else {}


def _noise_schedule(params: Settings) -> Settings:
    """Sections of the configuration with the schedule: the DiT gets the index of a timestep, as in the original."""
    check_keys(params, {*NOISE_KEYS, "num_timesteps"}, "diffusion_params")
    steps = get_count(params, "num_timesteps", NUM_TRAIN_TIMESTEPS, 2)
    betas = {key: params[key] for key in NOISE_KEYS if key in params}
    if steps == NUM_TRAIN_TIMESTEPS:
        return {"process": {"path": betas}}
    limits = {"process": PROCESS_STEPS, "sample": SAMPLE_STEPS}  # a sampler visits a timestep once
    shorter = {section: {"num_steps": steps} for section, limit in limits.items() if steps < limit}
    process = {"path": {**betas, "num_train_timesteps": steps}, **shorter.pop("process", {})}
    return {"process": process, **shorter, "model": {"num_train_timesteps": steps}}


def _named_dataset(data: Mapping[str, Any]) -> Settings:
    return resolve_named_dataset({"type": "named", "name": data.get("dataset")})


def _old_dataset(data: Mapping[str, Any]) -> Settings:
    params = get_mapping(data, "dataset_params")
    check_keys(params, {"im_path", "im_size", "im_channels"}, "dataset_params")
    entry = {"path": params.get("im_path"), **{k: v for k, v in params.items() if k != "im_path"}}
    return convert_image_folder(entry, "dataset_params")


def _dataset_size(images: Settings) -> int:
    if not isinstance(images.get("path"), str):
        raise ConfigError(
            f"data.path: expected the path of a folder of images, got {images.get('path')!r:.60}; set data.path [TM767]"
        )
    return len(open_image_source(Path(images["path"]), "*", "train"))


def _find_checkpoint(output: Path, train: Settings, kind: str) -> str | None:
    """A checkpoint where the original trainer would find it and continue from it."""
    path = output / str(train.get(f"{kind}_ckpt_name", f"{kind}.pth"))
    return str(path) if path.is_file() else None


def get_count(train: Settings, key: str, default: int, minimum: int = 1) -> int:
    value = train.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{key} is {value!r:.60}; set it to an integer of at least {minimum} [TM768]")
    return value


def get_mapping(data: Mapping[str, Any], key: str) -> Settings:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: expected a mapping of settings, got {value!r:.60}; write `{key}:` with indented settings below "
            "it [TM769]"
        )
    return dict(value)


def check_keys(data: Mapping[str, Any], keys: set[str], where: str) -> None:
    """Refuse keys that nanoVLA-RL does not have."""
    for key in data:
        if key not in keys:
            raise ConfigError(
                f"{where}: nanoVLA-RL does not have the key '{key!s:.60}'{suggest_name(str(key), keys)} [TM770]"
            )
