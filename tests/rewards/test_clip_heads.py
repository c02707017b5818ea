"""Heads on CLIP's image encoder: published layouts, the shared encoder, gradients and refused files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from published_files import require_file
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.data.image_io import to_uint8
from tastemaker.models.downloads import download, download_heads, required_heads
from tastemaker.rewards.clip_heads import (
    LAION_LAYOUT,
    VADER_HEADS,
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


class PublishedHead(nn.Module):
    """A head in the layout of its published checkpoint."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)[:, 0]
        return out


def laion_head(width: int = 768) -> PublishedHead:
    first = (nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2), nn.Linear(128, 64))
    return PublishedHead(*first, nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1))


def relu_head(*widths: int) -> PublishedHead:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU(), nn.Dropout(0.2)]
    return PublishedHead(*layers[:-2])


def save_state_dict(net: nn.Module, path: Path) -> Path:
    torch.save(OrderedDict(net.state_dict()), path)
    return path


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (laion_head, LAION_LAYOUT),
        (lambda: relu_head(768, 512, 128, 32, 1), VADER_LAYOUT),  # the published checkpoint
        (lambda: relu_head(768, 512, 256, 128, 32, 1), VADER_LAYOUT),  # the class published with it
    ],
)
def test_published_head_matches_its_reference_class(
    make: Callable[[], PublishedHead], layout: HeadLayout, tmp_path: Path
) -> None:
    net = make().eval()
    head = read_head(save_state_dict(net, tmp_path / "head.pth"), layout)
    features = nn.functional.normalize(random(6, 768) - 0.5, dim=1)
    torch.testing.assert_close(head(features), net(features), rtol=0, atol=1e-7)


def test_single_linear_layer_is_read_as_a_head(tmp_path: Path) -> None:
    net = nn.Linear(768, 1)
    head = read_head(save_state_dict(net, tmp_path / "sa_0_4_vit_l_14_linear.pth"), LAION_LAYOUT)
    features = nn.functional.normalize(random(6, 768) - 0.5, dim=1)
    torch.testing.assert_close(head(features), net(features)[:, 0])


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
def test_real_heads_match_scores_recorded_from_vader(file: str, sha256: str, layout: HeadLayout, column: str) -> None:
    head, golden = read_head(require_file(file, sha256, VADER), layout), load_file(GOLDEN)
    scores = head(golden["embed"])
    scores = scores.sigmoid() if column in ("rainy", "snowy") else scores
    torch.testing.assert_close(scores, golden[column], rtol=1e-5, atol=1e-5)


def fitted_head(column: str) -> PublishedHead:
    """A head that computes the recorded scores of the published one, by another affine map."""
    golden = load_file(GOLDEN)
    outputs = golden[column].logit() if column in ("rainy", "snowy") else golden[column]
    head = PublishedHead(nn.Linear(768, 1))
    head.layers[0].weight.data = torch.linalg.lstsq(golden["embed"], outputs[:, None]).solution.T
    head.layers[0].bias.data.zero_()
    return head


def test_published_head_of_another_kind_is_refused_by_its_scores(clip: Path, tmp_path: Path) -> None:
    specs: dict[str, Spec] = {
        "aesthetic": AestheticReward(str(clip)),
        "rainy": WeatherReward("rainy", str(clip)),
        "snowy": WeatherReward("snowy", str(clip)),
    }
    for column in specs:
        path = save_state_dict(fitted_head(column), tmp_path / f"{column}.pt")
        for asked, spec in specs.items():
            code = "TM379" if asked == column else "TM885"  # the right head then fails on the tiny CLIP's width
            with pytest.raises(ConfigError, match=code):
                replace(spec, head=str(path)).load(Placement())
    random_head = save_state_dict(laion_head(), tmp_path / "snowy_reward.pt")
    with pytest.raises(ConfigError, match=r"snowy_reward\.pt.*head of snow.*TM886"):
        replace(specs["snowy"], head=str(random_head)).load(Placement())
    with pytest.raises(ConfigError, match=r"snowy_reward\.pt.*head of rain.*TM881"):
        replace(specs["rainy"], head=str(random_head)).load(Placement())
    with pytest.raises(ConfigError, match=r"aesthetic-model\.pth or sac.*aesthetic\.pt.*TM880"):
        replace(specs["aesthetic"], head=str(tmp_path)).load(Placement())


def test_download_fetches_the_heads_of_vader_and_checks_them(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published"
    published.mkdir()
    for file, source in VADER_HEADS.items():
        monkeypatch.setitem(VADER_HEADS, file, replace(source, url=(published / file).as_uri()))
        assert source.url == f"https://github.com/mihirp1998/VADER/raw/HEAD/assets/{file}"
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *names: tmp_path.joinpath("assets", *names))
    monkeypatch.chdir(tmp_path)
    console = Console(quiet=True)
    with pytest.raises(ConfigError, match=r"snowy_reward\.pt.*tastemaker download vader-heads.*TM378"):
        WeatherReward("snowy", str(clip)).load(Placement())
    save_state_dict(fitted_head("snowy"), published / "snowy_reward.pt")
    download(["{type: clipped, max: 1, reward: {type: weather, kind: snowy}}"], only_list=True, console=console)
    assert not VADER_HEADS["snowy_reward.pt"].path.is_file()
    download_heads(required_heads("{type: weather, kind: snowy}"), only_list=False, console=console)
    with pytest.raises(ConfigError, match="TM379"):  # the head is found, and wider than the tiny CLIP
        WeatherReward("snowy", str(clip)).load(Placement())
    save_state_dict(fitted_head("snowy"), published / "rainy_reward.pt")
    with pytest.raises(ConfigError, match=r"rainy_reward\.pt.*head of snow.*TM885"):
        download_heads(required_heads("rainy"), only_list=False, console=console)
    assert not VADER_HEADS["rainy_reward.pt"].path.is_file()
    needed = [required_heads(name) for name in ("vader-heads", "vader-videocrafter2-compression", "aesthetic")]
    assert [len(heads) for heads in needed] == [3, 1, 0]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random CLIP in the layout of the Hugging Face Hub."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**small, "image_size": 56, "patch_size": 14}  # its default projection width of 512 is wrong here
    config = CLIPConfig(text_config={**small, "vocab_size": 99}, vision_config=vision, projection_dim=24)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    CLIPModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(clip: Path) -> Path:
    torch.manual_seed(1)
    net = laion_head(24)
    with torch.no_grad():
        for weights in net.parameters():
            weights *= 2  # larger weights separate images as a trained head does
    return save_state_dict(net, clip / "head.pth")


@pytest.mark.parametrize("resize_mode", ["crop", "stretch"])
def test_scores_match_transformers_clip_with_its_processor(clip: Path, head: Path, resize_mode: Any) -> None:
    from transformers import CLIPImageProcessorPil, CLIPModel

    pixels = nn.functional.interpolate(random(3, 3, 12, 16), (120, 160), mode="bicubic").clamp(0, 1)
    images = [Image.fromarray(to_uint8(image)) for image in pixels]
    sizes: dict[str, Any] = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    if resize_mode == "stretch":
        sizes = {"size": {"height": 56, "width": 56}, "do_center_crop": False, "resample": 2}
    inputs = CLIPImageProcessorPil(**sizes)(images, return_tensors="pt")
    with torch.no_grad():
        features = CLIPModel.from_pretrained(clip).get_image_features(**inputs).pooler_output
    net = laion_head(24)
    net.load_state_dict(torch.load(head, weights_only=True))
    expected = net.eval()(nn.functional.normalize(features, dim=1))
    scores = (
        AestheticReward(str(clip), str(head), resize_mode).load(Placement()).score(pixels[:, None], [""] * 3, [{}] * 3)
    )
    assert (scores - expected).abs().max() < 0.03 * expected.std()


def head_output(scorer: ClipHeadScorer, pixels: Tensor) -> Tensor:
    output: Tensor = scorer.head(scorer.encoder.embed(pixels[:, 0], scorer.spec.resize_mode))
    return output


def test_rewards_share_one_image_encoder(clip: Path, head: Path) -> None:
    specs = AestheticReward(str(clip), str(head)), WeatherReward(weights=str(clip), head=str(head))
    aesthetic, weather = (spec.load(Placement()) for spec in specs)
    assert aesthetic.encoder is weather.encoder
    assert aesthetic.encoder is not specs[0].load(Placement(dtype=torch.bfloat16)).encoder
    assert not any(p.requires_grad for p in [*weather.head.parameters(), *weather.encoder.net.parameters()])


def test_weather_is_a_probability_and_compression_a_signed_size() -> None:
    pixels, rest = random(2, 1, 3, 40, 50), ([""] * 2, [{}] * 2)
    weather = WeatherReward().tiny().load(Placement())
    torch.testing.assert_close(weather.score(pixels, *rest), head_output(weather, pixels).sigmoid())
    small, large = (
        CompressionScoreReward(sign).tiny().load(Placement()) for sign in ("compressible", "incompressible")
    )
    torch.testing.assert_close(small.score(pixels, *rest), -large.score(pixels, *rest))
    torch.testing.assert_close(large.score(pixels, *rest), head_output(large, pixels))


def test_target_turns_the_score_into_a_negative_distance() -> None:
    pixels = random(2, 1, 3, 40, 50)
    untargeted, targeted = (AestheticReward(target=target).tiny().load(Placement()) for target in (None, 10.0))
    expected = -(untargeted.score(pixels, [""] * 2, [{}] * 2) - 10).abs()
    torch.testing.assert_close(targeted.score(pixels, [""] * 2, [{}] * 2), expected)


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
def test_bfloat16_network_gives_float32_scores(spec: Spec) -> None:
    pixels = random(3, 1, 3, 64, 64)
    float32, bfloat16 = (
        spec.tiny().load(Placement(dtype=dtype)).score(pixels, [""] * 3, [{}] * 3)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert bfloat16.dtype == torch.float32
    torch.testing.assert_close(bfloat16, float32, rtol=0.02, atol=0.002)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (511, 3)])
@pytest.mark.parametrize("resize_mode", ["crop", "stretch"])
def test_images_of_any_size_are_scored(size: tuple[int, int], resize_mode: Any) -> None:
    scorer = AestheticReward(resize_mode=resize_mode).tiny().load(Placement())
    assert scorer.score(random(1, 1, 3, *size), [""], [{}]).isfinite().all()


def test_nan_pixels_are_refused() -> None:
    spec = AestheticReward().tiny()
    with pytest.raises(RuntimeError, match=r"NaN.*TM114"):
        Rubric({"aesthetic": WeightedReward(spec, spec.load(Placement()))}).score(
            torch.full((1, 1, 3, 8, 8), float("nan")), [""]
        )


def test_missing_weights_name_file_and_source(clip: Path) -> None:
    for spec, pattern in [
        (
            AestheticReward("nobody/nothing"),
            "'nobody/nothing'.*openai/clip-vit-large",
        ),
        (
            AestheticReward(str(clip), "missing.pth"),
            "'missing.pth'.*trl-lib/ddpo",
        ),
        (
            WeatherReward("snowy", str(clip)),
            "'snowy_reward.pt'.*assets/snowy_reward.pt.*vader-heads",
        ),
        (CompressionScoreReward(weights=str(clip)), "'compression_reward.pt'"),
    ]:
        with pytest.raises(ConfigError, match=pattern):
            spec.load(Placement())


def test_unusable_head_files_are_refused(clip: Path, head: Path, tmp_path: Path) -> None:
    sized = save_state_dict(relu_head(24, 16, 8, 4, 1), tmp_path / "size.pt")
    with pytest.raises(ConfigError, match=r"layers \[0, 2, 4, 6, 7\].*TM380"):
        AestheticReward(str(clip), str(sized)).load(Placement())
    with pytest.raises(ConfigError, match=r"layers \[0, 3, 6, 9\].*TM380"):
        CompressionScoreReward(weights=str(clip), head=str(head)).load(Placement())
    wide = save_state_dict(laion_head(32), tmp_path / "wide.pth")
    with pytest.raises(ConfigError, match=r"32.*24.*TM379"):
        AestheticReward(str(clip), str(wide)).load(Placement())
    cut = tmp_path / "cut.pth"
    cut.write_bytes(head.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"cut\.pth.*readable.*TM520"):
        AestheticReward(str(clip), str(cut)).load(Placement())
    broken = laion_head(24).state_dict()
    broken["layers.2.weight"] = torch.zeros(128, 7)
    torch.save(broken, tmp_path / "broken.pth")
    with pytest.raises(ConfigError, match=r"another network.*TM509"):
        AestheticReward(str(clip), str(tmp_path / "broken.pth")).load(Placement())


def test_truncated_encoder_file_is_refused(clip: Path, head: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((clip / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((clip / "model.safetensors").read_bytes()[:20000])
    with pytest.raises(ConfigError, match=r"readable safetensors.*TM506"):
        AestheticReward(str(tmp_path), str(head)).load(Placement())
