"""ModelScope text-to-video compared with diffusers' pipeline and with DDPO's recorded steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from diffusers import AutoencoderKL, DDIMScheduler, TextToVideoSDPipeline, UNet3DConditionModel
from safetensors.torch import load_file, save_file
from tiers import fast
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from tastemaker.config.load import load
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Condition, Placement, Segment
from tastemaker.core.weights import FullFinetuning
from tastemaker.models import lvdm_checkpoint, modelscope
from tastemaker.models.modelscope import ModelscopeSpec, VideoUnetBackbone
from tastemaker.models.nets.unet3d import VideoUnet
from tastemaker.models.pipeline_components import parameters_on_meta
from tastemaker.models.videocrafter import VideocrafterSpec
from tastemaker.processes.dynamics import DDIM, ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving

VIDEO = Path(__file__).parent.parent / "fixtures" / "video"
PROMPTS = ("a photo of a dog", "two red cars, oil on canvas", "")
PATH = VariancePreserving("scaled_linear", 0.00085, 0.012, 1000, timestep_spacing="leading", steps_offset=1)
SIDE = 24  # pixels, an odd latent size: the lower of two levels is not half as large
UNET: dict[str, Any] = {
    **modelscope.TINY_CONFIGS["unet"],
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
TEXT = {**modelscope.TINY_CONFIGS["text_encoder"], **tiny_pipelines.CLIP_TOKENS}


def make_pipeline() -> Any:
    """Diffusers' pipeline with random weights."""
    pipeline_class: Any = TextToVideoSDPipeline
    pipeline = pipeline_class(
        unet=tiny_pipelines.random_network(UNet3DConditionModel, UNET),
        vae=tiny_pipelines.random_network(AutoencoderKL, modelscope.TINY_CONFIGS["vae"]),
        text_encoder=tiny_pipelines.random_network(CLIPTextModel, CLIPTextConfig(**TEXT)),
        tokenizer=tiny_pipelines.byte_clip_tokenizer(),
        scheduler=DDIMScheduler(  # type: ignore[no-untyped-call]
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            clip_sample=False,
            set_alpha_to_one=False,
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("modelscope")
    make_pipeline().save_pretrained(path)
    return path


def make_spec(folder: Path) -> ModelscopeSpec:
    return ModelscopeSpec(str(folder), frames=3, height=SIDE, width=SIDE)


@pytest.mark.parametrize("scale", fast([1.0, 9.0], 9.0))
def test_samples_equal_the_diffusers_pipeline(scale: float, folder: Path) -> None:
    model, process = make_spec(folder).load(Placement()), GaussianProcess(PATH, ODE(), 4)
    guided = model if scale == 1 else process.wrap_guidance(model, Guidance(scale))
    policy: Policy[Any] = Policy(guided, process, FullFinetuning().apply(model, ()))
    trajectory = policy.sample(policy.embed(PROMPTS), Randomness(0, 0, torch.arange(len(PROMPTS))))
    options = {"prompt": list(PROMPTS), "latents": trajectory.start.transpose(1, 2), "num_frames": 3}
    options |= {"height": SIDE, "width": SIDE, "num_inference_steps": 4, "guidance_scale": scale}
    pipe = make_pipeline()
    latents, pixels = (pipe(**options, output_type=kind).frames for kind in ("latent", "pt"))
    assert (trajectory.final.transpose(1, 2) - latents).abs().max() < 2e-5 * latents.abs().max()
    decoded = policy.decode(trajectory.final)
    assert (decoded - pixels).abs().max() < 1e-5
    assert (policy.decode(trajectory.final, [2]) - decoded[:, [2]]).abs().max() < 1e-5


class RecordedUnet(nn.Module):
    """A UNet that returns the recorded output and keeps the timesteps of its last call."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.weight, self.output = nn.Parameter(torch.zeros(1)), output
        self.timesteps = torch.zeros(0)

    def forward(self, x: Tensor, timestep: Tensor, text_embeds: Tensor, fps: Tensor | None) -> Tensor:
        assert fps is None
        self.timesteps = timestep
        return self.output


def test_log_probs_equal_ddpo() -> None:
    golden = load_file(VIDEO / "ddpo_ddim_logprob.safetensors")
    model = ModelscopeSpec().tiny().load(Placement())
    model.net = RecordedUnet(golden["eps"])
    policy: Policy[Any] = Policy(model, GaussianProcess(PATH, DDIM(1.0), 25), FullFinetuning().apply(model, ()))
    t, zeros = (golden["t"] + 1) / 1000, torch.zeros(2, 1)
    segment = Segment(t, t - 0.04, golden["x"], golden["next"], zeros, zeros + 1)
    actual = policy.action_distribution(Condition(("", ""), {"prompt_embeds": torch.zeros(2, 1, 1)}), segment).log_prob(
        segment.action
    )
    assert model.net.timesteps.tolist() == golden["t"].tolist()
    torch.testing.assert_close(actual.flatten(), golden["logp_all_dims"], rtol=2e-5, atol=0)


def test_parameter_count_equals_the_published_one() -> None:
    with parameters_on_meta():
        net: Any = VideoUnet(**modelscope.CONFIGS["unet"])
        stock: Any = UNet3DConditionModel()  # type: ignore[no-untyped-call]
    assert sum(p.numel() for p in net.parameters()) == 1_411_233_860
    assert {key: x.shape for key, x in net.state_dict().items()} == {k: x.shape for k, x in stock.state_dict().items()}


@pytest.mark.slow
def test_single_file_replaces_the_unet(folder: Path, tmp_path: Path) -> None:
    net = tiny_pipelines.random_network(UNet3DConditionModel, UNET, seed=1)
    save_file(net.state_dict(), tmp_path / "other.safetensors")
    save_file(lvdm_checkpoint.unet_to_original(net.state_dict(), net.config), tmp_path / "original.safetensors")
    for name in ("other", "original"):
        model = replace(make_spec(folder), unet=str(tmp_path / f"{name}.safetensors")).load(Placement())
        assert all(x.equal(model.net.state_dict()[key]) for key, x in net.state_dict().items())


@pytest.mark.slow
def test_videocrafter_unet_works_with_modelscope_components(folder: Path, tmp_path: Path) -> None:
    net = tiny_pipelines.random_network(VideoUnet, {**UNET, "fps_cond": True})
    net.save_pretrained(tmp_path)
    videocrafter = VideocrafterSpec(str(folder), str(tmp_path), frames=2, height=SIDE, width=SIDE)
    model = videocrafter.load(Placement())
    assert isinstance(model, VideoUnetBackbone) and model.embed(("a",)).tensors["fps"].tolist() == [28]
    assert all(x.equal(model.net.state_dict()[key]) for key, x in net.state_dict().items())
    with pytest.raises(ConfigError, match=r"model\.type.*modelscope.*TM472"):
        replace(videocrafter, unet=None).load(Placement())


def test_videos_of_another_size_are_refused(folder: Path) -> None:
    model = make_spec(folder).load(Placement())
    assert model.encode(torch.rand(2, *model.pixels)).shape == (2, 3, 4, 3, 3)
    with pytest.raises(ConfigError, match=r"2 frames of 24x24.* 3 of 24x24.*TM541"):
        model.encode(torch.rand(1, 2, 3, SIDE, SIDE))
    larger = model.with_size(32, 48)
    assert (larger.shape, larger.pixels) == ((3, 4, 4, 6), (3, 3, 32, 48)) and model.pixels == (3, 3, SIDE, SIDE)
    for settings in ({"frames": 0}, {"height": 250}):
        with pytest.raises(ValueError, match=f"'{next(iter(settings))}'"):
            ModelscopeSpec(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "steps", "scale", "eta", "shape"),
    [("modelscope", 50, 9.0, 0.0, (16, 4, 32, 32)), ("videocrafter2", 50, 12.0, 1.0, (16, 4, 40, 64))],
)
def test_recipes_have_the_published_settings(
    name: str, steps: int, scale: float, eta: float, shape: tuple[int, ...], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    rest = "objective: {type: reward_gradient}\nrewards: {color: {type: color}}\nsteps: 1\n"
    recipe.write_text(f"extends: [base, models/{name}, data/colors]\n{rest}", encoding="utf-8")
    config = load(str(recipe), [])
    process = config.process
    assert isinstance(process, GaussianProcess) and config.guidance is not None
    assert (process.num_steps, process.dynamics, config.guidance.scale) == (steps, DDIM(eta), scale)
    assert config.model.shape == shape
    assert process.path == replace(PATH, final_signal_scale=0.7 if name == "videocrafter2" else 1.0)
