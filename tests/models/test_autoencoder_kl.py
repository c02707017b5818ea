"""AutoencoderKL compared with diffusers: outputs, checkpoint folders and export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tastemaker.config.build import make_tiny_any
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.weights import export_weights
from tastemaker.models.autoencoder_kl import AutoencoderKLSpec
from tastemaker.models.pretrained_autoencoder import load_autoencoder
from tastemaker.training.trainer import run_training

SMALL = AutoencoderKLSpec(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4)
CONSOLE = Console(quiet=True)


def save_autoencoder(path: Path, spec: AutoencoderKLSpec = SMALL, **settings: Any) -> Any:
    """Save a diffusers autoencoder with these settings in its config, and return it."""
    net = spec.load(Placement()).inner
    net.register_to_config(**settings)
    net.save_pretrained(path)
    return net.eval()


def test_output_and_scale_equal_diffusers(tmp_path: Path) -> None:
    net = save_autoencoder(tmp_path / "vae", scaling_factor=0.5, shift_factor=0.25)
    pixels = torch.rand(2, 3, 16, 8)
    loaded = AutoencoderKLSpec(weights=str(tmp_path)).load(Placement()).eval()  # a pipeline folder with `vae` in it
    assert loaded.channels and loaded.export_format == "diffusers"
    with torch.no_grad():
        expected = net(2 * pixels - 1).sample
        mode = net.encode(2 * pixels - 1).latent_dist.mode()
    reconstruction, extra_loss = loaded(pixels)
    torch.testing.assert_close(2 * reconstruction - 1, expected, atol=1e-5, rtol=1e-5)
    kl = net.encode(2 * pixels - 1).latent_dist.kl()
    torch.testing.assert_close(extra_loss, loaded.kl_weight * kl)
    loaded.measure_latents(pixels)
    torch.testing.assert_close(loaded.encode(pixels), (mode - 0.25) * 0.5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loaded.decode(loaded.encode(pixels)), reconstruction.clamp(0, 1), atol=1e-5, rtol=1e-5)
    assert (loaded.stride, loaded.channels) == (2, 4)


@pytest.mark.parametrize("file", ["bin", "safetensors", "fp16.safetensors", "fp16.bin"])
def test_every_published_format_loads(file: str, tmp_path: Path) -> None:
    net = save_autoencoder(tmp_path / "vae", scaling_factor=0.5)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}  # former names in diffusers
    tensors = {}
    for key, x in net.state_dict().items():
        old_key = next((key.replace(new, old) for new, old in old_names.items() if f".{new}." in key), key)
        tensors[old_key] = x.half().clone() if "fp16" in file else x.clone()
    path = tmp_path / "vae" / f"diffusion_pytorch_model.{file}"
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)
    pixels = torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        expected = net.encode(2 * pixels - 1).latent_dist.mode() * 0.5
    loaded: Any = load_autoencoder(str(tmp_path), Placement())
    torch.testing.assert_close(loaded.encode(pixels), expected, atol=2e-3 if "fp16" in file else 1e-5, rtol=1e-3)
    if path.suffix == ".bin":
        torch.save({**tensors, "code": print}, path)
        with pytest.raises(ConfigError, match=r"cannot be read.*TM501"):
            load_autoencoder(str(tmp_path), Placement())


@pytest.mark.parametrize("spec", [SMALL, replace(SMALL, in_channels=1, use_quant_conv=False, latent_channels=2)])
def test_autoencoder_kl_sizes_are_inferred(spec: AutoencoderKLSpec) -> None:
    net = spec.load(Placement())
    assert replace(AutoencoderKLSpec(norm_num_groups=4)).with_inferred_sizes(net.state_dict()) == spec
    assert net(torch.rand(1, 3, 8, 8))[0].shape == (1, 3, 8, 8)


@pytest.fixture(autouse=True)
def measure_latents_on_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure latent statistics on few images."""
    monkeypatch.setattr("tastemaker.autoencoders.training.LATENT_STATISTICS_IMAGES", 8)


def make_config(tmp_path: Path, *overrides: str) -> AutoencoderRunConfig:
    settings = [
        "engine.device=cpu",
        "batch_size=4",
        "data.device=cpu",
        "sample.every=0",
        "validation.every=0",
        "discriminator=null",
    ]
    recipe = load_any_config(
        "vae-diffusers", [*settings, "loss.lpips=0", "steps=2", f"output_dir={tmp_path}", *overrides]
    )
    config = make_tiny_any(recipe)
    assert isinstance(config, AutoencoderRunConfig)
    return config


@pytest.mark.slow
def test_exported_folder_loads_in_diffusers(tmp_path: Path) -> None:
    assert run_training(make_config(tmp_path, "optim.lr=1e-3"), console=CONSOLE)
    run, out = tmp_path / "vae-diffusers", tmp_path / "folder"
    export_generator(GeneratorExport(run, out, "diffusers", dtype=torch.float32), CONSOLE)
    exported, trained = diffusers.AutoencoderKL.from_pretrained(out), load_autoencoder(str(run), Placement())
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(2 * trained(pixels)[0] - 1, exported(2 * pixels - 1).sample, atol=1e-5, rtol=1e-5)
        scaled = exported.encode(2 * pixels - 1).latent_dist.mode() * exported.config.scaling_factor
        torch.testing.assert_close(trained.encode(pixels), scaled, atol=1e-5, rtol=1e-4)  # type: ignore[operator]
    loaded = load_autoencoder(str(out), Placement())
    torch.testing.assert_close(loaded.encode(pixels), trained.encode(pixels), atol=1e-5, rtol=1e-4)  # type: ignore[operator]
    export_weights(run, tmp_path / "vae.safetensors", "", 32, CONSOLE)
    assert load_autoencoder(str(tmp_path / "vae.safetensors"), Placement())(pixels)[0].equal(trained(pixels)[0])
    with pytest.raises(ConfigError, match=r"comfyui.*TM693"):
        export_generator(GeneratorExport(run, tmp_path / "other", "comfyui"), CONSOLE)
    with pytest.raises(ConfigError, match=r"exists already.*TM692"):
        export_generator(GeneratorExport(run, out, "diffusers"), CONSOLE)


def test_run_from_published_weights_is_self_contained(tmp_path: Path) -> None:
    save_autoencoder(tmp_path / "published", scaling_factor=0.5)
    config = replace(
        make_config(tmp_path), autoencoder=AutoencoderKLSpec(weights=str(tmp_path / "published"), norm_num_groups=4)
    )
    assert run_training(config, console=CONSOLE)
    (tmp_path / "published").rename(tmp_path / "gone")
    loaded = load_autoencoder(str(tmp_path / "vae-diffusers"), Placement())
    assert float(loaded.std) == 2.0  # type: ignore[arg-type]  # the published scale, because generators rely on it
    export_generator(GeneratorExport(tmp_path / "vae-diffusers", tmp_path / "exported", "diffusers"), CONSOLE)
    exported = diffusers.AutoencoderKL.from_pretrained(tmp_path / "exported").config
    assert (exported.scaling_factor, exported.shift_factor, exported.norm_num_groups) == (0.5, None, 4)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"autoencoder\.weights: .*config\.json.*TM418"):
        AutoencoderKLSpec(weights=str(tmp_path)).load(Placement())
    with pytest.raises(ConfigError, match=r"`tastemaker download nobody/vae`.*TM505"):
        AutoencoderKLSpec(weights="nobody/vae").load(Placement())
    with pytest.raises(ValueError, match=r"32 does not divide 8.*TM417"):
        AutoencoderKLSpec(block_out_channels=(8,))
