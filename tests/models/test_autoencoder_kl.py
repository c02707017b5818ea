"""diffusers' AutoencoderKL under our losses: the same numbers, from a folder and back to one."""

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
QUIET = Console(quiet=True)


def folder(path: Path, spec: AutoencoderKLSpec = SMALL, **told: Any) -> Any:
    """A network of diffusers, in a folder."""
    net = spec.load(Placement()).inner
    net.register_to_config(**told)
    net.save_pretrained(path)
    return net.eval()


def test_output_and_scale_equal_diffusers(tmp_path: Path) -> None:
    net = folder(tmp_path / "vae", scaling_factor=0.5, shift_factor=0.25)
    pixels = torch.rand(2, 3, 16, 8)
    found = AutoencoderKLSpec(weights=str(tmp_path)).load(Placement()).eval()  # a pipeline's folder, with `vae` in it
    assert found.channels and found.export_format == "diffusers"
    with torch.no_grad():
        whole = net(2 * pixels - 1).sample
        mode = net.encode(2 * pixels - 1).latent_dist.mode()
    made, extra = found(pixels)
    torch.testing.assert_close(2 * made - 1, whole, atol=1e-5, rtol=1e-5)
    prices = net.encode(2 * pixels - 1).latent_dist.kl()
    torch.testing.assert_close(extra, found.kl_weight * prices)
    found.measure_latents(pixels)
    torch.testing.assert_close(found.encode(pixels), (mode - 0.25) * 0.5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.decode(found.encode(pixels)), made.clamp(0, 1), atol=1e-5, rtol=1e-5)
    assert (found.stride, found.channels) == (2, 4)


@pytest.mark.parametrize("file", ["bin", "safetensors", "fp16.safetensors", "fp16.bin"])
def test_every_published_format_loads(file: str, tmp_path: Path) -> None:
    net = folder(tmp_path / "vae", scaling_factor=0.5)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}  # as diffusers called them once
    tensors = {}
    for key, x in net.state_dict().items():
        found = next((key.replace(new, old) for new, old in names.items() if f".{new}." in key), key)
        tensors[found] = x.half().clone() if "fp16" in file else x.clone()
    path = tmp_path / "vae" / f"diffusion_pytorch_model.{file}"
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)
    pixels = torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        wanted = net.encode(2 * pixels - 1).latent_dist.mode() * 0.5
    opened_again: Any = load_autoencoder(str(tmp_path), Placement())
    torch.testing.assert_close(opened_again.encode(pixels), wanted, atol=2e-3 if "fp16" in file else 1e-5, rtol=1e-3)
    if path.suffix == ".bin":
        torch.save({**tensors, "code": print}, path)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_autoencoder(str(tmp_path), Placement())


@pytest.mark.parametrize("spec", [SMALL, replace(SMALL, in_channels=1, use_quant_conv=False, latent_channels=2)])
def test_autoencoder_kl_sizes_are_inferred(spec: AutoencoderKLSpec) -> None:
    net = spec.load(Placement())
    assert replace(AutoencoderKLSpec(norm_num_groups=4)).with_inferred_sizes(net.state_dict()) == spec
    assert net(torch.rand(1, 3, 8, 8))[0].shape == (1, 3, 8, 8)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are settled on few pictures."""
    monkeypatch.setattr("tastemaker.autoencoders.training.LATENT_STATISTICS_IMAGES", 8)


def config(tmp_path: Path, *changes: str) -> AutoencoderRunConfig:
    small = [
        "engine.device=cpu",
        "batch_size=4",
        "data.device=cpu",
        "sample.every=0",
        "validation.every=0",
        "discriminator=null",
    ]
    recipe = load_any_config("vae-diffusers", [*small, "loss.lpips=0", "steps=2", f"output_dir={tmp_path}", *changes])
    found = make_tiny_any(recipe)
    assert isinstance(found, AutoencoderRunConfig)
    return found


@pytest.mark.slow
def test_exported_folder_loads_in_diffusers(tmp_path: Path) -> None:
    assert run_training(config(tmp_path, "optim.lr=1e-3"), console=QUIET)
    run, out = tmp_path / "vae-diffusers", tmp_path / "folder"
    export_generator(GeneratorExport(run, out, "diffusers", dtype=torch.float32), QUIET)
    theirs, ours = diffusers.AutoencoderKL.from_pretrained(out), load_autoencoder(str(run), Placement())
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(2 * ours(pixels)[0] - 1, theirs(2 * pixels - 1).sample, atol=1e-5, rtol=1e-5)
        scaled = theirs.encode(2 * pixels - 1).latent_dist.mode() * theirs.config.scaling_factor
        torch.testing.assert_close(ours.encode(pixels), scaled, atol=1e-5, rtol=1e-4)  # type: ignore[operator]
    again = load_autoencoder(str(out), Placement())
    torch.testing.assert_close(again.encode(pixels), ours.encode(pixels), atol=1e-5, rtol=1e-4)  # type: ignore[operator]
    export_weights(run, tmp_path / "vae.safetensors", "", 32, QUIET)
    assert load_autoencoder(str(tmp_path / "vae.safetensors"), Placement())(pixels)[0].equal(ours(pixels)[0])
    with pytest.raises(ConfigError, match="comfyui does not know"):
        export_generator(GeneratorExport(run, tmp_path / "other", "comfyui"), QUIET)
    with pytest.raises(ConfigError, match="exists already"):
        export_generator(GeneratorExport(run, out, "diffusers"), QUIET)


def test_run_from_published_weights_reloads_without_them(tmp_path: Path) -> None:
    folder(tmp_path / "published", scaling_factor=0.5)
    whole = replace(
        config(tmp_path), autoencoder=AutoencoderKLSpec(weights=str(tmp_path / "published"), norm_num_groups=4)
    )
    assert run_training(whole, console=QUIET)
    (tmp_path / "published").rename(tmp_path / "gone")
    found = load_autoencoder(str(tmp_path / "vae-diffusers"), Placement())
    assert float(found.std) == 2.0  # type: ignore[arg-type]  # as published, for generators rely on it
    export_generator(GeneratorExport(tmp_path / "vae-diffusers", tmp_path / "again", "diffusers"), QUIET)
    told = diffusers.AutoencoderKL.from_pretrained(tmp_path / "again").config
    assert (told.scaling_factor, told.shift_factor, told.norm_num_groups) == (0.5, None, 4)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"autoencoder\.weights: .*config\.json"):
        AutoencoderKLSpec(weights=str(tmp_path)).load(Placement())
    with pytest.raises(ConfigError, match="`tastemaker download nobody/vae`"):
        AutoencoderKLSpec(weights="nobody/vae").load(Placement())
    with pytest.raises(ValueError, match="32 does not divide 8"):
        AutoencoderKLSpec(block_out_channels=(8,))
