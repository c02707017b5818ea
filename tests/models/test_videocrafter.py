"""VideoCrafter2 compared with outputs of its authors' code and of VADER for the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel
from videocrafter_toys import FIXTURES, build_unet, read_fixture

from tastemaker.core.lora import LoraWeights
from tastemaker.core.objective import Context, NoState, SingleProcess
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Reward, RewardCard, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Condition, Metadata, Placement, PromptBatch, Prompts
from tastemaker.core.weights import FullFinetuning
from tastemaker.export.lora import LoraFromFile, write_original_lora
from tastemaker.models import lvdm_checkpoint
from tastemaker.models.image_backbone import FrozenVae
from tastemaker.models.modelscope import CONFIGS, VideoUnetBackbone
from tastemaker.models.nets.unet3d import VideoUnet
from tastemaker.models.pipeline_components import parameters_on_meta
from tastemaker.models.videocrafter import VIDEOCRAFTER, VideocrafterSpec
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.processes.dynamics import DDIM, DenoisingStep
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving

PATH = VariancePreserving(
    "scaled_linear", 0.00085, 0.012, 1000, timestep_spacing="leading", steps_offset=1, final_signal_scale=0.7
)
SPEC = VideocrafterSpec(frames=4, height=64, width=64)


@dataclass
class RecordedTextEncoder:
    """A text encoder that returns recorded embeddings."""

    embeddings: dict[str, Tensor]  # [1, length, width] each

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        return {"prompt_embeds": torch.cat([self.embeddings[prompt] for prompt in prompts])}


def pack_channels(latents: Tensor) -> Tensor:
    """Reshape four latent channels to three pixel channels, padded with zeros: [..., 4, 8, 8] to [..., 3, 16, 8]."""
    return nn.functional.pad(latents, (0, 0, 0, 0, 0, 2)).reshape(*latents.shape[:-3], 3, 16, 8)


class LatentPixels:
    """An autoencoder whose pixels are its latents."""

    def decode(self, latents: Tensor) -> Tensor:
        return pack_channels(latents)


def make_backbone(embeddings: dict[str, Tensor], fps: int) -> VideoUnetBackbone:
    autoencoder: Any = LatentPixels()
    text_encoder: Any = RecordedTextEncoder(embeddings)
    model = VideoUnetBackbone(build_unet(), autoencoder, text_encoder, SPEC, fps)
    model.pixels = (4, 3, 16, 8)  # the shape that LatentPixels decodes to
    return model


@dataclass(frozen=True)
class RecordedNoise(Randomness):
    """The noise that was drawn when the sampler was recorded."""

    start: Tensor = torch.empty(0)  # [1, 4, F, h, w]
    noises: Tensor = torch.empty(0)  # [steps, 1, 4, F, h, w]

    def normal(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        assert purpose in ("start", "step")
        return (self.start if purpose == "start" else self.noises[draw]).transpose(1, 2)


@dataclass(frozen=True)
class WeightedMeanReward(RewardSpec, Reward):
    """The reward of the recordings: the weighted mean of latents."""

    weights: Tensor  # [1, F, 4, h, w]
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Literal["image", "video"]] = "video"
    runs_on: ClassVar[Literal["device", "host", "remote"]] = "device"
    batch_size: ClassVar[int] = 8

    def load(self, placement: Placement) -> WeightedMeanReward:
        return self

    def tiny(self) -> WeightedMeanReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return (pixels * pack_channels(self.weights)).flatten(1).sum(1) / self.weights.numel()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Check that the norm of the difference is within a share of the expected norm."""
    difference = float((actual.detach() - expected).norm() / expected.norm())
    assert difference <= tolerance, difference


@pytest.mark.slow
def test_every_published_key_is_mapped() -> None:
    with parameters_on_meta():
        net: Any = VideoUnet(**VIDEOCRAFTER.configs[VideocrafterSpec.weights]["unet"])
        vae: Any = AutoencoderKL(**CONFIGS["vae"])
        text_encoder: Any = CLIPTextModel(CLIPTextConfig(**CONFIGS["text_encoder"]))
    original = lvdm_checkpoint.unet_to_original(net.state_dict(), net.config)
    assert {key: list(x.shape) for key, x in original.items()} == read_fixture("lvdm_unet_full_keys.json")
    assert sum(x.numel() for x in original.values()) == 1_413_284_420
    keymap = {
        our_key: name for name, our_key in lvdm_checkpoint.original_names(list(net.state_dict()), net.config).items()
    }
    assert {key: keymap[key] for key in keymap if not key.startswith("fps_")} == read_fixture(
        "lvdm_to_diffusers_unet3d_keymap.json"
    )
    shapes = read_fixture("lvdm_vae_full_keys.json")
    empty = {
        key.removeprefix(lvdm_checkpoint.VAE_PREFIX): torch.empty(shape, device="meta") for key, shape in shapes.items()
    }
    actual = {key: x.shape for key, x in lvdm_checkpoint.vae_to_diffusers(empty, vae.config).items()}
    assert actual == {key: x.shape for key, x in vae.state_dict().items()}
    # The parameters of open_clip's encoder without the last layer and projection.
    assert sum(p.numel() for p in text_encoder.parameters()) == 340_387_840


def test_unet_output_equals_published_one() -> None:
    golden = load_file(FIXTURES / "lvdm_unet_tiny_io.safetensors")
    model = make_backbone({f"row {i}": golden["context"][i : i + 1] for i in range(2)}, fps=24)
    policy = Policy(model, GaussianProcess(PATH, DDIM(1.0), 25), FullFinetuning().apply(model, ()))
    cond = policy.embed(("row 0", "row 1"), [{"fps": int(fps)} for fps in golden["fps"]])
    x = golden["x"].transpose(1, 2).clone().requires_grad_(True)
    output = policy.model.predict(x, (golden["timesteps"] + 1) / 1000, cond)
    assert (output.transpose(1, 2) - golden["y"]).abs().max() <= 4e-6
    assert_close(output.transpose(1, 2), golden["y"], 1e-5)
    output.backward(golden["grad_y"].transpose(1, 2))
    assert x.grad is not None
    assert_close(x.grad.transpose(1, 2), golden["grad_x"], 1e-5)
    names = lvdm_checkpoint.original_names(list(model.net.state_dict()), model.net.config)
    weights = dict(model.net.named_parameters())
    recorded = {key.removeprefix("grad."): x for key, x in golden.items() if key.startswith("grad.")}
    assert len(recorded) == 7
    for key, expected in recorded.items():
        assert_close(weights[names[key]].grad, expected, 6e-6)  # type: ignore[arg-type]


def test_fps_of_the_prompt_metadata_takes_precedence() -> None:
    golden = load_file(FIXTURES / "lvdm_unet_tiny_io.safetensors")
    model = make_backbone({f"row {i}": golden["context"][i : i + 1] for i in range(2)}, fps=16)
    cond = model.embed(("row 0", "row 1"))
    assert cond.tensors["fps"].tolist() == [16, 16]
    with torch.no_grad():
        output = model.predict(golden["x"].transpose(1, 2), (golden["timesteps"] + 1) / 1000, cond)
    assert_close(output.transpose(1, 2), golden["y_fps16_int"], 1e-5)
    for fps in (0, 2.5, "24"):
        with pytest.raises(ConfigError, match=r"1 to 1000.*TM470"):
            model.embed(("row 0",), [{"fps": fps}])
    with pytest.raises(ValueError, match=r"'fps'.*0.*TM470"):
        VideocrafterSpec(fps=0)


def make_lora_policy(tmp_path: Path) -> tuple[Policy[GaussianProcess], dict[str, Tensor], Path]:
    """The recorded policy with guidance and with adapters from a file in VADER's layout."""
    golden = load_file(FIXTURES / "vader_ddim_lora_tiny.safetensors")
    file = tmp_path / "vader.pt"
    torch.save({key.removeprefix("lora."): x for key, x in golden.items() if key.startswith("lora.")}, file)
    model = make_backbone({"prompt": golden["context"], "": golden["uncond_context"]}, fps=int(golden["fps"]))
    weights = LoraFromFile(file, VideocrafterSpec.layout).apply(model, ())
    process = GaussianProcess(PATH, DDIM(1.0), 5)
    return Policy(process.wrap_guidance(model, Guidance(12.0)), process, weights), golden, file


def recorded_noise(golden: Mapping[str, Tensor]) -> RecordedNoise:
    return RecordedNoise(0, 0, torch.arange(1), start=golden["x_T"], noises=golden["noises"])


def test_samples_equal_vader(tmp_path: Path) -> None:
    policy, golden, _ = make_lora_policy(tmp_path)
    timesteps = PATH.timesteps(5)
    assert (timesteps[:-1].flip(0) * 1000 - 1).round().long().tolist() == golden["ddim_timesteps"].tolist()
    trajectory = policy.sample(policy.embed(("prompt",)), recorded_noise(golden))
    assert len(trajectory.segments) == 5  # the last step is stochastic, too
    assert_close(trajectory.final.transpose(1, 2), golden["samples"], 4e-6)
    for segment in trajectory.segments:
        assert torch.equal(
            policy.action_distribution(trajectory.cond, segment).log_prob(segment.action), segment.log_prob
        )


def test_noise_schedule_equals_vader() -> None:
    golden = load_file(FIXTURES / "vader_ddim_lora_tiny.safetensors")
    timesteps = PATH.timesteps(5)
    t, s = timesteps[:-1].flip(0), timesteps[1:].flip(0)
    alphas = golden["ddim_alphas"]
    torch.testing.assert_close(PATH.alpha(t), alphas.sqrt() * golden["ddim_scale_arr"], rtol=1e-6, atol=0)
    torch.testing.assert_close(PATH.sigma(t), (1 - alphas).sqrt(), rtol=1e-5, atol=0)
    previous_alpha = (golden["ddim_alphas_prev"].sqrt() * golden["ddim_scale_arr_prev"]).float()
    torch.testing.assert_close(PATH.alpha(s), previous_alpha, rtol=1e-6, atol=0)
    zeros = torch.zeros(5, 1)
    step = DDIM(1.0).step(PATH, DenoisingStep(zeros, zeros, t, s, 0.0))
    torch.testing.assert_close(step.std, golden["ddim_sigmas"].float(), rtol=1e-5, atol=0)
    for settings in (
        {"final_signal_scale": 0.0},
        {"final_signal_scale": 1.1},
        {"final_signal_scale": 0.7, "prediction_type": "v_prediction"},
    ):
        with pytest.raises(ValueError, match=r"final_signal_scale.*TM338"):
            VariancePreserving(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        pytest.param(RewardGradient(), "last", marks=pytest.mark.slow),
        pytest.param(RewardGradient(gradient_mode="from_step", from_step=3), "rand_cut3", marks=pytest.mark.slow),
        (RewardGradient(gradient_mode="from_step", from_step=0), "rand_cut0"),
    ],
)
def test_lora_gradients_equal_vader(objective: RewardGradient, name: str, tmp_path: Path) -> None:
    policy, golden, _ = make_lora_policy(tmp_path)
    reward: Any = WeightedMeanReward(golden["reward_w"].transpose(1, 2))
    ctx: Context[Any] = Context(
        policy,
        Rubric({"weighted_mean": WeightedReward(reward, reward)}),
        recorded_noise(golden),
        SingleProcess(),
        NoState(),
    )
    experience = objective.collect(ctx, PromptBatch(("prompt",), ({},)))
    loss = objective.loss(ctx, experience, 0)
    torch.testing.assert_close(loss.metrics["reward/mean"][0], golden["reward"], rtol=1e-5, atol=1e-8)
    loss.rows.sum().backward()
    grads = {key: p.grad for key, p in policy.weights.trainable().items() if p.grad is not None}
    assert len(grads) == len(policy.weights.trainable())
    norm = torch.stack([x.norm() for x in grads.values()]).norm()
    torch.testing.assert_close(norm, golden[f"gradnorm.{name}"], rtol=5e-5, atol=0)
    recorded = {key: x for key, x in golden.items() if key.startswith(f"grad.{name}.")}
    assert len(recorded) == 6
    names = lvdm_checkpoint.original_lora_layers([key.partition(".lora_")[0] for key in grads], policy.model.net)
    for key, expected in recorded.items():
        layer, _, factor = key.removeprefix(f"grad.{name}.base_model.model.").partition(".lora_")
        assert_close(grads[f"{names[layer]}.lora_{factor.replace('default.', '')}"], expected, 5e-5)


@pytest.mark.slow
def test_vader_lora_round_trip(tmp_path: Path) -> None:
    policy, _, file = make_lora_policy(tmp_path)
    weights = policy.weights
    assert isinstance(weights, LoraWeights) and (weights.config.r, weights.config.lora_alpha) == (4, 8)
    write_original_lora(weights, VideocrafterSpec.layout, tmp_path / "exported.pt")
    before, after = (torch.load(path, weights_only=True) for path in (file, tmp_path / "exported.pt"))
    assert before.keys() == after.keys() and all(x.equal(after[key]) for key, x in before.items())


@pytest.mark.slow
def test_lora_of_another_alpha_is_rescaled_on_export(tmp_path: Path) -> None:
    policy, _, file = make_lora_policy(tmp_path)
    weights = policy.weights
    assert isinstance(weights, LoraWeights)
    weights.config.lora_alpha = 16
    write_original_lora(weights, VideocrafterSpec.layout, tmp_path / "exported.pt")
    before, after = (torch.load(path, weights_only=True) for path in (file, tmp_path / "exported.pt"))
    for key, x in before.items():
        assert (2 * x if "lora_B" in key else x).equal(after[key])


def test_number_of_vader_lora_layers() -> None:
    with parameters_on_meta():
        net: Any = VideoUnet(**VIDEOCRAFTER.configs[VideocrafterSpec.weights]["unet"])
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in names if name.endswith(("to_q", "to_k", "to_v"))]
    assert len(targets) == 198
    modules = dict(net.named_modules())
    assert sum(modules[name].in_features + modules[name].out_features for name in targets) == 313_472
    original_names = lvdm_checkpoint.original_lora_layers(targets, net)
    layer = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    assert original_names[layer] == "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def test_only_selected_frames_are_decoded_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = VideocrafterSpec().tiny().load(Placement())
    batch_sizes: list[int] = []
    decode = model.autoencoder.net.decode

    def counting_decode(latents: Tensor, return_dict: bool) -> Any:
        batch_sizes.append(len(latents))
        return decode(latents, return_dict=return_dict)

    monkeypatch.setattr(model.autoencoder.net, "decode", counting_decode)
    monkeypatch.setattr("tastemaker.models.image_backbone.DECODE_BATCH_LATENTS", 2 * model.shape[2] * model.shape[3])
    x = torch.randn(3, *model.shape)
    full = model.decode(x)
    assert batch_sizes == [2, 2, 2, 2, 1]
    batch_sizes.clear()
    assert (model.decode(x, [1]) - full[:, 1:2]).abs().max() < 1e-5 and batch_sizes == [2, 1]


def test_dropout_is_off_in_training() -> None:
    model = VideocrafterSpec().tiny().load(Placement())
    cond, x, t = model.embed(("a fox",)), torch.randn(1, *model.shape), torch.tensor([0.5])
    assert model.predict(x, t, cond).equal(model.predict(x, t, cond))
    assert isinstance(model.unguided.embed(("", "b")), Condition)
    assert isinstance(model.autoencoder, FrozenVae)
