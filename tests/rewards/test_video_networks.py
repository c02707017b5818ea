"""VideoMAE and V-JEPA 2 rewards from published checkpoint layouts match transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardError, RewardSpec, Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.rewards.actpred import ACTION_ALIASES, ActionReward, sinusoidal_positions
from tastemaker.rewards.vjepa import BLOCKS, VjepaReward, sample_block_mask

NAMES = ["abseiling", "jogging", "playing piano", "chopping wood", "playing violin"]
EXACT = Placement(dtype=torch.float64)


def clips(rows: int, frames: int, height: int = 40, width: int = 40) -> Tensor:
    return torch.rand(rows, frames, 3, height, width, generator=torch.Generator().manual_seed(3))


def score(spec: RewardSpec, pixels: Tensor, prompts: list[str], placement: Placement = Placement()) -> Tensor:
    return spec.load(placement).score(pixels, prompts, [{}] * len(prompts))


def videomae(frames: int, seed: int = 0) -> Any:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    torch.manual_seed(seed)
    names = dict(enumerate(NAMES))
    config = VideoMAEConfig(
        image_size=32, patch_size=8, num_frames=frames, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, initializer_range=0.4, id2label=names, label2id={name: k for k, name in names.items()},
    )  # fmt: skip
    return VideoMAEForVideoClassification(config).eval()


@pytest.fixture(scope="module")
def kinetics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("videomae")
    videomae(16).save_pretrained(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        # The published file has separate biases of queries and values.
        assert "videomae.encoder.layer.0.attention.attention.q_bias" in file.keys()  # noqa: SIM118
    return path


def blocky_image(height: int, width: int) -> Tensor:
    """An image of flat areas with hard edges, in 8-bit gray levels: [3, H, W]."""
    coarse = torch.randint(256, (1, 3, 5, 5), generator=torch.Generator().manual_seed(6)) / 255
    return torch.nn.functional.interpolate(coarse, (height, width), mode="nearest")[0]


def processor_frame(frame: Tensor, **settings: Any) -> Tensor:
    """A frame [3, H, W] preprocessed by the PIL image processor of transformers."""
    from transformers import VideoMAEImageProcessorPil

    image = Image.fromarray((frame * 255).round().byte().permute(1, 2, 0).numpy())
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    out = VideoMAEImageProcessorPil(image_mean=mean, image_std=std, **settings)([[image]], return_tensors="pt")
    return out["pixel_values"][0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("frames", [2, 6, 16, 20])
def test_clips_of_any_length_score_like_a_network_of_that_length(kinetics: Path, frames: int) -> None:
    net, pixels = videomae(frames), clips(2, frames, 32, 32)
    net.load_state_dict(videomae(16).state_dict())
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.no_grad():
        logits = net((pixels - mean) / std).logits
    prompts, labels = ["jogging", "A person playing the piano in a hall"], torch.tensor([1, 2])
    expected = -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(
        score(ActionReward(weights=str(kinetics)), pixels, prompts), expected, atol=1e-5, rtol=1e-5
    )
    probability = score(ActionReward(weights=str(kinetics), log_prob=False), pixels, prompts)
    torch.testing.assert_close(probability, logits.softmax(-1)[[0, 1], labels], atol=1e-6, rtol=1e-5)


def test_sinusoidal_positions_match_transformers() -> None:
    from transformers.models.videomae.modeling_videomae import get_sinusoid_encoding_table

    assert torch.equal(sinusoidal_positions(50, 24), get_sinusoid_encoding_table(50, 24))


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 70), (20, 16)])
def test_frames_are_resized_like_the_processor(kinetics: Path, height: int, width: int) -> None:
    frame = blocky_image(height, width)
    net = ActionReward(weights=str(kinetics)).load(Placement()).net
    expected = processor_frame(frame, size={"height": 32, "width": 32}, do_center_crop=False)
    assert (net.preprocessing(frame[None])[0] - expected).abs().mean() * 0.226 <= 1e-3


def test_odd_last_frame_is_dropped_and_frame_stride_skips_frames(kinetics: Path) -> None:
    spec, pixels = ActionReward(weights=str(kinetics)), clips(2, 9)
    prompts = ["jogging", "jogging"]
    assert torch.equal(score(spec, pixels, prompts), score(spec, pixels[:, :8], prompts))
    assert torch.equal(
        score(replace(spec, frame_stride=2), pixels[:, :8], prompts), score(spec, pixels[:, :8:2], prompts)
    )
    with pytest.raises(ValueError, match="2 frames"):
        score(spec, pixels[:, :1], prompts)


def test_prompt_maps_to_the_first_action_of_the_table(kinetics: Path) -> None:
    net = ActionReward(weights=str(kinetics)).load(Placement()).net
    assert net.label_id("abseiling", None) == 0  # an exact label
    assert net.label_id("a violin on a piano", None) == NAMES.index("playing piano")  # VADER's order, not the prompt's
    assert net.label_id("a man is chopping wood", None) == NAMES.index("chopping wood")
    assert net.label_id("a cat", "abseiling") == 0
    assert [*ACTION_ALIASES][:3] == ["piano", "guitar", "doughnuts"] and len(ACTION_ALIASES) == 13


def test_prompts_and_labels_that_name_no_action_are_refused(kinetics: Path) -> None:
    spec = ActionReward(weights=str(kinetics))
    rubric = Rubric({"actpred": WeightedReward(spec, spec.load(Placement()))})
    with pytest.raises(RewardError, match=r"'a cat'.*action"):
        rubric.score(clips(1, 4), ["a cat"])
    with pytest.raises(ValueError, match=r"label 'juggling'.*'jogging'"):
        score(replace(spec, label="juggling"), clips(1, 4), ["jogging"])
    with pytest.raises(
        ValueError, match=r"'drinking a beer'.*action"
    ):  # a word of the table whose action this network lacks
        score(spec, clips(1, 4), ["drinking a beer"])


def vjepa(crop: int = 32) -> Any:
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    config = VJEPA2Config(
        crop_size=crop, patch_size=8, frames_per_clip=4, hidden_size=36, num_attention_heads=2, num_hidden_layers=2,
        pred_hidden_size=36, pred_num_attention_heads=2, pred_num_hidden_layers=2, initializer_range=0.3,
        pred_zero_init_mask_tokens=False,
    )  # fmt: skip
    return VJEPA2Model(config).eval()


@pytest.fixture(scope="module")
def vjepa_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vjepa")
    vjepa().save_pretrained(path)
    return path


def test_loaded_vjepa_encoder_matches_transformers(vjepa_folder: Path) -> None:
    net = VjepaReward(weights=str(vjepa_folder)).load(Placement()).net
    inputs = net._preprocess(clips(2, 4))
    with torch.no_grad():
        expected = vjepa()(inputs)
        patches = net.net.encoder.embeddings(inputs)
        torch.testing.assert_close(net._encode(patches, torch.arange(patches.shape[1])), expected.last_hidden_state)


def test_vjepa_score_is_minus_the_training_loss(vjepa_folder: Path) -> None:
    spec = VjepaReward(weights=str(vjepa_folder), num_masks=2, seed=5)
    pixels, reference, losses = clips(2, 4), vjepa(), []
    net = spec.load(Placement()).net
    with torch.no_grad():
        inputs = net._preprocess(pixels)
        target = torch.nn.functional.layer_norm(reference(inputs, skip_predictor=True).last_hidden_state, [36])
        for seed in (5, 6):
            for blocks, fraction in BLOCKS:
                visible, masked = (x.expand(2, -1) for x in sample_block_mask(2, 4, blocks, fraction, seed))
                # The context encoder gets only the visible patches, with their positions.
                context = reference.encoder.embeddings(inputs).gather(1, visible[..., None].expand(-1, -1, 36))
                for layer in reference.encoder.layer:
                    context = layer(context, visible)[0]
                full_context = torch.zeros(2, 32, 36).scatter(
                    1, visible[..., None].expand(-1, -1, 36), reference.encoder.layernorm(context)
                )
                prediction = reference.predictor(full_context, [visible], [masked]).last_hidden_state
                losses.append((prediction - target.gather(1, masked[..., None].expand(-1, -1, 36))).abs().mean((1, 2)))
    torch.testing.assert_close(score(spec, pixels, ["", ""]), -torch.stack(losses).mean(0), atol=1e-5, rtol=1e-5)


def test_context_encoder_ignores_masked_patches(vjepa_folder: Path) -> None:
    net = VjepaReward(weights=str(vjepa_folder)).load(Placement()).net
    visible, masked = sample_block_mask(2, 4, *BLOCKS[0], 0)
    patches = torch.rand(1, 32, 36, generator=torch.Generator().manual_seed(0))
    other = patches.index_fill(1, masked, 0.0)
    assert torch.equal(net._encode(patches, visible), net._encode(other, visible))


def test_masks_are_deterministic_blocks_across_all_frames() -> None:
    for blocks, fraction in BLOCKS:
        visible, masked = sample_block_mask(3, 16, blocks, fraction, 7)
        assert torch.equal(torch.cat([visible, masked]).sort().values, torch.arange(3 * 256))
        first, *others = [masked[(masked >= k * 256) & (masked < (k + 1) * 256)] - k * 256 for k in range(3)]
        assert all(torch.equal(first, other) for other in others)
        assert fraction * 0.9 <= len(first) / 256 < 1
        assert torch.equal(sample_block_mask(3, 16, blocks, fraction, 7)[0], visible)
        assert not torch.equal(sample_block_mask(3, 16, blocks, fraction, 8)[0], visible)
    assert all(
        len(part) for part in sample_block_mask(1, 1, 2, 0.7, 0)[:1]
    )  # one patch of a single-patch clip stays visible


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 70)])
def test_frames_are_cropped_like_the_processor(vjepa_folder: Path, height: int, width: int) -> None:
    clip = blocky_image(height, width).expand(1, 2, 3, height, width)
    net = VjepaReward(weights=str(vjepa_folder)).load(Placement()).net
    enlarged = int(32 * 256 / 224)  # as in VJEPA2VideoProcessor, which needs torchvision
    expected = processor_frame(clip[0, 0], size={"shortest_edge": enlarged}, crop_size={"height": 32, "width": 32})
    assert (net._preprocess(clip)[0, 0] - expected).abs().mean() * 0.226 <= 1e-3


@pytest.mark.parametrize(
    "spec", [ActionReward(label="jogging"), ActionReward(label="jogging", log_prob=False), VjepaReward()]
)
def test_gradients_agree_with_finite_differences(
    spec: ActionReward | VjepaReward, kinetics: Path, vjepa_folder: Path
) -> None:
    scorer = replace(spec, weights=str(kinetics if isinstance(spec, ActionReward) else vjepa_folder)).load(EXACT)
    pixels = (0.2 + 0.6 * clips(1, 4, 36, 44).double()).requires_grad_()
    step = 1e-6 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    up, down = (scorer.score(pixels.detach() + sign * step, [""], [{}]).item() for sign in (1, -1))
    gradient = torch.autograd.grad(scorer.score(pixels, [""], [{}]).sum(), pixels)[0]
    assert (gradient * step).sum().item() == pytest.approx((up - down) / 2, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("spec", [ActionReward().tiny(), VjepaReward().tiny()])
@pytest.mark.parametrize("shape", [(64, 64), (512, 320), (1, 1)])
def test_tiny_networks_score_any_clip_deterministically(
    spec: ActionReward | VjepaReward, shape: tuple[int, int]
) -> None:
    pixels = clips(2, 5, *shape).requires_grad_()
    first, second = (
        Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, ["", "x" * 10_000]).total
        for _ in range(2)
    )
    assert torch.equal(first, second) and first.dtype == torch.float32
    assert torch.autograd.grad(first.sum(), pixels)[0].abs().max() > 0
    assert not any(p.requires_grad for p in spec.load(Placement()).net.net.parameters())


@pytest.mark.parametrize("spec", [ActionReward(), VjepaReward()])
def test_missing_wrong_or_truncated_weights_are_refused(
    spec: ActionReward | VjepaReward, kinetics: Path, vjepa_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=spec.weights):
        replace(spec, weights=spec.weights).load(Placement())
    correct, wrong = (kinetics, vjepa_folder) if isinstance(spec, ActionReward) else (vjepa_folder, kinetics)
    with pytest.raises(ConfigError, match=r"`weights` of (actpred|vjepa).*TM893"):
        replace(spec, weights=str(wrong)).load(Placement())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((correct / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((wrong / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"lacks '.*more tensors"):
        replace(spec, weights=str(tmp_path)).load(Placement())
    (tmp_path / "model.safetensors").write_bytes((correct / "model.safetensors").read_bytes()[:999])
    with pytest.raises(ConfigError, match="readable safetensors"):
        replace(spec, weights=str(tmp_path)).load(Placement())
