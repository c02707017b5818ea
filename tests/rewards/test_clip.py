"""CLIP, AltCLIP, SigLIP and SigLIP 2 checkpoints score images as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_clip import SPECIAL_TOKENS, TOWER, build_clip, random_clip, save_checkpoint
from torch import Tensor
from transformers import (
    AltCLIPConfig,
    AltCLIPModel,
    AutoTokenizer,
    CLIPImageProcessorPil,
    Siglip2Config,
    Siglip2ImageProcessorPil,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.preprocessing import NaflexPreprocessing
from tastemaker.rewards.backbones.tokenizers import tiny_clip_tokenizer
from tastemaker.rewards.clip import ClipReward
from tastemaker.rewards.clip_iqa import ClipIqaReward
from tastemaker.rewards.pickscore import PickScoreReward

PROMPTS = ["a red cat", "", "Two dogs & a boat, it's late", "word " * 2000]
SMALL = {"hidden_size": 64, "num_attention_heads": 2, **TOWER}
VISION_CONFIG = {**SMALL, "image_size": 28, "patch_size": 14}
TEXT_CONFIG = {**SMALL, **SPECIAL_TOKENS, "vocab_size": 520, "max_position_embeddings": 64}
NO_METADATA: list[dict[str, Any]] = [{}] * 4


def smooth_images(height: int, width: int) -> list[Image.Image]:
    """Four smooth 8-bit images, as processors expect them."""
    generator = torch.Generator().manual_seed(height)
    rough = torch.rand(4, 3, 9, 11, generator=generator)
    smooth = torch.nn.functional.interpolate(rough, (height, width), mode="bicubic").clamp(0, 1)
    return [Image.fromarray((255 * x).round().byte().permute(1, 2, 0).numpy()) for x in smooth]


def to_pixels(images: list[Image.Image]) -> Tensor:
    rows = [torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8).view(p.height, p.width, 3) for p in images]
    return torch.stack(rows).permute(0, 3, 1, 2)[:, None] / 255


def clip_case() -> tuple[Any, Any]:
    return build_clip(), CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)


def altclip_case() -> tuple[Any, Any]:
    text = {**SMALL, **SPECIAL_TOKENS, "vocab_size": 520, "project_dim": 48, "max_position_embeddings": 700}
    config = AltCLIPConfig(text_config=text, vision_config=VISION_CONFIG, projection_dim=32)
    return random_clip(AltCLIPModel, config), clip_case()[1]


def siglip_case() -> tuple[Any, Any]:
    config = SiglipConfig(text_config=TEXT_CONFIG, vision_config=VISION_CONFIG)
    return random_clip(SiglipModel, config), SiglipImageProcessorPil(size={"height": 28, "width": 28})


def siglip2_case() -> tuple[Any, Any]:
    config = Siglip2Config(text_config=TEXT_CONFIG, vision_config={**SMALL, "patch_size": 14, "num_patches": 16})
    return random_clip(Siglip2Model, config), Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)


CASES = {"clip": clip_case, "altclip": altclip_case, "siglip": siglip_case, "siglip2": siglip2_case}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    net, processor = CASES[request.param]()
    return net, processor, save_checkpoint(net, tmp_path_factory.mktemp(request.param), processor)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(28, 28), (61, 97), (130, 45)])
def test_logits_match_transformers(case: tuple[Any, Any, str], shape: tuple[int, int]) -> None:
    net, processor, folder = case
    images, kind = smooth_images(*shape), net.config.model_type
    length = 64 if kind.startswith("siglip") else 77
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    if kind.startswith("siglip"):
        texts.pop("attention_mask")  # SigLIP was trained without a mask over padding
    expected = net(**texts, **processor(images, return_tensors="pt")).logits_per_image.diagonal()
    scores = ClipReward(weights=folder, output="logit").load(Placement()).score(to_pixels(images), PROMPTS, NO_METADATA)
    assert expected.std() > 0.05 * float(net.logit_scale.exp())
    # Processors round resized images to 8 bits, which moves the features of so small a network.
    tolerance = 1e-5 if shape == (28, 28) and kind != "siglip2" else 0.02
    torch.testing.assert_close(scores, expected, atol=tolerance * float(net.logit_scale.exp()), rtol=1e-5)


@torch.no_grad()
def test_logit_and_probability_follow_from_the_cosine(tmp_path: Path) -> None:
    net, processor = siglip_case()
    net.logit_scale.data.fill_(2.0)
    net.logit_bias.data.fill_(-1.5)
    folder = save_checkpoint(net, tmp_path, processor)
    pixels = to_pixels(smooth_images(28, 28))
    cosine, logit, probability, divided = (
        spec.load(Placement()).score(pixels, PROMPTS, NO_METADATA)
        for spec in (
            ClipReward(weights=folder),
            ClipReward(weights=folder, output="logit"),
            ClipReward(weights=folder, output="probability"),
            ClipReward(weights=folder, output="logit", divide_by=100),
        )
    )
    torch.testing.assert_close(logit, cosine * torch.tensor(2.0).exp() - 1.5)
    torch.testing.assert_close(probability, logit.sigmoid())
    torch.testing.assert_close(divided, logit / 100)


@torch.no_grad()
def test_clip_iqa_is_the_softmax_of_opposite_texts(tmp_path: Path) -> None:
    net, processor = clip_case()
    net.logit_scale.data.fill_(2.5)
    folder = save_checkpoint(net, tmp_path, processor)
    images = smooth_images(28, 28)
    pairs = ["Good photo.", "Bad photo.", "Sharp photo.", "Blurry photo."]
    texts = AutoTokenizer.from_pretrained(folder)(pairs, padding="max_length", max_length=77, return_tensors="pt")
    logits = net(**texts, **processor(images, return_tensors="pt")).logits_per_image  # [4, 4]
    quality, sharpness = logits[:, :2].softmax(1)[:, 0], logits[:, 2:].softmax(1)[:, 0]
    for attributes, expected in ((("quality",), quality), (("quality", "sharpness"), (quality + sharpness) / 2)):
        scorer = ClipIqaReward(attributes, weights=folder).load(Placement())
        scores = scorer.score(to_pixels(images), PROMPTS, NO_METADATA)
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    assert quality.std() > 0.01


def test_clip_iqa_has_gradients_and_needs_an_attribute() -> None:
    pixels = to_pixels(smooth_images(28, 28)).requires_grad_()
    ClipIqaReward().tiny().load(Placement()).score(pixels, PROMPTS, NO_METADATA).sum().backward()
    assert pixels.grad is not None and pixels.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"attributes.*TM866"):
        ClipIqaReward(())


def test_divide_by_is_refused_for_probability() -> None:
    with pytest.raises(ValueError, match=r"divide.*TM377"):
        ClipReward(output="probability", divide_by=2)


@torch.no_grad()
def test_larger_images_interpolate_position_embeddings(tmp_path: Path) -> None:
    net = build_clip()
    folder = save_checkpoint(net, tmp_path)
    images = smooth_images(56, 56)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=56)
    ids = tiny_clip_tokenizer()(PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    out = net(**ids, **processor(images, return_tensors="pt"), interpolate_pos_encoding=True)
    scores = ClipReward(weights=folder, image_size=56).load(Placement()).score(to_pixels(images), PROMPTS, NO_METADATA)
    torch.testing.assert_close(scores, (out.image_embeds * out.text_embeds).sum(1), atol=1e-5, rtol=0)


@torch.no_grad()
def test_pickscore_is_cosine_times_logit_scale_at_any_precision(tmp_path: Path) -> None:
    net = build_clip(logit_scale_init_value=4.6052)
    folder = save_checkpoint(net, tmp_path)
    pixels = to_pixels(smooth_images(61, 97))
    cosine = ClipReward(weights=folder).load(Placement()).score(pixels, PROMPTS, NO_METADATA)
    score = PickScoreReward(weights=folder).load(Placement()).score(pixels, PROMPTS, NO_METADATA)
    torch.testing.assert_close(score, cosine * torch.tensor(4.6052).exp())
    torch.testing.assert_close(
        PickScoreReward(weights=folder, divide_by=26).load(Placement()).score(pixels, PROMPTS, NO_METADATA), score / 26
    )
    # 4.6052 in sixteen bits would be 4.59375, and its exponential 98.9.
    half = PickScoreReward(weights=folder).load(Placement(dtype=torch.bfloat16))
    assert half.head.scale == pytest.approx(100.0, abs=0.01)


@torch.no_grad()
def test_missing_processor_files_fall_back_to_clip_defaults(tmp_path: Path) -> None:
    folder = save_checkpoint(build_clip(), tmp_path / "complete")
    bare = Path(save_checkpoint(build_clip(), tmp_path / "bare"))
    for file in bare.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    pixels = to_pixels(smooth_images(61, 97))
    expected = PickScoreReward(weights=folder).load(Placement()).score(pixels, PROMPTS, NO_METADATA)
    for weights in (bare, bare / "model.safetensors"):
        scores = (
            PickScoreReward(weights=str(weights), tokenizer=folder)
            .load(Placement())
            .score(pixels, PROMPTS, NO_METADATA)
        )
        torch.testing.assert_close(scores, expected)


def test_published_altclip_layer_names_are_read(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = save_checkpoint(altclip_case()[0], tmp_path)
    with safe_open(Path(folder, "model.safetensors"), "pt") as file:
        assert "text_model.roberta.encoder.layer.0.output.dense.weight" in file.keys()  # noqa: SIM118
    ClipReward(weights=folder).load(Placement())


def test_unusable_checkpoint_directories_are_refused(tmp_path: Path) -> None:
    folder = Path(save_checkpoint(siglip_case()[0], tmp_path / "siglip", siglip_case()[1]))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer.*TM371"):  # another tokenizer would give wrong scores silently
        ClipReward(weights=str(folder)).load(Placement())
    other = Path(save_checkpoint(build_clip(), tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(ConfigError, match=r"'bert'.*altclip.*TM352"):
        ClipReward(weights=str(other)).load(Placement())
    (other / "config.json").write_text(json.dumps(config))
    (other / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 32}, "crop_size": 28}))
    with pytest.raises(ConfigError, match=r"sizes \[32, 28\].*TM353"):
        ClipReward(weights=str(other)).load(Placement())
    (other / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"JSON.*TM354"):
        ClipReward(weights=str(other)).load(Placement())
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match=r"readable safetensors.*TM506"):
        ClipReward(weights=str(other)).load(Placement())


def test_naflex_patches_match_transformers() -> None:
    for shape in [(16, 16), (100, 37), (512, 512), (33, 700), (1, 1)]:
        images = smooth_images(*shape)
        expected = Siglip2ImageProcessorPil()(images, return_tensors="pt")
        patches = NaflexPreprocessing()(to_pixels(images)[:, 0])
        assert patches["spatial_shapes"].tolist() == expected["spatial_shapes"].tolist()
        assert patches["pixel_attention_mask"].tolist() == expected["pixel_attention_mask"].tolist()
        # PIL rounds to 8 bits after either direction, so by one level at most, and by a third of one on average.
        levels = (patches["pixel_values"] - expected["pixel_values"]).abs() * 255 / 2
        assert float(levels.max()) <= 1.001
        assert float(levels.mean()) <= 0.36


def test_naflex_preprocessing_passes_gradcheck() -> None:
    torch.manual_seed(0)
    image = torch.rand(1, 3, 10, 17, dtype=torch.float64, requires_grad=True)
    preprocessing = NaflexPreprocessing(patch_size=8, max_patches=6)
    assert torch.autograd.gradcheck(lambda x: preprocessing(x)["pixel_values"], image)
