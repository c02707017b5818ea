"""A DiT trained here goes out as diffusers' DiTTransformer2DModel, and comes back the same."""

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

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.models.autoencoder_kl import AutoencoderKL
from tastemaker.search.generation import resolve_source
from tastemaker.training.resume import write_run_config

QUIET = Console(quiet=True)
NOISE = "process={type: gaussian, path: {type: variance_preserving, betas: linear, first: 1e-4, last: 0.02, offset: 0}}"
SETTINGS = [
    "model.told=class", "model.classes=3", "model.names=[cat, dog, cow]", "model.channels=4", "model.factor=4",
    "model.width=16", "model.depth=2", "model.heads=2", "model.pixels=32", "model.habit=diffusers", "model.scale=0.5",
    "data.size=32",
    "engine={device: cpu, precision: fp32, compile: false}", "ema=0", "sample.use=live",
]  # fmt: skip


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder of diffusers' whose latents are to be scaled."""
    folder = tmp_path_factory.mktemp("codec") / "vae"
    net = AutoencoderKL(block_out_channels=(8, 8, 8), layers_per_block=1, norm_num_groups=4).load(Placement())
    net.std.fill_(4.0)
    net.leave(folder, torch.float32)
    return folder


def trained(folder: Path, codec: Path, *more: str) -> tuple[Path, Any]:
    """A run, and its model, moved by made-up numbers."""
    chosen = [f"model.codec={codec}", f"output={folder}", "name=run", NOISE, *more]
    config = load("dit-folder", [*SETTINGS, *chosen])
    run, chance = build(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.policy.weights.trainable().values():
            p.add_(0.1 * torch.randn(p.shape, generator=chance))
    run.save(1)
    write_run_config(config, run.directory)
    return run.directory, run.policy.model


def predicted(model: Any, prompts: tuple[str, ...] = ("cat", "cow", "")) -> Tensor:
    x = Randomness(0, 0, torch.arange(3)).normal("x", *model.shape)
    with torch.no_grad():
        found: Tensor = model.predict(x, torch.tensor([0.101, 0.501, 0.901]), model.embed(prompts))
    return found


def again(folder: Path) -> Any:
    """What the folder is read back as, by its name alone."""
    config, step = resolve_source(str(folder), [])
    assert step is None
    return config.model.load(Placement())


def out(directory: Path, place: Path, console: Console = QUIET, **more: Any) -> Path:
    export_generator(GeneratorExport(directory, place, "diffusers", dtype=torch.float32, **more), console)
    return place


def test_a_dit_of_classes_makes_the_round_trip(codec: Path, tmp_path: Path) -> None:
    directory, model = trained(tmp_path, codec)
    folder, read = out(directory, tmp_path / "out"), again(tmp_path / "out")
    assert predicted(model).std() > 0.05
    assert predicted(read).equal(predicted(model))
    z = torch.randn(2, *model.shape)
    torch.testing.assert_close(read.decode(z), model.decode(z), atol=1e-5, rtol=1e-5)
    pixels = torch.rand(2, *model.pixels)
    torch.testing.assert_close(read.encode(pixels), model.encode(pixels), atol=1e-5, rtol=1e-5)
    assert "DiTPipeline.from_pretrained" in (folder / "README.md").read_text()


def test_diffusers_pipeline_predicts_and_decodes_the_same(codec: Path, tmp_path: Path) -> None:
    directory, model = trained(tmp_path, codec, "model.sigma=true")
    kind: Any = diffusers.DiTPipeline
    pipeline = kind.from_pretrained(out(directory, tmp_path / "out"))
    assert pipeline.labels == {"cat": 0, "cow": 2, "dog": 1}
    x = Randomness(0, 0, torch.arange(3)).normal("x", *model.shape)
    with torch.no_grad():
        found = pipeline.transformer(x[:, 0], torch.tensor([100, 500, 900]), torch.tensor([0, 2, 3])).sample
        made = pipeline.vae.decode(x[:, 0] / pipeline.vae.config.scaling_factor).sample
    torch.testing.assert_close(found[:, :4], predicted(model)[:, 0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close((made / 2 + 0.5).clamp(0, 1), model.decode(x)[:, 0], atol=1e-5, rtol=1e-4)
    pictures = pipeline([0, 1], guidance_scale=1.0, num_inference_steps=3, output_type="np").images
    assert pictures.shape == (2, 32, 32, 3)


@pytest.mark.slow
def test_told_nothing_it_is_a_dit_of_one_class(codec: Path, tmp_path: Path) -> None:
    directory, model = trained(tmp_path, codec, "model.told=nothing", "model.names=[]", "model.classes=1000")
    read = again(out(directory, tmp_path / "out"))
    assert predicted(read, ("0", "", "0")).equal(predicted(model, ("", "", "")))


@pytest.mark.slow
def test_adapters_are_merged(codec: Path, tmp_path: Path) -> None:
    directory, model = trained(tmp_path, codec, "tuning={type: lora, rank: 2}")
    read = again(out(directory, tmp_path / "out"))
    torch.testing.assert_close(predicted(read), predicted(model), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_what_diffusers_computes_otherwise_is_said(codec: Path, tmp_path: Path) -> None:
    directory, model = trained(tmp_path, codec, "model.habit=facebook")
    said = StringIO()
    folder = out(directory, tmp_path / "out", Console(file=said, width=300))
    assert "up to 7 % slower" in said.getvalue() and "Diffusers tells time" in (folder / "README.md").read_text()
    assert predicted(again(folder)).equal(predicted(model))


@pytest.mark.slow
def test_a_flow_and_a_foreign_autoencoder_leave_parts_alone(codec: Path, tmp_path: Path) -> None:
    said, flow = StringIO(), "process={type: gaussian, path: {type: straight}}"
    directory, model = trained(tmp_path / "flow", codec, "process=null", flow)
    folder = out(directory, tmp_path / "out", Console(file=said, width=300))
    assert "trained to flow" in said.getvalue() and not (folder / "model_index.json").exists()
    assert json.loads((folder / "scheduler/scheduler_config.json").read_text())["_class_name"].startswith("FlowMatch")
    assert predicted(again(folder)).equal(predicted(model))
    more = ["model.codec=null", "model.channels=16", "model.scale=1"]
    directory, model = trained(tmp_path / "pixels", codec, *more)
    folder = out(directory, tmp_path / "alone", Console(file=said, width=300))
    assert "none of diffusers' and are coarse pixels" in said.getvalue() and not (folder / "vae").exists()
    assert predicted(again(folder)).equal(predicted(model))
    bare = out(directory, tmp_path / "bare", bare=True)
    assert sorted(path.name for path in bare.iterdir()) == ["README.md", "recipe.yaml", "transformer"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.told=words"], "is told words"),
        (["model.habit=explainingai"], "as explainingai's trainer does"),
        (["model.waves=64"], "by 64 waves, diffusers' by 256"),
        (["model.inner=32"], "perceptrons of 32"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(
    settings: list[str], sentence: str, codec: Path, tmp_path: Path
) -> None:
    directory, _ = trained(tmp_path, codec, *settings)
    with pytest.raises(ConfigError, match=f"{sentence}.*leave --layout out"):
        out(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_others_than_diffusers_do_not_know_it(codec: Path, tmp_path: Path) -> None:
    directory, _ = trained(tmp_path, codec)
    with pytest.raises(ConfigError, match="comfyui does not know this model; give diffusers"):
        export_generator(GeneratorExport(directory, tmp_path / "out", "comfyui"), QUIET)
