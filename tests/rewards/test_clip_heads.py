"""Heads on CLIP's picture tower: published layouts, the shared tower, gradients and sentences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from published_files import require_file
from safetensors.torch import load_file
from torch import Tensor, nn

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.image_io import to_uint8
from tastemaker.rewards.clip_heads import (
    LAION_LAYOUT,
    VADER_LAYOUT,
    AestheticReward,
    ClipHeadScorer,
    CompressionScoreReward,
    HeadLayout,
    WeatherReward,
    read_head,
)

GOLDEN = Path(__file__).parents[1] / "fixtures/video/vader_reward_heads_io.safetensors"
Spec = AestheticReward | WeatherReward | CompressionScoreReward


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class Published(nn.Module):
    """A head as its makers wrote it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)[:, 0]
        return out


def laion(width: int = 768) -> Published:
    first = (nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2), nn.Linear(128, 64))
    return Published(*first, nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1))


def rectified(*widths: int) -> Published:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.2)]
    return Published(*layers[:-2])


def written(net: nn.Module, path: Path) -> Path:
    torch.save(OrderedDict(net.state_dict()), path)
    return path


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (laion, LAION_LAYOUT),
        (lambda: rectified(768, 512, 128, 32, 1), VADER_LAYOUT),  # the checkpoint that was published
        (lambda: rectified(768, 512, 256, 128, 32, 1), VADER_LAYOUT),  # the class that was published beside it
    ],
)
def test_a_published_head_says_what_its_makers_class_says(
    make: Callable[[], Published], layout: HeadLayout, tmp_path: Path
) -> None:
    net = make().eval()
    head = read_head(written(net, tmp_path / "head.pth"), layout)
    unit = nn.functional.normalize(random(6, 768) - 0.5, dim=1)
    torch.testing.assert_close(head(unit), net(unit), rtol=0, atol=1e-7)


def test_the_first_predictors_single_layer_is_a_head_too(tmp_path: Path) -> None:
    net = nn.Linear(768, 1)
    head = read_head(written(net, tmp_path / "sa_0_4_vit_l_14_linear.pth"), LAION_LAYOUT)
    unit = nn.functional.normalize(random(6, 768) - 0.5, dim=1)
    torch.testing.assert_close(head(unit), net(unit)[:, 0])


VADER = "copy it from the assets of github.com/mihirp1998/VADER"


@pytest.mark.parametrize(
    ("file", "sha256", "layout", "column"),
    [
        (
            "sac+logos+ava1-l14-linearMSE.pth",
            "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0",
            LAION_LAYOUT,
            "aesthetic",
        ),
        ("rainy_reward.pt", "", LAION_LAYOUT, "rainy"),
        ("snowy_reward.pt", "", LAION_LAYOUT, "snowy"),
        ("compression_reward.pt", "", VADER_LAYOUT, "compression_as_shipped_ckpt"),
    ],
)
def test_the_real_heads_say_what_they_said_in_vader(file: str, sha256: str, layout: HeadLayout, column: str) -> None:
    head, golden = read_head(require_file(file, sha256, VADER), layout), load_file(GOLDEN)
    found = head(golden["embed"])
    found = found.sigmoid() if column in ("rainy", "snowy") else found
    torch.testing.assert_close(found, golden[column], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole CLIP, small and random, in the hub's layout."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**small, "image_size": 56, "patch_size": 14}  # and 512 as the width of its projection, which is not so
    config = CLIPConfig(text_config={**small, "vocab_size": 99}, vision_config=vision, projection_dim=24)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    CLIPModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(clip: Path) -> Path:
    torch.manual_seed(1)
    net = laion(24)
    with torch.no_grad():
        for weights in net.parameters():
            weights *= 2  # a trained one tells pictures apart
    return written(net, clip / "head.pth")


@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_scores_are_those_of_transformers_clip_behind_its_own_processor(clip: Path, head: Path, fit: Any) -> None:
    from transformers import CLIPImageProcessorPil, CLIPModel

    pixels = nn.functional.interpolate(random(3, 3, 12, 16), (120, 160), mode="bicubic").clamp(0, 1)
    images = [Image.fromarray(to_uint8(picture)) for picture in pixels]
    sizes: dict[str, Any] = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    if fit == "stretch":
        sizes = {"size": {"height": 56, "width": 56}, "do_center_crop": False, "resample": 2}
    inputs = CLIPImageProcessorPil(**sizes)(images, return_tensors="pt")
    with torch.no_grad():
        seen = CLIPModel.from_pretrained(clip).get_image_features(**inputs).pooler_output
    net = laion(24)
    net.load_state_dict(torch.load(head, weights_only=True))
    expected = net.eval()(nn.functional.normalize(seen, dim=1))
    found = AestheticReward(str(clip), str(head), fit).load(Placement()).score(pixels[:, None], [""] * 3, [{}] * 3)
    assert (found - expected).abs().max() < 0.03 * expected.std()


def head_output(scorer: ClipHeadScorer, pixels: Tensor) -> Tensor:
    output: Tensor = scorer.head(scorer.encoder.embed(pixels[:, 0], scorer.spec.resize_mode))
    return output


def test_several_rewards_look_through_one_tower(clip: Path, head: Path) -> None:
    specs = AestheticReward(str(clip), str(head)), WeatherReward(weights=str(clip), head=str(head))
    aesthetic, weather = (spec.load(Placement()) for spec in specs)
    assert aesthetic.encoder is weather.encoder
    assert aesthetic.encoder is not specs[0].load(Placement(dtype=torch.bfloat16)).encoder
    assert not any(p.requires_grad for p in [*weather.head.parameters(), *weather.encoder.net.parameters()])


def test_weather_is_a_probability_and_compression_a_size_with_a_sign() -> None:
    pixels, rest = random(2, 1, 3, 40, 50), ([""] * 2, [{}] * 2)
    rain = WeatherReward().tiny().load(Placement())
    torch.testing.assert_close(rain.score(pixels, *rest), head_output(rain, pixels).sigmoid())
    small, large = (
        CompressionScoreReward(sign).tiny().load(Placement()) for sign in ("compressible", "incompressible")
    )
    torch.testing.assert_close(small.score(pixels, *rest), -large.score(pixels, *rest))
    torch.testing.assert_close(large.score(pixels, *rest), head_output(large, pixels))


def test_a_target_makes_it_a_distance() -> None:
    pixels = random(2, 1, 3, 40, 50)
    free, aimed = (AestheticReward(target=target).tiny().load(Placement()) for target in (None, 10.0))
    expected = -(free.score(pixels, [""] * 2, [{}] * 2) - 10).abs()
    torch.testing.assert_close(aimed.score(pixels, [""] * 2, [{}] * 2), expected)


@pytest.mark.parametrize(
    "spec",
    [AestheticReward(), AestheticReward(resize_mode="crop", target=10), WeatherReward(), CompressionScoreReward()],
)
def test_gradients_agree_with_finite_differences(spec: Spec) -> None:
    scorer = spec.tiny().load(Placement(dtype=torch.float64))
    pixels = (0.2 + 0.6 * random(1, 1, 3, 33, 40)).double().requires_grad_()
    assert spec.differentiable
    assert torch.autograd.gradcheck(lambda x: scorer.score(x, [""], [{}]), (pixels,), fast_mode=True)


@pytest.mark.parametrize("spec", [AestheticReward(), WeatherReward(), CompressionScoreReward()])
def test_scores_are_exact_numbers_whatever_the_network_computes_in(spec: Spec) -> None:
    pixels = random(3, 1, 3, 64, 64)
    exact, rough = (
        spec.tiny().load(Placement(dtype=dtype)).score(pixels, [""] * 3, [{}] * 3)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.002)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (511, 3)])
@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_pictures_of_any_size_are_scored(size: tuple[int, int], fit: Any) -> None:
    scorer = AestheticReward(resize_mode=fit).tiny().load(Placement())
    assert scorer.score(random(1, 1, 3, *size), [""], [{}]).isfinite().all()


def test_pixels_that_are_no_numbers_are_a_sentence() -> None:
    spec = AestheticReward().tiny()
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        Rubric({"aesthetic": WeightedReward(spec, spec.load(Placement()))}).score(
            torch.full((1, 1, 3, 8, 8), float("nan")), [""]
        )


def test_what_is_not_there_is_a_sentence(clip: Path) -> None:
    for spec, sentence in [
        (
            AestheticReward("nobody/nothing"),
            "'nobody/nothing' were not found; expected a local path, or openai/clip-vit-large",
        ),
        (
            AestheticReward(str(clip), "missing.pth"),
            "'missing.pth' were not found; expected a local path, or trl-lib/ddpo",
        ),
        (
            WeatherReward("snowy", str(clip)),
            "no head at 'snowy_reward.pt'; fetch it from assets/snowy_reward.pt of https",
        ),
        (CompressionScoreReward(weights=str(clip)), "no head at 'compression_reward.pt'"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            spec.load(Placement())


def test_a_wrong_head_is_a_sentence(clip: Path, head: Path, tmp_path: Path) -> None:
    sized = written(rectified(24, 16, 8, 4, 1), tmp_path / "size.pt")
    with pytest.raises(ConfigError, match=r"expected a head of the layers \[0, 2, 4, 6, 7\] or \[0\]"):
        AestheticReward(str(clip), str(sized)).load(Placement())
    with pytest.raises(ConfigError, match=r"expected a head of the layers \[0, 3, 6, 9\] or"):
        CompressionScoreReward(weights=str(clip), head=str(head)).load(Placement())
    wide = written(laion(32), tmp_path / "wide.pth")
    with pytest.raises(ConfigError, match=r"embeddings of width 32, but '.*' has 24"):
        AestheticReward(str(clip), str(wide)).load(Placement())
    cut = tmp_path / "cut.pth"
    cut.write_bytes(head.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        AestheticReward(str(clip), str(cut)).load(Placement())
    broken = laion(24).state_dict()
    broken["layers.2.weight"] = torch.zeros(128, 7)
    torch.save(broken, tmp_path / "broken.pth")
    with pytest.raises(ConfigError, match="another network"):
        AestheticReward(str(clip), str(tmp_path / "broken.pth")).load(Placement())


def test_a_truncated_tower_is_a_sentence(clip: Path, head: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((clip / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((clip / "model.safetensors").read_bytes()[:20000])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        AestheticReward(str(tmp_path), str(head)).load(Placement())
