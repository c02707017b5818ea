"""DINO similarity, CLIP-I and Aesthetic Predictor V2.5, from folders in the layout of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipModel,
)

from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import PretrainedReward
from tastemaker.core.types import Metadata, Placement
from tastemaker.rewards.aesthetic_v25 import AestheticV25Reward
from tastemaker.rewards.image_similarity import ClipImageSimilarityReward, DinoEncoder, DinoSimilarityReward

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 56}
DOUBLE = Placement(dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def save(net: nn.Module, folder: Path) -> str:
    with torch.no_grad():
        for parameter in net.parameters():  # the usual initialization gives every image nearly the same features
            parameter.add_(torch.randn_like(parameter) * 0.2)
    saved: Any = net
    saved.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[PretrainedReward]:
    folder = tmp_path_factory.mktemp("similarity")
    torch.manual_seed(0)
    dino = save(Dinov2Model(Dinov2Config(**SIZES, image_size=224)), folder / "dino")
    clip = CLIPVisionConfig(**SIZES, intermediate_size=64, image_size=224, projection_dim=16)
    return [
        DinoSimilarityReward(weights=dino),
        ClipImageSimilarityReward(weights=save(CLIPVisionModelWithProjection(clip), folder / "clip")),
    ]


def test_similarity_is_one_for_the_reference_and_the_mean_over_several(
    specs: list[PretrainedReward], tmp_path: Path
) -> None:
    pixels = (random(2, 1, 3, 60, 80) * 255).round() / 255
    path = tmp_path / "reference.png"
    Image.fromarray((pixels[0, 0] * 255).round().byte().movedim(0, -1).numpy()).save(path)
    other = random(3, 50, 40, seed=4)
    for spec in specs:
        scorer = spec.load(Placement())
        same, mean = scorer.score(pixels, ["", ""], [{"image": str(path)}, {"image": [pixels[0, 0], other]}]).tolist()
        assert same == pytest.approx(1, abs=1e-5)
        singles = [scorer.score(pixels[1:], [""], [{"image": image}]).item() for image in (pixels[0], other[None])]
        assert mean == pytest.approx(sum(singles) / 2, abs=1e-5)
        assert max(singles) < 0.999
        wrong: list[Metadata] = [{}, {"image": 3}, {"image": [other, None]}, {"image": []}]
        for metadata in wrong:
            with pytest.raises(ValueError, match="TM2120"):
                scorer.score(pixels[1:], [""], [metadata])


def test_similarity_has_the_gradient_of_finite_differences(specs: list[PretrainedReward]) -> None:
    reference = {"image": random(3, 50, 40, seed=4)}
    pixels = random(1, 1, 3, 40, 48).double() * 0.5 + 0.25
    for spec in specs:
        scorer = spec.load(DOUBLE)
        leaf = pixels.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(scorer.score(leaf, [""], [reference]).sum(), leaf)
        step = 1e-5 * gradient / gradient.abs().max()
        ends = [scorer.score(pixels + sign * step, [""], [reference]).item() for sign in (1, -1)]
        assert (gradient * step).sum().item() == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-4)


def test_dinov2_pixels_agree_with_its_processor(specs: list[PretrainedReward]) -> None:
    low = Image.fromarray((random(9, 12, 3) * 255).byte().numpy())
    image = low.resize((400, 300), Image.Resampling.BICUBIC)
    resized = image.resize((341, 256), Image.Resampling.BICUBIC).crop((58, 16, 58 + 224, 16 + 224))
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = (torch.from_numpy(np.array(resized)).movedim(-1, 0) / 255 - mean) / std
    encoder = specs[0].load(Placement()).embed  # type: ignore[attr-defined]
    assert isinstance(encoder, DinoEncoder)
    found = encoder.preprocess(torch.from_numpy(np.array(image)).movedim(-1, 0)[None] / 255)
    assert (found[0] - expected).abs().max() < 1.6 / 255 / 0.22


def test_dino_refuses_other_networks(specs: list[PretrainedReward]) -> None:
    with pytest.raises(ConfigError, match="TM2122"):
        DinoSimilarityReward(weights=specs[1].weights).load(Placement())  # type: ignore[attr-defined]


def test_aesthetic_v25_computes_the_layers_of_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 64}
    text = sizes | {"vocab_size": 20, "max_position_embeddings": 8, "projection_size": 32}
    net: Any = SiglipModel(SiglipConfig(vision_config={**sizes, "image_size": 112}, text_config=text))
    weights = save(net, tmp_path / "siglip")
    head = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((32, 64), (64, 16), (16, 8), (8, 4), (4, 1))))
    state = {
        f"scoring_head.{2 * k}.{name}": x for k, layer in enumerate(head) for name, x in layer.state_dict().items()
    }
    path = tmp_path / "aesthetic_predictor_v2_5.pth"
    torch.save(state, path)
    scorer, pixels = AestheticV25Reward(weights=weights, head=str(path)).load(Placement()), random(3, 1, 3, 112, 112)
    with torch.no_grad():
        features = net.eval().get_image_features((pixels[:, 0] - 0.5) / 0.5).pooler_output
        expected = head(features / features.norm(dim=-1, keepdim=True))[:, 0]
    torch.testing.assert_close(scorer.score(pixels, [""] * 3, [{}] * 3), expected, atol=1e-5, rtol=1e-4)
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scorer.score(leaf, [""] * 3, [{}] * 3).sum(), leaf)
    assert all(gradient[i].abs().max() > 0 for i in range(3))
    torch.save({key: x for key, x in state.items() if "6" not in key}, tmp_path / "other.pth")
    torch.save({**state, "scoring_head.8.weight": torch.zeros(1, 5)}, tmp_path / "shape.pth")
    for file, code in (("missing.pth", "TM2131"), ("other.pth", "TM2132"), ("shape.pth", "TM2132")):
        with pytest.raises(ConfigError, match=code):
            AestheticV25Reward(weights=weights, head=str(tmp_path / file)).load(Placement())
    torch.save({**state, "scoring_head.0.weight": torch.zeros(64, 48)}, tmp_path / "wide.pth")
    with pytest.raises(ConfigError, match="TM2130"):
        AestheticV25Reward(weights="tiny", head=str(tmp_path / "wide.pth")).load(Placement())
