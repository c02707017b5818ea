"""Stable Diffusion 1.5 and XL compared with diffusers' pipelines, and the checkpoint files they are read from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import save_file
from stable_diffusion_toys import PROMPTS, SPECS, make_rng
from tiers import fast
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models import sd15, sdxl
from tastemaker.models.image_backbone import unet_timestep
from tastemaker.models.pretrained import WeightsSource
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.processes.dynamics import DDIM, ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving

SIZE = 24  # pixels
SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def make_scheduler(**settings: Any) -> DDIMScheduler:
    return DDIMScheduler(**SCHEDULE, clip_sample=False, set_alpha_to_one=False, **settings)


def make_pipeline(name: str, **settings: Any) -> Any:
    """Diffusers' pipeline with random weights."""
    configs = {"sd15": sd15.TINY_CONFIGS, "sdxl": sdxl.TINY_CONFIGS}[name]
    components: dict[str, Any] = {
        "unet": tiny_pipelines.random_network(UNet2DConditionModel, configs["unet"]),
        "vae": tiny_pipelines.random_network(AutoencoderKL, configs["vae"]),
        "text_encoder": tiny_pipelines.random_network(CLIPTextModel, CLIPTextConfig(**configs["text_encoder"])),
        "tokenizer": tiny_pipelines.byte_clip_tokenizer(),
        "scheduler": make_scheduler(**settings),
    }
    if name == "sd15":
        pipeline: Any = StableDiffusionPipeline(
            **components, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    else:
        second = CLIPTextConfig(**configs["text_encoder_2"])
        pipeline = StableDiffusionXLPipeline(
            **components,
            text_encoder_2=tiny_pipelines.random_network(CLIPTextModelWithProjection, second),
            tokenizer_2=tiny_pipelines.byte_clip_tokenizer(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in SPECS}
    for name, path in paths.items():
        make_pipeline(name).save_pretrained(path)
    return paths


def load_policy(name: str, folders: dict[str, Path], process: GaussianProcess, scale: float = 1.0) -> Policy[Any]:
    model = replace(SPECS[name], weights=str(folders[name]), height=SIZE, width=SIZE).load(Placement())
    weights = FullFinetuning().apply(model, ())
    return Policy(model if scale == 1 else process.wrap_guidance(model, Guidance(scale)), process, weights)


def sample_pipeline(pipe: Any, prompts: tuple[str, ...], start: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Latents and pixels that a pipeline samples from this noise."""
    options = {"prompt": list(prompts), "latents": start[:, 0], "height": SIZE, "width": SIZE, **settings}
    return tuple(pipe(**options, output_type=kind).images for kind in ("latent", "pt"))  # type: ignore[return-value]


@pytest.mark.parametrize("steps", fast([5, 7], 7))
@pytest.mark.parametrize("scale", fast([1.0, 5.0], 5.0))
@pytest.mark.parametrize("prediction", fast(["epsilon", "v_prediction"], "epsilon"))
@pytest.mark.parametrize("name", SPECS)
def test_samples_equal_the_diffusers_pipeline(
    name: str, prediction: Any, scale: float, steps: int, folders: dict[str, Path]
) -> None:
    prompts = PROMPTS if name == "sd15" else tuple(prompt for prompt in PROMPTS if prompt)  # "" has a separate test
    process = GaussianProcess(VariancePreserving(prediction_type=prediction), ODE(), steps)
    policy = load_policy(name, folders, process, scale)
    trajectory = policy.sample(policy.embed(prompts), make_rng(len(prompts)))
    pipe = make_pipeline(name, prediction_type="epsilon" if prediction == "epsilon" else "v_prediction")
    latents, pixels = sample_pipeline(pipe, prompts, trajectory.start, num_inference_steps=steps, guidance_scale=scale)
    assert (trajectory.final[:, 0] - latents).abs().max() < 2e-5 * latents.abs().max()
    assert (policy.decode(trajectory.final)[:, 0] - pixels).abs().max() < 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_stochastic_ddim_equals_the_diffusers_scheduler(name: str, folders: dict[str, Path]) -> None:
    process = GaussianProcess(VariancePreserving(), DDIM(1.0), 5)
    policy = load_policy(name, folders, process, 5.0)
    trajectory = policy.sample(policy.embed(PROMPTS), make_rng())
    scheduler = make_scheduler()
    scheduler.set_timesteps(5)
    assert len(trajectory.segments) == 5
    for segment, timestep in zip(trajectory.segments, scheduler.timesteps, strict=True):
        distribution = policy.process.action_distribution(policy.model, trajectory.cond, segment)
        assert unet_timestep(segment.t).eq(timestep).all()
        noise = (segment.action - distribution.mean) / distribution.std.view(-1, 1, 1, 1, 1)
        with torch.no_grad():
            output = policy.model.predict(segment.state, segment.t, trajectory.cond)
        stepped = scheduler.step(output, int(timestep), segment.state, eta=1.0, variance_noise=noise).prev_sample
        assert (stepped - segment.action).abs().max() < 1e-5 * segment.action.abs().max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_set_alpha_to_one_equals_sdxls_sampler(folders: dict[str, Path]) -> None:
    policy = load_policy("sdxl", folders, GaussianProcess(VariancePreserving(set_alpha_to_one=True), ODE(), 6), 5.0)
    trajectory = policy.sample(policy.embed(PROMPTS[:2]), make_rng(2))
    pipe = make_pipeline("sdxl")
    pipe.scheduler = EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="leading")
    latents, _ = sample_pipeline(pipe, PROMPTS[:2], trajectory.start, num_inference_steps=6, guidance_scale=5.0)
    assert (trajectory.final[:, 0] - latents).abs().max() < 1e-4 * latents.abs().max()


def test_sdxl_empty_prompt_is_zeros_or_encoded(folders: dict[str, Path]) -> None:
    pipe = make_pipeline("sdxl")
    spec = replace(SdxlSpec(), weights=str(folders["sdxl"]))
    for empty, negative in (("zeros", None), ("encoded", "")):
        values = pipe.encode_prompt("an owl", negative_prompt=negative)
        actual = replace(spec, empty_prompt=empty).load(Placement()).embed(["an owl", ""]).tensors  # type: ignore[arg-type]
        assert torch.allclose(actual["prompt_embeds"], torch.cat(values[:2]), atol=1e-6)
        assert torch.allclose(actual["pooled_prompt_embeds"], torch.cat(values[2:]), atol=1e-6)


def original_state_dict(net: UNet2DConditionModel) -> dict[str, Tensor]:
    """The tensors of the small network under their original keys."""
    blocks = {
        "conv_in": "input_blocks.0.0",
        "down_blocks.0.resnets.0": "input_blocks.1.0",
        "down_blocks.0.attentions.0": "input_blocks.1.1",
        "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
        "down_blocks.1.resnets.0": "input_blocks.3.0",
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
        "up_blocks.0.resnets.0": "output_blocks.0.0",
        "up_blocks.0.resnets.1": "output_blocks.1.0",
        "up_blocks.0.upsamplers.0.conv": "output_blocks.1.1.conv",
        "up_blocks.1.resnets.0": "output_blocks.2.0",
        "up_blocks.1.attentions.0": "output_blocks.2.1",
        "up_blocks.1.resnets.1": "output_blocks.3.0",
        "up_blocks.1.attentions.1": "output_blocks.3.1",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
    inner = {
        ".norm1": ".in_layers.0",
        ".conv1": ".in_layers.2",
        ".time_emb_proj": ".emb_layers.1",
        ".norm2": ".out_layers.0",
        ".conv2": ".out_layers.3",
        ".conv_shortcut": ".skip_connection",
    }
    renamed = {}
    for key, x in net.state_dict().items():
        start = next(native for native in blocks if key.startswith(native + "."))
        rest = key.removeprefix(start)
        for native, original in inner.items() if ".resnets." in start else ():
            rest = rest.replace(native + ".", original + ".")
        renamed[blocks[start] + rest] = x.clone()
    return renamed


@pytest.mark.parametrize("layout", fast(["diffusers", "original", "complete"], "original"))
@pytest.mark.parametrize("name", SPECS)
def test_single_file_replaces_the_unet(name: str, layout: str, folders: dict[str, Path], tmp_path: Path) -> None:
    spec = replace(SPECS[name], weights=str(folders[name]))
    other: Any = replace(SPECS[name].tiny(), seed=5).load(Placement()).net
    tensors = {
        "diffusers": lambda: other.state_dict(),
        "original": lambda: original_state_dict(other),
        "complete": lambda: {
            "first_stage_model.quant_conv.bias": torch.zeros(8),
            **{f"model.diffusion_model.{key}": x for key, x in original_state_dict(other).items()},
        },
    }[layout]()
    save_file(tensors, tmp_path / "net.safetensors")
    loaded = replace(spec, unet=str(tmp_path / "net.safetensors")).load(Placement()).net.state_dict()
    assert loaded.keys() == other.state_dict().keys()
    assert all(x.equal(loaded[key]) for key, x in other.state_dict().items())


@pytest.mark.parametrize(
    ("t", "expected"), [(1.0, 999), (0.982, 981), (0.002, 1), (0.001, 0), (0.0, 0), (0.5005, 499.5)]
)
def test_unet_timestep_maps_times_to_training_timesteps(t: float, expected: float) -> None:
    assert unet_timestep(torch.tensor([t])).item() == pytest.approx(expected, abs=1e-3)


def test_invalid_settings_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'width'.*8192.*500.*TM432"):
        Sd15Spec(width=500)
    with pytest.raises(ConfigError, match=r"model\.type.*sdxl.*TM521"):
        Sd15Spec(str(folders["sdxl"])).load(Placement())
    with pytest.raises(ConfigError, match=r"model\.type.*sd15.*TM521"):
        SdxlSpec(str(folders["sd15"])).load(Placement())
    with pytest.raises(ConfigError, match=r"diffusers' layout.*TM499"):
        Sd15Spec(str(tmp_path)).load(Placement())
    assert Sd15Spec("no/such").sources == (WeightsSource("no/such"),) and Sd15Spec().tiny().sources == ()
    with pytest.raises(ConfigError, match=r"`tastemaker download no/such`.*TM505"):
        Sd15Spec("no/such").load(Placement())
    with pytest.raises(ConfigError, match=r"32x24.*32x32.*data\.image_size.*TM433"):
        Sd15Spec().tiny().load(Placement()).encode(torch.rand(1, 1, 3, 24, 32))
    model = Sd15Spec().tiny().load(Placement())
    save_file(model.net.state_dict(), tmp_path / "sd15.safetensors")
    with pytest.raises(ConfigError, match=r"this unet.*TM503"):
        SdxlSpec(str(folders["sdxl"]), unet=str(tmp_path / "sd15.safetensors")).load(Placement())
    save_file(original_state_dict(model.net), tmp_path / "original.safetensors")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lacks 'label_emb.*TM523"):
        SdxlSpec(str(folders["sdxl"]), unet=str(tmp_path / "original.safetensors")).load(Placement())
