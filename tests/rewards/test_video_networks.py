"""VideoMAE and V-JEPA 2 out of folders in the published layout, against transformers' own."""

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
        # The published file keeps the biases of queries and values apart.
        assert "videomae.encoder.layer.0.attention.attention.q_bias" in file.keys()  # noqa: SIM118
    return path


def picture(height: int, width: int) -> Tensor:
    """Smooth areas and hard edges, as pictures have them: [3, H, W] in whole grey levels."""
    coarse = torch.randint(256, (1, 3, 5, 5), generator=torch.Generator().manual_seed(6)) / 255
    return torch.nn.functional.interpolate(coarse, (height, width), mode="nearest")[0]


def fitted(frame: Tensor, **settings: Any) -> Tensor:
    """What transformers' processor of PIL pictures makes of a frame [3, H, W]."""
    from transformers import VideoMAEImageProcessorPil

    image = Image.fromarray((frame * 255).round().byte().permute(1, 2, 0).numpy())
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    out = VideoMAEImageProcessorPil(image_mean=mean, image_std=std, **settings)([[image]], return_tensors="pt")
    return out["pixel_values"][0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("frames", [2, 6, 16, 20])
def test_clips_of_any_length_score_as_by_a_network_made_for_them(kinetics: Path, frames: int) -> None:
    made, pixels = videomae(frames), clips(2, frames, 32, 32)
    made.load_state_dict(videomae(16).state_dict())
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.no_grad():
        logits = made((pixels - mean) / std).logits
    prompts, places = ["jogging", "A person playing the piano in a hall"], torch.tensor([1, 2])
    expected = -torch.nn.functional.cross_entropy(logits, places, reduction="none")
    torch.testing.assert_close(
        score(ActionReward(weights=str(kinetics)), pixels, prompts), expected, atol=1e-5, rtol=1e-5
    )
    plain = score(ActionReward(weights=str(kinetics), log_prob=False), pixels, prompts)
    torch.testing.assert_close(plain, logits.softmax(-1)[[0, 1], places], atol=1e-6, rtol=1e-5)


def test_positions_are_those_of_transformers() -> None:
    from transformers.models.videomae.modeling_videomae import get_sinusoid_encoding_table

    assert torch.equal(sinusoidal_positions(50, 24), get_sinusoid_encoding_table(50, 24))


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 70), (20, 16)])
def test_frames_are_stretched_as_the_processor_does(kinetics: Path, height: int, width: int) -> None:
    frame = picture(height, width)
    net = ActionReward(weights=str(kinetics)).load(Placement()).net
    theirs = fitted(frame, size={"height": 32, "width": 32}, do_center_crop=False)
    assert (net.preprocessing(frame[None])[0] - theirs).abs().mean() * 0.226 <= 1e-3


def test_an_odd_last_frame_and_every_other_frame_can_be_left_out(kinetics: Path) -> None:
    spec, pixels = ActionReward(weights=str(kinetics)), clips(2, 9)
    prompts = ["jogging", "jogging"]
    assert torch.equal(score(spec, pixels, prompts), score(spec, pixels[:, :8], prompts))
    assert torch.equal(
        score(replace(spec, frame_stride=2), pixels[:, :8], prompts), score(spec, pixels[:, :8:2], prompts)
    )
    with pytest.raises(ValueError, match="2 frames or more"):
        score(spec, pixels[:, :1], prompts)


def test_a_prompt_means_the_first_action_it_names(kinetics: Path) -> None:
    net = ActionReward(weights=str(kinetics)).load(Placement()).net
    assert net.label_id("abseiling", None) == 0  # a label as it is
    assert net.label_id("a violin on a piano", None) == NAMES.index("playing piano")  # VADER's order, not the prompt's
    assert net.label_id("a man is chopping wood", None) == NAMES.index("chopping wood")
    assert net.label_id("a cat", "abseiling") == 0
    assert [*ACTION_ALIASES][:3] == ["piano", "guitar", "doughnuts"] and len(ACTION_ALIASES) == 13


def test_prompts_and_labels_that_name_no_action_are_refused(kinetics: Path) -> None:
    spec = ActionReward(weights=str(kinetics))
    rubric = Rubric({"actpred": WeightedReward(spec, spec.load(Placement()))})
    with pytest.raises(RewardError, match="'a cat' names no action"):
        rubric.score(clips(1, 4), ["a cat"])
    with pytest.raises(ValueError, match=r"the label 'juggling' is no action .* such as 'jogging'"):
        score(replace(spec, label="juggling"), clips(1, 4), ["jogging"])
    with pytest.raises(ValueError, match="names no action"):  # a word of the table whose action this network lacks
        score(spec, clips(1, 4), ["drinking a beer"])


def jepa(crop: int = 32) -> Any:
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    config = VJEPA2Config(
        crop_size=crop, patch_size=8, frames_per_clip=4, hidden_size=36, num_attention_heads=2, num_hidden_layers=2,
        pred_hidden_size=36, pred_num_attention_heads=2, pred_num_hidden_layers=2, initializer_range=0.3,
        pred_zero_init_mask_tokens=False,
    )  # fmt: skip
    return VJEPA2Model(config).eval()


@pytest.fixture(scope="module")
def jepa_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vjepa")
    jepa().save_pretrained(path)
    return path


def test_a_loaded_jepa_encodes_as_transformers_does(jepa_folder: Path) -> None:
    net = VjepaReward(weights=str(jepa_folder)).load(Placement()).net
    seen = net._preprocess(clips(2, 4))
    with torch.no_grad():
        theirs = jepa()(seen)
        places = net.net.encoder.embeddings(seen)
        torch.testing.assert_close(net._encode(places, torch.arange(places.shape[1])), theirs.last_hidden_state)


def test_the_score_is_minus_the_training_loss(jepa_folder: Path) -> None:
    spec = VjepaReward(weights=str(jepa_folder), num_masks=2, seed=5)
    pixels, own, losses = clips(2, 4), jepa(), []
    net = spec.load(Placement()).net
    with torch.no_grad():
        seen = net._preprocess(pixels)
        target = torch.nn.functional.layer_norm(own(seen, skip_predictor=True).last_hidden_state, [36])
        for seed in (5, 6):
            for blocks, share in BLOCKS:
                shown, missing = (x.expand(2, -1) for x in sample_block_mask(2, 4, blocks, share, seed))
                # The context's encoder is given the visible patches alone, with their places.
                context = own.encoder.embeddings(seen).gather(1, shown[..., None].expand(-1, -1, 36))
                for layer in own.encoder.layer:
                    context = layer(context, shown)[0]
                whole = torch.zeros(2, 32, 36).scatter(
                    1, shown[..., None].expand(-1, -1, 36), own.encoder.layernorm(context)
                )
                guess = own.predictor(whole, [shown], [missing]).last_hidden_state
                losses.append((guess - target.gather(1, missing[..., None].expand(-1, -1, 36))).abs().mean((1, 2)))
    torch.testing.assert_close(score(spec, pixels, ["", ""]), -torch.stack(losses).mean(0), atol=1e-5, rtol=1e-5)


def test_what_is_hidden_stays_hidden_from_the_context(jepa_folder: Path) -> None:
    net = VjepaReward(weights=str(jepa_folder)).load(Placement()).net
    shown, missing = sample_block_mask(2, 4, *BLOCKS[0], 0)
    places = torch.rand(1, 32, 36, generator=torch.Generator().manual_seed(0))
    other = places.index_fill(1, missing, 0.0)
    assert torch.equal(net._encode(places, shown), net._encode(other, shown))


def test_masks_are_blocks_through_all_frames_and_the_same_each_time() -> None:
    for blocks, share in BLOCKS:
        shown, missing = sample_block_mask(3, 16, blocks, share, 7)
        assert torch.equal(torch.cat([shown, missing]).sort().values, torch.arange(3 * 256))
        first, *others = [missing[(missing >= k * 256) & (missing < (k + 1) * 256)] - k * 256 for k in range(3)]
        assert all(torch.equal(first, other) for other in others)
        assert share * 0.9 <= len(first) / 256 < 1
        assert torch.equal(sample_block_mask(3, 16, blocks, share, 7)[0], shown)
        assert not torch.equal(sample_block_mask(3, 16, blocks, share, 8)[0], shown)
    assert all(len(part) for part in sample_block_mask(1, 1, 2, 0.7, 0)[:1])  # of a single place something is seen


@pytest.mark.parametrize(("height", "width"), [(64, 64), (50, 70)])
def test_frames_are_cropped_as_the_processor_does(jepa_folder: Path, height: int, width: int) -> None:
    clip = picture(height, width).expand(1, 2, 3, height, width)
    net = VjepaReward(weights=str(jepa_folder)).load(Placement()).net
    enlarged = int(32 * 256 / 224)  # as VJEPA2VideoProcessor, which asks for torchvision
    theirs = fitted(clip[0, 0], size={"shortest_edge": enlarged}, crop_size={"height": 32, "width": 32})
    assert (net._preprocess(clip)[0, 0] - theirs).abs().mean() * 0.226 <= 1e-3


@pytest.mark.parametrize(
    "spec", [ActionReward(label="jogging"), ActionReward(label="jogging", log_prob=False), VjepaReward()]
)
def test_gradients_agree_with_finite_differences(
    spec: ActionReward | VjepaReward, kinetics: Path, jepa_folder: Path
) -> None:
    scorer = replace(spec, weights=str(kinetics if isinstance(spec, ActionReward) else jepa_folder)).load(EXACT)
    pixels = (0.2 + 0.6 * clips(1, 4, 36, 44).double()).requires_grad_()
    step = 1e-6 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    up, down = (scorer.score(pixels.detach() + sign * step, [""], [{}]).item() for sign in (1, -1))
    slope = torch.autograd.grad(scorer.score(pixels, [""], [{}]).sum(), pixels)[0]
    assert (slope * step).sum().item() == pytest.approx((up - down) / 2, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("spec", [ActionReward().tiny(), VjepaReward().tiny()])
@pytest.mark.parametrize("shape", [(64, 64), (512, 320), (1, 1)])
def test_small_ones_score_any_clip_alike_each_time(spec: ActionReward | VjepaReward, shape: tuple[int, int]) -> None:
    pixels = clips(2, 5, *shape).requires_grad_()
    one, two = (
        Rubric({"it": WeightedReward(spec, spec.load(Placement()))}).score(pixels, ["", "x" * 10_000]).total
        for _ in range(2)
    )
    assert torch.equal(one, two) and one.dtype == torch.float32
    assert torch.autograd.grad(one.sum(), pixels)[0].abs().max() > 0
    assert not any(p.requires_grad for p in spec.load(Placement()).net.net.parameters())


@pytest.mark.parametrize("spec", [ActionReward(), VjepaReward()])
def test_weights_that_are_missing_wrong_or_cut_off_are_told_in_a_sentence(
    spec: ActionReward | VjepaReward, kinetics: Path, jepa_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"expected a local path, or {spec.weights} from the hub"):
        replace(spec, weights=spec.weights).load(Placement())
    right, wrong = (kinetics, jepa_folder) if isinstance(spec, ActionReward) else (jepa_folder, kinetics)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((right / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((wrong / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"lacks '.*' and .* more tensors"):
        replace(spec, weights=str(tmp_path)).load(Placement())
    (tmp_path / "model.safetensors").write_bytes((right / "model.safetensors").read_bytes()[:999])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        replace(spec, weights=str(tmp_path)).load(Placement())
