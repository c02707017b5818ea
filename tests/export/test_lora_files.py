"""LoRA files of text encoders and of two transformers: exported and read back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiers import fast
from tiny_pipelines import T5_VOCAB_SIZE, byte_t5_tokenizer, random_network
from torch import Tensor
from untrained_runs import save_perturbed_run

from tastemaker.config.build import build, make_tiny
from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import DIFFUSERS_LORA_FILE, LoraFromFile, is_external_lora
from tastemaker.export.weights import export_weights
from tastemaker.models import wan
from tastemaker.models.modelscope import ModelscopeSpec
from tastemaker.search.generation import resolve_source
from tastemaker.training.run import Run
from tastemaker.training.trainer import build_run

CONSOLE = Console(quiet=True)
BOTH = "[backbone,text_encoder]"
SETTINGS = [
    "engine={device: cpu, precision: fp32, param_dtype: fp32, activation_memory: keep, compile: false}",
    "process.num_steps=2",
    "batch={prompts: 1, rollout_batch_size: 1, micro_batch_size: 1}",
    "rewards={bright: {type: brightness}}",
    "guidance=null",
]
LORA = "tuning={type: lora, rank: 2, alpha: 6, modules: %s}"
WAN22 = "model.boundary_ratio=0.5"  # between the two steps


def tiny_config(recipe: str, folder: Path, *settings: str) -> RunConfig:
    return make_tiny(load(recipe, [*SETTINGS, "tuning=null", f"output_dir={folder}", "name=run", *settings]))


@torch.no_grad()
def draw_samples(run: Run) -> Tensor:
    policy = run.policy
    return policy.sample(policy.embed(["a cat", "two dogs"]), Randomness(0, 0, torch.arange(2))).final


def read_back(run: Run, file: Path) -> Tensor:
    """Samples of the recipe with the adapters of a file."""
    config, checkpoint = resolve_source(str(run.directory / "config.yaml"), [], file)
    assert checkpoint is None and isinstance(config.tuning, LoraFromFile)
    return draw_samples(build(config, load_data=False))


@pytest.mark.parametrize("modules", fast([BOTH, "[text_encoder]"], BOTH))
@pytest.mark.parametrize("layout", fast(["diffusers", "comfyui"], "diffusers"))
def test_text_encoder_lora_is_read_back(layout: Any, modules: str, tmp_path: Path) -> None:
    run = save_perturbed_run(tiny_config("vader-videocrafter2-hps", tmp_path, LORA % modules), 0.1)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", layout, dtype=torch.float32), CONSOLE)
    file = next((tmp_path / "out").glob("*.safetensors"))
    expected = draw_samples(run)
    assert is_external_lora(file) and (read_back(run, file) - expected).abs().max() < 1e-5
    if layout == "diffusers":
        assert (
            draw_samples(build(resolve_source(str(tmp_path / "out"), [])[0], load_data=False)) - expected
        ).abs().max() < 1e-5
    with torch.no_grad(), run.policy.weights.use("reference"):
        assert (draw_samples(run) - expected).abs().max() > 1e-3


@pytest.mark.slow
def test_only_text_encoders_with_adapters_are_adapted(tmp_path: Path) -> None:
    run = save_perturbed_run(tiny_config("flowgrpo-sd35", tmp_path, LORA % BOTH, "batch.prompts=2"), 0.1)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), CONSOLE)
    subset = {
        key: x
        for key, x in load_file(tmp_path / "out" / DIFFUSERS_LORA_FILE).items()
        if not key.startswith("text_encoder_3.")
    }
    save_file(subset, tmp_path / "subset.safetensors")
    config, _ = resolve_source(str(run.directory / "config.yaml"), [], tmp_path / "subset.safetensors")
    weights: Any = build(config, load_data=False).policy.weights
    assert set(weights.text_encoders) == {"text_encoder", "text_encoder_2"}


def test_text_encoder_lora_needs_a_text_encoder(tmp_path: Path) -> None:
    save_file({f"text_encoder.x.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=r"'text_encoder\.x'.*TM682"):
        LoraFromFile(tmp_path / "x.safetensors").apply(ModelscopeSpec().tiny().load(Placement()), ())


@pytest.mark.slow
def test_training_continues_from_a_text_encoder_lora(tmp_path: Path) -> None:
    run = save_perturbed_run(tiny_config("vader-videocrafter2-hps", tmp_path, LORA % "[text_encoder]"), 0.1)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), CONSOLE)
    config = tiny_config(
        "vader-videocrafter2-hps", tmp_path, "tuning={type: lora, rank: 2, alpha: 3, modules: [text_encoder]}"
    )
    continued = build_run(config, tmp_path / "continued", tmp_path / "out" / DIFFUSERS_LORA_FILE)
    assert isinstance(continued, Run) and (draw_samples(continued) - draw_samples(run)).abs().max() < 1e-5
    other = tiny_config("vader-videocrafter2-hps", tmp_path, "tuning={type: lora, rank: 2}")
    with pytest.raises(ConfigError, match=r"tuning\.rank.*TM678"):
        build_run(other, tmp_path / "other", tmp_path / "out" / DIFFUSERS_LORA_FILE)


@pytest.mark.slow
def test_original_lora_of_opensora_includes_text_encoders(tmp_path: Path) -> None:
    run = save_perturbed_run(tiny_config("vader-opensora-hps", tmp_path, LORA % BOTH), 0.1)
    with pytest.raises(ConfigError, match=r"give authors.*TM667"):
        export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers"), CONSOLE)
    with pytest.raises(ConfigError, match=r"--layout.*TM080"):
        export_weights(run.directory, tmp_path / "out.safetensors", "", 16, CONSOLE)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "authors"), CONSOLE)
    assert "including those of text_encoder" in (tmp_path / "out/README.md").read_text()
    assert (read_back(run, tmp_path / "out/out.pt") - draw_samples(run)).abs().max() < 1e-5


@pytest.mark.slow
def test_original_lora_of_videocrafter_refuses_text_encoders(tmp_path: Path) -> None:
    run = save_perturbed_run(tiny_config("vader-videocrafter2-hps", tmp_path, LORA % BOTH), 0.1)
    with pytest.raises(ConfigError, match=r"--layout.*text encoders.*TM680"):
        export_generator(GeneratorExport(run.directory, tmp_path / "out", "authors"), CONSOLE)


def save_wan_pipeline(folder: Path) -> None:
    """Save Wan 2.2's pipeline with random weights."""
    pipeline_class: Any = diffusers.WanPipeline
    scheduler_class: Any = diffusers.FlowMatchEulerDiscreteScheduler
    text_config = transformers.UMT5Config(**{**wan.TINY_CONFIGS["text_encoder"], "vocab_size": T5_VOCAB_SIZE})
    first, second = (random_network(diffusers.WanTransformer3DModel, wan.TINY_TRANSFORMER, seed) for seed in (1, 2))
    pipeline_class(
        tokenizer=byte_t5_tokenizer(),
        text_encoder=random_network(transformers.UMT5EncoderModel, text_config, 3),
        vae=random_network(diffusers.AutoencoderKLWan, wan.TINY_CONFIGS["vae"], 4),
        scheduler=scheduler_class(shift=3.0),
        transformer=first,
        transformer_2=second,
        boundary_ratio=0.5,
    ).save_pretrained(folder)


def with_weights(config: RunConfig, folder: Path) -> RunConfig:
    model: Any = config.model
    return replace(config, model=replace(model, weights=str(folder)))


def run_card_snippet(folder: Path) -> Any:
    """Run the Python code of a model card. Returns its pipeline."""
    snippet = re.search("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    names: dict[str, Any] = {}
    base = yaml.safe_load((folder / "recipe.yaml").read_text())["model"]["weights"]
    code = snippet[1].replace("path/of/this/folder", str(folder)).replace("path/of/the/base/model", str(base))
    exec(code, names)
    return names["pipeline"]


def check_equal_outputs(pipeline: Any, net: Any) -> None:
    """Check that each transformer computes what our network does on its side of the boundary."""
    generator = torch.Generator().manual_seed(0)
    x, text_embeds = torch.randn(2, 16, 2, 4, 4, generator=generator), torch.randn(2, 5, 32, generator=generator)
    timestep = torch.tensor([900.0, 100.0])
    with torch.no_grad():
        expected = net(x, timestep, text_embeds)[0]
        for index, transformer in enumerate((pipeline.transformer, pipeline.transformer_2)):
            output = transformer(
                x[index : index + 1], timestep[index : index + 1], text_embeds[index : index + 1]
            ).sample
            assert (output - expected[index : index + 1]).abs().max() < 1e-4


@pytest.mark.slow
def test_lora_of_two_transformers_is_read_back_and_loads_in_diffusers(tmp_path: Path) -> None:
    save_wan_pipeline(tmp_path / "base")
    config = tiny_config("vader-wan-hps", tmp_path, LORA % "[backbone]", WAN22)
    run = save_perturbed_run(with_weights(config, tmp_path / "base"), 0.1)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), CONSOLE)
    assert {key.split(".")[0] for key in load_file(tmp_path / "out" / DIFFUSERS_LORA_FILE)} == {
        "transformer",
        "transformer_2",
    }
    expected = draw_samples(run)
    assert (read_back(run, tmp_path / "out" / DIFFUSERS_LORA_FILE) - expected).abs().max() < 1e-5
    assert (
        draw_samples(build(resolve_source(str(tmp_path / "out"), [])[0], load_data=False)) - expected
    ).abs().max() < 1e-5
    check_equal_outputs(run_card_snippet(tmp_path / "out"), run.policy.model.net)


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [LORA % "[backbone]", "tuning={type: full}"], ids=["merged", "full"])
def test_two_transformers_are_exported_as_a_pipeline(tuning: str, tmp_path: Path) -> None:
    save_wan_pipeline(tmp_path / "base")
    run = save_perturbed_run(
        with_weights(tiny_config("vader-wan-hps", tmp_path, tuning, WAN22), tmp_path / "base"), 0.1
    )
    options = GeneratorExport(
        run.directory, tmp_path / "out", "diffusers", "live", torch.float32, merge="lora" in tuning
    )
    export_generator(options, CONSOLE)
    check_equal_outputs(run_card_snippet(tmp_path / "out"), run.policy.model.net)
    loaded = build(resolve_source(str(tmp_path / "out"), [])[0], load_data=False)
    assert (draw_samples(loaded) - draw_samples(run)).abs().max() < 1e-4
    export_generator(GeneratorExport(run.directory, tmp_path / "x", "comfyui", "live", merge=options.merge), CONSOLE)
    names = sorted(file.name for file in (tmp_path / "x").glob("*.safetensors"))
    assert names == ["x-high.safetensors", "x-low.safetensors"]
    assert "head.modulation" in load_file(tmp_path / "x/x-low.safetensors")
