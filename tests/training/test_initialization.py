"""`--init-from` takes what `tastemaker export` writes: LoRA folders, full folders and quantized files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiers import fast
from torch import Tensor
from untrained_runs import save_perturbed_run

from tastemaker.config.build import make_tiny, make_tiny_any
from tastemaker.config.load import load, load_any_config
from tastemaker.config.schema import RunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.weights import export_weights
from tastemaker.models.autoencoder_kl import AutoencoderKLSpec
from tastemaker.models.latent_dit.model import LatentDitSpec
from tastemaker.training.trainer import build_run

CONSOLE = Console(quiet=True)
ENGINE = "engine={device: cpu, precision: fp32, param_dtype: fp32, activation_memory: keep, compile: false}"
LORA = "tuning={type: lora, rank: 2, alpha: %d}"


def sd15(folder: Path, tuning: str) -> RunConfig:
    rewards = ["rewards=null", "rewards={bright: {type: brightness}}", "data={type: prompts, prompts: [a, b]}"]
    settings = [ENGINE, "batch={prompts: 2}", f"output_dir={folder}", "name=run", "tuning=null", tuning]
    return make_tiny(load("ddpo-sd15", [*rewards, *settings]))


def dit(folder: Path, *settings: str) -> RunConfig:
    sizes = ["width=64", "depth=1", "heads=2", "image_size=32", "autoencoder=null", "latent_channels=12"]
    model = [f"model.{size}" for size in sizes]
    return load("dit-folder", [*model, ENGINE, "data.image_size=32", f"output_dir={folder}", "name=run", *settings])


def trainable(run: Any) -> dict[str, Tensor]:
    return {key: p.detach() for key, p in run.policy.weights.trainable().items()}


def is_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all((a[key] - x).abs().max() <= tolerance for key, x in b.items())


@pytest.mark.parametrize("layout", fast(["diffusers", "comfyui"], "comfyui"))
def test_lora_folder_initializes_adapters(layout: Any, tmp_path: Path) -> None:
    run = save_perturbed_run(sd15(tmp_path, LORA % 6), 0.1)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", layout, dtype=torch.float32), CONSOLE)
    continued = build_run(sd15(tmp_path, LORA % 3), tmp_path / "b", tmp_path / "out")
    doubled = {key: x * (2 if ".lora_B." in key else 1) for key, x in trainable(run).items()}  # half of the alpha
    assert is_close(trainable(continued), doubled)
    with pytest.raises(ConfigError, match=r"--init-from.*tuning\.type=lora.*TM855"):
        build_run(sd15(tmp_path, "tuning={type: full}"), tmp_path / "c", tmp_path / "out")


def test_full_folder_initializes_all_weights(tmp_path: Path) -> None:
    run, full = save_perturbed_run(sd15(tmp_path, "tuning={type: full}"), 0.1), sd15(tmp_path, "tuning={type: full}")
    export_generator(
        GeneratorExport(run.directory, tmp_path / "out", "diffusers", "live", torch.float32, network_only=True), CONSOLE
    )
    assert is_close(trainable(build_run(full, tmp_path / "b", tmp_path / "out")), trainable(run), 0)
    with pytest.raises(ConfigError, match=r"--init-from.*model\.weights=.*TM856"):
        build_run(sd15(tmp_path, LORA % 3), tmp_path / "c", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--init-from.*'unet'.*TM857"):
        build_run(full, tmp_path / "d", tmp_path / "empty")


def test_exports_of_a_dit_initialize_it(tmp_path: Path) -> None:
    """The folder of diffusers and a file with 8 bits; snapshots start from them too."""
    settings = ["model.conditioning=class", "model.num_classes=3", "model.class_names=[cat, dog, cow]"]
    run = save_perturbed_run(dit(tmp_path, *settings), 0.1)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", "live", torch.float32), CONSOLE)
    fresh = dit(tmp_path, *settings)
    continued: Any = build_run(fresh, tmp_path / "b", tmp_path / "out")
    assert is_close(trainable(continued), trainable(run), 0)
    assert is_close(continued.policy.weights.snapshot_tensors()["ema"], trainable(run), 0)
    export_weights(run.directory, tmp_path / "run.safetensors", "live", 8, CONSOLE)
    assert is_close(trainable(build_run(fresh, tmp_path / "c", tmp_path / "run.safetensors")), trainable(run), 0.01)


def test_dit_is_exported_to_the_originals_layout_and_back(tmp_path: Path) -> None:
    run = save_perturbed_run(dit(tmp_path, "model.convention=explainingai"), 0.1)
    export = GeneratorExport(run.directory, tmp_path / "dit_ckpt.pth", "authors", "live", torch.float32)
    export_generator(export, CONSOLE)
    assert "patch_embed_layer.patch_embed.0.weight" in torch.load(tmp_path / "dit_ckpt.pth", weights_only=True)
    model = dit(tmp_path, "model.convention=explainingai", f"model.weights={tmp_path / 'dit_ckpt.pth'}").model
    assert isinstance(model, LatentDitSpec)
    assert is_close(dict(model.load(Placement()).net.named_parameters()), trainable(run), 0)
    with pytest.raises(ConfigError, match=r"--out.*\.pth.*TM854"):
        export_generator(GeneratorExport(run.directory, tmp_path / "folder", "authors"), CONSOLE)


def test_autoencoder_folder_initializes_an_autoencoder(tmp_path: Path) -> None:
    settings = "{type: autoencoder_kl, block_out_channels: [8, 8], layers_per_block: 1, norm_num_groups: 4}"
    overrides = ["validation.every=0", "discriminator=null", "loss.lpips=0", ENGINE, f"output_dir={tmp_path}"]
    config = make_tiny_any(load_any_config("playground-vae", [f"autoencoder={settings}", *overrides]))
    spec = AutoencoderKLSpec(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, seed=3)
    net = spec.load(Placement())
    net.export(tmp_path / "vae", torch.float32)
    run = build_run(config, tmp_path / "b", tmp_path / "vae")
    assert is_close(dict(run.weights.trainable()), dict(net.named_parameters()), 0)
