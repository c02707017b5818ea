"""`tastemaker export`: the weights of a run as one file, and of autoencoders and judges as other programs load them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ..config.build import build, build_autoencoder, build_judge
from ..config.dump import config_to_dict
from ..config.load import load_any_config
from ..config.schema import AutoencoderRunConfig, JudgeRunConfig, PreferenceRunConfig, RunConfig
from ..core.autoencoder import as_autoencoder
from ..core.checkpoint_files import read_manifest
from ..core.lora import LoraWeights
from ..core.model_spec import ModelSpec
from ..core.output_paths import apply_umask
from ..core.registry import ConfigError
from ..core.types import Placement
from ..core.weights import Weights
from ..models import weight_files
from ..models.pretrained_autoencoder import load_autoencoder
from ..models.showo.model import ShowoSpec
from ..models.showo.prompt_tokenizer import PHI
from ..models.weight_files import quantize_int8
from ..training import checkpoint
from ..training.run_directory import CONFIG_FILE
from ..vlm.chat_model import load_chat_model
from ..vlm.judge_models import save_chat_model
from .modelspec import make_metadata, save_safetensors, seal_hash

CPU_DEVICE = "engine.device=cpu"  # weights are only copied
CPU_OVERRIDES = [CPU_DEVICE, "engine.compile=false", "engine.strategy=replicated", "engine.cpu_offload=false"]


def export_weights(run_dir: Path, out: Path, name: str, bits: int, console: Console) -> None:
    """Write a snapshot of a run's weights, by default the EMA, to a safetensors file with 8, 16 or 32 bits."""
    config = load_any_config(run_dir / CONFIG_FILE, CPU_OVERRIDES) if (run_dir / CONFIG_FILE).is_file() else None
    if isinstance(config, PreferenceRunConfig):
        raise ConfigError(
            f"{run_dir}: a preference model is not exported; copy its file preference.safetensors, and name that as "
            "`path` of the reward preference [TM1306]"
        )
    if isinstance(config, JudgeRunConfig):
        export_judge(run_dir, out, name, console)
        return
    if bits not in (8, 16, 32):
        raise ConfigError(f"--bits: expected 8, 16 or 32, got {bits}; choose one of these [TM686]")
    showo = config.model if isinstance(config, RunConfig) and isinstance(config.model, ShowoSpec) else None
    as_published_folder = showo is not None and not out.suffix
    if as_published_folder:
        check_new_directory(out, "Show-o's published layout")
    elif out.suffix != ".safetensors":
        raise ConfigError(
            f"--out: weights are written as a safetensors file, got '{out}'; use a name that ends in .safetensors "
            "[TM687]"
        )
    step_dir = checkpoint.latest_checkpoint(run_dir)
    if config is None or step_dir is None:
        raise ConfigError(f"{run_dir} has no checkpoint to export; give a run directory with a checkpoint [TM688]")
    tensors, chosen = choose_weights(load_weights(config, run_dir, step_dir), name)
    if showo is not None and as_published_folder:
        write_showo(showo, tensors, out, weights_modelspec(config))
        console.print(f"{out}: {chosen} weights of {step_dir.name}, in Show-o's published layout", highlight=False)
        return
    weight_files.write_weights(
        out,
        quantize_int8(tensors) if bits == 8 else tensors,
        weights_metadata(config, step_dir),
        torch.float32 if bits == 32 else torch.float16,
        weights_modelspec(config),
    )
    seal_hash(out)
    size = out.stat().st_size / 1e6
    console.print(f"{out}: {chosen} weights of {step_dir.name}, {size:.1f} MB", highlight=False)


def load_weights(config: RunConfig | AutoencoderRunConfig, run_dir: Path, step_dir: Path) -> Weights:
    """Build the network of a run and load a checkpoint into it."""
    if isinstance(config, AutoencoderRunConfig):
        autoencoder_run = build_autoencoder(config, run_dir)
        autoencoder_run.resume(step_dir)
        return autoencoder_run.weights
    # Adapters are merged into weights of full precision, whatever the run trained on.
    config = replace(config, engine=replace(config.engine, base_precision="same", rollout_precision="same"))
    run = build(config, run_dir, load_data=False)
    run.resume(step_dir)
    return run.policy.weights


def choose_snapshot(name: str, snapshots: Iterable[str]) -> str:
    """Return the snapshot to export: the named one, or by default the EMA if there is one, otherwise live."""
    snapshots = list(snapshots)
    chosen = name or ("ema" if "ema" in snapshots else "live")
    if chosen != "live" and chosen not in snapshots:
        raise ConfigError(
            f"--weights: the run does not have '{chosen}' (available: {', '.join(['live', *snapshots])}); choose "
            "one of these [TM689]"
        )
    return chosen


def choose_checkpoint_snapshot(name: str, step_dir: Path) -> str:
    """Return the snapshot of a checkpoint to export, without loading any."""
    return choose_snapshot(name, read_manifest(step_dir).snapshots)


def choose_weights(weights: Weights, name: str) -> tuple[Mapping[str, Tensor], str]:
    """Return the tensors of a snapshot, LoRA adapters merged, and the name of the snapshot."""
    snapshots = weights.snapshot_tensors()
    chosen = choose_snapshot(name, snapshots)
    if isinstance(weights, LoraWeights):
        return weights.merged(chosen), chosen
    return dict(weights.net.state_dict()) | (snapshots[chosen] if chosen != "live" else {}), chosen


def weights_metadata(config: RunConfig | AutoencoderRunConfig, step_dir: Path) -> dict[str, Any]:
    """Return the sections of the configuration that are needed to use the weights, and their origin."""
    settings = config_to_dict(config)
    keys = ("autoencoder",) if isinstance(config, AutoencoderRunConfig) else ("model", "process", "guidance")
    return {**{key: settings[key] for key in keys}, "trained": {"name": config.name, "step": step_dir.name}}


def weights_modelspec(config: RunConfig | AutoencoderRunConfig) -> dict[str, str]:
    """Return the `modelspec.*` metadata of a generator's file; none for an autoencoder, for which it has no keys."""
    return make_metadata(config, "tastemaker", is_lora=False) if isinstance(config, RunConfig) else {}


def check_new_directory(out: Path, what: str) -> None:
    """Refuse an output path that is a file name or a folder with contents."""
    if out.suffix or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(
            f"--out: {what} needs a new folder, but '{out}' is a file name or a folder that is not empty; give "
            "another name [TM690]"
        )


# Autoencoders


def is_autoencoder_run(run_dir: Path) -> bool:
    """Whether a directory is that of a run that trained an autoencoder."""
    file = run_dir / CONFIG_FILE
    return file.is_file() and isinstance(load_any_config(file), AutoencoderRunConfig)


def export_autoencoder(run_dir: Path, out: Path, layout: str, name: str, dtype: torch.dtype, console: Console) -> None:
    """Write a trained autoencoder in the layout of diffusers or of its authors."""
    config = load_any_config(run_dir / CONFIG_FILE, [CPU_DEVICE, "engine.strategy=replicated"])
    step_dir = checkpoint.latest_checkpoint(run_dir)
    if step_dir is None or not isinstance(config, AutoencoderRunConfig):
        raise ConfigError(
            f"{run_dir} has no checkpoint to export; give the run directory of an autoencoder with a checkpoint [TM691]"
        )
    if out.exists():
        raise ConfigError(f"--out: {out} exists already; give another name, or remove it [TM692]")
    net, chosen = load_trained_autoencoder(config, run_dir, step_dir, name)
    autoencoder = as_autoencoder(net)
    if autoencoder.export_format != layout:
        known = autoencoder.export_format
        hint = f"use --layout {known}" if known else "remove --layout to export for tastemaker"
        raise ConfigError(f"--layout: {layout} does not support {type(config.autoencoder).__name__}; {hint} [TM693]")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    autoencoder.export(partial, dtype)
    apply_umask(partial)
    partial.replace(out)
    console.print(f"{out}: {chosen} weights of {step_dir.name}", highlight=False)


def load_trained_autoencoder(
    config: AutoencoderRunConfig, run_dir: Path, step_dir: Path, name: str
) -> tuple[nn.Module, str]:
    """Return the network with a snapshot of its weights, and the name of the snapshot."""
    if not name and (step_dir / "weights.safetensors").is_file():  # loads without building data and losses
        chosen = "ema" if (step_dir / "snapshots/ema.safetensors").is_file() else "live"
        return load_autoencoder(str(run_dir), Placement()), chosen
    weights = load_weights(config, run_dir, step_dir)
    tensors, chosen = choose_weights(weights, name)
    weights.net.load_state_dict(dict(tensors))
    return weights.net, chosen


# Judges and Show-o


def export_judge(run_dir: Path, out: Path, name: str, console: Console) -> None:
    """Write a fine-tuned judge as a folder that transformers and the reward `vlm` load, in bf16, adapters merged."""
    step_dir = checkpoint.latest_checkpoint(run_dir)
    config = load_any_config(run_dir / CONFIG_FILE, [*CPU_OVERRIDES, "engine.precision=fp32"])
    if step_dir is None or not isinstance(config, JudgeRunConfig):
        raise ConfigError(
            f"{run_dir} has no checkpoint to export; give the run directory of a judge with a checkpoint [TM694]"
        )
    check_new_directory(out, "a judge")
    run = build_judge(config, run_dir)
    run.resume(step_dir)
    tensors, chosen = choose_weights(run.weights, name)
    tensors = {key.removeprefix("net."): x for key, x in tensors.items()}
    if config.judge.model is not None:
        write_showo(config.judge.model, tensors, out)
        console.print(f"{out}: {chosen} weights of {step_dir.name}, for `ask` and model.weights", highlight=False)
        return
    judge = load_chat_model(config.judge.weights, Placement(), needs_yes_no=False)
    judge.net.load_state_dict(tensors)
    judge.net.to(torch.bfloat16)
    save_chat_model(judge, out)
    apply_umask(out)
    console.print(f"{out}: {chosen} weights of {step_dir.name}, for the reward vlm", markup=False, highlight=False)


def write_showo(
    spec: ModelSpec, tensors: Mapping[str, Tensor], out: Path, metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a folder in the layout that Show-o is published in."""
    if not isinstance(spec, ShowoSpec):
        raise ConfigError(
            f"--out: a published layout for {type(spec).__name__} does not exist; use the run directory itself as "
            "weights [TM695]"
        )
    vocabulary = spec.network_config().vocabulary
    config = {
        "_class_name": "Showo",
        "codebook_size": spec.codebook_size,
        "llm_model_path": PHI.hub,  # Show-o's code reads the language model's config from there
        "load_from_showo": True,
        "llm_vocab_size": spec.text_vocab_size,
        "mask_token_id": vocabulary.mask_id,
        "num_vq_tokens": spec.shape[0],
        "vocab_size": vocabulary.size,
        "w_clip_vit": spec.vision_encoder is not None,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {key: x.detach().to(torch.bfloat16).contiguous() for key, x in tensors.items()}
    save_safetensors(tensors, out / "pytorch_model.safetensors", metadata)
    apply_umask(out)
