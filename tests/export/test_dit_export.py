"""Export of a class-conditional DiT as diffusers' DiTTransformer2DModel, and back."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from rich.console import Console
from torch import Tensor
from untrained_runs import save_perturbed_run

from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.models.autoencoder_kl import AutoencoderKLSpec
from tastemaker.search.generation import resolve_source

CONSOLE = Console(quiet=True)
PATH = "{type: variance_preserving, beta_schedule: linear, beta_start: 1e-4, beta_end: 0.02, steps_offset: 0}"
NOISE_PROCESS = f"process={{type: gaussian, path: {PATH}}}"
SETTINGS = [
    "model.conditioning=class",
    "model.num_classes=3",
    "model.class_names=[cat, dog, cow]",
    "model.latent_channels=4",
    "model.downsample_factor=4",
    "model.width=16",
    "model.depth=2",
    "model.heads=2",
    "model.image_size=32",
    "model.convention=diffusers",
    "model.scaling_factor=0.5",
    "data.image_size=32",
    "engine={device: cpu, precision: fp32, compile: false}",
    "ema_decay=0",
    "sample.weights=live",
]


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers autoencoder whose latents are scaled."""
    folder = tmp_path_factory.mktemp("vae") / "vae"
    net = AutoencoderKLSpec(block_out_channels=(8, 8, 8), layers_per_block=1, norm_num_groups=4).load(Placement())
    net.std.fill_(4.0)
    net.export(folder, torch.float32)
    return folder


def save_run(folder: Path, vae: Path, *overrides: str) -> tuple[Path, Any]:
    """Save a run with perturbed weights. Returns its directory and model."""
    settings = [f"model.autoencoder={vae}", f"output_dir={folder}", "name=run", NOISE_PROCESS, *overrides]
    config = load("dit-folder", [*SETTINGS, *settings])
    run = save_perturbed_run(config, 0.1)
    return run.directory, run.policy.model


def predict(model: Any, prompts: tuple[str, ...] = ("cat", "cow", "")) -> Tensor:
    x = Randomness(0, 0, torch.arange(3)).normal("x", *model.shape)
    with torch.no_grad():
        prediction: Tensor = model.predict(x, torch.tensor([0.101, 0.501, 0.901]), model.embed(prompts))
    return prediction


def read_back(folder: Path) -> Any:
    """Load the model from an exported folder."""
    config, step = resolve_source(str(folder), [])
    assert step is None
    return config.model.load(Placement())


def export(directory: Path, out: Path, console: Console = CONSOLE, **options: Any) -> Path:
    export_generator(GeneratorExport(directory, out, "diffusers", dtype=torch.float32, **options), console)
    return out


def test_class_conditional_dit_round_trip(vae: Path, tmp_path: Path) -> None:
    directory, model = save_run(tmp_path, vae)
    folder, loaded = export(directory, tmp_path / "out"), read_back(tmp_path / "out")
    assert predict(model).std() > 0.05
    assert predict(loaded).equal(predict(model))
    z = torch.randn(2, *model.shape)
    torch.testing.assert_close(loaded.decode(z), model.decode(z), atol=1e-5, rtol=1e-5)
    pixels = torch.rand(2, *model.pixels)
    torch.testing.assert_close(loaded.encode(pixels), model.encode(pixels), atol=1e-5, rtol=1e-5)
    assert "DiTPipeline.from_pretrained" in (folder / "README.md").read_text()


def test_diffusers_pipeline_gives_the_same_prediction(vae: Path, tmp_path: Path) -> None:
    directory, model = save_run(tmp_path, vae, "model.learn_sigma=true")
    pipeline_class: Any = diffusers.DiTPipeline
    pipeline = pipeline_class.from_pretrained(export(directory, tmp_path / "out"))
    assert pipeline.labels == {"cat": 0, "cow": 2, "dog": 1}
    x = Randomness(0, 0, torch.arange(3)).normal("x", *model.shape)
    with torch.no_grad():
        prediction = pipeline.transformer(x[:, 0], torch.tensor([100, 500, 900]), torch.tensor([0, 2, 3])).sample
        decoded = pipeline.vae.decode(x[:, 0] / pipeline.vae.config.scaling_factor).sample
    torch.testing.assert_close(prediction[:, :4], predict(model)[:, 0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close((decoded / 2 + 0.5).clamp(0, 1), model.decode(x)[:, 0], atol=1e-5, rtol=1e-4)
    images = pipeline([0, 1], guidance_scale=1.0, num_inference_steps=3, output_type="np").images
    assert images.shape == (2, 32, 32, 3)


@pytest.mark.slow
def test_unconditional_dit_is_exported_with_one_class(vae: Path, tmp_path: Path) -> None:
    directory, model = save_run(
        tmp_path, vae, "model.conditioning=nothing", "model.class_names=[]", "model.num_classes=1000"
    )
    loaded = read_back(export(directory, tmp_path / "out"))
    assert predict(loaded, ("0", "", "0")).equal(predict(model, ("", "", "")))


@pytest.mark.slow
def test_lora_is_merged(vae: Path, tmp_path: Path) -> None:
    directory, model = save_run(tmp_path, vae, "tuning={type: lora, rank: 2}")
    loaded = read_back(export(directory, tmp_path / "out"))
    torch.testing.assert_close(predict(loaded), predict(model), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_differences_of_diffusers_are_reported(vae: Path, tmp_path: Path) -> None:
    directory, model = save_run(tmp_path, vae, "model.convention=facebook")
    output = StringIO()
    folder = export(directory, tmp_path / "out", Console(file=output, width=300))
    assert "up to 7 % lower" in output.getvalue() and "Diffusers embeds time" in (folder / "README.md").read_text()
    assert predict(read_back(folder)).equal(predict(model))


@pytest.mark.slow
def test_flow_and_unknown_autoencoder_are_exported_as_components(vae: Path, tmp_path: Path) -> None:
    output, flow = StringIO(), "process={type: gaussian, path: {type: rectified_flow}}"
    directory, model = save_run(tmp_path / "flow", vae, "process=null", flow)
    folder = export(directory, tmp_path / "out", Console(file=output, width=300))
    assert "predicts a flow" in output.getvalue() and not (folder / "model_index.json").exists()
    assert json.loads((folder / "scheduler/scheduler_config.json").read_text())["_class_name"].startswith("FlowMatch")
    assert predict(read_back(folder)).equal(predict(model))
    overrides = ["model.autoencoder=null", "model.latent_channels=16", "model.scaling_factor=1"]
    directory, model = save_run(tmp_path / "pixels", vae, *overrides)
    folder = export(directory, tmp_path / "components", Console(file=output, width=300))
    assert "folder vae was not written" in output.getvalue() and not (folder / "vae").exists()
    assert predict(read_back(folder)).equal(predict(model))
    bare = export(directory, tmp_path / "bare", network_only=True)
    assert sorted(path.name for path in bare.iterdir()) == ["README.md", "recipe.yaml", "transformer"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.conditioning=words"], "on words"),
        (["model.convention=explainingai"], "explainingai"),
        (["model.timestep_embed_dim=64"], " 64 .* 256"),
        (["model.intermediate_size=32"], "MLP.* 32"),
    ],
)
def test_unsupported_networks_are_refused(settings: list[str], message: str, vae: Path, tmp_path: Path) -> None:
    directory, _ = save_run(tmp_path, vae, *settings)
    with pytest.raises(ConfigError, match=f"{message}.*--layout"):
        export(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_other_layouts_are_refused(vae: Path, tmp_path: Path) -> None:
    directory, _ = save_run(tmp_path, vae)
    with pytest.raises(ConfigError, match=r"--layout.*diffusers.*TM663"):
        export_generator(GeneratorExport(directory, tmp_path / "out", "comfyui"), CONSOLE)
