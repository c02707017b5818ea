"""Exports of image models: diffusers computes the same with pipelines and LoRA files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from image_pipelines import make_qwen_edit_pipeline, make_sana_pipeline
from rich.console import Console
from tiers import fast
from tiny_pipelines import (
    CLIP_TOKENS,
    T5_VOCAB_SIZE,
    byte_clip_tokenizer,
    byte_t5_tokenizer,
    make_flux2_pipeline,
    make_z_image_pipeline,
    random_network,
)
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from untrained_runs import save_perturbed_run

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.policy import Backbone
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import DIFFUSERS_LORA_FILE, LoraFromFile
from tastemaker.models import qwen_image, sd3, sd15, sdxl
from tastemaker.training.run_directory import write_run_config
from tastemaker.verification.whole_pipelines import make_qwen_image_21_pipeline

CONSOLE = Console(quiet=True)
PROMPTS = ["a red cat", "two dogs"]
SETTINGS = [
    "engine={device: cpu, precision: fp32, param_dtype: fp32, activation_memory: keep, compile: false}",
    "batch={prompts: 2, rollout_batch_size: null, micro_batch_size: null}",
    "rewards=null",
    "rewards={color: {type: color}}",
    "data={type: prompts, prompts: [a red, a blue]}",
    "ema_decay=0",
    "sample.weights=live",
]


def random_clip(kind: Any, config: dict[str, Any], seed: int) -> Any:
    return random_network(kind, transformers.CLIPTextConfig(**{**config, **CLIP_TOKENS}), seed)


def sd3_pipeline() -> Any:
    configs, clip_class = sd3.TINY_CONFIGS, transformers.CLIPTextModelWithProjection
    return diffusers.StableDiffusion3Pipeline(
        transformer=random_network(diffusers.SD3Transformer2DModel, configs["transformer"], 1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=random_network(diffusers.AutoencoderKL, configs["vae"], 2),
        text_encoder=random_clip(clip_class, configs["text_encoder"], 3),
        tokenizer=byte_clip_tokenizer(),
        text_encoder_2=random_clip(clip_class, configs["text_encoder_2"], 4),
        tokenizer_2=byte_clip_tokenizer(),
        text_encoder_3=random_network(
            transformers.T5EncoderModel,
            transformers.T5Config(**{**configs["text_encoder_3"], "vocab_size": T5_VOCAB_SIZE}), 5,
        ),
        tokenizer_3=byte_t5_tokenizer(),
    )  # fmt: skip


def qwen_pipeline() -> Any:
    configs = qwen_image.TINY_CONFIGS
    special_tokens = {"vocab_size": 300, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    text_config = {**configs["text_encoder"]["text_config"], **special_tokens}
    config = transformers.Qwen2_5_VLConfig(**{**configs["text_encoder"], "text_config": text_config})
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=random_network(diffusers.AutoencoderKLQwenImage, configs["vae"], 1),
        text_encoder=random_network(transformers.Qwen2_5_VLForConditionalGeneration, config, 2),
        tokenizer=transformers.Qwen2Tokenizer(vocab=letters, merges=[]),
        transformer=random_network(diffusers.QwenImageTransformer2DModel, configs["transformer"], 3),
    )


def sd15_pipeline() -> Any:
    return diffusers.StableDiffusionPipeline(
        random_network(diffusers.AutoencoderKL, sd15.TINY_CONFIGS["vae"], 1),
        random_clip(transformers.CLIPTextModel, sd15.TINY_CONFIGS["text_encoder"], 2),
        byte_clip_tokenizer(),
        random_network(diffusers.UNet2DConditionModel, sd15.TINY_CONFIGS["unet"], 3),
        diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        None, None, requires_safety_checker=False,
    )  # fmt: skip


def sdxl_pipeline() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        random_network(diffusers.AutoencoderKL, sdxl.TINY_CONFIGS["vae"], 1),
        random_clip(transformers.CLIPTextModel, sdxl.TINY_CONFIGS["text_encoder"], 2),
        random_clip(transformers.CLIPTextModelWithProjection, sdxl.TINY_CONFIGS["text_encoder_2"], 3),
        byte_clip_tokenizer(),
        byte_clip_tokenizer(),
        random_network(diffusers.UNet2DConditionModel, sdxl.TINY_CONFIGS["unet"], 4),
        diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
    )


@dataclass(frozen=True)
class Family:
    pipeline: Callable[[], Any]
    recipe: str
    model_settings: str = ""  # further settings of the model


FAMILIES = {
    "sd3": Family(sd3_pipeline, "flowgrpo-sd35", ", max_text_tokens: 24"),
    "qwen_image": Family(qwen_pipeline, "flowgrpo-sd35", ", max_text_tokens: 280"),
    "z_image": Family(lambda: make_z_image_pipeline(6.0), "flowgrpo-sd35", ", max_text_tokens: 24"),
    "flux2": Family(lambda: make_flux2_pipeline(dev=False), "flowgrpo-sd35", ", max_text_tokens: 24"),
    "sd15": Family(sd15_pipeline, "draft-sd15"),
    "sdxl": Family(sdxl_pipeline, "refl-sdxl"),
}


# Models whose networks have other names in ComfyUI, or none.
ADAPTED = {
    **FAMILIES,
    "qwen_image_edit": Family(make_qwen_edit_pipeline, "flowgrpo-sd35", ", max_text_tokens: 1000"),
    "qwen_image_21": Family(make_qwen_image_21_pipeline, "flowgrpo-sd35", ", max_text_tokens: 280"),
    "sana": Family(partial(make_sana_pipeline, sprint=False), "flowgrpo-sd35", ", max_text_tokens: 24"),
    "sana_sprint": Family(partial(make_sana_pipeline, sprint=True), "grpo-sana-sprint", ", max_text_tokens: 24"),
}


def save_run(family: Family, kind: str, tuning: str, folder: Path) -> tuple[Path, Backbone]:
    """Save a run on the pipeline's weights with perturbed weights. Returns its directory and model."""
    family.pipeline().save_pretrained(folder / "base")
    model = f"{{type: {kind}, weights: {folder / 'base'}, height: 64, width: 64{family.model_settings}}}"
    overrides = ["model=null", f"model={model}", "tuning=null", f"tuning={tuning}", f"output_dir={folder}", "name=run"]
    config = load(family.recipe, [*SETTINGS, *overrides])
    run = save_perturbed_run(config)
    return run.directory, run.policy.model.unguided


@torch.no_grad()
def predict(model: Backbone) -> Tensor:
    x, t = Randomness(0, 0, torch.arange(2)).normal("x", *model.shape), torch.tensor([0.3, 0.8])
    return model.predict(x, t, model.embed(PROMPTS))


def wrap_network(family: Family, kind: str, folder: Path, net: Any) -> Backbone:
    """Return our backbone with the network of a pipeline."""
    model = f"{{type: {kind}, weights: {folder / 'base'}, height: 64, width: 64{family.model_settings}}}"
    spec = load(family.recipe, [*SETTINGS, "model=null", f"model={model}"]).model
    backbone = spec.load(Placement())
    backbone.net = net
    return backbone


@pytest.mark.parametrize("kind", fast(FAMILIES, "sd15"))
def test_pipeline_loads_the_exported_network(kind: str, tmp_path: Path) -> None:
    directory, model = save_run(FAMILIES[kind], kind, "{type: full}", tmp_path)
    export_generator(GeneratorExport(directory, tmp_path / "out", "diffusers", "live", torch.float32), CONSOLE)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    component = "unet" if "unet" in pipeline.components else "transformer"
    net = pipeline.components[component]
    assert type(pipeline).__name__ == type(FAMILIES[kind].pipeline()).__name__
    assert all(x.equal(model.net.state_dict()[key]) for key, x in net.state_dict().items())
    assert predict(wrap_network(FAMILIES[kind], kind, tmp_path, net)).equal(predict(model))
    export_generator(GeneratorExport(directory, tmp_path / "single", "comfyui", "live", torch.float32), CONSOLE)
    settings = f"type: {kind}, weights: {tmp_path / 'base'}, {component}: {tmp_path / 'single/single.safetensors'}"
    overrides = ["model=null", f"model={{{settings}, height: 32, width: 32}}"]
    spec = load(FAMILIES[kind].recipe, [*SETTINGS, *overrides]).model
    loaded = spec.load(Placement()).net.state_dict()  # reads the original keys
    assert all(x.equal(model.net.state_dict()[key]) for key, x in loaded.items())


@pytest.mark.parametrize("kind", fast(ADAPTED, "sd3"))
def test_diffusers_lora_gives_the_same_prediction(kind: str, tmp_path: Path) -> None:
    directory, model = save_run(ADAPTED[kind], kind, "{type: lora, rank: 4, alpha: 12}", tmp_path)
    export_generator(GeneratorExport(directory, tmp_path / "out", "diffusers", "live", torch.float32), CONSOLE)
    assert (tmp_path / "out" / DIFFUSERS_LORA_FILE).is_file() and not (tmp_path / "out/model_index.json").exists()
    pipeline = ADAPTED[kind].pipeline()
    net = pipeline.unet if "unet" in pipeline.components else pipeline.transformer
    before = predict(wrap_network(ADAPTED[kind], kind, tmp_path, net))
    pipeline.load_lora_weights(tmp_path / "out")
    after = predict(wrap_network(ADAPTED[kind], kind, tmp_path, net))
    torch.testing.assert_close(after, predict(model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(after, before, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_diffusers_text_encoder_lora_gives_the_same_embeddings(kind: str, tmp_path: Path) -> None:
    tuning = "{type: lora, rank: 4, alpha: 12, modules: [backbone, text_encoder]}"
    directory, _ = save_run(FAMILIES[kind], kind, tuning, tmp_path)
    export_generator(GeneratorExport(directory, tmp_path / "out", "diffusers", "live", torch.float32), CONSOLE)
    pipeline, ids = FAMILIES[kind].pipeline(), torch.tensor([[5, 6, 7, 0]])
    model = wrap_network(FAMILIES[kind], kind, tmp_path, pipeline.unet)
    weights: Any = LoraFromFile(tmp_path / "out" / DIFFUSERS_LORA_FILE).apply(model, ())
    assert set(weights.text_encoders) == {name for name in pipeline.components if name.startswith("text_encoder")}
    pipeline = FAMILIES[kind].pipeline()
    with torch.no_grad():
        before = {name: pipeline.components[name](ids)[0] for name in weights.text_encoders}
        pipeline.load_lora_weights(tmp_path / "out")
        for name, encoder in weights.text_encoders.items():
            after = pipeline.components[name](ids)[0]
            torch.testing.assert_close(after, encoder(ids)[0], atol=1e-4, rtol=1e-4)
            assert not torch.allclose(after, before[name], atol=1e-2)


def test_pipeline_export_of_tiny_weights_is_refused(tmp_path: Path) -> None:
    config = load(
        "draft-sd15", [*SETTINGS, f"output_dir={tmp_path}", "name=run", "model.weights=tiny", "tuning={type: full}"]
    )
    run = build(config)
    run.save(1)
    write_run_config(config, run.directory)
    with pytest.raises(ConfigError, match=r"add --network-only.*TM670"):
        export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers"), CONSOLE)
