"""Exports of SD 1.5: diffusers' pipeline and ComfyUI's file contain the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.loaders import single_file_utils
from rich.console import Console
from safetensors.torch import load_file
from tiny_pipelines import CLIP_TOKENS, byte_clip_tokenizer, random_network, sample_latents
from transformers import CLIPTextConfig, CLIPTextModel
from untrained_runs import PROMPTS, UntrainedRun, make_untrained_run

from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.models import sd15
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving

CONSOLE = Console(quiet=True)
LAYOUTS: tuple[Literal["diffusers", "comfyui"], ...] = ("diffusers", "comfyui")


@pytest.fixture(scope="module")
def sd15_run(tmp_path_factory: pytest.TempPathFactory) -> UntrainedRun:
    pipeline = diffusers.StableDiffusionPipeline(
        random_network(AutoencoderKL, sd15.TINY_CONFIGS["vae"], 1),
        random_network(CLIPTextModel, CLIPTextConfig(**{**sd15.TINY_CONFIGS["text_encoder"], **CLIP_TOKENS}), 2),
        byte_clip_tokenizer(),
        random_network(diffusers.UNet2DConditionModel, sd15.TINY_CONFIGS["unet"], 3),
        diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        None, None, requires_safety_checker=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("sd15")
    pipeline.save_pretrained(folder)
    model = f"model={{type: sd15, weights: {folder}, height: 32, width: 32}}"
    return make_untrained_run(tmp_path_factory.mktemp("run"), "draft-sd15", model, "guidance.scale=1")


@pytest.mark.slow
def test_diffusers_and_comfyui_exports_are_equal(sd15_run: UntrainedRun, tmp_path: Path) -> None:
    merge = "lora" in type(sd15_run.run.policy.weights).__name__.lower()
    for layout in LAYOUTS:
        directory = sd15_run.run.directory
        export_generator(
            GeneratorExport(directory, tmp_path / layout, layout, "live", torch.float32, merge=merge), CONSOLE
        )
    pipeline: Any = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "diffusers")
    unet = pipeline.unet.state_dict()
    tensors = {f"model.diffusion_model.{k}": x for k, x in load_file(tmp_path / "comfyui/comfyui.safetensors").items()}
    convert: Any = single_file_utils.convert_ldm_unet_checkpoint
    converted = convert(tensors, dict(pipeline.unet.config))
    assert set(converted) == set(unet) and all(x.equal(unet[key]) for key, x in converted.items())
    assert not (tmp_path / "comfyui/workflow.json").exists()
    model = Sd15Spec(str(tmp_path / "diffusers"), height=32, width=32).load(Placement())
    process = GaussianProcess(VariancePreserving(), num_steps=3)
    latents = sample_latents(model, process, PROMPTS, sd15_run.noise())
    torch.testing.assert_close(model.decode(latents)[:, 0], sd15_run.pixels(process), atol=1e-4, rtol=0)
