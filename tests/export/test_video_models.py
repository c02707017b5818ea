"""Exports of video models: pipelines for diffusers, and LoRA files with original keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import toys
import transformers
import yaml
from diffusers.loaders import single_file_utils
from rich.console import Console
from safetensors.torch import load_file
from tiers import fast
from tiny_pipelines import CLIP_TOKENS, byte_clip_tokenizer, random_network
from torch import Tensor
from untrained_runs import save_perturbed_run

from tastemaker.config.load import load
from tastemaker.config.registries import MODELS
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import ADAPTABLE_LAYERS, LoraFromFile
from tastemaker.models import hunyuanvideo, ltx, ltx2, mochi, wan, wan_i2v
from tastemaker.models.modelscope import TINY_CONFIGS, ModelscopeSpec
from tastemaker.models.videocrafter import VideocrafterSpec
from tastemaker.search.generation import resolve_source
from tastemaker.training.run import Run
from tastemaker.training.trainer import build_run

CONSOLE = Console(quiet=True)
LORA = "{type: lora, rank: 2, alpha: 6, target_modules: [to_q, to_k, to_v]}"
SETTINGS = [
    "engine={device: cpu, precision: fp32, param_dtype: fp32, activation_memory: keep, compile: false}",
    "batch={prompts: 2}",
    "guidance={scale: 2.0}",
]
RECIPE = """extends: [base, models/{name}, data/colors]
model: {{weights: {weights}, frames: {frames}, height: 32, width: 32}}
process: {{num_steps: 2}}
objective: {{type: reward_gradient}}
rewards: {{color: {{type: color}}}}
steps: 1
"""


def save_pipeline(folder: Path) -> None:
    """Save ModelScope's pipeline with random weights."""
    text_config = transformers.CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS})
    pipeline: Any = diffusers.TextToVideoSDPipeline(  # type: ignore[no-untyped-call]
        vae=random_network(diffusers.AutoencoderKL, TINY_CONFIGS["vae"], 1),
        text_encoder=random_network(transformers.CLIPTextModel, text_config, 2),
        tokenizer=byte_clip_tokenizer(),
        unet=random_network(diffusers.UNet3DConditionModel, TINY_CONFIGS["unet"], 3),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),  # type: ignore[no-untyped-call]
    )
    pipeline.save_pretrained(folder)


def save_run(
    name: str, weights: str, tuning: str, folder: Path, frames: int = 2, settings: Sequence[str] = ()
) -> tuple[Path, Path, Any]:
    """Write a recipe and a run of it with perturbed weights. Returns both and the model."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(name=name, weights=weights, frames=frames), encoding="utf-8")
    config = load(str(recipe), [*SETTINGS, f"tuning={tuning}", f"output_dir={folder}", f"name=run-{name}", *settings])
    run = save_perturbed_run(config)
    return recipe, run.directory, run.policy.model.unguided


def network_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, text_embeds = torch.randn(2, 2, 4, 4, 4, generator=generator), torch.randn(2, 5, 16, generator=generator)
    return x, torch.tensor([20.0, 700.0]), text_embeds


@pytest.mark.parametrize("tuning", fast(["{type: full}", LORA], LORA), ids=["full", "merged"])
def test_diffusers_pipeline_gives_the_same_prediction(tuning: str, tmp_path: Path) -> None:
    save_pipeline(tmp_path / "base")
    _, run, model = save_run("modelscope", str(tmp_path / "base"), tuning, tmp_path)
    options = GeneratorExport(run, tmp_path / "out", "diffusers", dtype=torch.float32, merge=tuning == LORA)
    export_generator(options, CONSOLE)
    pipeline_class: Any = diffusers.TextToVideoSDPipeline
    unet = pipeline_class.from_pretrained(tmp_path / "out").unet
    x, timestep, text_embeds = network_inputs()
    with torch.no_grad():
        actual = unet(x.transpose(1, 2), timestep, text_embeds).sample.transpose(1, 2)
        assert (model.net(x, timestep, text_embeds) - actual).abs().max() < 2e-5


def read_card_code(folder: Path) -> str:
    """The Python code of a model card."""
    code = re.search("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    base = yaml.safe_load((folder / "recipe.yaml").read_text())["model"]["weights"]
    return code[1].replace("path/of/this/folder", str(folder)).replace("path/of/the/base/model", str(base))


def test_card_of_modelscope_adapters_loads_them_in_diffusers(tmp_path: Path) -> None:
    """Also those of convolutions. The pipeline itself loads none."""
    save_pipeline(tmp_path / "base")
    tuning = "{type: lora, rank: 2, alpha: 6, target_modules: all-layers}"
    _, run, model = save_run("modelscope", str(tmp_path / "base"), tuning, tmp_path)
    export_generator(GeneratorExport(run, tmp_path / "out", "diffusers", dtype=torch.float32), CONSOLE)
    names: dict[str, Any] = {}
    exec(read_card_code(tmp_path / "out"), names)
    x, timestep, text_embeds = network_inputs()
    with torch.no_grad():
        actual = names["pipeline"].unet(x.transpose(1, 2), timestep, text_embeds).sample.transpose(1, 2)
        assert (model.net(x, timestep, text_embeds) - actual).abs().max() < 2e-5
    pipeline: Any = diffusers.TextToVideoSDPipeline
    with pytest.raises((AttributeError, ValueError)):
        pipeline.from_pretrained(tmp_path / "base").load_lora_weights(tmp_path / "out")


def test_cards_of_videocrafter_name_loaders_that_work(tmp_path: Path) -> None:
    _, run, _ = save_run("videocrafter2", "tiny", LORA, tmp_path)
    export_generator(GeneratorExport(run, tmp_path / "out", "authors"), CONSOLE)
    merged = GeneratorExport(run, tmp_path / "merged", "authors", dtype=torch.float32, merge=True)
    export_generator(merged, CONSOLE)
    expected = load_file(tmp_path / "merged/merged.safetensors")
    base = VideocrafterSpec().tiny().load(Placement())
    original = VideocrafterSpec.layout.to_original(base.net.state_dict(), base.net.config)
    assert original.keys() == expected.keys()
    layers = {key: SimpleNamespace(weight=x.clone()) for key, x in original.items()}
    model = SimpleNamespace(get_submodule=lambda name: layers[f"{name.removeprefix('model.diffusion_model.')}.weight"])
    exec(read_card_code(tmp_path / "out"), {"model": model})
    changed = [key for key, x in expected.items() if not x.equal(original[key])]
    assert changed and max((layers[key].weight - x).abs().max() for key, x in expected.items()) < 1e-5
    export_generator(GeneratorExport(run, tmp_path / "own", "diffusers", dtype=torch.float32), CONSOLE)
    code = read_card_code(tmp_path / "own").replace('out="videos"', f'out="{tmp_path / "videos"}"')
    names: dict[str, Any] = {}
    exec(code, names)
    assert [video.is_file() for video in names["videos"]] == [True]


# Networks whose sizes are those that diffusers' converters assume where they assume any.
AUTHORS_NAMES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "wan": (diffusers.WanTransformer3DModel, "wan_transformer", wan.TINY_CONFIGS["transformer"]),
    "wan_i2v": (diffusers.WanTransformer3DModel, "wan_transformer", wan_i2v.TINY_NETWORKS["clip"]),
    "ltx": (diffusers.LTXVideoTransformer3DModel, "ltx_transformer_checkpoint", ltx.TINY_CONFIGS["transformer"]),
    "ltx2": (diffusers.LTX2VideoTransformer3DModel, "ltx2_transformer", ltx2.TINY_CONFIGS["transformer"]),
    "mochi": (
        diffusers.MochiTransformer3DModel,
        "mochi_transformer_checkpoint",
        {**mochi.TINY_CONFIGS["transformer"], "num_layers": 48},
    ),
    "hunyuanvideo": (
        diffusers.HunyuanVideoTransformer3DModel,
        "hunyuan_video_transformer",
        {**hunyuanvideo.TINY_CONFIGS["transformer"], "num_single_layers": 0},
    ),
}


@pytest.mark.parametrize("name", AUTHORS_NAMES)
def test_diffusers_reads_the_authors_names_of_video_models_back(name: str) -> None:
    network_class, converter, config = AUTHORS_NAMES[name]
    net = random_network(network_class, config, 0)
    layout = MODELS.find(name, "model")().layout
    original = layout.to_original(net.state_dict(), net.config)
    convert: Any = getattr(single_file_utils, f"convert_{converter}_to_diffusers")
    converted = convert(dict(original))
    assert converted.keys() == net.state_dict().keys()
    assert all(converted[key].equal(x) for key, x in net.state_dict().items())


def test_single_blocks_of_hunyuanvideo_have_the_authors_names() -> None:
    """Their converter assumes the published width, so only names and shapes are compared."""
    with torch.device("meta"):
        config = {**hunyuanvideo.HUNYUANVIDEO.configs["hunyuanvideo-community/HunyuanVideo"]["transformer"]}
        net: Any = diffusers.HunyuanVideoTransformer3DModel(**config)
    original = hunyuanvideo.HunyuanVideoSpec.layout.to_original(net.state_dict(), net.config)
    assert original["single_blocks.0.linear1.weight"].shape == (3 * 3072 + 4 * 3072, 3072)
    converted = single_file_utils.convert_hunyuan_video_transformer_to_diffusers(dict(original))
    assert {key: x.shape for key, x in converted.items()} == {key: x.shape for key, x in net.state_dict().items()}


def test_comfyui_adapters_of_wan_have_the_authors_names(tmp_path: Path) -> None:
    recipe, run, model = save_run("wan", "tiny", LORA, tmp_path, frames=5)
    export_generator(GeneratorExport(run, tmp_path / "out", "comfyui", dtype=torch.float32), CONSOLE)
    tensors = load_file(tmp_path / "out/out.safetensors")
    assert tensors["lora_unet_blocks_0_self_attn_q.lora_down.weight"].shape[0] == 2
    assert {key.partition(".")[2] for key in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
    config, _ = resolve_source(str(recipe), SETTINGS, tmp_path / "out/out.safetensors")
    loaded: Any = config.model.load(Placement())
    config.tuning.apply(loaded, ())
    generator = torch.Generator().manual_seed(0)
    x, text_embeds = torch.randn(2, 16, 2, 4, 4, generator=generator), torch.randn(2, 5, 32, generator=generator)
    with torch.no_grad():
        expected, actual = (net(x, torch.tensor([900.0, 9.0]), text_embeds)[0] for net in (model.net, loaded.net))
    assert (expected - actual).abs().max() < 1e-5
    _, fused, _ = save_run("mochi", "tiny", LORA, tmp_path, frames=7)
    export_generator(GeneratorExport(fused, tmp_path / "fused", "comfyui"), CONSOLE)
    joined = load_file(tmp_path / "fused/fused.safetensors")
    assert joined["lora_unet_blocks_0_attn_qkv_x.lora_down.weight"].shape[0] == 3 * 2


FROM_IMAGE = (f"model.image={toys.IMAGE}",)
# Models of 2026: frames, further settings, and the name in ComfyUI of one adapted layer in each of their files.
RECENT: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "wan-i2v": (5, FROM_IMAGE, ["lora_unet_blocks_0_cross_attn_k_img"]),
    "wan22-i2v": (5, FROM_IMAGE, ["lora_unet_blocks_0_self_attn_q"] * 2),
    "wan22-ti2v": (
        5,
        (*FROM_IMAGE, "model.latent_channels=16", "model.downsample_factor=8"),
        ["lora_unet_blocks_0_self_attn_q"],
    ),
    "ltx2": (9, (), ["lora_unet_transformer_blocks_0_audio_to_video_attn_to_q"]),
    "hunyuanvideo15": (5, (), ["lora_unet_double_blocks_0_txt_attn_qkv"]),
}


@pytest.mark.parametrize("name", fast(RECENT, "wan-i2v"))
def test_adapters_of_recent_models_are_exported(name: str, tmp_path: Path) -> None:
    frames, settings, layers = RECENT[name]
    tuning = "{type: lora, rank: 2, target_modules: default}"
    _, run, _ = save_run(name, "tiny", tuning, tmp_path, frames, settings)
    export_generator(GeneratorExport(run, tmp_path / "out", "diffusers", dtype=torch.float32), CONSOLE)
    adapters = [key for key in load_file(tmp_path / "out/pytorch_lora_weights.safetensors") if "lora_A" in key]
    assert adapters and all(key.startswith("transformer") for key in adapters)
    assert MODELS.find(config_type(name), "model")().layout.pipeline_class in (tmp_path / "out/README.md").read_text()
    comfyui = GeneratorExport(run, tmp_path / "comfyui", "comfyui", dtype=torch.float32)
    export_generator(comfyui, CONSOLE)
    files = sorted((tmp_path / "comfyui").glob("*.safetensors"))
    for file, layer in zip(files, layers, strict=True):
        assert {f"{layer}.{part}" for part in ("lora_down.weight", "lora_up.weight", "alpha")} <= load_file(file).keys()


def config_type(name: str) -> str:
    return "wan_i2v" if name.startswith("wan") else name


@pytest.mark.slow
def test_lora_with_original_names_is_read_back(tmp_path: Path) -> None:
    recipe, run, model = save_run("videocrafter2", "tiny", LORA, tmp_path)
    export_generator(GeneratorExport(run, tmp_path / "exported", "authors"), CONSOLE)
    file = tmp_path / "exported" / "exported.pt"
    tensors = torch.load(file, weights_only=True)
    first = "base_model.model.model.diffusion_model.init_attn.0.transformer_blocks.0.attn1.to_q.lora_A.weight"
    assert first in tensors and all(x.dtype == torch.float32 for x in tensors.values())
    config, _ = resolve_source(str(recipe), SETTINGS, file)
    loaded: Any = config.model.load(Placement())
    weights: Any = config.tuning.apply(loaded, ())
    assert (weights.config.r, weights.config.lora_alpha) == (2, 8)
    x, timestep, text_embeds = network_inputs()
    with torch.no_grad():
        expected, actual = (net(x, timestep, text_embeds, torch.tensor([24, 8])) for net in (model.net, loaded.net))
        assert (expected - actual).abs().max() < 1e-5
    assert repr(config.tuning) == f"LoraFromFile(path={file!r})"  # part of the sample file names


@pytest.mark.parametrize("layout", fast(["authors", "comfyui", "diffusers"], "authors"))
def test_training_continues_from_a_lora_file(layout: Any, tmp_path: Path) -> None:
    recipe, run, model = save_run("videocrafter2", "tiny", LORA, tmp_path)
    export_generator(GeneratorExport(run, tmp_path / "exported", layout, dtype=torch.float32), CONSOLE)
    file = next(path for path in (tmp_path / "exported").iterdir() if path.suffix in (".pt", ".safetensors"))
    overrides = [*SETTINGS, f"output_dir={tmp_path}", "name=continued", "ema_decay=0.9"]
    config = load(
        str(recipe), [*overrides, "tuning={type: lora, rank: 2, alpha: 3, target_modules: [to_q, to_k, to_v]}"]
    )
    continued = build_run(config, tmp_path / "continued", file)
    assert isinstance(continued, Run)
    x, timestep, text_embeds = network_inputs()
    with torch.no_grad():
        expected = model.net(x, timestep, text_embeds, torch.tensor([24, 8]))
        for snapshot in (nullcontext(), continued.policy.weights.use("ema")):
            with snapshot:
                actual = continued.policy.model.net(x, timestep, text_embeds, torch.tensor([24, 8]))
                assert (expected - actual).abs().max() < 1e-4
    other = load(str(recipe), [*overrides, "tuning={type: lora, rank: 4, target_modules: [to_q, to_k, to_v]}"])
    with pytest.raises(ConfigError, match=r"rank 2 .*rank 4 .*tuning\.rank=2.*TM678"):
        build_run(other, tmp_path / "other", file)


@pytest.mark.slow
def test_unnamed_factors_match_all_layers_in_order(tmp_path: Path) -> None:
    """VADER saves adapters of ModelScope as a list; narrow layers have a lower rank."""
    expected, model = (ModelscopeSpec().tiny().load(Placement()) for _ in range(2))
    generator, factors = torch.Generator().manual_seed(0), []
    for module in [each for each in expected.net.modules() if type(each) in ADAPTABLE_LAYERS]:
        weight: Any = module.weight
        rank = min(6, *weight.shape[:2])
        up = 0.1 * torch.randn(len(weight), rank, *[1] * (weight.dim() - 2), generator=generator)
        down = 0.1 * torch.randn(rank, *weight.shape[1:], generator=generator)
        weight.data += (up.flatten(1) @ down.flatten(1)).view_as(weight)
        factors += [up, down]
    torch.save(factors, tmp_path / "1000_unet.pt")
    weights: Any = LoraFromFile(tmp_path / "1000_unet.pt", ModelscopeSpec().layout).apply(model, ())
    assert (weights.config.r, weights.config.lora_alpha) == (6, 6)
    x, timestep, text_embeds = network_inputs()
    with torch.no_grad():
        assert (expected.net(x, timestep, text_embeds) - model.net(x, timestep, text_embeds)).abs().max() < 1e-4
    torch.save(factors[2:], tmp_path / "fewer.pt")
    with pytest.raises(ConfigError, match=r"factors without names.*TM684"):
        LoraFromFile(tmp_path / "fewer.pt").apply(ModelscopeSpec().tiny().load(Placement()), ())


@pytest.mark.slow
def test_original_layout_of_modelscope_lora_is_refused(tmp_path: Path) -> None:
    _, run, _ = save_run("modelscope", "tiny", LORA, tmp_path)
    with pytest.raises(ConfigError, match=r"--layout.*adapters.*TM679"):
        export_generator(GeneratorExport(run, tmp_path / "out", "authors"), CONSOLE)
