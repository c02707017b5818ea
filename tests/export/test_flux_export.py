"""Exports of FLUX: diffusers and ComfyUI files give the same images as the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from cli_runner import run_cli
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from rich.console import Console
from safetensors.torch import load_file
from tiny_pipelines import (
    CLIP_TOKENS,
    T5_VOCAB_SIZE,
    byte_clip_tokenizer,
    byte_t5_tokenizer,
    random_network,
    sample_latents,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel
from untrained_runs import PLAIN, PROMPTS, UntrainedRun, make_untrained_run

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.data.image_io import read_image
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import DIFFUSERS_LORA_FILE, LoraFromFile
from tastemaker.models.flux import TINY_CONFIGS, FluxSpec
from tastemaker.models.latent_packing import pack_latents
from tastemaker.search import generation
from tastemaker.search.best_of_n import SingleSample
from tastemaker.search.generation import GenerationOptions

CONSOLE = Console(quiet=True)
LAYOUTS: tuple[Literal["diffusers", "comfyui"], ...] = ("diffusers", "comfyui")
PIPELINE = ("model.truncate_timesteps=false", "model.rollout_guidance_scale=null")  # diffusers samples this way


def make_flux_pipeline() -> FluxPipeline:
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        random_network(AutoencoderKL, TINY_CONFIGS["vae"], 1),
        random_network(CLIPTextModel, CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS}), 2),
        byte_clip_tokenizer(),
        random_network(T5EncoderModel, T5Config(**{**TINY_CONFIGS["text_encoder_2"], "vocab_size": T5_VOCAB_SIZE}), 3),
        byte_t5_tokenizer(),
        random_network(FluxTransformer2DModel, TINY_CONFIGS["transformer"], 4),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("flux")
    make_flux_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def full(base: str, tmp_path_factory: pytest.TempPathFactory) -> UntrainedRun:
    model = f"model={{type: flux, weights: {base}, height: 32, width: 32, max_text_tokens: 24}}"
    return make_untrained_run(tmp_path_factory.mktemp("full"), "srpo-flux-hps", model, *PIPELINE, "ema_decay=0.9")


@pytest.fixture(scope="module")
def lora(base: str, tmp_path_factory: pytest.TempPathFactory) -> UntrainedRun:
    model = f"model={{type: flux, weights: {base}, height: 32, width: 32, max_text_tokens: 24}}"
    tuning = "tuning={type: lora, rank: 4, alpha: 12}"
    return make_untrained_run(tmp_path_factory.mktemp("lora"), "srpo-flux-hps", model, *PIPELINE, tuning)


def generate(pipeline: Any, trained: UntrainedRun) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    latents = pack_latents(trained.noise()[:, 0])
    options = {"prompt": PROMPTS, "height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 24}
    pixels: Tensor = pipeline(**options, latents=latents, output_type="pt").images
    return pixels


def test_diffusers_pipeline_gives_the_same_images(full: UntrainedRun, tmp_path: Path) -> None:
    options = GeneratorExport(
        full.run.directory, tmp_path / "out", "diffusers", "live", torch.float32, max_shard_size="50KB"
    )
    export_generator(options, CONSOLE)
    assert len(list((tmp_path / "out/transformer").glob("*.safetensors"))) > 1  # sharded, with an index
    assert (tmp_path / "out/transformer/diffusion_pytorch_model.safetensors.index.json").is_file()
    config = json.loads((tmp_path / "out/transformer/config.json").read_text())
    assert config["_class_name"] == "FluxTransformer2DModel" and "_name_or_path" not in config
    pixels = generate(FluxPipeline.from_pretrained(tmp_path / "out"), full)
    torch.testing.assert_close(pixels, full.pixels(), atol=1e-5, rtol=0)
    assert not torch.allclose(pixels, generate(make_flux_pipeline(), full), atol=1e-3)
    loaded = FluxSpec(str(tmp_path / "out"), height=32, width=32, max_text_tokens=24).load(Placement())
    assert all(x.equal(loaded.net.state_dict()[key]) for key, x in full.run.policy.model.net.state_dict().items())


def test_ema_is_exported_by_default_in_the_requested_dtype(full: UntrainedRun, tmp_path: Path) -> None:
    export_generator(GeneratorExport(full.run.directory, tmp_path / "out", "diffusers", network_only=True), CONSOLE)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "recipe.yaml", "transformer"]
    tensors = load_file(next((tmp_path / "out/transformer").glob("*.safetensors")))
    ema = full.run.policy.weights.snapshot_tensors()["ema"]
    assert all(x.dtype == torch.bfloat16 and x.equal(ema[key].bfloat16()) for key, x in tensors.items())


def test_comfyui_export_has_original_names_and_a_workflow(full: UntrainedRun, tmp_path: Path) -> None:
    export_generator(
        GeneratorExport(full.run.directory, tmp_path / "exported", "comfyui", "live", torch.float32), CONSOLE
    )
    tensors = load_file(tmp_path / "exported/exported.safetensors")
    weights = full.run.policy.model.net.state_dict()
    expected = torch.cat([weights[f"transformer_blocks.0.attn.to_{x}.weight"] for x in "qkv"])
    assert tensors["double_blocks.0.img_attn.qkv.weight"].equal(expected)
    nodes = json.loads((tmp_path / "exported/workflow.json").read_text())
    assert nodes["network"]["inputs"]["unet_name"] == "exported.safetensors"
    # As SRPO shows its images, not as it trains: 25 steps here, and 32x32.
    assert nodes["sampler"]["inputs"]["steps"] == 50 and nodes["guidance"]["inputs"]["guidance"] == 3.5
    assert (nodes["size"]["inputs"]["height"], nodes["shift"]["inputs"]["width"]) == (1024, 1024)
    assert nodes["shift"]["inputs"]["max_shift"] == pytest.approx(1.098612)  # log 3
    links = [x for node in nodes.values() for x in node["inputs"].values() if isinstance(x, list)]
    assert len(links) >= 10 and all(link[0] in nodes for link in links)


def test_diffusers_lora_gives_the_same_images(base: str, lora: UntrainedRun, tmp_path: Path) -> None:
    export_generator(GeneratorExport(lora.run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), CONSOLE)
    pipeline = FluxPipeline.from_pretrained(base)
    before = generate(pipeline, lora)
    pipeline.load_lora_weights(tmp_path / "out")
    expected = lora.pixels()
    torch.testing.assert_close(generate(pipeline, lora), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(before, expected, atol=1e-3)
    with torch.no_grad(), lora.run.policy.weights.use("reference"):
        torch.testing.assert_close(before, lora.pixels(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_lora_is_read_back(layout: Any, base: str, lora: UntrainedRun, tmp_path: Path) -> None:
    export_generator(GeneratorExport(lora.run.directory, tmp_path / "exported", layout, dtype=torch.float32), CONSOLE)
    file = next((tmp_path / "exported").glob("*.safetensors"))
    model = FluxSpec(base, height=32, width=32, max_text_tokens=24).load(Placement())
    LoraFromFile(file).apply(model, ())
    pixels = model.decode(sample_latents(model, PLAIN, PROMPTS, lora.noise()))[:, 0]
    torch.testing.assert_close(pixels, lora.pixels(), atol=1e-5, rtol=0)


def test_comfyui_lora_has_down_up_and_alpha(lora: UntrainedRun, tmp_path: Path) -> None:
    export_generator(GeneratorExport(lora.run.directory, tmp_path / "exported", "comfyui"), CONSOLE)
    tensors = load_file(tmp_path / "exported/exported.safetensors")
    stem = "lora_transformer_transformer_blocks_0_attn_to_q"
    adapters = lora.run.policy.weights.trainable()
    assert tensors[f"{stem}.lora_down.weight"].equal(
        adapters["transformer_blocks.0.attn.to_q.lora_A.weight"].bfloat16()
    )
    assert tensors[f"{stem}.lora_up.weight"].shape[1] == 4 and tensors[f"{stem}.alpha"].item() == 12
    nodes = json.loads((tmp_path / "exported/workflow.json").read_text())
    assert nodes["lora"]["inputs"]["lora_name"] == "exported.safetensors"
    assert nodes["shift"]["inputs"]["model"] == ["lora", 0]


@pytest.mark.parametrize(
    ("layout", "usage"),
    [
        ("diffusers", '  pipeline.load_lora_weights("exported")'),
        ("comfyui", "  Put exported.safetensors into ComfyUI's models/loras. Then open workflow.json"),
    ],
)
def test_export_is_readable_by_others_and_says_how_to_load_it(
    layout: str, usage: str, lora: UntrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        assert run_cli("export", str(lora.run.directory), "--out", "exported", "--layout", layout) == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert len(files) > 2 and {path.stat().st_mode & 0o777 for path in files} == {0o640}
    assert usage in capsys.readouterr().err.partition("next:\n")[2]


def test_lora_is_scaled_before_the_cast(lora: UntrainedRun, tmp_path: Path) -> None:
    export_generator(GeneratorExport(lora.run.directory, tmp_path / "out", "diffusers"), CONSOLE)
    tensors, adapters = load_file(tmp_path / "out" / DIFFUSERS_LORA_FILE), lora.run.policy.weights.trainable()
    assert {key.removeprefix("transformer.") for key in tensors} == set(adapters)
    for key, x in adapters.items():
        scaled = x.detach() * (3 if key.endswith("lora_B.weight") else 1)  # alpha 12 over rank 4
        assert tensors[f"transformer.{key}"].equal(scaled.bfloat16())


@pytest.mark.slow
def test_lora_can_be_merged(lora: UntrainedRun, tmp_path: Path) -> None:
    export_generator(
        GeneratorExport(lora.run.directory, tmp_path / "out", "diffusers", dtype=torch.float32, merge=True), CONSOLE
    )
    pixels = generate(FluxPipeline.from_pretrained(tmp_path / "out"), lora)
    torch.testing.assert_close(pixels, lora.pixels(), atol=1e-5, rtol=0)


def generate_images(recipe: str, out: Path, *, adapters: Path | None = None, scale: float = 1.0) -> Tensor:
    overrides = ["process.num_steps=2", "engine.device=cpu"]
    if recipe.endswith(".yaml"):
        overrides.append("name=base")  # a name without a run, whose weights would be used
    config, checkpoint = generation.resolve_source(recipe, overrides, adapters)
    batch = PromptBatch(tuple(PROMPTS), ({}, {}))
    generation.generate_samples(
        config,
        checkpoint,
        GenerationOptions(batch, 1, 0, SingleSample(), "live", out, scale),
        tiny=False,
        console=CONSOLE,
    )
    return torch.stack([read_image(path) for path in sorted(out.glob("0*.png"))])


@pytest.mark.slow
def test_generate_from_an_exported_pipeline(full: UntrainedRun, tmp_path: Path) -> None:
    directory = full.run.directory
    export_generator(GeneratorExport(directory, tmp_path / "pipeline", "diffusers", "live", torch.float32), CONSOLE)
    images = generate_images(str(tmp_path / "pipeline"), tmp_path / "a")
    assert (images - generate_images(str(directory), tmp_path / "b")).abs().max() <= 1 / 255 + 1e-6
    export_generator(GeneratorExport(directory, tmp_path / "bare", "diffusers", network_only=True), CONSOLE)
    with pytest.raises(ConfigError, match=r"without --network-only.*TM573"):
        generate_images(str(tmp_path / "bare"), tmp_path / "c")


@pytest.mark.slow
def test_generate_with_an_exported_lora(lora: UntrainedRun, tmp_path: Path) -> None:
    directory = lora.run.directory
    for layout in LAYOUTS:
        export_generator(GeneratorExport(directory, tmp_path / layout, layout, dtype=torch.float32), CONSOLE)
    expected = generate_images(str(directory), tmp_path / "run")
    file, recipe = tmp_path / "comfyui" / "comfyui.safetensors", str(directory / "config.yaml")
    images = {
        "folder": generate_images(str(tmp_path / "diffusers"), tmp_path / "a"),
        "file": generate_images(recipe, tmp_path / "b", adapters=file),
    }
    assert all((generated - expected).abs().max() <= 1 / 255 + 1e-6 for generated in images.values())
    base = generate_images(recipe, tmp_path / "c")
    assert generate_images(recipe, tmp_path / "d", adapters=file, scale=0.0).equal(base)
    assert not torch.allclose(base, expected, atol=2 / 255)


def test_model_card_has_recipe_scores_and_credits(full: UntrainedRun, tmp_path: Path) -> None:
    report = full.run.directory / "eval/geneval/report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"scores": {"right": {"overall": {"mean": 0.7, "low": 0.65, "high": 0.75}}}}))
    export_generator(GeneratorExport(full.run.directory, tmp_path / "out", "diffusers", network_only=True), CONSOLE)
    page = (tmp_path / "out/README.md").read_text()
    assert "- geneval: right 0.7 (0.65 to 0.75)" in page
    assert "| reward/mean | 0.25 | 0.5 |" in page and "Direct-Align" in page
    assert "type: srpo" in page and "reward `color`" in page and "the ema weights of step 000001" in page
    assert str(tmp_path) not in page.split("## Recipe")[0]


def test_invalid_options_are_refused(full: UntrainedRun, tmp_path: Path) -> None:
    directory = full.run.directory
    with pytest.raises(ConfigError, match=r"x\.safetensors.* a file.*TM665"):
        export_generator(GeneratorExport(directory, tmp_path / "x.safetensors", "comfyui"), CONSOLE)
    with pytest.raises(ConfigError, match=r"exists already.*TM666"):
        export_generator(GeneratorExport(directory, tmp_path, "comfyui"), CONSOLE)
    with pytest.raises(ConfigError, match=r"trained no adapters.*TM669"):
        export_generator(GeneratorExport(directory, tmp_path / "x", "comfyui", merge=True), CONSOLE)
    with pytest.raises(ConfigError, match=r"'old' \(.*live, ema\).*TM689"):
        export_generator(GeneratorExport(directory, tmp_path / "x", "comfyui", "old"), CONSOLE)
    with pytest.raises(ConfigError, match=r"no checkpoint.*TM671"):
        export_generator(GeneratorExport(tmp_path, tmp_path / "x", "comfyui"), CONSOLE)
    assert not (tmp_path / "x").exists()


def test_unpublished_models_are_refused(tmp_path: Path) -> None:
    toy = make_untrained_run(tmp_path, "grpo-toy-flow", "batch={prompts: 4}", "objective.group_size=4")
    with pytest.raises(ConfigError, match=r"flux.*sdxl.*TM672"):
        export_generator(GeneratorExport(toy.run.directory, tmp_path / "x", "diffusers"), CONSOLE)
